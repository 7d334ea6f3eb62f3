"""The tensors of a quantised checkpoint, read as weights that decode.

Each method that a checkpoint's ``quantization_config`` names has a function here; the weights are
those of :mod:`dynamo_moe.weights.packed_tensors`.

Legend: E experts, N rows (out), K columns (in) of a matrix, G groups of columns, R words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed
from dynamo_moe.weights.packed_tensors import Decoding, decoded


def with_decoded(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors, in which a decoding one takes the place of packed ones.

    Args:
        tensors: The checkpoint's, lazy.
        config: Its ``quantization_config``.
        dtype: Dtype of the decoded weights; None: that of their scales.

    Raises:
        ValueError: If the format, or one of its options, is not one of those that are taken, or a
            tensor does not fit it.
    """
    method = config.get("quant_method")
    if method not in _METHODS:
        raise ValueError(
            f"quantization method {method!r} is not taken; {', '.join(_METHODS)} are: load the "
            "model dequantised by transformers, convert and export that"
        )
    return _METHODS[method](tensors, config, dtype)


def _compressed_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """``pack-quantized`` with 4 bits, of https://github.com/vllm-project/compressed-tensors."""
    if config.get("format") not in ("pack-quantized", "float-quantized"):
        raise ValueError(f"compressed-tensors format {config.get('format')!r} is not taken")
    if config.get("transform_config"):
        raise ValueError("compressed-tensors' transform_config, of rotations, is not taken")
    is_float = config["format"] == "float-quantized"
    wanted = (8, "float") if is_float else (4, "int")
    for name, scheme in (config.get("config_groups") or {}).items():
        weights = scheme.get("weights") or {}
        stored = weights.get("num_bits", wanted[0]), weights.get("type", wanted[1])
        if stored != wanted:
            raise ValueError(f"weights of {stored[0]} bits of {stored[1]!r} ({name}) are not taken")
    if is_float:
        return _with_scales(tensors, "weight_scale", dtype)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind not in _PACKED_NAMES:
            result[name] = tensor
        elif f"{prefix}.weight_packed" not in tensors:
            raise ValueError(f"{name} has no {prefix}.weight_packed")
        elif kind == "weight_packed":
            result[f"{prefix}.weight"] = _int4_of_words(prefix, tensors, dtype)
    return result


_PACKED_NAMES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


