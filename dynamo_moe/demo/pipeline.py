"""The demo's steps: train, convert, export, verify, run on the test images, draw."""

from __future__ import annotations

import copy
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe import ConversionReport, ExportReport, VerificationError, VerificationReport
from dynamo_moe.demo.digits import Split, TrainingResult, load_digits_split, train
from dynamo_moe.demo.measure import (
    Classifier,
    ImageComparison,
    compare,
    in_onnxruntime,
    in_torch,
    time_all,
)
from dynamo_moe.evaluation import one_thread
from dynamo_moe.models import swin_moe_digits
from dynamo_moe.moe_nodes.targets.names import TargetName

MIN_ACCURACY = 0.95
PYTORCH = "PyTorch"

_BATCH_SIZES = (1, 7, 64, 360)
"""Batch sizes for the 360 test images: 7 leaves a last batch of 3, and 64 one of 40."""

_TIMED = {1: 100, 64: 20}
"""Batch size -> rounds. A round takes 1 ms to 2 ms per classifier at 1, 5 ms to 20 ms at 64."""


class DemoError(RuntimeError):
    """The demo cannot continue; the message is one line for its user."""


class Variant(NamedTuple):
    """One file to export: its name, the target, and the dtype of its experts."""

    file: str
    target: TargetName
    experts: torch.dtype


_VARIANTS = (
    Variant("plugin.onnx", "plugin", torch.float32),
    Variant("plugin_fp16.onnx", "plugin", torch.float16),
    Variant("dense.onnx", "dense", torch.float32),
    Variant("onnxruntime.onnx", "onnxruntime", torch.float32),
)


class _Converted(NamedTuple):
    """A converted model, the conversion's report, and the logits its files have to reproduce.

    With float32 experts these are the trained model's, which check the conversion too; with float16
    experts the converted model's.
    """

    model: nn.Module
    report: ConversionReport
    reference: Tensor


@dataclass(frozen=True)
class FileResult:
    """An exported file.

    Attributes:
        variant: The requested variant.
        exported: Report of the export.
        verified: Report on random inputs, against the converted model; it may have failed.
        compared: Comparison on the test images with :attr:`_Converted.reference`.
        compared_float32: The same with the trained float32 model, for information only.
        milliseconds: Batch size -> median time per image in ONNX Runtime.
    """

    variant: Variant
    exported: ExportReport
    verified: VerificationReport
    compared: ImageComparison
    compared_float32: ImageComparison
    milliseconds: dict[int, float]

    @property
    def nodes(self) -> int:
        """Nodes of the file's main graph."""
        return sum(self.exported.nodes.values())

    @property
    def failures(self) -> list[str]:
        """The file's faults, one line each."""
        path, compared = self.exported.path, self.compared
        failures = []
        if not self.verified.passed:
            failures.append(str(VerificationError(self.verified)))
        if compared.worst:
            failures.append(
                f"{path}: {compared.worst} of {compared.images} predictions differ from "
                f"PyTorch's, logits by up to {compared.max_logit_difference:.1e}"
            )
        if not math.isfinite(compared.max_logit_difference):
            failures.append(f"{path}: logits that are not numbers")
        return failures

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        return {
            "file": self.variant.file,
            "target": self.variant.target,
            "experts_dtype": str(self.variant.experts).removeprefix("torch."),
            "nodes": self.nodes,
            "operators": dict(self.exported.nodes),
            "bytes": self.exported.file_bytes,
            "notes": list(self.exported.notes),
            "verification": {**self.verified.to_dict(), "path": self.variant.file},
            "test_images": asdict(self.compared),
            "test_images_against_float32": asdict(self.compared_float32),
            "milliseconds_per_image": self.milliseconds,
            "failures": self.failures,
        }


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo.

    Attributes:
        folder: Folder with the files.
        epochs: Epochs of the training.
        seed: Seed of the split, the initial weights and the training.
        training: Result of the training; its accuracy is PyTorch's.
        conversion: Report of the conversion to float32 experts.
        files: The exported files.
        pictures: The pictures in the folder.
        milliseconds: Batch size -> median time per image of the converted model in PyTorch.
        seconds: Wall time of the whole demo.
    """

    folder: Path
    epochs: int
    seed: int
    training: TrainingResult
    conversion: ConversionReport
    files: tuple[FileResult, ...]
    pictures: tuple[Path, ...]
    milliseconds: dict[int, float]
    seconds: float

    @property
    def failures(self) -> list[str]:
        """The files' faults, one line each; empty if they are all right."""
        return [failure for file in self.files for failure in file.failures]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        packages = ("torch", "onnx", "onnxscript", "onnxruntime")
        return {
            "passed": not self.failures,
            "epochs": self.epochs,
            "seed": self.seed,
            "training": asdict(self.training),
            "conversion": self.conversion.to_dict(),
            "pytorch_milliseconds_per_image": self.milliseconds,
            "files": [file.to_dict() for file in self.files],
            "pictures": [path.name for path in self.pictures],
            "seconds": self.seconds,
            "python": platform.python_version(),
            "versions": {package: version(package) for package in packages},
        }


