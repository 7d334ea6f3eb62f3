"""Files that are written whole or not at all, and progress bars on standard error."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file beside its place, or where a link leads, and renames it.

    A reader never sees a part.

    Raises:
        FileExistsError: If there is a device or the like, which the file would replace.
        OSError: If it cannot be written.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no file, and would be replaced by one; name another")
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
