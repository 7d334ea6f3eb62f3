"""The command line: what it prints and where, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe.cli import app
from dynamo_moe.cli.model_loading import UsageError, load_model, parse_dynamic, parse_shapes
from onnx_files import crashing_file, moe_model, save

MODELS = '''
"""Factories, good and bad."""
import torch
from torch import nn
from dynamo_moe.models import DroplessMoEMlp
from helper_of_models import Branching, Listed, Net, OneRun, Talking, TwoInputs

ready = Net()

def build():
    return Net()

def with_args():
    return Net(), (torch.ones(2, 5, 16),)

def with_a_tensor():
    return Net(), torch.ones(2, 5, 16)

def with_a_list():
    return Net(), [1]

def needs(width, depth=2):
    return Net()

def number():
    return 3

def broken():
    raise RuntimeError("no checkpoint\\nat all")

def exits():
    raise SystemExit(0)

def talks():
    print("made a model")
    return Talking()

def branches():
    return Branching()

def bare():
    return DroplessMoEMlp(16, 24, num_experts=4, top_k=2)

def mixed():
    return nn.Sequential(Net(), Listed())

def two_inputs():
    return TwoInputs()

def one_run():
    return OneRun()

def plain():
    return nn.Linear(16, 16)

def meta():
    with torch.device("meta"):
        return Net()

def program():
    return torch.export.export(nn.Linear(16, 16), (torch.ones(2, 16),)).module()

answer = 42
'''

HELPER = """
import torch
from torch import nn
from dynamo_moe.models import DroplessMoEMlp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = DroplessMoEMlp(16, 24, num_experts=4, top_k=2)

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Talking(Net):
    def forward(self, x):
        print("called a model")
        return super().forward(x)

class Branching(Net):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts))

class TwoInputs(Net):
    def forward(self, x, mask):
        return super().forward(x) * mask[..., None]

class OneRun(Net):
    # Another function in every process but the one that exported it.
    def forward(self, x):
        y = super().forward(x)
        return y if torch.compiler.is_exporting() else y + 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.py").write_text(MODELS)
    (folder / "helper_of_models.py").write_text(HELPER)
    (folder / "imports_nothing.py").write_text("import a_package_that_is_not_there\n")
    (folder / "empty.py").write_text("")
    (folder / "a.svg").mkdir()
    save(moe_model(), folder / "m.onnx")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in {"models", "helper_of_models", "_model_models"} - before:
        sys.modules.pop(name, None)


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def _error(*arguments: str, code: int) -> str:
    """The one line that a failing command prints."""
    result = _run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    [line] = lines
    return line.removeprefix("error: ")


def test_help_names_the_commands() -> None:
    text = _run("--help").stdout
    assert all(command in text for command in ("export", "verify", "inspect"))


@pytest.mark.parametrize("command", ["export", "verify", "inspect"])
def test_help_has_an_example(command: str) -> None:
    result = _run(command, "-h")
    assert result.exit_code == 0
    assert f"dynamo-moe {command} " in result.stdout.split("Example")[1]


def test_version() -> None:
    assert _run("--version").stdout == f"dynamo-moe {dynamo_moe.__version__}\n"


def test_inspect_shows_tables() -> None:
    result = _run("inspect", "m.onnx")
    assert result.exit_code == 0
    assert "2 MoE layers" in result.stdout
    assert result.stderr == ""


def test_inspect_as_json() -> None:
    result = _run("inspect", "m.onnx", "--json")
    assert json.loads(result.stdout) == dynamo_moe.inspect("m.onnx").to_dict()


def test_quiet_inspect_prints_what_is_asked_for(tmp_path: Path) -> None:
    result = _run("inspect", "m.onnx", "-q")
    assert (result.exit_code, result.output) == (0, "")
    result = _run("inspect", "m.onnx", "-q", "--json", "--picture", str(tmp_path / "m.svg"))
    assert (json.loads(result.stdout)["nodes"], result.stderr) == (7, "")
    assert (tmp_path / "m.svg").exists()
    assert _error("inspect", "models.py", "-q", code=1).startswith("models.py is not an ONNX model")


