"""``inspect``: the contents of an ONNX file, as values and as tables."""

from dynamo_moe.inspection.reading import inspect
from dynamo_moe.inspection.summary import (
    FunctionSummary,
    ModelSummary,
    MoELayer,
    ValueSummary,
    WeightsSummary,
)

__all__ = [
    "FunctionSummary",
    "ModelSummary",
    "MoELayer",
    "ValueSummary",
    "WeightsSummary",
    "inspect",
]
