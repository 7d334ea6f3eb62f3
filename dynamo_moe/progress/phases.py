"""Where an export is, and how long it has been in each of its phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

PHASES = ("capture", "decomposition", "translation", "optimization", "check", "serialization")
"""The phases of an export, in order."""

Progress = Callable[[str, int, int], None]
"""Called with a phase, how much of it is done, and how much there is: bytes of weights in
``serialization``; elsewhere, once, 0 of 0."""


class Stopwatch:
    """Seconds by phase, in :attr:`seconds`; a phase within another one pauses it."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.progress = progress
        self._entered: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time of the context's body to a phase."""
        self._charge()
        self._entered.append(name)
        self.report(0, 0)
        try:
            yield
        finally:
            self._charge()
            self._entered.pop()

    def report(self, done: int, total: int) -> None:
        """Passes on how much of the innermost phase is done."""
        if self.progress is not None and self._entered:
            self.progress(self._entered[-1], done, total)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Makes this the stopwatch of the phases entered until the context ends."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._entered:
            self.seconds[self._entered[-1]] += now - self._since
        self._since = now


_running: ContextVar[Stopwatch | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the export that is running, if one is."""
    watch = _running.get()
    with watch.phase(name) if watch else contextlib.nullcontext():
        yield


def report(done: int, total: int) -> None:
    """Says how much of the current phase is done."""
    if watch := _running.get():
        watch.report(done, total)
