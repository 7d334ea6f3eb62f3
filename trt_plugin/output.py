"""Files that are written whole or not at all, and progress bars on standard error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_bars", "write_whole"]


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file beside its place and renames it: a reader never sees a part.

    Raises:
        OSError: If it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        beside = Path(folder) / path.name
        beside.write_bytes(content)
        beside.replace(path)


def progress_bars(*, shown: bool) -> Progress:
    """Returns rich's display of bars, which is empty where standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
