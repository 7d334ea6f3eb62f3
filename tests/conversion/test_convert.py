"""``dynamo_moe.convert``: recognise by structure, prove numerically, share storage, report."""

from __future__ import annotations

import copy
import json
import pickle
import re
from abc import ABC
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion import adapters, register_adapter
from dynamo_moe.conversion.comparison import compare
from dynamo_moe.models import DroplessMoEMlp
from dynamo_moe.modules import ConvertedModule
from listed_experts import Listed
from small_models import Residual, mlp_model

NAN = float("nan")


class SameShapeOtherActivation(DroplessMoEMlp):
    """Looks like a layer that the operators compute, but uses the sine instead of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        gelu, F.gelu = F.gelu, torch.sin
        try:
            return super().forward(x)
        finally:
            F.gelu = gelu


class WithStatistics(DroplessMoEMlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.expert_usage(x)


class OtherInThreeDimensions(DroplessMoEMlp):
    """Mixes the tokens of a batch first, but not those of a list."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True) if x.ndim == 3 else x)


class Capacity(DroplessMoEMlp):
    """Each expert takes its first tokens, at least 8, which a few tokens do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        _, weights, ids = self._route(flat)
        capacity = max(8, int(1.25 * ids.numel() / self.w1.shape[0]))
        result = torch.zeros_like(flat)
        for expert in range(self.w1.shape[0]):
            token, slot = torch.where(ids == expert)
            token, slot = token[:capacity], slot[:capacity]
            hidden = F.gelu(flat[token] @ self.w1[expert] + self.b1[expert])
            y = (hidden @ self.w2[expert] + self.b2[expert]) * weights[token, slot, None]
            result = result.index_add(0, token, y)
        return result.reshape(x.shape)


class StackedButUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 8))


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class ListOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def test_same_numbers_and_shared_parameters() -> None:
    model = mlp_model()
    x = torch.randn(3, 5, 16)
    expected, parameters = model(x), dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    report = dynamo_moe.convert(model)
    assert [(r.module, r.adapter, r.original, r.compared) for r in report.replaced] == [
        ("0.mlp", "mixture", "DroplessMoEMlp", True),
        ("1.mlp", "mixture", "DroplessMoEMlp", True),
    ]
    assert not report.unrecognised
    torch.testing.assert_close(model(x), expected)
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    model.load_state_dict(state)


def test_gradients_reach_the_original_parameters() -> None:
    model = mlp_model(layers=1)
    w1 = model[0].mlp.w1
    dynamo_moe.convert(model)
    model(torch.randn(8, 16)).sum().backward()
    assert w1.grad is not None
    assert w1.grad.abs().sum() > 0


def test_recognised_by_structure_not_by_class() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = DroplessMoEMlp(8, 16, 4, 2)
            self.router, self.top_k = inner.router, 2
            self.w1, self.b1, self.w2, self.b2 = inner.w1, inner.b1, inner.w2, inner.b2

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 8)
            weights, ids = self.router(flat).softmax(-1).topk(self.top_k)
            weights = weights / weights.sum(-1, keepdim=True)
            h = F.gelu(torch.einsum("td,edh->teh", flat, self.w1) + self.b1)
            y = torch.einsum("teh,ehd->ted", h, self.w2) + self.b2
            chosen = y.gather(1, ids[..., None].expand(-1, -1, 8))
            return (chosen * weights[..., None]).sum(1).reshape(x.shape)

    model = nn.Sequential(Elsewhere())
    assert [r.original for r in dynamo_moe.convert(model).replaced] == ["Elsewhere"]
    assert isinstance(model[0], ConvertedModule)
    assert isinstance(model[0], Elsewhere)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SameShapeOtherActivation(8, 16, 4, 2), "no known way to choose among its 4 experts"),
        (WithStatistics(8, 16, 4, 2), r"returns a tensor \[4\] that is neither its result nor"),
        (Capacity(8, 16, 4, 2), r"something else: relative error .* on equal tokens \[1, 4099"),
        (StackedButUnknown(), 'is missing the required "forward" function'),
        (ListOfExperts(), r"parameters \(weight, bias\) are not two or three matrices"),
    ],
)
def test_names_what_it_left(module: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert [(u.module, u.original) for u in report.unrecognised] == [("1", type(module).__name__)]
    assert re.search(reason, report.unrecognised[0].reason)
    assert model[1] is module
    assert not isinstance(module, ConvertedModule)


def test_a_class_that_cannot_be_changed_in_place() -> None:
    class Layer(ABC, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.gate, self.experts = Listed().children()

        forward = Listed.forward

    (left,) = dynamo_moe.convert(Layer().eval()).unrecognised
    assert "let nn.Module be the first base of Layer" in left.reason


def test_a_layer_that_takes_other_tokens_in_three_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OtherInThreeDimensions(8, 16, 4, 2)).eval()
    x = torch.randn(3, 50, 8)
    expected = model(x), model(x[0])
    assert [layer.module for layer in dynamo_moe.convert(model).replaced] == ["0"]
    torch.testing.assert_close(model(x), expected[0], rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="its own forward computes"):
        torch.testing.assert_close(model(x[0]), expected[1])


def test_other_modules_are_not_suspected() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert not report.unrecognised


def test_experts_dtype() -> None:
    model = mlp_model()
    x = torch.randn(4, 16)
    expected = model(x)
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    layer = model[0].mlp
    assert {layer.w1.dtype, layer.b1.dtype, layer.w2.dtype, layer.b2.dtype} == {torch.float16}
    assert layer.router.weight.dtype == torch.float32
    result = model(x)
    assert result.dtype == torch.float32
    assert 0 < (result - expected).abs().max() < 1e-2
    with pytest.raises(TypeError, match=r"experts_dtype must be a floating dtype, got torch.int8"):
        dynamo_moe.convert(mlp_model(), experts_dtype=torch.int8)


def test_module_shared_by_two_places_stays_shared() -> None:
    moe = DroplessMoEMlp(8, 16, 4, 2)
    model = nn.ModuleDict({"a": moe, "b": nn.Sequential(moe)})
    dynamo_moe.convert(model)
    assert isinstance(model["a"], ConvertedModule)
    assert model["a"] is model["b"][0]


def test_root_module() -> None:
    model, x = DroplessMoEMlp(8, 16, 4, 2), torch.randn(5, 8)
    expected = model(x)
    assert [r.module for r in dynamo_moe.convert(model).replaced] == [""]
    torch.testing.assert_close(model(x), expected)


def test_experts_dtype_of_modules_converted_before() -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    dynamo_moe.convert(model, experts_dtype=torch.bfloat16)
    assert model[1].mlp.w2.dtype == torch.bfloat16


def test_shared_experts_stay_shared_in_another_dtype() -> None:
    model = mlp_model()
    model[1].mlp.w1 = model[0].mlp.w1
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    assert model[1].mlp.w1 is model[0].mlp.w1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_whole_models_of_other_dtypes(dtype: torch.dtype) -> None:
    """Whatever the precision, formulas are compared in one that distinguishes them."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(DroplessMoEMlp(16, 16, 32, 4)).to(dtype)
        assert [r.compared for r in dynamo_moe.convert(model).replaced] == [True]
        assert model[0].w1.dtype == dtype


