"""Pictures of ONNX graphs, with the MoE layers marked.

A graph is laid out in layers from top to bottom (Sugiyama's method) and folded into columns, like
a page of text, at one fixed text size: a larger graph gives a larger picture, not smaller letters.
Weights and constants are not drawn, and a chain of shape operators is one box.

Lengths are CSS pixels; y grows downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import onnx

from dynamo_moe.inspection import load_graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Curve

    from dynamo_moe._drawing_layout import Box, Column

__all__ = ["draw", "draw_comparison"]

Source: TypeAlias = "str | PathLike[str] | onnx.ModelProto"

# Kind of box -> legend, fill, line and text.
_KINDS = {
    "moe": ("MoE layer", "#e8590c", "#c2460a", "#ffffff"),
    "matmul": ("MatMul, Conv", "#d6e4fb", "#4a78c8", "#1c3f7a"),
    "norm": ("Normalization", "#d7f0df", "#3d9560", "#1d5535"),
    "softmax": ("Softmax, attention", "#e9dcfa", "#8659cb", "#4a2a82"),
    "elementwise": ("Element-wise", "#fdf0c8", "#c2931f", "#684c06"),
    "select": ("Select, reduce", "#d3eef0", "#2f929b", "#12555b"),
    "shape": ("Shape, layout", "#f1f3f5", "#b4bbc2", "#5c656e"),
    "value": ("Input, output", "#ffffff", "#343a40", "#343a40"),
}
_FRAME_FILL, _FRAME_LINE = "#fff4ec", "#e8590c"
_LINE, _TURN = "#8d969f", "#b7c4d4"
_WIDTH, _MARGIN, _HEADER, _FOOTER = 900.0, 16.0, 52.0, 38.0
_COLUMN_GAP, _PANEL_GAP, _TURN_ROOM = 34.0, 56.0, 14.0


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
    _paint([_Panel(title, source) for title, source in models], destination)
    return destination


class _Panel:
    """One model's part of the picture."""

    def __init__(self, title: str, source: Source) -> None:
        from dynamo_moe import _drawing_layout as layout

        model = source if isinstance(source, onnx.ModelProto) else load_graph(source)
        flow = layout.boxes_of(model.graph)
        self.title = title or model.graph.name or "graph"
        self.nodes = len(model.graph.node)
        self.kinds = {box.kind for box in flow}
        self.layers = layout.spelled_out(flow)
        self.ranks, self.lines = layout.ranks_of(flow)
        self.columns: list[Column] = []

    def fold(self, height: float) -> float:
        """Makes columns of at most this height; returns their width."""
        from dynamo_moe import _drawing_layout as layout

        self.columns = layout.fold(self.ranks, self.layers, height)
        return sum(column.width + _COLUMN_GAP for column in self.columns) - _COLUMN_GAP


