"""How a kernel is compiled and launched, declared once for every launcher.

A :class:`KernelSpec` names its parameters and grid by symbols. The Python launcher resolves them
with tensors (:mod:`custom_ops.kernels.launch`), the C++ launcher with pointers, from a bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.expressions import Expression
from custom_ops.kernels.layer import Layer

#: Slots, tokens times experts per token, are counted in 32 bits by the kernels, which also count
#: up to the end of a block of them.
MAX_SLOTS = 2**31 - 2**15
#: So many tokens at most, with one expert each.
MAX_TOKENS = MAX_SLOTS

_ALIGNMENT = 256
_NO_WAVES = Expression.of(0)


@dataclass(frozen=True)
class TensorPointer:
    """A pointer to a tensor of the call.

    Attributes:
        tensor: The name of the operator's argument, or ``y``.
        dtype: Its dtype.
    """

    tensor: str
    dtype: torch.dtype


@dataclass(frozen=True)
class WorkspacePointer:
    """A pointer to a buffer of the workspace, by the buffer's name."""

    buffer: str
    dtype: torch.dtype


@dataclass(frozen=True)
class StatePointer:
    """A pointer to a buffer of the layer's state, by the buffer's name."""

    buffer: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Scalar:
    """A 32-bit integer, evaluated at each launch."""

    value: Expression


@dataclass(frozen=True)
class TensorMap:
    """A descriptor by which the tensor memory accelerator loads tiles of a parameter.

    Attributes:
        tensor: As in :class:`TensorPointer`, or a buffer of the state; its memory is viewed as
            ``shape`` with ``strides``.
        dtype: Its dtype.
        shape: Sizes in elements, outermost first.
        strides: In elements; the last is 1.
        box: The tile's sizes in elements.
    """

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """A value compiled in; ``None`` stands for an absent tensor."""

    value: int | float | bool | str | None


Pointer = TensorPointer | WorkspacePointer | StatePointer
Argument = Pointer | Scalar | TensorMap | Constant


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace or of the state.

    Attributes:
        name: The name by which :class:`WorkspacePointer` or :class:`StatePointer` refers to it.
        dtype: Dtype of its elements.
        count: Number of elements, at least 1.
    """

    name: str
    dtype: torch.dtype
    count: Expression

    @property
    def size(self) -> Expression:
        """Its size in bytes."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, its specialisation and its launch.

    Attributes:
        function: The Triton kernel.
        arguments: Every parameter's argument by name, in the kernel's order.
        grid: Programs along x, y and z.
        num_warps: Warps of a program.
        num_stages: Depth of software pipelines.
        dependent_launch: Whether it may start before the kernel ahead of it ends; such a kernel
            waits on the device for that one's results.
    """

    function: Any = field(hash=False)
    arguments: Mapping[str, Argument] = field(hash=False)
    grid: tuple[Expression, Expression, Expression]
    num_warps: int = 4
    num_stages: int = 1
    dependent_launch: bool = False

    def __post_init__(self) -> None:
        names = tuple(self.function.arg_names)
        if tuple(self.arguments) != names:
            raise ValueError(
                f"{self.name} takes the arguments {', '.join(names)}; "
                f"got {', '.join(self.arguments)}"
            )

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.function.fn.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        """The values compiled in."""
        return {n: a.value for n, a in self.arguments.items() if isinstance(a, Constant)}

    @property
    def parameters(self) -> dict[str, Pointer | Scalar | TensorMap]:
        """The arguments that a launch passes."""
        return {n: a for n, a in self.arguments.items() if not isinstance(a, Constant)}


@dataclass(frozen=True)
class Step:
    """A stage of the forward pass: its launches, and the buffers that it writes."""

    buffers: tuple[Buffer, ...]
    launches: tuple[KernelSpec, ...]


@dataclass(frozen=True)
class WaveLaunch:
    """A launch that is repeated in every wave.

    Its scalars and its grid may have the symbol ``wave``, the wave's index from 0 on. Where a grid
    has no programs, nothing is launched.

    Attributes:
        kernel: The kernel.
        side: Whether it is on the second stream.
        after: Indices in :attr:`TokenRange.wave` of launches on the other stream. Of each, the one
            most recently enqueued in this call must have ended: that of the same wave where the
            index is below this launch's own, else that of the wave before, of which wave 0 has
            none to wait for.
    """

    kernel: KernelSpec
    side: bool
    after: tuple[int, ...]


@dataclass(frozen=True)
class TokenRange:
    """The launches for a range of token counts.

    The launches of each stream run in order. The second stream's first launch of a call also waits
    for everything enqueued before the waves, and the epilogue for everything on the second stream.

    Attributes:
        first: Fewest tokens, at least 1.
        last: Most tokens, at most :data:`MAX_TOKENS`.
        buffers: The workspace, each buffer at a multiple of 256 bytes.
        launches: In order, on the call's stream.
        waves: How often :attr:`wave` runs after them.
        wave: The launches of a wave, in the order in which they are enqueued; empty where all
            experts are resident.
        epilogue: The launches after the last wave, on the call's stream.
    """

    first: int
    last: int
    buffers: tuple[Buffer, ...]
    launches: tuple[KernelSpec, ...]
    waves: Expression = _NO_WAVES
    wave: tuple[WaveLaunch, ...] = ()
    epilogue: tuple[KernelSpec, ...] = ()

    @classmethod
    def of(cls, first: int, last: int, steps: Iterable[Step]) -> TokenRange:
        """Returns the range in which the steps follow one another."""
        buffers, launches = zip(*((step.buffers, step.launches) for step in steps), strict=True)
        return cls(first, last, tuple(chain(*buffers)), tuple(chain(*launches)))

    def offsets(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns where each buffer begins in the workspace, and under ``""`` the whole's size."""
        return _offsets(self.buffers, sizes)

    def kernels(self) -> Iterator[KernelSpec]:
        """Yields every launch: those ahead of the waves, those of a wave, and the epilogue."""
        yield from self.launches
        yield from (launch.kernel for launch in self.wave)
        yield from self.epilogue


