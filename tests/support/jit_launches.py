"""Launches plans by Triton's own JIT and after it, on a driver that launches nothing.

Run as a program, without TRITON_INTERPRET: fails unless the same is launched each time, by several
threads at once and on other tensors, and unless each launch calls the hooks there are.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.cpu.host_cost import NullDriver, NullLauncher
from custom_ops.kernels import launch as launcher
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan
from kernel_runs import call_tensors, layer_of
from moe_cases import Case, make_case

RECORDED = threading.local()


class Recorder(NullLauncher):
    """Records what it is called with, in each thread."""

    def __call__(self, *launch: Any) -> None:
        """Launches nothing."""
        grid, (stream, function, metadata), (told, *hooks) = launch[:3], launch[3:6], launch[6:9]
        RECORDED.calls.append((grid, stream, function, metadata, *map(as_passed, launch[9:])))
        for hook in filter(None, hooks):
            hook(told)


def as_passed(value: Any) -> Any:
    """What a launcher reads of an argument."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, TensorDescriptor):
        base, *rest = value.base, value.shape, value.strides, value.block_shape, value.padding
        return base.data_ptr(), base.dtype, *rest
    return value


def launched(planned: ForwardPlan, case: Case) -> list[tuple[Any, ...]]:
    """What a call launches, on tensors of its own: with their names for their addresses."""
    tensors = call_tensors(case)
    size = planned.workspace_size(tensors["x"].shape[0])
    workspace = torch.empty(size + 256, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    RECORDED.calls = []
    launch(planned, tensors, workspace)
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    base, end = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()

    def named(value: Any) -> Any:
        match value:
            case int() if base <= value < end:
                return "workspace", value - base
            case (int(address), *rest):
                return names.get(address, address), *rest
            case int():
                return names.get(value, value)
            case _:
                return value

    return [tuple(map(named, each)) for each in RECORDED.calls]


def _note(names: list[str], told: Any) -> None:
    names.append(told.get()["name"])


def main() -> None:
    """Compares calls on every path."""
    NullDriver.launcher_cls = Recorder
    driver.set_active(NullDriver())
    # Vector products; both products in one kernel; grouped products with tensor maps.
    for tokens, width in ((1, 64), (40, 64), (40, 136)):
        case = make_case(
            "dropless", (tokens,), width=width, hidden=64, dtype=torch.bfloat16, gated=True
        )
        planned = plan(layer_of(case), architecture("sm_90"))
        by_jit = launched(planned, case)
        assert by_jit
        others = [deepcopy(case) for _ in range(50)]
        with patch.object(launcher, "_start_by_jit", None), ThreadPoolExecutor(4) as threads:
            for each in threads.map(partial(launched, planned), others):
                assert each == by_jit, f"{each}\nis launched after\n{by_jit}"
            for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
                names: list[str] = []
                note = partial(_note, names)
                chain.add(note)
                assert launched(planned, case) == by_jit
                chain.remove(note)
                assert launched(planned, case) == by_jit
                assert names == [spec.name for spec in planned.at(tokens).launches], names
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    main()
