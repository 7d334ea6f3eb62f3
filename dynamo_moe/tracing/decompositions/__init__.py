"""Decompositions of operators that PyTorch's exporter has no translation for, or a wrong one.

They are written in operators that it translates rightly (seen with torch 2.13, onnxscript 0.7.2 and
ONNX Runtime 1.31: PyTorch's own samples of each). Sizes may be symbolic, so none depends on one.
"""

from __future__ import annotations

from dynamo_moe.tracing.decompositions import (  # noqa: F401  Importing fills the table.
    elements,
    fourier,
    indexing,
    layers,
    losses,
    orders,
    reductions,
    special,
)
from dynamo_moe.tracing.decompositions.composites import COMPOSITES
from dynamo_moe.tracing.decompositions.pictures import adaptive_windows
from dynamo_moe.tracing.decompositions.table import DECOMPOSITIONS, decomposes

__all__ = ["COMPOSITES", "DECOMPOSITIONS", "adaptive_windows", "decomposes"]
