"""A sampled profile of an export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyinstrument import Profiler

INTERVAL_S = 0.005  # Between two samples.


@contextlib.contextmanager
def profiled(wanted: bool) -> Iterator[Profiler | None]:
    """Samples the calls of the context's body, if ``wanted``.

    Raises:
        ImportError: If pyinstrument is not installed.
    """
    if not wanted:
        yield None
        return
    try:
        from pyinstrument import Profiler
    except ImportError as error:
        raise ImportError(
            "profiling needs pyinstrument: pip install 'dynamo-moe[profile]'"
        ) from error
    profiler = Profiler(INTERVAL_S, async_mode="disabled")
    with profiler:
        yield profiler


def save_profile(profiler: Profiler, path: Path) -> tuple[Path, ...]:
    """Writes ``<name>.speedscope.json`` and ``<name>.profile.html`` beside an ONNX file.

    Returns:
        The two files, for https://www.speedscope.app and for a browser; none if the export ended
        before the first sample.
    """
    from pyinstrument.renderers import HTMLRenderer, SpeedscopeRenderer

    if profiler.last_session is None or profiler.last_session.root_frame() is None:
        return ()
    files = {
        path.with_name(f"{path.name}.speedscope.json"): SpeedscopeRenderer(),
        path.with_name(f"{path.name}.profile.html"): HTMLRenderer(),
    }
    for file, renderer in files.items():
        file.write_text(profiler.output(renderer), encoding="utf-8")
    return tuple(files)