def test_inspect_draws(tmp_path: Path) -> None:
    result = _run("inspect", "m.onnx", "--json", "--picture", str(tmp_path / "m.svg"))
    assert json.loads(result.stdout)["nodes"] == 7
    assert (tmp_path / "m.svg").read_text().count("DroplessMoE") >= 1
    assert result.stderr == f"Drew {tmp_path / 'm.svg'}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.onnx"], 2, "no such file: nowhere.onnx"),
        (["models.py"], 1, "models.py is not an ONNX model: it is not a protobuf message"),
        (["m.onnx", "--picture", "m.pdf"], 2, "a picture is a .svg or .png file, got 'm.pdf'"),
        (["m.onnx", "--picture", "no/m.svg"], 2, "no such folder: no"),
        (["m.onnx", "--picture", "a.svg"], 2, "a.svg is a folder: name a file to write"),
    ],
)
def test_inspect_says_what_is_wrong(arguments: list[str], code: int, message: str) -> None:
    assert _error("inspect", *arguments, code=code) == message


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
    assert message in _error("export", spec, "o.onnx", "--shape", "1,16", code=2)


def test_a_module_that_does_not_import_names_what_it_lacks() -> None:
    message = _error("export", "imports_nothing:build", "o.onnx", code=1)
    assert message == "No module named 'a_package_that_is_not_there'"


def test_a_factory_that_fails_is_one_line() -> None:
    message = _error("export", "models.py:broken", "o.onnx", "--shape", "1,16", code=1)
    assert message == "RuntimeError: no checkpoint (--debug shows where)"


@pytest.mark.parametrize("flags", [[], ["-q"]])
def test_a_factory_that_exits_is_an_error(flags: list[str]) -> None:
    message = _error("export", "models.py:exits", "o.onnx", "--shape", "1,16", *flags, code=1)
    assert message == "the model's code called sys.exit(0) (--debug shows where)"


