"""Pictures of results, without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL = 7.5  # points


@contextmanager
def panels(
    path: Path, count: int, columns: int, size: tuple[float, float], title: str
) -> Iterator[list[Any]]:
    """Yields matplotlib's axes of a size in inches, a few a row, then writes them as one figure."""
    from matplotlib.figure import Figure

    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    yield axes
    for used in axes:
        used.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def ratio_bars(
    panel: Any, groups: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str]
) -> None:
    """Draws ratios to ours as horizontal bars that begin at 1; to the right is more than ours.

    Bars of a group stand together, beside its label. The first of the colors is ours.
    """
    from matplotlib.ticker import LogLocator

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
                f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}",
                (ratio, place),
                (3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=SMALL,
            )
            place += 1
        place += 0.8
    ours, color = next(iter(colors.items()))
    panel.axvline(1, color=color, linewidth=2, label=ours)
    panel.set_xscale("log")
    panel.margins(x=0.12)
    low, high = panel.get_xlim()
    panel.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7))
    )
    panel.xaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.set_yticks(list(labels), list(labels.values()), fontsize=SMALL)
    panel.invert_yaxis()
