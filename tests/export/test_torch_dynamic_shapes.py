"""``dynamic_shapes`` in torch.export's spelling: what PyTorch's documentation shows, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ShapesCollection
from torch.utils import _pytree

import dynamo_moe


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(128, 64), nn.ReLU())
        self.register_buffer("offset", torch.ones(32))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x1) + self.offset, self.second(x2)


class Apart(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y.cos()


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[0] == 4
        assert y.shape[0] >= 6
        return x @ y


class Related(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, w: Tensor, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(w), (x + y).flatten() + z


class Nested(nn.Module):
    # torch.onnx.export takes a dictionary that comes last for kwargs.
    def forward(self, given: dict[str, Any], offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return given["x"] + offset, given["others"][0] * 2, given["others"][1] * 3


@dataclasses.dataclass
class Sample:
    is_last: bool
    count: int
    scale: float
    values: Tensor


_pytree.register_dataclass(Sample)


class Sampled(nn.Module):
    def forward(self, sample: Sample) -> Tensor:
        return sample.count + sample.scale + sample.values


class Scores(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


@dataclasses.dataclass
class Example:
    """A model, the arguments it is traced with, and others, whose sizes the file must take."""

    model: Callable[[], nn.Module]
    args: Callable[[Callable[..., Tensor]], tuple[Any, ...]]
    others: Callable[[Callable[..., Tensor]], tuple[Any, ...]]
    shapes: Any


def collected(args: tuple[Any, ...]) -> ShapesCollection:
    shapes, size = ShapesCollection(), Dim("size")
    shapes[args[0]["x"]] = (size, size + 1, 8)
    shapes[args[0]["others"][0]] = {0: size * 2}
    return shapes


def seen(args: tuple[Any, ...]) -> AdditionalInputs:
    shapes = AdditionalInputs()
    shapes.add((Sample(True, 3, 3.0, torch.ones(4)),))
    return shapes


def products(make: Callable[..., Tensor]) -> tuple[Any, ...]:
    return make(4, 8), make(8, 16)


def other_products(make: Callable[..., Tensor]) -> tuple[Any, ...]:
    return make(4, 7), make(7, 20)


def nested(make: Callable[..., Tensor]) -> tuple[Any, ...]:
    return {"x": make(3, 4, 8), "others": [make(6), make(6)]}, make(8)


def other_nested(make: Callable[..., Tensor]) -> tuple[Any, ...]:
    return {"x": make(5, 6, 8), "others": [make(10), make(6)]}, make(8)


def two(*shapes: Sequence[int]) -> Callable[[Callable[..., Tensor]], tuple[Any, ...]]:
    return lambda make: tuple(make(*shape) for shape in shapes)


BATCH, SIZE = Dim("batch"), Dim("size")
INNER, OUTER = Dim("inner", min=6), Dim("outer", min=16)
WIDTH, HEIGHT = Dim("width", min=4, max=256), Dim("height", max=512)

EXAMPLES = {
    "named": Example(
        Branches,
        two((32, 64), (32, 128)),
        two((5, 64), (5, 128)),
        {"x1": {0: BATCH}, "x2": {0: BATCH}},
    ),
    "derived": Example(
        Apart,
        two((4, 3), (8, 5)),
        two((6, 3), (12, 2)),
        {"x": (WIDTH, None), "y": (2 * WIDTH, HEIGHT)},
    ),
    "derived from no input": Example(
        Apart, two((6, 3), (8, 5)), two((10, 3), (8, 5)), ({0: 2 * Dim("half")}, None)
    ),
    "hints": Example(
        Apart,
        two((4, 3), (8, 5)),
        two((7, 3), (2, 9)),
        {"x": (Dim.DYNAMIC, None), "y": (Dim.DYNAMIC, Dim.DYNAMIC)},
    ),
    "hints with ranges": Example(
        Apart,
        two((4, 3), (8, 5)),
        two((16, 3), (8, 9)),
        [[Dim.DYNAMIC(min=2, max=64), Dim.STATIC], {1: Dim.AUTO(min=3)}],
    ),
    "automatic": Example(
        Product,
        products,
        other_products,
        {"x": {0: Dim.AUTO, 1: Dim.AUTO}, "y": {0: Dim.AUTO, 1: Dim.AUTO}},
    ),
    "sizes": Example(
        Product, products, other_products, {"x": {0: 4, 1: INNER}, "y": {0: INNER, 1: OUTER}}
    ),
    "automatic relations": Example(
        Related,
        two((6, 5), (4,), (8, 4), (32,)),
        two((3, 5), (7,), (2, 7), (14,)),
        {
            "w": (Dim.AUTO, Dim.AUTO),
            "x": [Dim.AUTO],
            "y": (Dim.AUTO, Dim.AUTO),
            "z": (Dim.AUTO,),
        },
    ),
    "nested": Example(
        Nested,
        nested,
        other_nested,
        ({"x": (SIZE, SIZE + 1, 8), "others": [{0: SIZE * 2}, None]}, None),
    ),
    "collection": Example(Nested, nested, other_nested, collected),
    "additional inputs": Example(
        Sampled,
        lambda make: (Sample(True, 3, 3.0, make(3)),),
        lambda make: (Sample(True, 3, 3.0, make(7)),),
        seen,
    ),
    "a registered class": Example(
        Sampled,
        lambda make: (Sample(True, 3, 3.0, make(3)),),
        lambda make: (Sample(True, 3, 3.0, make(7)),),
        {"sample": [None, None, None, {0: "rows"}]},
    ),
    "names": Example(
        Apart, two((4, 3), (8, 5)), two((4, 9), (3, 5)), ({1: "rows"}, ["columns", None])
    ),
    "nothing": Example(Apart, two((4, 3), (8, 5)), two((4, 3), (8, 5)), None),
    "no entries": Example(Apart, two((4, 3), (8, 5)), two((4, 3), (8, 5)), ()),
    "an example of size 1": Example(Scores, two((1, 3)), two((5, 3)), ({0: Dim.AUTO},)),
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def inputs_of(path: Path) -> list[list[str | int]]:
    """The inputs' shapes, with a letter for each symbol in the order in which they come."""
    letters: dict[str, str] = {}
    return [
        [
            letters.setdefault(dim.dim_param, chr(ord("a") + len(letters)))
            if dim.dim_param
            else dim.dim_value
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in onnx.load(path).graph.input
    ]


def results(path: Path, args: tuple[Any, ...]) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tensors = [leaf.numpy() for leaf in _pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, tensors, strict=True)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_pytorchs_documentation(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = EXAMPLES[name]
    model, args = example.model().eval(), example.args(random)
    shapes = example.shapes(args) if callable(example.shapes) else example.shapes
    ours, theirs = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    dynamo_moe.export(model, args, ours, dynamic_shapes=shapes)
    torch.onnx.export(model, args, theirs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert inputs_of(ours) == inputs_of(theirs)
    for given in (args, example.others(random)):
        expected = _pytree.tree_leaves(model(*given))
        for path in (ours, theirs):
            for result, right in zip(results(path, given), expected, strict=True):
                np.testing.assert_allclose(result, right.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "shapes", "message"),
    [
        (two((4, 3)), ({-1: Dim.DYNAMIC},), "names dimension -1 of 'x', whose example has 2 dim"),
        (two((4, 3)), (("rows",),), r"gives \('rows',\) for 'x', a sequence of 1; its example"),
        (two((4, 3)), ("rows",), "gives 'rows' for 'x'; a tensor's is a mapping from dimension to"),
        (two((4, 3)), ({0: 5},), "gives dimension 0 of 'x' the size 5; its example has size 4"),
        (two((4, 3)), ({0: True},), "gives dimension 0 of 'x' True; it must be a name, a torch"),
        (two((4, 3)), ({0: ""},), "gives dimension 0 of 'x' ''; it must be a name"),
        (two((4, 3)), ({}, {}), "a sequence of 2; .* for each of the example's 1 arguments: x"),
        (two((4, 3)), {"y": {0: BATCH}}, "names 'y'; the example's arguments: x"),
        (two((4, 3)), 7, "must be 'batch', a mapping or a sequence of arguments, .*; got 7"),
        (two((4, 3)), ({0: Dim("n", min=5)},), "whose example has size 4: it must be in the range"),
        (two((4, 3)), ({0: Dim("n", max=3)},), "whose example has size 4: it must be in the range"),
        (two((5, 3)), ({0: 2 * BATCH},), "has size 5, for which batch is no integer"),
        (two((4, 3)), {"x": [BATCH, BATCH]}, "has size 3, and to dimension 0 of 'x', which has si"),
        (two((4, 7)), {"x": [BATCH, 2 * BATCH]}, "with the size of dimension 0 of 'x' it is 8"),
        (two((4, 4)), {"x": [BATCH, Dim("batch", max=9)]}, "dimensions of one name have one range"),
        (lambda _: (3,), (Dim.DYNAMIC,), "for 'x', which is 3 and no tensor: the file has it as a"),
        (lambda make: ([make(2), make(2)],), ([{0: "n"}],), "for 'x', which is a list of 2"),
        (lambda make: ({"a": make(2)},), ({"b": None},), "which is a dict of keys 'a'; it"),
        (lambda make: ({"a": make(2)},), ([None],), "which is a dict of keys 'a'; it must"),
        (lambda make: ([make(2)],), ([{1: "n"}],), r"names dimension 1 of 'x\[0\]', whose example"),
    ],
)  # fmt: skip
def test_what_is_no_dynamic_shape(
    args: Callable[..., tuple[Any, ...]], shapes: Any, message: str, tmp_path: Path
) -> None:
    class Anything(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    with pytest.raises(ValueError, match=f"dynamic_shapes .*{message}"):
        dynamo_moe.export(Anything(), args(random), tmp_path / "m.onnx", dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        # A mapping adds to the batch, whatever it names dimensions with; a sequence does not.
        ({"x": {1: Dim.DYNAMIC}}, [["a", "b"], ["a", 3]]),
        ({"x": {1: Dim("width")}}, [["a", "b"], ["a", 3]]),
        ({"x": {0: Dim.STATIC, 1: "width"}}, [[2, "a"], ["b", 3]]),
        ({"x": {0: 2}}, [[2, 3], ["a", 3]]),
        ({"x": [Dim.STATIC, Dim.DYNAMIC], "y": None}, [[2, "a"], [2, 3]]),
        (({1: Dim.DYNAMIC}, {}), [[2, "a"], [2, 3]]),
        # Example sizes of 1 and 0 are repeated for a range, and for what is computed from them.
        ({"x": {1: Dim("width", min=4)}}, [["a", "b"], ["a", 3]]),
    ],
)
def test_what_else_is_symbolic(
    shapes: Any, expected: list[list[int | str]], tmp_path: Path
) -> None:
    path, width = tmp_path / "m.onnx", 1 if "min=4" in repr(shapes) else 3
    dynamo_moe.export(Apart(), (random(2, width), random(2, 3)), path, dynamic_shapes=shapes)
    assert inputs_of(path) == expected


def test_sizes_computed_from_one_that_is_repeated(tmp_path: Path) -> None:
    path, args = tmp_path / "m.onnx", (random(1, 3), random(3, 5))
    shapes = {"x": {0: BATCH}, "y": {0: 2 * BATCH + 1}}
    dynamo_moe.export(Apart(), args, path, dynamic_shapes=shapes)
    names = [value.type.tensor_type.shape.dim[0].dim_param for value in onnx.load(path).graph.input]
    assert names == ["batch", "2*batch + 1"]
    assert [each.shape[0] for each in results(path, (random(4, 3), random(9, 5)))] == [4, 9]


@pytest.mark.parametrize(("shape", "is_right"), [(Dim.DYNAMIC(max=15), True), (Dim.DYNAMIC, False)])
def test_decisions_matter_in_the_range_alone(shape: Any, is_right: bool, tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] % 16 == 0 else x

    path = tmp_path / "m.onnx"
    if is_right:
        dynamo_moe.export(Blocks(), (random(5, 3),), path, dynamic_shapes=({0: shape},))
        assert path.exists()
    else:
        with pytest.raises(dynamo_moe.ExportError, match=r"is wrong where x\.shape\[0\] is 16"):
            dynamo_moe.export(Blocks(), (random(5, 3),), path, dynamic_shapes=({0: shape},))


def test_static_is_said_of_a_number_too(tmp_path: Path) -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor, number: int) -> Tensor:
            return x + number

    path, shapes = tmp_path / "model.onnx", {"x": {0: Dim("n")}, "number": Dim.STATIC}
    dynamo_moe.export(Added(), (torch.ones(7, 5), 5), path, dynamic_shapes=shapes)
    assert dynamo_moe.verify(path, Added(), [(torch.randn(3, 5), 5)]).passed
