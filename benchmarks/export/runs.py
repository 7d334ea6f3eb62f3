"""One export, in a process of its own."""

from __future__ import annotations

import compileall
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

from benchmarks.common.onnx_files import count_nodes, file_bytes
from benchmarks.common.timing import fresh_processes, reset_peak, resident_bytes
from benchmarks.export.cases import OURS, Row
from benchmarks.export.models import SUBJECTS, Checkpoint, Subject

OWN_STEPS = "own steps"
ROOT = Path(__file__).parents[2]
PACKAGES = ("custom_ops", "dynamo_moe")

Runner = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def runner(quick: bool) -> Iterator[Runner]:
    """Yields :func:`run` in a new process for each call; a quick run has one process for all.

    They find our modules compiled, as pip leaves those of all packages.
    """
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=2)

    def alone(*arguments: Any) -> dict[str, Any]:
        with fresh_processes() as processes:
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
    """Exports in this process, and returns what that took or why it failed.

    A quick run exports a tiny model, and nothing before it; a row that is the first export of its
    process, nothing before it either. With ``check`` the file is compared
    with PyTorch. It is written to ``folder``, else to the system's for temporary files.
    """
    _silence()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        if not (quick or row.first):
            small, started = replace(row, blocks=1, batch=2, length=4), time.perf_counter()
            with contextlib.suppress(Exception):  # What fails for a tiny model does so again.
                _export(SUBJECTS[model](small, True), exporter, place / "first", {})
            found["first export s"] = time.perf_counter() - started
        subject = SUBJECTS[model](row, quick)
        try:
            path = _export(subject, exporter, place / "timed", found)
        except Exception as error:  # Any layer may be refused, for whatever reason.
            return {"error": reason(error)}
        found["file bytes"] = file_bytes(path)
        if check:
            found |= count_nodes(path)
            try:
                found |= subject.check(path)
            except Exception as error:  # The runtime may refuse the file: that is a result.
                found["check failed"] = reason(error)
    return found


def _export(
    subject: Subject | Checkpoint, exporter: str, folder: Path, found: dict[str, Any]
) -> Path:
    """Exports, and adds time and memory to ``found``."""
    import torch

    folder.mkdir()
    subject.prepare(exporter, folder)
    gc.collect()
    reset_peak()
    before = resident_bytes()
    with _watched() as ways, torch.no_grad():
        started, used = time.perf_counter(), time.process_time()
        report = subject.export(exporter, folder)
        found["seconds"] = time.perf_counter() - started
        found["cpu seconds"] = time.process_time() - used
    found["peak bytes"] = resident_bytes(peak=True) - before
    if exporter == OURS:
        found["way"] = ways[-1] if ways else OWN_STEPS
        found["writing s"] = report.phases["serialization"]
    return folder / "model.onnx"


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Notes when ``dynamo_moe.export`` leaves the work to ``torch.onnx.export``, and why."""
    import torch

    ways: list[str] = []
    reasons: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            reasons.append(record.getMessage() if cause is None else reason(cause))

    original = torch.onnx.export

    def noting(*args: Any, **options: Any) -> Any:
        ways.append(": ".join(["torch.onnx.export", *reasons]))
        return original(*args, **options)

    log, listener = logging.getLogger("dynamo_moe"), Listener()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(listener)
    try:
        with mock.patch.object(torch.onnx, "export", noting):
            yield ways
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


def reason(error: BaseException) -> str:
    """Returns an error in one line: the first of its chain, without colours and folders."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    text = re.sub(r"/\S+/", "", text)
    return f"{type(error).__name__}: {text}"[:300]


def _silence() -> None:
    """Drops what the exporters and transformers print in this process."""
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
