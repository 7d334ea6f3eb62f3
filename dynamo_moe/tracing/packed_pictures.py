"""Vision towers of transformers, for any number of pictures.

Many take the patches of all pictures in one row, at every size. Their code makes numbers of the
pictures' heights and widths, to loop over pictures and to split the row, and a trace can make none.
Here the place of a patch is computed for all patches at once, and a patch attends to those of its
picture by a mask.

Legend: N patches of all pictures, I pictures, H attention heads, C width of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynamo_moe.private import tracer
from dynamo_moe.private import transformers as private
from dynamo_moe.private.pytorch import FakeTensor
from dynamo_moe.process_state import exclusive, replaced

_MODELS = "transformers.models."
# transformers hands the pictures' ends over to implementations whose name has "flash" in it.
_ATTENTION = "dynamo_moe_flash_of_pictures"


@contextmanager
def packed_pictures(tower: nn.Module, patches: int) -> Iterator[None]:
    """Lets a vision tower take a row of so many patches whose pictures' sizes are not numbers.

    Each picture is one frame. Functions are replaced in the process, which one thread does at a
    time.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    loaded = [module for name, module in [*sys.modules.items()] if name.startswith(_MODELS)]
    with exclusive(), ExitStack() as stack:
        for module in loaded:
            for name in _REPLACEMENTS.keys() & vars(module).keys():
                change = partial(_for_patches, _REPLACEMENTS[name], patches)
                stack.enter_context(replaced(module, name, change))
        stack.enter_context(private.attention_selected(tower, _ATTENTION))
        stack.enter_context(unsplit_pictures())
        yield


@contextmanager
def unsplit_pictures() -> Iterator[None]:
    """Lets a row with all pictures' features stay whole where it is split by their sizes."""
    with exclusive(), ExitStack() as stack:
        if "tolist" in vars(FakeTensor):  # Modes do not see that one.
            stack.enter_context(replaced(FakeTensor, "tolist", lambda _: lambda tensor: _Sizes()))
        stack.enter_context(_Unsplit())
        yield


@contextmanager
def listed_pictures() -> Iterator[None]:
    """Lets a list of the features of as many pictures as there are have one item, with all."""
    with exclusive(), replaced(Tensor, "__iter__", _whole), replaced(Tensor, "__len__", _unknown):
        yield


