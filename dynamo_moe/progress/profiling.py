"""Where an export's time goes: seconds by phase, and a flame graph of the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_moe.progress.flame_graph import flame_graph

if TYPE_CHECKING:
    from pyinstrument import Profiler

__all__ = ["profiled", "save_profile"]

INTERVAL_S = 0.005
"""Between two looks at what is running."""

_FUNCTIONS = {
    ("capture.py", "capture"): "capture",
    ("decomposition.py", "decomposed"): "decomposition",
    ("_fx_passes.py", "decompose_with_registry"): "decomposition",
    ("translate.py", "translate"): "translation",
    ("exporting.py", "_optimize"): "optimization",
    ("checking.py", "check"): "check",
    ("model_files.py", "save_model"): "serialization",
}


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
    profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def save_profile(profiler: Profiler, path: Path, seconds: Mapping[str, float]) -> tuple[Path, ...]:
    """Writes ``<name>.speedscope.json`` and ``<name>.svg`` beside an ONNX file.

    Args:
        profiler: Of an export that is over.
        path: The ONNX file.
        seconds: By phase.

    Returns:
        The two files: for https://www.speedscope.app, and for a browser; none of an export that
        was over before the first look.
    """
    from pyinstrument.renderers import SpeedscopeRenderer

    session = profiler.last_session
    root = session.root_frame() if session is not None else None
    if root is None:
        return ()  # Too short to be seen.
    shares = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    scope = path.with_name(f"{path.name}.speedscope.json")
    image = path.with_name(f"{path.name}.profile.svg")
    for file, text in (
        (scope, profiler.output(SpeedscopeRenderer())),
        (image, flame_graph(root, _FUNCTIONS, f"Export of {path.name}: {shares}")),
    ):
        beside = file.with_name(f".{file.name}.part")
        beside.write_text(text)
        beside.replace(file)
    return scope, image
