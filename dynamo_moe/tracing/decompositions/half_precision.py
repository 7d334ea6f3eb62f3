"""Operators that are computed in float32 where their tensors are in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynamo_moe.tracing.decompositions.table import Function


def is_half(x: Tensor, *_: Any, **__: Any) -> bool:
    """Whether a call's first tensor is in half precision."""
    return x.dtype in {torch.float16, torch.bfloat16}


def widened_half(x: Tensor) -> Tensor:
    """Returns a tensor in half precision as float32, others as they are."""
    return x.float() if is_half(x) else x


def in_float32(operator: Function, x: Tensor, *args: Any, **options: Any) -> Any:
    """Returns the result of an operator on widened tensors, in the first one's dtype."""
    wide = [widened_half(a) if isinstance(a, Tensor) else a for a in (x, *args)]
    return operator(*wide, **options).to(x.dtype)