# By identity: launchers look up at every call what they keep for a plan.
@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """A layer's forward pass on an architecture, for every number of tokens.

    Attributes:
        layer: The layer.
        architecture: Where it runs.
        ranges: Ascending, without gaps, from 1 token on.
        state: Device memory that persists from call to call, each buffer at a multiple of 256
            bytes; none where all experts are resident. It is zeros when new. The tables are ahead
            of the slots' weights, and zeros in them alone make the cache empty again.
    """

    layer: Layer
    architecture: Architecture
    ranges: tuple[TokenRange, ...]
    state: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        ends = [0, *(token_range.last for token_range in self.ranges)]
        firsts = [token_range.first for token_range in self.ranges]
        if firsts != [end + 1 for end in ends[:-1]]:
            raise ValueError(f"ranges of tokens must follow one another from 1, got {self.spans}")

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first and last token count of each range."""
        return [(token_range.first, token_range.last) for token_range in self.ranges]

    def at(self, tokens: int) -> TokenRange:
        """Returns the range that a number of tokens, at least 1, falls into.

        Raises:
            ValueError: If the plan has none for it.
        """
        for token_range in self.ranges:
            if token_range.first <= tokens <= token_range.last:
                return token_range
        last = self.ranges[-1].last
        raise ValueError(f"the number of tokens must be in 1..{last}, got {tokens}")

    def workspace_size(self, max_tokens: int) -> int:
        """Returns the bytes of workspace that suffice for every T in ``0..max_tokens``."""
        sizes = self.layer.shape.sizes
        return max(
            (
                token_range.offsets({**sizes, "T": min(max_tokens, token_range.last)})[""]
                for token_range in self.ranges
                if token_range.first <= max_tokens
            ),
            default=0,
        )

    def state_offsets(self) -> dict[str, int]:
        """Returns where each buffer begins in the state, and under ``""`` the whole's size."""
        return _offsets(self.state, self.layer.shape.sizes)

    @property
    def state_size(self) -> int:
        """The bytes of the state."""
        return self.state_offsets()[""]

    @property
    def tables_size(self) -> int:
        """The bytes of the state ahead of the slots' weights."""
        return self.state_offsets().get("w1_slots", 0)

    def kernels(self) -> Iterator[KernelSpec]:
        """Yields every launch of every range; equal kernels may come more than once."""
        for token_range in self.ranges:
            yield from token_range.kernels()


def _offsets(buffers: Iterable[Buffer], sizes: Mapping[str, int]) -> dict[str, int]:
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer.name] = end
        size = buffer.size.evaluate(sizes)
        end += size + -size % _ALIGNMENT
    return {**offsets, "": end}
