"""A CUDA device for the operators' implementation with experts in host memory, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops.offload import calls as offload_calls
from custom_ops.offload.calls import _CACHES


class Stream:
    """A stream that notes which others it waits for; an event is the stream that recorded it."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority
        self.waited: list[Stream] = []

    def wait_event(self, event: Stream) -> None:
        if event is not self:
            self.waited.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Stream:
        return self


def mocked_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yields the device: its current stream, whether a graph captures it, what is pinned."""
    state = {"stream": Stream(), "capturing": False, "pinned": True}

    @contextmanager
    def on(stream):
        yield

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: state["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: state["pinned"])
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    _CACHES.clear()
    offload_calls._plan.cache_clear()
    yield state
    _CACHES.clear()
