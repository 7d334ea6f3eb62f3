"""Breaks exported files in many ways, and counts which of them ``verify`` catches.

    python tests/support/broken_files.py             # ten models, for some minutes
    python tests/support/broken_files.py bert swin   # those whose names contain one of the words
    python tests/support/broken_files.py --half      # in float16, without the recurrent one

Each mutation changes one thing of a right file: a weight, two weights, an operator, an axis, a
number, a mask. Whether that changes the outputs is found out apart from ``verify``, in ONNX Runtime
alone, on inputs of other seeds: mutations that change no output by more than the tolerance, and
those that ONNX Runtime refuses, are not counted. The exit code is 1 if one that counts is not
caught.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dynamo_moe
import transformer_models
from dynamo_moe.files.inputs import random_inputs
from dynamo_moe.models import swin_moe_digits
from dynamo_moe.tolerances import tolerance_for
from dynamo_moe.verification.errors import worst_errors
from small_models import mlp_model

Made = tuple[nn.Module, dict[str, Any], dict[str, Any]]
"""A model, its example as keyword arguments, and its dynamic shapes."""
Mutation = Callable[[onnx.ModelProto, random.Random], bool]
"""Changes a file in place; False if it has nothing to change."""

# Mutations of each kind that are tried in a model, and seeds of the inputs that tell the truth.
TRIES, SEEDS = 3, range(100, 104)
LENGTH = {1: "length"}


# --- Models ---


class Classifier(nn.Module):
    """A recurrent layer, and the index of the largest of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 16)
        self.layer = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 1000)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.layer(self.words(ids))[0])
        return scores, scores.argmax(dim=-1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.GELU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        nn.init.uniform_(self.layers[1].running_var, 0.5, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image).softmax(dim=-1)


class Encoder(nn.Module):
    """PyTorch's own encoder, with a mask that hides what is padded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding)


def _transformer(name: str) -> Made:
    model, inputs = getattr(transformer_models, name)()
    dynamo_moe.convert(model)
    shapes = {key: LENGTH for key in inputs if key != "pixel_values"}
    return model, inputs, shapes


def _tokens(model: nn.Module) -> Made:
    dynamo_moe.convert(model)
    return model, {"input": torch.randn(2, 5, 16)}, {"input": LENGTH}


def _digits() -> Made:
    model = swin_moe_digits()
    dynamo_moe.convert(model)
    return model, {"images": torch.randn(2, 1, 8, 8)}, {}


def _encoder() -> Made:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    inputs = {"x": torch.randn(2, 5, 16), "padding": padding}
    return Encoder(), inputs, dict.fromkeys(inputs, LENGTH)


MODELS: dict[str, Callable[[], Made]] = {
    "moe": lambda: _tokens(mlp_model()),
    "recurrent": lambda: (
        Classifier(),
        {"ids": torch.randint(200, (2, 5))},
        {"ids": LENGTH},
    ),
    "images": lambda: (Images(), {"image": torch.randn(2, 3, 16, 16)}, {}),
    "encoder": _encoder,
    "swin": _digits,
    **{
        name: functools.partial(_transformer, name)
        for name in ("llama", "mixtral", "deepseek_v3", "t5", "bert")
    },
}


# --- Mutations ---


def _weights(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Returns the tensors of floats that have at least a few."""
    return [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= 4
    ]


def _changed(
    model: onnx.ModelProto, chance: random.Random, change: Callable[[np.ndarray], np.ndarray]
) -> bool:
    weights = _weights(model)
    if not weights:
        return False
    tensor = chance.choice(weights)
    array = change(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
    return True


def negated(model: onnx.ModelProto, chance: random.Random) -> bool:
    return _changed(model, chance, np.negative)


def scaled(model: onnx.ModelProto, chance: random.Random) -> bool:
    return _changed(model, chance, lambda array: array * np.float32(1.01))


def a_row_of_zeros(model: onnx.ModelProto, chance: random.Random) -> bool:
    def change(array: np.ndarray) -> np.ndarray:
        array[chance.randrange(len(array))] = 0
        return array

    return _changed(model, chance, change)


def rows_in_another_order(model: onnx.ModelProto, chance: random.Random) -> bool:
    return _changed(model, chance, lambda array: np.roll(array, 1, axis=max(0, array.ndim - 2)))


def two_weights_swapped(model: onnx.ModelProto, chance: random.Random) -> bool:
    weights = _weights(model)
    pairs = [
        (first, second)
        for number, first in enumerate(weights)
        for second in weights[:number]
        if first.dims == second.dims
    ]
    if not pairs:
        return False
    first, second = chance.choice(pairs)
    first.name, second.name = second.name, first.name
    return True


def a_number_off_by_one(model: onnx.ModelProto, chance: random.Random) -> bool:
    integers = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT64 and 0 < np.prod(tensor.dims) <= 4
    ]
    if not integers:
        return False
    tensor = chance.choice(integers)
    array = numpy_helper.to_array(tensor) + np.int64(chance.choice((-1, 1)))
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array, np.int64), tensor.name))
    return True


