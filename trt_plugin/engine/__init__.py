"""Engines: built from ONNX files, looked into, run on torch tensors, and compared in speed.

TensorRT and TensorRT for RTX both will do. The tests build engines with TensorRT for RTX, which
needs no GPU for that. No engine has run on a GPU yet.
"""

from trt_plugin.engine.benchmark import BenchmarkReport, Timing, bench_engines
from trt_plugin.engine.building import EngineReport, PluginLayer, TensorInfo, build_engine
from trt_plugin.engine.engine_file import EngineContents, StoredProgram, is_engine, read_engine
from trt_plugin.engine.installed import BUILDERS, EngineError, Installed, installed_tensorrt
from trt_plugin.engine.model_repository import write_triton_model
from trt_plugin.engine.running import Runner
from trt_plugin.engine.shapes import Profile, check_shapes, join_profiles, parse_shapes

__all__ = [
    # Building
    "build_engine",
    "EngineReport",
    "PluginLayer",
    "TensorInfo",
    "EngineError",
    "installed_tensorrt",
    "Installed",
    "BUILDERS",
    # Shapes
    "Profile",
    "parse_shapes",
    "join_profiles",
    "check_shapes",
    # Looking into them
    "read_engine",
    "is_engine",
    "EngineContents",
    "StoredProgram",
    # Running
    "Runner",
    "bench_engines",
    "BenchmarkReport",
    "Timing",
    # Serving
    "write_triton_model",
]
