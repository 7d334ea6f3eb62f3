"""``export``: what reaches the file, what is printed and where, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import dynamo_moe
from cli_models import error_of, run
from packed_checkpoints import language_model

pytest_plugins = ("cli_models",)
pytestmark = pytest.mark.usefixtures("in_the_folder_of_models")


def test_options_reach_the_export() -> None:
    result = run(
        "export", "models:with_args", "dense.onnx", "--target", "dense", "--opset", "21",
        "--experts-dtype", "float16", "--external-data", "-q",
    )  # fmt: skip
    assert (result.exit_code, result.output) == (0, "")
    summary = dynamo_moe.inspect("dense.onnx")
    assert summary.opsets["ai.onnx"] == 21
    assert summary.moe_layers == ()
    assert "float16" in summary.weights
    assert summary.external_bytes > 0
    onnx.checker.check_model("dense.onnx")


def test_quantized_experts() -> None:
    options = ("--shape", "2,5,16", "--quantize", "int4", "--group", "8", "--verify")
    result = run("export", "models.py", "int4.onnx", *options, "--json", "-q")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["operators"] == {"DroplessMoEPacked": 1}
    assert [layer["module"] for layer in report["quantization"]["layers"]] == ["mlp"]
    assert report["verification"]["passed"]
    for change, code, message in (
        (("--group", "7"), 1, "mlp.w1 has rows of 16 values, which group=7 must divide"),
        (("--quantize", "x"), 2, "must be one of int4, mxfp4, fp8, nvfp4, int8; got 'x'"),
    ):
        result = run("export", "models.py", "o.onnx", *options, *change)
        assert result.exit_code == code
        assert message in result.stderr


def test_a_cache_of_a_fixed_length(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    language_model("qwen3_moe").save_pretrained(folder)
    options = ("--cache-length", "40", "--verify", "--json", "-q")
    result = run("export", folder, "m.onnx", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verification"]["passed"]
    assert report["nodes"]["TensorScatter"] == 4
    result = run("export", folder, "m.onnx", *options, "--target", "onnxruntime")
    assert result.exit_code == 1
    assert "'onnxruntime' has shared_cache" in " ".join(result.stderr.split())


@pytest.mark.every
def test_quantized_linear_layers(tmp_path: Path) -> None:
    """The head only where it is not ignored."""
    folder = str(tmp_path / "checkpoint")
    language_model("qwen3_moe").save_pretrained(folder)
    options = ("--task", "text-generation", "--quantize-linear", "int4", "--verify", "--json", "-q")
    for others, packed in (((), 8), (("--quantize", "int8", "--quantize-ignore", ""), 9)):
        result = run("export", folder, "m.onnx", "--target", "onnxruntime", *options, *others)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert len(report["quantization"]["linear"]) == packed
        assert report["nodes"]["com.microsoft::MatMulNBits"] == packed
        assert ("lm_head" in report["quantization"]["plain"]) == (packed == 8)
        assert report["verification"]["passed"]
    result = run("export", folder, "m.onnx", *options, "--quantize-ignore", "q_prj")
    assert result.exit_code == 1
    assert "ignore has 'q_prj', which is no linear layer of the model" in result.stderr


def test_the_body_beside_the_node() -> None:
    for body in ("loop", "unrolled"):
        options = ("--shape", "2,5,16", "--body", body, "--verify", "-q")
        result = run("export", "models.py", f"{body}.onnx", *options)
        assert (result.exit_code, result.output) == (0, "")
    loop, unrolled = (
        [node.op_type for function in onnx.load(f"{body}.onnx").functions for node in function.node]
        for body in ("loop", "unrolled")
    )
    assert "If" in loop
    assert {"If", "Scan", "Loop"}.isdisjoint(unrolled)
    for_dense = ("--body", "unrolled", "--target", "dense")
    refused = error_of("export", "models.py", "o.onnx", "--shape", "2,5,16", *for_dense, code=2)
    assert refused.startswith("--body needs --target plugin")


def test_what_the_model_cannot_do_is_one_line() -> None:
    result = run("export", "models.py", "o.onnx", "--shape", "2,5,17")
    assert result.exit_code == 1
    assert "1 MoE module converted" in result.stdout
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: the model itself fails on the example (x [2, 5, 17] float32), ")
    assert "helper_of_models.py:13 (`return x + self.mlp(self.norm(x))`): Given norm" in error
    assert error.endswith("(--debug shows where)")
    assert not Path("o.onnx").exists()


def test_nothing_to_quantize() -> None:
    Path("dense.py").write_text("import torch\nmodel = torch.nn.Linear(4, 4)\n")
    result = run("export", "dense.py:model", "m.onnx", "--shape", "2,4", "--quantize", "int4")
    assert result.exit_code == 2
    assert "--quantize rounds the experts of MoE layers" in " ".join(result.stderr.split())


def test_a_failed_export_as_json() -> None:
    result = run("export", "models.py", "o.onnx", "--shape", "2,5,17", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [each["module"] for each in report.pop("conversion")["replaced"]] == ["mlp"]
    assert report.pop("error").startswith("the model itself fails on the example (x [2, 5, 17] ")
    assert report == {"quantization": None, "verification": None}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["2,5,16"], "missing a required argument: 'mask'"),
        (["2,5,16", "2,5", "1"], "too many positional arguments"),
    ],
)
def test_another_number_of_inputs(shapes: list[str], message: str) -> None:
    options = [option for shape in shapes for option in ("--shape", shape)]
    refused = error_of("export", "models.py:two_inputs", "o.onnx", *options, code=2)
    assert refused == (
        f"the example does not fit TwoInputs.forward(x, mask): {message}; "
        "--shape is given once for each input, in their order"
    )


def test_a_model_without_values_is_one_line() -> None:
    result = run("export", "models.py:meta", "o.onnx", "--shape", "2,5,16")
    assert result.exit_code == 1
    assert "not compared" in result.stdout
    assert "error: 'norm.weight' is on the meta device, without values" in result.stderr


def test_a_trace_is_no_model() -> None:
    message = error_of("export", "models.py:program", "o.onnx", "--shape", "2,16", code=2)
    assert message.startswith("'program' must return another model: model must be the torch.nn.Mod")


@pytest.mark.parametrize("flags", [[], ["--json"], ["-q"]])
def test_strict_fails_where_a_module_is_left(flags: list[str]) -> None:
    result = run("export", "models.py:mixed", "strict.onnx", "--shape", "2,16", "--strict", *flags)
    assert result.exit_code == 1
    assert not list(Path().glob("strict*"))
    error = result.stderr.splitlines()[-1].removeprefix("error: ")
    assert error == (
        "--strict: 1 of the model's MoE modules is not converted: '1' (Listed); "
        "docs/how-to/add_an_adapter.md says how to convert them"
    )
    if flags == ["--json"]:
        report = json.loads(result.stdout)
        assert [each["module"] for each in report["conversion"]["unrecognised"]] == ["1"]
        assert report["error"] == error
    else:
        assert ("Listed" in result.stdout) == (flags == [])


def test_what_a_conversion_left_is_said_in_one_line() -> None:
    result = run("export", "models.py:mixed", "left.onnx", "--shape", "2,16")
    assert result.exit_code == 0, result.output
    left = "Modules that are left become many nodes, or fail to export: docs/how-to/"
    assert left in result.stdout
    assert "1 MoE module is not converted" in result.stdout
    result = run("export", "models.py:plain", "plain.onnx", "--shape", "2,16", "--strict")
    assert result.exit_code == 0, result.output
    assert "Nothing to convert: no module looks like a router with experts" in result.stdout


def test_a_model_that_cannot_be_traced_is_one_line() -> None:
    # In a separate process: PyTorch's log handlers write to the stderr from when it was imported.
    run = "from dynamo_moe.cli import main; main()"
    arguments = ["export", "models.py:branches", "o.onnx", "--shape", "2,5,16"]
    result = subprocess.run(
        [sys.executable, "-c", run, *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "1 MoE module converted" in result.stdout
    *steps, error = result.stderr.splitlines()
    assert [line.split()[0] for line in steps] == ["Loading", "Converting"]
    assert error.startswith("error: the model decides by the values of a tensor at ")
    assert "(`return y if y.sum() > 0 else -y`), and a trace has only shapes: Could not gu" in error
    assert error.endswith("(--debug shows where)")


def test_debug_shows_how_far_a_trace_came() -> None:
    result = run("export", "models.py:branches", "o.onnx", "--shape", "2,5,16", "--debug")
    assert result.exit_code == 1
    assert "torch.ops.moe.dropless" in result.stderr


@pytest.mark.slow
def test_export_of_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from moe_architectures import ARCHITECTURES

    folder = tmp_path / "checkpoint"
    ARCHITECTURES["mixtral"].build().save_pretrained(folder)
    out = tmp_path / "m.onnx"
    options = [folder, "-o", out, "--task", "text-generation", "--link-weights", "--dtype"]
    result = run("export", *map(str, options), "float32", "--verify", "--json", "-q")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["conversion"]["replaced"]) == 2
    assert report["operators"] == {"DroplessMoE": 2}
    assert report["verification"]["passed"]
    assert not result.stderr
    result = run("verify", str(out), str(folder), "--dtype", "float32", "--json", "-q")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["passed"]


def test_a_package_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of a folder; one with a file config.json is a package all the same."""
    package = tmp_path / "moe_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from dynamo_moe.models import DroplessMoEMlp\n\n\n"
        "def build():\n    return DroplessMoEMlp(16, 8, num_experts=4, top_k=2)\n"
    )
    (package / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = run("export", "moe_package", "m.onnx", "--shape", "1,16", "--json", "-q")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["operators"] == {"DroplessMoE": 1}
