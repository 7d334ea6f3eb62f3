"""``verify`` and ``export --verify``: reports, exit codes, and which file gets its name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import dynamo_moe
from cli_models import error_of, run
from dynamo_moe.cli.model_loading import load_model
from onnx_files import crashing_file
from packed_checkpoints import arguments, language_model, save_packed

pytest_plugins = ("cli_models",)
pytestmark = pytest.mark.usefixtures("in_the_folder_of_models")


def test_the_library_needs_a_folder_for_genai(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options in ((), ("--format", "transformers")):
        message = error_of("export", str(tmp_path), "out", "--library", *options, code=2)
        assert message == "--library needs --format genai"


def test_verify_needs_a_file() -> None:
    assert error_of("verify", "no.onnx", "models.py", code=2) == "no such file: no.onnx"


def test_without_onnxruntime_verifying_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_moe.cli.model_steps.find_spec", lambda name: None)
    message = error_of("verify", "m.onnx", "models.py", code=1)
    assert message == "verifying needs ONNX Runtime: pip install 'dynamo-moe[onnxruntime]'"


@pytest.fixture(scope="module")
def exported(folder_of_models: Path) -> dict[str, Any]:
    """Output of ``export --json``; the file is ``net.onnx``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder_of_models)
        patch.setattr(sys, "path", list(sys.path))
        result = run("export", "models.py", "net.onnx", "--shape", "2,5,16", "--verify", "--json")
    assert result.exit_code == 0, result.output
    for step in ("Loading models.py", "Converting", "Exporting for target plugin", "Verifying"):
        assert step in result.stderr
    return dict(json.loads(result.stdout))


def test_export_and_verify(exported: dict[str, Any]) -> None:
    assert exported["target"] == "plugin"
    assert exported["layers"] == ["mlp"]
    assert [replaced["module"] for replaced in exported["conversion"]["replaced"]] == ["mlp"]
    assert exported["verification"]["passed"]
    [layer] = dynamo_moe.inspect("net.onnx").moe_layers
    assert (layer.name, layer.num_experts) == ("mlp", 4)


