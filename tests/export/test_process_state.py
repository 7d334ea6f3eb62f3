"""What an export changes in the process: restored, whoever else exports, and however it ends."""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_ir.schemas import OpSignature
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.process_state import ProcessState, collector_paused, exclusive, replaced
from dynamo_moe.tracing import shortcuts
from dynamo_moe.verification.models import outputs_of
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.placeholders import as_ir
from small_models import OpLayer, OwnRouter, mlp_model, op_model


class Settings:
    first, second = 1, 2


# Seconds to wait for another thread, where only a deadlock lasts as long.
LONG = 1000


def settings() -> tuple[int, int]:
    return Settings.first, Settings.second


BOTH = ProcessState(
    lambda: replaced(Settings, "first", lambda value: value + 10),
    lambda: replaced(Settings, "second", lambda value: value + 10),
)


def test_contexts_may_end_in_any_order() -> None:
    one, other = BOTH(), BOTH()
    one.__enter__()
    other.__enter__()
    assert settings() == (11, 12)
    one.__exit__(None, None, None)
    assert settings() == (11, 12)
    other.__exit__(None, None, None)
    assert settings() == (1, 2)


def test_an_error_restores() -> None:
    with pytest.raises(ValueError, match="midway"), BOTH():
        raise ValueError("midway")
    assert settings() == (1, 2)


def test_a_change_that_fails_undoes_those_before_it() -> None:
    @contextmanager
    def failing() -> Iterator[None]:
        assert settings() == (11, 2)
        raise OSError("no such change")
        yield

    state = ProcessState(lambda: replaced(Settings, "first", lambda value: value + 10), failing)
    for _ in range(2):  # The second time, too: nothing is taken for entered.
        with pytest.raises(OSError, match="no such change"), state():
            pass
        assert settings() == (1, 2)
    in_other_thread(lambda: exclusive().__enter__())  # Nobody holds the lock.


def test_threads_take_turns() -> None:
    seen: list[tuple[int, int]] = []

    def other() -> None:
        with BOTH():
            seen.append(settings())

    with BOTH():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=0.2)
        assert not seen
    thread.join()
    assert seen == [(11, 12)]
    assert settings() == (1, 2)


def test_threads_side_by_side() -> None:
    """Also beside a thread that holds the lock of the others."""
    state = ProcessState(
        lambda: replaced(Settings, "first", lambda value: value + 10), side_by_side=True
    )
    inside, leave = threading.Event(), threading.Event()

    def first_in_last_out() -> None:
        with state():
            inside.set()
            assert leave.wait(timeout=LONG)

    def others() -> None:
        with state():
            assert settings() == (11, 2)

    with exclusive():
        thread = threading.Thread(target=first_in_last_out)
        thread.start()
        assert inside.wait(timeout=LONG)
        in_other_thread(others)
        assert settings() == (11, 2)
        leave.set()
        thread.join(timeout=LONG)
    assert settings() == (1, 2)


def test_states_that_share_a_change() -> None:
    shared = ProcessState(lambda: replaced(Settings, "first", lambda value: value + 10))
    one, other = ProcessState(shared)(), ProcessState(shared)()
    one.__enter__()
    other.__enter__()
    assert settings() == (11, 2)
    one.__exit__(None, None, None)
    assert settings() == (11, 2)
    other.__exit__(None, None, None)
    assert settings() == (1, 2)


def in_other_thread(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=LONG)
    assert not thread.is_alive(), "a deadlock"


# Exports.


def process() -> dict[str, Any]:
    """Returns what an export changes meanwhile."""
    casts = ("bfloat16", "double", "float", "half")
    return {
        **{name: vars(nn.Module)[name] for name in casts},
        **{name: vars(SymNode)[name] for name in tracer._ARITHMETIC},
        "log_guard": vars(ShapeEnv)["_log_guard"],
        "from_op_schema": vars(OpSignature)["from_op_schema"],
        "is_causal": getattr(transformer, "_detect_is_causal_mask", None),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "sizes of one": _config.backed_size_oblivious,
        "stack traces": getattr(
            getattr(torch.fx, "config", None), "do_not_emit_stack_traces", None
        ),
        "logger": logging.getLogger("torch.onnx._internal.exporter._registration").level,
        "filters": tuple(warnings.filters),
        "frozen": gc.get_freeze_count(),
        "collecting": (gc.isenabled(), gc.get_threshold()),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().numpy().tobytes(),
    }


def test_capture_and_decomposition_may_end_in_any_order() -> None:
    before = process()
    one, other = shortcuts.capturing(), shortcuts.decomposing()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert vars(SymNode)["_add"] is not before["_add"]
    assert _config.backed_size_oblivious
    other.__exit__(None, None, None)
    assert process() == before


