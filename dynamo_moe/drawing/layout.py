"""Where the boxes and lines of a graph's picture go.

Model -> boxes (constants gone, chains of shape operators joined) -> layers -> columns.
Lengths are CSS pixels; y grows downwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import itemgetter

import fast_sugiyama
import networkx as nx
import onnx
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from scipy.optimize import linprog
from scipy.sparse import lil_array

from dynamo_moe.files.model_files import all_nodes
from dynamo_moe.inspection.reading import is_layer, moe_layer
from dynamo_moe.inspection.summary import readable_count
from dynamo_moe.moe_nodes.nodes import TRAINING_INPUTS
from dynamo_moe.operators.schemas import is_own_domain

FONT_SIZE, LINE_HEIGHT = 9.0, 12.0
_BOX_HEIGHT, _RANK_GAP, _FRAME_ROOM = 15.0, 11.0, 4.0
_SIDE_GAP, _FRAME_GAP = 9.0, 8.0

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
# Operators that make data from sizes alone.
_FROM_SIZES = ("Range", "EyeLike", "RandomNormal", "RandomUniform")
# Letters of an input's name that are shown: a whole name could be wider than everything else.
_LONGEST = 18
# Layers that a line may pass if it is one of three or more of the same value.
_FAR = 14
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}


@dataclass(eq=False)
class Box:
    """One or several nodes, an input or output, or a bend of a line; (x, y) is its centre.

    Attributes:
        kind: The kind of operator, which gives the colour; empty for a bend.
        lines: The text.
        operators: Types of the nodes that it stands for.
        stacked: Whether it multiplies by a stack of matrices, as a layer of experts does.
        prepared: Number of nodes, not drawn, that prepare weights or sizes for it and for no box
            before it.
        reach: Height of its layer.
    """

    kind: str = ""
    lines: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    stacked: bool = False
    prepared: int = 0
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0
    reach: float = 0.0

    def fit(self) -> None:
        """Sizes the box to its text."""
        bold = self.kind == "moe"
        self.width = max(text_width(line, bold) for line in self.lines) + (16 if bold else 10)
        self.height = _BOX_HEIGHT + LINE_HEIGHT * (len(self.lines) - 1) + 6 * bold


@dataclass
class Column:
    """A part of the layers, one above the other; ``left`` is its least x.

    Its boxes and bends count x from the graph's left, and y from the column's top.
    """

    boxes: list[Box]
    left: float
    width: float
    height: float


@cache
def text_width(text: str, bold: bool) -> float:
    """Returns the width of a line of text in a box."""
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text or "x", size=FONT_SIZE, prop=font).get_extents().width)


def boxes_of(graph: onnx.GraphProto) -> nx.DiGraph[Box]:
    """The boxes of a graph and what flows between them.

    Nodes that prepare weights or sizes, not data, are left out: with dynamic shapes their lines
    would cross the whole picture. A chain of shape operators, and a product with the bias that is
    added to it, are one box each.

    Raises:
        ValueError: Nothing in the graph depends on its inputs.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    # Values that are not data -> numbers of the nodes that prepared them; "" is an absent input.
    prepared: dict[str, frozenset[int]] = dict.fromkeys(["", *weights], frozenset())
    stacks = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 3}
    counted: set[int] = set()
    flow: nx.DiGraph[Box] = nx.DiGraph()
    inputs = [value.name for value in graph.input if value.name not in weights]
    source = {name: Box("value", (_shorten(name),)) for name in inputs}
    for number, node in enumerate(graph.node):
        names = [name for inner in all_nodes([node]) for name in inner.input]
        behind = frozenset[int]().union(*(prepared.get(name, ()) for name in names))
        no_data = all(name in prepared for name in names) and node.op_type not in _FROM_SIZES
        if no_data or node.op_type in ("Shape", "Size"):
            producer = () if node.op_type == "Constant" else (number,)
            prepared |= dict.fromkeys(node.output, behind.union(producer))
            stacks.update(node.output if stacks.intersection(names) else ())
            continue
        box = _box(node, weights)
        box.stacked = box.kind == "matmul" and bool(stacks.intersection(names))
        box.prepared = len(behind - counted)
        counted |= behind
        flow.add_node(box)
        flow.add_edges_from((source[name], box) for name in names if name in source)
        source |= dict.fromkeys(filter(None, node.output), box)
    for value in graph.output:
        if value.name in source:
            flow.add_edge(source[value.name], Box("value", (_shorten(value.name),)))
    flow.remove_nodes_from(list(nx.isolates(flow)))
    if not flow:
        raise ValueError(f"nothing to draw: no node of graph {graph.name!r} reads its inputs")
    _join_chains(flow)
    for box in flow:
        box.lines = box.lines or _label(box)
    _refer_to_far_values(flow)
    for box in flow:
        box.fit()
    return flow


