"""The contents of an ONNX file, as values and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal, pick_unit_and_suffix
from rich.table import Table
from rich.text import Text

from dynamo_moe.files.offload_report import OffloadedLayer, memory_of
from dynamo_moe.files.offloading_view import layers_view
from dynamo_moe.files.rank_files import RankRecord
from dynamo_moe.json_values import json_values

AttributeValue: TypeAlias = "int | float | str | list[int] | list[float] | list[str]"


@dataclass(frozen=True)
class ValueSummary:
    """An input or output of the graph.

    Attributes:
        name: The value's name.
        dtype: Element type: ``float16``, ``int64``; empty for a value that is not a tensor.
        shape: One entry a dimension: its size, its symbol, or None if it has neither. None for a
            value of unknown rank.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class WeightsSummary:
    """Initializers of one dtype.

    Attributes:
        tensors: How many there are.
        elements: Their elements, in all.
        bytes: Their size, in all; two elements of a 4-bit type share a byte.
    """

    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    def __add__(self, other: WeightsSummary) -> WeightsSummary:
        """Both together."""
        return WeightsSummary(
            self.tensors + other.tensors, self.elements + other.elements, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class MoELayer:
    """A node that is a whole Mixture-of-Experts layer.

    Attributes:
        name: The layer's place in the model, by the dotted name of ``w1``; else ``node``.
        node: The node's name, or its first output's if it has none.
        domain: ``moe``, ``moe.<configuration>`` or ``com.microsoft``.
        op_type: ``DroplessMoE``, ``DroplessMoEExperts``, one of these with ``Packed``, ``MoE`` or
            ``QMoE``.
        num_experts: Experts, or None if neither attributes nor weights say.
        top_k: Experts per token, or None if the node does not say.
        in_features: Width of a token, or None.
        hidden_features: Hidden width of an expert, or None.
        activation: Name of the activation; empty if the node does not say.
        precision: dtype of ``w1``, or the format in which it is packed; None if it is computed.
        parameters: Of the layer's weights; scales and zero points of packed ones do not count.
        bytes: Their size.
        expert_bytes: Size of one expert's ``w1`` and ``w2``, with their scales, which is that of a
            slot where experts are offloaded; None if they are not in the graph.
        weights: Input (``w1``, ``router_weight``, …) -> name of its initializer. Inputs that are
            computed are absent.
        attributes: Every attribute that the node sets, under its name in the file.
    """

    name: str
    node: str
    domain: str
    op_type: str
    num_experts: int | None
    top_k: int | None
    in_features: int | None
    hidden_features: int | None
    activation: str
    precision: str | None
    parameters: int
    bytes: int
    expert_bytes: int | None
    weights: Mapping[str, str]
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True)
class FunctionSummary:
    """A model-local function: what a node of this domain and name (and overload) computes.

    Attributes:
        domain: Domain of the nodes that call it.
        name: Operator type of these nodes.
        overload: Their overload; often empty.
        nodes: Nodes of its body, those in branches and loops included.
        operators: Operator -> how many of these nodes, most frequent first.
    """

    domain: str
    name: str
    overload: str
    nodes: int
    operators: Mapping[str, int]


