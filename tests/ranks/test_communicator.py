"""NCCL's communicator for engines of ranks, of a library that stands in for NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import trt_plugin
from fake_tensorrt import Engine
from nccl_standin import nccl_standin
from trt_plugin.engine import EngineError, communicator
from trt_plugin.engine.communicator import Communicator

pytest_plugins = ("fake_tensorrt",)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(communicator, "_LIBRARY", str(nccl_standin()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "model.engine").write_bytes(b"an engine")
    return tmp_path / "model.engine"


@pytest.mark.usefixtures("tensorrt")
def test_a_runner_gives_its_context_the_communicator(engine: Path, group: Any) -> None:
    runner = trt_plugin.Runner(engine, group=group)
    assert type(runner._context.communicator).__name__ == "PyCapsule"


@pytest.mark.usefixtures("tensorrt")
def test_a_communicator_that_is_refused(
    engine: Path, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "refuses_communicators", True)
    with pytest.raises(EngineError, match="does not take the communicator"):
        trt_plugin.Runner(engine, group=group)
    monkeypatch.delattr(Engine, "set_communicator")
    monkeypatch.delattr(Engine.__mro__[1], "__getattr__")
    with pytest.raises(EngineError, match=r"needs TensorRT 10\.16 or later"):
        trt_plugin.Runner(engine, group=group)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NCCL_STANDIN_VERSION", "21805", r"from 2\.19 to below 3; .* has the version code 21805"),
        ("NCCL_STANDIN_VERSION", "30001", "version code 30001"),
        ("NCCL_STANDIN_NO_ID", "1", "ncclGetUniqueId failed: unhandled system error"),
    ],
)
def test_failures(
    group: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(EngineError, match=message):
        Communicator(group)


def test_without_nccl(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_LIBRARY", "libnccl_that_is_nowhere.so.2")
    with pytest.raises(EngineError, match="needs NCCL, and libnccl_that_is_nowhere"):
        Communicator(group)
