"""Where the boxes and lines of a graph's picture go.

Model -> boxes (constants gone, chains of shape operators joined) -> layers -> columns.
Lengths are CSS pixels; y grows downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import fast_sugiyama
import networkx as nx
import onnx
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from dynamo_moe._inspection_view import readable_count
from dynamo_moe.inspection import all_nodes, is_moe, moe_layer

__all__ = ["FONT_SIZE", "LINE_HEIGHT", "Box", "Column", "boxes_of", "fold", "ranks_of"]

FONT_SIZE, LINE_HEIGHT = 9.0, 12.0
_BOX_HEIGHT, _RANK_GAP, _CAPTION = 15.0, 10.0, 14.0
# From centre to centre of neighbours; and the least space beside a box.
_LANE, _SIDE_GAP = 62.0, 8.0

_OPERATORS = {
    "matmul": "MatMul Gemm Conv ConvTranspose Einsum MatMulInteger QLinearMatMul QLinearConv",
    "norm": "LayerNormalization RMSNormalization BatchNormalization GroupNormalization "
    "InstanceNormalization SimplifiedLayerNormalization SkipLayerNormalization LpNormalization",
    "softmax": "Softmax LogSoftmax Attention MultiHeadAttention GroupQueryAttention",
    "select": "TopK ScatterElements ScatterND GatherElements GatherND OneHot NonZero ReduceSum "
    "ReduceMean ReduceMax ArgMax CumSum GlobalAveragePool AveragePool MaxPool Loop If Scan",
    "shape": "Reshape Transpose Gather Slice Concat Split Unsqueeze Squeeze Shape Expand Cast "
    "Identity ConstantOfShape Pad Tile Flatten Range Size DepthToSpace SpaceToDepth",
}
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}


@dataclass(eq=False)
class Box:
    """One or several nodes, an input or output, or a bend of a line.

    Attributes:
        kind: What it does, which gives its colour; empty for a bend.
        lines: The text.
        operators: Types of the nodes it stands for.
        stacked: It multiplies by a stack of matrices, as a layer of experts does.
        width: Of the box.
        height: Of the box.
        x: Of its centre.
        y: Of its centre.
        reach: Height of its layer.
    """

    kind: str = ""
    lines: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    stacked: bool = False
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0
    reach: float = 0.0

    def fit(self) -> None:
        """Sizes the box to its text."""
        bold = self.kind == "moe"
        self.width = max(_text_width(line, bold) for line in self.lines) + (16 if bold else 10)
        self.height = _BOX_HEIGHT + LINE_HEIGHT * (len(self.lines) - 1) + 6 * bold


@dataclass
class Column:
    """A part of the layers, one above the other.

    Attributes:
        boxes: Boxes and bends; their x counts from the graph's left, their y from the column's top.
        left: The least x.
        width: Of the column.
        height: Of the column.
    """

    boxes: list[Box]
    left: float
    width: float
    height: float


@lru_cache(maxsize=None)
def _text_width(text: str, bold: bool) -> float:
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text or "x", size=FONT_SIZE, prop=font).get_extents().width)


def boxes_of(graph: onnx.GraphProto) -> nx.DiGraph[Box]:
    """The boxes of a graph and what flows between them."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    flow: nx.DiGraph[Box] = nx.DiGraph()
    source = {
        value.name: Box("value", (value.name,)) for value in graph.input if value.name not in shapes
    }
    for node in graph.node:
        if node.op_type == "Constant" or not node.output:
            continue
        names = [name for inner in all_nodes([node]) for name in inner.input]
        if is_moe(node):
            layer = moe_layer(node, tensors)
            box = Box(
                "moe",
                (
                    layer.op_type,
                    f"{layer.num_experts} experts, top-{layer.top_k}",
                    f"{layer.activation}, {readable_count(layer.parameters)} params",
                ),
                (node.op_type,),
            )
        else:
            kind = _KIND_OF.get(node.op_type, "elementwise")
            stacked = kind == "matmul" and any(len(shapes.get(name, ())) == 3 for name in names)
            box = Box(kind, (), (node.op_type,), stacked)
        flow.add_node(box)
        flow.add_edges_from((source[name], box) for name in names if name in source)
        source |= dict.fromkeys(filter(None, node.output), box)
    for value in graph.output:
        if value.name in source:
            flow.add_edge(source[value.name], Box("value", (value.name,)))
    flow.remove_nodes_from(list(nx.isolates(flow)))
    _join_shape_chains(flow)
    for box in flow:
        box.lines = box.lines or _label(box.operators)
        box.fit()
    return flow


def _label(operators: Sequence[str]) -> tuple[str, ...]:
    if len(operators) > 2:
        return (f"{len(operators)} shape ops",)
    return tuple(name.replace("Normalization", "Norm").replace("Elements", "") for name in operators)


