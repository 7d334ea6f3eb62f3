"""A sampled profile as a flame graph that any browser opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pyinstrument.frame import Frame

__all__ = ["COLORS", "flame_graph"]

COLORS = {
    "capture": "#9ecae1",
    "decomposition": "#fdae6b",
    "translation": "#a1d99b",
    "optimization": "#bcbddc",
    "check": "#dadaeb",
    "serialization": "#fc9272",
}
_OTHER = "#d9d9d9"
_WIDTH, _ROW, _TOP, _MARGIN = 1400, 17, 62, 10
# Calls narrower than this are left out.
_NARROWEST = 2.0
_CHARACTER = 6.6


def flame_graph(root: Frame, phases: Mapping[tuple[str, str], str], title: str) -> str:
    """Returns an SVG image: a box per call, as wide as its time, above what it calls.

    Args:
        root: The outermost call.
        phases: By module file and function: the phase that its calls, and theirs, belong to.
        title: The headline.
    """
    boxes = list(_boxes(root, phases, None, 0.0, 0))
    scale = (_WIDTH - 2 * _MARGIN) / (root.time or 1.0)
    depth = max(box[2] for box in boxes) + 1
    height = _TOP + depth * _ROW + 8
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for place, (name, color) in enumerate(COLORS.items()):
        left = _MARGIN + place * 150
        lines.append(f'<rect x="{left}" y="34" width="13" height="13" fill="{color}"/>')
        lines.append(f'<text x="{left + 18}" y="45">{name}</text>')
    for frame, start, row, phase in boxes:
        width = frame.time * scale
        if width < _NARROWEST:
            continue
        x, y = _MARGIN + start * scale, _TOP + row * _ROW
        label = f"{frame.function} ({frame.file_path_short or ''})"
        detail = f"{label}: {frame.time:.3f} s, {100 * frame.time / (root.time or 1):.1f} %"
        text = label[: int(width / _CHARACTER)] if width > 4 * _CHARACTER else ""
        color = COLORS.get(phase or "", _OTHER)
        lines.append(
            f'<g><title>{escape(detail)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW - 1}" fill="{color}" rx="1"/>'
            f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(text)}</text></g>'
        )
    return "\n".join([*lines, "</svg>\n"])


def _boxes(
    frame: Frame, phases: Mapping[tuple[str, str], str], phase: str | None, start: float, row: int
) -> Iterator[tuple[Frame, float, int, str | None]]:
    """Yields calls with where they begin, in seconds, their depth and their phase."""
    pending = [(frame, phase, start, row)]
    while pending:
        frame, phase, start, row = pending.pop()
        file = (frame.file_path or "").rsplit("/", 1)[-1]
        phase = phases.get((file, frame.function), phase)
        yield frame, start, row, phase
        for child in frame.children:
            pending.append((child, phase, start, row + 1))
            start += child.time
