"""Building engines: what is checked before TensorRT is asked, and all of it where it is."""

from __future__ import annotations

import os
from importlib.util import find_spec

import onnx
import pytest
import torch
from typer.testing import CliRunner

import dynamo_moe
import trt_plugin
from dynamo_moe.cli import app
from dynamo_moe.models import swin_moe_digits
from trt_plugin.engine import _kernels_from

without_tensorrt = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="it is installed")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=4x8", ("x", ((4, 8),) * 3)),
        ("input.1=1x8:4x8:16x8", ("input.1", ((1, 8), (4, 8), (16, 8)))),
        ("x=0:1:2", ("x", ((0,), (1,), (2,)))),
    ],
)
def test_shapes(text, expected):
    assert trt_plugin.parse_shapes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "x=", "=4", "x=4:5", "x=4x8:4:4", "x=ax4", "x=1:2:3:4"])
def test_shapes_that_are_none(text):
    with pytest.raises(ValueError, match=r"shapes must be NAME=SHAPE or NAME=MIN:USUAL:MAX"):
        trt_plugin.parse_shapes(text)


def test_shapes_must_grow():
    with pytest.raises(ValueError, match="must grow from the smallest to the largest"):
        trt_plugin.parse_shapes("x=4x8:2x8:8x8")


@without_tensorrt
def test_without_tensorrt_one_line_says_what_is_missing(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    code, out, error = run("engine", str(model))
    assert (code, out) == (1, "")
    assert error.startswith("error: building an engine needs the package tensorrt; the lean")
    with pytest.raises(trt_plugin.EngineError, match="running an engine needs the package tensor"):
        trt_plugin.Runner(model)


def test_what_makes_no_sense_is_refused(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    assert run("engine", "no.onnx")[0] == 2
    code, _, error = run("engine", str(model), "--shapes", "x")
    assert code == 2
    assert "--shapes: shapes must be" in error
    assert run("engine", str(model), "--kernels", "no.moek")[0] == 2


def test_the_librarys_place_is_told():
    code, out, _ = run("plugin-path")
    assert code == 0
    assert out.strip() == str(trt_plugin.library_path())


@pytest.mark.parametrize("before", [None, "old.moek"])
def test_the_bundle_is_named_to_the_plugin_for_as_long_as_it_is_parsed(monkeypatch, before):

    name = "DYNAMO_MOE_KERNELS"
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    with _kernels_from(None):
        assert os.environ.get(name) == before
    with _kernels_from("new.moek"):
        assert os.environ[name].endswith("/new.moek")
    assert os.environ.get(name) == before


@pytest.mark.gpu
@pytest.mark.tensorrt
def test_an_engine_gives_pytorchs_results(tmp_path):
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    path = tmp_path / "swin.onnx"
    dynamo_moe.export(model, torch.randn(4, 1, 8, 8), path)
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    bundle = tmp_path / "swin.moek"
    assert run("compile", str(path), "--arch", capability, "-o", str(bundle))[0] == 0
    name = onnx.load(path).graph.input[0].name
    profile = ((1, 1, 8, 8), (4, 1, 8, 8), (16, 1, 8, 8))
    engine = tmp_path / "swin.engine"
    trt_plugin.build_engine(path, engine, {name: profile}, kernels=bundle, progress=False)
    runner = trt_plugin.Runner(engine)
    for batch in (1, 4, 16):
        x = torch.randn(batch, 1, 8, 8)
        (result,) = runner(**{name: x.cuda()}).values()
        torch.testing.assert_close(result.cpu(), model(x), atol=1e-3, rtol=1e-3)
