"""Times an eager call's host part against a fixed piece of Python, in turns.

Run as a program, without TRITON_INTERPRET: prints how many times as long the call takes.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
from triton.runtime import driver

from benchmarks.common.timing import time_in_turns
from benchmarks.cpu.host_cost import CAPABILITY, OPERATOR, SWIN, NullDriver, calls_of
from custom_ops import _cuda, _grouped


def python() -> dict[int, str]:
    """Takes about as long as Python's part of a call may: tens of microseconds."""
    return {number: str(number) for number in range(200)}


def main() -> None:
    """Compares the quickest of many runs, which other processes disturb least."""
    driver.set_active(NullDriver())
    torch.set_num_threads(1)
    calls = {"python": python, OPERATOR: calls_of(SWIN)[OPERATOR]}
    with (
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.cuda, "get_device_capability", lambda *device: CAPABILITY),
        patch.object(_grouped, "forward", _cuda.forward),
        torch.no_grad(),
    ):
        timings = time_in_turns(calls, 1000, before=lambda: None)
    sys.stdout.write(f"{timings[OPERATOR].best / timings['python'].best:.2f}\n")


if __name__ == "__main__":
    main()
