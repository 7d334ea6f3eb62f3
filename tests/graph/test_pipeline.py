"""The list of passes: what is in it for a form, and what each refuses and leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import InvariantError, PostconditionError, PreconditionError

from dynamo_moe.graph import lowering, passes, pipeline
from dynamo_moe.graph.pipeline import Findings, Form, give_form, passes_to
from dynamo_moe.moe_nodes import translation  # noqa: F401  Registers the operators.
from dynamo_moe.moe_nodes.nodes import moe_nodes
from dynamo_moe.moe_nodes.targets.dense import DENSE
from dynamo_moe.moe_nodes.targets.plugin import PLUGIN

GRAPH = """
<ir_version: 10, opset_import: ["" : 20, "moe" : 1]>
model (
  float[T, 16] x, float[4, 16] router, float[4, 24, 16] w1, float[4, 16, 24] w2
) => (float[T, 16] y)
{
  one = Constant <value = float {1.0}> ()
  scaled = Mul(x, one)
  layer = moe.DroplessMoE <
    top_k = 2, num_experts = 4, in_features = 16, hidden_features = 24, routed_scaling = 1.0
  > (scaled, router, w1, w2)
  y = Tanh(layer)
}
"""


def traced() -> ir.Model:
    """A graph as it is translated: a bare node, constants among the nodes, weights with values."""
    model = ir.from_onnx_text(GRAPH)
    for weight in model.graph.inputs[1:]:
        model.graph.inputs.remove(weight)
        weight.const_value = ir.tensor(np.ones(weight.shape.numpy(), np.float32), name=weight.name)
        model.graph.register_initializer(weight)
    for node in model.graph:
        for output in node.outputs:
            output.type = ir.TensorType(ir.DataType.FLOAT)
    return model


def names(form: Form) -> list[str]:
    return [type(step).__name__ for step in passes_to(form, Findings())]


def test_a_target_decides_when_its_nodes_are_lowered() -> None:
    plugin, dense = names(Form(PLUGIN, "loop")), names(Form(DENSE, "loop"))
    assert plugin.index("Simplify") < plugin.index("AddBodies")
    assert dense.index("ReplaceNodes") < dense.index("Simplify")
    # Replaced nodes may leave weights to fold once more.
    dense.reverse()
    dense.remove("FoldStackedWeights")
    dense.reverse()
    assert [name for name in plugin if name != "AddBodies"] == [
        name for name in dense if name != "ReplaceNodes"
    ]


def test_options_add_passes() -> None:
    plain, linked = names(Form(PLUGIN, "loop")), names(Form(PLUGIN, "loop", link_weights=True))
    assert set(linked) - set(plain) == {"KeepTransposedWeights"}
    assert "KeepTransposedWeights" not in names(Form(DENSE, "loop", link_weights=True))
    assert names(Form(PLUGIN, "loop", layers_as_functions=True)) == [*plain, "MakeFunctions"]


def test_every_pass_is_one_of_onnx_ir() -> None:
    form = Form(PLUGIN, "loop", link_weights=True, layers_as_functions=True)
    for step in [*passes_to(form, Findings()), *passes_to(Form(DENSE, "loop"), Findings())]:
        assert isinstance(step, ir.passes.PassBase)
        assert step.in_place


@pytest.mark.parametrize("target", [PLUGIN, DENSE], ids=lambda target: target.name)
def test_a_graph_gets_its_form(target) -> None:
    model = traced()
    layers, copies = give_form(model, Form(target, "loop"))
    assert [layer.inputs[1:] for layer in layers] == [("router", "w1", "w2")]
    assert not copies
    assert [node.op_type for node in moe_nodes(model)] == ["DroplessMoE"] * target.keeps_nodes
    assert ("moe", "DroplessMoE", "") in model.functions or not target.keeps_nodes
    assert not any(node.op_type == "Constant" for node in model.graph)


ORDERS = [
    ("Simplify", "RecordLayers", DENSE, "the MoE layers are not recorded"),
    ("ReplaceNodes", "RecordLayers", DENSE, "the MoE layers are not recorded"),
    ("AddBodies", "Simplify", PLUGIN, "the graph is not simplified"),
    ("RollRepeats", "Simplify", PLUGIN, "the graph is not simplified"),
    ("DequantizeWeights", "Simplify", PLUGIN, "the graph is not simplified"),
    ("InstantiateUnits", "Simplify", PLUGIN, "the graph is not simplified"),
    ("NameCanonically", "RecordLayers", PLUGIN, "the MoE layers are not recorded"),
]


@pytest.mark.parametrize(("early", "late", "target", "message"), ORDERS)
def test_a_pass_that_comes_too_early_says_what_it_needs(
    early: str, late: str, target, message: str
) -> None:
    steps = {type(step).__name__: step for step in passes_to(Form(target, "loop"), Findings())}
    order = [name for name in steps if name != early]
    order.insert(order.index(late), early)
    model = traced()
    for name in order[: order.index(early)]:
        steps[name](model)
    with pytest.raises(PreconditionError, match=message):
        steps[early](model)


@pytest.mark.parametrize("late", ["FoldStackedWeights", "RecordLayers", "Simplify"])
def test_passes_that_need_bare_nodes_refuse_bodies(late: str) -> None:
    model, findings = traced(), Findings(layers=[])
    lowering.lower(model, PLUGIN)
    steps = {type(step).__name__: step for step in passes_to(Form(PLUGIN, "loop"), findings)}
    with pytest.raises(PreconditionError, match="has its body beside it already"):
        steps[late](model)


def leave(model: ir.Model, *args: object, **options: object) -> None:
    """A step that does nothing."""


def declare_another_shape(model: ir.Model, **options: object) -> None:
    model.graph.initializers["w1"].shape = ir.Shape([4, 16, 24])


def name_alike(model: ir.Model) -> None:
    for node in model.graph:
        node.name = "node"


BROKEN: list[tuple[object, str, Callable[..., None], str, str]] = [
    (passes, "optimize", leave, "plugin", "constants are left among the nodes"),
    (lowering, "lower", leave, "dense", "is not replaced by its body"),
    (lowering, "lower", leave, "plugin", "has no body beside it"),
    (passes, "fold_weight_casts", declare_another_shape, "plugin", "weight 'w1' is declared"),
    (passes, "name_nodes_by_module", name_alike, "plugin", "4 times a node is called 'node'"),
]


@pytest.mark.parametrize(("module", "name", "broken", "target", "message"), BROKEN)
def test_a_pass_that_does_not_leave_what_it_says_is_found(
    monkeypatch: pytest.MonkeyPatch, module, name: str, broken, target: str, message: str
) -> None:
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(PostconditionError, match=message):
        give_form(traced(), Form(PLUGIN if target == "plugin" else DENSE, "loop"))


def test_values_of_one_name_are_found() -> None:
    model = traced()
    first, second, *_ = model.graph
    second.outputs[0].name = first.outputs[0].name
    with pytest.raises(InvariantError, match="2 times a value is called"):
        pipeline.NameCanonically(Findings(layers=[]))(model)
