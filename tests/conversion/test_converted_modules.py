"""What happens to converted modules later: training, casts, state dicts, other arguments."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import dynamo_moe
from dynamo_moe.modules import ConvertedModule


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int, limit: float | None = None) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.w2(F.silu(gate) * up)


class Listed(nn.Module):
    """Experts that are modules, as in most models."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(Expert(16, 24, limit) for _ in range(4))

    def run(self, expert: int, x: Tensor) -> Tensor:
        return self.experts[expert](x)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, 16)
        weights, ids = self.gate(flat).softmax(-1).topk(2)
        weights = weights * scale
        if mask is not None:
            weights = weights * mask.reshape(-1, 1)
        result = torch.zeros_like(flat)
        for expert in range(4):
            token, slot = torch.where(ids == expert)
            y = self.run(expert, flat[token]) * weights[token, slot, None]
            result = result.index_add(0, token, y.to(result.dtype))
        return result.view(x.shape)


class Stacked(Listed):
    """Gate and up in separate stacks: the operator gets a copy."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.w1 = nn.Parameter(torch.randn(4, 24, 16) / 4)
        self.w3 = nn.Parameter(torch.randn(4, 24, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(4, 16, 24) / 5)

    def run(self, expert: int, x: Tensor) -> Tensor:
        return (F.silu(x @ self.w1[expert].T) * (x @ self.w3[expert].T)) @ self.w2[expert].T


def pair(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """An original and a converted module with the same weights."""
    original, converted = kind().eval(), kind().eval()
    assert len(dynamo_moe.convert(converted).replaced) == 1
    return original, converted


def same(original: nn.Module, converted: nn.Module) -> None:
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), original(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Listed, Stacked])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_an_evaluation(kind: type[nn.Module], mode: type) -> None:
    original, converted = pair(kind)
    with mode():
        converted(torch.randn(3, 16))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (original, converted)]
    x = torch.randn(8, 16)
    for _ in range(2):
        for module, optimizer in zip((original, converted), optimizers, strict=True):
            module.train()
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            module.eval()
        same(original, converted)


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_weights_that_change_without_a_trace(kind: type[nn.Module]) -> None:
    original, converted = pair(kind)
    same(original, converted)
    for module in (original, converted):
        for parameter in module.parameters():
            parameter.data.mul_(1.5)
    same(original, converted)


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_frozen_weights_are_stacked_once(kind: type[nn.Module]) -> None:
    original, converted = pair(kind)
    for module in (original, converted):
        module.requires_grad_(False)
    same(original, converted)
    kept = converted._dynamo_moe_weights._weights
    same(original, converted)
    assert converted._dynamo_moe_weights._weights is kept
    other = kind().requires_grad_(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    for module in (original, converted):
        module.load_state_dict(other.state_dict())
    same(original, converted)
    converted.double()
    original.double()
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(converted(x), original(x))


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_changes_that_pytorch_does_not_count(kind: type[nn.Module]) -> None:
    """It counts none of inference tensors."""
    with torch.inference_mode():
        original, converted = pair(kind)
        for module in (original, converted):
            module.requires_grad_(False)
        same(original, converted)
        for module in (original, converted):
            for parameter in module.parameters():
                parameter.mul_(1.5)
        same(original, converted)


def test_listed_experts_are_held_once() -> None:
    _, converted = pair(Listed)
    with torch.no_grad():
        converted(torch.randn(3, 16))
    kept = converted._dynamo_moe_weights._weights
    assert converted.experts[1].w1.weight.data_ptr() == kept.w1[1].data_ptr()
    assert converted.experts[3].w2.weight.data_ptr() == kept.w2[3].data_ptr()


class Shared(nn.Module):
    """Its first weight has a second name, which comes before that of the stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        experts = nn.Module()
        experts.w1 = nn.Parameter(torch.randn(4, 24, 16) / 4)
        experts.w2 = nn.Parameter(torch.randn(4, 16, 24) / 5)
        self.gate = nn.Linear(16, 4, bias=False)
        self.up = experts.w1
        self.experts = experts

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.experts.w1[expert], self.experts.w2[expert]

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for expert in range(4):
            w1, w2 = self.matrices(expert)
            weight = (weights * (ids == expert)).sum(-1, keepdim=True)
            result = result + F.relu(x @ w1.T) @ w2.T * weight
        return result


