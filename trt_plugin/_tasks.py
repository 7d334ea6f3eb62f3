"""From a KernelSpec to what the compiler needs: plain values that travel between processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.spec import (
    Constant,
    KernelSpec,
    Scalar,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)

__all__ = ["Task", "sources_hash", "task_for"]

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_POINTER_ALIGNMENT = 16


@dataclass(frozen=True)
class Task:
    """One kernel to compile.

    Attributes:
        module: Of the kernel's function.
        function: Its name there.
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
        # Not sorted by key: a signature's order is the parameters'.
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def description(self) -> str:
        """JSON for people: module, function and the values compiled in."""
        told = {
            "module": self.module,
            "function": self.function,
            "constants": self.constants,
            "options": self.options,
        }
        return json.dumps(told, separators=(",", ":"))

    @property
    def values(self) -> str:
        """The values compiled in, and the options, for people."""
        values = {**self.constants, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def __str__(self) -> str:
        return f"{self.function} for sm_{self.capability}"


def task_for(spec: KernelSpec, architecture: Architecture) -> Task:
    """Returns what compiles a kernel for an architecture.

    Raises:
        ValueError: If it takes a tensor map that the architecture has not.
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
                        f"{spec.name}: {name} is a tensor map, which {architecture.name} has not"
                    )
                signature[name] = f"tensordesc<{_TYPES[dtype]}[{','.join(map(str, box))}]>"
            case TensorPointer(_, dtype) | WorkspacePointer(_, dtype):
                signature[name] = f"*{_TYPES[dtype]}"
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
