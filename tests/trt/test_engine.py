"""Building engines: what is checked before TensorRT is asked, and what it is then asked."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import fake_tensorrt
import trt_plugin
from fake_tensorrt import ParserError, built, run
from small_bundles import LAYER, SMALL, program
from trt_plugin.bundle import Bundle
from trt_plugin.engine.installed import Installed, load_plugin

pytest_plugins = ("fake_tensorrt",)

without_tensorrt = pytest.mark.skipif(
    any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")),
    reason="it is installed",
)


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


def test_an_inputs_second_shapes_are_those_of_the_second_profile():
    one, two, all_ = (((size,),) * 3 for size in (1, 2, 3))
    assert trt_plugin.join_profiles([]) == []
    assert trt_plugin.join_profiles([("a", one), ("b", two)]) == [{"a": one, "b": two}]
    assert trt_plugin.join_profiles([("a", one), ("m", all_), ("a", two)]) == [
        {"a": one, "m": all_},
        {"a": two, "m": all_},
    ]


@without_tensorrt
def test_without_tensorrt_one_line_says_what_is_missing(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    code, out, error = run("engine", str(model))
    assert (code, out) == (1, "")
    assert error.startswith(
        "error: building an engine needs TensorRT or TensorRT for RTX: pip install "
        "'dynamo-moe[tensorrt]', or pip install 'dynamo-moe[tensorrt-rtx]'; the lean runtime is not"
    )
    with pytest.raises(trt_plugin.EngineError, match="running an engine needs TensorRT or TensorR"):
        trt_plugin.Runner(model)
    with pytest.raises(ValueError, match="builder must be one of tensorrt, rtx; got 'trtexec'"):
        trt_plugin.Runner(model, builder="trtexec")


def test_what_makes_no_sense_is_refused(tmp_path):
    model = tmp_path / "model.onnx"
    model.touch()
    assert run("engine", "no.onnx")[0] == 2
    code, _, error = run("engine", str(model), "--shapes", "x")
    assert code == 2
    assert "--shapes: shapes must be" in error
    assert run("engine", str(model), "--kernels", "no.moek")[0] == 2
    code, _, error = run("engine", str(model), "--arch", "sm_42")
    assert code == 2
    assert "--arch: architecture must be one of sm_75, " in error
    shapes = [each for text in ("a=1", "a=2", "a=3", "b=1", "b=2") for each in ("--shapes", text)]
    code, _, error = run("engine", str(model), *shapes)
    assert code == 2
    assert (
        "inputs of several profiles must be named equally often, got a 3 times, b 2 times" in error
    )


def test_the_librarys_place_is_told():
    code, out, _ = run("plugin-path")
    assert code == 0
    assert out.strip() == str(trt_plugin.library_path())
    code, out, _ = run("plugin-path", "--self-registering")
    assert code == 0
    assert out.strip() == str(trt_plugin.library_path(self_registering=True))


def test_the_thread_that_parses_is_given_the_bundle(tensorrt, given_kernels, tmp_path, monkeypatch):
    bundle = tmp_path / "small.moek"
    SMALL.save(bundle)
    monkeypatch.setenv("DYNAMO_MOE_KERNELS", "another.moek")
    before, seen = dict(os.environ), []
    tensorrt.say = lambda: seen.append(dict(os.environ))
    built(tmp_path, kernels=bundle)
    assert given_kernels == [(str(bundle), [each.architecture for each in SMALL.programs])]
    assert seen == [before]
    built(tmp_path)
    assert len(given_kernels) == 1


# --- On a TensorRT that only answers ---


def test_what_the_plugin_said_is_in_the_error(tensorrt, tmp_path):
    tensorrt.parses = False
    reason = "DroplessMoE layers.3.mlp: cannot read the kernels' bundle a.moek"
    tensorrt.says = [(1, reason), (1, "ModelImporter.cpp: no creator of MoE"), (3, "hello")]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    path = tmp_path / "model.onnx"
    assert str(caught.value) == (
        f"TensorRT 10.9.0 does not parse {path}: node 'MoE_2' (DroplessMoE): no creator of MoE; "
        f"{reason}"
    )


def test_errors_name_what_was_being_parsed(tensorrt, tmp_path):
    tensorrt.parses = False
    # As the parser says it: in an importer it knows no node, but the functions around it.
    body = ("layer (DroplessMoE)", "many (else_branch)")
    inner = ParserError("no reduction", "", "", "importScatterElements", *body)
    tensorrt.errors = [inner, inner, *(ParserError("bad", f"n{i}", "MoE") for i in range(4))]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    assert str(caught.value).split(": ", 1)[1] == (
        "a node ScatterElements in many (else_branch) in layer (DroplessMoE): no reduction; "
        "node 'n0' (MoE): bad; node 'n1' (MoE): bad; and 2 more. com.microsoft::MoE is for ONNX "
        "Runtime: export the model for target plugin, or dense"
    )


def test_a_body_that_cannot_be_parsed_tells_why_the_plugin_is_missing(tensorrt, tmp_path):
    tensorrt.registers = False
    assert built(tmp_path) == b"an engine"
    tensorrt.parses = False
    tensorrt.errors = [ParserError("bad", "", "", "importScan", "layer (DroplessMoE)")]
    with pytest.raises(trt_plugin.EngineError) as caught:
        built(tmp_path)
    message = str(caught.value)
    assert "a node Scan in layer (DroplessMoE): bad. Its MoE nodes need the plugin's" in message
    assert "It is not loaded: TensorRT 10.9.0 did not register DroplessMoE and" in message
    assert message.endswith("A file of target dense needs no plugin")


def test_shapes_that_are_missing_or_do_not_fit(tensorrt, tmp_path):
    tensorrt.network_inputs = [
        SimpleNamespace(name="x", shape=(-1, 8), dtype=SimpleNamespace(name="FLOAT")),
        SimpleNamespace(name="m", shape=(8,), dtype=SimpleNamespace(name="FLOAT")),
    ]
    for profiles, message in (
        ({}, r"symbolic sizes: x \[\?, 8\]; give .* with --shapes x=1x8:4x8:16x8$"),
        ({"y": ((1,),) * 3}, "has no input y; its inputs: x, m"),
        ({"x": ((1, 8), (4, 8), (16, 9))}, r"x has the shape \[\?, 8\] .*; \[16, 9\] does not fit"),
        ([{"x": ((1, 8),) * 3}, {"x": ((1,),) * 3}], r"\[1\] does not fit"),
    ):
        with pytest.raises(trt_plugin.EngineError, match=message):
            built(tmp_path, profiles)


def test_a_report_is_the_same_after_json(tensorrt, tmp_path):
    x = SimpleNamespace(name="x", shape=(-1, 8), dtype=SimpleNamespace(name="FLOAT"))
    tensorrt.network_inputs = [x]
    (tmp_path / "model.onnx").touch()
    report = trt_plugin.build_engine(
        tmp_path / "model.onnx", tmp_path / "a.engine", {"x": ((4, 8),) * 3}, progress=False
    ).to_dict()
    assert report["inputs"] == [{"name": "x", "dtype": "float", "shape": [-1, 8]}]
    assert json.loads(json.dumps(report)) == report


def test_architectures_are_for_tensorrt_for_rtx(tensorrt, tmp_path):
    with pytest.raises(trt_plugin.EngineError, match=r"TensorRT 10\.9\.0 builds for the device"):
        built(tmp_path, architectures=["sm_89"])


# Of one layer for sm_89 and sm_120, and of another for sm_80 and sm_120.
OTHER = LAYER._replace(experts=16)
MIXED = Bundle(
    (
        *(program(architecture=89), program(architecture=120)),
        *(program(layer=OTHER, architecture=80), program(layer=OTHER, architecture=120)),
    )
)


def test_each_layer_stores_what_the_target_runs(tensorrt, given_kernels, tmp_path):
    bundle = tmp_path / "mixed.moek"
    MIXED.save(bundle)
    for architectures, stored in (
        (["sm_89"], [89, 80]),
        (["sm_120"], [120, 120]),
        ([89, 120], [89, 120, 80, 120]),
        (None, [89, 120, 80, 120]),
    ):
        built(tmp_path, kernels=bundle, architectures=architectures)
        assert given_kernels.pop() == (str(bundle), stored)
    with pytest.raises(
        trt_plugin.EngineError, match=r"bundle has no kernels for sm_80 of the layer .*: compile it"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_80"])


def test_errors_name_the_given_bundle(tensorrt, given_kernels, tmp_path):
    bundle = tmp_path / "mixed.moek"
    MIXED.save(bundle)
    tensorrt.parses = False

    def say() -> None:
        ((name, _),) = given_kernels
        message = f"DroplessMoE moe: {name} has other layers"
        tensorrt.logger.log(1, message)

    tensorrt.say = say
    with pytest.raises(
        trt_plugin.EngineError, match=f"DroplessMoE moe: {bundle} has other layers$"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])


def test_the_environment_leaves_architectures_out(tensorrt, given_kernels, tmp_path, monkeypatch):
    bundle, name = tmp_path / "mixed.moek", "DYNAMO_MOE_ARCHITECTURES"
    MIXED.save(bundle)
    monkeypatch.setenv(name, "120")
    built(tmp_path, kernels=bundle)
    assert given_kernels.pop() == (str(bundle), [120, 120])
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name}=120 leaves others out has no kernels for sm_89"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])
    # Then the other layer has none left.
    monkeypatch.setenv(name, "sm_89")
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name}=sm_89 leaves others out has no kernels for sm_89"
    ):
        built(tmp_path, kernels=bundle, architectures=["sm_89"])
    monkeypatch.setenv(name, "sm_90")
    with pytest.raises(
        trt_plugin.EngineError, match=f"{name} is 'sm_90': .* the bundle, sm_89, sm_120, sm_80$"
    ):
        built(tmp_path, kernels=bundle)


def test_kernels_are_shared_unless_asked_otherwise(tensorrt, tmp_path, monkeypatch):
    entered = []
    monkeypatch.setattr(
        "trt_plugin.engine.building.sharing_kernels", lambda: nullcontext(entered.append("shared"))
    )
    built(tmp_path)
    assert entered == ["shared"]
    built(tmp_path, share_kernels=False)
    assert entered == ["shared"]


def test_what_the_plugin_warns_of_is_a_warning(tensorrt, tmp_path):
    warning = "DroplessMoEExperts layers.3.mlp: no kernels with x float32"
    tensorrt.says = [(2, "another's warning"), (2, warning)]
    with pytest.warns(UserWarning, match="no kernels with x") as caught:
        assert built(tmp_path) == b"an engine"
    assert [str(each.message) for each in caught] == [warning]
    assert caught[0].filename == fake_tensorrt.__file__  # Which asks for it.


def test_a_plugin_that_cannot_be_loaded(tensorrt, tmp_path):
    tensorrt.registers = False
    with pytest.raises(trt_plugin.EngineError, match="did not register DroplessMoE"):
        built(tmp_path, with_library=True)


def test_a_file_that_is_not_there(tensorrt, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*model\.onnx"):
        trt_plugin.build_engine(tmp_path / "model.onnx", tmp_path / "model.engine")


def test_a_timing_cache_grows(tensorrt, tmp_path):
    path = tmp_path / "timing"
    for content in (b" and more", b"good and more"):
        built(tmp_path, timing_cache=path)
        assert path.read_bytes() == content
        path.write_bytes(b"good")
    assert {each.name for each in tmp_path.iterdir()} == {"timing", "model.engine"}


@pytest.mark.parametrize("content", [b"damaged", b"good, another device's"])
def test_a_timing_cache_that_is_refused_starts_anew(tensorrt, tmp_path, content):
    path = tmp_path / "timing"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="timing is damaged, or of another device or TensorRT"):
        assert built(tmp_path, timing_cache=path) == b"an engine"
    assert path.read_bytes() == b" and more"


def test_a_tensorrt_without_timing_caches(tensorrt, tmp_path):
    tensorrt.config.create_timing_cache = lambda content: None
    with pytest.warns(UserWarning, match="starts anew"):
        assert built(tmp_path, timing_cache=tmp_path / "timing") == b"an engine"
    assert not (tmp_path / "timing").exists()


# --- TensorRT for RTX's link, without which its parser ends the process ---


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """The folder of the wheel's libraries, where the link is missing."""
    folder = tmp_path / "tensorrt_rtx_libs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "libtensorrt_rtx.so.1").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trt_plugin.engine.installed.load", lambda registry: None)
    return folder