class SharedInLists(Shared):
    """One parameter for each expert, and a second name for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterList(self.experts.w1.detach().unbind())
        self.b = nn.ParameterList(self.experts.w2.detach().unbind())
        del self.experts
        self.up = self.a[0]

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.a[expert], self.b[expert]


@pytest.mark.parametrize("kind", [Shared, SharedInLists])
def test_weights_with_a_second_name(kind: type[nn.Module]) -> None:
    same(*pair(kind))


class StackedInRows(Shared):
    """All experts' rows in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts, self.up
        self.num_experts = 4
        self.w1 = nn.Parameter(torch.randn(4 * 24, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(4 * 24, 16) / 5)

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.w1.view(4, -1, 16)[expert], self.w2.view(4, -1, 16)[expert].T


@pytest.mark.parametrize("kind", [Listed, StackedInRows])
def test_a_hidden_size_that_changes_after_the_conversion(kind: type[nn.Module]) -> None:
    original, converted = pair(kind)
    same(original, converted)
    for name, parameter in list(original.named_parameters()):
        if "gate" not in name:
            owner, _, last = name.rpartition(".")
            rows, columns = (
                size // 24 * 32 if size % 24 == 0 else size for size in parameter.shape
            )
            wider = torch.randn(rows, columns) / 5
            for module in (original, converted):
                setattr(module.get_submodule(owner), last, nn.Parameter(wider.clone()))
    same(original, converted)


class ReturnsRouting(Listed):
    """Returns, flattened, which experts each token visits, and a mask of those that any visits."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        weights, ids = self.gate(x.reshape(-1, 16)).softmax(-1).topk(2)
        visited = torch.zeros(4, dtype=torch.bool).index_fill(0, ids.flatten(), value=True)
        return super().forward(x), ids.flatten(), weights.flatten(), visited


@pytest.mark.parametrize("tokens", [1, 5])
def test_routing_returned_in_one_dimension(tokens: int) -> None:
    original, converted = pair(ReturnsRouting)
    x = torch.randn(tokens, 16)
    y, ids, weights, visited = converted(x)
    expected = original(x)
    torch.testing.assert_close((y, weights), (expected[0], expected[2]), rtol=1e-5, atol=1e-5)
    assert ids.shape == (tokens * 2,)
    assert torch.equal(ids, expected[1])
    assert visited.dtype == torch.bool
    assert torch.equal(visited, expected[3])


def test_parameters_of_somebody_elses_memory_stay_there() -> None:
    original, converted = pair(Listed)
    flat = torch.cat([p.detach().flatten() for p in converted.parameters()])
    start = 0
    for parameter in converted.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    same(original, converted)
    flat.mul_(1.5)
    for parameter in original.parameters():
        parameter.data.mul_(1.5)
    same(original, converted)


def test_other_arguments_are_the_modules_own_matter(tmp_path: Path) -> None:
    original, converted = pair(Listed)
    x, mask = torch.randn(2, 5, 16), torch.tensor([[1.0, 0, 1, 1, 0]] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(converted(x, 1.0, mask=None), original(x))
    for arguments in ({"mask": mask}, {"scale": 2.0}):
        with pytest.warns(UserWarning, match="called with other arguments"):
            result = converted(x, **arguments)
        torch.testing.assert_close(result, original(x, **arguments))

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = converted

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x, scale=2.0)

    with pytest.warns(UserWarning, match="1 converted module is called otherwise than compared"):
        report = dynamo_moe.export(Parent(), x, tmp_path / "m.onnx")
    assert report.operators == {}
    assert any("'moe'" in note for note in report.notes)


def test_a_clamp_that_ordinary_tokens_do_not_reach() -> None:
    limited = nn.Sequential(Listed(limit=30.0))
    report = dynamo_moe.convert(limited)
    x = torch.randn(4, 16) * 60
    torch.testing.assert_close(limited.eval()(x), Listed(limit=30.0)(x), rtol=1e-4, atol=1e-2)
    assert [each.adapter for each in report.replaced] == ["mixture"]


@pytest.mark.parametrize("name", ["scale", "experts.1.w2.weight"])
def test_weights_that_are_no_numbers_are_named(name: str) -> None:
    class Scaled(Listed):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # Of tokens alone.
            return super().forward(x * self.scale)

    model = nn.Sequential(Scaled())
    model[0].get_parameter(name).data.view(-1)[3] = torch.nan
    (left,) = dynamo_moe.convert(model).unrecognised
    assert "not finite" in left.reason
    assert name != "scale" or "'scale'" in left.reason


def test_more_than_numbers_is_compared() -> None:
    class WithLength(Listed):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return super().forward(x), x.shape[0]

    (left,) = dynamo_moe.convert(nn.Sequential(WithLength())).unrecognised
    assert "returns something else" in left.reason


def test_layers_of_one_class_keep_their_own_attributes() -> None:
    class Remembers(Listed):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            self.seen, self.loss = self.number, x.new_ones(())
            return super().forward(x)

    model = nn.Sequential(Remembers(11), Remembers(12))
    report = dynamo_moe.convert(model)
    assert [layer.seen for layer in model] == [11, 12]
    assert "seen stays 12" in report.replaced[1].notes
    model[0].loss += 1  # In place, as where losses are summed up in training.
    assert [float(layer.loss) for layer in model] == [1, 0]


class SetsRouting(Listed):
    """Sets the routing on itself, as DeepSpeed's layer sets how many tokens each expert gets."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # Of tokens alone.
        self.scores, self.ids = self.gate(x.reshape(-1, 16)).softmax(-1).topk(2)
        self.counts = F.one_hot(self.ids, 4).sum((0, 1))
        return super().forward(x)


def test_routing_that_a_forward_sets_as_attributes(tmp_path: Path) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = SetsRouting()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.moe(x), self.moe.scores, self.moe.ids, self.moe.counts

    model, original, x = Parent().eval(), Parent().eval(), torch.randn(2, 5, 16)
    (replacement,) = dynamo_moe.convert(model, x).replaced
    assert (replacement.module, replacement.notes) == ("moe", ())
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dynamo_moe.export(model, x, path, dynamic_shapes={"x": {0: "batch"}})
    assert sum(report.operators.values()) == 1
    for tokens in (x, torch.randn(7, 5, 16)):
        torch.testing.assert_close(model(tokens), original(tokens), rtol=1e-5, atol=1e-5)
    assert dynamo_moe.verify(path, original).passed


def test_an_attribute_that_is_the_routing_of_few_tokens_alone() -> None:
    class SetsRows(Listed):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # Of tokens alone.
            counts = F.one_hot(self.gate(x.reshape(-1, 16)).topk(2).indices, 4).sum((0, 1))
            self.rows = counts.clamp(max=50)
            return super().forward(x)

    model = nn.Sequential(SetsRows())
    (replacement,) = dynamo_moe.convert(model).replaced
    assert replacement.notes == ("rows is no longer set: it is None",)
    assert model[0].rows is None


def test_a_forward_replaced_in_the_instance_is_not_converted() -> None:
    model = nn.Sequential(Listed(), Listed())
    model[1].forward = model[1].forward
    report = dynamo_moe.convert(model)
    assert [each.module for each in report.replaced] == ["0"]
    assert [each.module for each in report.unrecognised] == ["1"]
    assert "replaced in the instance" in report.unrecognised[0].reason


def test_trials_leave_nothing_behind() -> None:
    class Caches(Listed):
        def __init__(self) -> None:
            super().__init__()
            self._shapes: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            self._shapes.append(x.shape)
            if not hasattr(self, "experts_range"):
                self.register_buffer("experts_range", torch.arange(4))
            return super().forward(x)

    model = nn.Sequential(Caches())
    names = list(model.state_dict())
    assert len(dynamo_moe.convert(model).replaced) == 1
    assert model[0]._shapes == []
    assert list(model.state_dict()) == names


class ScalesItsRouter(Listed):
    """Scales its router's rows in each forward, as X-MoE of arXiv 2204.09179."""

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.gate.weight.mul_(1.5 / self.gate.weight.norm(dim=1, keepdim=True))
        return super().forward(x, scale, mask)


@pytest.mark.parametrize("args", [(), (torch.ones(2, 16),)])
def test_trials_leave_parameters_as_they_were(args: tuple[Tensor, ...]) -> None:
    model = nn.Sequential(ScalesItsRouter()).eval()
    original = copy.deepcopy(model)
    assert len(dynamo_moe.convert(model, args).replaced) == 1
    for value, before in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(value, before)
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))


