"""The dtypes that the operators and their kernels take, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

#: Dtypes of tokens, routers and experts in the kernels.
KERNEL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Dtypes of tokens, routers and experts in the operators.
FLOATS = (*KERNEL_FLOATS, torch.float64)
#: Dtypes of expert ids.
IDS = (torch.int32, torch.int64)

#: A dtype's place is its code in a bundle; None: there is no such tensor.
CODES: tuple[torch.dtype | None, ...] = (None, *KERNEL_FLOATS, *IDS, torch.int8)

#: Triton's names of the elements that a kernel's pointers point to.
SHORT_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}


class _HasDtype(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...


def accumulation_dtype(*tensors: _HasDtype) -> torch.dtype:
    """Returns float64 where one of the tensors is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def dtype_name(dtype: torch.dtype | None) -> str:
    """Returns a dtype's name without ``torch.``; that of None is ``none``."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")
