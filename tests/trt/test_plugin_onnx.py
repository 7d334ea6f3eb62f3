"""Exporter, compiler and plugin agree: the nodes of a file, read as TensorRT's parser does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_moe
from custom_ops.kernels.plan import plan
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import swin_moe_digits
from interpreted_gpu import uncompiled_program
from moe_cases import assert_matches
from plugin_host import RUNTIME, VERSIONS, describe, host
from small_models import InOut, OpLayer, OwnRouter, mlp_model, op_model
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NAMES = {
    torch.ops.moe.dropless.default: "DroplessMoE",
    torch.ops.moe.experts.default: "DroplessMoEExperts",
}
# What is computed in the graph; the other inputs are parameters.
ACTIVATIONS = {"DroplessMoE": 1, "DroplessMoEExperts": 3}


class Call(NamedTuple):
    """What PyTorch computed in a layer."""

    name: str
    activations: list[Tensor]
    result: Tensor


class Recorder(TorchDispatchMode):
    """Keeps the calls of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in NAMES:
            name = NAMES[func]
            self.calls.append(Call(name, list(args[: ACTIVATIONS[name]]), result))
        return result


class Node(NamedTuple):
    """A node as the parser hands it on; inputs are None where the graph computes them."""

    name: str
    version: str
    layer: str
    attributes: dict[str, Any]
    inputs: list[Tensor | None]


def nodes_of(path: Path, tensorrt) -> list[Node]:
    """Reads the MoE nodes: those attributes that the creator lists, and constant inputs."""
    graph = onnx.load(path).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    nodes = []
    for node in graph.node:
        if not tensorrt.has(node.op_type):
            continue
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        version = given["plugin_version"].decode()
        rounded, offloaded = "logits_dtype" in given, "resident_experts" in given
        assert version == str(1 + offloaded + 2 * rounded)
        listed = tensorrt.field_names(node.op_type, version)
        # TensorRT's parser warns of others.
        assert given.keys() >= listed.keys()
        assert given["plugin_namespace"] == b""
        attributes = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in given.items()
            if name in listed
        }
        inputs = [
            torch.from_numpy(numpy_helper.to_array(constants[name]).copy())
            if name in constants
            else None
            for name in node.input
        ]
        nodes.append(Node(node.op_type, version, node.name, attributes, inputs))
    return nodes


def compiled(path: Path, gpu: StandinGpu) -> Path:
    """A bundle of the file's layers."""
    programs = {}
    for layer in kernel_layers(path):
        planned = plan(layer, gpu.architecture)
        programs[layer] = uncompiled_program(planned)
        gpu.interpreted.register(planned, programs[layer])
        for kernel in programs[layer].kernels:
            gpu.driver.add_image(kernel.image)
    bundle = path.with_suffix(".moek")
    bundle.write_bytes(Bundle(tuple(programs.values())).data)
    return bundle


def check(
    driver,
    tmp_path: Path,
    model: nn.Module,
    example: Tensor,
    *others: Tensor,
    link: bool = False,
    resident_experts: int | None = None,
) -> list[Node]:
    """Compares each node, as a layer of an engine, with what PyTorch computes on every input."""
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, (example,), path, link_weights=link)
    if resident_experts is not None:
        path = tmp_path / "offloaded.onnx"
        dynamo_moe.offload_file(tmp_path / "model.onnx", path, resident_experts=resident_experts)
    tensorrt = host(VERSIONS[-1])
    bundle = compiled(path, StandinGpu(driver, "sm_90"))
    nodes = nodes_of(path, tensorrt)
    for x in (example, *others):
        with torch.no_grad(), Recorder() as recorder:
            model(x)
        assert [call.name for call in recorder.calls] == [node.name for node in nodes]
        for node, call in zip(nodes, recorder.calls, strict=True):
            parameters = node.inputs[len(call.activations) :]
            assert all(each is not None for each in parameters)
            inputs = [*(each.contiguous() for each in call.activations), *parameters]
            result = run(tensorrt, node, bundle, inputs)
            dtypes = {inputs[0].dtype, parameters[-1].dtype}
            assert_matches(result, call.result.double(), dtypes, node.layer)
    return nodes


