"""Operators that mark, in the trace of a model, the tensors that come out of equal blocks.

``run``, ``block`` and ``leaf`` say which tensor it is: the number of the run, the block's place in
it, and the place among the block's tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Without a kernel for autograd: a mark is made for each block that is passed over.
_LIBRARY = torch.library.Library("dynamo_moe", "FRAGMENT")


def _same(result: Tensor, *_: Any) -> Tensor:
    return result.clone()


def _like(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_strided(
        result.shape, result.stride(), dtype=result.dtype, device=result.device
    )


def _mark(name: str, arguments: str) -> Any:
    _LIBRARY.define(f"{name}(Tensor result, {arguments}int run, int block, int leaf) -> Tensor")
    _LIBRARY.impl(name, _same, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dynamo_moe::{name}", _like, lib=_LIBRARY)
    return getattr(torch.ops.dynamo_moe, name).default


END = _mark("end_of_block", "")
"""A result of a block, or what stands for it where the block is passed over."""

KEPT = _mark("kept_by_block", "Tensor[] given, ")
"""What a block leaves in a layer of a cache that held ``given``, or what stands for it."""
