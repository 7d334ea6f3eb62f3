"""Replacing a model's MoE modules by modules on ``torch.ops.moe``.

``_registry`` holds the adapters, one file each; ``_convert`` walks the model and reports.
"""

from dynamo_moe.conversion import (  # noqa: F401  They register their adapters.
    _llama4,
    _switch,
)
from dynamo_moe.conversion._convert import (
    ADAPTER_PAGE,
    ConversionReport,
    Replacement,
    Unrecognised,
    convert,
    convertible_modules,
)
from dynamo_moe.conversion._registry import Adapter, adapters, register_adapter
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
