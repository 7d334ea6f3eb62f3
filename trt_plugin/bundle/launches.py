"""A program's kernels, their launches, and the buffers between them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from trt_plugin.bundle.records import INSTRUCTION, SYMBOLS
from trt_plugin.native import LauncherError, call


@dataclass(frozen=True)
class Expression:
    """A size or a number of programs; ``str`` gives it in words, such as ``cdiv(T * K, 16)``.

    Attributes:
        instructions: In postfix order, each an opcode (see docs/reference/bundle.md) and a value.
    """

    instructions: tuple[tuple[int, int], ...]
    _text: str = field(default="", repr=False, compare=False)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns the value for sizes such as ``{"T": 5, "E": 8, …}``, as the launcher computes it.

        Outside of waves, sizes need no ``wave``: it is 0.

        Raises:
            ArithmeticError: If a value does not fit 64 bits, or a divisor is below 1.
        """
        code = b"".join(INSTRUCTION.pack(opcode, 0, value) for opcode, value in self.instructions)
        values = (ctypes.c_int64 * len(SYMBOLS))(*({"wave": 0, **sizes}[name] for name in SYMBOLS))
        result = ctypes.c_int64()
        try:
            call(
                "expression_evaluate",
                *(code, len(self.instructions), values, ctypes.byref(result)),
            )
        except LauncherError as error:
            raise ArithmeticError(str(error)) from None
        return result.value

    def __str__(self) -> str:
        return self._text or str(self.instructions)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: The entry point in the image.
        description: JSON: module, function and the values compiled in.
        image: The ELF image (cubin).
        num_warps: Warps per block.
        shared_memory: Dynamic shared memory per block in bytes.
        dependent_launch: Whether it may start before the previous kernel ends.
        registers: Registers per thread.
        local_memory: Bytes of spilled registers and stack per thread.
    """

    name: str
    description: str
    image: bytes = field(repr=False)
    num_warps: int
    shared_memory: int
    dependent_launch: bool
    registers: int
    local_memory: int


@dataclass(frozen=True)
class TensorMap:
    """The description of a tensor map, innermost dimension first.

    Attributes:
        tensor: One of :data:`TENSORS`, or the index of a part of the state.
        dtype: ``CUtensorMapDataType``.
        swizzle: ``CUtensorMapSwizzle``.
        sizes: In elements.
        strides: In bytes; the first is the size of an element.
        box: In elements.
    """

    tensor: str | int
    dtype: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Argument:
    """A kernel's parameter.

    Attributes:
        kind: A key of :data:`trt_plugin.bundle.PARAMETER_BYTES`.
        value: None for ``null``; one of :data:`TENSORS` for ``tensor``; the buffer's index in its
            range for ``workspace``, in the program's state for ``state``; an :class:`Expression`
            for ``i32`` and ``i64``; a :class:`TensorMap` for ``tensor_map``.
    """

    kind: str
    value: str | int | Expression | TensorMap | None = None


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel.

    Attributes:
        kernel: Index into the program's kernels.
        arguments: In the kernel's order.
        grid: Blocks along x, y and z.
        side: In a wave, whether it is on the second stream.
        after: In a wave, the launches on the other stream whose last ones must have ended.
    """

    kernel: int
    arguments: tuple[Argument, ...]
    grid: tuple[Expression, Expression, Expression]
    side: bool = False
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace or of the state.

    Attributes:
        name: Its name.
        size: Its bytes.
        zeroed: Whether it is zeros in a new state; the workspace's parts are not.
    """

    name: str
    size: Expression
    zeroed: bool = False


@dataclass(frozen=True)
class Range:
    """The launches for ``first`` to ``last`` tokens.

    Attributes:
        first: Fewest tokens.
        last: Most tokens.
        buffers: The workspace, each at a multiple of 256 bytes.
        launches: In order, on the call's stream.
        wave: The launches of each wave after them; empty where all experts are resident.
        waves: How many there are; None without.
        epilogue: The launches after the waves.
    """

    first: int
    last: int
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    wave: tuple[Launch, ...] = ()
    waves: Expression | None = None
    epilogue: tuple[Launch, ...] = ()

    @property
    def all_launches(self) -> tuple[Launch, ...]:
        """Those before the waves, of a wave, and after the waves."""
        return (*self.launches, *self.wave, *self.epilogue)
