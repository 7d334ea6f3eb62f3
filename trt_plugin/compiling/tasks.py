"""Kernels to compile, as plain values that travel between processes, and compiled kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from custom_ops.dtypes import SHORT_NAMES
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.spec import (
    Constant,
    KernelSpec,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)
from trt_plugin.compiling.cubin import CubinInfo, inspect_cubin

_WARP = 32
# From the code that Triton's compiler gives a type to CUtensorMapDataType, as Triton's driver does.
_MAP_DTYPES = {8: 10, 9: 8, 10: 9}


@dataclass(frozen=True)
class Task:
    """One kernel to compile.

    Attributes:
        module: The module of the kernel's function.
        function: The function's name there.
        signature: Triton's type of every parameter.
        constants: The values compiled in.
        aligned: Indices of the parameters that are multiples of 16.
        options: Triton's options.
        capability: 90 for sm_90.
    """

    module: str
    function: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[int, ...]
    options: Mapping[str, Any]
    capability: int

    def to_json(self) -> str:
        """The task as one line; equal tasks give equal lines."""
        # Not sorted by key: a signature is in the parameters' order.
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def description(self) -> str:
        """JSON for people: module, function and the values compiled in."""
        names = ("module", "function", "constants", "options")
        return json.dumps({name: getattr(self, name) for name in names}, separators=(",", ":"))

    @property
    def values(self) -> str:
        """The values compiled in, and the options, for people."""
        values = {**self.constants, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def __str__(self) -> str:
        return f"{self.function} for sm_{self.capability}"


def task_for(spec: KernelSpec, architecture: Architecture) -> Task:
    """Returns the task that compiles a kernel for an architecture.

    Raises:
        ValueError: If it takes a tensor map and the architecture has none.
    """
    signature: dict[str, str] = {}
    aligned = []
    for index, (name, argument) in enumerate(spec.arguments.items()):
        match argument:
            case Constant():
                signature[name] = "constexpr"
            case Scalar():
                signature[name] = "i32"
            case TensorMap(_, dtype, _, _, box):
                if not architecture.has_tensor_maps:
                    raise ValueError(
                        f"{spec.name}: {name} is a tensor map, which {architecture.name} lacks"
                    )
                signature[name] = f"tensordesc<{SHORT_NAMES[dtype]}[{','.join(map(str, box))}]>"
            case TensorPointer(_, dtype) | WorkspacePointer(_, dtype) | StatePointer(_, dtype):
                signature[name] = f"*{SHORT_NAMES[dtype]}"
                aligned.append(index)
    return Task(
        module=spec.function.fn.__module__,
        function=spec.function.fn.__qualname__,
        signature=signature,
        constants=spec.constants,
        aligned=tuple(aligned),
        options={
            "num_warps": spec.num_warps,
            "num_stages": spec.num_stages,
            "launch_pdl": spec.dependent_launch,
            # Triton 3.10 changes the default.
            "enable_fp_fusion": True,
        },
        capability=architecture.capability,
    )


def sources_hash(module: str) -> str:
    """Returns a hash over the Python files beside a module, whose functions its kernels call.

    Raises:
        ValueError: If the module has no source.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"no source of module {module}")
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.glob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


class CompileError(RuntimeError):
    """A kernel does not compile, or the launcher could not run it.

    Attributes:
        details: The compiler's output.
    """

    def __init__(self, what: str, details: str, values: str = "") -> None:
        lines = [line.strip() for line in details.splitlines() if line.strip()]
        # Triton's own messages end with the error; ptxas's are followed by the command.
        reason = next((line for line in lines if line.startswith("ptxas ")), "".join(lines[-1:]))
        message = f"{what}: {reason}" if reason else what
        super().__init__(f"{message} (with {values})" if values else message)
        self.details = details
        if len(lines) > 1:
            self.add_note(details)


@dataclass(frozen=True)
class MapLayout:
    """How a kernel expects a tensor map to be encoded.

    Attributes:
        swizzle: ``CUtensorMapSwizzle``.
        dtype: ``CUtensorMapDataType``.
        box: The elements that one copy moves, outermost dimension first; at most the kernel's
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
        info: The image's attributes of the kernel.
        num_warps: Warps per block; Triton may have added some to those requested.
        shared_memory: Dynamic shared memory per block in bytes.
        dependent_launch: Whether it may start before the previous kernel ends.
        maps: The layouts of its tensor maps, in the parameters' order.
        metadata: Triton's metadata.
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
        """Makes one of Triton's result.

        Raises:
            ValueError: If the launcher cannot launch it.
        """
        for name, expected in (
            ("num_ctas", 1),
            ("global_scratch_size", 0),
            ("profile_scratch_size", 0),
            ("launch_cooperative_grid", False),
        ):
            # A version of Triton that lacks one of these does not use it.
            if metadata.get(name) not in (None, expected):
                raise ValueError(
                    f"{name} must be {expected} for the launcher, Triton made it {metadata[name]}"
                )
        info = inspect_cubin(cubin)
        warps = metadata["num_warps"]
        if info.name != metadata["name"] or info.threads not in (0, _WARP * warps):
            raise ValueError(
                f"Triton compiled {metadata['name']} with {_WARP * warps} threads, the cubin has "
                f"{info.name} with {info.threads}"
            )
        return cls(
            cubin=cubin,
            info=info,
            num_warps=warps,
            shared_memory=metadata["shared"],
            dependent_launch=bool(metadata["launch_pdl"]),
            maps=tuple(_layout(descriptor) for descriptor in metadata["tensordesc_meta"] or ()),
            metadata=metadata,
        )


def _layout(meta: dict[str, Any]) -> MapLayout:
    for name in ("fp4_padded", "is_im2col"):
        if meta.get(name):
            raise ValueError(f"the launcher does not support tensor maps of kind {name}")
    dtype = meta["elem_type"]
    return MapLayout(meta["swizzle"], _MAP_DTYPES.get(dtype, dtype), tuple(meta["block_size"]))
