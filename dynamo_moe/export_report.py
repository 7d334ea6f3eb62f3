"""The report on an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from dynamo_moe.json_values import json_values


@dataclass(frozen=True)
class ExportReport:
    """The outcome of :func:`export`.

    Attributes:
        path: The ONNX file; of files for several ranks, that of rank 0.
        files: All files written, the ONNX file first.
        target: ``plugin``, ``dense``, ``onnxruntime`` or ``tensorrt_moe``.
        body: ``loop`` or ``unrolled``; None with other targets than ``plugin``.
        layers: The MoE layers' paths in the model.
        operators: Number of layers by operator: ``DroplessMoE``, which holds the layer's router,
            or ``DroplessMoEExperts``, behind a router of the model's own; with packed weights
            ``DroplessMoEPacked`` and ``DroplessMoEExpertsPacked``.
        nodes: Number of the main graph's nodes by operator.
        parameters_bytes: Bytes of the weights.
        file_bytes: Bytes of all files.
        seconds: Wall time.
        phases: Seconds by phase: capture, decomposition, translation, optimization, check,
            serialization.
        profile: With ``profile=True``, a profile for https://www.speedscope.app, and one for a
            browser.
        blocks: Of blocks that repeat, how many were traced, or why each of them was.
        notes: What a user of the file should know.
        ranks: For how many devices there is a file each; None: there is one for all.
    """

    path: Path
    files: tuple[Path, ...]
    target: str
    body: str | None
    layers: tuple[str, ...]
    operators: Mapping[str, int]
    nodes: Mapping[str, int]
    parameters_bytes: int
    file_bytes: int
    seconds: float
    phases: Mapping[str, float]
    profile: tuple[Path, ...]
    blocks: tuple[str, ...]
    notes: tuple[str, ...]
    ranks: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return json_values(self)

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        title = f"Exported {escape(str(self.path))}"
        table = Table(show_header=False, title=title, title_justify="left")
        unrolled = ", body unrolled" if self.body == "unrolled" else ""
        table.add_row("target", f"{self.target}{unrolled}")
        if self.ranks is not None:
            table.add_row("ranks", f"{self.ranks}, a file each")
        counts = (f"{count} {operator}" for operator, count in self.operators.items())
        table.add_row("MoE layers", ", ".join(counts) or "0")
        table.add_row("nodes", str(sum(self.nodes.values())))
        for line in self.blocks:
            table.add_row("blocks", escape(line))
        table.add_row("weights", decimal(self.parameters_bytes))
        table.add_row("files", f"{decimal(self.file_bytes)} in {len(self.files)}")
        table.add_row("time", f"{self.seconds:.1f} s")
        if self.profile:
            for name, seconds in self.phases.items():
                table.add_row(f"  {name}", f"{seconds:.2f} s, {100 * seconds / self.seconds:.0f} %")
            for file in self.profile:
                table.add_row("profile", escape(str(file)))
        for note in self.notes:
            table.add_row("note", escape(note))
        return table