def _unknown(original: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    def length(tensor: Tensor) -> int:
        if tensor.ndim and not tracer.has_static_value(tensor.shape[0]):
            raise TypeError("the number of pictures is unknown")  # A list is made without it.
        return original(tensor)

    return length


def _whole(original: Callable[[Tensor], Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
    def iterate(tensor: Tensor) -> Iterator[Tensor]:
        is_known = not tensor.ndim or tracer.has_static_value(tensor.shape[0])
        return original(tensor) if is_known else iter([tensor])

    return iterate


class _Sizes(list[int]):
    """The numbers in a tensor, which a trace does not know."""


class _Unsplit(TorchFunctionMode):
    """Lets a row that is split by sizes of pictures stay whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            return _Sizes()
        if getattr(func, "__name__", "") == "split" and isinstance(args[1], _Sizes):
            return args[:1]
        return func(*args, **(kwargs or {}))


class _Places(NamedTuple):
    """Where each patch is, ``[N]`` each: its picture's first patch, and its place in that."""

    first: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor


def _places(grid_I3: Tensor, patches: int, merged: int | Tensor) -> _Places:
    """Returns the places of patches in blocks of ``merged`` rows and columns, one after another."""
    counts_I = grid_I3.prod(-1)
    ends_I = counts_I.cumsum(0)
    number_N = torch.arange(patches, device=grid_I3.device)
    picture_N = (number_N[:, None] >= ends_I).sum(-1)
    height, width = grid_I3[picture_N, 1], grid_I3[picture_N, 2]
    block = merged[picture_N] if isinstance(merged, Tensor) else merged
    first = (ends_I - counts_I)[picture_N]
    within = number_N - first
    frame, within = within // (height * width), within % (height * width)
    number, row, column = within // (block * block), within // block % block, within % block
    row, column = (
        row + number // (width // block) * block,
        column + number % (width // block) * block,
    )
    return _Places(first, frame, row, column, height, width)


def _position_ids(
    patches: int,
    grid_thw: Tensor,
    spatial_merge_size: int | Tensor,
    include_temporal: bool = False,
    kwargs: Any = None,
) -> Tensor:
    """Returns rows and columns ``[N, 2]``, or frames too ``[N, 3]``."""
    places = _places(grid_thw, patches, spatial_merge_size)
    axes = (places.row, places.column)
    return torch.stack((places.frame, *axes) if include_temporal else axes, dim=-1)


def _interpolation(
    patches: int,
    grid_thw: Tensor,
    num_grid_per_side: int,
    mode: str = "bilinear",
    align_corners: bool = False,
    spatial_merge_size: int = 1,
    padding: str = "border",
    kwargs: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns which of a square table's embeddings each patch takes, and how much of each."""
    places = _places(grid_thw, patches, spatial_merge_size)
    taps_weights = private.interpolation_taps()
    rest = num_grid_per_side, mode, align_corners, padding
    rows, row_weights = taps_weights(places.row, places.height, *rest)
    columns, column_weights = taps_weights(places.column, places.width, *rest)
    indices = rows[:, :, None] * num_grid_per_side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.flatten(1), weights.flatten(1)


def _frame_index(patches: int, grid_thw: Tensor, kwargs: Any = None) -> Tensor:
    """Returns 0 for patches of pictures, which are no frames of a video."""
    return torch.zeros(patches, dtype=torch.int64, device=grid_thw.device)


def _merge_index(
    patches: int, grid_thw: Tensor, kernel_height: int, kernel_width: int, kwargs: Any = None
) -> Tensor:
    """Returns which patches, row by row in a picture, each block has, ``[blocks, 1, in each]``."""
    if kernel_height != kernel_width:
        raise ValueError(f"blocks must be square, got {kernel_height} by {kernel_width} patches")
    places = _places(grid_thw, patches, kernel_height)
    number_N = places.first + places.row * places.width + places.column
    return number_N.view(-1, 1, kernel_height * kernel_width)


def _merged_places(
    patches: int, grid_thw: Tensor, kernel_height: int, kernel_width: int, kwargs: Any = None
) -> tuple[Tensor, Tensor, int]:
    """Returns where each patch is, block by block, and its weight, ``[N]`` each, and the blocks.

    A picture has one frame, so that the weight of each patch in the mean over frames is 1.
    """
    numbers = _merge_index(patches, grid_thw, kernel_height, kernel_width)
    number_N = numbers.flatten()
    in_order_N = torch.arange(patches, device=grid_thw.device)
    places_N = torch.zeros_like(number_N).scatter(0, number_N, in_order_N)
    return places_N, torch.ones(patches, device=grid_thw.device), numbers.shape[0]


def _shuffle_index(patches: int, grid_thw: Tensor, merge_size: int, kwargs: Any = None) -> Tensor:
    """Returns which patches, row by row in a picture, come block by block, ``[N]``."""
    return _merge_index(patches, grid_thw, merge_size, merge_size).flatten()


def _windows(
    patches: int,
    grid_thw: Tensor,
    spatial_merge_size: int,
    window_size: int,
    patch_size: int,
    kwargs: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns blocks of patches by windows, ``[blocks]``, and where windows end, ``[blocks + 1]``.

    Behind a 0 there is an end for each block, that of its window: how many windows there are, only
    the pictures' sizes say. The last windows of a row and of a column are what is left.
    """
    merged, side = spatial_merge_size, window_size // spatial_merge_size // patch_size
    places = _places(
        grid_thw // torch.tensor([1, merged, merged], device=grid_thw.device),
        patches // merged**2,
        1,
    )
    top, left = places.row // side * side, places.column // side * side
    high, wide = (places.height - top).clamp(max=side), (places.width - left).clamp(max=side)
    begin = places.first + places.frame * places.height * places.width
    begin = begin + top * places.width + left * high  # Windows above, and windows to the left.
    new = begin + (places.row - top) * wide + places.column - left
    old = torch.arange(patches // merged**2, device=grid_thw.device)
    index = torch.zeros_like(old).scatter(0, new, old)
    ends = (begin + high * wide)[index] * merged**2
    return index, nn.functional.pad(ends, (1, 0))


def _longest(patches: int, *_: Any, **__: Any) -> int:
    return patches


def _ends(patches: int, grid_thw: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns 0 and where each picture ends, ``[I + 1]``."""
    return nn.functional.pad(grid_thw.prod(-1).cumsum(0), (1, 0))


def _ends_and_longest(patches: int, grid_thw: Tensor, *_: Any, **__: Any) -> tuple[Tensor, int]:
    return _ends(patches, grid_thw), patches


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention among the patches of each picture, ``[1, H, N, C]``; keys may have fewer heads."""
    number_N = torch.arange(query.shape[2], device=query.device)
    picture_N = (number_N[:, None] >= cu_seq_lens_q[1:]).sum(-1)
    mask_NN = picture_N[:, None] == picture_N
    grouped = query.shape[1] != key.shape[1]
    result = nn.functional.scaled_dot_product_attention(
        query, key, value, mask_NN[None, None], scale=scaling, enable_gqa=grouped
    )
    return result.transpose(1, 2).contiguous(), None


def _for_patches(
    replacement: Callable[..., Any], patches: int, original: Callable[..., Any]
) -> Callable[..., Any]:
    if replacement is _merge_index and "tuple" in str(signature(original).return_annotation):
        replacement = _merged_places  # From transformers 5.24 on.
    return partial(replacement, patches)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "get_vision_position_ids": _position_ids,
    "get_vision_interpolation_indices_and_weights": _interpolation,
    "get_vision_frame_index": _frame_index,
    "get_vision_temporal_merge_index": _merge_index,
    "get_vision_pixel_shuffle_index": _shuffle_index,
    "get_vision_window_index": _windows,
    "get_vision_cu_seqlens": _ends,
    "get_vision_attention_seqlens": _ends_and_longest,
    "get_max_seqlen": _longest,
}
