"""Replacing a model's MoE modules by modules on ``torch.ops.moe``.

``registry`` holds the adapters, one file each; ``convert_model`` walks the model and reports.
"""

from dynamo_moe.conversion import llama4, switch  # noqa: F401  Importing registers them.
from dynamo_moe.conversion.convert_model import (
    ADAPTER_PAGE,
    ConversionReport,
    Replacement,
    Unrecognised,
    convert,
    convertible_modules,
)
from dynamo_moe.conversion.registry import Adapter, adapters, register_adapter
from dynamo_moe.modules import ConvertedModule

__all__ = [
    # Converting
    "ADAPTER_PAGE",
    "ConversionReport",
    "Replacement",
    "Unrecognised",
    "convert",
    "convertible_modules",
    # Extending
    "Adapter",
    "ConvertedModule",
    "adapters",
    "register_adapter",
]