@dataclass(frozen=True)
class ModelSummary:
    """The result of :func:`inspect`; rich prints it as tables.

    Attributes:
        path: The file.
        file_bytes: Its size.
        external_bytes: Size of the weights that are stored in other files.
        missing_files: Files of external data that are not there.
        producer: Name and version of the tool that wrote the file; may be empty.
        ir_version: Version of the ONNX format.
        opsets: Domain -> version; the standard operators are ``ai.onnx``.
        inputs: The graph's inputs, without initializers.
        outputs: The graph's outputs.
        nodes: Nodes of the graph, those in branches and loops included, functions' not.
        operators: Operator -> how many of these nodes, most frequent first; those of other
            domains are ``domain::Name``.
        moe_layers: The nodes that are MoE layers, in the graph's order.
        offloaded: Those of them whose experts stay in host memory, and their memory.
        weights: dtype -> initializers of that dtype, largest first.
        parameters: Elements of all initializers; ``weights`` lists integers separately.
        weight_bytes: Their size.
        functions: Model-local functions.
        rank: The rank that the file is for, and its share of each layer's experts; None: the file
            is for all.
        rank_problem: Why the files of all ranks are not one model, such as that one is missing;
            empty if they are, or there is no rank.
    """

    path: Path
    file_bytes: int
    external_bytes: int
    missing_files: tuple[str, ...]
    producer: str
    ir_version: int
    opsets: Mapping[str, int]
    inputs: tuple[ValueSummary, ...]
    outputs: tuple[ValueSummary, ...]
    nodes: int
    operators: Mapping[str, int]
    moe_layers: tuple[MoELayer, ...]
    offloaded: tuple[OffloadedLayer, ...]
    weights: Mapping[str, WeightsSummary]
    parameters: int
    weight_bytes: int
    functions: tuple[FunctionSummary, ...]
    rank: RankRecord | None = None
    rank_problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return {**json_values(self), "offloaded": [experts.to_dict() for experts in self.offloaded]}

    def table(self) -> RenderableType:
        """The file's facts, its MoE layers, its weights and its operators, for a terminal."""
        layers = [_moe_layers(self), ""]
        if self.offloaded:
            offloaded = [layer.to_dict() for layer in self.offloaded]
            layers += [layers_view(offloaded, memory_of(self.offloaded)), ""]
        return Group(_facts(self), "", *layers, _weights(self), "", _operators(self))

    def __rich__(self) -> RenderableType:
        """The tables that rich prints."""
        return self.table()


# --- Tables ---


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
    if summary.rank is not None:
        grid.add_row("rank", Text(_rank(summary.rank)))
    if summary.rank_problem:
        grid.add_row("", Text(summary.rank_problem, style="red"))
    opsets = ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items())
    grid.add_row("format", Text(f"ONNX IR {summary.ir_version}; opsets {opsets}"))
    if summary.producer:
        grid.add_row("producer", Text(summary.producer))
    for title, values in (("inputs", summary.inputs), ("outputs", summary.outputs)):
        for i, value in enumerate(values):
            grid.add_row(title if i == 0 else "", _value(value))
    return grid


def _rank(record: RankRecord) -> str:
    """Says a file's rank, and its experts where all layers have the same."""
    experts = {
        f"experts {share.first} to {share.first + share.count - 1} of {share.total}"
        if share.count
        else f"no experts of {share.total}"
        for share in record.layers.values()
    }
    shares = experts.pop() if len(experts) == 1 else f"{len(experts)} shares of layers' experts"
    split = f", and its share of {len(record.split)} inputs and outputs" if record.split else ""
    return f"{record.rank} of {record.ranks}: {shares}{split}"


def _value(value: ValueSummary) -> Text:
    if not value.dtype:
        kind = "not a tensor"
    elif value.shape is None:
        kind = f"{value.dtype}, unknown rank"
    else:
        kind = f"{value.dtype} [{', '.join('?' if d is None else str(d) for d in value.shape)}]"
    return Text.assemble((value.name, "cyan"), f"  {kind}")


def _table(title: str, left: str, right: tuple[str, ...]) -> Table:
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
    table.add_column(left, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _moe_layers(summary: ModelSummary) -> RenderableType:
    layers = summary.moe_layers
    if not layers:
        return Text("No MoE nodes", style="bold")
    operators = sorted({f"{layer.domain}::{layer.op_type}" for layer in layers})
    title = f"{len(layers)} MoE layer{'s' * (len(layers) > 1)}: {', '.join(operators)}"
    right = ("Experts", "Width", "Activation", "Weights", "Params", "Size")
    table = _table(title, "Layer", right)
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
    table = _table("Weights", "Type", ("Tensors", "Elements", "Size"))
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
    table = _table("Operators", "In", ("Nodes",))
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
