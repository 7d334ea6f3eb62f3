"""The steps of ``dynamo-moe export`` and ``verify``, each shown while it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import dynamo_moe
from dynamo_moe.cli.common import step
from dynamo_moe.cli.model_loading import UsageError, load_model, parse_shapes
from dynamo_moe.cli.outcomes import Outcome
from dynamo_moe.conversion.packing import converted_layers
from dynamo_moe.progress.display import shown

if TYPE_CHECKING:
    from dynamo_moe.files.file_form import ExpertsForm, FileForm


def load(
    console: Console, model: str, shapes: Sequence[str] | None, *, needed: bool = False
) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Returns a factory's model and example; the example of the shapes, if there are some."""
    example = parse_shapes(shapes) if shapes else None
    with step(console, f"Loading {model}"):
        module, args = load_model(model)
    if needed and not (example or args is not None):
        raise UsageError(f"{model} gives no example inputs: pass --shape, or return (model, args)")
    return module.eval(), example or args


def convert(
    console: Console,
    module: nn.Module,
    args: tuple[Any, ...] | None,
    conversion: dict[str, Any],
    strict: bool,
    outcome: Outcome,
) -> None:
    """Converts a model. With ``strict``, modules that are not converted are an error."""
    from dynamo_moe.conversion import ADAPTER_PAGE, unconverted

    with step(console, "Converting"):
        report = dynamo_moe.convert(module, args or (), **conversion)
    outcome.conversion, outcome.unmerged = report, unconverted.merge_hint(module)
    if strict and report.unrecognised:
        number = len(report.unrecognised)
        raise ValueError(
            f"--strict: {number} of the model's MoE modules {'is' if number == 1 else 'are'} not "
            f"converted: {unconverted.listing(report.unrecognised)}; {ADAPTER_PAGE} "
            "says how to convert them"
        )


def quantize(
    console: Console, module: nn.Module, options: dict[str, Any]
) -> dynamo_moe.QuantizationReport | None:
    """Rounds weights as the options say; none: nothing is rounded."""
    if not options:
        return None
    experts, linear = options["weight_format"], options["linear"]
    if experts and not converted_layers(module):
        raise UsageError(
            "--quantize rounds the experts of MoE layers, and the model has none that were "
            "converted; --quantize-linear rounds its linear layers"
        )
    what = [*_rounded("experts", experts), *_rounded("linear layers", linear)]
    with step(console, f"Rounding {' and '.join(what)}"):
        return dynamo_moe.quantize(module, **options)


def _rounded(what: str, weight_format: str | None) -> list[str]:
    return [] if weight_format is None else [f"the {what} to {weight_format}"]


def open_checkpoint(console: Console, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Returns a checkpoint's model of transformers, whose weights stay in their files."""
    if not folder.is_dir():
        raise UsageError(f"--hf takes a checkpoint's folder; there is no folder {folder}")
    with step(console, f"Opening {folder}"):
        return dynamo_moe.open_checkpoint(folder, dtype=dtype)


def load_checkpoint(
    console: Console, folder: Path, dtype: torch.dtype | None, conversion: dict[str, Any]
) -> nn.Module:
    """Returns the same model with its weights in memory, converted."""
    from dynamo_moe.weights.checkpoints import load_checkpoint

    with step(console, f"Loading {folder}"):
        model = load_checkpoint(folder, dtype=dtype)
        dynamo_moe.convert(model, **conversion)
    return model


def load_as_in(
    form: FileForm, console: Console, folder: Path, dtype: torch.dtype | None
) -> nn.Module:
    """Returns a checkpoint's model with its weights in memory, in the form that a file has."""
    opened: Any = open_checkpoint(console, folder, None)
    if dtype is None and form.dtype != opened.dtype:
        dtype = form.dtype
    cast = form.experts and form.experts.dtype
    conversion = {"experts_dtype": None if cast == (dtype or opened.dtype) else cast}
    module = load_checkpoint(console, folder, dtype, conversion)
    # The checkpoint's own packed experts are in memory decoded.
    if form.experts and form.experts.weight_format and not _is_packed(opened):
        _round_experts(form.experts, console, module, None)
    _round_linear(form, console, module)
    return module


def _is_packed(opened: nn.Module) -> bool:
    """Whether the experts of a model whose weights stay in their files are packed."""
    from dynamo_moe.conversion.packing import converted_layers
    from dynamo_moe.packed_experts import of

    dynamo_moe.convert(opened)
    return all(of(layer) is not None for layer in converted_layers(opened).values())


def round_as_in(
    form: FileForm, console: Console, module: nn.Module, args: tuple[Any, ...] | None
) -> None:
    """Rounds a model's experts and linear layers where a file's are packed."""
    if form.experts and form.experts.weight_format:
        _round_experts(form.experts, console, module, args)
    _round_linear(form, console, module)


def _round_experts(
    experts: ExpertsForm, console: Console, module: nn.Module, args: tuple[Any, ...] | None
) -> None:
    with step(console, f"Rounding the experts to {experts.weight_format}"):
        dynamo_moe.convert(module, args or ())
        dynamo_moe.quantize(
            module, experts.weight_format, group=experts.group, zero_points=experts.zero_points
        )


def _round_linear(form: FileForm, console: Console, module: nn.Module) -> None:
    from dynamo_moe.quantization import round_linear

    for linear in form.linear:
        layers, name = linear.layers, linear.weight_format
        with step(console, f"Rounding {len(layers)} linear layers to {name}"):
            round_linear(module, layers, name, group=linear.group, zero_points=linear.zero_points)


def export(
    console: Console,
    module: Any,
    args: tuple[Any, ...] | None,
    out: Path,
    options: dict[str, Any],
) -> dynamo_moe.ExportReport:
    """Writes a file or folder."""
    task = options.get("task")
    doing = f"Exporting for {task or 'target ' + options['target']}"
    with step(console, doing, status=False), shown(out.name, console) as progress:
        if task:
            return dynamo_moe.export_language_model(module, out, progress=progress, **options)
        return dynamo_moe.export(module, args or (), out, progress=progress, **options)


def verify(
    console: Console,
    file: Path,
    module: nn.Module,
    inputs: Sequence[tuple[Any, ...]] | None,
    group: dist.ProcessGroup | None = None,
    *,
    library: bool = False,
) -> dynamo_moe.VerificationReport:
    """Compares a file with a model. The report says whether they agree."""
    with step(console, "Verifying in ONNX Runtime"):
        try:
            return dynamo_moe.verify(
                file, module, inputs, group=group, isolated=True, library=library
            )
        except dynamo_moe.VerificationError as error:
            return error.report


def check(report: dynamo_moe.VerificationReport) -> None:
    """Fails where a verification, already shown, did."""
    if not report.passed:
        raise dynamo_moe.VerificationError(report)


def need_onnxruntime() -> None:
    """Fails, before anything is done, where a file could not be verified."""
    if find_spec("onnxruntime") is None:
        raise ImportError("verifying needs ONNX Runtime: pip install 'dynamo-moe[onnxruntime]'")
