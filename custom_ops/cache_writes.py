"""``torch.ops.moe.write_to_cache``: new tokens in a cache that has room for all to come.

What it computes is ONNX's TensorScatter with mode ``linear``, as of opset 24.

Legend: B batch, L tokens that the cache has room for, S new tokens, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops._library import LIBRARY

LIBRARY.define(
    "write_to_cache(Tensor cache, Tensor new, Tensor positions) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def write_to_cache(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """Returns a cache with new tokens in the places of those that were there.

    It is for inference: the result has no gradient.

    Args:
        cache: ``[B, ..., L, C]``, of any dtype.
        new: ``[B, ..., S, C]``, in cache's dtype.
        positions: ``[B]`` int64, where the new tokens of each row begin, from 0 to ``L - S``.

    Returns:
        Another tensor of cache's shape and dtype, contiguous.

    Raises:
        ValueError: If a shape does not fit; or, on a CPU, if a position is out of range.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> cache, new = torch.zeros(1, 4, 1), torch.ones(1, 2, 1)
        >>> write_to_cache(cache, new, torch.tensor([1])).flatten()
        tensor([0., 1., 1., 0.])
    """
    result: Tensor = torch.ops.moe.write_to_cache(cache, new, positions)
    return result


@torch.library.register_fake("moe::write_to_cache", lib=LIBRARY)
def _write_to_cache_fake(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    _check(cache, new, positions)
    return cache.new_empty(cache.shape)


@torch.library.impl(LIBRARY, "write_to_cache", "CompositeExplicitAutograd")
def _write_to_cache(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    _check(cache, new, positions)
    last = cache.shape[-2] - new.shape[-2]
    if positions.device.type == "cpu" and ((positions < 0) | (positions > last)).any():
        raise ValueError(
            f"positions must be in 0..{last}, so that {new.shape[-2]} tokens fit into "
            f"{cache.shape[-2]}; got {positions.tolist()}"
        )
    steps = torch.arange(new.shape[-2], device=new.device)
    places_BS = positions[:, None] + steps
    places = places_BS.view(len(positions), *[1] * (new.dim() - 3), new.shape[-2], 1)
    written = cache.clone(memory_format=torch.contiguous_format)
    return written.scatter_(-2, places.expand(new.shape), new)


def _check(cache: Tensor, new: Tensor, positions: Tensor) -> None:
    if cache.dim() < 3 or new.dim() != cache.dim():
        raise ValueError(
            "cache and new must have one number of dimensions, at least 3; got "
            f"{list(cache.shape)} and {list(new.shape)}"
        )
    others = [*range(cache.dim() - 2), -1]
    if any(cache.shape[axis] != new.shape[axis] for axis in others):
        raise ValueError(
            f"new must have cache's sizes but for the tokens, {list(cache.shape)}; got "
            f"{list(new.shape)}"
        )
    if positions.dim() != 1 or positions.shape[0] != cache.shape[0]:
        raise ValueError(
            f"positions must be [{cache.shape[0]}], one for each row; got {list(positions.shape)}"
        )
    if new.dtype != cache.dtype or positions.dtype != torch.int64:
        raise TypeError(
            f"new must be {cache.dtype} as the cache, and positions int64; got {new.dtype} and "
            f"{positions.dtype}"
        )
