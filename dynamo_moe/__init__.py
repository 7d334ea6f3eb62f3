"""PyTorch models with Mixture-of-Experts layers, taken to ONNX and TensorRT.

Four calls do it: :func:`convert` a model's MoE layers to ``torch.ops.moe``, :func:`export` it,
:func:`verify` the file in ONNX Runtime, :func:`inspect` what is in it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import custom_ops
from dynamo_moe.process_state import collector_paused

if not hasattr(custom_ops, "dropless"):
    raise ImportError(
        f"dynamo_moe needs its own package custom_ops, but another one comes first on the path: "
        f"{custom_ops.__file__ or list(custom_ops.__path__)}. Uninstall or rename that one."
    )

if TYPE_CHECKING:
    from dynamo_moe.conversion import ConversionReport, convert
    from dynamo_moe.conversion.infmoe import load_infmoe
    from dynamo_moe.conversion.upcycling import UpcyclingReport, upcycle
    from dynamo_moe.drawing.picture import draw, draw_comparison
    from dynamo_moe.export_report import ExportReport
    from dynamo_moe.exporting import export
    from dynamo_moe.files.offload_report import OffloadReport
    from dynamo_moe.files.offloading import offload_file
    from dynamo_moe.generation import generate
    from dynamo_moe.inspection import ModelSummary, inspect
    from dynamo_moe.language_models import export_language_model
    from dynamo_moe.model_graph import ExportError
    from dynamo_moe.moe_nodes.translation import onnx_translation_table
    from dynamo_moe.offloading import offload
    from dynamo_moe.operators.functions import FunctionOp, op_from_function
    from dynamo_moe.operators.registration import register_op
    from dynamo_moe.quantization import QuantizationReport, quantize
    from dynamo_moe.sessions import session
    from dynamo_moe.sharding import ShardReport, shard, sharded
    from dynamo_moe.tolerances import Tolerance
    from dynamo_moe.training import TrainingReport, export_training
    from dynamo_moe.verification import VerificationError, VerificationReport, verify
    from dynamo_moe.weights.checkpoints import open_checkpoint, open_tensors
    from dynamo_moe.weights.reading import read_weights

__all__ = [
    # Converting
    "convert",
    "ConversionReport",
    # Upcycling
    "upcycle",
    "UpcyclingReport",
    # Packed experts
    "quantize",
    "QuantizationReport",
    # Experts in host memory
    "offload",
    # Experts over ranks
    "shard",
    "sharded",
    "ShardReport",
    # Opening checkpoints
    "open_checkpoint",
    "open_tensors",
    "read_weights",
    "load_infmoe",
    # Exporting
    "export",
    "export_language_model",
    "ExportError",
    "ExportReport",
    "onnx_translation_table",
    # Generating
    "generate",
    # Running in ONNX Runtime with the native library
    "session",
    # Training
    "export_training",
    "TrainingReport",
    # Operators of your own
    "register_op",
    "op_from_function",
    "FunctionOp",
    # Offloading experts
    "offload_file",
    "OffloadReport",
    # Verifying
    "verify",
    "Tolerance",
    "VerificationError",
    "VerificationReport",
    # Looking
    "draw",
    "draw_comparison",
    "inspect",
    "ModelSummary",
]

__version__ = "0.1.0"

# Loaded at first use: onnx and onnxscript take as long to import as torch.
_HOME = {
    "convert": "conversion",
    "ConversionReport": "conversion",
    "upcycle": "conversion.upcycling",
    "UpcyclingReport": "conversion.upcycling",
    "quantize": "quantization",
    "QuantizationReport": "quantization",
    "offload": "offloading",
    "shard": "sharding",
    "sharded": "sharding",
    "ShardReport": "sharding",
    "open_checkpoint": "weights.checkpoints",
    "open_tensors": "weights.checkpoints",
    "read_weights": "weights.reading",
    "load_infmoe": "conversion.infmoe",
    "export": "exporting",
    "export_language_model": "language_models",
    "ExportError": "model_graph",
    "ExportReport": "export_report",
    "onnx_translation_table": "moe_nodes.translation",
    "generate": "generation",
    "session": "sessions",
    "export_training": "training",
    "TrainingReport": "training",
    "register_op": "operators.registration",
    "op_from_function": "operators.functions",
    "FunctionOp": "operators.functions",
    "offload_file": "files.offloading",
    "OffloadReport": "files.offload_report",
    "verify": "verification",
    "Tolerance": "tolerances",
    "VerificationError": "verification",
    "VerificationReport": "verification",
    "draw": "drawing",
    "draw_comparison": "drawing",
    "inspect": "inspection",
    "ModelSummary": "inspection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector_paused():
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