def test_the_link_is_made(tensorrt, wheel):
    for _ in range(2):
        load_plugin(Installed("rtx", tensorrt))
        assert (wheel / "libtensorrt_rtx.so").readlink() == Path("libtensorrt_rtx.so.1")


def test_a_link_that_cannot_be_made_is_asked_for(tensorrt, wheel, monkeypatch):
    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(trt_plugin.EngineError) as caught:
        load_plugin(Installed("rtx", tensorrt))
    assert str(caught.value) == (
        "TensorRT for RTX would end this process: its parser looks for "
        f"{wheel}/libtensorrt_rtx.so, and the link cannot be made here (Permission denied). "
        f"Make it with: ln -sf libtensorrt_rtx.so.1 {wheel}/libtensorrt_rtx.so"
    )


def test_a_loaded_plugin_needs_the_link_too(tensorrt, wheel, tmp_path, monkeypatch):
    tensorrt.loaded.append("by trt_plugin.load()")
    link = wheel / "libtensorrt_rtx.so"
    load_plugin(Installed("rtx", tensorrt))
    assert link.readlink() == Path("libtensorrt_rtx.so.1")
    # The file might have MoE nodes: its parser would add the plugin and end the process.
    link.unlink()
    link.symlink_to("libtensorrt_rtx.so.0")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    with pytest.raises(
        trt_plugin.EngineError, match=r"is a link to libtensorrt_rtx\.so\.0, which is missing"
    ):
        built(tmp_path, builder="rtx")
