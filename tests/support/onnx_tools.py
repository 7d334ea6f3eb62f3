"""Runs other tools on exported files and prints the results as JSON, without loading PyTorch.

Each tool processes each file in a forked process, because its result can crash ONNX Runtime.

Arguments: the files. Each takes float32 ``x [batch, tokens, 16]``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import onnxruntime
import onnxscript.optimizer
import onnxsim
import onnxslim
from onnx import helper
from onnxconverter_common import float16 as common_float16
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers import float16 as runtime_float16
from onnxruntime.transformers.optimizer import optimize_model

Tool = Callable[[Path, Path], None]

EXACT, HALF, INT8 = 1e-5, 2e-2, 0.15
WIDTH = 16


class Batches(CalibrationDataReader):
    def __init__(self) -> None:
        self._left: Iterator[np.ndarray] = iter([tokens(seed, 16) for seed in range(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self._left, None)
        return None if batch is None else {"x": batch}


def tokens(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, number, WIDTH)).astype(np.float32)


def on_models(convert: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Tool:
    return lambda source, result: onnx.save(convert(onnx.load(source)), result)


def behind_another(model: onnx.ModelProto) -> onnx.ModelProto:
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", "tokens", WIDTH])
        for name in ("before", "after")
    ]
    node = helper.make_node("Identity", ["before"], ["after"])
    graph = helper.make_graph([node], "first", values[:1], values[1:])
    imports = [entry for entry in model.opset_import if not entry.domain]
    first = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    return onnx.compose.merge_models(first, model, [("after", "x")])


def optimized_offline(source: Path, result: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(result)
    options.log_severity_level = 3  # It warns that the file is only for this machine.
    onnxruntime.InferenceSession(source, options)


def transformers_optimizer(source: Path, result: Path, **options: int) -> None:
    optimize_model(str(source), **options).save_model_to_file(str(result))


# By the name in docs/how-to/choose_a_target.md: how to run the tool, and the allowed error.
TOOLS: dict[str, tuple[Tool, float]] = {
    "onnxsim": (on_models(lambda model: onnxsim.simplify(model)[0]), EXACT),
    "onnxslim": (on_models(onnxslim.slim), EXACT),
    "onnxscript.optimizer": (on_models(onnxscript.optimizer.optimize), EXACT),
    "onnx.compose": (on_models(behind_another), EXACT),
    "onnx.shape_inference": (
        on_models(lambda model: onnx.shape_inference.infer_shapes(model, True, True, True)),
        EXACT,
    ),
    "onnx.version_converter": (
        on_models(lambda model: onnx.version_converter.convert_version(model, 21)),
        EXACT,
    ),
    "onnx.inliner": (on_models(onnx.inliner.inline_local_functions), EXACT),
    "optimized_model_filepath": (optimized_offline, EXACT),
    "transformers.optimizer": (transformers_optimizer, EXACT),
    "transformers.optimizer, opt_level=0": (
        lambda source, result: transformers_optimizer(source, result, opt_level=0),
        EXACT,
    ),
    "onnxconverter_common.float16": (on_models(common_float16.convert_float_to_float16), HALF),
    "transformers.float16": (on_models(runtime_float16.convert_float_to_float16), HALF),
    "quant_pre_process": (quant_pre_process, EXACT),
    "quant_pre_process, auto_merge, skip_optimization": (
        lambda source, result: quant_pre_process(
            source, result, auto_merge=True, skip_optimization=True
        ),
        EXACT,
    ),
    "quantize_static": (
        lambda source, result: quantize_static(source, result, Batches(), reduce_range=True),
        INT8,
    ),
    "quantize_dynamic": (
        lambda source, result: quantize_dynamic(source, result, reduce_range=True),
        INT8,
    ),
}


def run(path: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    (value,) = session.get_inputs()
    x = tokens(99, 50)
    x = x.astype(np.float16) if value.type == "tensor(float16)" else x
    return session.run(None, {value.name: x})[0].astype(np.float32)


def layers(path: Path) -> int:
    return sum(node.domain.startswith("moe") for node in onnx.load(path).graph.node)


def outcome(tool: Tool, bound: float, source: Path, result: Path) -> str:
    """Returns ``the same``, ``inlined`` if MoE nodes are gone, or what went wrong."""
    tool(source, result)
    expected, actual = run(source), run(result)
    error, scale = (np.linalg.norm(rows, axis=-1) for rows in (actual - expected, expected))
    # The median over the tokens: rounding can change the routing of a few.
    typical = float(np.median(error / scale))
    if not typical <= bound:
        return f"wrong: {typical:.0%} off"
    return "the same" if layers(result) == layers(source) else "inlined"


def forked(tool: Tool, bound: float, source: Path, result: Path) -> str:
    """The outcome, computed in a process that may crash."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            text = outcome(tool, bound, source, result)
        except Exception as error:
            text = f"fails: {' '.join(str(error).split())[-200:] or type(error).__name__}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text if not status else f"fails: {signal.Signals(os.WTERMSIG(status)).name}"


def main(files: list[str]) -> None:
    logging.disable()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)  # Some tools leave files in the working folder.
        found = {
            name: {
                Path(file).stem: forked(tool, bound, Path(file), Path(folder) / "result.onnx")
                for file in files
            }
            for name, (tool, bound) in TOOLS.items()
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
