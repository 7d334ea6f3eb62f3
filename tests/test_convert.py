"""``dynamo_moe.convert``: recognise by structure, prove by numbers, share storage, report."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion import adapters, register_adapter
from dynamo_moe.models import DroplessMoEMlp
from dynamo_moe.modules import ConvertedModule, DroplessMoE
from small_models import Residual, mlp_model


class SameShapeOtherActivation(DroplessMoEMlp):
    """Looks like the layer that the adapter knows, but is not: SiLU in place of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        gelu, F.gelu = F.gelu, F.silu
        try:
            return super().forward(x)
        finally:
            F.gelu = gelu


class TokenList(DroplessMoEMlp):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


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
        ("0.mlp", "dropless-mlp", "DroplessMoEMlp", True),
        ("1.mlp", "dropless-mlp", "DroplessMoEMlp", True),
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
    assert isinstance(model[0], DroplessMoE)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SameShapeOtherActivation(8, 16, 4, 2), "computes something else: relative error"),
        (TokenList(8, 16, 4, 2), "returns something else"),
        (StackedButUnknown(), "stacks 4 experts in up, down"),
        (ListOfExperts(), "holds a list of 4 experts"),
    ],
)
def test_names_what_it_left(module: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert [(u.module, u.original) for u in report.unrecognised] == [("1", type(module).__name__)]
    assert reason in report.unrecognised[0].reason
    assert model[1] is module


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
    assert isinstance(model["a"], DroplessMoE)
    assert model["a"] is model["b"][0]


def test_root_module() -> None:
    with pytest.raises(ValueError, match="the model itself is an MoE module: wrap it"):
        dynamo_moe.convert(DroplessMoEMlp(8, 16, 4, 2))


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_whole_models_of_other_dtypes(dtype: torch.dtype) -> None:
    """Whatever the precision, the formula is compared in one that tells formulas apart."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(DroplessMoEMlp(16, 16, 32, 4)).to(dtype)
        assert [r.compared for r in dynamo_moe.convert(model).replaced] == [True]
        assert model[0].w1.dtype == dtype


def test_hooks_are_not_dropped() -> None:
    model = mlp_model()
    model[0].mlp.register_forward_hook(lambda *_: None)
    model[1].mlp.router.register_forward_hook(lambda *_: None)
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert all("forward hooks" in left.reason for left in report.unrecognised)


def test_a_router_that_is_more_than_its_weight() -> None:
    class Adapted(nn.Linear):
        pass

    model = mlp_model(layers=1)
    router = Adapted(16, 6, bias=False)
    model[0].mlp.router = router
    report = dynamo_moe.convert(model)
    assert not report.replaced
    assert "stacks 6 experts" in report.unrecognised[0].reason


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
    from dynamo_moe.conversion import _registry

    monkeypatch.setattr(_registry, "_ADAPTERS", dict(_registry._ADAPTERS))

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
    with pytest.raises(ValueError, match="an adapter named 'doubles' is registered already"):
        register_adapter(Doubles())
    report = dynamo_moe.convert(nn.Sequential(Residual(8, Double())))
    assert [r.module for r in report.replaced] == ["0.mlp"]


def test_report(tmp_path: Path) -> None:
    from rich.console import Console

    model = nn.Sequential(DroplessMoEMlp(8, 16, 4, 2), ListOfExperts())
    report = dynamo_moe.convert(model)
    assert json.loads(json.dumps(report.to_dict()))["replaced"][0]["module"] == "0"
    with (tmp_path / "table").open("w") as file:
        Console(file=file, width=200).print(report)
    text = (tmp_path / "table").read_text()
    assert "1 MoE module converted" in text
    assert "holds a list of 4 experts" in text
