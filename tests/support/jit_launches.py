"""Launches plans twice, by Triton's own JIT and after it, on a driver that launches nothing.

Run as a program, without TRITON_INTERPRET: fails unless both times the same is launched.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.cpu.host_cost import NullDriver, NullLauncher
from custom_ops.kernels import launch as launcher
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan
from kernel_runs import call_tensors, layer_of
from moe_cases import make_case


class Recorder(NullLauncher):
    """Records what it is called with."""

    recorded: list[tuple[Any, ...]]

    def __call__(self, *launch: Any) -> None:
        """Launches nothing."""
        grid, (stream, function, metadata) = launch[:3], launch[3:6]
        self.recorded.append((grid, stream, function, metadata, *map(as_passed, launch[9:])))


def as_passed(value: Any) -> Any:
    """What a launcher reads of an argument."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, TensorDescriptor):
        base, *rest = value.base, value.shape, value.strides, value.block_shape, value.padding
        return base.data_ptr(), base.dtype, *rest
    return value


def launches_of(tokens: int, width: int) -> list[list[tuple[Any, ...]]]:
    """What three calls launch: the first by the JIT, the others not."""
    case = make_case(
        "dropless", (tokens,), width=width, hidden=64, dtype=torch.bfloat16, gated=True
    )
    planned = plan(layer_of(case), architecture("sm_90"))
    tensors = call_tensors(case)
    workspace = torch.empty(planned.workspace_size(tokens) + 256, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]

    def recorded() -> list[tuple[Any, ...]]:
        Recorder.recorded = []
        launch(planned, tensors, workspace)
        return Recorder.recorded

    first = recorded()
    with patch.object(launcher, "_start_by_jit", None):
        return [first, recorded(), recorded()]


def main() -> None:
    """Compares calls on every path."""
    NullDriver.launcher_cls = Recorder
    driver.set_active(NullDriver())
    # Vector products; both products in one kernel; grouped products with tensor maps.
    for tokens, width in ((1, 64), (40, 64), (40, 136)):
        by_jit, *later = launches_of(tokens, width)
        assert by_jit
        for each in later:
            assert each == by_jit, f"{each}\nis launched after\n{by_jit}"
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    main()
