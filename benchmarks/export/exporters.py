"""The ways from a model to an ONNX file: ours and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks._export_cases import DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS

Dynamic = Mapping[str, Mapping[int, str]] | None
"""Names of the symbolic dimensions by input; None: all are static."""


class Exportable(Protocol):
    """What the exporters are given.

    Attributes:
        model: The model.
        module: The same, from named inputs to one tensor.
    """

    model: Any
    module: Any


def _export_ours(subject: Exportable, inputs: dict[str, Any], dynamic: Dynamic, path: Path) -> None:
    import dynamo_moe

    dynamo_moe.convert(subject.model)
    dynamo_moe.export(
        subject.module, (), path, kwargs=inputs, dynamic_shapes=dynamic, external_data=True
    )


def _export_dynamo(
    subject: Exportable, inputs: dict[str, Any], dynamic: Dynamic, path: Path, **options: Any
) -> None:
    import torch

    torch.onnx.export(
        subject.module,
        (),
        path,
        kwargs=inputs,
        dynamo=True,
        verbose=False,
        dynamic_shapes=_symbolic(dynamic),
        **options,
    )


def _export_one_node(
    subject: Exportable, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    import dynamo_moe

    table = dynamo_moe.onnx_translation_table()
    _export_dynamo(subject, inputs, dynamic, path, custom_translation_table=table)


def _export_torchscript(
    subject: Exportable, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    import torch

    torch.onnx.export(
        subject.module,
        tuple(inputs.values()),
        path,
        dynamo=False,
        input_names=list(inputs),
        output_names=["logits"],
        dynamic_axes=dynamic and {**dynamic, "logits": dict(next(reversed(dynamic.values())))},
    )


def _export_transformers(
    subject: Exportable, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic_shapes=_symbolic(dynamic))
    OnnxExporter().export(subject.model, inputs, config=config).save_pretrained(path.parent)


EXPORTERS: Mapping[str, Callable[[Exportable, dict[str, Any], Dynamic, Path], None]] = {
    OURS: _export_ours,
    DYNAMO: _export_dynamo,
    ONE_NODE: _export_one_node,
    TORCHSCRIPT: _export_torchscript,
    TRANSFORMERS: _export_transformers,
}


def _symbolic(dynamic: Dynamic) -> dict[str, Any] | None:
    from torch.export import Dim

    if dynamic is None:
        return None
    return {name: dict.fromkeys(dimensions, Dim.DYNAMIC) for name, dimensions in dynamic.items()}
