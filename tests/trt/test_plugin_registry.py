"""The library in the registries of real TensorRTs: both major versions, and that for RTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from ctypes.util import find_library
from functools import cache
from pathlib import Path

import pytest

import trt_plugin.plugin
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from custom_ops.options import ROUTER_OPTIONS
from dynamo_moe.moe_nodes.nodes import EXPERT_CACHE, RESIDENT_EXPERTS, SOURCES
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from plugin_host import attributes_of
from standin import ROOT
from tensorrt_wheels import LEAN, RTX, environment, install
from trt_plugin.bundle import Bundle
from trt_plugin.native import library_path

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "tensorrt_lean_bindings")
REGISTERED = ["DroplessMoE", "DroplessMoEExperts"]


@cache
def run(version: str) -> tuple[dict, list[str]]:
    """What tests/support/real_registry.py reports, and what the library wrote to stderr."""
    folder = install(version).parent
    case = make_case("dropless", (5,), width=16, hidden=24)
    program = uncompiled_program(plan(layer_of(case), architecture("sm_80")))
    bundle = folder / f"model.{os.getpid()}.moek"
    bundle.write_bytes(Bundle((program,)).data)
    module = "tensorrt_rtx_bindings" if version == RTX else "tensorrt_lean_bindings"
    arguments = [library_path(), bundle, json.dumps(attributes_of(case)), module]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "real_registry.py", *map(str, arguments)],
        env=environment(version),
        capture_output=True,
        text=True,
        check=False,
    )
    bundle.unlink()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


real = pytest.mark.parametrize("version", [*LEAN, RTX])


@pytest.mark.slow
@real
@pytest.mark.first(1)
def test_the_registry_has_the_creators(version):
    report, _ = run(version)
    assert report["version"].startswith(version.removeprefix("rtx-"))
    assert report["creators"] == [
        [name, version, "", "IPluginCreatorV3One"] for name in REGISTERED for version in "1234"
    ]
    dropless, offloaded, rounded, both, experts, offloaded_experts, *same = report["fields"]
    of_router = {rare: [o.attribute for o in ROUTER_OPTIONS if o.rare == rare] for rare in (0, 1)}
    assert dropless == [*experts, *of_router[False]]
    added = [RESIDENT_EXPERTS, *SOURCES.values(), EXPERT_CACHE]
    assert (offloaded, offloaded_experts) == ([*added, *dropless], [*added, *experts])
    assert rounded == [*dropless, *of_router[True]]
    assert (both, same) == ([*added, *rounded], [experts, offloaded_experts])
    assert {"top_k", "num_experts", "activation", "kernels"} < set(experts)


# As the Triton Inference Server opens what its option "plugins" names.
OPEN = """
import ctypes, importlib, os, sys
trt = importlib.import_module(sys.argv[2]) if len(sys.argv) > 2 else None
ctypes.CDLL(sys.argv[1], os.RTLD_NOW | os.RTLD_LOCAL)
for creator in trt.get_plugin_registry().all_creators if trt else ():
    if creator.name.startswith("Dropless"):
        print(creator.name, creator.plugin_version)