@pytest.mark.usefixtures("exported")
def test_verify_a_file() -> None:
    result = run("verify", "net.onnx", "models.py", "--json", "--shape", "3,5,16")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cases"][0]["shapes"] == {"x": [3, 5, 16]}
    result = run("verify", "net.onnx", "models.py", "--json", "--shape", "3,5,16", "--library")
    assert len(json.loads(result.stdout)["by_operator"]) == 1
    quiet = run("verify", "net.onnx", "models.py", "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert "agrees" in run("verify", "net.onnx", "models.py").stdout


@pytest.mark.usefixtures("exported")
def test_a_file_that_differs_fails() -> None:
    result = run("verify", "net.onnx", "torch.nn:ReLU", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["passed"]
    assert "error: net.onnx differs from the model" in result.stderr


def test_a_runtime_that_dies_is_one_line() -> None:
    crashing_file(Path("crash.onnx"))
    message = error_of("verify", "crash.onnx", "torch.nn:Identity", code=1)
    assert message.startswith("ONNX Runtime died of SIG")


def test_verified_files_are_those_of_an_export_alone(tmp_path: Path) -> None:
    files = {}
    for flags in ((), ("--verify",)):
        out = tmp_path / f"{len(flags)}" / "m.onnx"
        out.parent.mkdir()
        options = ("--shape", "2,5,16", "--external-data", "--profile", "--json", "-q", *flags)
        result = run("export", "models.py", str(out), *options)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["error"] is None
        written = [Path(file) for file in (*report["files"], *report["profile"])]
        assert sorted(out.parent.iterdir()) == sorted(written)
        assert report["path"] == report["files"][0] == str(out)
        files[flags] = onnx.load(out, load_external_data=False), Path(f"{out}.data").read_bytes()
        assert sorted(file.name for file in written)[:2] == ["m.onnx", "m.onnx.data"]
    assert report["verification"]["path"] == str(out)
    assert files[()] == files[("--verify",)]
    dynamo_moe.verify(out, load_model("models.py")[0])


@pytest.mark.parametrize("data", [[], ["--external-data"]])
def test_a_file_that_differs_does_not_get_its_name(tmp_path: Path, data: list[str]) -> None:
    out, left = tmp_path / "m.onnx", tmp_path / "m.unverified.onnx"
    earlier = {out: b"earlier", Path(f"{out}.data"): b"its weights"}
    for path, content in earlier.items():
        path.write_bytes(content)
    options = ["--shape", "2,5,16", "--verify", "--json", *data]
    result = run("export", "models.py:one_run", str(out), *options)
    assert result.exit_code == 1
    assert {path: path.read_bytes() for path in earlier} == earlier
    written = [left, Path(f"{left}.data")][: 1 + len(data)]
    assert sorted(tmp_path.iterdir()) == sorted([*earlier, *written])
    onnx.checker.check_model(left)
    report = json.loads(result.stdout)
    assert (report["path"], report["verification"]["passed"]) == (str(left), False)
    assert report["error"].startswith(f"{left} differs from the model: max error ")
    assert report["error"].endswith(f"; the file is left at {left}, {out} was not written")
    assert f"error: {report['error']}" in result.stderr


def test_a_verification_that_breaks_leaves_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **options: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("dynamo_moe.cli.model_steps.verify", breaks)
    out = tmp_path / "m.onnx"
    result = run("export", "models.py", str(out), "--shape", "2,5,16", "--verify")
    assert result.exit_code == 1
    assert "1 MoE module converted" in result.stdout
    said = f"error: RuntimeError: no such kernel; the file is left at {tmp_path}/m.unverified.onnx"
    assert f"{said}, {out} was not written (--debug shows where)" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.unverified.onnx"]


def test_what_the_models_code_prints_is_no_report() -> None:
    options = ("--shape", "2,5,16", "--verify")
    result = run("export", "models.py:talks", "talks.onnx", *options, "--json")
    assert json.loads(result.stdout)["verification"]["passed"]
    assert "made a model" in result.stderr
    assert "called a model" in result.stderr
    quiet = run("export", "models.py:talks", "talks.onnx", *options, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.parametrize(
    "options",
    [
        ("--quantize", "int4", "--group", "16"),
        ("--quantize", "fp8", "--dtype", "float16"),
        ("--experts-dtype", "float16"),
        ("--quantize-linear", "int4", "--quantize-ignore", "q_proj", "--group", "16"),
        ("--quantize", "int8", "--quantize-linear", "nvfp4", "--target", "onnxruntime"),
    ],
    ids=str,
)
@pytest.mark.first(2)
def test_verify_rounds_a_checkpoint_as_the_file_is(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    folder, file = str(tmp_path / "checkpoint"), str(tmp_path / "m.onnx")
    language_model("qwen3_moe", num_hidden_layers=1).save_pretrained(folder)
    result = run("export", folder, file, "--task", "text-generation", "-q", *options)
    assert result.exit_code == 0, result.output
    verified = run("verify", file, folder)
    assert verified.exit_code == 0, verified.output
    assert ("Rounding the experts" in verified.stderr) == ("--quantize" in options)
    assert ("linear layers" in verified.stderr) == ("--quantize-linear" in options)


def test_verify_leaves_a_checkpoint_s_own_rounding(tmp_path: Path) -> None:
    folder, file = tmp_path / "checkpoint", tmp_path / "m.onnx"
    model = language_model("qwen3_moe", num_hidden_layers=1)
    save_packed(model, folder, arguments(), lambda name: ".experts." in name)
    result = run("export", str(folder), str(file), "--task", "text-generation", "-q")
    assert result.exit_code == 0, result.output
    verified = run("verify", str(file), str(folder))
    assert verified.exit_code == 0, verified.output
    assert "Rounding" not in verified.stderr


def test_verify_rounds_a_factory_s_model_as_the_file_is() -> None:
    result = run("export", "models.py", "q.onnx", "--shape", "2,5,16", "--quantize", "int8", "-q")
    assert result.exit_code == 0, result.output
    assert "agrees" in run("verify", "q.onnx", "models.py").stdout
