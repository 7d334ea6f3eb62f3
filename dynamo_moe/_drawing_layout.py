"""Where the boxes and lines of a graph's picture go.

Model -> graph of boxes (constants gone, chains of shape operators joined) -> layers -> columns.
Lengths are CSS pixels; y grows downwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import fast_sugiyama
import networkx as nx
import onnx
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from dynamo_moe._inspection_view import readable_count
from dynamo_moe.inspection import all_nodes, is_moe, moe_layer

__all__ = ["FONT_SIZE", "LINE_HEIGHT", "Box", "Columns", "Drawing"]

FONT_SIZE, LINE_HEIGHT = 9.0, 12.0
_BOX_HEIGHT, _RANK_GAP, _CAPTION = 15.0, 10.0, 13.0
# Least distance between the centres of neighbours, and between boxes and lines.
_LANE, _SIDE_GAP = 64.0, 8.0

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


@dataclass
class Box:
    """One or several nodes of a graph, or one of its inputs or outputs.

    Attributes:
        kind: Key of the legend.
        lines: The text.
        operators: Types of the nodes it stands for; empty for an input or output.
        experts: It multiplies by a stack of matrices, as the experts of a layer do.
        width: Of the box.
        height: Of the box.
        x: Of its centre.
        y: Of its centre.
    """

    kind: str
    lines: tuple[str, ...]
    operators: tuple[str, ...] = ()
    experts: bool = False
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0

    def fit(self) -> None:
        """Sizes the box for its text."""
        bold = self.kind == "moe"
        padding = 16 if bold else 10
        self.width = padding + max(_text_width(line, bold) for line in self.lines)
        self.height = _BOX_HEIGHT + LINE_HEIGHT * (len(self.lines) - 1) + 6 * bold


@lru_cache(maxsize=None)
def _text_width(text: str, bold: bool) -> float:
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text or " ", size=FONT_SIZE, prop=font).get_extents().width)