def test_hooks_that_would_not_run() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Expert(16, 24) for _ in range(4))

        def forward(self, expert: int, x: Tensor) -> Tensor:
            return self.inner[expert](x)

    class Outer(Listed):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Holder()

        def run(self, expert: int, x: Tensor) -> Tensor:
            return self.experts(expert, x)

    model = nn.Sequential(Outer())
    assert len(dynamo_moe.convert(model).replaced) == 1
    hooked = nn.Sequential(Outer())
    hooked[0].experts.register_forward_hook(lambda module, inputs, output: 2 * output)
    (left,) = dynamo_moe.convert(hooked).unrecognised
    assert "'experts' has forward hooks" in left.reason


def test_layers_of_plain_mlps_are_no_mixture() -> None:
    class Mlps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(10)
            )
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    report = dynamo_moe.convert(Mlps())
    assert (report.replaced, report.unrecognised) == ((), ())


def test_one_weight_in_the_file_for_all_experts(tmp_path: Path) -> None:
    model = nn.Sequential(Listed()).eval()
    dynamo_moe.convert(model)
    assert isinstance(model[0], ConvertedModule)
    x = torch.randn(3, 5, 16)
    report = dynamo_moe.export(model, x, tmp_path / "m.onnx")
    assert report.operators == {"DroplessMoE": 1}
    graph = onnx.load(tmp_path / "m.onnx").graph
    weights = {t.name: list(t.dims) for t in graph.initializer if len(t.dims) > 1}
    assert weights == {
        "0.gate.weight": [4, 16],
        "0.experts.0-3.w1+w3.weight": [4, 48, 16],
        "0.experts.0-3.w2.weight": [4, 16, 24],
    }
    assert dynamo_moe.verify(tmp_path / "m.onnx", model).passed


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Listed() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_a_model_that_has_run_gives_the_same_file(tmp_path: Path) -> None:
    """The first call stacks the experts' weights, which the module then keeps."""
    model = Stack().eval()
    dynamo_moe.convert(model)
    files = []
    for name in ("fresh", "exported", "run"):
        path = tmp_path / f"{name}.onnx"
        report = dynamo_moe.export(model, torch.randn(2, 16), path)
        assert report.blocks[0] == "5 of ConvertedListed: 3 traced"
        files.append(path.read_bytes())
        if name == "exported":
            with torch.no_grad():
                model(torch.randn(3, 16))
    assert len({*files}) == 1


@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_derivatives_are_those_of_its_own_forward(trained: bool) -> None:
    original = Listed().eval().requires_grad_(trained)
    model = copy.deepcopy(original)
    dynamo_moe.convert(model)
    x, direction = torch.randn(5, 16), torch.randn(5, 16)
    expected, result = (
        torch.func.jvp(lambda x, each=each: each(x), (x,), (direction,))[1]
        for each in (original, model)
    )
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(result, expected)
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, direction))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, expected)
