"""Decompositions of operators that PyTorch's exporter has no translation for, or a wrong one.

They are written in operators that it translates rightly (seen with torch 2.13, onnxscript 0.7.2 and
ONNX Runtime 1.31: PyTorch's own samples of each). Sizes may be symbolic, so none depends on one.

Map: ``_registry`` the table, ``_elements``, ``_reductions``, ``_selections``, ``_padding``,
``_images`` and ``_layers`` what fills it.
"""

from dynamo_moe._operator_decompositions import (  # noqa: F401  Each fills the table.
    _elements,
    _images,
    _layers,
    _padding,
    _reductions,
    _selections,
)
from dynamo_moe._operator_decompositions._registry import DECOMPOSITIONS

__all__ = ["DECOMPOSITIONS"]
