"""An export's phases on the terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dynamo_moe.progress import phases

DELAY_S = 2.0
"""A shorter export shows nothing."""

_DOING = {
    "capture": "Tracing",
    "decomposition": "Decomposing",
    "translation": "Translating",
    "optimization": "Optimizing",
    "check": "Checking",
    "serialization": "Writing",
}


@contextlib.contextmanager
def shown(name: str, console: Console, delay: float = DELAY_S) -> Iterator[phases.Progress]:
    """Shows the phase that an export is in; yields the function that the export calls.

    Nothing is shown where the console is a file, or quiet.
    """
    if not console.is_interactive:
        yield lambda phase, done, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
    amount = TextColumn("{task.fields[amount]}")
    bar = Progress(*columns, amount, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(f"Exporting {name}", total=None, amount="")
    timer = threading.Timer(delay, bar.start)
    timer.daemon = True

    def update(phase: str, done: int, total: int) -> None:
        number = phases.PHASES.index(phase) + 1
        bar.update(
            task,
            description=f"{number}/{len(phases.PHASES)} {_DOING[phase]} {name}",
            completed=done,
            total=total or None,
            amount=f"{decimal(done)} of {decimal(total)}" if total else "",
        )

    timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
