"""Offloaded layers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from custom_ops.weight_source import FOUND

if TYPE_CHECKING:
    from dynamo_moe.files.offloading import OffloadedLayer, OffloadReport


def report_view(report: OffloadReport) -> RenderableType:
    """Returns tables of the layers and their files, and the notes."""
    parts = [Text(f"Offloaded {report.path}", style="bold"), layers_view(report.layers)]
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*parts)


def layers_view(layers: Sequence[OffloadedLayer]) -> RenderableType:
    """Returns the memory of offloaded layers, and the files of their weights."""
    from dynamo_moe.files.offloading import memory_of

    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("Offloaded layer", overflow="fold")
    for heading in ("Slots", "Each", "On the GPU", "All experts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(
            Text(layer.name, style="orange1"),
            f"{layer.resident_experts} of {layer.experts}",
            *map(decimal, (layer.expert_bytes, layer.slot_bytes, layer.weight_bytes)),
        )
    memory = memory_of(layers)
    total = (
        f"Experts' weights: {decimal(memory['slot_bytes'])} on the GPU instead of "
        f"{decimal(memory['weight_bytes'])}; {decimal(memory['host_bytes'])} on the host, pinned"
    )
    files = {source.path: source for layer in layers for source in layer.sources}
    states = [(str(source.locate()), source.state()) for source in files.values()]
    return Group(
        table,
        total,
        *(
            Text.assemble(f"{path}: ", (state, "green" if state == FOUND else "red"))
            for path, state in states
        ),
    )
