"""A layer of the plugin in TensorRT's place, and what it says to the logger."""

from __future__ import annotations

import contextlib

import pytest

from moe_cases import make_case
from plugin_host import (
    NAMES,
    VERSIONS,
    Description,
    attributes_of,
    describe,
    filled,
    host,
    inputs_of,
    serialized,
)
from standin_gpu import StandinGpu

INVALID_ARGUMENT, INVALID_BUNDLE, NOT_FOUND, NO_DRIVER, CUDA_ERROR, NO_MEMORY = range(1, 7)


@contextlib.contextmanager
def checked_host(version: int):
    """What stands for a TensorRT, whose messages must be taken and whose objects be given back."""
    tensorrt = host(version)
    live = tensorrt.live
    yield tensorrt
    assert tensorrt.messages() == []
    assert tensorrt.live == live


@pytest.fixture(params=VERSIONS)
def tensorrt_host(request):
    with checked_host(request.param) as tensorrt:
        yield tensorrt


def small_case(op: str = "dropless", **options):
    return filled(make_case(op, (5,), **{"width": 16, "hidden": 24} | options))


def the_error(tensorrt, layer: str = "layers.3.mlp") -> str:
    """Takes the only message, which is an error that names the layer."""
    (message,) = tensorrt.messages()
    logger, severity, name, rest = message.split(" ", 3)
    assert (logger, severity) == ("own", "1")
    assert name in NAMES.values()
    assert rest.startswith(f"{layer}: "), rest
    return rest.removeprefix(f"{layer}: ")


@pytest.fixture
def layer(driver, tensorrt_host, tmp_path):
    """A plugin of a case, and the case."""
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    plugin = tensorrt_host.create(NAMES[case.op], attributes_of(case) | {"kernels": str(bundle)})
    yield plugin, case
    plugin.destroy()


def described(case) -> list[Description]:
    return [describe(tensor) for tensor in inputs_of(case)]


@pytest.fixture
def stored(layer):
    plugin, case = layer
    assert plugin.configure(described(case), describe(case.arguments["x"])) == 0
    return serialized(plugin)
