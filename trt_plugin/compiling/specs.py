"""Layers written as text, for compiling without a model: ``experts=8,top_k=2,width=768,…``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch

from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import (
    EXPERT_OPTIONS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    ExpertOptions,
    RouterOptions,
    WeightLayout,
)
from custom_ops.packed_weights import ENCODINGS, WHOLE
from custom_ops.weight_formats import WHOLE_MATRIX, WeightFormat, packed_format, plain_format

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
}
_LONG_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def parse_spec(text: str) -> Layer:
    """Reads a layer: keys and values, separated by commas; a flag may stand without a value.

    Args:
        text: Required are ``experts``, ``top_k``, ``width`` and ``hidden``. ``op`` is ``dropless``
            (default) or ``experts``. ``dtype`` is that of tokens, experts and router, and each of
            ``tokens_dtype``, ``experts_dtype`` and ``routing_dtype`` may differ: ``fp32``
            (default), ``fp16`` or ``bf16``. ``weights_dtype`` is that of the router's bias, which
            ``router_bias`` adds. With ``op=experts``, ``routing_dtype`` is that of the ids
            (default ``int64``) and ``weights_dtype`` that of the weights (default ``fp32``).
            ``selection_bias`` adds a selection bias of fp32. ``resident_experts`` is how many
            experts are on the device at a time (default: all). ``weight_format`` packs the weights:
            ``int4``, ``int8``, ``mxfp4``, ``nvfp4`` or ``fp8``; ``block_size`` columns and
            ``block_rows`` rows share a scale (0: all) of ``scales_dtype``, and ``zero_points`` are
            ``none``, one for each of ``scales``, or one for each of ``experts``, which is the
            default of ``int4`` with a bias, as an exported node has it. The rest are the operator's
            options and the flags ``b1``, ``b2``, ``tf32``, ``w1_transposed`` and ``w2_transposed``.

    Raises:
        ValueError: If a key is unknown or missing, or its value is wrong.

    Example:
        >>> parse_spec("experts=8,top_k=2,width=768,hidden=3072,activation=silu,gated").shape.rows
        6144
    """
    try:
        return _layer(_values(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"spec {text!r}: {error}") from None


def _integer(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"must be an integer, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def _flag(text: str) -> bool:
    known = {"": True, "true": True, "1": True, "false": False, "0": False}
    if text not in known:
        raise ValueError(f"must be true or false, got {text!r}")
    return known[text]


def _known(text: str, known: Collection[str]) -> str:
    if text not in known:
        raise ValueError(f"must be one of {', '.join(known)}; got {text!r}")
    return text


def _dtype(text: str) -> torch.dtype:
    return _DTYPES[_known(_LONG_NAMES.get(text, text), _DTYPES)]


_BIASES = ("router_bias", "selection_bias", "b1", "b2")
_SIZES = ("experts", "top_k", "width", "hidden")
_Reader = Callable[[str], Any]
_READERS: dict[type, _Reader] = {str: str, bool: _flag, int: _integer, float: _number}
_ROUTER = {option.name: _READERS[option.type] for option in ROUTER_OPTIONS}
_EXPERTS = {option.name: _READERS[option.type] for option in EXPERT_OPTIONS}
_LAYOUT = {option.name: _READERS[option.type] for option in LAYOUT_OPTIONS}
_KEYS: dict[str, _Reader] = {
    "op": partial(_known, known=("dropless", "experts")),
    **dict.fromkeys((*_SIZES, "resident_experts", "block_size", "block_rows"), _integer),
    **dict.fromkeys(
        (
            *("dtype", "tokens_dtype", "experts_dtype", "routing_dtype", "weights_dtype"),
            "scales_dtype",
        ),
        _dtype,
    ),
    **_EXPERTS,
    **_ROUTER,
    **dict.fromkeys(("router_bias", "selection_bias", "b1", "b2", "tf32"), _flag),
    **_LAYOUT,
    "weight_format": partial(_known, known=tuple(ENCODINGS)),
    "zero_points": partial(_known, known=("none", "scales", "experts")),
}


def _values(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}; known are {', '.join(_KEYS)}")
        if key in values:
            raise ValueError(f"{key} is given twice")
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    missing = [key for key in _SIZES if key not in values]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    return values


def _present(keys: Iterable[str], values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _layer(values: dict[str, Any]) -> Layer:
    dtype = values.get("dtype", torch.float32)
    router = values.get("op", "dropless") == "dropless"
    if not router:
        extra = _present((*_ROUTER, "router_bias", "selection_bias"), values)
        if extra:
            raise ValueError(f"op=experts has no {', '.join(extra)}")
    routing_dtype = values.get("routing_dtype", dtype if router else torch.int64)
    weights_dtype = values.get("weights_dtype", None if router else torch.float32)
    if values.get("router_bias") and weights_dtype is None:
        weights_dtype = routing_dtype
    shape = LayerShape(
        **{key: values[key] for key in _SIZES},
        tokens_dtype=values.get("tokens_dtype", dtype),
        weight_format=_weight_format(values, dtype),
        options=ExpertOptions(**_present(_EXPERTS, values)),
        router=RouterOptions(values["top_k"], **_present(_ROUTER, values)) if router else None,
        routing_dtype=routing_dtype,
        weights_dtype=weights_dtype,
        selection_dtype=torch.float32 if values.get("selection_bias") else None,
        b1=values.get("b1", False),
        b2=values.get("b2", False),
        layout=WeightLayout(**_present(_LAYOUT, values)),
    )
    return Layer(shape, values.get("tf32", False), values.get("resident_experts"))


def _weight_format(values: dict[str, Any], dtype: torch.dtype) -> WeightFormat:
    operands = values.get("experts_dtype", dtype)
    name = values.get("weight_format")
    if name is None:
        extra = _present(("block_size", "block_rows", "scales_dtype", "zero_points"), values)
        if extra:
            raise ValueError(f"{', '.join(extra)} need weight_format")
        return plain_format(operands)
    encoding = ENCODINGS[name]
    rows, columns = encoding.block or (1, 0)
    rows, columns = values.get("block_rows", rows), values.get("block_size", columns)
    if max(rows, columns) >= 2**31:
        raise ValueError(f"block_rows and block_size must be below 2^31, got {rows} and {columns}")
    block = (rows or WHOLE, columns or WHOLE)
    if encoding.block is None and rows != 1:
        raise ValueError(f"block_rows must be 1 in {name}, got {rows}")
    # As an exported node has them: biases come behind zero points there.
    is_filled = encoding.has_zero_points and any(map(values.get, _BIASES))
    zero_points = values.get("zero_points", "experts" if is_filled else "none")
    if zero_points != "none" and not encoding.has_zero_points:
        raise ValueError(f"{name} has no zero points, got zero_points={zero_points}")
    scales = encoding.scales_dtypes[0] if len(encoding.scales_dtypes) == 1 else operands
    return packed_format(
        name,
        operands,
        values.get("scales_dtype", scales),
        block,
        zero_points_block={"none": None, "scales": block, "experts": WHOLE_MATRIX}[zero_points],
    )