def test_hooks_run_as_before_but_not_in_trials() -> None:
    """Hooks of experts that are modules cannot run: the operator does not call the experts."""
    called = []
    model = mlp_model(layers=1)
    model[0].mlp.register_forward_hook(lambda *_: called.append("layer"))
    dynamo_moe.convert(model)
    assert not called
    model(torch.randn(4, 16))
    assert called == ["layer"]


def test_attributes_and_methods_stay() -> None:
    model = mlp_model(layers=1)
    model[0].mlp.aux_loss = None
    x = torch.randn(4, 16)
    expected = model[0].mlp.load_balancing_loss(x)
    dynamo_moe.convert(model)
    layer = model[0].mlp
    assert isinstance(layer, DroplessMoEMlp)
    assert (layer.aux_loss, layer.top_k) == (None, 2)
    assert layer.load_balancing_loss(x) == expected


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  It was made here.


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_converted_models_are_copied_and_pickled(copied: Any) -> None:
    model, x = mlp_model(layers=1), torch.randn(4, 16)
    dynamo_moe.convert(model)
    expected = model(x)
    twin = copied(model)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        twin[0].mlp.w2.zero_()
    assert torch.equal(model(x), expected)
    assert not torch.equal(twin(x), expected)


def test_markup_in_a_reason_is_text(tmp_path: Path) -> None:
    from rich.console import Console

    class Fails(DroplessMoEMlp):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("expected [/batch]")

    report = dynamo_moe.convert(nn.Sequential(Fails(8, 16, 4, 2)))
    with (tmp_path / "table").open("w") as file:
        Console(file=file, width=200).print(report)
    assert "expected [/batch]" in (tmp_path / "table").read_text()


