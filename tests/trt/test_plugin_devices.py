"""Devices and memory that the plugin does not find: nothing leaks, and the next call works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from moe_cases import assert_matches
from plugin_host import RUNTIME, attributes_of, describe, inputs_of
from plugin_layers import (
    CUDA_ERROR,
    INVALID_ARGUMENT,
    NO_DRIVER,
    NO_MEMORY,
    NOT_FOUND,
    described,
    small_case,
    the_error,
)
from standin import LAUNCH_FAILED, OUT_OF_MEMORY
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)


def test_an_engine_of_other_architectures(driver, tensorrt_host, tmp_path):
    case = small_case()
    programs = [StandinGpu(driver, name).program(case) for name in ("sm_86", "sm_90")]
    bundle = Bundle(tuple(programs)).data
    plugin = tensorrt_host.create("DroplessMoE", {"programs": bundle}, RUNTIME)
    # Code for sm_86 does not run on sm_80, nor that for sm_90 on any other.
    for device in ("sm_80", "sm_120"):
        StandinGpu(driver, device)
        status = plugin.shape_change(described(case), describe(case.arguments["x"]))
        assert status == NOT_FOUND
        assert the_error(tensorrt_host) == (
            f"the device is {device}, the layer's kernels are for sm_86, sm_90: compile them for "
            f"it too, with dynamo-moe compile --arch {device}"
        )
    plugin.destroy()


BAD_ARCHITECTURES = {
    "sm_89": "names sm_89, {bundle} has this layer for sm_80, sm_90",
    "sm_80,sm_120,": "names sm_120, {bundle} has this layer for sm_80, sm_90",
    "hopper": "must name architectures, as in sm_89,sm_120; got 'hopper'",
    "sm_80;sm_90": "must name architectures, as in sm_89,sm_120; got 'sm_80;sm_90'",
    "sm_90a": "must name architectures, as in sm_89,sm_120; got 'sm_90a'",
    ",": "must name architectures, as in sm_89,sm_120; got ','",
}


@pytest.mark.parametrize("names", BAD_ARCHITECTURES)
def test_architectures_that_the_bundle_lacks(driver, tensorrt_host, tmp_path, monkeypatch, names):
    case = small_case()
    bundle = tmp_path / "model.moek"
    programs = [StandinGpu(driver, name).program(case) for name in ("sm_90", "sm_80")]
    bundle.write_bytes(Bundle(tuple(programs)).data)
    monkeypatch.setenv("DYNAMO_MOE_ARCHITECTURES", names)
    assert (
        tensorrt_host.create("DroplessMoE", attributes_of(case) | {"kernels": str(bundle)}) is None
    )
    message = BAD_ARCHITECTURES[names].format(bundle=bundle)
    assert (
        the_error(tensorrt_host) == f"the environment variable DYNAMO_MOE_ARCHITECTURES {message}"
    )


def test_without_a_context_and_a_stream(driver, tensorrt_host, stored, layer):
    plugin, case = layer
    x = case.arguments["x"]
    driver.set_context(None)
    # The kernels are loaded when the stream is known.
    assert plugin.shape_change(described(case), describe(x)) == 0
    assert plugin.enqueue(inputs_of(case), torch.empty_like(x), 256) == INVALID_ARGUMENT
    assert the_error(tensorrt_host) == (
        "this thread has no current CUDA context: a CUDA runtime call such as cudaFree(0) makes "
        "the device's current"
    )


WITHOUT_DRIVER = """
import sys
from pathlib import Path
from moe_cases import make_case
from plugin_host import *
case = make_case("dropless", (5,), width=16, hidden=24)
tensorrt = host(VERSIONS[0])
plugin = tensorrt.create("DroplessMoE", attributes_of(case) | {"kernels": sys.argv[1]})
inputs = [describe(tensor) for tensor in inputs_of(case)]
print(plugin.supports_all(inputs, inputs[0]), plugin.configure(inputs, inputs[0]))
engine = tensorrt.create("DroplessMoE", {"programs": Path(sys.argv[2]).read_bytes()}, RUNTIME)
print(engine.workspace(inputs, inputs[0]) > 0, engine.shape_change(inputs, inputs[0]))
for message in tensorrt.messages():
    print(message)
"""


@pytest.mark.first(1)
def test_without_a_driver(driver, tensorrt_host, stored, tmp_path, layer):
    (tmp_path / "programs").write_bytes(stored)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER, tmp_path / "model.moek", tmp_path / "programs"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    build, runtime, *messages = done.stdout.splitlines()
    # Building needs none.
    assert build == "True 0"
    assert runtime == f"True {NO_DRIVER}"
    (message,) = messages
    assert message.startswith("own 1 DroplessMoE layers.3.mlp: the CUDA driver is not available")


@pytest.mark.parametrize("launches_before", [0, 1, 2])
def test_a_launch_that_fails(driver, tensorrt_host, stored, layer, launches_before):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    size = plugin.workspace(described(case), describe(x))
    first = plugin.run(inputs, size)
    workspace, y = torch.empty(size, dtype=torch.uint8), torch.empty_like(x)
    driver.fail("cuLaunchKernelEx", LAUNCH_FAILED, launches_before)
    assert plugin.enqueue(inputs, y, workspace.data_ptr()) == CUDA_ERROR
    assert "cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED" in the_error(tensorrt_host)
    assert torch.equal(plugin.run(inputs, size), first)
    assert_matches(first, case.oracle(), case.dtypes)


def test_device_memory_that_is_exhausted(driver, tensorrt_host, stored, layer):
    plugin, case = layer
    inputs, output = described(case), describe(case.arguments["x"])
    driver.fail("cuModuleLoadData", OUT_OF_MEMORY, calls_before=1)
    assert plugin.shape_change(inputs, output) == NO_MEMORY
    assert "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY" in the_error(tensorrt_host)
    assert driver.live_modules == 0
    result = plugin.run(inputs_of(case), plugin.workspace(inputs, output))
    assert_matches(result, case.oracle(), case.dtypes)


def test_tensors_without_memory(tensorrt_host, stored, layer):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    assert plugin.shape_change(described(case), describe(x)) == 0
    workspace = torch.empty(plugin.workspace(described(case), describe(x)), dtype=torch.uint8)
    y = torch.empty_like(x)
    inputs[3] = None
    status = plugin.enqueue(inputs, y, workspace.data_ptr(), descriptions=described(case))
    assert status == INVALID_ARGUMENT
    assert "tensor w2 is null" in the_error(tensorrt_host)
    assert plugin.enqueue(inputs_of(case), y, 0) == INVALID_ARGUMENT
    assert "workspace" in the_error(tensorrt_host)
