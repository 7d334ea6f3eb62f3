"""The command line's options of offloaded experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dynamo_moe.cli.model_loading import UsageError

ResidentExperts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[LAYER=]R",
        help="Offload experts: their weights stay in files, which a run maps into host memory, and "
        "the GPU has slots for R of each layer's experts, [cyan]8[/], or of one layer's, "
        "[cyan]blocks.3.mlp=8[/]; may be repeated.",
    ),
]
ResidentMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Offload experts, with as many slots as fit into so much of the GPU's memory in all, "
        "[cyan]8GB[/]: the same share of each layer's experts. Each execution context of an engine "
        "takes as much again, unless they share their slots.",
    ),
]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


def offloading(
    resident_experts: Sequence[str] | None, resident_memory: str | None
) -> dict[str, Any] | None:
    """Returns these options of ``dynamo_moe.offload_file``; None to offload nothing.

    Raises:
        UsageError: If they cannot be read, or contradict one another.
    """
    if not resident_experts and resident_memory is None:
        return None
    if resident_experts and resident_memory is not None:
        raise UsageError("give either --resident-experts or --resident-memory")
    if resident_memory is not None:
        return {"resident_memory": parse_memory(resident_memory)}
    return {"resident_experts": parse_experts(resident_experts or ())}


def parse_experts(texts: Sequence[str]) -> dict[str, int]:
    """Reads ``R`` and ``LAYER=R``.

    >>> parse_experts(["16", "blocks.3.mlp=8"])
    {'*': 16, 'blocks.3.mlp': 8}

    Raises:
        UsageError: If it is neither, or a layer is named twice.
    """
    slots: dict[str, int] = {}
    for text in texts:
        name, equals, count = text.rpartition("=")
        name = name if equals else "*"
        if not (name and count.isdecimal()):
            raise UsageError(f"--resident-experts takes R or LAYER=R, got {text!r}")
        if name in slots:
            raise UsageError(f"--resident-experts is given twice for {name}")
        slots[name] = int(count)
    return slots


def parse_memory(text: str) -> int:
    """Reads a number of bytes.

    >>> parse_memory("8GB"), parse_memory("1.5 GiB"), parse_memory("4096")
    (8000000000, 1610612736, 4096)

    Raises:
        UsageError: If it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--resident-memory takes a size such as 8GB or 7.5GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
