"""``inspect``: what it prints and where, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dynamo_moe
from cli_models import error_of, run

pytest_plugins = ("cli_models",)
pytestmark = pytest.mark.usefixtures("in_the_folder_of_models")


def test_inspect_shows_tables() -> None:
    result = run("inspect", "m.onnx")
    assert result.exit_code == 0
    assert "2 MoE layers" in result.stdout
    assert result.stderr == ""


def test_inspect_as_json() -> None:
    result = run("inspect", "m.onnx", "--json")
    assert json.loads(result.stdout) == dynamo_moe.inspect("m.onnx").to_dict()


def test_quiet_inspect_prints_what_is_asked_for(tmp_path: Path) -> None:
    result = run("inspect", "m.onnx", "-q")
    assert (result.exit_code, result.output) == (0, "")
    result = run("inspect", "m.onnx", "-q", "--json", "--picture", str(tmp_path / "m.svg"))
    assert (json.loads(result.stdout)["nodes"], result.stderr) == (7, "")
    assert (tmp_path / "m.svg").exists()
    error = error_of("inspect", "models.py", "-q", code=1)
    assert error.startswith("models.py is not an ONNX model")


def test_inspect_draws(tmp_path: Path) -> None:
    result = run("inspect", "m.onnx", "--json", "--picture", str(tmp_path / "m.svg"))
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
    assert error_of("inspect", *arguments, code=code) == message
