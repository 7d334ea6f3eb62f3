"""The GPU benchmark's results as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._gpu_cells import DENSE, FUSED, GROUPED, OURS
from benchmarks._gpu_shapes import SHAPES

__all__ = ["plot"]

_STYLES: Mapping[str, Any] = {
    OURS: {"color": "#0b6e4f", "marker": "o", "linewidth": 2, "zorder": 3},
    GROUPED: {"color": "#c2570c", "marker": "s"},
    FUSED: {"color": "#3b5bdb", "marker": "^"},
    DENSE: {"color": "#868e96", "marker": "x"},
}
_COLUMNS = 4


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws microseconds over tokens, one panel a layer, from a result's JSON.

    Args:
        result: What ``benchmarks.gpu_moe --json`` writes.
        path: A file that matplotlib can write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    uniform = [cell for cell in result["cells"] if cell["routing"] == "uniform"]
    names = list(dict.fromkeys(cell["shape"] for cell in uniform))
    columns = min(_COLUMNS, max(1, len(names)))
    rows = max(1, -(-len(names) // columns))
    figure, panels = plt.subplots(
        rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels.flat, names, strict=False):
        cells = [cell for cell in uniform if cell["shape"] == name]
        panel.plot(
            [cell["count"] for cell in cells],
            [cell["floor us"]["split"] for cell in cells],
            color="black",
            linestyle="--",
            label="floor",
        )
        for version, style in _STYLES.items():
            timed = [cell for cell in cells if version in cell["cold us"]]
            if timed:
                panel.plot(
                    [cell["count"] for cell in timed],
                    [cell["cold us"][version]["median"] for cell in timed],
                    markersize=4,
                    label=version,
                    **style,
                )
        shape = SHAPES[name]
        panel.set(
            title=shape.title,
            xlabel="images" if shape.is_vision else "tokens",
            xscale="log",
            yscale="log",
        )
        panel.set_ylabel("us")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(names) :]:
        panel.set_axis_off()
    if names:
        panels.flat[0].legend(fontsize="small")
    when = result["date"][:10]
    figure.suptitle(f"{result['hardware']}, {result['dtype']}, cold L2, {when}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