def run(
    folder: Path,
    *,
    epochs: int,
    seed: int = 0,
    min_accuracy: float = MIN_ACCURACY,
    console: Console | None = None,
) -> DemoResult:
    """Runs the whole demo. Creates the folder and replaces files from an earlier run.

    Args:
        folder: Destination of the ONNX files, the pictures and ``summary.json``.
        epochs: Epochs of the training; 40 reach 99 %. After 3 to 12, the two best logits of every
            image are at least 6e-4 apart, twice as much as a file changes them (5 seeds).
        seed: Seed of the split, the initial weights and the training.
        min_accuracy: Required accuracy on the test images in PyTorch, 0 to 1; below it, nothing is
            exported.
        console: Where to print reports and progress; None prints nothing.

    Returns:
        The result, even if a file failed: see :attr:`DemoResult.failures`.

    Raises:
        DemoError: The folder cannot be created, or the accuracy is below ``min_accuracy``.
    """
    started = time.perf_counter()
    out = console or Console(quiet=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot create the folder {folder}: {error.strerror}") from error
    split = load_digits_split(seed)
    model, training = _train(split, epochs, seed, min_accuracy, out)

    out.rule("Convert")
    float32 = _convert(model, torch.float32, split.test_images)
    float16 = _convert(model, torch.float16, split.test_images)
    out.print(float32.report)
    files, milliseconds = _export_and_check(folder, float32, float16, split, out)
    out.rule("Inspect")
    out.print(dynamo_moe.inspect(folder / "plugin.onnx"))
    with out.status("Drawing"):
        pictures = _draw(folder)

    result = DemoResult(
        folder=folder,
        epochs=epochs,
        seed=seed,
        training=training,
        conversion=float32.report,
        files=tuple(files),
        pictures=pictures,
        milliseconds=milliseconds,
        seconds=time.perf_counter() - started,
    )
    (folder / "summary.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    return result


def _train(
    split: Split, epochs: int, seed: int, min_accuracy: float, out: Console
) -> tuple[nn.Module, TrainingResult]:
    out.rule("Train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = swin_moe_digits()
    out.print(
        f"Swin-MoE with {sum(p.numel() for p in model.parameters()):,} parameters on "
        f"{len(split.train_images)} images of handwritten digits"
    )
    training = train(model, split, epochs=epochs, seed=seed, quiet=out.quiet)
    reached = (
        f"{training.test_accuracy:.1%} of {len(split.test_images)} test images are right "
        f"after {epochs} epochs"
    )
    if training.test_accuracy < min_accuracy:
        raise DemoError(f"{reached}, which is below {min_accuracy:.1%}: train for longer")
    out.print(f"{reached} ({training.seconds:.0f} s)")
    return model, training


def _convert(trained: nn.Module, experts: torch.dtype, images: Tensor) -> _Converted:
    model = copy.deepcopy(trained)
    if experts == torch.float32:
        return _Converted(model, dynamo_moe.convert(model), in_torch(trained)(images))
    report = dynamo_moe.convert(model, experts_dtype=experts)
    return _Converted(model, report, in_torch(model)(images))


def _export_and_check(
    folder: Path, float32: _Converted, float16: _Converted, split: Split, out: Console
) -> tuple[list[FileResult], dict[int, float]]:
    out.rule("Export, verify, run on the test images")
    classifiers: dict[str, Classifier] = {PYTORCH: in_torch(float32.model)}
    checked = []
    for variant in _VARIANTS:
        converted = float32 if variant.experts == torch.float32 else float16
        path = folder / variant.file
        with out.status(f"Exporting {path}"):
            exported = dynamo_moe.export(
                converted.model, split.test_images[:2], path, target=variant.target
            )
        out.print(exported)
        with out.status(f"Verifying {path}"):
            verified = _verify(path, converted.model)
        out.print(verified)
        with out.status(f"Running {path} on the test images"):
            classify = classifiers[variant.file] = in_onnxruntime(path)
            compared, compared_float32 = (
                compare(classify, reference, split.test_images, split.test_labels, _BATCH_SIZES)
                for reference in (converted.reference, float32.reference)
            )
        checked.append((variant, exported, verified, compared, compared_float32))
    with out.status("Timing"), one_thread():
        times = {
            size: time_all(classifiers, split.test_images, size, rounds)
            for size, rounds in _TIMED.items()
        }
    milliseconds = {
        name: {size: by_name[name] for size, by_name in times.items()} for name in classifiers
    }
    files = [FileResult(*result, milliseconds[result[0].file]) for result in checked]
    return files, milliseconds[PYTORCH]


def _verify(path: Path, model: nn.Module) -> VerificationReport:
    try:
        return dynamo_moe.verify(path, model)
    except VerificationError as error:
        return error.report


def _draw(folder: Path) -> tuple[Path, ...]:
    dense, plugin = folder / "dense.onnx", folder / "plugin.onnx"
    drawn = []
    for suffix in (".svg", ".png"):
        drawn += [
            dynamo_moe.draw(dense, folder / f"graph_dense{suffix}", title=dense.name),
            dynamo_moe.draw(plugin, folder / f"graph_plugin{suffix}", title=plugin.name),
            dynamo_moe.draw_comparison(
                [(dense.name, dense), (plugin.name, plugin)], folder / f"comparison{suffix}"
            ),
        ]
    return tuple(drawn)
