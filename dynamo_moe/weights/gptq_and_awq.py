"""Checkpoints of GPTQ, AWQ and AutoRound: words of codes, as tensors that decode.

Legend: N rows (out), K columns (in) of a matrix, G groups of columns, R words, W codes of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from custom_ops.packed_weights import PackedWeight
from dynamo_moe.weights.lazy_tensors import LazyTensor, computed
from dynamo_moe.weights.packed_tensors import decoded


class NotTakenError(ValueError):
    """A checkpoint's format, or an option of it, is none that is taken."""


def check_option(config: Mapping[str, Any], name: str, taken: tuple[Any, ...]) -> None:
    """Raises a NotTakenError if an option of a checkpoint has another value than those taken."""
    value = config.get(name)
    if value not in taken:
        raise NotTakenError(f"{config['quant_method']} with {name}={value!r} is not taken")


def gptq(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """GPTQ's and GPTQModel's: ``qweight`` ``[K / W, N]``, zero points less one but in its v2.

    Layers may have bits and groups of their own, by the ``dynamic`` of a configuration.
    """
    layers = (config.get("dynamic") or {}).values()
    settings = [config, *({**config, **own} for own in layers if own)]  # No own: a layer is plain.
    for setting in settings:
        check_option(setting, "bits", (4, 8))
    one = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    symmetric = all(setting.get("sym", False) for setting in settings)
    by_activation = any(setting.get("desc_act") for setting in settings)

    def weight(
        prefix: str, bits: int, qweight: Tensor, qzeros: Tensor, scales: Tensor
    ) -> LazyTensor:
        rows, columns, groups = qweight.shape[1], qweight.shape[0] * 32 // bits, scales.shape[0]
        codes = partial(_codes_by_row, name=prefix, bits=bits, added=one)
        zero_points = computed(codes, (qzeros,), (rows, groups), torch.int8)
        group_of = tensors.get(f"{prefix}.g_idx")
        order = None
        # Columns of one group have no order: with a group_size of -1, desc_act says nothing.
        if by_activation and groups > 1:
            if group_of is None:
                raise ValueError(f"{prefix}.qweight has no {prefix}.g_idx, and desc_act is set")
            order = order_by_group(group_of, columns, groups, f"{prefix}.g_idx")
        words = (qweight, zero_points, group_of if order is None else None, order)
        if bits == 8:
            pack = partial(_signed_by_column, name=prefix)
            values = computed(pack, words, (rows, columns), torch.int8)
            packed = PackedWeight(values, scales.t())
            return decoded("int8", packed, (rows, columns), dtype or scales.dtype, order)
        pack = partial(_packed_by_column, name=prefix, symmetric=symmetric)
        values = computed(pack, words, (rows, columns // 2), torch.int8)
        packed = PackedWeight(values, scales.t(), None if symmetric else zero_points)
        return decoded("int4", packed, (rows, columns), dtype or scales.dtype, order)

    return _by_words(tensors, weight, map(_sizes, settings), in_columns=True)


def auto_round(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """AutoRound's, whose integers are packed as GPTQ's or AWQ's.

    Zero points are less one in ``auto_gptq`` alone. ``extra_config`` has what differs by layers,
    those of 16 bits among them.
    """
    check_option(config, "data_type", ("int", None))
    check_option(config, "act_bits", (16, None))
    check_option(config, "packing_format", tuple(_AUTO_ROUND_VERSIONS))
    version = _AUTO_ROUND_VERSIONS[config["packing_format"]]
    if version is None:
        return awq(tensors, config, dtype)
    layers: Mapping[str, Any] = config.get("extra_config") or {}
    own = {
        layer: {name: value for name, value in said.items() if value is not None}
        for layer, said in layers.items()
        if (said.get("bits") or 0) < 16
    }
    return gptq(tensors, {**config, "checkpoint_format": version, "dynamic": own}, dtype)


_AUTO_ROUND_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": None,
}


def awq(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """AutoAWQ's ``gemm``: ``qweight`` ``[K, N / 8]``, whose words have an order of their own."""
    check_option(config, "bits", (4,))
    check_option(config, "version", ("gemm", None))

    def weight(
        prefix: str, bits: int, qweight: Tensor, qzeros: Tensor, scales: Tensor
    ) -> LazyTensor:
        rows, columns, groups = scales.shape[1], qweight.shape[0], scales.shape[0]
        codes = partial(_codes_by_row, name=prefix, bits=bits, order=_AWQ_ORDER)
        zero_points = computed(codes, (qzeros,), (rows, groups), torch.int8)
        values = computed(_packed_by_row, (qweight,), (rows, columns // 2), torch.int8)
        packed = PackedWeight(values, scales.t(), zero_points)
        return decoded("int4", packed, (rows, columns), dtype or scales.dtype)

    return _by_words(tensors, weight, [_sizes(config)], in_columns=False)


def _sizes(setting: Mapping[str, Any]) -> tuple[int, int]:
    return setting["bits"], setting.get("group_size", -1)


def _by_words(
    tensors: Mapping[str, Tensor],
    weight: Callable[[str, int, Tensor, Tensor, Tensor], LazyTensor],
    sizes: Iterable[tuple[int, int]],
    *,
    in_columns: bool,
) -> dict[str, Tensor]:
    """Returns tensors in which weights take the place of ``qweight``, ``qzeros`` and ``scales``.

    Args:
        tensors: The checkpoint's.
        weight: From a weight's path, its bits and these to the weight.
        sizes: The bits and the sizes of groups that layers may have.
        in_columns: Whether a word of ``qweight`` has codes of several columns of a row, not of
            several rows.
    """
    result: dict[str, Tensor] = {}
    known = tuple(dict.fromkeys(sizes))
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
            for bits, size in known:
                per_word = 32 // bits
                columns = tensor.shape[0] * (per_word if in_columns else 1)
                of_all_rows = rows if in_columns else rows // per_word
                grouped = groups * size == columns if size > 0 else groups == 1
                shapes = tensor.shape[1], tuple(qzeros.shape)
                if grouped and shapes == (of_all_rows, (groups, rows // per_word)):
                    break
            else:
                ways = " or ".join(f"{bits} bits with groups of {size}" for bits, size in known)
                raise ValueError(
                    f"{name}, {list(tensor.shape)}, with scales {list(scales.shape)} and zero "
                    f"points {list(qzeros.shape)} is not packed in {ways}"
                )
            result[f"{prefix}.weight"] = weight(prefix, bits, tensor, qzeros, scales)
        elif kind not in ("qzeros", "scales", "g_idx"):
            result[name] = tensor
    return result


# Which column of eight each 4 bits of a word hold, from the lowest on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def codes_of(words: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Returns the codes ``[..., W]`` of words int32, the first in the lowest bits.

    Args:
        words: Of any shape.
        bits: Of a code.
        order: The place in the result of each code of a word; None: as they come.
    """
    shifts_W = torch.arange(0, 32, bits, dtype=torch.int32)
    codes_W: Tensor = (words.unsqueeze(-1) >> shifts_W) & (2**bits - 1)
    if order is not None:
        codes_W = codes_W[..., torch.tensor(order).argsort()]
    return codes_W.to(torch.uint8)


def signed(codes: Tensor) -> Tensor:
    """Returns the integers int8 of codes that are 128 more."""
    result: Tensor = codes.bitwise_xor(-128)
    return result


def _codes_by_row(
    words_GR: Tensor,
    name: str,
    bits: int,
    order: tuple[int, ...] | None = None,
    added: int = 0,
) -> Tensor:
    """Returns the codes ``[N, G]``, as int8, of words ``[G, N / W]``."""
    codes_NG = codes_of(words_GR, bits, order).flatten(1).t().int() + added
    if bool((codes_NG >= 2**bits).any()):
        raise ValueError(
            f"{name}.qzeros has a zero point of {2**bits}, which is no code of {bits} bits"
        )
    return codes_NG.to(torch.uint8).view(torch.int8).contiguous()


def _check_order(group_K: Tensor | None, columns: int, groups: int, name: str) -> None:
    if group_K is not None and not torch.equal(
        group_K.long(), torch.arange(columns) // (columns // groups)
    ):
        raise ValueError(f"{name}.g_idx has columns in another order, and desc_act is not set")


def order_by_group(group_K: Tensor, columns: int, groups: int, name: str) -> LazyTensor:
    """Returns the columns ``[K]`` of a matrix in the order of their groups, once it is read.

    Reading it raises a ValueError if the groups differ in size.

    Raises:
        ValueError: If there is not one group for each column.
    """
    if list(group_K.shape) != [columns]:
        raise ValueError(f"{name}, {list(group_K.shape)}, must be [{columns}]")
    in_order = partial(_in_order_of_groups, groups=groups, name=name)
    return computed(in_order, (group_K,), tuple(group_K.shape), torch.int64)


def _in_order_of_groups(group_K: Tensor, groups: int, name: str) -> Tensor:
    sorted_K, order_K = group_K.long().sort(stable=True)
    columns = group_K.numel()
    if not torch.equal(sorted_K, torch.arange(columns) // (columns // groups)):
        raise ValueError(f"{name} must name each of {groups} groups {columns // groups} times")
    return order_K


def _packed_by_column(
    words_RN: Tensor,
    zero_points_NG: Tensor,
    group_K: Tensor | None,
    order_K: Tensor | None,
    *,
    name: str,
    symmetric: bool,
) -> Tensor:
    """Returns the bytes ``[N, K / 2]`` of words ``[K / 8, N]``, of columns in an order."""
    _check_order(group_K, 8 * words_RN.shape[0], zero_points_NG.shape[1], name)
    if symmetric and bool((zero_points_NG != 8).any()):
        raise ValueError(f"{name}.qzeros has zero points that are not 8, and sym is set")
    bytes_NB = words_RN.t().contiguous().view(torch.int8)
    return bytes_NB if order_K is None else pairs_in_order(bytes_NB, order_K)


def pairs_in_order(bytes_NB: Tensor, order_K: Tensor) -> Tensor:
    """Returns the bytes of the same codes, two to a byte, of columns in an order."""
    codes_NB = bytes_NB.view(torch.uint8)
    codes_NK = torch.stack((codes_NB & 15, codes_NB >> 4), dim=-1).flatten(1)
    return _pairs(codes_NK.index_select(1, order_K))


def _pairs(codes_NK: Tensor) -> Tensor:
    return (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).contiguous().view(torch.int8)


def _signed_by_column(
    words_RN: Tensor,
    zero_points_NG: Tensor,
    group_K: Tensor | None,
    order_K: Tensor | None,
    *,
    name: str,
) -> Tensor:
    """Returns the integers ``[N, K]`` of words ``[K / 4, N]`` whose zero points are all 128."""
    _check_order(group_K, 4 * words_RN.shape[0], zero_points_NG.shape[1], name)
    if bool((zero_points_NG != -128).any()):
        raise ValueError(f"{name}.qzeros has zero points that are not 128, which int8 has not")
    values_NK = signed(words_RN.t().contiguous().view(torch.int8))
    return values_NK if order_K is None else values_NK.index_select(1, order_K)


def _packed_by_row(words_KR: Tensor) -> Tensor:
    """Returns the bytes ``[N, K / 2]`` of AWQ's words ``[K, N / 8]``."""
    codes_NK = codes_of(words_KR, 4, _AWQ_ORDER).flatten(1).t()
    return _pairs(codes_NK)
