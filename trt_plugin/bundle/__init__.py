"""Bundles of compiled kernels: their contents, reading and writing.

docs/reference/bundle.md describes the format. The native library reads and checks bundles; nothing
here needs PyTorch or Triton.
"""

from trt_plugin.bundle.launches import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    Range,
    TensorMap,
)
from trt_plugin.bundle.programs import Bundle, Program
from trt_plugin.bundle.reading import BundleError, is_bundle, read
from trt_plugin.bundle.records import PARAMETER_BYTES, SYMBOLS, TENSORS, LayerRecord

__all__ = [
    # Files
    "read",
    "is_bundle",
    "Bundle",
    "BundleError",
    # Contents
    "Program",
    "LayerRecord",
    "Range",
    "Buffer",
    "Launch",
    "Argument",
    "TensorMap",
    "Kernel",
    "Expression",
    # Names and sizes
    "PARAMETER_BYTES",
    "SYMBOLS",
    "TENSORS",
]