def test_a_model_that_is_an_moe_module() -> None:
    result = _run("export", "models.py:bare", "bare.onnx", "--shape", "2,16", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["operators"] == {"DroplessMoE": 1}


def test_debug_shows_the_traceback() -> None:
    result = _run("export", "models.py:broken", "o.onnx", "--shape", "1,16", "--debug")
    assert isinstance(result.exception, RuntimeError)


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
    message = _error("export", "models.py", "o.onnx", "--shape", shape, code=2)
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
    refused = _error("export", "models.py", "o.onnx", "--shape", "2,5,16", *asked, code=2)
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
    result = _run("export", "models.py:with_args", "shapes.onnx", "--verify", "-q", *asked)
    assert (result.exit_code, result.output) == (0, "")
    [graph_input] = dynamo_moe.inspect("shapes.onnx").inputs
    assert graph_input.shape == shape


@pytest.mark.parametrize("opset", [17, onnx.defs.onnx_opset_version() + 1])
def test_an_opset_out_of_range_is_refused_before_the_model_loads(opset: int) -> None:
    message = _error("export", "models.py:broken", "o.onnx", "--opset", str(opset), code=2)
    newest = onnx.defs.onnx_opset_version()
    assert message == f"--opset must be from 18 to {newest}, got {opset}"


def test_a_place_that_cannot_be_written_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = _error("export", "models.py:broken", "a.svg", code=2)
    assert message == "a.svg is a folder: name a file to write"
    # The superuser may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    message = _error("export", "models.py:broken", "a.svg/o.onnx", code=2)
    assert message == "cannot write into folder: a.svg"


def test_export_needs_inputs_and_a_folder() -> None:
    assert "pass --shape, or return (model, args)" in _error("export", "models.py", "o", code=2)
    message = _error("export", "models.py", "no/o.onnx", "--shape", "1,16", code=2)
    assert message == "no such folder: no"


def test_verify_needs_a_file() -> None:
    assert _error("verify", "no.onnx", "models.py", code=2) == "no such file: no.onnx"


def test_without_onnxruntime_verifying_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_moe.cli.models.find_spec", lambda name: None)
    message = _error("verify", "m.onnx", "models.py", code=1)
    assert message == "verifying needs ONNX Runtime: pip install 'dynamo-moe[onnxruntime]'"


@pytest.fixture(scope="module")
def exported(folder: Path) -> dict[str, Any]:
    """Output of ``export --json``; the file is ``net.onnx``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        result = _run("export", "models.py", "net.onnx", "--shape", "2,5,16", "--verify", "--json")
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
    result = _run("verify", "net.onnx", "models.py", "--json", "--shape", "3,5,16")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cases"][0]["shapes"] == {"x": [3, 5, 16]}
    quiet = _run("verify", "net.onnx", "models.py", "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert "agrees" in _run("verify", "net.onnx", "models.py").stdout


@pytest.mark.usefixtures("exported")
def test_a_file_that_differs_fails() -> None:
    result = _run("verify", "net.onnx", "torch.nn:ReLU", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["passed"]
    assert "error: net.onnx differs from the model" in result.stderr


def test_a_runtime_that_dies_is_one_line() -> None:
    crashing_file(Path("crash.onnx"))
    message = _error("verify", "crash.onnx", "torch.nn:Identity", code=1)
    assert message.startswith("ONNX Runtime died of SIG")


def test_options_reach_the_export() -> None:
    result = _run(
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


def test_the_body_beside_the_node() -> None:
    for body in ("loop", "unrolled"):
        options = ("--shape", "2,5,16", "--body", body, "--verify", "-q")
        result = _run("export", "models.py", f"{body}.onnx", *options)
        assert (result.exit_code, result.output) == (0, "")
    loop, unrolled = (
        [node.op_type for function in onnx.load(f"{body}.onnx").functions for node in function.node]
        for body in ("loop", "unrolled")
    )
    assert "If" in loop
    assert {"If", "Scan", "Loop"}.isdisjoint(unrolled)
    for_dense = ("--body", "unrolled", "--target", "dense")
    refused = _error("export", "models.py", "o.onnx", "--shape", "2,5,16", *for_dense, code=2)
    assert refused.startswith("--body needs --target plugin")


def test_what_the_model_cannot_do_is_one_line() -> None:
    result = _run("export", "models.py", "o.onnx", "--shape", "2,5,17")
    assert result.exit_code == 1
    assert "1 MoE module converted" in result.stdout
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: the model itself fails on the example (x [2, 5, 17] float32), ")
    assert "helper_of_models.py:13 (`return x + self.mlp(self.norm(x))`): Given norm" in error
    assert error.endswith("(--debug shows where)")
    assert not Path("o.onnx").exists()


def test_a_failed_export_as_json() -> None:
    result = _run("export", "models.py", "o.onnx", "--shape", "2,5,17", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [each["module"] for each in report.pop("conversion")["replaced"]] == ["mlp"]
    assert report.pop("error").startswith("the model itself fails on the example (x [2, 5, 17] ")
    assert report == {"verification": None}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["2,5,16"], "missing a required argument: 'mask'"),
        (["2,5,16", "2,5", "1"], "too many positional arguments"),
    ],
)
def test_another_number_of_inputs(shapes: list[str], message: str) -> None:
    options = [option for shape in shapes for option in ("--shape", shape)]
    refused = _error("export", "models.py:two_inputs", "o.onnx", *options, code=2)
    assert refused == (
        f"the example does not fit TwoInputs.forward(x, mask): {message}; "
        "--shape is given once for each input, in their order"
    )


def test_a_model_without_values_is_one_line() -> None:
    result = _run("export", "models.py:meta", "o.onnx", "--shape", "2,5,16")
    assert result.exit_code == 1
    assert "not compared" in result.stdout
    assert "error: 'norm.weight' is on the meta device, without values" in result.stderr


def test_a_trace_is_no_model() -> None:
    message = _error("export", "models.py:program", "o.onnx", "--shape", "2,16", code=2)
    assert message.startswith("'program' must return another model: model must be the torch.nn.Mod")


@pytest.mark.parametrize("flags", [[], ["--json"], ["-q"]])
def test_strict_fails_where_a_module_is_left(flags: list[str]) -> None:
    result = _run("export", "models.py:mixed", "strict.onnx", "--shape", "2,16", "--strict", *flags)
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
    result = _run("export", "models.py:mixed", "left.onnx", "--shape", "2,16")
    assert result.exit_code == 0, result.output
    left = "Modules that are left become many nodes, or fail to export: docs/how-to/"
    assert left in result.stdout
    assert "1 MoE module is not converted" in result.stdout
    result = _run("export", "models.py:plain", "plain.onnx", "--shape", "2,16", "--strict")
    assert result.exit_code == 0, result.output
    assert "Nothing to convert: no module looks like a router with experts" in result.stdout


def test_verified_files_are_those_of_an_export_alone(tmp_path: Path) -> None:
    files = {}
    for flags in ((), ("--verify",)):
        out = tmp_path / f"{len(flags)}" / "m.onnx"
        out.parent.mkdir()
        options = ("--shape", "2,5,16", "--external-data", "--profile", "--json", "-q", *flags)
        result = _run("export", "models.py", str(out), *options)
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
    result = _run("export", "models.py:one_run", str(out), *options)
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
    def breaks(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("dynamo_moe.cli.models._verify", breaks)
    out = tmp_path / "m.onnx"
    result = _run("export", "models.py", str(out), "--shape", "2,5,16", "--verify")
    assert result.exit_code == 1
    assert "1 MoE module converted" in result.stdout
    said = f"error: RuntimeError: no such kernel; the file is left at {tmp_path}/m.unverified.onnx"
    assert f"{said}, {out} was not written (--debug shows where)" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.unverified.onnx"]


def test_what_the_models_code_prints_is_no_report() -> None:
    options = ("--shape", "2,5,16", "--verify")
    result = _run("export", "models.py:talks", "talks.onnx", *options, "--json")
    assert json.loads(result.stdout)["verification"]["passed"]
    assert "made a model" in result.stderr
    assert "called a model" in result.stderr
    quiet = _run("export", "models.py:talks", "talks.onnx", *options, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")


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


def test_debug_shows_what_pytorch_prints() -> None:
    result = _run("export", "models.py:branches", "o.onnx", "--shape", "2,5,16", "--debug")
    assert isinstance(result.exception, dynamo_moe.ExportError)
    assert "torch.ops.moe.dropless" in result.stderr


@pytest.mark.slow
def test_export_of_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from moe_architectures import ARCHITECTURES

    folder = tmp_path / "checkpoint"
    ARCHITECTURES["mixtral"].build().save_pretrained(folder)
    out = tmp_path / "m.onnx"
    options = ["--hf", folder, out, "--task", "text-generation", "--link-weights", "--dtype"]
    result = _run("export", *map(str, options), "float32", "--verify", "--json", "-q")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["conversion"]["replaced"]) == 2
    assert report["operators"] == {"DroplessMoE": 2}
    assert report["verification"]["passed"]
    assert not result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hf", "absent", "m.onnx"], "there is no folder absent"),
        (["--hf", "absent", "m.onnx", "--static"], "do not go with --hf"),
        (["model.py", "m.onnx", "--link-weights"], "need --hf"),
    ],
)
def test_wrong_uses_of_checkpoints(arguments: list[str], message: str) -> None:
    result = _run("export", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
