"""Layers whose router is none of the known ones: their own code computes the weights."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion.own_routing import OwnRouting

WIDTH, COUNT = 16, 6
SIZES = ((2, 5), (1, 1), (3, 7), (4, 33))


class Layer(nn.Module):
    """Experts in a list, with weights ``[T, E]`` from ``route``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.scale = nn.Parameter(torch.rand(COUNT) + 0.5)
        self.register_buffer("allowed", torch.tensor([True] * 5 + [False]))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
            for _ in range(COUNT)
        )

    def route(self, x_TD: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        weights_TE = self.route(x_TD)
        y_TED = torch.stack([expert(x_TD) for expert in self.experts], dim=1)
        return (y_TED * weights_TE[..., None]).sum(dim=1).reshape(x.shape)


class TopP(Layer):
    """The fewest experts whose probabilities add up to 0.6, of arXiv 2403.07652."""

    def route(self, x_TD: Tensor) -> Tensor:
        sorted_TE, order_TE = self.gate(x_TD).softmax(dim=-1).sort(dim=-1, descending=True)
        before_TE = sorted_TE.cumsum(dim=-1) - sorted_TE
        kept_TE = sorted_TE.masked_fill(before_TE >= 0.6, 0)
        return torch.zeros_like(kept_TE).scatter(1, order_TE, kept_TE)


class Threshold(Layer):
    def route(self, x_TD: Tensor) -> Tensor:
        scores_TE = self.gate(x_TD).sigmoid()
        return scores_TE * (scores_TE > 0.5)


class ReLURouting(Layer):
    """ReMoE's, of arXiv 2412.14711."""

    def route(self, x_TD: Tensor) -> Tensor:
        return self.gate(x_TD).relu()


class MaskedSecond(Layer):
    """GShard's second expert, from the logits without the first."""

    def route(self, x_TD: Tensor) -> Tensor:
        logits_TE = self.gate(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        first_TE = F.one_hot(scores_TE.argmax(dim=-1), COUNT)
        left_TE = logits_TE.masked_fill(first_TE.bool(), -math.inf)
        both_TE = first_TE + F.one_hot(left_TE.argmax(dim=-1), COUNT)
        kept_TE = scores_TE * both_TE
        return kept_TE / kept_TE.sum(dim=-1, keepdim=True).clamp_min(1e-9)


class Scaled(Layer):
    """A temperature, a mask of experts, and a factor for each of them."""

    temperature = 0.7

    def route(self, x_TD: Tensor) -> Tensor:
        logits_TE = (self.gate(x_TD) / self.temperature).masked_fill(~self.allowed, -math.inf)
        best_TK, ids_TK = logits_TE.topk(2, dim=-1)
        weights_TK = best_TK.softmax(dim=-1) * self.scale[ids_TK]
        return torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK)


class Capacity(Layer):
    """GShard's tensor ``[T, E, C]`` of a capacity that grows with the tokens."""

    def route(self, x_TD: Tensor) -> Tensor:
        tokens = x_TD.shape[0]
        capacity = max(int(1.25 * tokens / COUNT), 2)
        scores_TE = self.gate(x_TD).softmax(dim=-1)
        chosen_TE = F.one_hot(scores_TE.argmax(dim=-1), COUNT)
        place_TE = (chosen_TE.cumsum(dim=0) - 1) * chosen_TE
        chosen_TE = chosen_TE * (place_TE < capacity)
        place_TC = F.one_hot((place_TE * chosen_TE).sum(dim=-1), num_classes=capacity)
        self.combine = (scores_TE * chosen_TE)[..., None] * place_TC[:, None]
        return self.combine.sum(dim=-1)


class ExpertChoice(Layer):
    """Experts choose tokens, of arXiv 2202.09368."""

    def route(self, x_TD: Tensor) -> Tensor:
        scores_ET = self.gate(x_TD).softmax(dim=-1).mT
        count = max(int(x_TD.shape[0] * 2 / COUNT), 1)
        weights_EC, tokens_EC = scores_ET.topk(count, dim=-1)
        return torch.zeros_like(scores_ET).scatter(1, tokens_EC, weights_EC).mT


class InASubmodule(Layer):
    """The gate and the experts are called by modules within the layer."""

    class Inner(nn.Module):
        def __init__(self, gate: nn.Linear) -> None:
            super().__init__()
            self.gate = gate

        def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
            scores_TE = self.gate(x_TD).softmax(dim=-1) ** 2
            weights_TK, ids_TK = scores_TE.topk(2, dim=-1)
            return ids_TK, weights_TK

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner(self.gate)
        del self.gate

    def route(self, x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = self.inner(x_TD)
        weights_TK = weights_TK * torch.tensor([1.0, 0.5])
        return torch.zeros(len(x_TD), COUNT).scatter(1, ids_TK, weights_TK)


class Choices(Layer):
    """Has no weights of all experts: ids of some, and weights of these."""

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        ids_TK, weights_TK = self.choose(x_TD)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            chosen_TK = (ids_TK == number).to(x_TD.dtype)
            chosen_TK = chosen_TK if weights_TK is None else chosen_TK * weights_TK
            y_TD = y_TD + expert(x_TD) * chosen_TK.sum(dim=-1, keepdim=True)
        return y_TD.reshape(x.shape)


class SteepChoices(Layer):
    """A choice at a time, dropped by a capacity; a second one may have hardly any weight."""

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        scores_TE = (self.gate(x_TD) * 5).softmax(dim=-1)
        first_T = scores_TE.argmax(dim=-1)
        second_T = scores_TE.scatter(1, first_T[:, None], 0).argmax(dim=-1)
        used_E, choices = torch.zeros(COUNT, dtype=torch.int64), []
        for ids_T in (first_T, second_T):
            places_TE = F.one_hot(ids_T, COUNT).cumsum(dim=0) + used_E
            used_E = places_TE[-1]
            kept_T = places_TE.gather(1, ids_T[:, None]).squeeze(1) <= x_TD.shape[0] // 4 + 2
            weights_T = scores_TE.gather(1, ids_T[:, None]).squeeze(1)
            weights_T *= kept_T
            choices.append((ids_T, weights_T))
        y_TD = torch.zeros_like(x_TD)
        y_TED = torch.stack([expert(x_TD) for expert in self.experts], dim=1)
        for ids_T, weights_T in choices:
            rows_TD = y_TED.gather(1, ids_T[:, None, None].expand(-1, 1, WIDTH)).squeeze(1)
            y_TD = y_TD + rows_TD * weights_T[:, None]
        return y_TD.reshape(x.shape)


class NullExperts(Choices):
    """Half of the ids are of experts that compute nothing, of arXiv 2406.13233."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(WIDTH, COUNT, bias=False)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.cat([self.gate(x_TD), self.nothing(x_TD)], dim=1).softmax(dim=-1)
        weights_TK, ids_TK = scores.topk(3, dim=-1)
        return ids_TK, weights_TK


class WithoutWeights(Choices):
    """One expert, as it is."""

    def choose(self, x_TD: Tensor) -> tuple[Tensor, None]:
        return self.gate(x_TD).abs().argmax(dim=-1, keepdim=True), None


class ExpertChoiceInRows(Layer):
    """The weights of the tokens that experts choose are in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        count = max(int(x_TD.shape[0] * 2 / COUNT), 1)
        weights_EC, tokens_EC = self.gate(x_TD).sigmoid().T.topk(count, dim=-1)
        weights = weights_EC.reshape(-1) * 2.5
        y_TD = torch.zeros_like(x_TD)
        for tokens_C, weights_C, expert in zip(
            tokens_EC, weights.split(count), self.experts, strict=True
        ):
            y_TD = y_TD.index_add(0, tokens_C, expert(x_TD[tokens_C]) * weights_C[:, None])
        return y_TD.reshape(x.shape)


@torch.jit.script
def capacity_of(gates_TE: Tensor, factor: Tensor, least: Tensor) -> Tensor:
    capacity = torch.ceil((gates_TE.shape[0] / gates_TE.shape[1]) * factor).to(torch.int64)
    if capacity < least:
        capacity = least.to(torch.int64)
    return capacity


@torch.jit.script
def most_of(scores_TE: Tensor, capacity: Tensor) -> Tensor:
    return torch.topk(scores_TE, k=capacity, dim=0)[1]


class Scripted(Layer):
    """DeepSpeed's first choices; its products in TorchScript are seen by a trace alone."""

    def route(self, x_TD: Tensor) -> Tensor:
        gates_TE = self.gate(x_TD).softmax(dim=1)
        capacity = capacity_of(gates_TE, torch.tensor(1.0), torch.tensor(4))
        mask_TE = F.one_hot(gates_TE.argmax(dim=1), COUNT)
        kept_CE = most_of(mask_TE.float() * gates_TE, capacity)
        mask_TE = mask_TE * torch.zeros_like(mask_TE).scatter_(0, kept_CE, 1)
        return gates_TE * mask_TE


class Stacked(nn.Module):
    """Weights of chosen experts, looked up for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.up = nn.Parameter(torch.randn(COUNT, 24, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 24) / 4)

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.gate(x).topk(2, dim=-1)
        weights = best.softmax(dim=-1)
        hidden = F.silu(torch.einsum("...kfd,...d->...kf", self.up[ids], x))
        results = torch.einsum("...kdf,...kf->...kd", self.down[ids], hidden)
        return (results * weights[..., None]).sum(dim=-2)


LAYERS = (
    TopP, Threshold, ReLURouting, MaskedSecond, Scaled, Capacity, ExpertChoice, InASubmodule,
    NullExperts, WithoutWeights, ExpertChoiceInRows, SteepChoices,
)  # fmt: skip


def pair(layer: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Returns a layer within a model, as it is and converted."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)).eval()
    converted = copy.deepcopy(model)
    assert [r.module for r in dynamo_moe.convert(converted).replaced] == ["0"]
    return model, converted


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.first(7)
def test_own_code_routes(layer: type[nn.Module], tmp_path: Path) -> None:
    model, converted = pair(layer)
    assert isinstance(converted[0]._dynamo_moe_spec.routing, OwnRouting)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(
        converted, (tokens(2, 5),), path, dynamic_shapes=({0: "batch", 1: "length"},)
    )
    assert report.operators == {"DroplessMoEExperts": 1}
    session = ort.InferenceSession(path)
    (name,) = (each.name for each in session.get_inputs())
    for shape in SIZES:
        x = tokens(*shape)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
        (result,) = session.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:1 MoE module is not converted")
@pytest.mark.every
def test_a_capacity_in_torchscript_is_right_or_refused(tmp_path: Path) -> None:
    model, converted = pair(Scripted)
    path, x = tmp_path / "model.onnx", tokens(4, 5)
    for each in (model, converted):
        dynamo_moe.export(each, (x,), path, dynamic_shapes=None)
        session = ort.InferenceSession(path)
        (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(result), model(x))
    # TorchScript keeps the symbolic sizes of a trace for later ones.
    for each in (model, converted):
        with pytest.raises(dynamo_moe.ExportError, match="capacity < least: was decided for"):
            dynamo_moe.export(each, (x,), path, dynamic_shapes=({0: "batch", 1: "length"},))
    shapes = ({0: torch.export.Dim("batch", min=8), 1: torch.export.Dim("length", min=4)},)
    for each in (model, converted):
        dynamo_moe.export(each, (tokens(8, 9),), path, dynamic_shapes=shapes)
        assert dynamo_moe.verify(path, model).passed


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  It was made here.


@pytest.mark.parametrize("changed", [copy.deepcopy, pickled])
def test_copies_route(changed: Callable[[nn.Module], nn.Module]) -> None:
    model, converted = pair(Scaled)
    torch.testing.assert_close(changed(converted)(tokens(3, 4)), model(tokens(3, 4)))


def test_parameters_and_attributes_stay_alive() -> None:
    """The code runs at every call, so it reads what they are then."""
    model, converted = pair(Scaled)
    for layer in (model[0], converted[0]):
        layer.temperature = 1.9
        nn.init.uniform_(layer.scale, 1, 2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(converted(tokens(3, 4)), model(tokens(3, 4)))


def test_gradients_reach_the_router_in_evaluation_mode() -> None:
    model, converted = pair(Scaled)
    for each in (model, converted):
        each(tokens(3, 4)).sum().backward()
    for name, parameter in model.named_parameters():
        gradient = converted.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


def test_compiled_code_runs_the_router() -> None:
    model, converted = pair(TopP)
    compiled = torch.compile(converted, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens(3, 4)), model(tokens(3, 4)))


class ReturnsTokens(ExpertChoice):
    """Of few tokens experts choose none, and it returns which."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD = x.reshape(-1, WIDTH)
        scores_ET = self.gate(x_TD).softmax(dim=-1).mT
        weights_EC, tokens_EC = scores_ET.topk(int(len(x_TD) * 2 / COUNT), dim=-1)
        y_TD = torch.zeros_like(x_TD)
        for weights_C, tokens_C, expert in zip(weights_EC, tokens_EC, self.experts, strict=True):
            y_TD = y_TD.index_add(0, tokens_C, expert(x_TD[tokens_C]) * weights_C[:, None])
        return y_TD.reshape(x.shape), tokens_EC


def test_ids_of_no_tokens_are_returned() -> None:
    layer = ReturnsTokens().eval()
    original = copy.deepcopy(layer)
    assert [replaced.module for replaced in dynamo_moe.convert(layer).replaced] == [""]
    for shape in SIZES:
        torch.testing.assert_close(layer(tokens(*shape)), original(tokens(*shape)))


def test_a_file_has_nothing_of_a_capacitys_slots() -> None:
    """The weights of the first choice are known ahead of ``[T, E, C]``."""
    _, converted = pair(Capacity)
    assert converted[0]._dynamo_moe_spec.routing.form in ("experts", "masked")


class Decides(Layer):
    def route(self, x_TD: Tensor) -> Tensor:
        scores_TE = self.gate(x_TD).softmax(dim=-1)
        if (scores_TE > 0.99).any():
            scores_TE = scores_TE.clamp(max=0.99)
        return scores_TE**2


def clamped(scores_TE: Tensor) -> Tensor:
    if (scores_TE > 0.99).any():
        scores_TE = scores_TE.clamp(max=0.99)
    return scores_TE


class CallsAFunction(Layer):
    """Its decision is in a function beside the class, as in DeepSpeed's gates."""

    def route(self, x_TD: Tensor) -> Tensor:
        return clamped(self.gate(x_TD).softmax(dim=-1)) ** 2


@pytest.mark.parametrize("kind", [Decides, CallsAFunction])
def test_the_report_names_a_decision_by_values(kind: type[Layer], tmp_path: Path) -> None:
    layer = kind().eval()
    (replaced,) = dynamo_moe.convert(layer).replaced
    (note,) = replaced.notes
    where = r"test_own_routing.py:\d+ \(`if \(scores_TE > 0.99\).any\(\):`\)"
    assert re.match(rf"its router decides by values at .*{where}, which an export may refuse", note)
    with pytest.raises(dynamo_moe.ExportError, match=where):
        dynamo_moe.export(layer, (tokens(2, 5),), tmp_path / "model.onnx")


class Normed(Layer):
    """Its result is no sum of the experts' results."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (WIDTH,))

    def route(self, x_TD: Tensor) -> Tensor:
        return self.gate(x_TD).softmax(dim=-1)


def test_left() -> None:
    torch.manual_seed(0)
    report = dynamo_moe.convert(nn.Sequential(Normed()).eval())
    assert report.replaced == ()
    assert "not a weighted sum of its experts' results" in report.unrecognised[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_route(dtype: torch.dtype) -> None:
    """The values are those of calls by another dtype's layer."""
    torch.manual_seed(0)
    model = nn.Sequential(TopP()).eval().to(dtype)
    expected = model(tokens(3, 40).to(dtype))
    assert [r.module for r in dynamo_moe.convert(model).replaced] == ["0"]
    assert isinstance(model[0]._dynamo_moe_spec.routing, OwnRouting)
    torch.testing.assert_close(model(tokens(3, 40).to(dtype)), expected, rtol=3e-2, atol=3e-2)


def test_a_block_with_a_norm_and_a_residual(tmp_path: Path) -> None:
    """The experts take what the norm gives, and the tokens are added to their sum."""

    class Block(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(self.norm(x))

    model, converted = pair(Block)
    routing = converted[0]._dynamo_moe_spec.routing
    assert (routing.tokens.function, routing.residual) == ("rms_norm", True)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(
        converted, (tokens(2, 5),), path, dynamic_shapes=({0: "batch", 1: "length"},)
    )
    assert sum(report.operators.values()) == 1
    session = ort.InferenceSession(path)
    for shape in SIZES:
        x = tokens(*shape)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
        (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-4, atol=1e-5)


def test_a_forward_that_changed_is_an_error() -> None:
    _, converted = pair(TopP)
    converted[0].route = lambda x_TD: torch.ones(len(x_TD), COUNT) / COUNT
    with pytest.raises(ValueError, match="did not compute its routing: it calls no"):
        converted(tokens(2, 3))
