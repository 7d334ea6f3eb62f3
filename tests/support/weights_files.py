"""Safetensors files with experts' weights, and where they lie in them as the plugin reads it."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from kernel_runs import is_transposed
from moe_cases import Case

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save_experts(path: Path, case: Case, *, multiple: int = 16) -> tuple[str, str]:
    """Writes a case's w1 and w2, as they lie in memory, behind another tensor.

    Returns the sources of the two.

    Args:
        path: The file.
        case: The case.
        multiple: 16 where the weights begin at multiples of this; 8 where they only begin at
            multiples of this, as in most files.
    """
    named = {"other": torch.arange(4, dtype=torch.float32)}
    named |= {name: stored(case.arguments[name]) for name in ("w1", "w2")}
    header, end = {}, 0
    for name, tensor in named.items():
        size = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    if multiple == 8 and (8 + len(text)) % 16 != 8:
        text += b" " * 8
    head = len(text).to_bytes(8, "little") + text
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in named.values())
    path.write_bytes(head + data)
    places = [header[name]["data_offsets"] for name in ("w1", "w2")]
    w1, w2 = (
        f"{len(head) + begin} {stop - begin} {len(head) + len(data)} {len(head)} "
        f"{crc32(head):08x} {path}"
        for begin, stop in places
    )
    return w1, w2


def stored(tensor: Tensor) -> Tensor:
    """A weight as it lies in memory."""
    return (tensor.mT if is_transposed(tensor) else tensor).contiguous()
