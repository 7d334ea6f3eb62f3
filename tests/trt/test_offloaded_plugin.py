"""The plugin of layers whose experts lie in files, on the stand-in driver."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of, run_kernels
from moe_cases import make_case
from plugin_host import (
    NAMES,
    RUNTIME,
    VERSIONS,
    attributes_of,
    describe,
    filled,
    host,
    inputs_of,
)
from standin import RESOURCES
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle
from weights_files import save_experts

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NOTHING = dict.fromkeys(RESOURCES, 0)
EXPERTS = 6


@pytest.fixture(params=VERSIONS)
def tensorrt(request):
    tensorrt = host(request.param)
    live = tensorrt.live
    yield tensorrt
    assert tensorrt.messages() == []
    assert tensorrt.live == live


def small_case(op: str = "experts", tokens: int = 5, seed: int = 0, **options):
    sizes = {"width": 16, "hidden": 24, "experts": EXPERTS}
    return filled(make_case(op, (tokens,), seed=seed, **sizes | options))


class Offloaded:
    """A case's layer with its experts in a file, and a bundle of its kernels."""

    def __init__(self, driver, folder: Path, case, resident: int = 2, **attributes) -> None:
        self.case = case
        self.gpu = StandinGpu(driver)
        self.file = folder / "model.safetensors"
        self.sources = save_experts(self.file, case)
        layer = replace(layer_of(case), resident_experts=resident)
        planned = plan(layer, self.gpu.architecture)
        program = uncompiled_program(planned)
        self.gpu.interpreted.register(planned, program)
        for kernel in program.kernels:
            driver.add_image(kernel.image)
        bundle = folder / "model.moek"
        bundle.write_bytes(Bundle((program,)).data)
        self.attributes = attributes_of(case) | {
            "kernels": str(bundle),
            "resident_experts": resident,
            "w1_source": self.sources[0],
            "w2_source": self.sources[1],
            **attributes,
        }

    def inputs(self, case=None) -> list[torch.Tensor]:
        """The node's inputs: placeholders stand for the weights."""
        case = case or self.case
        weights = {id(case.arguments[name]) for name in ("w1", "w2")}
        return [
            torch.zeros(1, dtype=each.dtype) if id(each) in weights else each
            for each in inputs_of(case)
        ]

    def engine_fields(self, tensorrt):
        """What an engine stores for the layer, and the workspace's size."""
        plugin = tensorrt.create(NAMES[self.case.op], self.attributes, layer="layer")
        assert plugin is not None, tensorrt.messages()
        described = [describe(each) for each in self.inputs()]
        output = described[0]
        assert plugin.supports_all(described, output)
        assert plugin.configure(described, output) == 0, tensorrt.messages()
        size = plugin.workspace(described, output)
        fields = {
            name: replace(field, data=bytes(field.data))
            for name, field in plugin.serialize().items()
        }
        plugin.destroy()
        return fields, size

    def engine(self, tensorrt):
        """The layer in an engine, and the workspace's size."""
        fields, size = self.engine_fields(tensorrt)
        plugin = tensorrt.create(NAMES[self.case.op], fields, RUNTIME, "layer")
        assert plugin is not None, tensorrt.messages()
        return plugin, size


def summary(tensorrt, name: str = "experts", resident: int = 2, whose: str = "for each context"):
    """Takes the message about the cache that comes first; returns the others."""
    first, *others = tensorrt.messages()
    wanted = rf"own 3 {NAMES[name]} layer: {resident} of {EXPERTS} experts at a time are on the "
    assert re.fullmatch(rf"{wanted}device, in \d+ bytes {whose}", first), first
    return others


@pytest.mark.parametrize("resident", [1, 2, EXPERTS])
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_the_same_bits_as_fully_resident(driver, tensorrt, tmp_path, op, resident):
    case = small_case(op, dtype=torch.float16, activation="silu", gated=True)
    offloaded = Offloaded(driver, tmp_path, case, resident)
    plugin, size = offloaded.engine(tensorrt)
    context = plugin.attach()
    plugin.destroy()
    for _ in range(2):
        y = context.run(offloaded.inputs(), size)
        assert torch.equal(y, run_kernels(case, "sm_80"))
    assert summary(tensorrt, op, resident) == []
    assert driver.live() == {
        "memory": 1, "registrations": 2, "pinned memory": 0, "streams": 1,
        "events": driver.live()["events"],
    }
    context.destroy()
    assert driver.live() == NOTHING
