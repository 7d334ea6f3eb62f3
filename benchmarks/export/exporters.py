"""The ways from a model to an ONNX file: ours and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.export.cases import DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS

#: Names of the symbolic dimensions by input; None where all dimensions are static.
Dynamic = Mapping[str, Mapping[int, str]] | None
Inputs = dict[str, Any]


def _by_ours(model: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path) -> None:
    import dynamo_moe

    dynamo_moe.convert(model)
    dynamo_moe.export(module, (), path, kwargs=inputs, dynamic_shapes=dynamic, external_data=True)


def _by_dynamo(
    model: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path, **options: Any
) -> None:
    import torch

    del model
    torch.onnx.export(
        module,
        (),
        path,
        kwargs=inputs,
        dynamo=True,
        verbose=False,
        dynamic_shapes=_symbolic(dynamic),
        **options,
    )


def _by_one_node(model: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path) -> None:
    import dynamo_moe

    table = dynamo_moe.onnx_translation_table()
    _by_dynamo(model, module, inputs, dynamic, path, custom_translation_table=table)


def _by_torchscript(model: Any, module: Any, inputs: Inputs, dynamic: Dynamic, path: Path) -> None:
    import torch

    del model
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        path,
        dynamo=False,
        input_names=list(inputs),
        output_names=["logits"],
        dynamic_axes=dynamic and {**dynamic, "logits": list(dynamic.values())[-1]},
    )


def by_transformers(
    model: Any, inputs: Inputs, dynamic: Dynamic, path: Path, **options: Any
) -> None:
    """Exports by transformers' ``OnnxExporter``, with options of its ``OnnxConfig``."""
    from transformers.exporters import exporter_onnx

    theirs: Any = exporter_onnx  # The module has no annotations.
    config = theirs.OnnxConfig(dynamic_shapes=_symbolic(dynamic), **options)
    theirs.OnnxExporter().export(model, inputs, config=config).save_pretrained(path.parent)


EXPORTERS: Mapping[str, Callable[[Any, Any, Inputs, Dynamic, Path], None]] = {
    OURS: _by_ours,
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
