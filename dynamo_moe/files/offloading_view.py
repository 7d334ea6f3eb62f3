"""Offloaded layers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from custom_ops.offload.weight_source import FOUND


def report_view(report: dict[str, Any]) -> RenderableType:
    """Returns tables of ``OffloadReport.to_dict()``."""
    return Group(
        Text(f"Offloaded {report['path']}", style="bold"),
        layers_view(report["layers"], report["memory"]),
        *(Text(f"note: {note}", style="yellow") for note in report["notes"]),
    )


def layers_view(layers: Sequence[dict[str, Any]], memory: Mapping[str, int]) -> RenderableType:
    """Returns a table of ``OffloadedLayer.to_dict()`` of layers, and the files of their weights."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("Offloaded layer", overflow="fold")
    for heading in ("Slots", "Each", "On the GPU", "All experts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(
            Text(layer["name"], style="orange1"),
            f"{layer['resident_experts']} of {layer['experts']}",
            *(decimal(layer[name]) for name in ("expert_bytes", "device_bytes", "weight_bytes")),
        )
    total = (
        f"Experts' weights: {decimal(memory['device_bytes'])} on the GPU instead of "
        f"{decimal(memory['weight_bytes'])}; {decimal(memory['host_bytes'])} on the host, pinned"
    )
    sources = (source for layer in layers for source in layer["tensors"].values())
    files = {source["path"]: source["state"] for source in sources}
    states = (
        Text.assemble(f"{path}: ", (state, "green" if state == FOUND else "red"))
        for path, state in files.items()
    )
    return Group(table, total, *states)
