"""A compiled kernel, before it has a place in a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trt_plugin.cubin import CubinInfo, inspect_cubin

__all__ = ["CompileError", "Compiled", "MapLayout"]

_WARP = 32
# From the code that Triton's compiler gives a type to CUtensorMapDataType, as Triton's driver does.
_MAP_DTYPES = {8: 10, 9: 8, 10: 9}


class CompileError(RuntimeError):
    """A kernel does not compile, or no launcher could run it.

    Attributes:
        details: What the compiler said.
    """

    def __init__(self, what: str, details: str, values: str = "") -> None:
        lines = [line.strip() for line in details.splitlines() if line.strip()]
        # Triton's own messages end with the fault; ptxas's are followed by the command.
        fault = next((line for line in lines if line.startswith("ptxas ")), "".join(lines[-1:]))
        message = f"{what}: {fault}" if fault else what
        super().__init__(f"{message} (with {values})" if values else message)
        self.details = details
        if len(lines) > 1:
            self.add_note(details)


@dataclass(frozen=True)
class MapLayout:
    """How a kernel wants a tensor map to be encoded.

    Attributes:
        swizzle: ``CUtensorMapSwizzle``.
        dtype: ``CUtensorMapDataType``.
        box: What one copy moves, in elements, outermost dimension first; at most the kernel's
            block, which the compiler may split.
    """

    swizzle: int
    dtype: int
    box: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        cubin: Its image.
        info: What the image says of itself.
        num_warps: Warps of a block; Triton may have added some to those asked for.
        shared_memory: Dynamic shared memory of a block in bytes.
        dependent_launch: Whether it may start before the kernel ahead of it ends.
        maps: Of its tensor maps, in the parameters' order.
        metadata: What Triton said.
    """

    cubin: bytes = field(repr=False)
    info: CubinInfo
    num_warps: int
    shared_memory: int
    dependent_launch: bool
    maps: tuple[MapLayout, ...]
    metadata: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, cubin: bytes, metadata: dict[str, Any]) -> Compiled:
        """Takes what Triton returned.

        Raises:
            ValueError: If the launcher has no means to launch it.
        """
        for name, expected in (
            ("num_ctas", 1),
            ("global_scratch_size", 0),
            ("profile_scratch_size", 0),
            ("launch_cooperative_grid", False),
        ):
            # Versions of Triton that lack one do not do it.
            if metadata.get(name) not in (None, expected):
                raise ValueError(
                    f"{name} must be {expected} for the launcher, Triton made it {metadata[name]}"
                )
        info = inspect_cubin(cubin)
        warps = metadata["num_warps"]
        if info.name != metadata["name"] or info.threads not in (0, _WARP * warps):
            raise ValueError(
                f"Triton says {metadata['name']} with {_WARP * warps} threads, the cubin "
                f"{info.name} with {info.threads}"
            )
        return cls(
            cubin=cubin,
            info=info,
            num_warps=warps,
            shared_memory=metadata["shared"],
            dependent_launch=bool(metadata["launch_pdl"]),
            maps=tuple(_layout(each) for each in metadata["tensordesc_meta"] or ()),
            metadata=metadata,
        )


def _layout(meta: dict[str, Any]) -> MapLayout:
    for name in ("fp4_padded", "is_im2col"):
        if meta.get(name):
            raise ValueError(f"the launcher has no tensor maps of kind {name}")
    dtype = meta["elem_type"]
    return MapLayout(meta["swizzle"], _MAP_DTYPES.get(dtype, dtype), tuple(meta["block_size"]))
