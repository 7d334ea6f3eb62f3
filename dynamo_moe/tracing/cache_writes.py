"""``torch.ops.moe.write_to_cache`` as TensorScatter, which standard operators have from 24 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch

import custom_ops  # noqa: F401  Registers torch.ops.moe.

OPSET = 24
"""The first version of the standard operators that has TensorScatter."""

_op: Any = onnxscript.values.Opset("", OPSET)


def _written(cache: Any, new: Any, positions: Any) -> Any:
    return _op.TensorScatter(cache, new, positions, axis=-2, mode="linear")


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.moe.write_to_cache.default: _written
}
"""By operator, its translation."""
