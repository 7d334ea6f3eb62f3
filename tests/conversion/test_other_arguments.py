"""Layers that are called with more than tokens: a condition, ids, a mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.modules import ConvertedModule

WIDTH, COUNT, VOCABULARY = 16, 4, 50


class Layer(nn.Module):
    """Experts in a list, of which each token has two; ``route`` gives their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.condition = nn.Linear(WIDTH, COUNT)
        self.register_buffer("table", torch.arange(VOCABULARY) * 7 % COUNT)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
            for _ in range(COUNT)
        )

    def combine(self, x: Tensor, weights: Tensor) -> Tensor:
        results = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (results * weights[..., None]).sum(dim=-2)


class Conditioned(Layer):
    """The router sees a condition of each sequence, as MoDE's sees the noise level."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        logits = self.gate(x) + self.condition(condition)[:, None]
        best, ids = logits.topk(2, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, ids, best.softmax(dim=-1))
        return self.combine(x, weights)


class Hashed(Layer):
    """Token ids choose the expert, as in arXiv 2106.04426."""

    def forward(self, x: Tensor, *, token_ids: Tensor) -> Tensor:
        return self.combine(x, F.one_hot(self.table[token_ids], COUNT).float())


class HashedInALoop(Layer):
    """The same without weights: only ids say which expert a token has."""

    def forward(self, x: Tensor, *, token_ids: Tensor) -> Tensor:
        ids = self.table[token_ids]
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = torch.where((ids == number)[..., None], expert(x), y)
        return y


class Padded(Layer):
    """What is padded gets no expert."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        scores = self.gate(x).softmax(dim=-1)
        if padding is not None:
            scores = scores * ~padding[..., None]
        weights, ids = scores.topk(2, dim=-1)
        return self.combine(x, torch.zeros_like(scores).scatter(-1, ids, weights))


class Recurrent(Layer):
    """The router has a state from layer to layer, with a row for each token: arXiv 2408.06793."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        scores = self.gate(self.cell(x.reshape(-1, WIDTH), state)).softmax(dim=-1)
        weights, ids = scores.view(*x.shape[:-1], COUNT).topk(2, dim=-1)
        return self.combine(x, torch.zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights))


class Ignored(Layer):
    """A plain router; the layer's number is of no importance."""

    def forward(self, x: Tensor, extra: Tensor, number: int) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        return self.combine(x, torch.zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights))


