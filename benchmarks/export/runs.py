"""One export, in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks._export_cases import OURS, Row
from benchmarks._export_models import SUBJECTS, Checkpoint, Subject

OWN_STEPS = "own steps"


Runner = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def runner(quick: bool) -> Iterator[Runner]:
    """Yields :func:`run` in a process for each call; a quick run has one process for all."""

    def alone(*arguments: Any) -> dict[str, Any]:
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            try:
                return processes.submit(run, *arguments).result()
            except BrokenProcessPool:
                return {"error": "the process was killed, perhaps as memory ran out"}

    if not quick:
        yield alone
        return
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        yield lambda *arguments: processes.submit(run, *arguments).result()


def run(
    model: str, row: Row, exporter: str, quick: bool, check: bool, folder: Path | None
) -> dict[str, Any]:
    """Exports in this process.

    Args:
        model: Of a case.
        row: What to export.
        exporter: And by which.
        quick: A tiny model, and nothing before it.
        check: Compare the file with PyTorch.
        folder: Where to write.
    """
    _silence()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        if not quick:
            small, started = replace(row, blocks=1, batch=2, length=4), time.perf_counter()
            with contextlib.suppress(Exception):  # What fails for a tiny model does so again.
                _export(SUBJECTS[model](small, tiny=True), exporter, place / "first", {})
            found["first export s"] = time.perf_counter() - started
        subject = SUBJECTS[model](row, tiny=quick)
        try:
            path = _export(subject, exporter, place / "timed", found)
        except Exception as error:  # Any layer may be refused, for whatever reason.
            return {"error": reason(error)}
        found["file bytes"] = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        if check:
            found |= _nodes(path)
            try:
                found |= subject.check(path)
            except Exception as error:
                found["check failed"] = reason(error)
    return found


def _export(subject: Subject, exporter: str, folder: Path, found: dict[str, Any]) -> Path:
    """Exports, and adds time and memory to ``found``."""
    import torch

    folder.mkdir()
    if isinstance(subject, Checkpoint):
        subject.write(folder)
    subject.prepare(exporter)
    gc.collect()
    _reset_peak()
    before = _status("VmRSS")
    with _watched() as way, torch.no_grad():
        started, used = time.perf_counter(), time.process_time()
        subject.export(exporter, folder)
        found["seconds"] = time.perf_counter() - started
        found["cpu seconds"] = time.process_time() - used
    found["peak bytes"] = _status("VmHWM") - before
    if exporter == OURS:
        found["way"] = way[-1] if way else OWN_STEPS
    return folder / "model.onnx"


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Notes when ``dynamo_moe.export`` leaves the work to ``torch.onnx.export``, and why."""
    import torch

    way: list[str] = []
    reasons: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            reasons.append(record.getMessage() if cause is None else reason(cause))

    original = torch.onnx.export

    def noting(*args: Any, **options: Any) -> Any:
        way.append(": ".join(["torch.onnx.export", *reasons]))
        return original(*args, **options)

    log, listener = logging.getLogger("dynamo_moe._exporter"), Listener()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(listener)
    try:
        with mock.patch.object(torch.onnx, "export", noting):
            yield way
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


def _nodes(path: Path) -> dict[str, int]:
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    model = ir.load(path)
    main_graph = len(model.graph)
    InlinePass()(model)
    return {
        "nodes": main_graph,
        "nodes, functions inlined": sum(1 for _ in model.graph.all_nodes()),
    }


def reason(error: BaseException) -> str:
    """An error in one line; of a chain the first, which the exporters wrap at length."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    text = re.sub(r"/\S+/", "", text)  # Of a path the name alone.
    return f"{type(error).__name__}: {text}"[:300]


def _silence() -> None:
    """Drops what the exporters and transformers print in this process."""
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _reset_peak() -> None:
    """Lets ``VmHWM`` start again from here (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Bytes of a field of this process's status (Linux)."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
