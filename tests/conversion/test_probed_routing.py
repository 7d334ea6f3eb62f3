"""Layers whose weights their own forward shows, with probes in place of their experts."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion.probed_routing import ProbedRouting

WIDTH, HIDDEN, COUNT, TOP_K = 16, 24, 6, 2
# The last ones have more tokens than any capacity here.
SIZES = ((2, 5), (1, 1), (3, 7), (4, 33), (1, 6000), (3, 2000))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    """Each expert takes the rows that ``kept`` leaves it, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(COUNT))

    def kept(self, rows: Tensor, tokens: int) -> Tensor:
        return rows

    def start(self, x_TD: Tensor) -> Tensor:
        return torch.zeros_like(x_TD)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = self.gate(x_TD).softmax(dim=-1).topk(TOP_K, dim=-1)
        return weights_TK, ids_TK

    def routed(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.choose(x_TD)
        y_TD = self.start(x_TD)
        for number, expert in enumerate(self.experts):
            rows, slots = (ids_TK == number).nonzero(as_tuple=True)
            kept = self.kept(torch.arange(len(rows)), len(x_TD))
            rows, slots = rows[kept], slots[kept]
            y_TD = y_TD.index_add(0, rows, weights_TK[rows, slots, None] * expert(x_TD[rows]))
        return y_TD

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x.reshape(-1, WIDTH)).reshape(x.shape)


