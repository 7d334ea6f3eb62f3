"""Runs kernels without a GPU in Triton's interpreter, and repairs the interpreter's errors.

The interpreter stores bfloat16 as uint16. In Triton 3.9, a dot multiplies these integers, a cast
from float32 truncates the low bits instead of rounding, and casts from or to other types treat the
bits as a number. It does not support programmatic dependent launch either, and the interpreter of
Triton 3.6 does not accept the arrays of NumPy 2.4 as bounds of a range. :func:`repair` fixes all of
this. Arithmetic on bfloat16 blocks has the same error and is not fixed: a kernel must cast to
float32 first. It also leaves out work that has no effect, which took more than half of the time.

Needs ``TRITON_INTERPRET=1`` before triton is imported. If there is no GPU, ``conftest.py`` sets it
and repairs the interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from custom_ops.kernels.architectures import architecture, nearest_architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Step, TensorPointer, WorkspacePointer

#: The architecture that :func:`run_step` plans for and runs on.
ON = (
    nearest_architecture(*torch.cuda.get_device_capability())
    if torch.cuda.is_available()
    else architecture("sm_90")
)
#: The contents of buffers before a kernel writes them: -1515870811 as int32, -2.9e-16 as float32.
POISON = 0xA5

_GUARD_BYTES = 4096


def repair(patch: pytest.MonkeyPatch) -> None:
    """Repairs the interpreter until the patch is undone."""
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def to_float32(handle: Any) -> Any:
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    @wraps(cast)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        if source == tl.bfloat16:
            return cast(self, to_float32(src), dst_type)
        values = torch.from_numpy(np.ascontiguousarray(cast(self, src, tl.float32).data))
        return TensorHandle(values.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    @wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (to_float32(each) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return dot(self, a, b, *others)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(tl.extra.cuda, "gdc_wait", lambda: None)
    patch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)
    _hasten(patch)


def _hasten(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter faster, with the same results."""
    from triton import language as tl
    from triton.runtime import interpreter

    names_of: dict[Any, list[str]] = {}
    replaced: set[str] = set()
    numpy_dtypes: dict[str, Any] = {}
    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    get_np_dtype, apply_impl = interpreter._get_np_dtype, interpreter.ReduceOps.apply_impl

    def launch_once(self: Any, *arguments: Any, **named: Any) -> None:
        replaced.clear()
        launch(self, *arguments, **named)

    def patch_lang_once(function: Any) -> Any:
        # Also called for each call of a function within a kernel. Only a launch needs the result.
        if function.__module__ in replaced:
            return None
        replaced.add(function.__module__)
        return patch_lang(function)

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        if package not in names_of:
            members = inspect.getmembers(package)
            names_of[package] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in names_of[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in numpy_dtypes:
            numpy_dtypes[scalar.name] = get_np_dtype(scalar)
        return numpy_dtypes[scalar.name]

    def apply_reduction(self: Any, arguments: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return apply_impl(self, arguments)
        # Of tl.sort, which the interpreter would reduce element by element.
        (x,) = arguments
        data = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, x.dtype)

    patch.setattr(interpreter.GridExecutor, "__call__", launch_once)
    patch.setattr(interpreter, "_patch_lang", patch_lang_once)
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch.setattr(interpreter, "_get_np_dtype", np_dtype)
    patch.setattr(interpreter.ReduceOps, "apply_impl", apply_reduction)
    # Each sum and product would be computed twice, for an assertion that only debugging turns on.
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def run_step(
    step: Step, layer: Layer, tokens: int, tensors: Mapping[str, Tensor], **earlier: Tensor
) -> dict[str, Tensor]:
    """Runs a step's launches and returns its buffers.

    Each buffer is poisoned first, and lies between guard bands that must not change.

    Args:
        step: The step to run, planned for :data:`ON`.
        layer: The layer that the step was planned for.
        tokens: T.
        tensors: The call's tensors.
        earlier: Buffers of earlier steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {**layer.shape.sizes, "T": tokens}
    memory, buffers = {}, {name: each.to(device) for name, each in earlier.items()}
    for each in step.buffers:
        size = each.size.evaluate(sizes)
        memory[each.name] = torch.full(
            (size + 2 * _GUARD_BYTES,), POISON, dtype=torch.uint8, device=device
        )
        buffers[each.name] = memory[each.name][_GUARD_BYTES:][:size].view(each.dtype)
    for spec in step.launches:
        grid = tuple(axis.evaluate(sizes) for axis in spec.grid)
        assert min(grid) > 0, f"{spec.name} would be launched on an empty grid"
        arguments: dict[str, Any] = dict(spec.constants)
        for name, argument in spec.parameters.items():
            match argument:
                case WorkspacePointer(buffer, dtype):
                    arguments[name] = buffers[buffer].view(dtype)
                case TensorPointer(tensor, dtype):
                    assert tensors[tensor].dtype == dtype
                    arguments[name] = tensors[tensor].to(device)
                case _:
                    arguments[name] = argument.value.evaluate(sizes)
        spec.function[grid](
            **arguments,
            num_warps=spec.num_warps,
            num_stages=spec.num_stages,
            launch_pdl=spec.dependent_launch,
        )
    for name, whole in memory.items():
        for band in (whole[:_GUARD_BYTES], whole[-_GUARD_BYTES:]):
            assert (band == POISON).all(), f"written outside of {name}"
    return {each.name: buffers[each.name].cpu() for each in step.buffers}