def threads_of_a_new_thread() -> int:
    counts: list[int] = []
    in_other_thread(lambda: counts.append(torch.get_num_threads()))
    return counts[0]


def test_lazy_weights_are_written_beside_an_export_and_each_other() -> None:
    """The number of PyTorch's threads is restored, for each thread that runs."""
    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        weight = as_ir(LazyTensor.of_memory(torch.arange(12.0)), "weight")
        file = io.BytesIO()
        with exclusive():
            in_other_thread(lambda: weight.tofile(file))
        assert file.getvalue() == weight.tobytes()
        entered, leave = threading.Event(), threading.Event()
        after: list[int] = []

        class Slow(io.BytesIO):
            def write(self, data: Any) -> int:
                entered.set()
                assert leave.wait(timeout=LONG)
                return super().write(data)

        def write_slowly() -> None:
            torch.set_num_threads(2)
            weight.tofile(Slow())
            after.append(torch.get_num_threads())

        thread = threading.Thread(target=write_slowly)
        thread.start()
        assert entered.wait(timeout=LONG)
        assert threads_of_a_new_thread() == 1
        weight.tofile(io.BytesIO())
        leave.set()
        thread.join(timeout=LONG)
        assert (after, torch.get_num_threads(), threads_of_a_new_thread()) == ([2], 3, 2)
    finally:
        torch.set_num_threads(own)


def test_verify_runs_a_model_while_no_other_thread_exports() -> None:
    ran = threading.Event()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.set()
            return x

    with exclusive():
        thread = threading.Thread(target=lambda: outputs_of(Model(), (torch.ones(1),), 1, {}))
        thread.start()
        assert not ran.wait(timeout=0.2)
    thread.join(timeout=LONG)
    assert ran.is_set()


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        if y.shape[0] > 1:
            raise ValueError("midway")
        return y


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    return {
        "mlp": (mlp_model(), torch.randn(3, 16)),
        "router": (op_model(OwnRouter(activation="silu", gated=True)), torch.randn(3, 16)),
        "transformer": (
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
        ),
        "fails": (Fails(), torch.randn(3, 16)),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* MoE modules are not converted")
def test_four_exports_at_once(tmp_path: Path) -> None:
    def export(name: str, folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        model, example = prepared[name]
        path = folder / f"{name}.onnx"
        if name == "fails":
            with pytest.raises(dynamo_moe.ExportError, match="midway"):
                dynamo_moe.export(model, example, path)
            return "failed"
        dynamo_moe.export(model, example, path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    prepared = models()
    before = process()
    alone = {name: export(name, tmp_path / "alone") for name in prepared}
    assert process() == before
    together: dict[str, str] = {}
    start = threading.Barrier(len(prepared))

    def run(name: str) -> None:
        start.wait()
        together[name] = export(name, tmp_path / "together")

    threads = [threading.Thread(target=run, args=(name,)) for name in prepared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert process() == before


def test_an_export_within_another(tmp_path: Path) -> None:
    """From a callback, and from the forward that is being traced."""
    inner = op_model(OpLayer())

    class Exports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            (tmp_path / "ran").touch()  # An export undoes what a forward changes in objects.
            with suppress(Exception):  # Whatever a trace within a trace raises.
                dynamo_moe.export(inner, torch.ones(3, 16), tmp_path / "traced.onnx")
            return self.linear(x)

    def progress(phase: str, done: int, total: int) -> None:
        if phase not in seen:
            seen.append(phase)
            dynamo_moe.export(inner, example, tmp_path / f"{phase}.onnx")

    def outer() -> None:
        with suppress(dynamo_moe.ExportError):
            dynamo_moe.export(exporting, example, tmp_path / "outer.onnx")

    seen: list[str] = []
    example, exporting = torch.randn(3, 16), Exports()
    before = process()
    in_other_thread(outer)
    assert (tmp_path / "ran").exists()
    assert process() == before
    in_other_thread(
        lambda: dynamo_moe.export(inner, example, tmp_path / "inner.onnx", progress=progress)
    )
    assert {"capture", "translation", "serialization"} <= {*seen}
    files = {path.read_bytes() for path in tmp_path.glob("*.onnx") if path.stem in {*seen, "inner"}}
    assert len(files) == 1
    assert process() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_leave_the_garbage_collector_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_modules_are_loaded_without_the_garbage_collector() -> None:
    code = (
        "import gc, dynamo_moe\n"
        "passes = []\n"
        "gc.callbacks.append(lambda phase, info: passes.append(phase))\n"
        "dynamo_moe.inspect\n"
        "del gc.callbacks[:]\n"
        "print(len(passes), gc.isenabled())"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    passes, enabled = run.stdout.split()
    assert int(passes) < 10, "those that are due afterwards; without the pause there are hundreds"
    assert enabled == "True"