class Model(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.moe = layer()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        match self.moe:
            case Conditioned():
                y = self.moe(x, x.mean(dim=1))
            case Hashed() | HashedInALoop():
                y = self.moe(x, token_ids=ids)
            case Padded():
                y = self.moe(x, ids == 0)
            case Recurrent():
                y = self.moe(x, x.reshape(-1, WIDTH).sin())
            case _:
                y = self.moe(x, x.sin(), 3)
        return x + y


def make(layer: type[Layer]) -> Model:
    torch.manual_seed(0)
    return Model(layer).eval()


def ids(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def check_file(model: nn.Module, path: Path, expected: dict[tuple[int, int], Tensor]) -> None:
    """Exports a converted model, and compares both with the results before."""
    exported = dynamo_moe.export(
        model, (ids(2, 5),), path, dynamic_shapes=({0: "batch", 1: "length"},)
    )
    assert sum(exported.operators.values()) == 1
    session = ort.InferenceSession(path)
    for shape, wanted in expected.items():
        torch.testing.assert_close(model(ids(*shape)), wanted, rtol=1e-4, atol=1e-5)
        (result,) = session.run(None, {"ids": ids(*shape).numpy()})
        torch.testing.assert_close(torch.from_numpy(result), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error:.*its own forward computes")
@pytest.mark.parametrize("layer", [Conditioned, Hashed, HashedInALoop, Padded, Recurrent, Ignored])
def test_an_example_shows_what_a_layer_gets(layer: type[Layer], tmp_path: Path) -> None:
    model = make(layer)
    expected = {shape: model(ids(*shape)).detach() for shape in ((2, 5), (1, 1), (3, 40))}
    report = dynamo_moe.convert(model, ids(2, 5))
    assert [replacement.module for replacement in report.replaced] == ["moe"]
    check_file(model, tmp_path / "model.onnx", expected)


@pytest.mark.parametrize("layer", [Conditioned, Hashed, HashedInALoop, Ignored])
def test_without_an_example_the_reason_names_the_argument(layer: type[Layer]) -> None:
    model = make(layer)
    (left,) = dynamo_moe.convert(model).unrecognised
    assert "argument" in left.reason
    assert "convert(model, args)" in left.reason
    assert not isinstance(model.moe, ConvertedModule)


def test_a_call_unlike_the_example_is_the_layers_own() -> None:
    model = make(Padded)
    original, x = copy.deepcopy(model.moe), torch.randn(2, 5, WIDTH)
    dynamo_moe.convert(model, ids(2, 5))
    with pytest.warns(UserWarning, match="its own forward computes"):
        result = model.moe(x)
    torch.testing.assert_close(result, original(x))


def test_the_example_leaves_the_model_as_it_is() -> None:
    model = make(Conditioned)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dynamo_moe.convert(model, kwargs={"ids": ids(2, 5)})
    assert model.training
    assert not model.moe._forward_pre_hooks
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_an_example_that_the_model_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"the model fails on args and kwargs: .*index"):
        dynamo_moe.convert(make(Hashed), ids(2, 5) + VOCABULARY)


class Additive(Layer):
    """A mask of the experts that is added to the logits, 0 or minus infinity."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.gate(x) + mask[:, None]
        best, ids = logits.topk(2, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, ids, best.softmax(dim=-1))
        return self.combine(x, weights)


def test_an_additive_mask_stays_one() -> None:
    class Masked(Model):
        def forward(self, ids: Tensor) -> Tensor:
            mask = torch.zeros(len(ids), COUNT)
            mask[:, 1] = -torch.inf
            return self.moe(self.words(ids), mask)

    torch.manual_seed(0)
    model = Masked(Additive).eval()
    expected = model(ids(3, 7))
    assert [replacement.module for replacement in dynamo_moe.convert(model, ids(2, 5)).replaced]
    torch.testing.assert_close(model(ids(3, 7)), expected, rtol=1e-4, atol=1e-5)


class ByPosition(Layer):
    """As fairscale's and DeepSpeed's layers, whose tokens have no name."""

    def forward(self, *input: Tensor | None, **kwargs: object) -> Tensor:
        scores = self.gate(input[0]).softmax(dim=-1)
        if len(input) > 1 and input[1] is not None:
            scores = scores * ~input[1][..., None]
        weights, ids = scores.topk(2, dim=-1)
        return self.combine(input[0], torch.zeros_like(scores).scatter(-1, ids, weights))


class ByPositionAndName(Layer):
    """A sum of scores by each argument, of which the last has no position."""

    def forward(self, x: Tensor, *more: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.gate(x + sum(more)).softmax(dim=-1)
        if mask is not None:
            scores = scores * mask[..., None]
        weights, ids = scores.topk(2, dim=-1)
        return self.combine(x, torch.zeros_like(scores).scatter(-1, ids, weights))


Given = Callable[[Tensor], tuple[tuple[Tensor | None, ...], dict[str, Tensor]]]


@pytest.mark.filterwarnings("error:.*its own forward computes")
@pytest.mark.parametrize(
    ("layer", "given"),
    [
        pytest.param(ByPosition, lambda x: ((x,), {}), id="tokens"),
        pytest.param(ByPosition, lambda x: ((x, None), {}), id="none"),
        pytest.param(ByPosition, lambda x: ((x, x[..., 0] > 1), {}), id="mask"),
        pytest.param(ByPositionAndName, lambda x: ((x, x.sin(), x.cos()), {}), id="more"),
        pytest.param(
            ByPositionAndName, lambda x: ((x, x.sin()), {"mask": x[..., 0] > 0}), id="name"
        ),
    ],
)
def test_arguments_by_position(layer: type[Layer], given: Given, tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.moe = nn.Embedding(VOCABULARY, WIDTH), layer()

        def forward(self, ids: Tensor) -> Tensor:
            args, kwargs = given(self.words(ids))
            return self.moe(*args, **kwargs)

    torch.manual_seed(0)
    model = Around().eval()
    expected = {shape: model(ids(*shape)).detach() for shape in ((2, 5), (1, 1), (3, 40))}
    assert len(dynamo_moe.convert(model, ids(2, 5)).replaced) == 1
    check_file(model, tmp_path / "model.onnx", expected)


@pytest.mark.parametrize("args", [("x",), ("x", "x", "x"), ("x", "mask")])
def test_other_positions_are_the_layers_own(args: tuple[str, ...]) -> None:
    """An argument without a position is not taken for one that has it."""
    torch.manual_seed(0)
    layer = ByPositionAndName().eval()
    x = torch.randn(2, 5, WIDTH)
    model = nn.ModuleDict({"moe": layer})
    model.forward = lambda x: layer(x, x, mask=x[..., 0] > 0)
    dynamo_moe.convert(model, x)
    assert isinstance(layer, ConvertedModule)
    values = [{"x": x, "mask": x[..., :1] > 0}[name] for name in args]
    with pytest.warns(UserWarning, match="its own forward computes"):
        result = layer(*values)
    torch.testing.assert_close(result, layer.own_forward(*values))
