"""A device of the stand-in driver whose kernels Triton's interpreter runs, and bundles for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import InterpretedGpu, uncompiled_program
from kernel_runs import layer_of
from moe_cases import Case
from standin import Standin
from trt_plugin.bundle import Bundle, Program


class StandinGpu:
    """A device with a context, which is the calling thread's current one."""

    def __init__(self, driver: Standin, device: str = "sm_80") -> None:
        self.driver = driver
        self.architecture = architecture(device)
        self.interpreted = InterpretedGpu()
        driver.on_launch(self.interpreted)
        self.context = driver.create_context(driver.add_device(self.architecture.capability))
        driver.set_context(self.context)

    def program(self, case: Case, tf32: bool = False, **flags: bool) -> Program:
        """The case's program, its weights laid out as flags say; registers its kernels."""
        shape = layer_of(case).shape
        shape = replace(shape, layout=replace(shape.layout, **flags))
        planned = plan(replace(layer_of(case), shape=shape, tf32=tf32), self.architecture)
        program = uncompiled_program(planned)
        self.interpreted.register(planned, program)
        for kernel in program.kernels:
            self.driver.add_image(kernel.image)
        return program

    def bundle(self, path: Path, *cases: Case) -> Path:
        """Writes a bundle with the cases' programs."""
        path.write_bytes(Bundle(tuple(self.program(case) for case in cases)).data)
        return path
