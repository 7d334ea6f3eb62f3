"""Paints what :mod:`dynamo_moe.drawing.layout` has laid out.

Lengths are CSS pixels, 96 to the inch; y grows downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import onnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

from dynamo_moe.drawing import layout
from dynamo_moe.drawing.layout import Box, Column

# Kind of box -> legend, fill, line and text.
_KINDS = {
    "moe": ("MoE layer", "#e8590c", "#c2460a", "#ffffff"),
    "matmul": ("MatMul, Conv", "#d6e4fb", "#4a78c8", "#1c3f7a"),
    "norm": ("Normalization", "#d7f0df", "#3d9560", "#1d5535"),
    "softmax": ("Softmax, attention", "#e9dcfa", "#8659cb", "#4a2a82"),
    "elementwise": ("Element-wise", "#fdf0c8", "#c2931f", "#684c06"),
    "select": ("Select, reduce", "#d3eef0", "#2f929b", "#12555b"),
    "shape": ("Shape, layout", "#f1f3f5", "#b4bbc2", "#5c656e"),
    "other": ("Other domains", "#fbdce6", "#c2527a", "#7a1f43"),
    "value": ("Input, output", "#ffffff", "#343a40", "#343a40"),
}
_INK, _FAINT, _LINE = "#212529", "#5c656e", "#929ba4"
_FRAME_FILL, _FRAME_LINE = "#fff4ec", "#e8590c"
# A page of text is about as wide; beyond it, pictures grow in both directions.
_WIDTH, _ASPECT = 960.0, 0.6
_MARGIN, _HEADER, _FOOTER = 14.0, 52.0, 38.0
_COLUMN_GAP, _PANEL_GAP, _TURN = 32.0, 48.0, 14.0


class Panel:
    """One model's part of the picture."""

    def __init__(self, title: str, graph: onnx.GraphProto) -> None:
        flow = layout.boxes_of(graph)
        drawn = sum(len(box.operators) for box in flow)
        hidden = sum(node.op_type != "Constant" for node in graph.node) - drawn
        self.title = title
        self.subtitle = f"{len(graph.node):,} nodes"
        if hidden:
            self.subtitle += f"; {hidden:,} that prepare weights or sizes not drawn"
        self.kinds = {box.kind for box in flow}
        self.layers = layout.spelled_out(flow)
        self.ranks, self.lines = layout.ranks_of(flow, self.layers)
        self.columns: list[Column] = []

    def fold(self, height: float) -> float:
        """Makes columns of at most this height; returns their width with the gaps."""
        self.columns = layout.fold(self.ranks, self.layers, height)
        return sum(column.width + _COLUMN_GAP for column in self.columns) - _COLUMN_GAP


