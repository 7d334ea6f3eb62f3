"""Layers whose experts do not all fit on the device, through the C++ launcher on the stand-in."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import call_tensors, layer_of, run_kernels
from moe_cases import Case, make_case
from standin import RESOURCES
from streams_gpu import StreamsGpu, first_used, last_used
from trt_plugin.launcher import Cache, OpenProgram

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NOTHING = dict.fromkeys(RESOURCES, 0)


class Gpu:
    """A device with a context, whose streams work when they are asked to."""

    def __init__(self, driver, device: str = "sm_80") -> None:
        self.driver = driver
        self.architecture = architecture(device)
        self.streams = StreamsGpu(driver)
        self.context = driver.create_context(driver.add_device(self.architecture.capability))
        driver.set_context(self.context)

    def open(self, case: Case, resident: int) -> OpenProgram:
        layer = replace(layer_of(case), resident_experts=resident)
        planned = plan(layer, self.architecture)
        program = uncompiled_program(planned)
        self.streams.register(planned, program)
        for kernel in program.kernels:
            self.driver.add_image(kernel.image)
        return OpenProgram(program.data)


class Call:
    """The memory of a call: y and a workspace full of NaN."""

    def __init__(self, program: OpenProgram, case: Case) -> None:
        self.tensors = call_tensors(case)
        self.tokens = len(self.tensors["x"])
        self.size = program.workspace_size(self.tokens)
        self.memory = torch.full((self.size + 3 * 256,), 0xFF, dtype=torch.uint8)
        self.begin = -self.memory.data_ptr() % 256 + 256

    def enqueue(self, cache: Cache, stream: int = 0) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        workspace = self.memory.data_ptr() + self.begin
        cache.enqueue(self.tokens, addresses, workspace, self.size, stream)

    @property
    def y(self) -> Tensor:
        """The result; nothing around the workspace was written."""
        assert (self.memory[: self.begin] == 0xFF).all()
        assert (self.memory[self.begin + self.size :] == 0xFF).all()
        return self.tensors["y"]


def small_case(tokens: int = 5, seed: int = 0, **options) -> Case:
    sizes = {"width": 16, "hidden": 24, "experts": 6} | options
    return make_case("experts", (tokens,), seed=seed, **sizes)


@pytest.mark.parametrize("order", [first_used, last_used])
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("resident", [1, 2, 6])
def test_the_same_bits_as_fully_resident(driver, resident, tokens, device, order):
    case = small_case(tokens, dtype=torch.float16, activation="silu", gated=True)
    gpu = Gpu(driver, device)
    with gpu.open(case, resident) as program, program.open_cache() as cache:
        for _ in range(2):
            call = Call(program, case)
            call.enqueue(cache)
            gpu.streams.synchronize(order)
            assert torch.equal(call.y, run_kernels(case, device))
    assert driver.live() == NOTHING
