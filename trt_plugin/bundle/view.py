"""A bundle as tables for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

# So many tokens are as good as no limit.
_ANY_NUMBER = 2**24
# Flags that are named where they are set.
_FLAGS = (
    *("rms_norm", "residual", "w1_transposed", "w2_transposed"),
    *("rounded_logits", "rounded_weights"),
)


# The numbers that bytes of scales stand for.
_SCALES = {"mxfp4": "E8M0", "nvfp4": "E4M3 and global"}


def bundle_view(bundle: dict[str, Any]) -> RenderableType:
    """Returns a table of kernels for each program of ``Bundle.to_dict()``."""
    programs = bundle["programs"]
    kernels = sum(len(program["kernels"]) for program in programs)
    head = Text.assemble(
        (f"{len(programs)} program{'s' * (len(programs) > 1)}, {kernels} kernels", "bold"),
        f"  {size_text(bundle['bytes'])}",
    )
    parts: list[RenderableType] = [head]
    for program in programs:
        title = Text.assemble(
            (program["architecture"], "bold"),
            f"  {layer_text(program['layer'])}  ",
            (size_text(program["bytes"]), "dim"),
        )
        parts += ["", title, _kernels(program)]
    return Group(*parts)


def _kernels(program: dict[str, Any]) -> Table:
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
    for index, kernel in enumerate(program["kernels"]):
        local = kernel["local_memory"]
        table.add_row(
            Text(kernel["name"], style="cyan"),
            _tokens(program["ranges"], index),
            str(kernel["num_warps"]),
            str(kernel["registers"]),
            size_text(kernel["shared_memory"]),
            Text(size_text(local), style="yellow" if local else "dim"),
            size_text(kernel["image_bytes"]),
        )
    return table


def layer_text(layer: dict[str, Any]) -> str:
    """Returns ``LayerRecord.to_dict()`` in one line."""
    gated = "gated " if layer["gated"] else ""
    flags = "".join(f", {name.replace('_', ' ')}" for name in _FLAGS if layer.get(name))
    slots = layer.get("resident_experts")
    resident = f", {slots} resident" if slots else ""
    dtypes = dict.fromkeys(layer[name] for name in ("tokens_dtype", "experts_dtype"))
    return (
        f"{layer['operator']}, {layer['top_k']} of {layer['experts']} experts{resident}, "
        f"{layer['width']} x {layer['hidden']}, {gated}{layer['activation']}{flags}, "
        f"{' and '.join(dtypes)}{_packed_text(layer)}"
    )


def _packed_text(layer: dict[str, Any]) -> str:
    """How the weights are packed; "" where they are not."""
    if "scales_dtype" not in layer:
        return ""
    rows, columns = (layer[name] or "all" for name in ("block_rows", "block_columns"))
    zero_points = layer["zero_points"]
    more = "" if zero_points == "none" else f", zero points of {zero_points}"
    scales = _SCALES.get(layer["weight_format"], layer["scales_dtype"])
    return f", {layer['weight_format']} weights with {scales} scales of {rows} x {columns}{more}"


def _tokens(ranges: list[dict[str, Any]], kernel: int) -> str:
    """The numbers of tokens that a kernel runs for: ``1-16, 65-``."""
    spans = []
    for used, group in groupby(ranges, key=lambda token_range: kernel in token_range["kernels"]):
        consecutive = list(group)
        if used:
            last = consecutive[-1]["last"]
            spans.append(f"{consecutive[0]['first']}-{last if last < _ANY_NUMBER else ''}")
    return ", ".join(spans)


def size_text(count: int) -> str:
    """Three digits or so: ``96 B``, ``15.2 KiB``.

    >>> size_text(96), size_text(15_600), size_text(3 * 1024**2)
    ('96 B', '15.2 KiB', '3 MiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"
