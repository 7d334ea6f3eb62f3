"""What the command line is asked for: help, models, shapes and places; its one-line errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
import torch

import dynamo_moe
from cli_models import error_of, run
from dynamo_moe.cli.model_loading import UsageError, load_model, parse_dynamic, parse_shapes

pytest_plugins = ("cli_models",)
pytestmark = pytest.mark.usefixtures("in_the_folder_of_models")


def test_help_names_the_commands() -> None:
    text = run("--help").stdout
    assert all(command in text for command in ("export", "verify", "inspect"))


@pytest.mark.parametrize("command", ["export", "verify", "inspect"])
def test_help_has_an_example(command: str) -> None:
    result = run(command, "-h")
    assert result.exit_code == 0
    assert f"dynamo-moe {command} " in result.stdout.split("Example")[1]


def test_version() -> None:
    assert run("--version").stdout == f"dynamo-moe {dynamo_moe.__version__}\n"


@pytest.mark.parametrize(
    "spec", ["models.py", "models.py:build", "models:build", "models", "models.py:ready"]
)
def test_a_model_without_arguments(spec: str) -> None:
    model, args = load_model(spec)
    assert type(model).__name__ == "Net"
    assert args is None


@pytest.mark.parametrize("name", ["with_args", "with_a_tensor"])
def test_a_model_with_arguments(name: str) -> None:
    _, args = load_model(f"models.py:{name}")
    assert args is not None
    assert [list(arg.shape) for arg in args] == [[2, 5, 16]]


def test_a_class_is_a_factory() -> None:
    assert isinstance(load_model("torch.nn:ReLU")[0], torch.nn.ReLU)


def test_the_same_weights_each_time() -> None:
    first, second = (load_model("models.py")[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_file_may_have_the_name_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("from torch.nn import ReLU as model\n")
    load_model(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py", "no such file: nowhere.py"),
        ("some/where:build", "no such file: some/where"),
        ("no_such_module:build", "no module named 'no_such_module'"),
        ("torch.no_such_part:build", "no module named 'torch.no_such_part'"),
        (":build", "'' is neither a package.module nor a file.py"),
        ("m.onnx:build", "no module named 'm'"),
        ("models.py:biuld", "models.py has no 'biuld'; did you mean 'build'?"),
        ("empty.py", "empty.py has no 'model' or 'build': write empty.py:FACTORY"),
        ("models.py:needs", "'needs' needs arguments (width); name a factory that needs none"),
        ("models.py:number", "'number' must return a torch.nn.Module or (module, args), got int"),
        ("models.py:answer", "'answer' is not a factory: it is of type int, and cannot be called"),
        ("models.py:with_a_list", "'with_a_list' must return a tuple of arguments, got list"),
    ],
)
def test_what_is_no_model_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(spec)
    assert message in str(caught.value)
    assert message in error_of("export", spec, "o.onnx", "--shape", "1,16", code=2)


def test_a_module_that_does_not_import_names_what_it_lacks() -> None:
    message = error_of("export", "imports_nothing:build", "o.onnx", code=1)
    assert message == "No module named 'a_package_that_is_not_there'"


def test_a_factory_that_fails_is_one_line() -> None:
    message = error_of("export", "models.py:broken", "o.onnx", "--shape", "1,16", code=1)
    assert message == "RuntimeError: no checkpoint (--debug shows where)"


@pytest.mark.parametrize("flags", [[], ["-q"]])
def test_a_factory_that_exits_is_an_error(flags: list[str]) -> None:
    message = error_of("export", "models.py:exits", "o.onnx", "--shape", "1,16", *flags, code=1)
    assert message == "the model's code called sys.exit(0) (--debug shows where)"


def test_a_model_that_is_an_moe_module() -> None:
    result = run("export", "models.py:bare", "bare.onnx", "--shape", "2,16", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["operators"] == {"DroplessMoE": 1}


def test_debug_shows_the_traceback() -> None:
    result = run("export", "models.py:broken", "o.onnx", "--shape", "1,16", "--debug")
    assert result.exit_code == 1
    line, *trace = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert line == "error: RuntimeError: no checkpoint"
    assert trace[0] == "Traceback (most recent call last):"
    assert "RuntimeError: no checkpoint" in trace


def test_debug_leaves_the_exit_code() -> None:
    result = run("inspect", "none.onnx", "--debug")
    assert result.exit_code == 2
    assert "error: no such file: none.onnx\nTraceback" in result.stderr


def test_shapes() -> None:
    floats, ids, mask = parse_shapes(["2,3", "1,4:int64", "5:bool"])
    assert (list(floats.shape), floats.dtype) == ([2, 3], torch.float32)
    assert (list(ids.shape), ids.dtype) == ([1, 4], torch.int64)
    assert mask.tolist() == [True] * 5
    assert torch.equal(parse_shapes(["2,3"])[0], floats)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("", "is not a list of sizes like 1,3,224,224"),
        ("2,x", "is not a list of sizes"),
        ("2;3", "is not a list of sizes"),
        ("2,", "is not a list of sizes"),
        ("2,-1", "has a negative size"),
        ("-1,16", "has a negative size"),
        ("2,3:complex64", "the dtype must be one of float32, "),
        ("2,3:", "the dtype must be one of float32, "),
    ],
)
def test_what_is_no_shape_is_refused(shape: str, reason: str) -> None:
    message = error_of("export", "models.py", "o.onnx", "--shape", shape, code=2)
    assert message.startswith(f"shape {shape!r}")
    assert reason in message


def test_dynamic_dimensions() -> None:
    shapes = parse_dynamic(["x:1=length", "mask:0=", "x:2=width"])
    assert shapes == {"x": {1: "length", 2: "width"}, "mask": {0: None}}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--dynamic", "x"], "--dynamic 'x' is not NAME:DIM=LABEL like tokens:1=sequence, or"),
        (["--dynamic", "x:1"], "--dynamic 'x:1' is not NAME:DIM=LABEL"),
        (["--dynamic", "x:one=n"], "--dynamic 'x:one=n' is not NAME:DIM=LABEL"),
        (["--dynamic", "x:-1=n"], "--dynamic 'x:-1=n' is not NAME:DIM=LABEL"),
        (["--dynamic", "x:1=2*n"], "--dynamic 'x:1=2*n' is not NAME:DIM=LABEL"),
        (["--dynamic", "x:1=n", "--dynamic", "x:1="], "--dynamic names dimension 1 of 'x' twice"),
        (["--dynamic", "y:1=n"], "--dynamic names 'y'; the example's arguments: x"),
        (["--dynamic", "x:3=n"], "--dynamic names dimension 3 of 'x', whose example has 3 dim"),
        (["--dynamic", "x:1=n", "--static"], "--static and --dynamic contradict each other"),
    ],
)
def test_what_is_no_dynamic_dimension_is_refused(asked: list[str], message: str) -> None:
    refused = error_of("export", "models.py", "o.onnx", "--shape", "2,5,16", *asked, code=2)
    assert refused.startswith(message)


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        (["--dynamic", "x:1=length"], ("batch", "length", 16)),
        (["--dynamic", "x:0=", "--dynamic", "x:1=length"], (2, "length", 16)),
        (["--static"], (2, 5, 16)),
    ],
)
def test_dynamic_dimensions_reach_the_file(asked: list[str], shape: tuple[int | str, ...]) -> None:
    result = run("export", "models.py:with_args", "shapes.onnx", "--verify", "-q", *asked)
    assert (result.exit_code, result.output) == (0, "")
    [graph_input] = dynamo_moe.inspect("shapes.onnx").inputs
    assert graph_input.shape == shape


@pytest.mark.parametrize("opset", [17, onnx.defs.onnx_opset_version() + 1])
def test_an_opset_out_of_range_is_refused_before_the_model_loads(opset: int) -> None:
    message = error_of("export", "models.py:broken", "o.onnx", "--opset", str(opset), code=2)
    newest = onnx.defs.onnx_opset_version()
    assert message == f"--opset must be from 18 to {newest}, got {opset}"


def test_a_place_that_cannot_be_written_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = error_of("export", "models.py:broken", "a.svg", code=2)
    assert message == "a.svg is a folder: name a file to write"
    # The superuser may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    message = error_of("export", "models.py:broken", "a.svg/o.onnx", code=2)
    assert message == "cannot write into folder: a.svg"


def test_export_needs_inputs_and_a_folder() -> None:
    assert "pass --shape, or return (model, args)" in error_of("export", "models.py", "o", code=2)
    message = error_of("export", "models.py", "no/o.onnx", "--shape", "1,16", code=2)
    assert message == "no such folder: no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hf", "absent", "m.onnx"], "there is no folder absent"),
        (["--hf", "absent", "m.onnx", "--static"], "--static does not go with a checkpoint"),
        (["model.py", "m.onnx", "--link-weights"], "--link-weights needs a checkpoint"),
        (["model.py", "m.onnx", "--group", "32"], "--group needs --quantize or --quantize-linear"),
        (
            ["model.py", "m.onnx", "--quantize", "int4", "--quantize-ignore", "x"],
            "--quantize-ignore needs --quantize-linear",
        ),
        (["model.py", "m.onnx", "--quantize", "int3"], "--quantize must be one of int4, mxfp4"),
        (["model.py", "m.onnx", "--quantize-linear", "x"], "--quantize-linear must be one of int4"),
        ([".", "m.onnx"], ". is a folder without config.json: no checkpoint"),
        (["model.py"], "name a file, or -o OUT.onnx"),
        (["model.py", "m.onnx", "-o", "n.onnx"], "is said twice: m.onnx and -o n.onnx"),
    ],
)
def test_wrong_uses_of_checkpoints(arguments: list[str], message: str) -> None:
    result = run("export", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
