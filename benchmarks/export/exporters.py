"""The ways from a model to an ONNX file: ours and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.export.cases import DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS

#: Names of the symbolic dimensions by input; None where all dimensions are static.
Dynamic = Mapping[str, Mapping[int, str]] | None
Inputs = dict[str, Any]


def by_ours(
    model: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path, **options: Any
) -> Any:
    """Exports by ``dynamo_moe``, with options of its export; returns the report."""
    import dynamo_moe

    dynamo_moe.convert(model)
    return dynamo_moe.export(
        module, (), path, kwargs=inputs, dynamic_shapes=dynamic, external_data=True, **options
    )


def _by_dynamo(
    _: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path, **options: Any
) -> None:
    import torch

    options |= {"dynamo": True, "verbose": False, "dynamic_shapes": _symbolic(dynamic)}
    torch.onnx.export(module, (), path, kwargs=inputs, **options)


def _by_one_node(*arguments: Any) -> None:
    import dynamo_moe

    _by_dynamo(*arguments, custom_translation_table=dynamo_moe.onnx_translation_table())


def _by_torchscript(_: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path) -> None:
    import torch

    names: Any = {"input_names": list(inputs), "output_names": ["logits"]}
    axes = dynamic and {**dynamic, "logits": list(dynamic.values())[-1]}
    values = tuple(inputs.values())
    torch.onnx.export(module, values, path, dynamo=False, dynamic_axes=axes, **names)


def by_transformers(
    model: Any, inputs: Inputs, dynamic: Dynamic, path: Path, **options: Any
) -> None:
    """Exports by transformers' ``OnnxExporter``, with options of its ``OnnxConfig``."""
    from transformers.exporters import exporter_onnx

    theirs: Any = exporter_onnx  # The module has no annotations.
    config = theirs.OnnxConfig(dynamic_shapes=_symbolic(dynamic), **options)
    theirs.OnnxExporter().export(model, inputs, config=config).save_pretrained(path.parent)


#: Ours returns its report.
EXPORTERS: Mapping[str, Callable[[Any, Any, Inputs, Dynamic, Path], Any]] = {
    OURS: by_ours,
    DYNAMO: _by_dynamo,
    ONE_NODE: _by_one_node,
    TORCHSCRIPT: _by_torchscript,
    TRANSFORMERS: lambda model, _, *rest: by_transformers(model, *rest),
}


def _symbolic(dynamic: Dynamic) -> dict[str, Any] | None:
    from torch.export import Dim

    if dynamic is None:
        return None
    return {name: dict.fromkeys(dimensions, Dim.DYNAMIC) for name, dimensions in dynamic.items()}