def test_meta_device_is_not_compared() -> None:
    with torch.device("meta"):
        model = nn.Sequential(DroplessMoEMlp(8, 16, 4, 2))
    assert [r.compared for r in dynamo_moe.convert(model).replaced] == [False]


def test_converting_twice_changes_nothing() -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    layer = model[0].mlp
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert not report.unrecognised
    assert model[0].mlp is layer


def test_modes_are_kept() -> None:
    model = mlp_model().train()
    model[1].eval()
    dynamo_moe.convert(model)
    assert model[0].mlp.training
    assert not model[1].mlp.training


def test_adapters_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo_moe.conversion import registry

    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))

    class Converted(ConvertedModule):
        def experts_parameters(self) -> dict[str, nn.Parameter]:
            return {}

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Doubles:
        name = "doubles"

        def recognise(self, module: nn.Module) -> str | None:
            return None if isinstance(module, Double) else "no Double"

        def convert(self, module: nn.Module) -> nn.Module:
            return Converted()

        def example_tokens(self, module: nn.Module) -> Tensor:
            return torch.randn(4, 8)

    register_adapter(Doubles())
    assert [adapter.name for adapter in adapters()][-1] == "doubles"
    register_adapter(Doubles())  # As when a notebook's cell is run again.
    assert [adapter.name for adapter in adapters()].count("doubles") == 1

    class Others(Doubles):
        pass

    with pytest.raises(ValueError, match="an adapter named 'doubles' is registered already, of"):
        register_adapter(Others())
    report = dynamo_moe.convert(nn.Sequential(Residual(8, Double())))
    assert [r.module for r in report.replaced] == ["0.mlp"]


def test_report(tmp_path: Path) -> None:
    from rich.console import Console

    model = nn.Sequential(DroplessMoEMlp(8, 16, 4, 2), ListOfExperts())
    report = dynamo_moe.convert(model)
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["replaced"][0]["module"] == "0"
    with (tmp_path / "table").open("w") as file:
        Console(file=file, width=200).print(report)
    text = (tmp_path / "table").read_text()
    assert "1 MoE module converted" in text
    assert "are not two or three matrices" in text


@pytest.mark.parametrize(
    ("factors", "reason"),
    [((NAN, 1.0), "numbers that are not finite"), ((1.0, NAN), "computes something else")],
)
def test_nan_is_never_the_same(factors: tuple[float, float], reason: str) -> None:
    x = torch.ones(2, 3)
    original, candidate = (lambda x, f=factor: f * x for factor in factors)
    with pytest.raises(ValueError, match=reason):
        compare(original, candidate, [x], "experts")


class Gated(nn.Module):
    """Experts in a list, of which each may return more than its result."""

    def __init__(self, experts: list[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, len(experts))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (ids == number)).sum(dim=-1, keepdim=True)
            y = expert(x)
            result = result + weight * (y[0] if isinstance(y, tuple) else y)
        return result


class WithBias(nn.Module):
    """Megatron's MLP: a result, and a bias that is added elsewhere, here None."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.fc2(nn.functional.gelu(self.fc1(x))), None


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 12), nn.SiLU(), nn.Linear(12, width))


def test_experts_that_return_a_tuple() -> None:
    model, x = nn.Sequential(Gated([WithBias() for _ in range(4)])), torch.randn(3, 8)
    expected = model(x)
    assert [layer.module for layer in dynamo_moe.convert(model).replaced] == ["0"]
    torch.testing.assert_close(model(x), expected)


def test_one_module_may_be_two_experts() -> None:
    first, *others = (mlp() for _ in range(3))
    model, x = nn.Sequential(Gated([first, *others, first])), torch.randn(3, 8)
    expected = model(x)
    report = dynamo_moe.convert(model)
    assert [layer.module for layer in report.replaced] == ["0"]
    torch.testing.assert_close(model(x), expected)


class Heads(Gated):
    """Routes parts of a token, as arXiv 2404.15045 does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (2, 8))).flatten(-2)


def test_a_width_that_the_layer_does_not_take_is_named() -> None:
    (left,) = dynamo_moe.convert(nn.Sequential(Heads([mlp() for _ in range(4)]))).unrecognised
    assert left.reason.startswith("it takes no tokens of its experts' width 8: unflatten: ")


def test_a_capacity_is_named_only_if_it_drops_tokens() -> None:
    layer: Any = Gated([nn.Sequential(mlp(), nn.Tanh()) for _ in range(4)])
    layer.capacity = 3
    (left,) = dynamo_moe.convert(nn.Sequential(layer)).unrecognised
    assert "capacity" not in left.reason
