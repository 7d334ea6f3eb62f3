"""``dynamo-moe export --hf``: from the folder of a checkpoint to an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynamo_moe.cli.common import step
from dynamo_moe.cli.model_loading import UsageError
from dynamo_moe.progress.display import shown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dynamo_moe.exporting import ExportReport
    from dynamo_moe.verification import VerificationReport

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """What is to be exported.

    Attributes:
        folder: Of the checkpoint.
        task: What the file does.
        dtype: Of all weights; None: the checkpoint's.
        conversion: Options of ``convert``.
    """

    folder: Path
    task: Any
    dtype: torch.dtype | None
    conversion: dict[str, Any]

    def open(self, console: Console) -> PreTrainedModel:
        """Returns the checkpoint's model, whose weights stay in their files."""
        if not self.folder.is_dir():
            raise UsageError(f"--hf takes a checkpoint's folder; there is no folder {self.folder}")
        import dynamo_moe

        with step(console, f"Opening {self.folder}"):
            return dynamo_moe.open_checkpoint(self.folder, dtype=self.dtype)

    def export(
        self, console: Console, model: PreTrainedModel, out: Path, options: dict[str, Any]
    ) -> ExportReport:
        """Streams the opened model into an ONNX file."""
        import dynamo_moe

        with (
            step(console, f"Exporting for {self.task}", status=False),
            shown(out.name, console) as progress,
        ):
            return dynamo_moe.export_language_model(
                model, out, task=self.task, progress=progress, **options
            )

    def verify(self, console: Console, out: Path) -> VerificationReport:
        """Compares the file with the checkpoint's model, loaded whole."""
        import dynamo_moe
        from dynamo_moe.weights.checkpoints import load_checkpoint

        with step(console, "Verifying in ONNX Runtime"):
            model = load_checkpoint(self.folder, dtype=self.dtype)
            dynamo_moe.convert(model, **self.conversion)
            try:
                return dynamo_moe.verify(out, model, isolated=True)
            except dynamo_moe.VerificationError as error:
                return error.report