def _paint(panels: Sequence[_Panel], destination: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    gaps = 2 * _MARGIN + _PANEL_GAP * (len(panels) - 1)
    limit = 320.0
    while (width := sum(panel.fold(limit) for panel in panels) + gaps) > max(_WIDTH, limit):
        limit += 10
    top = _HEADER + _TURN_ROOM
    tallest = max(column.height for panel in panels for column in panel.columns)
    height = top + tallest + _TURN_ROOM + _FOOTER
    # Glyphs as paths and a fixed salt: the picture depends on neither fonts nor the day.
    with matplotlib.rc_context({"svg.hashsalt": "dynamo-moe", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width / 96, height / 96), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        left = _MARGIN
        for panel in panels:
            _text(axes, left, 20, panel.title, 14, weight="bold", ha="left")
            _text(axes, left, 38, f"{panel.nodes:,} nodes", 11, color="#5c656e", ha="left")
            left = _paint_panel(axes, panel, left, top) + _PANEL_GAP
        kinds = set[str]().union(*(panel.kinds for panel in panels))
        _paint_legend(axes, kinds, height - _FOOTER / 2)
        metadata = {"Date": None} if destination.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(destination, dpi=192, metadata=metadata)


def _paint_panel(axes: Axes, panel: _Panel, left: float, top: float) -> float:
    """Returns the panel's right."""
    number = {}
    rights = []
    for i, column in enumerate(panel.columns):
        for box in column.boxes:
            box.x += left - column.left
            box.y += top
            number[box] = i
        rights.append(left + column.width)
        left = rights[-1] + _COLUMN_GAP
    for layer in panel.layers:
        _paint_frames(axes, layer, number)
    turns: dict[Box, float] = {}
    for a, b in panel.lines:
        i = number[a]
        if number[b] == i:
            _paint_line(axes, a, b)
        else:
            shift = turns.setdefault(a, 4.0 * len([box for box in turns if number[box] == i]))
            bottom = top + panel.columns[i].height + _TURN_ROOM / 2 + shift
            gutter = rights[i] + _COLUMN_GAP / 2 + shift
            _paint_turn(axes, a, b, bottom, gutter, top - shift)
    for box in number:
        if box.kind:
            _paint_box(axes, box)
    return rights[-1]


def _paint_frames(axes: Axes, layer: set[Box], number: dict[Box, int]) -> None:
    from matplotlib.patches import FancyBboxPatch

    nodes = sum(len(box.operators) for box in layer)
    for i in sorted({number[box] for box in layer}):
        part = [box for box in layer if number[box] == i]
        x = min(box.x - box.width / 2 for box in part) - 6
        y = min(box.y - box.height / 2 for box in part) - 17
        width = max(box.x + box.width / 2 for box in part) + 6 - x
        height = max(box.y + box.height / 2 for box in part) + 4 - y
        style = "round,pad=0,rounding_size=5"
        axes.add_patch(
            FancyBboxPatch((x, y), width, height, style, fc=_FRAME_FILL, ec=_FRAME_LINE, lw=0.9)
        )
        caption = f"MoE layer: {nodes} nodes"
        _text(axes, x + 6, y + 8.5, caption, 9, color=_FRAME_LINE, weight="bold", ha="left")


def _paint_line(axes: Axes, a: Box, b: Box) -> None:
    from matplotlib.path import Path as Curve

    y0, y1 = a.y + a.reach / 2, b.y - b.reach / 2
    middle = (y0 + y1) / 2
    points = [(a.x, a.y + a.height / 2), (a.x, y0), (a.x, middle), (b.x, middle), (b.x, y1)]
    codes = [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO]
    _stroke(axes, Curve([*points, (b.x, b.y - b.height / 2)], codes), _LINE, b)


def _paint_turn(
    axes: Axes, a: Box, b: Box, bottom: float, gutter: float, top: float
) -> None:
    """A line from the foot of a column to the head of the next one."""
    from matplotlib.path import Path as Curve

    corners = [(a.x, bottom), (gutter, bottom), (gutter, top), (b.x, top)]
    points, codes = [(a.x, a.y + a.height / 2)], [Curve.MOVETO]
    end = (b.x, b.y - b.height / 2)
    for (x, y), before, after in zip(
        corners, [points[0], *corners[:-1]], [*corners[1:], end], strict=True
    ):
        for other in (before, after):
            length = max(abs(other[0] - x), abs(other[1] - y), 1e-6)
            step = min(6.0, length / 2) / length
            points.append((x + (other[0] - x) * step, y + (other[1] - y) * step))
            if other is before:
                codes.append(Curve.LINETO)
                points.append((x, y))
        codes += [Curve.CURVE3, Curve.CURVE3]
    _stroke(axes, Curve([*points, end], [*codes, Curve.LINETO]), _TURN, b)


def _stroke(axes: Axes, curve: Curve, color: str, b: Box) -> None:
    from matplotlib.patches import PathPatch, Polygon

    axes.add_patch(PathPatch(curve, fill=False, ec=color, lw=0.9, capstyle="round"))
    if b.kind:
        x, y = b.x, b.y - b.height / 2
        axes.add_patch(Polygon([(x, y), (x - 2.5, y - 4), (x + 2.5, y - 4)], fc=color, lw=0))


def _paint_box(axes: Axes, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    from dynamo_moe._drawing_layout import FONT_SIZE, LINE_HEIGHT

    _, fill, line, ink = _KINDS[box.kind]
    radius = box.height / 2 if box.kind == "value" else 4 if box.kind == "moe" else 2.5
    corner = (box.x - box.width / 2, box.y - box.height / 2)
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(
        FancyBboxPatch(corner, box.width, box.height, style, fc=fill, ec=line, lw=0.75)
    )
    for i, text in enumerate(box.lines):
        y = box.y + (i - (len(box.lines) - 1) / 2) * LINE_HEIGHT
        bold = box.kind == "moe" and i == 0
        _text(axes, box.x, y, text, FONT_SIZE, color=ink, weight="bold" if bold else "normal")


def _paint_legend(axes: Axes, kinds: set[str], y: float) -> None:
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.textpath import TextPath

    x = _MARGIN
    for kind, (label, fill, line, _) in _KINDS.items():
        if kind in kinds:
            style = "round,pad=0,rounding_size=2.5"
            axes.add_patch(FancyBboxPatch((x, y - 5), 16, 10, style, fc=fill, ec=line, lw=0.75))
            _text(axes, x + 21, y, label, 9.5, color="#495057", ha="left")
            x += 21 + TextPath((0, 0), label, size=9.5).get_extents().width + 16


def _text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    color: str = "#212529",
    weight: str = "normal",
    ha: str = "center",
) -> None:
    # Sizes are points in matplotlib: 72 to the inch, where pixels are 96.
    style = {"color": color, "weight": weight, "ha": ha, "va": "center_baseline"}
    axes.text(x, y, text, size=size * 0.75, **style)
