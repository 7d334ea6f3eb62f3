"""The parts of the export benchmark that do not export: medians, ratios, tables, plots, files."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks.export import models, runs, speed
from benchmarks.export.cases import CASES, DYNAMO, ONE_NODE, OURS, TORCHSCRIPT, TRANSFORMERS
from dynamo_moe import open_tensors

FACTOR = {OURS: 1, DYNAMO: 4, ONE_NODE: 3, TORCHSCRIPT: 0.5, TRANSFORMERS: 5}


def _run(model, row, exporter, quick, check, folder):
    """A made-up export: ours takes 2 s for 6 blocks; TorchScript refuses static shapes."""
    if exporter == TORCHSCRIPT and not row.dynamic:
        return {"error": "ValueError: a [reason]"}
    seconds = row.blocks / 3 * FACTOR[exporter] * (1.1 if row.length == 1024 else 1)
    found = {"seconds": seconds, "cpu seconds": seconds, "peak bytes": 5e7 * FACTOR[exporter]}
    if exporter == OURS:
        found |= {"way": runs.OWN_STEPS, "writing s": seconds / 4}
    if check:
        found["nodes"] = 100 * row.blocks
        if model in {"qwen3", "qwen3-235b"}:
            found |= {"linked bytes": 61e9, "weights bytes": 61e9}
        elif exporter == ONE_NODE:
            found["check failed"] = "Fail: not a registered function/op"
        else:
            found["max relative error"] = 1e-6
    return found


@contextmanager
def _runner(quick):
    yield _run


@pytest.fixture
def cases():
    run = {"versions": dict.fromkeys(speed.PACKAGES, "1.0"), "cpu": "A", "cores": 2}
    run |= {"turns": 2, "quick": False, "date": "2026-01-01T00:00:00"}
    return [
        {
            "name": case.name,
            "run": run,
            "rows": speed.measure(case, 2, _run),
        }
        for case in CASES
    ]


def _rows(cases, name):
    (case,) = (case for case in cases if case["name"] == name)
    return {row["label"]: row for row in case["rows"]}


def test_medians_keep_each_turn():
    turns = [{"seconds": value, "peak bytes": 7, "nodes": 5} for value in (4.0, 1.0, 2.0)]
    assert speed.together(turns) == {
        "nodes": 5,
        "seconds": {"median": 2.0, "turns": [4.0, 1.0, 2.0]},
        "peak bytes": {"median": 7, "turns": [7, 7, 7]},
    }


def test_a_failure_of_one_turn_is_one_of_all():
    assert speed.together([{"seconds": 1.0}, {"error": "X: y"}]) == {"error": "X: y"}


def test_cases_of_our_export_alone():
    alone = [case.alone() for case in CASES]
    assert {row.exporters for case in alone for row in case.rows} == {(OURS,)}
    for ours, case in zip(alone, CASES, strict=True):
        labels = [row.label for row in case.rows]
        linked = [f"linked, {label}" for label in labels if case.is_checkpoint]
        assert [row.label for row in ours.rows] == [*labels, *linked]
        assert [row.label for row in ours.rows if row.linked] == linked
    assert [case.name for case in CASES if case.is_checkpoint] == ["Llama", "Mixtral", "Qwen3-MoE"]


def test_growth_of_linked_exports(cases):
    (case,) = (case for case in CASES if case.name == "Llama")
    found = speed.growth({"name": "Llama", "rows": speed.measure(case.alone(), 1, _run)})
    assert found["Llama, 96 blocks"] == found["Llama, linked, 96 blocks"] == 16


@pytest.mark.slow
def test_a_linked_export_leaves_the_weights_in_their_file(tmp_path):
    (case,) = (case for case in CASES if case.name == "Mixtral")
    row = next(row for row in case.alone().rows if row.linked)
    subject = models.SUBJECTS[case.model](row, True)
    subject.prepare(OURS, tmp_path)
    report = subject.export(OURS, tmp_path)
    assert report.file_bytes * 5 < (tmp_path / "model.safetensors").stat().st_size
    assert subject.check(report.path)["max relative error"] < 1e-5


def test_a_case_in_turns(cases):
    order = []

    def run(model, row, exporter, quick, check, folder):
        order.append((exporter, check))
        return _run(model, row, exporter, quick, check, folder)

    swin = replace(CASES[-1], rows=CASES[-1].rows[:1])
    rows = speed.measure(swin, 2, run)
    assert order == [(OURS, True), (ONE_NODE, True), (ONE_NODE, False), (OURS, False)]
    assert rows == list(_rows(cases, swin.name).values())[:1]


def test_who_fails_has_no_second_turn():
    tried = []

    def run(model, row, exporter, quick, check, folder):
        tried.append(exporter)
        return {"error": "X: y"}

    rows = speed.measure(replace(CASES[-1], rows=CASES[-1].rows[:1]), 3, run)
    assert tried == [OURS, ONE_NODE]
    assert rows[0]["exporters"] == {OURS: {"error": "X: y"}, ONE_NODE: {"error": "X: y"}}


def test_a_peer_that_would_take_too_long_is_left_out():
    case = next(case for case in CASES if case.name == "Llama")
    rows = {row["blocks"]: row["exporters"] for row in speed.measure(case, 2, _run, limit=60)}
    ours, dynamo = ([rows[blocks][name] for blocks in rows] for name in (OURS, DYNAMO))
    assert [one["seconds"]["median"] for one in ours] == [2, 4, 8, 16, 32]
    assert [one["seconds"]["median"] for one in dynamo[:3]] == [8, 16, 32]
    assert [one["error"] for one in dynamo[3:]] == [
        "not run: 64 s are expected, more than 60",
        "not run: 128 s are expected, more than 60",
    ]


def test_growth_counts_no_writing(cases):
    found = speed.summary(cases)["growth"]
    assert found["goal"] == speed.GOAL_GROWTH
    assert found["Llama, 96 blocks"] == 16
    assert found["Swin-MoE, stage 3, 24 blocks"] == 4
    assert found["Swin-MoE, stage 1, 48 blocks"] == 8
    assert not any("6 blocks" in label.split(", ") for label in found)


def test_ratios(cases):
    rows = _rows(cases, "T5-small")
    assert speed.ratios(rows["L 16"], "seconds") == pytest.approx(
        {DYNAMO: 4, TORCHSCRIPT: 0.5, TRANSFORMERS: 5}
    )
    assert speed.ratios(rows["L 16, static"], "peak bytes") == {DYNAMO: 4}
    rows["L 16"]["exporters"][OURS] = {"error": "X: y"}
    assert speed.ratios(rows["L 16"], "seconds") == {}


def test_no_ratios_to_nothing():
    nothing = {"peak bytes": {"median": 0}}
    assert speed.ratios({"exporters": {OURS: nothing, DYNAMO: nothing}}, "peak bytes") == {}
    assert speed.spread([0, 0]) == 0


def test_summary(cases):
    found = speed.summary(cases)
    assert found["time / ours"]["Mixtral, 6 blocks"] == {DYNAMO: 4, TORCHSCRIPT: 0.5}
    assert found["example size"]["time between sizes, percent"] == pytest.approx(10)
    assert found["example size"]["time between turns of a size, percent"] == 0
    assert found["example size"]["memory between sizes, percent"] == 0
    assert found["checkpoint"]["seconds"] == 16
    assert found["Qwen3-235B-A22B"]["goal"] == {"seconds": 15, "peak bytes": 2e9}
    json.dumps(found)


def test_summary_where_all_of_ours_failed(cases):
    for case in cases:
        for row in case["rows"]:
            row["exporters"][OURS] = {"error": "X: y"}
    growth = {"goal": speed.GOAL_GROWTH}
    assert speed.summary(cases) == {"time / ours": {}, "memory / ours": {}, "growth": growth}


def test_tables_show_failures_and_remarks(cases, capsys):
    speed.show(cases)
    text = capsys.readouterr().out
    assert "T5-small, L 16, static, TorchScript failed: ValueError: a [reason]" in text
    assert "the file fails: Fail: not a registered function/op" in text
    assert "61.00 of 61.00 GB linked" in text
    assert all(case.name in text for case in CASES)


def test_remarks():
    assert not speed.remarks({"way": runs.OWN_STEPS, "max relative error": 1e-6})
    way = "torch.onnx.export: NeedsRetraceError: control flow"
    assert speed.remarks({"way": way, "max relative error": 0.1}) == (
        f"the file's results are wrong; {way}"
    )


def test_the_way_of_an_export_is_noted_when_torch_is_called(monkeypatch):
    monkeypatch.setattr(torch.onnx, "export", lambda model: None)
    log = logging.getLogger("dynamo_moe")
    monkeypatch.setattr(log, "level", logging.ERROR)
    with runs._watched() as ways:
        log.info("control flow")
        torch.onnx.export(torch.nn.Identity())
        log.info("later")
    assert ways == ["torch.onnx.export: control flow"]
    assert log.level == logging.ERROR


@pytest.mark.parametrize("kept", [len(CASES), 1, 0])
def test_plot(cases, kept, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    speed.plot({"cases": cases[:kept]}, path)
    assert path.stat().st_size > 1000


@pytest.mark.every
def test_a_picture_is_drawn_from_an_earlier_run(cases, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "result.json", tmp_path / "plot.png"
    results.write_text(json.dumps({"cases": cases}))
    monkeypatch.setattr("sys.argv", ["speed", "--redraw", "--json", str(results)])
    with pytest.raises(SystemExit, match="2"):
        speed.main()
    assert "--redraw needs --json, the results, and --plot" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*sys.argv, "--plot", str(picture)])
    with pytest.raises(SystemExit, match="0"):
        speed.main()
    assert picture.stat().st_size > 1000


def test_one_case_keeps_the_others_of_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "runner", _runner)
    path = tmp_path / "result.json"

    def call(*options):
        monkeypatch.setattr("sys.argv", ["speed", "--json", str(path), *options])
        speed.main()
        return json.loads(path.read_text())["cases"]

    assert [case["name"] for case in call("--turns", "2")] == [case.name for case in CASES]
    found = call("--case", "llama", "--quick")
    assert [case["name"] for case in found] == [case.name for case in CASES]
    assert [case["run"]["quick"] for case in found] == [case.name == "Llama" for case in CASES]
    assert [row["blocks"] for case in found for row in case["rows"] if case["run"]["quick"]] == [2]


def test_no_such_case(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["speed", "--case", "none"])
    with pytest.raises(SystemExit):
        speed.main()
    assert (
        "no case contains 'none'; there are linear layer, example size" in capsys.readouterr().err
    )


def test_every_case_has_a_quick_row_and_ours_in_each():
    for case in CASES:
        assert case.shrunk().rows, case.name
        assert all(OURS in row.exporters for row in case.rows), case.name
        labels = [row.label for row in case.rows]
        assert len(set(labels)) == len(labels)


def test_header_of_a_file_of_holes(tmp_path):
    header, size = models.safetensors_header({"a": (3, 4), "b": (5,)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(header)
    with path.open("ab") as file:
        file.truncate(len(header) + size)
    found = open_tensors(path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        "a": ((3, 4), torch.bfloat16),
        "b": ((5,), torch.bfloat16),
    }
    assert size == 34
    assert not found["a"].read().any()


def test_reasons_are_one_line_without_folders():
    cause = ValueError("\x1b[31mno\nfile /somewhere/x/model.onnx\x1b[0m")
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    assert runs.reason(error) == "ValueError: no file model.onnx"