def run(tensorrt, node: Node, bundle: Path, inputs: list[Tensor]) -> Tensor:
    """Builds the layer and runs it from what the engine stores."""
    described = [describe(tensor) for tensor in inputs]
    attributes = node.attributes | {"kernels": str(bundle)}
    built = tensorrt.create(node.name, attributes, layer=node.layer, version=node.version)
    assert built is not None, tensorrt.messages()
    assert built.configure(described, described[0]) == 0, tensorrt.messages()
    size = built.workspace(described, described[0])
    stored = tensorrt.create(node.name, built.serialize(), RUNTIME, node.layer, node.version)
    built.destroy()
    result = stored.run(inputs, size)
    stored.destroy()
    return result


def test_swin_moe(driver, tmp_path):
    torch.manual_seed(0)
    model = swin_moe_digits().eval()
    size, channels = model.config.image_size, model.config.in_channels
    images = [torch.randn(batch, channels, size, size) for batch in (2, 1)]
    dynamo_moe.convert(model)
    nodes = check(driver, tmp_path, model, *images)
    assert len(nodes) == 2


def test_layers_that_differ(driver, tmp_path):
    torch.manual_seed(0)
    model = op_model(
        OpLayer(scoring="sigmoid", routed_scaling=2.5, renormalize=False),
        OpLayer(activation="silu", gated=True, biases=False, scoring="topk_softmax"),
        OwnRouter(activation="clamped_swiglu", gated=True, interleaved=True, alpha=1.3, limit=1.0),
        OwnRouter(activation="relu2", weight_on_input=True, biases=False),
        OpLayer(activation="gelu_tanh", gated=True, pre_norm="rms", norm_eps=0.5, residual=True),
    )
    nodes = check(driver, tmp_path, model, torch.randn(3, 5, 16))
    # The router has no bias; the experts' biases lie behind it.
    bias = nodes[0].inputs[4]
    assert bias.shape == (6,)
    assert not bias.any()
    assert [len(node.inputs) for node in nodes] == [7, 4, 7, 5, 7]


def test_half_precision(driver, tmp_path):
    model = mlp_model().half()
    dynamo_moe.convert(model)
    check(driver, tmp_path, model, torch.randn(3, 5, 16).half())


@pytest.mark.parametrize("resident_experts", [None, 3])
def test_routers_that_round(driver, tmp_path, resident_experts):
    torch.manual_seed(0)
    model = op_model(
        OpLayer(logits_dtype="tokens"),
        OpLayer(routing_weights_dtype="tokens", scoring="sigmoid"),
    )
    x = (torch.randn(3, 5, 16) * 16).round().half() / 16
    nodes = check(driver, tmp_path, model.half(), x, resident_experts=resident_experts)
    roundings = [
        (node.attributes["logits_dtype"], node.attributes["routing_weights_dtype"])
        for node in nodes
    ]
    assert roundings == [("tokens", "float32"), ("float32", "tokens")]


@pytest.mark.parametrize(
    ("dtype", "first"), [(torch.float32, 0), (torch.float16, 1), (torch.float16, 2)]
)
def test_weights_that_lie_as_in_out(driver, tmp_path, dtype, first):
    """Each layout with each gating."""
    torch.manual_seed(0)
    layouts = (("w1",), ("w2",), ("w1", "w2"))
    gatings: tuple[dict[str, bool], ...] = (
        {},
        {"gated": True},
        {"gated": True, "interleaved": True},
    )
    layers = [
        InOut(*names, activation="silu", **gatings[(first + at) % 3])
        for at, names in enumerate(layouts)
    ]
    model = op_model(*layers).to(dtype)
    # A few tokens, and so many that the grouped products run.
    examples = (torch.randn(*shape, 16, dtype=dtype) for shape in ((2, 1), (3, 40)))
    nodes = check(driver, tmp_path, model, *examples, link=True)
    for node, names in zip(nodes, layouts, strict=True):
        given = {name for name in ("w1", "w2") if node.attributes.get(f"{name}_transposed")}
        assert given == set(names)


@pytest.mark.parametrize("resident_experts", [2, 5])
def test_offloaded_experts(driver, tmp_path, resident_experts):
    torch.manual_seed(0)
    layers = (OpLayer(), OwnRouter(activation="silu", gated=True))
    few, more = torch.randn(1, 16), torch.randn(9, 16)
    options = {"resident_experts": resident_experts}
    nodes = check(driver, tmp_path, op_model(*layers), few, more, **options)
    for node in nodes:
        assert node.attributes["resident_experts"] == resident_experts
        # The weights come from the file that it names.
        assert [1] in [list(each.shape) for each in node.inputs if each is not None]
