"""Kernels compiled ahead of time, on machines with or without a GPU."""

from trt_plugin.compiling.ahead_of_time import compile, compile_plans, limit_tokens  # noqa: A004
from trt_plugin.compiling.packing import layer_record
from trt_plugin.compiling.specs import parse_spec
from trt_plugin.compiling.tasks import CompileError

__all__ = [
    "CompileError",
    "compile",
    "compile_plans",
    "layer_record",
    "limit_tokens",
    "parse_spec",
]
