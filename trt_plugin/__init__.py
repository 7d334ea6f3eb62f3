"""MoE layers on NVIDIA GPUs without Python: kernels compiled ahead of time, and a TensorRT plugin.

:func:`compile` makes a bundle of kernels, on any machine; :func:`read` reads one. :func:`load`
registers the plugin with TensorRT; :func:`build_engine`, :func:`bench_engines` and :class:`Runner`
use it. :func:`read_engine` looks into an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trt_plugin.bundle import Bundle, BundleError, is_bundle, read
    from trt_plugin.compiling import CompileError, compile, parse_spec  # noqa: A004
    from trt_plugin.engine import (
        BenchmarkReport,
        EngineContents,
        EngineError,
        EngineReport,
        Runner,
        bench_engines,
        build_engine,
        check_shapes,
        installed_tensorrt,
        is_engine,
        join_profiles,
        parse_shapes,
        read_engine,
        write_triton_model,
    )
    from trt_plugin.native import library_path
    from trt_plugin.plugin import PluginLoadError, load, sharing_kernels

__all__ = [
    # Compiling
    "compile",
    "CompileError",
    "parse_spec",
    # Bundles
    "read",
    "is_bundle",
    "Bundle",
    "BundleError",
    # TensorRT
    "library_path",
    "load",
    "PluginLoadError",
    "sharing_kernels",
    # Engines
    "installed_tensorrt",
    "build_engine",
    "EngineReport",
    "EngineError",
    "parse_shapes",
    "join_profiles",
    "check_shapes",
    "read_engine",
    "is_engine",
    "EngineContents",
    "Runner",
    "bench_engines",
    "BenchmarkReport",
    "write_triton_model",
]

# Imported at first use: a bundle is read without PyTorch and Triton.
_HOME = {
    "compile": "compiling",
    "CompileError": "compiling",
    "parse_spec": "compiling",
    "read": "bundle",
    "is_bundle": "bundle",
    "Bundle": "bundle",
    "BundleError": "bundle",
    "library_path": "native",
    "load": "plugin",
    "PluginLoadError": "plugin",
    "sharing_kernels": "plugin",
    "installed_tensorrt": "engine",
    "build_engine": "engine",
    "EngineReport": "engine",
    "EngineError": "engine",
    "parse_shapes": "engine",
    "join_profiles": "engine",
    "check_shapes": "engine",
    "read_engine": "engine",
    "is_engine": "engine",
    "EngineContents": "engine",
    "Runner": "engine",
    "bench_engines": "engine",
    "BenchmarkReport": "engine",
    "write_triton_model": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