def another_axis(model: onnx.ModelProto, chance: random.Random) -> bool:
    attributes = [
        attribute
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "axis"
    ]
    if not attributes:
        return False
    attribute = chance.choice(attributes)
    attribute.i += 1 if attribute.i < 0 and attribute.i != -1 else -1
    return True


def another_epsilon(model: onnx.ModelProto, chance: random.Random) -> bool:
    attributes = [
        attribute
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "epsilon"
    ]
    small = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
        and np.prod(tensor.dims) == 1
        and 0 < abs(numpy_helper.to_array(tensor).item()) < 1e-3
    ]
    if not attributes and not small:
        return False
    one = chance.choice([*attributes, *small])
    if isinstance(one, onnx.AttributeProto):
        one.f *= 1000
    else:
        array = numpy_helper.to_array(one) * np.float32(1000)
        one.CopyFrom(numpy_helper.from_array(array, one.name))
    return True


_OTHERS = {
    "Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul", "Tanh": "Sigmoid", "Sigmoid": "Tanh",
    "Relu": "LeakyRelu", "Gelu": "Relu", "Less": "LessOrEqual", "LessOrEqual": "Less",
    "Greater": "GreaterOrEqual", "GreaterOrEqual": "Greater", "Min": "Max", "Max": "Min",
    "MaxPool": "AveragePool", "ReduceSum": "ReduceMax", "ReduceMean": "ReduceMax",
    "And": "Or", "Or": "And", "Cos": "Sin", "Sin": "Cos", "ArgMax": "ArgMin",
}  # fmt: skip


def another_operator(model: onnx.ModelProto, chance: random.Random) -> bool:
    nodes = [node for node in model.graph.node if node.op_type in _OTHERS and not node.domain]
    if not nodes:
        return False
    node = chance.choice(nodes)
    node.op_type = _OTHERS[node.op_type]
    return True


def an_operator_left_out(model: onnx.ModelProto, chance: random.Random) -> bool:
    """Its first input takes the place of its result; where their shapes differ, that is refused."""
    nodes = [node for node in model.graph.node if node.input and node.input[0]]
    node = chance.choice(nodes)
    node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1]))
    return True


def a_cast_too_many(model: onnx.ModelProto, chance: random.Random) -> bool:
    nodes = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul", "Conv")]
    if not nodes:
        return False
    node = chance.choice(nodes)
    place = list(model.graph.node).index(node)
    half, back = f"{node.input[0]}_half", f"{node.input[0]}_back"
    casts = [
        helper.make_node("Cast", [node.input[0]], [half], to=onnx.TensorProto.BFLOAT16),
        helper.make_node("Cast", [half], [back], to=onnx.TensorProto.FLOAT),
    ]
    node.input[0] = back
    for cast in reversed(casts):
        model.graph.node.insert(place, cast)
    return True


def a_mask_ignored(model: onnx.ModelProto, chance: random.Random) -> bool:
    inputs = [value for value in model.graph.input if value.name in ("attention_mask", "padding")]
    if not inputs:
        return False
    (mask,) = inputs
    one = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [mask.name == "attention_mask"])
    for node in model.graph.node:
        node.input[:] = ["ignored" if name == mask.name else name for name in node.input]
    for node in reversed(
        [
            helper.make_node("Shape", [mask.name], ["mask_shape"]),
            helper.make_node("ConstantOfShape", ["mask_shape"], ["constant_mask"], value=one),
            helper.make_node(
                "Cast", ["constant_mask"], ["ignored"], to=mask.type.tensor_type.elem_type
            ),
        ]
    ):
        model.graph.node.insert(0, node)
    return True


def another_option(model: onnx.ModelProto, chance: random.Random) -> bool:
    """Of an MoE node."""
    nodes = [node for node in model.graph.node if node.domain == "moe"]
    numbers = [
        attribute
        for node in nodes
        for attribute in node.attribute
        if attribute.name in ("top_k", "routed_scaling", "norm_eps", "n_group", "topk_group")
    ]
    if not numbers:
        return False
    number = chance.choice(numbers)
    number.i, number.f = number.i - 1, number.f * 1.01
    return True


def experts_swapped(model: onnx.ModelProto, chance: random.Random) -> bool:
    names = {name for node in model.graph.node if node.domain == "moe" for name in node.input}
    stacks = [
        tensor
        for tensor in model.graph.initializer
        if tensor.name in names and len(tensor.dims) == 3
    ]
    if not stacks:
        return False
    tensor = chance.choice(stacks)
    array = numpy_helper.to_array(tensor).copy()
    array[[0, 1]] = array[[1, 0]]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return True


