"""``dynamo_moe.export``: the file computes what the model does, at all shapes and in every form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxsim
import onnxslim
import pytest
import torch
from torch import nn

import custom_ops
import dynamo_moe
from dynamo_moe.weights import placeholders
from export_forms import BESIDE_THE_NODE, FORMS, TOKENS, mixed_model, run
from small_models import OpLayer, OwnRouter, mlp_model, op_model

pytest_plugins = ("export_forms",)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_runs_at_other_shapes_than_the_example(exported, name: str, form: str) -> None:
    model, path = exported(name, form)
    cases = [(torch.randn(*shape, 16),) for shape in ((1, 1), (3, 7), (2, 64), (7, 2))]
    report = dynamo_moe.verify(path, model, cases)
    assert [case.shapes["input"][:2] for case in report.cases] == [(1, 1), (3, 7), (2, 64), (7, 2)]
    assert all(case.routing_agreement == 1.0 for case in report.cases)


@pytest.mark.parametrize("form", ["plugin", "unrolled", "dense"])
@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_empty_batch(exported, name: str, form: str) -> None:
    _, path = exported(name, form)
    assert run(path, torch.randn(0, 5, 16)).shape == (0, 5, 16)


@pytest.mark.parametrize("first", [True, False], ids=["first bias alone", "no bias"])
def test_biases_that_are_absent_before_another_input(tmp_path: Path, first: bool) -> None:
    class Selecting(OpLayer):
        def __init__(self) -> None:
            super().__init__()
            self.b2, self.b1 = None, self.b1 if first else None
            self.selection_bias = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.router_weight, self.w1, self.b1, self.w2, self.b2
            return custom_ops.dropless(x, *weights, 2, selection_bias=self.selection_bias)

    model, path = op_model(Selecting()), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(4, 16), path)
    assert dynamo_moe.verify(path, model).passed
    sizes = [tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer]
    assert (sizes.count((6, 16)), sizes.count((6, 24))) == (2, 1)  # The router's weight, too.


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_the_example_did_not_hit(tmp_path: Path, form: str) -> None:
    """The example only reaches experts 0 and 1; then tokens choose every other pair."""
    torch.manual_seed(2)
    layer = OpLayer(experts=6, activation="relu")
    with torch.no_grad():
        layer.router_weight.zero_()
        layer.router_weight[:, :6] = torch.eye(6) * 20
    model = nn.Sequential(layer).eval()

    def tokens(first: int, second: int) -> torch.Tensor:
        x = torch.randn(2, 16) * 0.01
        x[:, first], x[:, second] = 1.0, 0.9
        return x

    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, tokens(0, 1), path, **FORMS[form])
    for first in range(6):
        for second in set(range(6)) - {first}:
            x = tokens(first, second)
            torch.testing.assert_close(run(path, x), model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "mixed"])
@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_simplifiers_leave_a_good_file(exported, name: str, form: str, tool: str) -> None:
    _, path = exported(name, form)
    proto = onnx.load(path)
    simplified = onnxslim.slim(proto) if tool == "onnxslim" else onnxsim.simplify(proto)[0]
    onnx.checker.check_model(simplified, full_check=True)
    onnx.shape_inference.infer_shapes(simplified, check_type=True, strict_mode=True)
    x = torch.randn(3, 4, 16)
    assert torch.equal(run(simplified, x), run(path, x))
    count = sum(node.domain.startswith("moe") for node in simplified.graph.node)
    layers = {"mlp": 2, "mixed": 4}[name]
    assert count == (layers if form in BESIDE_THE_NODE else 0)


@pytest.mark.each_value
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
@pytest.mark.parametrize("body", ["loop", "unrolled"])
def test_opsets(tmp_path: Path, opset: int, body: str) -> None:
    model = mixed_model()
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 3, 16), path, opset=opset, body=body)
    assert report.body == body
    assert {o.domain: o.version for o in onnx.load(path).opset_import}[""] == opset
    assert dynamo_moe.verify(path, model, [(torch.randn(3, 3, 16),)]).passed


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_experts(tmp_path: Path, form: str) -> None:
    model = mlp_model()
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 5, 16), path, **FORMS[form])
    types = {t.name: t.data_type for t in onnx.load(path).graph.initializer}
    assert types["0.mlp.w1"] == types["0.mlp.b2"] == onnx.TensorProto.FLOAT16
    assert types["0.mlp.router.weight"] == onnx.TensorProto.FLOAT
    report = dynamo_moe.verify(path, model, [(torch.randn(3, 5, 16),), (torch.randn(1, 5, 16),)])
    assert report.tolerance.max == 1e-2


@pytest.mark.parametrize("external", [True, False])
def test_a_view_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 70, bias=False)
            self.scales = nn.Parameter(torch.randn(5, 3, 70).permute(2, 0, 1))
            self.none = nn.Parameter(torch.randn(3, 0, 70).permute(2, 0, 1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            scaled = self.head(input)[..., None, None] * self.scales
            return scaled.sum() + self.none.sum() + self.scales

    model, path = Views().eval(), tmp_path / "m.onnx"
    monkeypatch.setattr(placeholders, "_CHUNK", 1000)
    dynamo_moe.export(model, torch.randn(2, 6, 24), path, external_data=external)
    x = torch.randn(3, 6, 24)
    torch.testing.assert_close(run(path, x), model(x).detach(), rtol=1e-4, atol=1e-4)
    held = {w.name: onnx.numpy_helper.to_array(w) for w in onnx.load(path).graph.initializer}
    assert np.array_equal(held["scales"], model.scales.detach().numpy())
    assert np.array_equal(held["head.weight"], model.head.weight.detach().numpy().T)


def test_layers_in_the_branches_of_control_flow(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = OpLayer(), OpLayer(activation="relu")
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(
                x.sum() > 0,
                lambda x: self.first(self.linear(x)),
                lambda x: self.second(x) + 1,
                (x,),
            )

    model, path = Branches().eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 16), path)
    assert len(report.layers) == 2
    positive = torch.rand(3, 16)
    dynamo_moe.verify(path, model, [(positive,), (-positive,)])


def test_a_module_that_runs_twice(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = OpLayer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    model, path = Twice().eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 16), path)
    assert report.layers == ("layer", "layer")
    names = [node.name for node in onnx.load(path).graph.node if node.domain == "moe"]
    assert names == ["layer/DroplessMoE", "layer/DroplessMoE_2"]
    assert len(onnx.load(path).functions) == 1
    dynamo_moe.verify(path, model)


def test_onnxruntime_target_takes_quick_gelu_as_a_gating(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, path = op_model(OpLayer(activation="quick_gelu", gated=True)), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target="onnxruntime")
    dynamo_moe.verify(path, model, [(torch.randn(40, 16),)])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
def test_onnxruntime_target_takes_any_router(tmp_path: Path, scoring: str, gated: bool) -> None:
    torch.manual_seed(3)
    activation = "clamped_swiglu" if gated else "silu"
    layer = OpLayer(
        activation=activation, gated=gated, scoring=scoring, renormalize=False, routed_scaling=2.5
    )
    model, path = op_model(layer), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target="onnxruntime")
    dynamo_moe.verify(path, model, [(torch.randn(40, 16),)])


def test_an_unrolled_body_serves_one_number_of_experts(tmp_path: Path) -> None:
    """A file with layers of 6 and of 4 experts has two functions, each with its own products."""
    torch.manual_seed(3)
    layers = [OpLayer(experts=count, activation="relu") for count in (6, 4, 6)]
    model = nn.Sequential(*layers).eval()
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, body="unrolled")
    proto = onnx.load(path)
    products = [
        sum(node.op_type == "Gemm" for node in function.node) for function in proto.functions
    ]
    assert products == [2 * 6 + 1, 2 * 4 + 1]  # Including the router's.
    assert len({node.domain for node in proto.graph.node}) == 2
    assert dynamo_moe.verify(path, model, [(torch.randn(9, 16),)]).passed


@pytest.mark.parametrize("form", FORMS)
def test_norm_and_residual_in_the_layer(tmp_path: Path, form: str) -> None:
    torch.manual_seed(3)
    options = {"activation": "silu", "pre_norm": "rms", "residual": True}
    model = nn.Sequential(
        OpLayer(scoring="sigmoid", renormalize=False, norm_eps=0.25, gated=True, **options),
        OwnRouter(norm_eps=0.5, **options),
    ).eval()
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(1, 5, 16), path, **FORMS[form], dynamic_shapes=TOKENS)
    cases = [(torch.randn(*shape, 16),) for shape in ((1, 1), (3, 7), (2, 64))]
    dynamo_moe.verify(path, model, cases)
    if form in BESIDE_THE_NODE:
        layers = dynamo_moe.inspect(path).moe_layers
        keys = ("pre_norm", "norm_eps", "residual")
        assert [[layer.attributes[key] for key in keys] for layer in layers] == [
            ["rms", 0.25, 1],
            ["rms", 0.5, 1],
        ]


class Remembers(nn.Module):
    """Its result depends on the calls before it; how many there were, it only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last.zero_()
        self.last += x.mean(0)
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + self.mean + self.last


def test_a_buffer_that_the_model_changes_and_reads_is_noted(tmp_path: Path) -> None:
    report = dynamo_moe.export(Remembers(), torch.ones(3, 4), tmp_path / "m.onnx")
    assert report.notes == (
        "the model changes its buffer mean as it runs; in the file it stays as it is now",
    )


def test_compiled_parts_are_not_compiled(tmp_path: Path) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) if x.shape[0] > 2 else x

    blocks: list[Any] = [torch.compile(Block(), backend=backend) for _ in range(5)]
    model = nn.Sequential(*blocks)
    report = dynamo_moe.export(model, torch.randn(3, 4), tmp_path / "m.onnx", dynamic_shapes=None)
    assert report.nodes == {"Gemm": 5, "Add": 5}
    assert dynamo_moe.verify(report.path, model, [(torch.randn(3, 4),)]).passed
    assert not compiled
