"""Phases of an export: their times, their display, and profiles."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import dynamo_moe
from dynamo_moe.models import DroplessMoEMlp
from dynamo_moe.progress.display import shown
from dynamo_moe.progress.phases import PHASES, Stopwatch, phase, report
from small_models import Residual


def export(path: Path, **options: object) -> dynamo_moe.ExportReport:
    model = nn.Sequential(Residual(16, DroplessMoEMlp(16, 24, num_experts=4, top_k=2)))
    dynamo_moe.convert(model)
    return dynamo_moe.export(model, (torch.randn(2, 5, 16),), path, **options)  # type: ignore[arg-type]


def test_a_phase_within_another_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = Stopwatch()
    with watch.running(), phase("translation"):
        now = 1.0
        with phase("decomposition"):
            now = 6.0
        now = 9.0
    taken = {name: seconds for name, seconds in watch.seconds.items() if seconds}
    assert taken == {"translation": 4.0, "decomposition": 5.0}


def test_phases_without_an_export_do_nothing() -> None:
    with phase("capture"):
        report(1, 2)


def test_every_phase_takes_part_of_the_time(tmp_path: Path) -> None:
    written = export(tmp_path / "model.onnx")
    assert tuple(written.phases) == PHASES
    assert all(seconds > 0 for seconds in written.phases.values())
    assert sum(written.phases.values()) <= written.seconds
    assert written.profile == ()


def test_an_export_says_which_phase_it_begins(tmp_path: Path) -> None:
    calls: list[str] = []
    export(tmp_path / "model.onnx", progress=lambda name, done, total: calls.append(name))
    assert tuple(dict.fromkeys(calls)) == ("capture", "translation", "decomposition", *PHASES[3:])


def test_a_profile_opens_in_its_viewers(tmp_path: Path) -> None:
    written = export(tmp_path / "model.onnx", profile=True)
    scope, page = written.profile
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", scope.name, page.name}
    frames = json.loads(scope.read_text())["shared"]["frames"]
    assert "capture" in {frame["name"] for frame in frames}
    assert page.name == "model.onnx.profile.html"
    assert "dynamo_moe/tracing/capture.py" in page.read_text()
    console = Console(file=io.StringIO(), width=120)
    console.print(written)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in PHASES)


def test_profiling_names_the_package_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    with pytest.raises(ImportError, match=r"dynamo-moe\[profile\]"):
        export(tmp_path / "model.onnx", profile=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_only_a_long_export_is_shown(delay: float) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def written() -> str:
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    with shown("model.onnx", console, delay) as update:
        update("capture", 0, 0)
        update("serialization", 2_000_000, 4_000_000)
        time.sleep(0.3)
        while not delay and "of 4.0 MB" not in written():
            time.sleep(0.01)
    text = written()
    if delay:
        assert text == ""
    else:
        assert "6/6 Writing model.onnx" in text
        assert "2.0 MB of 4.0 MB" in text
