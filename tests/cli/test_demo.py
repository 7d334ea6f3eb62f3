"""The demo: the files it leaves, what it prints, and that it fails loudly."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("sklearn")
pytest.importorskip("onnxruntime")
pytest.importorskip("fast_sugiyama")

from dynamo_moe.demo import pipeline
from dynamo_moe.demo.__main__ import app
from dynamo_moe.demo.measure import compare, time_all
from dynamo_moe.demo.pipeline import DemoResult, FileResult
from dynamo_moe.tolerances import tolerance_for
from engine_checks import checked_engine

EPOCHS = 8
FLOOR = 0.9
FILES = ["plugin.onnx", "plugin_fp16.onnx", "dense.onnx", "onnxruntime.onnx"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    folder = tmp_path_factory.mktemp("demo") / "made" / "here"
    return pipeline.run(folder, epochs=EPOCHS, min_accuracy=FLOOR)


@pytest.mark.slow
def test_every_file_gives_pytorch_s_predictions(result: DemoResult) -> None:
    assert result.failures == []
    assert [file.variant.file for file in result.files] == FILES
    assert result.training.test_accuracy >= FLOOR
    for file in result.files:
        assert file.compared.images == 360
        assert file.compared.differing == {1: 0, 7: 0, 64: 0, 360: 0}
        assert file.verified.passed
        assert set(file.milliseconds) == set(result.milliseconds) == {1, 64}
        assert min(file.milliseconds.values()) > 0
        if file.variant.experts == torch.float32:
            assert file.compared.accuracy == pytest.approx(result.training.test_accuracy)
            assert file.compared == file.compared_float32


@pytest.mark.slow
def test_half_precision_file_has_its_own_reference_and_bounds(result: DemoResult) -> None:
    plugin, half = result.files[:2]
    assert plugin.verified.tolerance == tolerance_for({torch.float32})
    assert half.verified.tolerance == tolerance_for({torch.float32, torch.float16})
    assert half.compared.max_logit_difference > 0
    assert plugin.compared.max_logit_difference < 1e-4
    assert half.compared_float32.max_logit_difference > plugin.compared.max_logit_difference
    dtypes = {
        tensor.name.rpartition("mlp.")[2]: tensor.data_type
        for tensor in onnx.load(half.exported.path).graph.initializer
        if ".block1.mlp." in tensor.name
    }
    assert dtypes.pop("router.weight") == onnx.TensorProto.FLOAT
    assert set(dtypes) == {"w1", "b1", "w2", "b2"}
    assert set(dtypes.values()) == {onnx.TensorProto.FLOAT16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    # test_engine_builds.py builds the model for these targets.
    [
        pytest.param(name, marks=[pytest.mark.every] * (name in ("plugin.onnx", "dense.onnx")))
        for name in FILES
    ],
)
def test_tensorrt_builds_the_files(result: DemoResult, file: str) -> None:
    engine = checked_engine(result.folder / file)
    if file == "onnxruntime.onnx":
        assert not engine.parsed
        assert "(MoE): " in engine.reason()
        assert "Plugin not found" in engine.reason()
    else:
        assert engine.built, engine.reason()


@pytest.mark.slow
def test_folder_holds_files_pictures_and_summary(result: DemoResult) -> None:
    names = ("graph_dense", "graph_plugin", "comparison")
    pictures = {f"{name}.{suffix}" for name in names for suffix in ("svg", "png")}
    assert {path.name for path in result.pictures} == pictures
    found = {path.name: path for path in result.folder.iterdir()}
    assert set(found) == {*FILES, *pictures, "summary.json"}
    for name in pictures:
        start = found[name].read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start
    for name in FILES:
        onnx.checker.check_model(onnx.load(found[name]))


@pytest.mark.slow
def test_summary_holds_the_result(result: DemoResult) -> None:
    text = (result.folder / "summary.json").read_text()
    summary = json.loads(text)
    assert str(result.folder) not in text
    assert summary["passed"] is True
    assert (summary["epochs"], summary["seed"]) == (EPOCHS, 0)
    assert summary["training"]["test_accuracy"] == result.training.test_accuracy
    assert len(summary["training"]["losses"]) == EPOCHS
    assert [entry["module"] for entry in summary["conversion"]["replaced"]] == [
        "stages.0.block1.mlp",
        "stages.1.block1.mlp",
    ]
    assert [entry["file"] for entry in summary["files"]] == FILES
    assert [entry["target"] for entry in summary["files"]] == [
        "plugin",
        "plugin",
        "dense",
        "onnxruntime",
    ]
    for entry in summary["files"]:
        assert entry["bytes"] == (result.folder / entry["file"]).stat().st_size
        assert entry["nodes"] == sum(entry["operators"].values())
        assert entry["test_images"]["differing"] == {"1": 0, "7": 0, "64": 0, "360": 0}
        assert entry["verification"]["passed"] is True
        assert len(entry["verification"]["cases"]) >= 3
        assert entry["failures"] == []
    plugin, half, dense, onnxruntime = summary["files"]
    assert plugin["operators"]["moe::DroplessMoE"] == 2
    assert onnxruntime["operators"]["com.microsoft::MoE"] == 2
    assert plugin["nodes"] < dense["nodes"]
    assert half["bytes"] < plugin["bytes"]
    assert half["experts_dtype"] == "float16"


@pytest.mark.slow
def test_quiet_prints_the_final_table_alone(
    result: DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    consoles = []

    def run(folder: Path, *, epochs: int, seed: int, console: object) -> DemoResult:
        consoles.append((folder.name, epochs, seed, console))
        return result

    monkeypatch.setattr(pipeline, "run", run)
    printed = CliRunner().invoke(app, ["-q", "--output", "here", "--epochs", "3", "--seed", "5"])
    assert printed.exit_code == 0, printed.output
    assert consoles == [("here", 3, 5, None)]
    assert "Result" not in printed.stdout
    for name in (*FILES, "PyTorch", "summary.json", "comparison.svg"):
        assert name in printed.stdout
    # At 80 columns nothing is cut off, and each file has one line in the table.
    assert "…" not in printed.stdout
    assert sum("✓" in line for line in printed.stdout.splitlines()) == len(FILES)


def _with_changed_answers(file: FileResult) -> FileResult:
    changed = replace(file.compared, differing={1: 0, 64: 2}, max_logit_difference=0.25)
    return replace(file, compared=changed)


def _with_nan(file: FileResult) -> FileResult:
    return replace(file, compared=replace(file.compared, max_logit_difference=math.nan))


def _with_failed_verification(file: FileResult) -> FileResult:
    first, *others = file.verified.cases
    bad = replace(first, max_error=0.5, passed=False)
    return replace(file, verified=replace(file.verified, cases=(bad, *others)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_with_changed_answers, "2 of 360 predictions differ from PyTorch's, logits by up to 2.5"),
        (_with_nan, "logits that are not numbers"),
        (_with_failed_verification, "differs from the model: max error 5.0e-01"),
    ],
)
def test_a_bad_file_fails_with_one_line(
    result: DemoResult,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[FileResult], FileResult],
    message: str,
) -> None:
    good, bad, *others = result.files
    spoiled = replace(result, files=(good, spoil(bad), *others))
    assert spoiled.to_dict()["passed"] is False
    monkeypatch.setattr(pipeline, "run", lambda *_, **__: spoiled)
    printed = CliRunner().invoke(app, ["-q"])
    assert printed.exit_code == 1
    assert "✗ plugin_fp16.onnx" in printed.stdout
    (line,) = printed.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(bad.exported.path) in line
    assert message in line


def test_low_accuracy_is_an_error_and_exports_nothing(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["-q", "--epochs", "1", "--output", str(tmp_path)])
    assert printed.exit_code == 1
    assert printed.stdout == ""
    (line,) = printed.stderr.splitlines()
    assert "of 360 test images are right after 1 epochs, which is below 95.0%" in line
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    printed = CliRunner().invoke(app, ["--output", str(tmp_path / "taken")])
    assert printed.exit_code == 1
    assert "cannot create the folder" in printed.stderr


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_moe.demo.__main__._NEEDED", ("onnxruntime", "not_installed_here"))
    printed = CliRunner().invoke(app, [])
    assert printed.exit_code == 1
    assert "needs not_installed_here: pip install 'dynamo-moe[demo]'" in printed.stderr


def test_compare_counts_by_batch_size() -> None:
    reference = torch.eye(5)
    images, labels = torch.arange(5.0).reshape(5, 1, 1, 1), torch.tensor([0, 1, 2, 3, 0])
    seen = []

    def classify(batch: Tensor) -> Tensor:
        seen.append(len(batch))
        logits = torch.eye(5)[batch.flatten().long()]
        # Wrong if a batch is not full, and then only for its first image.
        return logits if len(batch) != 1 else logits.roll(1, dims=1)

    compared = compare(classify, reference, images, labels, (5, 2))
    assert seen == [5, 2, 2, 1]
    assert compared.differing == {5: 0, 2: 1}
    assert (compared.worst, compared.images) == (1, 5)
    # Image 4's label is 0; the roll changes 4 into 0, but only at one of the batch sizes.
    assert compared.accuracy == pytest.approx(4 / 5)
    assert compared.max_logit_difference == 1


def test_compare_does_not_hide_nan() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    outputs = iter([logits, logits * math.nan, logits])
    images, labels = torch.zeros(2, 1, 1, 1), torch.tensor([0, 1])
    compared = compare(lambda _: next(outputs), logits, images, labels, (2, 3, 4))
    assert math.isnan(compared.max_logit_difference)


def test_time_all_runs_whole_batches_in_turns() -> None:
    calls: list[tuple[str, int]] = []

    def classifier(name: str) -> Callable[[Tensor], Tensor]:
        def classify(batch: Tensor) -> Tensor:
            calls.append((name, len(batch)))
            return batch

        return classify

    classifiers = {name: classifier(name) for name in "ab"}
    times = time_all(classifiers, torch.zeros(5, 1), 2, rounds=3)
    assert set(times) == {"a", "b"}
    # The last batch has one image and is left out; the first turn warms up.
    assert calls == [("a", 2), ("b", 2)] * 4