def paint(panels: Sequence[Panel], destination: Path) -> None:
    """Writes the picture, SVG or PNG by the destination's suffix."""
    width = _fold(panels)
    kinds = [kind for kind in _KINDS if any(kind in panel.kinds for panel in panels)]
    width = max(width, _MARGIN + sum(map(_legend_width, kinds)))
    top = _HEADER + _TURN
    height = max(column.height for panel in panels for column in panel.columns)
    height += top + _TURN + _FOOTER
    # Without the salt and the date, equal models would give different bytes.
    with matplotlib.rc_context(
        {"svg.hashsalt": "dynamo-moe", "font.family": "DejaVu Sans", "path.snap": False}
    ):
        figure = Figure(figsize=(width / 96, height / 96), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        left = _MARGIN
        for panel in panels:
            _text(axes, left, 20, panel.title, 14, bold=True, ha="left")
            _text(axes, left, 38, panel.subtitle, 11, color=_FAINT, ha="left")
            left = _paint_panel(axes, panel, left, top) + _PANEL_GAP
        _paint_legend(axes, kinds, height - _FOOTER / 2)
        metadata = {"Date" if destination.suffix.lower() == ".svg" else "Software": None}
        figure.savefig(destination, dpi=192, metadata=metadata)


def _fold(panels: Sequence[Panel]) -> float:
    """Makes the lowest columns that are not too wide together; returns the picture's width."""
    limit = 320.0
    while True:
        width = 2 * _MARGIN + _PANEL_GAP * (len(panels) - 1)
        width += sum(panel.fold(limit) for panel in panels)
        # A last column of a few boxes is better at the end of the one before.
        stubs = any(
            len(panel.columns) > 1 and panel.columns[-1].height < 0.2 * limit for panel in panels
        )
        if width <= max(_WIDTH, _ASPECT * limit) and not stubs:
            return width
        limit *= 1.02


def _paint_panel(axes: Axes, panel: Panel, left: float, top: float) -> float:
    """Returns the panel's right."""
    column_of: dict[Box, int] = {}
    rights = []
    for i, column in enumerate(panel.columns):
        for box in column.boxes:
            box.x += left - column.left
            box.y += top
            column_of[box] = i
        rights.append(left + column.width)
        left = rights[-1] + _COLUMN_GAP
    for layer in panel.layers:
        _paint_frames(axes, layer, column_of)
    curves, turning = [], dict[Box, float]()
    for a, b in panel.lines:
        i = column_of[a]
        if column_of[b] == i:
            curves.append(_curve(a, b))
        else:
            shift = turning.setdefault(a, 4.0 * sum(column_of[box] == i for box in turning))
            bottom = top + panel.columns[i].height + _TURN / 2 + shift
            curves.append(_turn(a, b, bottom, rights[i] + _COLUMN_GAP / 2 + shift, top - shift))
        if b.kind:
            x, y = b.x, b.y - b.height / 2
            curves.append(Curve([(x - 2.2, y - 3.5), (x, y - 0.5), (x + 2.2, y - 3.5)]))
    lines = Curve.make_compound_path(*curves)
    axes.add_patch(PathPatch(lines, fill=False, ec=_LINE, lw=0.9, joinstyle="round"))
    for box in column_of:
        if box.kind:
            _paint_box(axes, box)
    return rights[-1]


def _paint_frames(axes: Axes, layer: set[Box], column_of: dict[Box, int]) -> None:
    """A frame around a spelled-out MoE layer, or several if it goes on in the next column."""
    for i in sorted({column_of[box] for box in layer}):
        part = [box for box in layer if column_of[box] == i]
        left = min(box.x - box.width / 2 for box in part) - 7
        right = max(box.x + box.width / 2 for box in part) + 7
        top = min(box.y - box.height / 2 for box in part) - 8
        bottom = max(box.y + box.height / 2 for box in part) + 5
        _rounded(axes, left, top, right - left, bottom - top, 5, _FRAME_FILL, _FRAME_LINE)
    # The whole layer runs into its last box, so there is room beside that one.
    last = max(part, key=lambda box: box.y)
    at_right = right - last.x > last.x - left
    nodes = sum(len(box.operators) + box.prepared for box in layer)
    x, ha = (right - 7, "right") if at_right else (left + 7, "left")
    _text(axes, x, last.y, f"MoE: {nodes} nodes", 10.5, color=_FRAME_LINE, bold=True, ha=ha)


def _curve(a: Box, b: Box) -> Curve:
    """A line between neighbouring layers: down to the end of a's, then over to b."""
    y0, y1 = a.y + a.reach / 2, b.y - b.reach / 2
    middle = (y0 + y1) / 2
    points = [(a.x, a.y + a.height / 2), (a.x, y0)]
    points += [(a.x, middle), (b.x, middle), (b.x, y1)]
    points += [(b.x, b.y - b.height / 2)]
    return Curve(points, [Curve.MOVETO, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.LINETO])


def _turn(a: Box, b: Box, bottom: float, gutter: float, top: float) -> Curve:
    """A line from the foot of a column to the head of the next one, with round corners."""
    start, end = (a.x, a.y + a.height / 2), (b.x, b.y - b.height / 2)
    corners = [(a.x, bottom), (gutter, bottom), (gutter, top), (b.x, top)]
    points = [start]
    for before, corner, after in zip([start, *corners], corners, [*corners[1:], end], strict=False):
        points += [_towards(corner, before), corner, _towards(corner, after)]
    codes = [Curve.MOVETO, *[Curve.LINETO, Curve.CURVE3, Curve.CURVE3] * 4, Curve.LINETO]
    return Curve([*points, end], codes)


def _towards(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Six pixels from a, or half the way where that is less; the two share x or y."""
    length = abs(a[0] - b[0]) + abs(a[1] - b[1])
    part = min(6 / length, 0.5) if length else 0.0
    return a[0] + (b[0] - a[0]) * part, a[1] + (b[1] - a[1]) * part


def _paint_box(axes: Axes, box: Box) -> None:
    _, fill, line, ink = _KINDS[box.kind]
    radius = {"value": box.height / 2, "moe": 4.0}.get(box.kind, 2.5)
    left, top = box.x - box.width / 2, box.y - box.height / 2
    _rounded(axes, left, top, box.width, box.height, radius, fill, line)
    for i, text in enumerate(box.lines):
        y = box.y + (i - (len(box.lines) - 1) / 2) * layout.LINE_HEIGHT
        bold = box.kind == "moe" and i == 0
        _text(axes, box.x, y, text, layout.FONT_SIZE, color=ink, bold=bold)


def _paint_legend(axes: Axes, kinds: Sequence[str], y: float) -> None:
    x = _MARGIN
    for kind in kinds:
        label, fill, line, _ = _KINDS[kind]
        _rounded(axes, x, y - 5, 16, 10, 2.5, fill, line)
        _text(axes, x + 21, y, label, layout.FONT_SIZE, color=_FAINT, ha="left")
        x += _legend_width(kind)


def _legend_width(kind: str) -> float:
    return 21 + layout.text_width(_KINDS[kind][0], False) + 15


def _rounded(
    axes: Axes, x: float, y: float, width: float, height: float, radius: float, fill: str, line: str
) -> None:
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, style, fc=fill, ec=line, lw=0.75))


def _text(
    axes: Axes, x: float, y: float, text: str, size: float, *, bold: bool = False, **style: Any
) -> None:
    style = {"color": _INK, "ha": "center", "va": "center_baseline"} | style
    # matplotlib's sizes are points, 72 to the inch. A name may hold "$", which it takes for TeX.
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, size=size * 0.75, weight=weight, parse_math=False, **style)
