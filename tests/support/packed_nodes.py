"""Layers with packed weights as nodes: what a runtime reads of them from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

import dynamo_moe
from custom_ops.kernels.plan import plan
from custom_ops.packed_weights import WHOLE
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.moe_nodes.nodes import INPUTS, OPTIONAL_INPUTS
from interpreted_gpu import uncompiled_program
from packed_cases import PackedCase, PackedLayer, packed_case
from plugin_host import attributes_of
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle

NAMES = {"dropless": "DroplessMoEPacked", "experts": "DroplessMoEExpertsPacked"}
FORMS: dict[str, dict[str, Any]] = {
    "int4": {"group": 8},
    "int4 half scales": {"group": 32, "scales_dtype": torch.float16},
    "int4 zero points": {"group": 8, "zero_points": "groups"},
    "int4 zero point": {"group": 16, "zero_points": "experts"},
    "mxfp4": {},
    "fp8": {},
    "fp8 rows": {"scales_dtype": torch.bfloat16},
    "fp8 whole": {},
    "fp8 groups": {"scales_dtype": torch.bfloat16},
    "nvfp4": {},
    "int8": {"group": 16},
    "int8 rows": {"scales_dtype": torch.float16},
}


def small_case(form: str = "int4", op: str = "experts", **options: Any) -> PackedCase:
    name = form if form.startswith(("fp8", "int8")) else form.split(maxsplit=1)[0]
    sizes = {"width": 64, "hidden": 32}
    case = packed_case(op, name, shape=(5,), **sizes | FORMS[form] | options)
    if name == "int4" and case.packed["w1_zero_points"] is None and options.get("biases", True):
        # As the exporter writes nodes: what is absent ahead of others is filled.
        eights = torch.full((case.plain.arguments["w1"].shape[0], 1, 1), 8, dtype=torch.int8)
        case = case.changed(w1_zero_points=eights, w2_zero_points=eights)
    return case


def attributes(case: PackedCase, bundle: Path) -> dict[str, Any]:
    rows, columns = (0 if size == WHOLE else size for size in case.format().block)
    storage = {"weight_format": case.weight_format, "block_size": columns, "block_rows": rows}
    return attributes_of(case.plain) | storage | {"kernels": str(bundle)}


def inputs_of(case: PackedCase) -> list[Tensor]:
    """The node's inputs, as the exporter writes them."""
    given = case.arguments
    names = list(INPUTS[NAMES[case.plain.op]])
    while given[names[-1]] is None:
        names.pop()
    experts, rows, _ = given["w1"].shape
    width = given["w2"].shape[1]
    eights = torch.full((experts, 1, 1), 8, dtype=torch.int8)
    sizes = {"router_bias": (experts,), "b1": (experts, rows), "b2": (experts, width)}
    fills = {name: given["x"].new_zeros(size) for name, size in sizes.items()}
    fills |= dict.fromkeys(("w1_zero_points", "w2_zero_points"), eights)
    fills |= dict.fromkeys(("w1_global_scales", "w2_global_scales"), torch.ones(experts, 1, 1))
    assert fills.keys() | {"selection_bias"} == set(OPTIONAL_INPUTS)
    return [fills[name] if given[name] is None else given[name] for name in names]


def offloaded_node(driver, case: PackedCase, folder: Path, slots: int):
    """A file whose experts are in another: its node's attributes, with a bundle, and inputs."""
    path = folder / "model.onnx"
    x = case.arguments["x"]
    dynamo_moe.export(PackedLayer(case).eval(), (x,), path, input_names=["x"])
    report = dynamo_moe.offload_file(path, folder / "copy.onnx", resident_experts=slots)
    (layer,) = kernel_layers(report.path)
    gpu = StandinGpu(driver)
    planned = plan(layer, gpu.architecture)
    program = uncompiled_program(planned)
    gpu.interpreted.register(planned, program)
    for kernel in program.kernels:
        driver.add_image(kernel.image)
    (folder / "model.moek").write_bytes(Bundle((program,)).data)
    graph = onnx.load(report.path).graph
    (node,) = (each for each in graph.node if each.op_type in NAMES.values())
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    given = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in given.items()
        if name not in ("plugin_version", "plugin_namespace")
    }
    stored = {each.name: torch.tensor(numpy_helper.to_array(each)) for each in graph.initializer}
    inputs = [
        stored[name] if name in stored else case.arguments[role]
        for role, name in zip(INPUTS[node.op_type], node.input, strict=False)
    ]
    return given | {"kernels": str(folder / "model.moek")}, inputs
