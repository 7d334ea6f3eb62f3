"""What the files of a model of several parts say of themselves, so that a generic loop runs them.

The output of a file is the input of that name of a later one.

Legend: B batch, L tokens of a prompt, I pictures.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "dynamo_moe.part"
"""Metadata key: a :class:`ModelPart` in JSON."""

PartName = Literal["vision", "embedding", "encoder", "decoder"]
PartTask = Literal["image-text-to-text", "text2text-generation-with-past"]

PARTS: dict[PartTask, tuple[PartName, ...]] = {
    "image-text-to-text": ("vision", "embedding", "decoder"),
    "text2text-generation-with-past": ("encoder", "decoder"),
}
"""The parts of a task that takes several files, in the order in which they run."""

FILES: dict[PartName, str] = {part: f"{part}.onnx" for parts in PARTS.values() for part in parts}
"""The name of each part's file in its folder."""

GRID = "image_grid_thw"
"""Frames, rows and columns of each picture's patches, ``[I, 3]``."""


@dataclass(frozen=True)
class ModelPart:
    """What a file is part of.

    Attributes:
        name: What it does. ``vision``: from pictures to ``image_features``, a row for each token
            that stands for a part of a picture, and further features of such rows. ``embedding``:
            from tokens to ``inputs_embeds``, with those rows at their tokens, in order.
            ``encoder``: from tokens to the keys and values that the decoder's layers see of them.
            ``decoder``: from ``inputs_embeds``, or from tokens and those keys and values, to
            logits.
        image_token_id: The token that stands for a part of a picture; None: there is none.
        positions: How the decoder counts tokens. ``text``: by itself, from the attention mask, or
            behind an encoder from the cache. ``grid``: it takes ``position_ids`` ``[3, B, S]``, see
            :func:`grid_positions`.
        spatial_merge_size: With ``grid``, so many rows and columns of patches make one token.
        decoder_start_token_id: What the text of a decoder behind an encoder begins with; None: the
            model does not say, or has no encoder.
    """

    name: PartName
    image_token_id: int | None = None
    positions: Literal["text", "grid"] = "text"
    spatial_merge_size: int = 1
    decoder_start_token_id: int | None = None


def files_in(folder: str | os.PathLike[str]) -> dict[PartName, Path]:
    """Returns the files of a folder by their parts, in the order in which they run.

    Raises:
        ValueError: If one is missing, or there are some of another task.
    """
    present = {
        part: path for part, name in FILES.items() if (path := Path(folder) / name).is_file()
    }
    task: PartTask = (
        "text2text-generation-with-past" if "encoder" in present else "image-text-to-text"
    )
    missing = [FILES[part] for part in PARTS[task] if part not in present]
    others = [FILES[part] for part in present if part not in PARTS[task]]
    if missing or others:
        what = f"no {', '.join(missing)}" if missing else f"{', '.join(others)} of another task"
        raise ValueError(f"folder {os.fspath(folder)} has {what}")
    return {part: present[part] for part in PARTS[task]}


def dumps(part: ModelPart) -> str:
    """Returns the metadata of a part, without what it has none of."""
    return json.dumps({key: value for key, value in vars(part).items() if value is not None})


def loads(text: str) -> ModelPart:
    """Returns what :func:`dumps` wrote."""
    return ModelPart(**json.loads(text))


def grid_positions(
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
    grids: NDArray[np.int64],
    part: ModelPart,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the places of a prompt's tokens in time, height and width.

    A text token is one after the greatest place so far, on all axes. The tokens of a picture all
    begin there, and count its frames, rows and columns; what follows is as many further as the
    picture has rows or columns, whichever are more.

    Args:
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]``, 0 for padding, whose place is 0.
        grids: ``[I, 3]``, of all rows' pictures in order.
        part: The decoder.

    Returns:
        ``[3, B, L]``, and the place of each row's next token, ``[B]``.

    Raises:
        ValueError: If the pictures have other numbers of tokens than ``input_ids``.
    """
    positions = np.zeros((3, *input_ids.shape), np.int64)
    following = np.zeros(len(input_ids), np.int64)
    remaining = [_sizes(grid, part.spatial_merge_size) for grid in grids]
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        column = int((mask == 0).sum())
        while column < len(ids):
            start = following[row]
            if ids[column] != part.image_token_id:
                positions[:, row, column] = start
                following[row] += 1
                column += 1
                continue
            sizes = remaining.pop(0) if remaining else (0, 0, 0)
            count = int(np.prod(sizes))
            if not count or (ids[column : column + count] != part.image_token_id).any():
                raise ValueError(
                    f"row {row} has another number of tokens {part.image_token_id} than its "
                    f"pictures of {GRID} have parts"
                )
            places = np.indices(sizes).reshape(3, -1)[:, : len(ids) - column]
            positions[:, row, column : column + count] = start + places
            following[row] += max(sizes[1:])
            column += count
    if remaining:
        raise ValueError(f"{GRID} has {len(remaining)} pictures more than input_ids have tokens of")
    return positions, following


def _sizes(grid: NDArray[np.int64], merged: int) -> tuple[int, int, int]:
    frames, rows, columns = (int(size) for size in grid)
    return frames, rows // merged, columns // merged
