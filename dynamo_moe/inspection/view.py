"""A :class:`dynamo_moe.inspection.ModelSummary` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.filesize import decimal, pick_unit_and_suffix
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dynamo_moe.inspection.summary import ModelSummary, ValueSummary

__all__ = ["readable_count", "summary_view"]


def summary_view(summary: ModelSummary) -> RenderableType:
    """The facts about the file, its MoE layers, its weights and its operators."""
    return Group(
        _facts(summary), "", _moe_layers(summary), "", _weights(summary), "", _operators(summary)
    )


def readable_count(count: int) -> str:
    """Three significant digits from a thousand on.

    >>> [readable_count(n) for n in (0, 999, 1000, 66_560, 999_999, 6_738_000_000)]
    ['0', '999', '1 k', '66.6 k', '1 M', '6.74 G']
    """
    # 999.5 k would print as 1e+03 k, so it already belongs to the next unit.
    unit, prefix = pick_unit_and_suffix(int(count * 1.0005), ["", " k", " M", " G", " T"], 1000)
    return f"{count / unit:.3g}{prefix}"


def _facts(summary: ModelSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    size = decimal(summary.file_bytes)
    if summary.external_bytes:
        size += f" + {decimal(summary.external_bytes)} of external data"
    grid.add_row("file", Text.assemble((str(summary.path), "bold"), f"  {size}"))
    for name in summary.missing_files:
        grid.add_row("missing", Text(name, style="red"))
    opsets = ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items())
    grid.add_row("format", Text(f"ONNX IR {summary.ir_version}; opsets {opsets}"))
    if summary.producer:
        grid.add_row("producer", Text(summary.producer))
    for title, values in (("inputs", summary.inputs), ("outputs", summary.outputs)):
        for i, value in enumerate(values):
            grid.add_row(title if i == 0 else "", _value(value))
    return grid


def _value(value: ValueSummary) -> Text:
    if not value.dtype:
        kind = "not a tensor"
    elif value.shape is None:
        kind = f"{value.dtype}, unknown rank"
    else:
        kind = f"{value.dtype} [{', '.join('?' if d is None else str(d) for d in value.shape)}]"
    return Text.assemble((value.name, "cyan"), f"  {kind}")


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...] = ()) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _moe_layers(summary: ModelSummary) -> RenderableType:
    layers = summary.moe_layers
    if not layers:
        return Text("No MoE nodes", style="bold")
    operators = sorted({f"{layer.domain}::{layer.op_type}" for layer in layers})
    table = _table(
        f"{len(layers)} MoE layer{'s' * (len(layers) > 1)}: {', '.join(operators)}",
        ("Layer",),
        ("Experts", "Width", "Activation", "Weights", "Params", "Size"),
    )
    for layer in layers:
        gated = "gated " if layer.attributes.get("gated") else ""
        table.add_row(
            Text(layer.name, style="orange1"),
            f"{_or_unknown(layer.top_k)} of {_or_unknown(layer.num_experts)}",
            f"{_or_unknown(layer.in_features)} x {_or_unknown(layer.hidden_features)}",
            Text(gated + layer.activation),
            layer.precision or "computed",
            readable_count(layer.parameters),
            decimal(layer.bytes),
        )
    return table


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def _weights(summary: ModelSummary) -> RenderableType:
    table = _table("Weights", ("Type",), ("Tensors", "Elements", "Size"))
    for name, weights in summary.weights.items():
        size = decimal(weights.bytes)
        table.add_row(name, str(weights.tensors), readable_count(weights.elements), size)
    if len(summary.weights) > 1:
        tensors = sum(weights.tensors for weights in summary.weights.values())
        size = decimal(summary.weight_bytes)
        table.add_section()
        table.add_row("all", str(tensors), readable_count(summary.parameters), size, style="bold")
    return table


def _operators(summary: ModelSummary) -> RenderableType:
    table = _table("Operators", ("In",), ("Nodes",))
    table.add_column("Operators", overflow="fold")
    table.add_row("graph", str(summary.nodes), _counts(summary.operators))
    for function in summary.functions:
        name = Text(f"{function.domain}::{function.name}")
        if function.overload:
            name.append(f"\n{function.overload}", style="dim")
        table.add_row(name, str(function.nodes), _counts(function.operators))
    return table


def _counts(operators: Mapping[str, int]) -> Text:
    return Text(", ").join(
        Text.assemble(
            (name, "orange1" if "::" in name else ""), "\N{NO-BREAK SPACE}", (str(count), "dim")
        )
        for name, count in operators.items()
    )
