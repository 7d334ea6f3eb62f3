"""What tokens see, and where they are, by few nodes: the same at all lengths and with any padding.

Each function gets a language model's tokens, mask and cache, is exported for ONNX Runtime and
compared with PyTorch, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe

W = 3
# B, S and P: prompts, steps, and parts of prompts.
SIZES = ((1, 5, 0), (3, 1, 6), (2, 4, 3), (2, 9, 0), (1, 1, 0), (2, 2, 9))
NAMES = {
    "tokens": {0: "batch", 1: "sequence"},
    "attention_mask": {0: "batch", 1: "total_sequence"},
    "past": {0: "batch", 2: "past"},
}


class Model(nn.Module):
    """A function of a language model's inputs as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tokens: Tensor, attention_mask: Tensor, past: Tensor) -> Tensor:
        return self.function(tokens, attention_mask, past)


def lengths(tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places of all keys and of the new tokens."""
    new, before = tokens.shape[1], past.shape[2]
    keys, queries = torch.arange(new + before), torch.arange(new) + before
    return keys[None, None, None, :], queries[None, None, :, None]


def kept(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    return mask[:, : tokens.shape[1] + past.shape[2]].bool()[:, None, None]


def causal(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    return torch.where((keys <= queries) & kept(tokens, mask, past), 0.0, -1.0)


def windowed(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    seen = (keys > queries - W) & (keys <= queries) & kept(tokens, mask, past)
    return torch.where(seen, 0.0, -1.0)


def both(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    return torch.stack([causal(tokens, mask, past), windowed(tokens, mask, past)])


def positions(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    return (mask.cumsum(-1) - mask)[:, -tokens.shape[1] :] * 2


def first_tokens(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    """Not the new ones."""
    return mask.cumsum(-1)[:, : tokens.shape[1]] * 2


def earlier(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    return torch.where((keys < queries) & kept(tokens, mask, past), 0.0, -1.0)


def from_the_second(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    return torch.where((keys + 1 <= queries) & kept(tokens, mask, past), 0.0, -1.0)


def without_the_cache(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    seen = (keys <= queries - past.shape[2]) & kept(tokens, mask, past)
    return torch.where(seen, 0.0, -1.0)


def window_of_others(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    seen = (keys > queries * 2 - W) & (keys <= queries) & kept(tokens, mask, past)
    return torch.where(seen, 0.0, -1.0)


def like_keys(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    seen = (keys % 2 == queries % 2) & (keys <= queries) & kept(tokens, mask, past)
    return torch.where(seen, 0.0, -1.0)


def two_windows(tokens: Tensor, mask: Tensor, past: Tensor) -> Tensor:
    keys, queries = lengths(tokens, past)
    seen = (keys > queries - W) & (keys > queries - 2) & (keys <= queries)
    return torch.where(seen & kept(tokens, mask, past), 0.0, -1.0)


def operators(
    function: Callable[..., Tensor], path: Path, names: Any = NAMES, **options: Any
) -> list[str]:
    """Exports a function, compares the file with it, and returns the file's operators."""
    example = torch.randint(9, (2, 4)), torch.ones(2, 7, dtype=torch.int64), torch.randn(2, 2, 3, 8)
    options = {"target": "onnxruntime", **options}
    dynamo_moe.export(Model(function), example, path, dynamic_shapes=names, **options)
    session = onnxruntime.InferenceSession(path)
    taken = {value.name for value in session.get_inputs()}
    rng = np.random.default_rng(0)
    for batch, new, before in SIZES:
        total = new + before
        left = np.arange(total) >= rng.integers(total, size=(batch, 1))
        holes = rng.integers(2, size=(batch, total)) > 0
        for mask in (np.ones((batch, total)), left, left[:, ::-1], holes, np.zeros_like(holes)):
            feeds = {
                "tokens": rng.integers(9, size=(batch, new)),
                "attention_mask": mask.astype(np.int64),
                "past": rng.standard_normal((batch, 2, before, 8), np.float32),
            }
            expected = function(*map(torch.from_numpy, feeds.values()))
            given = {name: feed for name, feed in feeds.items() if name in taken}
            np.testing.assert_array_equal(session.run(None, given)[0], expected.numpy())
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(("function", "count"), [(causal, 1), (windowed, 2), (both, 2)])
def test_masks_are_triangles(function: Any, count: int, tmp_path: Path) -> None:
    found = operators(function, tmp_path / "m.onnx")
    assert found.count("Trilu") == count
    assert not {"Range", "And", "LessOrEqual", "Greater", "Slice"} & {*found}


@pytest.mark.parametrize(
    "function",
    [earlier, from_the_second, without_the_cache, window_of_others, like_keys, two_windows],
)
def test_other_masks_keep_their_nodes(function: Any, tmp_path: Path) -> None:
    assert "Trilu" not in operators(function, tmp_path / "m.onnx")


def test_other_files_keep_masks(tmp_path: Path) -> None:
    for options in ({"target": "plugin", "opset": 23}, {"fuse": False}, {"opset": 22}):
        assert "Trilu" not in operators(causal, tmp_path / "m.onnx", **options)


def test_positions_of_new_tokens(tmp_path: Path) -> None:
    found = operators(positions, tmp_path / "m.onnx")
    assert sorted(found) == ["CumSum", "Mul", "Shape", "Slice"]


def test_other_tokens(tmp_path: Path) -> None:
    assert "Slice" in operators(first_tokens, tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["attention_mask", "past", "tokens"])
def test_sizes_of_other_names_have_no_sum(name: str, tmp_path: Path) -> None:
    """A longer mask is then cut off, as the function does."""
    names = NAMES | {name: {**NAMES[name], 2 if name == "past" else 1: "other"}}
    found = operators(causal, tmp_path / "m.onnx", names)
    assert {"Slice", "Trilu"} <= {*found}
