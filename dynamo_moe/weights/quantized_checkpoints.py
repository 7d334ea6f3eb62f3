"""The tensors of a quantised checkpoint, read as weights that decode.

Each method that a checkpoint's ``quantization_config`` names has a function here; the weights are
those of :mod:`dynamo_moe.weights.packed_tensors`.

Legend: E experts, N rows (out), K columns (in) of a matrix, G groups of columns, R words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe.weights.gptq_and_awq import (
    NotTakenError,
    auto_round,
    awq,
    check_option,
    codes_of,
    gptq,
    order_by_group,
    pairs_in_order,
    signed,
)
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed
from dynamo_moe.weights.packed_tensors import decoded, is_decoding

_Reader: TypeAlias = Callable[[Mapping[str, Tensor], torch.dtype | None, int], dict[str, Tensor]]


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
    try:
        if method not in _METHODS:
            names = ", ".join(_METHODS)
            raise NotTakenError(f"quantization method {method!r} is not taken; {names} are")
        decoded = _METHODS[method](tensors, config, dtype)
    except NotTakenError as error:
        raise ValueError(
            f"{error}: load the model dequantised by transformers, convert and export that"
        ) from None
    check_plain(decoded)
    return decoded


def _compressed_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Those of https://github.com/vllm-project/compressed-tensors that :data:`_FORMATS` has."""
    form = str(config.get("format"))
    groups = config.get("config_groups") or {}
    own_forms = {name: scheme.get("format") or form for name, scheme in groups.items()}
    for each in (form, *own_forms.values()):
        if each not in _FORMATS:
            names = ", ".join(_FORMATS)
            raise NotTakenError(f"compressed-tensors format {each!r} is not taken; {names} are")
    if config.get("transform_config"):
        raise NotTakenError("compressed-tensors' transform_config, of rotations, is not taken")
    sizes = set()
    for name, scheme in groups.items():
        taken = _FORMATS[own_forms[name]][1]
        weights = scheme.get("weights") or {}
        stored = weights.get("num_bits", taken[0][0]), weights.get("type", taken[0][1])
        if stored not in taken:
            raise NotTakenError(
                f"weights of {stored[0]} bits of {stored[1]!r} ({name}) are not taken"
            )
        if stored[1] == "int" and own_forms[name] in ("pack-quantized", "mixed-precision"):
            sizes.add(stored[0])
    if len(sizes) > 1:
        raise NotTakenError(f"words of {' and '.join(map(str, sorted(sizes)))} bits are not taken")
    reader, _ = _FORMATS[form]
    return reader(tensors, dtype, max(sizes, default=4))