def _box(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> Box:
    if is_own_domain(node.domain) and node.op_type in TRAINING_INPUTS:
        return Box("moe", (node.op_type,), (node.op_type,))
    if not is_layer(node):
        default = "elementwise" if node.domain in ("", "ai.onnx") else "other"
        return Box(_KIND_OF.get(node.op_type, default), (), (node.op_type,))
    layer = moe_layer(node, weights)
    experts = f"{layer.num_experts or '?'} experts, top-{layer.top_k or '?'}"
    parameters = f"{layer.activation}, {readable_count(layer.parameters)} params"
    return Box("moe", (layer.op_type, experts, parameters.strip(" ,")), (node.op_type,))


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 :]}"


def _label(box: Box) -> tuple[str, ...]:
    if box.kind == "shape" and len(box.operators) > 2:
        return (f"{len(box.operators)} shape ops",)
    names = [name.replace("Normalization", "Norm") for name in box.operators]
    return (" + ".join(names),) if box.kind == "matmul" else tuple(names)


def _join_chains(flow: nx.DiGraph[Box]) -> None:
    for box in list(nx.topological_sort(flow)):
        before = list(flow.predecessors(box))
        if len(before) != 1 or flow.out_degree(before[0]) != 1:
            continue
        head = before[0]
        shapes = box.kind == head.kind == "shape"
        if shapes or (box.operators == ("Add",) and head.operators in (("MatMul",), ("Gemm",))):
            head.operators += box.operators
            head.prepared += box.prepared
            flow.add_edges_from((head, after) for after in list(flow.successors(box)))
            flow.remove_node(box)


def _refer_to_far_values(flow: nx.DiGraph[Box]) -> None:
    """Replaces the lines of a value that many distant boxes read, such as an attention mask."""
    level = {box: i for i, layer in enumerate(nx.topological_generations(flow)) for box in layer}
    for box in list(flow):
        far = [after for after in flow.successors(box) if level[after] - level[box] > _FAR]
        if len(far) > 2:
            for after in far:
                flow.remove_edge(box, after)
                flow.add_edge(Box("value", (f"\N{UPWARDS ARROW} {box.lines[0]}",)), after)


def spelled_out(flow: nx.DiGraph[Box]) -> list[set[Box]]:
    """The MoE layers that are written in standard operators.

    Such a layer is what lies between the tokens and the sum of the experts' results: from a TopK,
    the nearest node that all its uses run into, such that two products with stacks of matrices
    lie between it and the node where its operands come from.
    """
    start, end = Box(), Box()
    whole: nx.DiGraph[Box] = flow.copy()
    whole.add_edges_from((start, box) for box in flow if box.kind == "value")
    whole.add_edges_from((box, end) for box in flow if not flow.out_degree(box))
    above = nx.immediate_dominators(whole, start)
    below = nx.immediate_dominators(whole.reverse(), end)
    groups: list[set[Box]] = []
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
                groups.append(inside)
                break
            last = below[last]
    return groups


