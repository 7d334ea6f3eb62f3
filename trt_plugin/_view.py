"""A bundle as tables for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trt_plugin.bundle import Bundle, LayerRecord, Program

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["bundle_view"]

# Of tokens, as good as no limit.
_ANY_NUMBER = 2**24
# Flags of what happens around an expert.
_AROUND = ("rms_norm", "residual")


def bundle_view(bundle: Bundle) -> RenderableType:
    """A table of kernels for each program."""
    programs = len(bundle.programs)
    kernels = sum(len(program.kernels) for program in bundle.programs)
    head = Text.assemble(
        (f"{programs} program{'s' * (programs > 1)}, {kernels} kernels", "bold"),
        f"  {_bytes(len(bundle.data))}",
    )
    parts: list[RenderableType] = [head]
    for program in bundle.programs:
        title = Text.assemble(
            (f"sm_{program.architecture}", "bold"),
            f"  {_layer(program.layer)}  ",
            (_bytes(len(program.data)), "dim"),
        )
        parts += ["", title, _kernels(program)]
    return Group(*parts)


def _kernels(program: Program) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    table.add_column("Kernel", overflow="fold")
    for heading in ("Tokens", "Warps", "Registers", "Shared", "Local", "Image"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, kernel in enumerate(program.kernels):
        local = Text(_bytes(kernel.local_memory), style="yellow" if kernel.local_memory else "dim")
        table.add_row(
            Text(kernel.name, style="cyan"),
            _tokens(program, index),
            str(kernel.num_warps),
            str(kernel.registers),
            _bytes(kernel.shared_memory),
            local,
            _bytes(len(kernel.image)),
        )
    return table


def _layer(layer: LayerRecord) -> str:
    told = layer.to_dict()
    gated = "gated " if told["gated"] else ""
    around = "".join(f", {name.replace('_', ' ')}" for name in _AROUND if told[name])
    dtypes = dict.fromkeys(str(told[name]) for name in ("tokens_dtype", "experts_dtype"))
    return (
        f"{told['operator']}, {layer.top_k} of {layer.experts} experts, "
        f"{layer.width} x {layer.hidden}, {gated}{told['activation']}{around}, "
        f"{' and '.join(dtypes)}"
    )


def _tokens(program: Program, kernel: int) -> str:
    """The numbers of tokens that a kernel runs for: ``1-16, 65-``."""
    spans = []
    uses = ((any(launch.kernel == kernel for launch in r.launches), r) for r in program.ranges)
    for used, group in groupby(uses, key=lambda use: use[0]):
        ranges = [each for _, each in group]
        if used:
            last = ranges[-1].last
            spans.append(f"{ranges[0].first}-{last if last < _ANY_NUMBER else ''}")
    return ", ".join(spans)


def _bytes(count: int) -> str:
    """Three digits or so: ``96 B``, ``15.2 KiB``.

    >>> _bytes(96), _bytes(15_600), _bytes(3 * 1024**2)
    ('96 B', '15.2 KiB', '3 MiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"