def _mixed(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, bits: int
) -> dict[str, Tensor]:
    """Weights of several formats, each told by its tensors; ``bits`` are those of words."""
    parts: dict[_Reader, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, _ = name.rpartition(".")
        packed = tensors.get(f"{prefix}.weight_packed")
        reader: _Reader = _with_scales
        if f"{prefix}.weight_global_scale" in tensors:
            reader = _nvfp4
        elif packed is not None:
            reader = _pack_quantized if packed.dtype == torch.int32 else _mxfp4_packed
        parts.setdefault(reader, {})[name] = tensor
    read = (reader(part, dtype, bits) for reader, part in parts.items())
    return {name: tensor for tensors in read for name, tensor in tensors.items()}


def _pack_quantized(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, bits: int
) -> dict[str, Tensor]:
    """Words of codes that are ``2 ** (bits - 1)`` more than an integer with a sign."""

    def weight(
        prefix: str,
        words: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        group_of: Tensor | None,
        _: Tensor | None,
    ) -> LazyTensor:
        per_word = 32 // bits
        rows, columns = (words.shape[0], words.shape[1] * per_word) if words.ndim == 2 else (0, 0)
        groups = scales.shape[1] if scales.ndim == 2 and scales.shape[0] == rows else 0
        if words.dtype != torch.int32 or not groups or columns % groups:
            raise ValueError(
                f"{prefix}.weight_packed, {list(words.shape)} of {words.dtype}, with scales "
                f"{list(scales.shape)} is not packed in {bits} bits"
            )
        order = None
        if group_of is not None:
            order = order_by_group(group_of, columns, groups, f"{prefix}.weight_g_idx")
        values: Tensor = words.view(torch.int8)
        if bits == 8:
            if zero_points is not None:
                raise ValueError(f"{prefix}.weight_zero_point: int8 has no zero points")
            values = computed(signed, (values,), (rows, columns), torch.int8)
            if order is not None:
                values = values.index_select(1, order)
            return _decoded("int8", PackedWeight(values, scales), dtype, order)
        if order is not None:
            values = computed(pairs_in_order, (values, order), tuple(values.shape), torch.int8)
        if zero_points is not None:
            zero_points = _zero_points(prefix, zero_points, rows, groups)
        return _decoded("int4", PackedWeight(values, scales, zero_points), dtype, order)

    others = ("weight_zero_point", "weight_g_idx", "weight_shape")
    return _read(tensors, "weight_packed", ("weight_scale",), others, weight)


def _zero_points(prefix: str, words_RG: Tensor, rows: int, groups: int) -> LazyTensor:
    """Returns the zero points ``[N, G]`` of 4 bits."""
    wanted = [-(-rows // 8), groups]
    if words_RG.dtype != torch.int32 or list(words_RG.shape) != wanted:
        raise ValueError(
            f"{prefix}.weight_zero_point, {list(words_RG.shape)} of {words_RG.dtype}, must be "
            f"{wanted} of torch.int32"
        )
    codes = partial(_codes_by_column, rows=rows)
    return computed(codes, (words_RG,), (rows, groups), torch.int8)


def _codes_by_column(words_RG: Tensor, rows: int) -> Tensor:
    """Returns the codes ``[N, G]`` of words ``[N / 8, G]``, eight of which lie in a column."""
    return codes_of(words_RG).movedim(-1, 1).flatten(0, 1)[:rows].to(torch.int8)


def _with_scales(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, bits: int = 8
) -> dict[str, Tensor]:
    """``weight``, of E4M3 numbers or of integers, and ``weight_scale``."""

    def weight(prefix: str, values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        if zeros is not None:
            raise ValueError(f"{prefix}.weight_zero_point: weights of 8 bits have no zero points")
        return _eight_bits(prefix, values, scales, dtype)

    return _read(tensors, "weight", ("weight_scale",), ("weight_zero_point",), weight)


def _eight_bits(
    prefix: str, values: Tensor, scales: Tensor, dtype: torch.dtype | None
) -> LazyTensor:
    name = f"{prefix}.weight"
    if values.ndim != 2 or values.dtype not in _EIGHT_BITS:
        raise ValueError(
            f"{name}, {list(values.shape)} of {values.dtype}, has scales; it must be a matrix of "
            "float8_e4m3fn or int8 to be read"
        )
    encoding, (rows, columns) = ENCODINGS[_EIGHT_BITS[values.dtype]], values.shape
    scales = _plain(scales)
    if scales.numel() == 1:  # As rows', since gate and up may have two.
        scales = scales.reshape(1, 1).expand(rows, 1)
    if not encoding.blocks(rows, columns, scales.shape):
        raise ValueError(
            f"{name}, {list(values.shape)}, has scales {list(scales.shape)}; they must be "
            f"{encoding.scales_of(rows, columns)}"
        )
    packed = PackedWeight(values.view(torch.int8), scales)
    return _decoded(encoding.name, packed, dtype or torch.bfloat16)


_EIGHT_BITS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def _plain(scales: Tensor) -> Tensor:
    """Returns scales of powers of two, E8M0, as numbers: bfloat16 has them all."""
    if scales.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return scales


def _nvfp4(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, bits: int = 4
) -> dict[str, Tensor]:
    """compressed-tensors', whose global scale divides."""

    def weight(prefix: str, values: Tensor, scales: Tensor, divisor: Tensor) -> LazyTensor:
        factor = computed(torch.reciprocal, (divisor.float(),), tuple(divisor.shape), torch.float32)
        return _two_scales(f"{prefix}.weight_packed", values, scales, factor, dtype)

    needed = ("weight_scale", "weight_global_scale")
    return _read(tensors, "weight_packed", needed, (), weight)


def _two_scales(
    name: str, values: Tensor, scales: Tensor, factor: Tensor, dtype: torch.dtype | None
) -> LazyTensor:
    """Returns the weight of E2M1 numbers with E4M3 scales, and one for all of them."""
    _check_float4("nvfp4", name, values, scales, torch.float8_e4m3fn)
    if factor.numel() != 1:
        raise ValueError(
            f"{name} has a scale {list(factor.shape)} for all of it, which must be one"
        )
    factors = factor.float().reshape(1, 1).expand(values.shape[0], 1)
    packed = PackedWeight(values.view(torch.int8), scales.view(torch.int8), None, factors)
    return _decoded("nvfp4", packed, dtype or torch.bfloat16)


def _mxfp4_packed(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, bits: int = 4
) -> dict[str, Tensor]:
    """compressed-tensors': matrices of E2M1 numbers with E8M0 scales."""

    def weight(prefix: str, values: Tensor, scales: Tensor) -> LazyTensor:
        return _float4(f"{prefix}.weight_packed", values, scales, dtype)

    return _read(tensors, "weight_packed", ("weight_scale",), (), weight)


def _check_float4(
    encoding: str, name: str, values: Tensor, scales: Tensor, dtype: torch.dtype
) -> None:
    """Raises a ValueError if tensors are no matrix of two numbers to a byte, with scales."""
    known = ENCODINGS[encoding]
    fits = values.ndim == 2 and values.dtype in (torch.uint8, torch.int8) and scales.dtype == dtype
    if not fits or not known.blocks(values.shape[0], 2 * values.shape[1], scales.shape):
        raise ValueError(
            f"{name}, {list(values.shape)} of {values.dtype}, with scales {list(scales.shape)} of "
            f"{scales.dtype} is not {encoding}"
        )


def _float4(name: str, values: Tensor, scales: Tensor, dtype: torch.dtype | None) -> LazyTensor:
    """Returns the weight of E2M1 numbers with E8M0 scales."""
    _check_float4("mxfp4", name, values, scales, torch.uint8)
    packed = PackedWeight(values.view(torch.int8), scales.view(torch.int8))
    return _decoded("mxfp4", packed, dtype or torch.bfloat16)


# A format's reader, and the bits and types of weights that it takes.
_FORMATS: dict[str, tuple[_Reader, list[tuple[int, str]]]] = {
    "pack-quantized": (_pack_quantized, [(4, "int"), (8, "int")]),
    "float-quantized": (_with_scales, [(8, "float")]),
    "int-quantized": (_with_scales, [(8, "int")]),
    "naive-quantized": (_with_scales, [(8, "float"), (8, "int")]),
    "nvfp4-pack-quantized": (_nvfp4, [(4, "float")]),
    "mxfp4-pack-quantized": (_mxfp4_packed, [(4, "float")]),
    "mxfp8-quantized": (_with_scales, [(8, "float")]),
    "mixed-precision": (_mixed, [(4, "int"), (8, "int"), (4, "float"), (8, "float")]),
}


def _modelopt(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """NVIDIA's Model Optimizer's, by what lies beside a weight: NVFP4 alone has two scales.

    ``MIXED_PRECISION`` names an algorithm for each layer. Those of :data:`_MODELOPT` are told apart
    by the tensors, whose names other files of the checkpoint need not have.
    """
    scaled = [name for name in tensors if name.endswith(".pre_quant_scale")]
    if scaled:
        raise NotTakenError(f"{scaled[0]}: scales of a layer's inputs are not taken")
    algorithms = {"": config.get("quant_algo")}
    if algorithms[""] == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or {}
        # In config.json some have them one level deeper.
        layers = layers.get("quantized_layers", layers)
        algorithms = {f" of {name}": said.get("quant_algo") for name, said in layers.items()}
    for layer, algorithm in algorithms.items():
        if str(algorithm).upper() not in _MODELOPT:
            names = ", ".join(_MODELOPT)
            raise NotTakenError(
                f"ModelOpt's quant_algo {algorithm!r}{layer} is not taken; {names} are"
            )
    fused, tensors = _fused(tensors, dtype)

    def weight(prefix: str, values: Tensor, scales: Tensor, factor: Tensor | None) -> LazyTensor:
        if factor is not None:
            return _two_scales(f"{prefix}.weight", values, scales, factor, dtype)
        if values.dtype == torch.uint8:
            raise ValueError(f"{prefix}.weight has no {prefix}.weight_scale_2")
        if scales.ndim == 4:  # [N / 128, 1, K / 128, 1]
            scales = scales.squeeze(3).squeeze(1)
        elif scales.ndim == 1:
            scales = scales[:, None]
        return _eight_bits(prefix, values, scales, dtype)

    return fused | _read(tensors, "weight", ("weight_scale",), ("weight_scale_2",), weight)


_MODELOPT = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "W8A16"),
    *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"),
)


def _fused(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights ``[E, K, N]`` of all experts that are in one, and the other tensors.

    ModelOpt leaves those of Llama 4 and gpt-oss as (in, out), and names the scales after them: of
    ``gate_up_proj`` ``gate_up_proj_weight_scale``. NVFP4 has bytes ``[E, K / 2, N]``, scales
    ``[E, K / 16, N]`` and one ``weight_scale_2`` of all, or of each expert; FP8 one scale of all.
    Source: ``_export_quantized_weight`` of its ``export/unified_export_hf.py``.
    """
    fused: dict[str, Tensor] = {}
    parts: set[str] = set()
    for name, scales in tensors.items():
        prefix = name.removesuffix("_weight_scale")
        values = tensors.get(prefix)
        if prefix == name or values is None:
            continue
        beside = f"{prefix}_weight_scale_2"
        factor = tensors.get(beside)
        made = (
            _fused_nvfp4(prefix, values, scales, factor, dtype)
            if values.dtype == torch.uint8
            else _stacked_fp8(prefix, values.transpose(1, 2), scales, dtype)
        )
        # The model's own parameter lies as (in, out).
        fused[prefix] = made.transpose(1, 2)
        parts |= {prefix, name, beside, f"{prefix}_input_scale"}
    return fused, {name: tensor for name, tensor in tensors.items() if name not in parts}


def _fused_nvfp4(
    name: str, values: Tensor, scales: Tensor, factor: Tensor | None, dtype: torch.dtype | None
) -> LazyTensor:
    if factor is None:
        raise ValueError(f"{name} has no {name}_weight_scale_2")
    experts = values.shape[0] if values.ndim == 3 else 0
    if not experts or scales.ndim != 3 or scales.shape[0] != experts:
        raise ValueError(
            f"{name}, {list(values.shape)}, with scales {list(scales.shape)} is not nvfp4 of "
            "all experts"
        )
    if factor.numel() not in (1, experts):
        raise ValueError(
            f"{name}_weight_scale_2, {list(factor.shape)}, must be one, or one of each expert"
        )
    values, scales = values.transpose(1, 2), scales.transpose(1, 2)
    _check_float4("nvfp4", name, values[0], scales[0], torch.float8_e4m3fn)
    rows, row_bytes = values.shape[1:]
    factors = factor.float().reshape(-1, 1, 1).expand(experts, rows, 1)
    packed = PackedWeight(values.view(torch.int8), scales.view(torch.int8), None, factors)
    return decoded("nvfp4", packed, (experts, rows, 2 * row_bytes), dtype or torch.bfloat16)


def _stacked_fp8(
    name: str, values: Tensor, scales: Tensor, dtype: torch.dtype | None
) -> LazyTensor:
    """Returns the weights ``[E, N, K]`` of all experts: one scale, or one or blocks of each."""
    scales = _plain(scales)
    is_fp8 = values.ndim == 3 and values.dtype == torch.float8_e4m3fn
    experts, rows, columns = values.shape if is_fp8 else (0, 0, 0)
    if is_fp8 and scales.numel() in (1, experts):
        scales = scales.reshape(-1, 1, 1).expand(experts, rows, 1)
    sizes = scales.shape[1:] if scales.ndim == 3 and scales.shape[0] == experts else ()
    if not is_fp8 or not ENCODINGS["fp8"].blocks(rows, columns, sizes):
        raise ValueError(
            f"{name}, {list(values.shape)} of {values.dtype}, with scales {list(scales.shape)} "
            "must be float8_e4m3fn of all experts with one scale, or one or blocks of each"
        )
    packed = PackedWeight(values.view(torch.int8), scales)
    return decoded("fp8", packed, tuple(values.shape), dtype or torch.bfloat16)


def _read(
    tensors: Mapping[str, Tensor],
    first: str,
    needed: tuple[str, ...],
    others: tuple[str, ...],
    weight: Callable[..., Tensor],
) -> dict[str, Tensor]:
    """Returns tensors in which weights take the place of what stores them.

    Scales of activations, which stay in their dtype, are left out.

    Args:
        tensors: The checkpoint's.
        first: What the tensor of a weight's values is called, behind the weight's path.
        needed: What the tensors beside it are called. Where it is ``weight``, those of layers that
            are not quantised have none of them.
        others: What there may be beside.
        weight: From a weight's path and these tensors, or None, to the weight.

    Raises:
        ValueError: If a tensor is missing, or ``weight`` says that they do not fit.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind in (*needed, *others):
            if f"{prefix}.{first}" not in tensors:
                raise ValueError(f"{name} has no {prefix}.{first}")
        elif kind in _OF_ACTIVATIONS:
            continue
        elif kind == first:
            beside = [tensors.get(f"{prefix}.{part}") for part in needed]
            missing = [part for part, found in zip(needed, beside, strict=True) if found is None]
            if not missing:
                beside += [tensors.get(f"{prefix}.{part}") for part in others]
                result[f"{prefix}.weight"] = weight(prefix, tensor, *beside)
            elif first == "weight" and tensor.dtype not in _PACKED_DTYPES:
                result[name] = tensor
            else:
                names = " and no ".join(f"{prefix}.{part}" for part in missing)
                raise ValueError(f"{name} has no {names}")
        else:
            result[name] = tensor
    return result


def check_plain(tensors: Mapping[str, Tensor]) -> None:
    """Checks that no tensor is quantised: it would be taken for the numbers that its codes are.

    Raises:
        ValueError: If one is, in a dtype of 8 bits.
    """
    for name, tensor in tensors.items():
        is_mask = name.endswith(("bias", "mask")) and tensor.dtype == torch.uint8
        is_coded = tensor.dtype in _FLOAT8 or (tensor.dtype in _PACKED_DTYPES and tensor.ndim > 1)
        if is_coded and not is_mask and not is_decoding(tensor):
            raise ValueError(
                f"{name}, {list(tensor.shape)} of {tensor.dtype}, is quantised in no way that is "
                "taken here: a weight has to be a matrix with its scales beside it"
            )


_OF_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED_DTYPES = (*_FLOAT8, torch.int8, torch.uint8)


def _decoded(
    encoding: str, packed: PackedWeight, dtype: torch.dtype | None, order: Tensor | None = None
) -> LazyTensor:
    """Returns the matrix that the tensors of one store; in the scales' dtype where none is said."""
    rows, row_bytes = packed.values.shape
    shape = (rows, row_bytes * ENCODINGS[encoding].per_byte)
    return decoded(encoding, packed, shape, dtype or packed.scales.dtype, order)


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
    """E4M3 numbers, and ``weight_scale_inv`` for each block of 128 x 128 (DeepSeek-V3, Qwen3).

    Without blocks it is one scale (Mistral's), which older files call ``weight_scale``; those of
    experts in one tensor are ``gate_up_proj_scale_inv``, one of each (Mistral Small 4). Of
    DeepSeek-V4, experts are E2M1 and scales E8M0; its own files call these ``scale``.
    """
    check_option(config, "weight_block_size", ([128, 128], (128, 128), None))
    named: dict[str, Tensor] = {}
    stacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        values = tensors.get(name.removesuffix("_scale_inv"))
        if kind in ("scale", "weight_scale") and f"{prefix}.weight" in tensors:
            named[f"{prefix}.weight_scale_inv"] = tensor
        elif name.endswith("_scale_inv") and values is not None and values.ndim == 3:
            weight_name = name.removesuffix("_scale_inv")
            stacked[weight_name] = _stacked_fp8(weight_name, values, tensor, dtype)
        else:
            named[name] = tensor
    for name in stacked:
        named.pop(name)
        named.pop(f"{name}_activation_scale", None)

    def weight(prefix: str, values: Tensor, scales: Tensor) -> LazyTensor:
        if values.dtype == torch.int8 and scales.dtype == torch.float8_e8m0fnu:
            return _float4(f"{prefix}.weight", values, scales.view(torch.uint8), dtype)
        return _eight_bits(prefix, values, scales, dtype)

    return stacked | _read(named, "weight", ("weight_scale_inv",), (), weight)


_METHODS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "modelopt": _modelopt,
}
