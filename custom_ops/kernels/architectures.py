"""The GPU architectures that the kernels are compiled for, and the features of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

_REGISTERS = 64 * 1024  # of a multiprocessor
# A warp takes whole units of registers; a block's first KiB of shared memory is the system's.
_REGISTERS_UNIT = 256
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Architecture:
    """One compute capability.

    Attributes:
        capability: 90 for compute capability 9.0, which is sm_90.
        shared_memory: Largest dynamic shared memory of one block, in bytes (CUDA C++ Programming
            Guide, technical specifications per compute capability).
        multiprocessors: Multiprocessors of its best known device; on one with more or fewer, only
            the speed differs.
        warps: Most warps of a multiprocessor at a time (the same tables).
        blocks: Most blocks of a multiprocessor at a time (the same tables).
        has_tensor_cores: Whether Triton compiles products to them; for sm_75 it does not.
        has_tensor_maps: Whether the tensor memory accelerator loads tiles (TMA).
        has_async_products: Whether tensor cores take both operands of a product of 64 or more rows
            from shared memory (``wgmma`` or ``tcgen05``).
        has_dependent_launch: Whether a kernel may start before the one ahead of it ends
            (programmatic dependent launch).
    """

    capability: int
    shared_memory: int
    multiprocessors: int
    warps: int = 48
    blocks: int = 24
    has_tensor_cores: bool = True
    has_tensor_maps: bool = False
    has_async_products: bool = False
    has_dependent_launch: bool = False

    @property
    def name(self) -> str:
        """``sm_90`` for capability 90."""
        return f"sm_{self.capability}"

    def blocks_per_multiprocessor(self, warps: int, registers: int, shared_memory: int) -> int:
        """Returns how many blocks of a kernel a multiprocessor holds at a time.

        The tensor memory of sm_100 is left out: the kernels' tiles fill at most half of it.

        Args:
            warps: Of a block.
            registers: Of a thread.
            shared_memory: Bytes of a block.
        """
        per_warp = -(-registers * 32 // _REGISTERS_UNIT) * _REGISTERS_UNIT
        return min(
            self.blocks,
            min(self.warps, _REGISTERS // per_warp) // warps,
            (self.shared_memory + _RESERVED_SHARED) // (shared_memory + _RESERVED_SHARED),
        )


def _with_tma(
    capability: int,
    kibibytes: int,
    multiprocessors: int,
    warps: int = 48,
    blocks: int = 24,
    *,
    has_async_products: bool,
) -> Architecture:
    return Architecture(
        capability,
        kibibytes * 1024,
        multiprocessors,
        warps,
        blocks,
        has_tensor_maps=True,
        has_async_products=has_async_products,
        has_dependent_launch=True,
    )


ARCHITECTURES = {
    known.capability: known
    for known in (
        Architecture(75, 64 * 1024, 40, 32, 16, has_tensor_cores=False),  # T4
        Architecture(80, 163 * 1024, 108, 64, 32),  # A100
        Architecture(86, 99 * 1024, 84, 48, 16),  # A40
        Architecture(87, 163 * 1024, 16, 48, 16),  # Jetson AGX Orin
        Architecture(89, 99 * 1024, 142),  # L40S
        _with_tma(90, 227, 132, 64, 32, has_async_products=True),  # H100, H200
        _with_tma(100, 227, 148, 64, 32, has_async_products=True),  # B200
        _with_tma(103, 227, 148, 64, 32, has_async_products=True),  # B300
        _with_tma(110, 227, 20, has_async_products=True),  # Jetson AGX Thor
        _with_tma(120, 99, 170, has_async_products=False),  # RTX 5090
        _with_tma(121, 99, 48, has_async_products=False),  # DGX Spark
    )
}


def architecture(name: str | int) -> Architecture:
    """Returns the architecture of a name such as ``"sm_90"``, or of a capability such as 90.

    Raises:
        ValueError: If the kernels are not compiled for it.
    """
    text = str(name).removeprefix("sm_")
    known = ARCHITECTURES.get(int(text)) if text.isdecimal() else None
    if known is None:
        names = ", ".join(supported.name for supported in ARCHITECTURES.values())
        raise ValueError(f"architecture must be one of {names}; got {name!r}")
    return known


def nearest_architecture(major: int, minor: int) -> Architecture:
    """Returns the architecture to plan for on a device: its own, else the nearest older one.

    It has no dependent launch where the environment variable ``DYNAMO_MOE_DEPENDENT_LAUNCH`` is 0.

    Args:
        major: Major number of the device's compute capability.
        minor: Minor number of the device's compute capability.

    Raises:
        ValueError: If the device is older than all of them.
    """
    capability = 10 * major + minor
    older = [known for known in ARCHITECTURES if known <= capability]
    if not older:
        raise ValueError(
            f"the kernels need compute capability {min(ARCHITECTURES) / 10} or later, "
            f"the device has {major}.{minor}"
        )
    nearest = ARCHITECTURES[max(older)]
    if os.environ.get("DYNAMO_MOE_DEPENDENT_LAUNCH") == "0":
        return replace(nearest, has_dependent_launch=False)
    return nearest