def _int4_of_words(
    prefix: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> LazyTensor:
    """Returns the weight of words of eight codes; the codes are those of ``int4``."""
    if f"{prefix}.weight_g_idx" in tensors:
        raise ValueError(f"{prefix}.weight_g_idx: groups in another order are not taken")
    words = tensors[f"{prefix}.weight_packed"]
    scales = tensors.get(f"{prefix}.weight_scale")
    if scales is None:
        raise ValueError(f"{prefix}.weight_packed has no {prefix}.weight_scale")
    rows, columns = words.shape[0], words.shape[1] * 8
    groups = scales.shape[1] if scales.ndim == 2 else 0
    if words.dtype != torch.int32 or scales.shape[0] != rows or not groups or columns % groups:
        raise ValueError(
            f"{prefix}.weight_packed, {list(words.shape)} of {words.dtype}, with scales "
            f"{list(scales.shape)} is not packed in 4 bits"
        )
    zero_points = tensors.get(f"{prefix}.weight_zero_point")
    if zero_points is not None:
        if zero_points.dtype != torch.int32 or list(zero_points.shape) != [-(-rows // 8), groups]:
            raise ValueError(
                f"{prefix}.weight_zero_point, {list(zero_points.shape)} of {zero_points.dtype}, "
                f"must be [{-(-rows // 8)}, {groups}] of torch.int32"
            )
        codes = partial(_codes_by_column, rows=rows)
        zero_points = computed(codes, (zero_points,), (rows, groups), torch.int8)
    weight = PackedWeight(words.view(torch.int8), scales, zero_points)
    return decoded("int4", weight, (rows, columns), dtype or scales.dtype)


def _codes_by_column(words_RG: Tensor, rows: int) -> Tensor:
    """Returns the codes ``[N, G]`` of words ``[N / 8, G]``, eight of which lie in a column."""
    return _codes_of(words_RG).movedim(-1, 1).flatten(0, 1)[:rows].to(torch.int8)


def _gptq(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """GPTQ's and GPTQModel's: ``qweight`` ``[K / 8, N]``, zero points less one but in its v2."""
    _check_option(config, "bits", (4,))
    one = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weight(prefix: str, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> LazyTensor:
        rows, columns, groups = qweight.shape[1], qweight.shape[0] * 8, scales.shape[0]
        codes = partial(_codes_by_row, name=prefix, order=_IN_ORDER, added=one)
        zero_points = computed(codes, (qzeros,), (rows, groups), torch.int8)
        order = tensors.get(f"{prefix}.g_idx")
        if config.get("desc_act"):
            if order is None:
                raise ValueError(f"{prefix}.qweight has no {prefix}.g_idx, and desc_act is set")
            to = dtype or scales.dtype
            parts = (qweight, zero_points, scales, order)
            return computed(_Regrouping(to), parts, (rows, columns), to)
        words = (qweight,) if order is None else (qweight, order)
        pack = partial(_packed_by_column, name=prefix, groups=groups)
        values = computed(pack, words, (rows, columns // 2), torch.int8)
        packed = PackedWeight(values, scales.t(), zero_points)
        return decoded("int4", packed, (rows, columns), dtype or scales.dtype)

    return _by_words(tensors, weight, config, depth=8)


def _awq(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """AutoAWQ's ``gemm``: ``qweight`` ``[K, N / 8]``, whose words have an order of their own."""
    _check_option(config, "bits", (4,))
    _check_option(config, "version", ("gemm", None))

    def weight(prefix: str, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> LazyTensor:
        rows, columns, groups = scales.shape[1], qweight.shape[0], scales.shape[0]
        codes = partial(_codes_by_row, name=prefix, order=_AWQ_ORDER)
        zero_points = computed(codes, (qzeros,), (rows, groups), torch.int8)
        values = computed(_packed_by_row, (qweight,), (rows, columns // 2), torch.int8)
        packed = PackedWeight(values, scales.t(), zero_points)
        return decoded("int4", packed, (rows, columns), dtype or scales.dtype)

    return _by_words(tensors, weight, config, depth=1)


def _by_words(
    tensors: Mapping[str, Tensor],
    weight: Callable[[str, Tensor, Tensor, Tensor], LazyTensor],
    config: Mapping[str, Any],
    depth: int,
) -> dict[str, Tensor]:
    """Returns tensors in which weights take the place of ``qweight``, ``qzeros`` and ``scales``.

    Args:
        tensors: The checkpoint's.
        weight: From a weight's path and these to the weight.
        config: The ``quantization_config``.
        depth: Columns of the matrix (in) that a word of ``qweight`` has codes of; its other codes
            are of other rows.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if f"{prefix}.qweight" not in tensors:
            if kind in ("qzeros", "g_idx"):
                raise ValueError(f"{name} has no {prefix}.qweight")
            result[name] = tensor
        elif kind == "qweight":
            for part in ("qzeros", "scales"):
                if f"{prefix}.{part}" not in tensors:
                    raise ValueError(f"{name} has no {prefix}.{part}")
            qzeros, scales = tensors[f"{prefix}.qzeros"], tensors[f"{prefix}.scales"]
            groups, rows = scales.shape
            columns = tensor.shape[0] * depth
            size = config.get("group_size", -1)
            grouped = groups * size == columns if size > 0 else groups == 1
            fits = tensor.shape[1] * 8 == rows * depth and grouped
            if not fits or tuple(qzeros.shape) != (groups, rows // 8):
                raise ValueError(
                    f"{name}, {list(tensor.shape)}, with scales {list(scales.shape)} and zero "
                    f"points {list(qzeros.shape)} is not packed in 4 bits with groups of {size}"
                )
            result[f"{prefix}.weight"] = weight(prefix, tensor, qzeros, scales)
        elif kind not in ("qzeros", "scales", "g_idx"):
            result[name] = tensor
    return result


def _check_option(config: Mapping[str, Any], name: str, taken: tuple[Any, ...]) -> None:
    value = config.get(name)
    if value not in taken:
        raise ValueError(f"{config['quant_method']} with {name}={value!r} is not taken")


# Which column of eight each 4 bits of a word hold, from the lowest on.
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _codes_of(words: Tensor, order: tuple[int, ...] = _IN_ORDER) -> Tensor:
    """Returns the codes ``[..., 8]`` of words of eight."""
    shifts_8 = torch.arange(0, 32, 4, dtype=torch.int32)
    codes_8 = (words.unsqueeze(-1) >> shifts_8) & 15
    return codes_8[..., torch.tensor(order).argsort()].to(torch.uint8)


def _codes_by_row(words_GR: Tensor, name: str, order: tuple[int, ...], added: int = 0) -> Tensor:
    """Returns the codes ``[N, G]`` of words ``[G, N / 8]``."""
    codes_NG = _codes_of(words_GR, order).flatten(1).t() + added
    if bool((codes_NG > 15).any()):
        raise ValueError(f"{name}.qzeros has a zero point of 16, which is no code of 4 bits")
    return codes_NG.to(torch.int8).contiguous()


def _packed_by_column(
    words_RN: Tensor, group_K: Tensor | None = None, *, name: str, groups: int
) -> Tensor:
    """Returns the bytes ``[N, K / 2]`` of words ``[K / 8, N]``: those of each row's words."""
    columns = 8 * words_RN.shape[0]
    if group_K is not None and not torch.equal(
        group_K.long(), torch.arange(columns) // (columns // groups)
    ):
        raise ValueError(f"{name}.g_idx has columns in another order, and desc_act is not set")
    return words_RN.t().contiguous().view(torch.int8)


def _packed_by_row(words_KR: Tensor) -> Tensor:
    """Returns the bytes ``[N, K / 2]`` of AWQ's words ``[K, N / 8]``."""
    codes_NK = _codes_of(words_KR, _AWQ_ORDER).flatten(1).t()
    return (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).contiguous().view(torch.int8)


@dataclass(frozen=True)
class _Regrouping(Decoding):
    """From GPTQ's tensors to ``[N, K]``, whose columns are in the order of their activations."""

    dtype: torch.dtype

    def __call__(
        self, words_RN: Tensor, zero_points_NG: Tensor, scales_GN: Tensor, group_K: Tensor
    ) -> Tensor:
        codes_NK = _codes_of(words_RN).permute(1, 0, 2).flatten(1).float()
        group_K = group_K.long()
        zeros_NK = zero_points_NG.float().index_select(1, group_K)
        scales_NK = scales_GN.float().t().index_select(1, group_K)
        return ((codes_NK - zeros_NK) * scales_NK).to(self.dtype)


def _mxfp4(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """gpt-oss's: ``_blocks`` ``[E, N, K / 32, 16]`` and ``_scales``, of all experts in one."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            if name.replace("_scales", "_blocks") not in tensors:
                raise ValueError(f"{name} has no {name.replace('_scales', '_blocks')}")
        elif name.endswith("_blocks"):
            prefix = name.removesuffix("_blocks")
            scales = tensors.get(f"{prefix}_scales")
            if scales is None:
                raise ValueError(f"{name} has no {prefix}_scales")
            if tensor.ndim != 4 or tensor.shape[:3] != scales.shape or tensor.shape[3] != 16:
                raise ValueError(
                    f"{name}, {list(tensor.shape)}, with scales {list(scales.shape)} is not mxfp4"
                )
            experts, rows, groups, _ = tensor.shape
            values = tensor.view(experts, rows, groups * 16).view(torch.int8)
            packed = PackedWeight(values, scales.view(torch.int8))
            shape = (experts, rows, groups * 32)
            # The model's own parameter lies as (in, out).
            weight = decoded("mxfp4", packed, shape, dtype or torch.bfloat16)
            result[prefix] = weight.transpose(1, 2)
        else:
            result[name] = tensor
    return result


def _fp8(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """DeepSeek-V3's and Qwen3's: E4M3, and ``weight_scale_inv`` for each block of 128 x 128."""
    _check_option(config, "weight_block_size", ([128, 128], (128, 128)))
    return _with_scales(tensors, "weight_scale_inv", dtype)


def _with_scales(
    tensors: Mapping[str, Tensor], kind: str, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Returns tensors in which E4M3 weights are decoded with the scales of a name."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == kind:
            if f"{prefix}.weight" not in tensors:
                raise ValueError(f"{name} has no {prefix}.weight")
        elif tensor.dtype != torch.float8_e4m3fn:
            result[name] = tensor
        elif part != "weight" or tensor.ndim != 2:
            raise ValueError(
                f"{name}, {list(tensor.shape)}, is in float8; a weight must be a matrix to be read"
            )
        else:
            scales = tensors.get(f"{prefix}.{kind}")
            if scales is None:
                raise ValueError(f"{name} is in float8 and has no {prefix}.{kind}")
            rows, columns = tensor.shape
            if scales.numel() == 1:  # As rows', since gate and up may have two.
                scales = scales.reshape(1, 1).expand(rows, 1)
            if not ENCODINGS["fp8"].blocks(rows, columns, scales.shape):
                raise ValueError(
                    f"{name}, {list(tensor.shape)}, has scales {list(scales.shape)}; they must be "
                    f"{ENCODINGS['fp8'].scales_of(rows, columns)}"
                )
            packed = PackedWeight(tensor.view(torch.int8), scales)
            to = dtype or torch.bfloat16
            result[name] = decoded("fp8", packed, (rows, columns), to)
    return result


_METHODS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
