"""The Python launcher: runs a plan with Triton's JIT on a GPU, or its interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from custom_ops.kernels.spec import (
    Argument,
    Constant,
    ForwardPlan,
    KernelSpec,
    Scalar,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)


def launch(
    plan: ForwardPlan, tensors: Mapping[str, Tensor], workspace: Tensor | None = None
) -> None:
    """Runs a plan, writing its results among ``tensors``.

    Args:
        plan: What to run.
        tensors: The operator's by argument, and the results, such as y, each contiguous; x and y
            are ``[T, D]``. One under the name of a buffer takes its place.
        workspace: uint8 of at least ``plan.workspace_size(T)`` bytes, aligned to 256; allocated
            where None. It need not be initialised.
    """
    tokens = tensors["x"].shape[0]
    if tokens == 0:
        return
    sizes = {**plan.layer.sizes, "T": tokens}
    span = plan.at(tokens)
    offsets = span.offsets(sizes)
    if workspace is None:
        workspace = torch.empty(offsets[""], dtype=torch.uint8, device=tensors["x"].device)
    for spec in span.launches:
        _start(spec, sizes, tensors, workspace, offsets)


def launch_kernel(spec: KernelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Runs a kernel that needs no workspace, writing what it writes of ``tensors``.

    Args:
        spec: The kernel; its symbols are T alone.
        tensors: Contiguous, by the names that the spec gives them; x is ``[T, D]``, not empty.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=tensors["x"].device)
    _start(spec, {"T": tensors["x"].shape[0]}, tensors, nothing, {})


def _start(
    spec: KernelSpec,
    sizes: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    workspace: Tensor,
    offsets: Mapping[str, int],
) -> None:
    def resolve(argument: Argument) -> Any:
        match argument:
            case Constant(value):
                return value
            case Scalar(value):
                return value.evaluate(sizes)
            case TensorPointer(name):
                return tensors[name]
            case WorkspacePointer(buffer) if buffer in tensors:
                return tensors[buffer]
            case WorkspacePointer(buffer, dtype):
                rest = workspace[offsets[buffer] :]
                return rest[: rest.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            case TensorMap(name, _, shape, strides, box):
                from triton.tools.tensor_descriptor import TensorDescriptor

                return TensorDescriptor(tensors[name], list(shape), list(strides), list(box))

    grid = tuple(axis.evaluate(sizes) for axis in spec.grid)
    spec.function[grid](
        **{name: resolve(argument) for name, argument in spec.arguments.items()},
        num_warps=spec.num_warps,
        num_stages=spec.num_stages,
        launch_pdl=spec.dependent_launch,
        # Triton 3.10 changes the default; ahead of time, kernels are compiled with it.
        enable_fp_fusion=True,
    )
