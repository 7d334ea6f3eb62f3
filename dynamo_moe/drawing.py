"""Pictures of ONNX graphs, with the MoE layers marked.

A graph is laid out in layers from top to bottom (Sugiyama's method) and folded into columns, like
a page of text, at one fixed text size: a larger graph gives a larger picture, not smaller letters.
Weights and constants are not drawn, and a chain of shape operators is one box.

Lengths are CSS pixels; y grows downwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx

from dynamo_moe._inspection_view import readable_count
from dynamo_moe.inspection import all_nodes, is_moe, load_graph, moe_layer

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes

__all__ = ["draw", "draw_comparison"]

Source: TypeAlias = "str | PathLike[str] | onnx.ModelProto"

# Kind -> legend, fill, line. An operator that no kind below lists is element-wise.
_KINDS = {
    "moe": ("MoE layer", "#e8590c", "#b8440a"),
    "matmul": ("MatMul, Conv", "#d6e4fb", "#4a78c8"),
    "norm": ("Normalization", "#d7f0df", "#3d9560"),
    "softmax": ("Softmax, attention", "#e9dcfa", "#8659cb"),
    "elementwise": ("Element-wise", "#fdf0c8", "#c2931f"),
    "select": ("Select, reduce", "#d3eef0", "#2f929b"),
    "shape": ("Shape, layout", "#f1f3f5", "#a9b1b9"),
    "value": ("Input, output", "#ffffff", "#495057"),
}
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

_FONT = 9.0
_BOX_HEIGHT, _RANK_GAP, _LANE, _SIDE_GAP = 15.0, 9.0, 30.0, 9.0
_COLUMN_GAP, _PANEL_GAP, _MARGIN, _HEADER, _FOOTER = 30.0, 44.0, 18.0, 46.0, 34.0


def draw(model: Source, destination: str | PathLike[str], *, title: str = "") -> Path:
    """Draws a model's graph, its MoE layers in orange.

    Args:
        model: An ONNX file or a loaded model.
        destination: A ``.svg`` or ``.png`` file. Equal models give equal files.
        title: Text above the graph; the graph's name if empty.

    Returns:
        The destination.

    Raises:
        FileNotFoundError: There is no such model file.
        ValueError: The file is not an ONNX model, or the destination neither SVG nor PNG.
        ImportError: The extra ``draw`` is not installed.
    """
    return draw_comparison([(title, model)], destination)


def draw_comparison(
    models: Sequence[tuple[str, Source]], destination: str | PathLike[str]
) -> Path:
    """Draws several models side by side, each under its title and its number of nodes.

    An MoE layer that is spelled out in standard operators gets a frame, so that it can be compared
    to the one node that it is elsewhere.

    Args:
        models: Title and model, from left to right.
        destination: As in :func:`draw`.

    Returns:
        The destination.

    Raises:
        FileNotFoundError: As in :func:`draw`.
        ValueError: As in :func:`draw`.
        ImportError: As in :func:`draw`.
    """
    destination = Path(destination)
    if destination.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"a picture is a .svg or .png file, got {destination.name!r}")
    try:
        import fast_sugiyama  # noqa: F401
        import matplotlib  # noqa: F401
        import networkx  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"drawing needs {error.name}: pip install 'dynamo-moe[draw]'", name=error.name
        ) from error
    panels = []
    for title, source in models:
        model = source if isinstance(source, onnx.ModelProto) else load_graph(source)
        panels.append(_Panel(title or model.graph.name or "graph", model))
    _paint(panels, destination)
    return destination