def ranks_of(
    flow: nx.DiGraph[Box], layers: Sequence[set[Box]]
) -> tuple[list[list[Box]], list[tuple[Box, Box]]]:
    """The layers of a graph, each from left to right, and the lines between neighbouring ones.

    Lines that pass layers bend there, at boxes of no size. Every x is set; y is not.
    """
    order = list(flow)
    number = {box: i for i, box in enumerate(order)}
    edges = [(number[a], number[b]) for a, b in flow.edges]
    parts = fast_sugiyama.from_edges(edges, vertex_spacing=1, dummy_vertices=True)
    ranks: list[list[Box]] = []
    lines: list[tuple[Box, Box]] = []
    for positions, _, height, part_edges in parts:
        top = len(ranks)
        ranks += [[] for _ in range(round(height) + 1)]
        # Numbers beyond the boxes' are bends.
        boxes = {i: order[int(i)] if int(i) < len(order) else Box() for i, _ in positions}
        for i, position in sorted(positions, key=itemgetter(1)):
            ranks[top + round(height - position[1])].append(boxes[i])
        lines += [(boxes[a], boxes[b]) for a, b in part_edges or ()]
    _place(ranks, lines, layers)
    return ranks, lines


def _place(
    ranks: Sequence[Sequence[Box]], lines: Sequence[tuple[Box, Box]], layers: Sequence[set[Box]]
) -> None:
    """Sets every x such that lines are straight where they can be.

    Least sum of |x_a - x_b| over the lines, long ones counting most, with the space that
    neighbours need: the linear program of Graphviz's dot (Gansner et al., "A technique for drawing
    directed graphs", 1993, section 4.2).
    """
    number = {box: i for i, box in enumerate(box for rank in ranks for box in rank)}
    layer_of = {box: i for i, layer in enumerate(layers) for box in layer}
    rows: list[tuple[dict[int, float], float]] = []
    for rank in ranks:
        for left, right in pairwise(rank):
            space = (left.width + right.width) / 2 + _SIDE_GAP
            space += _FRAME_GAP * (layer_of.get(left) != layer_of.get(right))
            rows.append(({number[left]: 1, number[right]: -1}, -space))
    leaving, entering = Counter(a for a, _ in lines), Counter(b for _, b in lines)
    cost = [0.0] * len(number)
    for i, (a, b) in enumerate(lines, len(number)):
        rows.append(({number[a]: 1, number[b]: -1, i: -1}, 0.0))
        rows.append(({number[a]: -1, number[b]: 1, i: -1}, 0.0))
        bends = (not a.kind) + (not b.kind)
        chain = leaving[a] == entering[b] == 1
        cost.append((4.0 if chain else 1.0, 2.0, 8.0)[bends])
    matrix = lil_array((len(rows), len(cost)))
    for i, (row, _) in enumerate(rows):
        for j, value in row.items():
            matrix[i, j] = value
    result = linprog(cost, matrix.tocsr(), [bound for _, bound in rows])
    for box, i in number.items():
        box.x = float(result.x[i])


def fold(ranks: list[list[Box]], layers: Sequence[set[Box]], height: float) -> list[Column]:
    """Cuts the layers into columns of at most this height, where the fewest values cross.

    Sets every box's y.
    """
    level = {box: i for i, rank in enumerate(ranks) for box in rank}
    # Everything in a layer is used further down, but for the graph's outputs.
    crossing = [sum(box.kind != "value" for box in rank) for rank in ranks]
    first = {min(level[box] for box in layer) for layer in layers}
    steps = [
        max(box.height for box in rank) + _RANK_GAP + _FRAME_ROOM * (i in first)
        for i, rank in enumerate(ranks)
    ]
    columns: list[Column] = []
    begin = 0
    while begin < len(ranks):
        end, used, cuts = begin, 0.0, []
        while end < len(ranks) and (used + steps[end] <= height or end == begin):
            used += steps[end]
            end += 1
            if used > 0.6 * height:
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
