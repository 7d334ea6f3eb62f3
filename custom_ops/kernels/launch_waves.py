"""The Python launcher of plans in waves: which launch is on which stream, and waits for which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from custom_ops.kernels.launch import bound_kernel
from custom_ops.kernels.spec import Buffer, ForwardPlan, KernelSpec


@dataclass(frozen=True)
class Enqueued:
    """A launch of a call.

    Attributes:
        spec: Its kernel.
        start: Launches it on the current stream, given tensors and buffers by name.
        side: Whether it is on the second stream.
        after: The indices, among the call's launches, of those on the other stream that must have
            ended.
    """

    spec: KernelSpec
    start: Callable[[Mapping[str, Tensor]], None]
    side: bool
    after: tuple[int, ...]


# About 3 KB a launch: 2.7 MB for a call of 256 waves.
@lru_cache(maxsize=64)
def enqueued(plan: ForwardPlan, tokens: int) -> tuple[Enqueued, ...]:
    """Returns the launches of a call with a number of tokens, at least 1, in order."""
    span = plan.at(tokens)
    sizes = {**plan.layer.shape.sizes, "T": tokens}
    calls = [_on_main(spec, sizes) for spec in span.launches]
    forked = len(calls) - 1
    latest: dict[int, int] = {}
    last_of_side = None
    for wave in range(span.waves.evaluate(sizes)):
        of_wave = {**sizes, "wave": wave}
        for index, launch in enumerate(span.wave):
            if 0 in (axis.evaluate(of_wave) for axis in launch.kernel.grid):
                continue
            after = tuple(latest[awaited] for awaited in launch.after if awaited in latest)
            if launch.side:
                after = (forked, *after) if last_of_side is None else after
                last_of_side = len(calls)
            latest[index] = len(calls)
            start = bound_kernel(launch.kernel, of_wave)
            calls.append(Enqueued(launch.kernel, start, launch.side, after))
    joined = () if last_of_side is None else (last_of_side,)
    calls += [_on_main(spec, sizes, joined) for spec in span.epilogue]
    return tuple(calls)


def _on_main(spec: KernelSpec, sizes: Mapping[str, int], after: tuple[int, ...] = ()) -> Enqueued:
    return Enqueued(spec, bound_kernel(spec, sizes), False, after)


def launch_in_waves(
    plan: ForwardPlan,
    tensors: Mapping[str, Tensor],
    state: Tensor,
    side: torch.cuda.Stream | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Runs a plan that has waves, on the current stream and a second one.

    Args:
        plan: The plan.
        tensors: As for :func:`custom_ops.kernels.launch.launch`, but that w1 and w2 may be in
            pinned host memory.
        state: uint8 ``[plan.state_size]``, aligned to 256: zeros, or as the last call left it. If a
            call fails, its first ``plan.tables_size`` bytes must be set to zeros.
        side: The second stream; None where all runs on one, as in the interpreter.
        workspace: As for :func:`custom_ops.kernels.launch.launch`.

    Raises:
        ValueError: If the state is that of a smaller layer, or of one with fewer slots.
    """
    tokens = tensors["x"].shape[0]
    if tokens == 0:
        return
    calls = enqueued(plan, tokens)
    memory = dict(call_memory(plan, tensors, state, workspace))
    if side is None:
        for call in calls:
            call.start(memory)
        return
    main = torch.cuda.current_stream()
    try:
        _launch_on_streams(calls, memory, main, side)
    except BaseException:
        # The memory that the second stream still reads goes back to this one.
        main.wait_stream(side)
        raise


def _launch_on_streams(
    calls: tuple[Enqueued, ...],
    memory: Mapping[str, Tensor],
    main: torch.cuda.Stream,
    side: torch.cuda.Stream,
) -> None:
    awaited = {index for call in calls for index in call.after}
    ended: dict[int, torch.cuda.Event] = {}
    for index, call in enumerate(calls):
        stream = side if call.side else main
        for earlier in call.after:
            stream.wait_event(ended[earlier])
        with torch.cuda.stream(side) if call.side else nullcontext():
            call.start(memory)
        if index in awaited:
            ended[index] = stream.record_event()


def call_memory(
    plan: ForwardPlan, tensors: Mapping[str, Tensor], state: Tensor, workspace: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields everything that a call's kernels read or write, by name.

    A tensor under the name of a buffer takes its place.
    """
    tokens = tensors["x"].shape[0]
    size, of_workspace, of_state = _extents(plan, tokens)
    if state.nbytes < of_state[-1][-1]:
        raise ValueError(f"the layer's state takes {plan.state_size} bytes, got {state.nbytes}")
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=tensors["x"].device)
    for memory, extents in ((workspace, of_workspace), (state, of_state)):
        for name, dtype, first, last in extents:
            yield name, memory[first:last].view(dtype)
    yield from tensors.items()


# A buffer's name, its dtype, and where in memory it is.
_Extent = tuple[str, torch.dtype, int, int]


@lru_cache(maxsize=256)
def _extents(plan: ForwardPlan, tokens: int) -> tuple[int, list[_Extent], list[_Extent]]:
    """Returns the bytes of the workspace, and the extents of its buffers and of the state's."""
    sizes = {**plan.layer.shape.sizes, "T": tokens}
    span = plan.at(tokens)

    def extents(buffers: tuple[Buffer, ...], offsets: Mapping[str, int]) -> list[_Extent]:
        return [
            (
                buffer.name,
                buffer.dtype,
                first := offsets[buffer.name],
                first + buffer.size.evaluate(sizes),
            )
            for buffer in buffers
        ]

    offsets = span.offsets(sizes)
    return offsets[""], extents(span.buffers, offsets), extents(plan.state, plan.state_offsets())
