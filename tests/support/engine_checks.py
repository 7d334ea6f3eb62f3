"""Engines of exported files, built for two architectures and compared with what the files say."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import pytest

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.layer import Layer
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import moe_nodes
from tensorrt_builds import Build, Shape, build
from trt_plugin.bundle import Bundle, Program
from trt_plugin.native import library_path

#: What engines are built for.
TARGETS = ("sm_89", "sm_120")
# Smallest, usual and largest value of every symbolic size.
_SIZES = (1, 4, 8)
_DTYPES = {
    ir.DataType.FLOAT: "FLOAT",
    ir.DataType.FLOAT16: "HALF",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT64: "INT64",
    ir.DataType.INT32: "INT32",
    ir.DataType.BOOL: "BOOL",
}


def programs_of(layer: Layer, architectures: Sequence[str] = TARGETS) -> list[Program]:
    """Returns a layer's programs, whose kernels have no code; skips the test without Triton."""
    pytest.importorskip("triton")
    from custom_ops.kernels.plan import plan
    from interpreted_gpu import uncompiled_program

    return [uncompiled_program(plan(layer, architecture(name))) for name in architectures]


def checked_engine(
    path: Path,
    *,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None,
    timeout: float | None = None,
) -> Build:
    """Builds an engine of a file, and checks what can be known of it without a GPU.

    The network has the file's inputs and outputs, and one plugin for each MoE node, with its name
    and dtypes; the profile has the sizes that were asked for; the engine holds the programs of each
    layer, byte for byte. If there is no engine, the caller judges the reason.

    Args:
        path: The file, of any target.
        shapes: Smallest, usual and largest shape of inputs that do not take every size from 1 to 8.
        timeout: Most seconds; None: those that pytest has for a test.
    """
    model = ir.from_proto(load_graph(path))
    nodes = moe_nodes(model)
    layers = Counter(kernel_layers(path))
    programs = {layer: programs_of(layer) for layer in layers}
    with tempfile.TemporaryDirectory() as folder:
        engine, kernels = Path(folder) / "model.engine", Path(folder) / "model.moek"
        if nodes:
            Bundle(tuple(program for each in programs.values() for program in each)).save(kernels)
        result = build(
            path,
            *(name.replace("sm_", "SM") for name in TARGETS),
            shapes=shapes,
            sizes=_SIZES,
            engine=engine,
            library=library_path() if nodes else None,
            variables={"DYNAMO_MOE_KERNELS": str(kernels)} if nodes else {},
            timeout=timeout,
        )
        if not result.built:
            return result
        data = engine.read_bytes()
    assert _described(model.graph.inputs) == result.inputs
    assert _described(model.graph.outputs) == result.outputs
    assert [each[:3] for each in result.plugins] == [
        (node.name, node.op_type, tuple(_dtype(each) for each in (*node.inputs, *node.outputs)))
        for node in nodes
    ]
    symbolic = {name: shape for name, (_, shape) in (result.inputs or {}).items() if -1 in shape}
    asked = {
        name: [[size if known < 0 else known for known in shape] for size in _SIZES]
        for name, shape in symbolic.items()
    } | {name: [list(shape) for shape in given] for name, given in (shapes or {}).items()}
    assert list(result.profiles) == ([asked] if asked else [])
    for layer, count in layers.items():
        # TensorRT for RTX writes a layer's field twice.
        assert [data.count(each.data) for each in programs[layer]] == [2 * count] * len(TARGETS)
    return result


def _described(values: Sequence[ir.Value]) -> dict[str, list[object]]:
    return {
        str(value.name): [
            _dtype(value),
            [size if isinstance(size, int) else -1 for size in value.shape or ()],
        ]
        for value in values
    }


def _dtype(value: ir.Value | None) -> str:
    assert value is not None
    assert value.dtype is not None
    return _DTYPES[value.dtype]