def zeros_from_the_ninth_token(model: onnx.ModelProto, chance: random.Random) -> bool:
    output = model.graph.output[0]
    if len(output.type.tensor_type.shape.dim) != 3:
        return False
    name = output.name
    for node in model.graph.node:
        node.output[:] = ["whole" if one == name else one for one in node.output]
    constants = {"first": [0], "most": [8], "axis": [1], "far": [2**60]}
    for key, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), key))
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    model.graph.initializer.append(zero)
    model.graph.node.extend(
        [
            helper.make_node("Slice", ["whole", "first", "most", "axis"], ["kept"]),
            helper.make_node("Slice", ["whole", "most", "far", "axis"], ["rest"]),
            helper.make_node("Mul", ["rest", "zero"], ["zeros"]),
            helper.make_node("Concat", ["kept", "zeros"], [name], axis=1),
        ]
    )
    return True


MUTATIONS: tuple[Mutation, ...] = (
    negated, scaled, a_row_of_zeros, rows_in_another_order, two_weights_swapped,
    a_number_off_by_one, another_axis, another_epsilon, another_operator, an_operator_left_out,
    a_cast_too_many, a_mask_ignored, another_option, experts_swapped, zeros_from_the_ninth_token,
)  # fmt: skip


# --- Trying them ---


def _silent() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


class File:
    """A right file, and what it gives on inputs that ``verify`` does not draw."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path, self.model = path, model
        self.proto = onnx.load(path)
        graph = ir.from_proto(self.proto)
        self.bound = tolerance_for({tensor.dtype for tensor in model.parameters()})
        self.cases, self.expected = [], []
        session = ort.InferenceSession(path, _silent())
        for case in (case for seed in SEEDS for case in random_inputs(graph, seed)):
            try:
                self.expected.append(self._run(session, case.inputs))
            except Exception:  # It has not so many positions.
                if not case.optional:
                    raise
            else:
                self.cases.append(case.inputs)

    def _run(self, session: ort.InferenceSession, case: dict[str, Tensor]) -> list[Tensor]:
        feeds = {name: value.numpy() for name, value in case.items()}
        return [torch.from_numpy(result) for result in session.run(None, feeds)]

    def outcome(self, mutant: onnx.ModelProto, path: Path) -> str:
        """Returns what became of a mutant: refused, equivalent, caught or missed."""
        try:
            session = ort.InferenceSession(mutant.SerializeToString(), _silent())
            results = [self._run(session, case) for case in self.cases]
        except Exception:  # ONNX Runtime's have no base class of their own.
            return "refused"
        try:
            errors = [*map(worst_errors, ["file"] * len(results), results, self.expected)]
            differs = any(not (m <= self.bound.max and r <= self.bound.rms) for m, r in errors)
        except ValueError:  # Other shapes.
            differs = True
        onnx.save(mutant, path)
        try:
            dynamo_moe.verify(path, self.model)
        except (dynamo_moe.VerificationError, ValueError):
            return "caught" if differs else "caught, by its own inputs"
        return "missed" if differs else "equivalent"


def _halved(value: Tensor) -> Tensor:
    return value.half() if value.is_floating_point() else value


def outcomes(
    name: str, folder: Path, tries: int = TRIES, *, half: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the name of each mutation of a model that is tried, and what became of it."""
    torch.manual_seed(0)
    model, inputs, shapes = MODELS[name]()
    model.eval()
    if half:
        model, inputs = model.half(), {key: _halved(value) for key, value in inputs.items()}
    path = folder / f"{name}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamo_moe.export(model, (), path, kwargs=inputs, dynamic_shapes=shapes or "batch")
    dynamo_moe.verify(path, model)
    file = File(path, model)
    for mutation in MUTATIONS:
        seen = set()
        for number in range(tries):
            mutant = copy.deepcopy(file.proto)
            if not mutation(mutant, random.Random(number)):  # noqa: S311  Nothing is secret.
                break
            content = mutant.SerializeToString()
            if content not in seen:
                seen.add(content)
                yield mutation.__name__, file.outcome(mutant, folder / "mutant.onnx")


def main() -> int:
    """Tries all mutations, and prints a table."""
    parser = argparse.ArgumentParser(description="Breaks files; counts what verify catches.")
    parser.add_argument("words", nargs="*", help="parts of the names of models to try")
    parser.add_argument("--half", action="store_true", help="the models are in float16")
    arguments = parser.parse_args()
    words = arguments.words
    names = [name for name in MODELS if not words or any(word in name for word in words)]
    if arguments.half:  # ONNX Runtime 1.31 dies of a float16 GRU with a linear layer behind it.
        names = [name for name in names if name != "recurrent"]
    kinds = ("caught", "missed", "caught, by its own inputs", "equivalent", "refused")
    table = Table("model", *kinds, title="Broken files", title_justify="left")
    total: Counter[str] = Counter()
    console = Console()
    with TemporaryDirectory() as folder:
        for name in names:
            counts: Counter[str] = Counter()
            for mutation, outcome in outcomes(name, Path(folder), half=arguments.half):
                counts[outcome] += 1
                if outcome == "missed":
                    console.print(f"{name}: {mutation} is missed")
            table.add_row(name, *(str(counts[kind]) for kind in kinds))
            total += counts
    table.add_row("all", *(str(total[kind]) for kind in kinds))
    console.print(table)
    return int(total["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
