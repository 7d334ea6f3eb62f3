"""A GPU for the C++ launcher: interprets the kernels that the stand-in driver is asked to launch.

The launcher passes addresses, integers and tensor maps, as it would to a real driver. They are read
from its parameter list according to the kernel's declaration, so a misplaced parameter leads to
wrong numbers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from custom_ops.kernels.spec import (
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)
from standin import fake_cubin
from trt_plugin.bundle import PARAMETER_BYTES, Program
from trt_plugin.compiling.cubin import CubinInfo, Parameter
from trt_plugin.compiling.packing import program_for
from trt_plugin.compiling.tasks import Compiled, MapLayout, task_for

_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SCRATCH = 2
# The interpreter replaces functions of triton.language while it runs a kernel.
_INTERPRETER = threading.Lock()


class InterpretedGpu:
    """Handles each launch of the stand-in driver.

    Attributes:
        kernels: Maps each image to its kernel's declaration.
        launches: All launches so far, in order.
    """

    def __init__(self) -> None:
        self.kernels: dict[bytes, KernelSpec] = {}
        self.launches: list[KernelSpec] = []

    def register(self, plan: ForwardPlan, program: Program) -> None:
        """Registers a program's images."""
        for planned, packed in zip(plan.ranges, program.ranges, strict=True):
            for spec, launch in zip(planned.kernels(), packed.all_launches, strict=True):
                self.kernels[program.kernels[launch.kernel].image] = spec

    def __call__(self, launch: Any) -> None:
        """Interprets a launch."""
        self.bound(launch)()

    def bound(self, launch: Any) -> Callable[[], None]:
        """Returns what runs a launch, whose parameters are read now."""
        spec = self.kernels[launch.image]
        assert launch.function == spec.name
        assert launch.block == (32 * spec.num_warps, 1, 1)
        assert launch.pdl == spec.dependent_launch
        self.launches.append(spec)
        arguments: dict[str, Any] = {}
        index = 0
        for name, argument in spec.arguments.items():
            match argument:
                case Constant(value):
                    arguments[name] = value
                    continue
                case Scalar():
                    arguments[name] = launch.i32(index)
                case TensorPointer(_, dtype) | WorkspacePointer(_, dtype) | StatePointer(_, dtype):
                    arguments[name] = tensor_at(launch.pointer(index), dtype)
                case TensorMap():
                    arguments[name] = _descriptor(launch.tensor_map(index), argument)
                    index += 2 * len(argument.shape)
            index += 1

        def run() -> None:
            with _INTERPRETER:
                spec.function[launch.grid](**arguments)

        return run


def uncompiled_program(plan: ForwardPlan) -> Program:
    """The program of a plan, with placeholder images that only identify the kernels."""
    compiled = {}
    for spec in plan.kernels():
        task = task_for(spec, plan.architecture)
        sizes = [8] * _SCRATCH
        maps: list[Any] = []
        for argument in reversed(spec.parameters.values()):
            match argument:
                case Scalar():
                    sizes.insert(0, PARAMETER_BYTES["i32"])
                case TensorMap(_, dtype, shape, _, box):
                    maps.insert(0, MapLayout(3, _MAP_DTYPES[dtype], box))
                    sizes[:0] = [128, *[4] * len(shape), *[8] * len(shape)]
                case _:
                    sizes.insert(0, 8)
        info = CubinInfo(
            spec.name,
            tuple(Parameter(0, size) for size in sizes),
            threads=32 * spec.num_warps,
            registers=32,
            local_memory=0,
            static_shared_memory=0,
        )
        key = task.to_json()
        compiled[key] = Compiled(
            fake_cubin(key.encode()),
            info,
            spec.num_warps,
            0,
            spec.dependent_launch,
            tuple(maps),
            {},
        )
    return program_for(plan, compiled)


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor at an address, as the interpreter takes one; the size does not matter to it."""
    memory = (ctypes.c_char * 16).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _descriptor(encoded: Any, argument: TensorMap) -> TensorDescriptor:
    assert encoded.dtype == _MAP_DTYPES[argument.dtype]
    sizes, strides, box = encoded.sizes[::-1], encoded.strides[::-1], encoded.box[::-1]
    itemsize = argument.dtype.itemsize
    # The driver does not get the innermost stride, which is one element.
    elements = [*(stride // itemsize for stride in strides), 1]
    assert tuple(box) == argument.box
    base = tensor_at(encoded.base, argument.dtype)
    return TensorDescriptor(base, list(sizes), elements, list(box))