def _join_shape_chains(flow: nx.DiGraph[Box]) -> None:
    for box in list(nx.topological_sort(flow)):
        before = list(flow.predecessors(box))
        if box.kind == "shape" and len(before) == 1 and before[0].kind == "shape":
            [head] = before
            if flow.out_degree(head) == 1:
                head.operators += box.operators
                flow.add_edges_from((head, after) for after in list(flow.successors(box)))
                flow.remove_node(box)


def spelled_out(flow: nx.DiGraph[Box]) -> list[set[Box]]:
    """The MoE layers that are written in standard operators.

    Such a layer is what lies between the tokens and the sum of the experts' results: from a TopK,
    the nearest node that all its uses run into, such that two products with stacks of matrices
    lie between it and the node where its operands come from.
    """
    start, end = Box(), Box()
    whole: nx.DiGraph[Box] = flow.copy()
    whole.add_edges_from((start, box) for box in flow if not flow.in_degree(box))
    whole.add_edges_from((box, end) for box in flow if not flow.out_degree(box))
    above = nx.immediate_dominators(whole, start)
    below = nx.immediate_dominators(whole.reverse(), end)
    found: list[set[Box]] = []
    for box in flow:
        if "TopK" not in box.operators:
            continue
        last = below[box]
        while last is not end:
            first = above[last]
            inside = nx.descendants(whole, first) & nx.ancestors(whole, last)
            if box in inside and sum(other.stacked for other in inside) > 1:
                inside.add(last)
                if first.kind == "shape":
                    inside.add(first)
                while (after := below[last]).kind in ("shape", "select"):
                    inside.add(last := after)
                found.append(inside)
                break
            last = below[last]
    return found


def ranks_of(flow: nx.DiGraph[Box]) -> tuple[list[list[Box]], list[tuple[Box, Box]]]:
    """The layers of a graph, each from left to right, and the lines between neighbouring ones.

    Lines that pass layers bend there, at boxes of no size. Every x is set; y is not.
    """
    order = list(flow)
    number = {box: i for i, box in enumerate(order)}
    edges = [(number[a], number[b]) for a, b in flow.edges]
    parts = fast_sugiyama.from_edges(edges, vertex_spacing=1, dummy_vertices=True, dummy_size=0.4)
    ranks: list[list[Box]] = []
    lines: list[tuple[Box, Box]] = []
    for positions, _, height, part_edges in parts:
        top = len(ranks)
        ranks += [[] for _ in range(round(height) + 1)]
        boxes = {i: order[i] if i < len(order) else Box() for i, _ in positions}
        for i, (x, y) in positions:
            boxes[i].x = x * _LANE
            ranks[top + round(height - y)].append(boxes[i])
        lines += [(boxes[a], boxes[b]) for a, b in part_edges or ()]
    for rank in ranks:
        rank.sort(key=lambda box: box.x)
        for left, right in pairwise(rank):
            space = (left.width + right.width) / 2 + _SIDE_GAP
            right.x = max(right.x, left.x + space)
    return ranks, lines


def fold(ranks: list[list[Box]], layers: Sequence[set[Box]], height: float) -> list[Column]:
    """Cuts the layers into columns of at most this height, where the fewest values cross.

    Sets every box's y.
    """
    level = {box: i for i, rank in enumerate(ranks) for box in rank}
    # Everything in a layer is used further down, but for the graph's outputs.
    crossing = [sum(box.kind != "value" for box in rank) for rank in ranks]
    first = {min(level[box] for box in layer) for layer in layers}
    steps = [
        max(box.height for box in rank) + _RANK_GAP + _CAPTION * (i in first)
        for i, rank in enumerate(ranks)
    ]
    columns: list[Column] = []
    begin = 0
    while begin < len(ranks):
        end, used, cuts = begin, 0.0, []
        while end < len(ranks) and (used + steps[end] <= height or end == begin):
            used += steps[end]
            end += 1
            if used > 0.75 * height:
                cuts.append(end)
        if end < len(ranks) and cuts:
            end = min(cuts, key=lambda cut: (crossing[cut - 1], -cut))
        columns.append(_stack(ranks[begin:end], steps[begin:end]))
        begin = end
    return columns


def _stack(ranks: list[list[Box]], steps: list[float]) -> Column:
    bottom = 0.0
    for rank, step in zip(ranks, steps, strict=True):
        bottom += step
        reach = max(box.height for box in rank)
        for box in rank:
            box.y, box.reach = bottom - reach / 2, reach
    boxes = [box for rank in ranks for box in rank]
    left = min(box.x - box.width / 2 for box in boxes)
    right = max(box.x + box.width / 2 for box in boxes)
    return Column(boxes, left, right - left, bottom)
