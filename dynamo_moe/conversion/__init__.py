"""Converting a model's MoE layers to ``torch.ops.moe``.

It begins in ``convert_model``, which converts in three ways, in this order:

- ``transformers_experts``: experts of transformers' models, through transformers' own interface;
- ``registry``: modules that a registered adapter recognises (``transformers_layers``, the user's);
- ``convert_layers``: layers of any other class. ``locate_layers`` finds them by shapes and names,
  ``identify_layer``, with ``layer_trial``, and ``identify_experts`` find what one computes, by
  numbers. The result is a ``layer_spec``, a record that can compute the layer; ``expert_weights``
  is its part for the experts. ``equal_layers`` tells which layers look like one before them.

All of them use ``observation`` to run modules in trials, ``comparison`` to compare the results and
``activation`` to recognise activations; ``reports`` says what became of each module, and
``unconverted`` what it means for an export. ``upcycling`` and ``infmoe`` make MoE layers of other
things: a dense model's MLPs, and the weight files of InfMoE.
"""

from dynamo_moe.conversion import transformers_layers  # noqa: F401  Importing registers them.
from dynamo_moe.conversion.convert_model import convert, convertible_modules
from dynamo_moe.conversion.registry import Adapter, adapters, register_adapter
from dynamo_moe.conversion.reports import (
    ADAPTER_PAGE,
    ConversionReport,
    Replacement,
    Unrecognised,
)
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
