"""PyTorch's attention, written out: as PyTorch computes it, at other sizes than the example's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import dynamo_moe
from dynamo_moe.private import tracer

# Batch, new tokens, keys.
EXAMPLE, *OTHERS = (2, 5, 7), (1, 1, 1), (3, 4, 9), (2, 0, 3)


def mask_of(batch: int, tokens: int, keys: int, heads: int = 1) -> Tensor:
    """A mask that hides about half of the keys, but never the first."""
    hidden = torch.rand(batch, heads, tokens, keys) < 0.5
    hidden[..., :1] = False
    return ~hidden


def added(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.where(mask, torch.randn(mask.shape), -torch.inf).to(dtype)


def hiding(batch: int, tokens: int, keys: int) -> Tensor:
    """An added mask that hides all keys from the last token of each row, as of padding."""
    mask = mask_of(batch, tokens, keys)
    mask[..., -1:, :] = False
    return added(mask)


def blind(batch: int, tokens: int, keys: int) -> Tensor:
    """A mask that hides all keys from the last token of each row."""
    mask = mask_of(batch, tokens, keys)
    mask[..., -1:, :] = False
    return mask


# What is passed beside queries, keys and values of some sizes; their heads; their dtype.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "causal": {"is_causal": True},
    "booleans": {"mask": mask_of},
    "booleans of a row": {"mask": lambda b, s, k: mask_of(b, 1, k)},
    "booleans of two axes": {"mask": lambda b, s, k: mask_of(1, s, k)[0, 0]},
    "booleans of each head": {"mask": lambda b, s, k: mask_of(b, s, k, heads=4)},
    "booleans, hiding all": {"mask": blind},
    "booleans of a row, hiding all": {"mask": lambda b, s, k: blind(b, 1, k)},
    "added": {"mask": lambda *sizes: added(mask_of(*sizes))},
    "added, hiding all": {"mask": hiding},
    "grouped heads": {"groups": 2, "enable_gqa": True, "mask": mask_of},
    "one group": {"groups": 1, "enable_gqa": True, "is_causal": True},
    "half precision": {"dtype": torch.float16, "mask": mask_of},
    "half precision, hiding all": {"dtype": torch.float16, "mask": blind},
    "half precision, added": {
        "dtype": torch.float16,
        "mask": lambda *sizes: added(mask_of(*sizes), torch.float16),
    },
    "half precision, added in float32": {
        "dtype": torch.float16,
        "mask": lambda *sizes: added(mask_of(*sizes)),
    },
}


class Attends(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
        return scaled_dot_product_attention(query, key, value, mask, **self.options)


class AllOf(nn.Module):
    """Several, in one file."""

    def __init__(self, parts: list[Attends]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: list[tuple[Tensor, ...]]) -> Any:
        return [part(*given) for part, given in zip(self.parts, inputs, strict=True)]


def inputs_of(case: dict[str, Any], batch: int, tokens: int, keys: int) -> tuple[Tensor, ...]:
    dtype, groups = case.get("dtype", torch.float32), case.get("groups", 4)
    tensors = [
        torch.randn(batch, heads, length, width).to(dtype)
        for heads, length, width in ((4, tokens, 8), (groups, keys, 8), (groups, keys, 16))
    ]
    return *tensors, *([case["mask"](batch, tokens, keys)] if "mask" in case else [])


BATCH, TOKENS, KEYS = (torch.export.Dim(name) for name in ("batch", "tokens", "keys"))


def shapes_of(inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    batch, tokens, keys = BATCH, TOKENS, KEYS
    shapes: list[Any] = [{0: batch, 2: tokens}, {0: batch, 2: keys}, {0: batch, 2: keys}]
    for mask in inputs[3:]:
        axes = dict(zip(range(-4, 0), (batch, None, tokens, keys), strict=True))
        sizes = {axis: mask.shape[axis] for axis in axes if -axis <= mask.ndim}
        shapes.append(
            {
                mask.ndim + axis: axes[axis]
                for axis, size in sizes.items()
                if axes[axis] is not None and size > 1
            }
        )
    return tuple(shapes)


@pytest.mark.parametrize("opset", [20, 23])
def test_attention(opset: int, tmp_path) -> None:
    check(list(CASES), opset, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("names", "opset"),
    [
        ([*CASES][::3], 23),
        *(pytest.param([*CASES], opset, marks=pytest.mark.every) for opset in (20, 23)),
    ],
)
@pytest.mark.every
def test_the_same_in_pytorchs_exporter(names, opset, tmp_path, monkeypatch) -> None:
    """It applies the same decomposition, in many times the time."""
    monkeypatch.setattr(tracer, "missing", lambda: "a test")
    check(names, opset, tmp_path / "m.onnx")


def check(names: list[str], opset: int, path: Path) -> None:
    torch.manual_seed(0)
    cases = [CASES[name] for name in names]
    options = ("scale", "is_causal", "enable_gqa")
    model = AllOf([Attends({k: case[k] for k in case if k in options}) for case in cases])
    inputs = [inputs_of(case, *EXAMPLE) for case in cases]
    shapes = ([shapes_of(given) for given in inputs],)
    report = dynamo_moe.export(
        model, (inputs,), path, dynamic_shapes=shapes, opset=opset, fuse=False
    )
    assert "Attention" not in report.nodes
    assert report.nodes["Transpose"] == len(cases)  # No shapes are computed for it.
    session = onnxruntime.InferenceSession(path)
    for sizes in (EXAMPLE, *OTHERS):
        inputs = [inputs_of(case, *sizes) for case in cases]
        flat = [tensor.numpy() for given in inputs for tensor in given]
        values = zip((each.name for each in session.get_inputs()), flat, strict=True)
        results = session.run(None, dict(values))
        for name, found, expected in zip(names, results, model(inputs), strict=True):
            assert found.shape == expected.shape, (name, sizes)
            error = (torch.from_numpy(found) - expected).abs().double()
            tolerance = 1e-5 if expected.dtype == torch.float32 else 5e-3
            assert (error <= tolerance).all(), (name, sizes, error.max())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_a_width_that_is_symbolic(options, tmp_path) -> None:
    model, path = Attends({**options, "enable_gqa": True}), tmp_path / "m.onnx"
    inputs = inputs_of({"groups": 2}, *EXAMPLE)
    shapes = tuple({2: "tokens", 3: "width"} for _ in inputs)
    dynamo_moe.export(model, inputs, path, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    for width in (1, 3, 16):
        given = [tensor.repeat(1, 1, 1, 2)[..., :width].contiguous() for tensor in inputs]
        feed = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        [found] = session.run(None, feed)
        torch.testing.assert_close(torch.from_numpy(found), model(*given), atol=1e-5, rtol=0)


def test_dropout_is_off(tmp_path) -> None:
    inputs = inputs_of({}, *EXAMPLE)
    dynamo_moe.export(Attends({"dropout_p": 0.5}).eval(), inputs, tmp_path / "m.onnx")
    operators = Counter(node.op_type for node in ir.load(tmp_path / "m.onnx").graph)
    assert "Dropout" not in operators


class Masked(nn.Module):
    """Attention by a mask that is computed from token ids, of which 0 is padding."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.register_buffer("triangle", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        tokens, length = (ids != 0)[:, None, None], ids.shape[1]
        positions = torch.arange(length)
        causal = {
            "given": tokens,
            "beside a constant": tokens.logical_not().logical_not() & torch.tensor(True),
            "two": tokens & (ids > 1)[:, None, None].expand(-1, 1, length, -1),
            "buffer": tokens & self.triangle[:length, :length],
            "positions": positions[:, None] >= positions,
            "padding": tokens & (positions[:, None] >= positions),
        }
        return scaled_dot_product_attention(x, x, x, causal[self.mask])


@pytest.mark.parametrize("mask", ["given", "beside a constant", "two", "buffer"])
def test_masks_that_hide_all(mask: str, tmp_path) -> None:
    model, ids = Masked(mask).eval(), torch.tensor([[2, 3, 0, 0], [0, 0, 0, 0]])
    x = torch.randn(2, 1, 4, 8)
    dynamo_moe.export(model, (ids, x), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    [found] = session.run(None, {"ids": ids.numpy(), "x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(ids, x), atol=1e-5, rtol=0)
    assert not found[1].any()


@pytest.mark.parametrize("mask", ["positions", "padding"])
def test_masks_by_positions_cost_nothing(mask: str, tmp_path) -> None:
    inputs = torch.ones(2, 4, dtype=torch.int64), torch.randn(2, 1, 4, 8)
    shapes = {"ids": {1: "length"}, "x": {2: "length"}}
    report = dynamo_moe.export(Masked(mask), inputs, tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert "ReduceMax" not in report.nodes