"""


def opened(version: str, library: Path, *module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", OPEN, str(library), *module],
        env=environment(version),
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", LEAN)
def test_a_library_that_is_only_opened(version):
    assert opened(version, library_path(), "tensorrt_lean_bindings").stdout == ""
    done = opened(version, library_path(self_registering=True), "tensorrt_lean_bindings")
    names = [f"{name}{packed}" for name in REGISTERED for packed in ("", "Packed")]
    registered = [f"{name} {number}" for name in names for number in "1234"]
    assert sorted(done.stdout.splitlines()) == sorted(registered)
    assert done.stderr == ""


@pytest.mark.skipif(find_library("nvinfer") is not None, reason="the loader finds TensorRT")
def test_a_library_that_finds_no_tensorrt(tmp_path):
    done = opened(LEAN[0], library_path(self_registering=True))
    assert done.stderr == (
        "libdynamo_moe_self_registering.so: TensorRT is neither in this process nor where the "
        "loader looks for libraries; no plugin is registered\n"
    )
    alone = tmp_path / "libdynamo_moe_self_registering.so"
    alone.write_bytes(library_path(self_registering=True).read_bytes())
    done = opened(LEAN[0], alone, "tensorrt_lean_bindings")
    assert done.stdout == ""
    assert f"TensorRT does not load {tmp_path / 'libdynamo_moe.so'}" in done.stderr


@pytest.mark.slow
@real
def test_plugins_are_created_in_both_phases(version):
    # TensorRT's Python does not clone plugins of C++: its clone() returns None for any.
    report, _ = run(version)
    # Python takes any build interface for version 2, whatever that says of itself.
    types = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime")
    assert report["plugins"] == 2 * [["DroplessMoE", "1", "", 1, *types]]


@pytest.mark.slow
@real
def test_bad_fields_are_refused_with_a_reason(version):
    report, log = run(version)
    assert report["refused"] == [True] * 6
    # The lean runtime has no logger without a GPU. TensorRT for RTX has its builder's, with the
    # layout of TensorRT 11 though its version is 1.
    lines, begin = (report["messages"], "ERROR") if version == RTX else (log, "[dynamo-moe]")
    errors = [line for line in lines if line.startswith(f"{begin} DroplessMoE layers.3.mlp: ")]
    reasons = [line.split(": ", 1)[1] for line in errors]
    assert len(reasons) == 6
    if version == RTX:
        assert not [line for line in log if line.startswith("[dynamo-moe]")]
    assert reasons[:5] == [
        "attribute num_experts is missing",
        "attribute top_k must be in 1..32, got 0",
        "attribute top_k must be one INT32, got 1 of CHAR (6)",
        "attribute resident_experts is missing",
        "field programs is of the plugin's version 1, not 2",
    ]
    assert reasons[5].startswith("bundle")


@pytest.mark.slow
@real
def test_loading_twice(version):
    report, _ = run(version)
    assert report["loaded twice"] == (
        "TensorRT's registry already has DroplessMoE and DroplessMoEExperts: load the library "
        "once, by trt_plugin.load() or by an engine that holds it"
    )


# --- What load() says where there is no such TensorRT ---


class Registry:
    """A registry that loads nothing."""

    def get_creator(self, name: str, version: str, namespace: str) -> None:
        return None

    def load_library(self, path: str) -> None:
        return None


def pretend(monkeypatch, version: str, name: str = "tensorrt") -> None:
    for other in MODULES:
        monkeypatch.setitem(sys.modules, other, None)
    module = types.ModuleType(name)
    module.__version__ = version
    module.get_plugin_registry = Registry
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trt_plugin.plugin, "library_path", lambda: Path("/lib/libdynamo_moe.so"))


@pytest.mark.parametrize("version", ["8.6.1", "10.8.0.43", "12.0.0", "unknown"])
def test_other_versions_of_tensorrt(monkeypatch, version):
    pretend(monkeypatch, version)
    with pytest.raises(trt_plugin.plugin.PluginLoadError) as caught:
        trt_plugin.plugin.load()
    assert str(caught.value) == (
        "the plugin works with TensorRT 10.9 to 11.x and TensorRT for RTX 1.7 to 1.x, tensorrt is "
        f"{version}"
    )


@pytest.mark.parametrize("version", ["1.6.0.1", "2.0.0"])
def test_other_versions_of_tensorrt_for_rtx(monkeypatch, version):
    pretend(monkeypatch, version, "tensorrt_rtx")
    with pytest.raises(trt_plugin.plugin.PluginLoadError, match=rf", tensorrt_rtx is {version}$"):
        trt_plugin.plugin.load()


def test_a_library_that_registers_nothing(monkeypatch):
    pretend(monkeypatch, "10.9.0.34")
    with pytest.raises(
        trt_plugin.plugin.PluginLoadError, match=r"did not register DroplessMoE and"
    ):
        trt_plugin.plugin.load()


def test_without_tensorrt(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        trt_plugin.plugin.PluginLoadError,
        match=rf"none of {', '.join(MODULES)} is installed: install TensorRT, or load the library",
    ):
        trt_plugin.plugin.load()
