"""Pictures of results, without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TICKS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]


@contextmanager
def panels(
    path: Path, count: int, columns: int, size: tuple[float, float], title: str
) -> Iterator[list[Any]]:
    """Yields matplotlib's axes, then writes them as one figure.

    Args:
        path: A file that matplotlib can write.
        count: How many axes.
        columns: Most of them in a row.
        size: Inches of each.
        title: The figure's.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(size[0] * columns, size[1] * rows),
        squeeze=False,
        layout="constrained",
    )
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    yield list(axes.flat[:count])
    for used in axes.flat[:count]:
        used.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def ratio_bars(
    panel: Any, groups: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str]
) -> None:
    """Draws ratios to ours as horizontal bars that begin at 1; to the right is more than ours.

    Args:
        panel: Matplotlib's axes.
        groups: A label and the ratios by name; bars of a group stand together.
        colors: By name, ours first.
    """
    labels: dict[float, str] = {}
    place = 0.0
    named: set[str] = set()
    for label, ratios in groups:
        labels[place + (len(ratios) - 1) / 2] = label
        for name, ratio in ratios.items():
            legend = None if name in named else name
            named.add(name)
            panel.barh(place, ratio - 1, 0.85, left=1, color=colors[name], label=legend)
            panel.annotate(
                f"{ratio:.2g}",
                (ratio, place),
                (3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=7.5,
            )
            place += 1
        place += 0.8
    ours, color = next(iter(colors.items()))
    panel.axvline(1, color=color, linewidth=2, label=ours)
    panel.set_xscale("log")
    panel.margins(x=0.12)
    low, high = panel.get_xlim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    panel.invert_yaxis()
    panel.legend(fontsize=7.5)