class CutsRows(Layer):
    """A capacity that no tensor of weights shows."""

    def kept(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[:50]


class Floor(Layer):
    def kept(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[: max(64, int(1.25 * TOP_K * tokens / COUNT))]


class ManyFit(Layer):
    def kept(self, rows: Tensor, tokens: int) -> Tensor:
        return rows[:2000]


class KeepsDropped(CutsRows):
    """A token that no expert takes keeps its value, as Switch's."""

    def routed(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.choose(x_TD)
        y_TD = x_TD.clone()
        for number, expert in enumerate(self.experts):
            rows = (ids_TK[:, 0] == number).nonzero()[:50, 0]
            y_TD[rows] = expert(x_TD[rows])
        return y_TD * weights_TK[:, :1]


class SkipsPadding(CutsRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x != 0).any(dim=-1, keepdim=True)


class AfterTheExperts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        y_TED = torch.stack([expert(hidden=x_TD) for expert in self.experts], dim=1)
        weights_TE = self.gate(x_TD).softmax(dim=-1) ** 2
        return (y_TED * weights_TE[..., None]).sum(dim=1).reshape(x.shape)


class OtherForManyTokens(Layer):
    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = super().choose(x_TD)
        return (weights_TK.square() if len(x_TD) > 200 else weights_TK**3), ids_TK


class Block(AfterTheExperts):
    """With its norm, its residual, and a factor on the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * super().forward(self.norm(x))


class Beside(AfterTheExperts):
    """A dense layer, mixed in by a softmax, as DeepSpeed's residual experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.share = Expert(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        share = self.share(x).softmax(dim=-1)
        routed, dense = super().forward(x), self.dense(x)
        return routed * share[..., :1] + dense * share[..., 1:], share.reshape(-1, 2).sum(dim=0)


class Started(AfterTheExperts):
    """Adds in place to what another layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        y += super().forward(x)
        return y


class Sentences(Layer):
    """Routes whole sequences by their mean."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x.mean(dim=1, keepdim=True)).softmax(dim=-1)
        weights, ids = scores.topk(TOP_K, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, ids, weights)
        results = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (gates.unsqueeze(-1) * results).sum(dim=-2)


class RareTokens(Layer):
    """One token in thousands has more experts than others."""

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        gates_TE = self.gate(x_TD).softmax(dim=-1)
        best_TE = F.one_hot(gates_TE.argmax(dim=-1), COUNT)
        kept_TE = torch.where(x_TD[:, :1] > 7, 1.0, best_TE)
        y_TED = torch.stack([expert(x_TD) for expert in self.experts], dim=1)
        weights_TE = gates_TE * kept_TE
        return (y_TED * weights_TE[..., None]).sum(dim=1).reshape(x.shape)


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 4)

    def forward(self, x_ECD: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(x_ECD, self.w1)), self.w2)


class Buffers(nn.Module):
    """Rows of all experts' stacks, of one capacity, the last tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = Stacks()

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        capacity = max(4, x_TD.shape[0] // 3)
        weights_T, ids_T = self.gate(x_TD).softmax(dim=-1).max(dim=-1)
        hits_TE = F.one_hot(ids_T, COUNT).flip(0)
        place_T = ((hits_TE.cumsum(dim=0) - 1) * hits_TE).sum(dim=-1).flip(0)
        kept = (place_T < capacity).nonzero()[:, 0]
        x_ECD = x_TD.new_zeros(COUNT, capacity, WIDTH)
        x_ECD[ids_T[kept], place_T[kept]] = x_TD[kept]
        y_ECD = self.experts(x_ECD)
        rows = y_ECD[ids_T[kept], place_T[kept]] * weights_T[kept, None]
        return torch.zeros_like(x_TD).index_add(0, kept, rows).reshape(x.shape)


class Loras(nn.Module):
    """Pairs of thin matrices beside a linear layer, with a factor."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.num_experts, self.scaling = COUNT, {"default": 1.7}
        self.base, self.router = nn.Linear(WIDTH, out), nn.Linear(WIDTH, COUNT)
        self.lora_A = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(COUNT))
        self.lora_B = nn.ModuleList(nn.Linear(4, out, bias=False) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(dim=-1).topk(TOP_K, dim=-1)
        y = self.base(x)
        for number in range(COUNT):
            each = self.lora_B[number](self.lora_A[number](x)) * self.scaling["default"]
            y += each * (weights * (ids == number)).sum(dim=-1, keepdim=True)
        return y


LAYERS = (
    CutsRows, Floor, ManyFit, KeepsDropped, SkipsPadding, AfterTheExperts,
    OtherForManyTokens, Block, Beside, Started, Sentences, RareTokens, Buffers, Loras,
)  # fmt: skip


def pair(layer: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Returns a layer within a model, as it is and converted."""
    torch.manual_seed(0)
    model = nn.Sequential(layer()).eval()
    converted = copy.deepcopy(model)
    assert [r.module for r in dynamo_moe.convert(converted).replaced] == ["0"]
    return model, converted


def tokens(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.first(8)
def test_probes_show_the_weights(layer: type[nn.Module]) -> None:
    model, converted = pair(layer)
    routing = converted[0]._dynamo_moe_spec.routing
    assert isinstance(routing, ProbedRouting) or layer in (AfterTheExperts, RareTokens)
    for shape in SIZES:
        x = tokens(*shape)
        equal = x[:1, :1].expand_as(x).contiguous()
        padded = x.clone()
        padded[:, ::3] = 0
        with torch.no_grad():
            for given in (x, equal, padded, 30 * x, 0.01 * x):
                torch.testing.assert_close(converted(given), model(given), rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("layer", [AfterTheExperts, Block, Beside, Sentences, Started, Loras])
@pytest.mark.first(3)
def test_files_are_right(layer: type[nn.Module], tmp_path: Path) -> None:
    model, converted = pair(layer)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(
        converted, (tokens(2, 5),), path, dynamic_shapes=({0: "batch", 1: "length"},)
    )
    assert report.operators == {"DroplessMoEExperts": 1}
    session = ort.InferenceSession(path)
    (name,) = (each.name for each in session.get_inputs())
    for shape in SIZES[:4]:
        x = tokens(*shape)
        with torch.no_grad():
            expected = model(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        results = tuple(map(torch.from_numpy, session.run(None, {name: x.numpy()})))
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)


# --- What is beside the experts' sum ---


@pytest.mark.parametrize(
    ("layer", "rest"), [(CutsRows, "nothing"), (Block, "tokens"), (KeepsDropped, "second run")]
)
def test_a_second_run_is_for_what_nothing_else_shows(layer: type[nn.Module], rest: str) -> None:
    _, converted = pair(layer)
    assert converted[0]._dynamo_moe_spec.routing.rest == rest


def test_large_values_beside_small_weights() -> None:
    """A weight is not lost to a residual that is ten million times as large."""
    model, converted = pair(Block)
    with torch.no_grad():
        for each in (model, converted):
            each[0].gate.weight *= 20  # Second weights of 1e-7 and less.
        x = 1e4 * tokens(2, 40)
        expected, result = (each.double()(x.double()) - x for each in (model, converted))
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)


def test_bfloat16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block()).eval().bfloat16()
    x, expected = tokens(3, 50).bfloat16(), model(tokens(3, 50).bfloat16())
    assert dynamo_moe.convert(model).replaced
    torch.testing.assert_close(model(x), expected, rtol=3e-2, atol=3e-2)


def test_float16_has_too_few_digits_beside_a_rest() -> None:
    report = dynamo_moe.convert(nn.Sequential(Block()).eval().half())
    assert not report.replaced
    assert "its weights are in float16" in str(report.unrecognised)
    converted = pair(Block)[1].half()
    with pytest.raises(TypeError, match="tokens must be float32 or bfloat16, got float16"):
        converted(tokens(3, 5).half())


class Threshold(nn.Module):
    """Any number of experts; few tokens have as many as some of fifty thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        expert = (nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
        self.experts = nn.ModuleList(nn.Sequential(*copy.deepcopy(expert)) for _ in range(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        scores_TE = (10 * self.gate(x_TD)).sigmoid()
        y_TD = x_TD.clone()
        for number, expert in enumerate(self.experts):
            weights_T = scores_TE[:, number] * (scores_TE[:, number] > 0.9)
            rows = weights_T.nonzero()[:, 0]
            y_TD = y_TD.index_add(0, rows, expert(x_TD[rows]) * weights_T[rows, None])
        return y_TD.reshape(x.shape)


def test_a_threshold_may_choose_all_experts() -> None:
    model, converted = pair(Threshold)
    assert converted[0]._dynamo_moe_spec.routing.top_k == WIDTH
    with torch.no_grad():
        x = tokens(20_000)
        torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-4)


# --- The converted layer ---


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  It was made here.


@pytest.mark.parametrize("changed", [copy.deepcopy, pickled])
def test_copies_route(changed: Callable[[nn.Module], nn.Module]) -> None:
    model, converted = pair(Beside)
    torch.testing.assert_close(changed(converted)(tokens(3, 40)), model(tokens(3, 40)))


def test_gradients_reach_the_router_in_evaluation_mode() -> None:
    model, converted = pair(Block)
    for each in (model, converted):
        each(tokens(3, 40)).sum().backward()
    for name, parameter in model.named_parameters():
        gradient = converted.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)


def test_compiled_code_runs_the_forward() -> None:
    model, converted = pair(Block)
    compiled = torch.compile(converted, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens(3, 4)), model(tokens(3, 4)))


def test_threads_never_see_the_probes() -> None:
    """One thread computes by the module's own forward while others call it as converted."""
    model, converted = pair(CutsRows)
    x = tokens(2, 40)
    wrong: list[int] = []
    with torch.no_grad():
        expected = model(x)

        def check(run: Callable[[Tensor], Tensor]) -> None:
            with torch.no_grad():
                wrong.extend(
                    1 for _ in range(50) if not torch.allclose(run(x), expected, atol=1e-4)
                )

        runs = (converted, converted[0].own_forward, converted, converted[0].own_forward)
        threads = [threading.Thread(target=check, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# --- Layers that draw random numbers ---


class Draws(CutsRows):
    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = self.gate(x_TD)
        weights_TK, ids_TK = (logits_TE + torch.randn_like(logits_TE)).topk(TOP_K, dim=-1)
        return weights_TK.softmax(dim=-1), ids_TK


class DrawsInTwoRuns(KeepsDropped, Draws):
    """What a second run draws would be other numbers."""


class DrawsBehind(Draws):
    """Draws once more than what is in front of its experts."""

    def kept(self, rows: Tensor, tokens: int) -> Tensor:
        return rows

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.rand(()) * 0


def test_the_same_random_numbers_are_drawn() -> None:
    model, converted = pair(Draws)
    results = []
    for each in (model, converted):
        torch.manual_seed(3)
        with torch.no_grad():
            results.append((each(tokens(2, 70)), each(tokens(2, 70)), torch.rand(3)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_the_report_says_that_it_draws() -> None:
    torch.manual_seed(0)
    (replaced,) = dynamo_moe.convert(Draws().eval()).replaced
    assert "it draws random numbers in evaluation mode too, as a file of it does" in replaced.notes


def test_numbers_drawn_behind_the_experts_are_drawn() -> None:
    model, converted = pair(DrawsBehind)
    for each in (model, converted):
        torch.manual_seed(3)
        with torch.no_grad():
            each(tokens(2, 7))
        assert torch.rand(()) == pytest.approx(float(after_two_draws(model)))


def after_two_draws(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    with torch.no_grad():
        model(tokens(2, 7))
    return torch.rand(())


class ReadsANumber(CutsRows):
    def start(self, x_TD: Tensor) -> Tensor:
        return super().start(x_TD) + int((x_TD > 1e9).sum())


def test_the_report_names_where_a_value_becomes_a_number(tmp_path: Path) -> None:
    """A trace reads code where it does, and cannot read how probes are made."""
    layer = ReadsANumber().eval()
    (replaced,) = dynamo_moe.convert(layer).replaced
    assert isinstance(layer._dynamo_moe_spec.routing, ProbedRouting)
    line = "`return super().start(x_TD) + int((x_TD > 1e9).sum())`"
    note, cost = replaced.notes
    assert line in note
    assert cost == "its own loop over the experts stays beside the node, and takes its time"
    with pytest.raises(dynamo_moe.ExportError, match=re.escape(line)):
        dynamo_moe.export(layer, (torch.randn(2, 5, WIDTH),), tmp_path / "model.onnx")


# --- Near misses ---


class NormedSum(CutsRows):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (WIDTH,))


class ClampedSum(CutsRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-3, 3)


class ReluOfSum(CutsRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class WeightedTokens(Layer):
    """The weight is a factor on what an expert takes, and on what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(dim=-1).split(1, dim=-1)
        return sum(
            gate * expert(gate * x) for gate, expert in zip(gates, self.experts, strict=True)
        )


class Slots(Layer):
    """Experts take mixtures of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        logits_TE = self.gate(x_TD)
        mixed_ED = logits_TE.softmax(dim=0).mT @ x_TD
        y_ED = torch.stack(
            [expert(row) for expert, row in zip(self.experts, mixed_ED, strict=True)]
        )
        return (logits_TE.softmax(dim=-1) @ y_ED).reshape(x.shape)


class Neighbours(Layer):
    """A token's weights are for the results of the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(dim=-1)
        before = x.roll(1, dims=-2)
        results = [expert(before) * gates[..., e : e + 1] for e, expert in enumerate(self.experts)]
        return sum(results) + 0 * x.roll(2, dims=-2)


class TwoRounds(Layer):
    """The second round's weights come from the first's result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class ByTheResult(CutsRows):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.sigmoid(y.square().mean(dim=-1, keepdim=True))


class ReturnsResults(CutsRows):
    """Returns an expert's results beside their sum."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.experts[0](x)[..., :3]


class ClampsTokens(Layer):
    def routed(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.choose(x_TD)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            rows, slots = (ids_TK == number).nonzero(as_tuple=True)
            rows, slots = rows[:50], slots[:50]
            results = expert(x_TD[rows].clamp(-100, 100))
            y_TD = y_TD.index_add(0, rows, weights_TK[rows, slots, None] * results)
        return y_TD


class Counts(CutsRows):
    """Its buffer would count a second run too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class OneIsOn(Layer):
    """Nothing chooses: one expert is on for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x) + 0 * self.gate(x).sum(dim=-1, keepdim=True)


class HalfOfIt(CutsRows):
    """Rounds what the experts give."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float16).to(x.dtype)


@pytest.mark.parametrize(
    "layer",
    [
        DrawsInTwoRuns, NormedSum, ClampedSum, ReluOfSum, WeightedTokens, Slots, TwoRounds,
        ByTheResult, ReturnsResults, ClampsTokens, Counts, OneIsOn, HalfOfIt,
    ],
)  # fmt: skip
def test_left(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    report = dynamo_moe.convert(nn.Sequential(layer()).eval())
    assert report.replaced == ()
    assert [left.module for left in report.unrecognised] == ["0"]


def test_an_expert_that_is_always_on_is_said_to_be_no_mixture() -> None:
    torch.manual_seed(0)
    (left,) = dynamo_moe.convert(nn.Sequential(OneIsOn()).eval()).unrecognised
    assert left.reason == "its result is not a weighted sum of its experts' results"


def test_tokens_of_their_neighbours_are_theirs() -> None:
    """What experts take is found too, if the forward computes it for every token."""
    model, converted = pair(Neighbours)
    assert converted[0]._dynamo_moe_spec.routing.tokens.function == "roll"
    for shape in SIZES[:4]:
        with torch.no_grad():
            x = tokens(*shape)
            torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-4)


def test_loras_of_another_width_are_left() -> None:
    torch.manual_seed(0)
    report = dynamo_moe.convert(nn.Sequential(Loras(out=WIDTH + 4)).eval())
    assert report.replaced == ()
    assert "LoRA" in report.unrecognised[0].reason
