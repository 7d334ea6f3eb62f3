"""A GPU of the stand-in driver whose streams do nothing until they are asked to.

What is enqueued waits in queues. They are worked off in an order that a test chooses, among those
that the events permit: so a missing event leads to wrong numbers, or to reading what was never
written. A capture is kept, and can be enqueued again.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from interpreted_gpu import InterpretedGpu
from standin import Operation, Standin

#: Chooses among the streams that could go on, in the order in which they were first used.
Order = Callable[[Sequence[int]], int]


def first_used(streams: Sequence[int]) -> int:
    """The call's stream first, the second stream only when that one waits."""
    return streams[0]


def last_used(streams: Sequence[int]) -> int:
    """The second stream first."""
    return streams[-1]


@dataclass(frozen=True)
class _Work:
    """A launch or a memset on a stream, or the end of what came before an event's record.

    Attributes:
        stream: Where it is.
        run: Does it.
        marks: What is then reached, if it is a record.
        awaits: What must have been reached.
    """

    stream: int
    run: Callable[[], None] | None = None
    marks: int | None = None
    awaits: int | None = None


class StreamsGpu(InterpretedGpu):
    """Handles what the launcher enqueues on the stand-in driver.

    Attributes:
        graph: What the last capture has enqueued.
    """

    def __init__(self, driver: Standin) -> None:
        super().__init__()
        self._driver = driver
        self._queues: dict[int, deque[_Work]] = {}
        self._marks = 0
        # Each event's last record.
        self._records: dict[int, int] = {}
        self._reached: set[int] = set()
        self._capture: int | None = None
        self.graph: list[_Work] = []
        driver.on_launch(self)
        driver.on_operation(self._operation)

    def __call__(self, launch: Any) -> None:
        """Enqueues a launch."""
        self._enqueue(_Work(launch.stream, run=self.bound(launch)))

    def _operation(self, operation: Operation) -> None:
        stream, event = operation.stream, operation.event
        match operation.kind:
            case "record":
                self._marks += 1
                self._records[event] = self._marks
                self._enqueue(_Work(stream, marks=self._marks))
            case "wait":
                # Only what was recorded before the wait is waited for.
                self._enqueue(_Work(stream, awaits=self._records[event]))
            case "set":
                given = operation.address, operation.value, operation.size
                self._enqueue(_Work(stream, run=lambda: ctypes.memset(*given)))
            case "synchronize":
                self._work_off(lambda: bool(self._queues.get(stream)), first_used)
            case "synchronize all":
                self.synchronize()

    def _enqueue(self, work: _Work) -> None:
        if self._capture is not None:
            self.graph.append(work)
        else:
            self._queues.setdefault(work.stream, deque()).append(work)

    def capture(self, stream: int, enqueue: Callable[[], None]) -> list[_Work]:
        """Returns what a call enqueues on a captured stream, which it must all join in the end."""
        self.graph = []
        self._capture = self._driver.begin_capture(stream)
        try:
            enqueue()
        finally:
            self._driver.end_capture(self._capture)
            self._capture = None
        joined = _joined(self.graph, stream)
        assert joined == len(self.graph), f"{len(self.graph) - joined} operations are not joined"
        return self.graph

    def replay(self, graph: Iterable[_Work]) -> None:
        """Enqueues a captured graph."""
        marks: dict[int, int] = defaultdict(self._new_mark)
        for work in graph:
            changed = {
                name: None if mark is None else marks[mark]
                for name, mark in (("marks", work.marks), ("awaits", work.awaits))
            }
            self._enqueue(_Work(work.stream, work.run, **changed))

    def _new_mark(self) -> int:
        self._marks += 1
        return self._marks

    def synchronize(self, order: Order = first_used) -> None:
        """Works off all queues."""
        self._work_off(lambda: any(self._queues.values()), order)

    def _work_off(self, goes_on: Callable[[], bool], order: Order) -> None:
        while goes_on():
            ready = [stream for stream in self._queues if self._can_go_on(stream)]
            assert ready, "the streams wait for one another"
            work = self._queues[order(ready)].popleft()
            if work.run is not None:
                work.run()
            if work.marks is not None:
                self._reached.add(work.marks)

    def _can_go_on(self, stream: int) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0].awaits is None or queue[0].awaits in self._reached)


def _joined(graph: Sequence[_Work], stream: int) -> int:
    """How much of a graph has ended when the stream that was captured has."""
    needed, marks, count = {stream}, set[int](), 0
    for work in reversed(graph):
        if work.marks in marks:
            needed.add(work.stream)
        # Ahead of what is needed on a stream, all of it is.
        if work.stream in needed:
            count += 1
            if work.awaits is not None:
                marks.add(work.awaits)
    return count
