"""Experts' weights that a model holds as (in, out): linked files have them as they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import dynamo_moe
from dynamo_moe.graph.transposed_weights import keep_transposed_weights
from dynamo_moe.moe_nodes.nodes import INPUTS, moe_nodes
from dynamo_moe.moe_nodes.targets.registry import TARGETS
from moe_architectures import ARCHITECTURES, example_inputs
from public_moe import CASES
from small_models import mlp_model

BOTH = {"w1_transposed": 1, "w2_transposed": 1}


class Model(NamedTuple):
    """A model with MoE layers, two examples for it, and the attributes that its nodes get."""

    build: Callable[[], nn.Module]
    examples: Callable[[int, int], Any]
    layouts: dict[str, int]


def architecture(name: str, layouts: dict[str, int]) -> Model:
    found = ARCHITECTURES[name]
    return Model(found.build, lambda batch, length: example_inputs(found, batch, length), layouts)


def public(name: str, layouts: dict[str, int]) -> Model:
    (found,) = (case for case in CASES if case.name == name)
    return Model(found.build, lambda batch, length: found.args(batch, length, 0), layouts)


MODELS = {
    "gpt_oss": architecture("gpt_oss", BOTH),
    "llama4": architecture("llama4", BOTH),
    "dbrx": public("dbrx-norm-1", {"w2_transposed": 1}),
    "mlp": Model(mlp_model, lambda batch, length: (torch.randn(batch * length, 16),), BOTH),
    "qwen3_moe": architecture("qwen3_moe", {}),
}


def export(model: nn.Module, example: Any, path: Path, **options: Any) -> onnx.ModelProto:
    if isinstance(example, dict):
        dynamo_moe.export(model, (), path, kwargs=example, **options)
    else:
        dynamo_moe.export(model, example, path, **options)
    return onnx.load(path)


@pytest.mark.each_value
@pytest.mark.parametrize("body", ["loop", "unrolled"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_lie_in_the_file_as_in_the_model(name: str, body: str, tmp_path: Path) -> None:
    build, examples, layouts = MODELS[name]
    model = build()
    parameters = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    graph = export(model, examples(2, 5), path, body=body, link_weights=True).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    layers = [node for node in graph.node if node.op_type in INPUTS]
    assert layers
    for layer in layers:
        given = {each.name: each.i for each in layer.attribute}
        assert {key: 1 for key in BOTH if given[key]} == layouts
        inputs = dict(zip(INPUTS[layer.op_type], layer.input, strict=False))
        for attribute in layouts:
            weight = stored[inputs[attribute.removesuffix("_transposed")]]
            values = torch.from_numpy(numpy_helper.to_array(weight).copy())
            assert torch.equal(values, parameters[weight.name].view(values.shape))
    turned = {node.input[0] for node in graph.node if node.op_type == "Transpose"}
    assert not turned & {weight for layer in layers for weight in layer.input[1:]}
    dynamo_moe.verify(path, model, [examples(batch, 5) for batch in (1, 3)])


@pytest.mark.parametrize(
    "options",
    [
        {"target": "dense", "link_weights": True},
        {"target": "onnxruntime", "link_weights": True},
        {"target": "plugin"},
    ],
    ids=lambda options: options["target"],
)
def test_other_files_have_weights_as_out_in(options: dict[str, Any], tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    graph = export(model, (torch.randn(3, 16),), path, **options).graph
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert sizes["0.mlp.w1"] == [6, 24, 16]
    assert sizes["0.mlp.w2"] == [6, 16, 24]


# --- The pass ---

GRAPH = """
<ir_version: 10, opset_import: ["" : 20, "moe" : 1]>
model (float[T, 16] x, float[4, 16] router) => (float[T, 16] y)
<float[4, 16, 24] w1, float[4, 24, 16] w2> {
    turned1 = Transpose<perm = [0, 2, 1]>(w1)
    turned2 = Transpose<perm = [0, 2, 1]>(w2)
    y = moe.DroplessMoE(x, router, turned1, turned2)
}
"""


def changed(*changes: tuple[str, str]) -> ir.Model:
    text = GRAPH
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    model = ir.from_onnx_text(text)
    keep_transposed_weights(model)
    return model


def layouts(node: ir.Node) -> dict[str, int]:
    return {name: each.as_int() for name, each in node.attributes.items() if name in BOTH}


def inputs(node: ir.Node) -> list[str | None]:
    return [None if value is None else value.name for value in node.inputs]


def test_a_node_takes_both_weights_as_they_lie() -> None:
    model = changed()
    (node,) = model.graph
    assert inputs(node) == ["x", "router", "w1", "w2"]
    assert layouts(node) == BOTH


@pytest.mark.parametrize(
    "perm", ["<perm = [0, 1, 2]>", "<perm = [2, 1, 0]>", ""], ids=["none", "others", "default"]
)
def test_another_permutation_stays(perm: str) -> None:
    model = changed(("<perm = [0, 2, 1]>(w1)", f"{perm}(w1)"))
    (node,) = moe_nodes(model)
    assert inputs(node) == ["x", "router", "turned1", "w2"]
    assert layouts(node) == {"w2_transposed": 1}


def test_layers_that_share_a_transposed_weight_take_it_as_it_lies() -> None:
    layer = "moe.DroplessMoE(x, router, turned1, turned2)"
    model = changed((f"y = {layer}", f"z = {layer} y = {layer.replace('(x', '(z')}"))
    assert [node.op_type for node in model.graph] == ["DroplessMoE"] * 2
    assert [layouts(node) for node in model.graph] == [BOTH] * 2


def test_a_transposed_weight_with_another_user_is_left_to_it() -> None:
    model = changed(
        ("=> (float[T, 16] y)", "=> (float[T, 16] y, float[4, 24, 16] turned1)"),
    )
    first, node = model.graph
    assert first.op_type == "Transpose"
    assert inputs(node) == ["x", "router", "w1", "w2"]


@pytest.mark.parametrize("target", ["dense", "onnxruntime", "tensorrt_moe"])
def test_a_body_in_the_place_of_its_node_refuses_the_layout(target: str) -> None:
    model = ir.from_onnx_text(
        GRAPH.replace(
            "moe.DroplessMoE(",
            "moe.DroplessMoE<top_k = 2, num_experts = 4, in_features = 16, hidden_features = 24>(",
        ).replace("float[4, 16] router)", "float[4, 16] router, float[4, 24, 16] w)")
    )
    for node in model.graph:
        for value in node.outputs:
            value.dtype = ir.DataType.FLOAT
    keep_transposed_weights(model)
    (node,) = model.graph
    with pytest.raises(ValueError, match=f"with target '{target}' weights must be \\(out, in\\)"):
        TARGETS[target].layer_body(node, 20)
