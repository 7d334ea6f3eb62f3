"""How long does the host take until the kernels of an eager call on a GPU are launched?

    python -m benchmarks.cpu.host_cost --json result.json

No GPU is needed: Triton compiles the kernels for sm_90, and its driver is replaced by one whose
launches do nothing. Timed are the operator's CUDA implementation, checks included, and the whole
operator without autograd. Left out is what CUDA and Triton's launcher do: choosing the device,
asking for its stream, encoding tensor maps, the launch itself. Tensors are the CPU's, so PyTorch
allocates y and the workspace by malloc.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.layers import LayerCase
from benchmarks.common.report import conditions, digits, parser, table, write_json
from benchmarks.common.timing import Timing, time_in_turns
from custom_ops import _cuda, _grouped
from custom_ops.dropless import _dropless_forward

CAPABILITY = (9, 0)
IMPLEMENTATION, OPERATOR = "implementation", "operator"
QWEN = LayerCase("Qwen3-30B-A3B", 1, 2048, 768, 128, 8, gated=True)
SWIN = LayerCase("Swin stage 2", 1, 192, 768, 8, 2)
# A GPU runs few tokens by vector products, more by grouped products, Qwen3's with tensor maps.
CASES = (QWEN, replace(QWEN, tokens=256), SWIN, replace(SWIN, tokens=784))


class NullLauncher:
    """What Triton makes of a compiled kernel, to start it; counts the launches of all."""

    launches = 0

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *launch: object) -> None:
        """Launches nothing."""
        NullLauncher.launches += 1


class NullDriver:
    """What Triton's JIT asks of a driver, for one device on which nothing runs."""

    launcher_cls = NullLauncher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda name, kernel, shared, device: (0, 0, 32, 0, 1024),
        unload_module=lambda module: None,
    )

    def get_current_target(self) -> Any:
        """Returns the architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        """Returns the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Returns the default stream."""
        return 0


def calls_of(case: LayerCase) -> dict[str, Callable[[], Tensor]]:
    """Returns calls in bfloat16, on memory that nothing reads."""
    x, router_weight, w1, w2, b1, b2 = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in (
            (case.tokens, case.width),
            (case.experts, case.width),
            (case.experts, case.rows, case.width),
            (case.experts, case.width, case.hidden),
            (case.experts, case.rows),
            (case.experts, case.width),
        )
    )
    biases = (None, None) if case.gated else (b1, b2)
    arguments: Any = x, router_weight, w1, biases[0], w2, biases[1], case.top_k
    options: Any = {"activation": case.activation, "gated": case.gated}
    return {
        IMPLEMENTATION: lambda: _dropless_forward(*arguments, **options),
        OPERATOR: lambda: torch.ops.moe.dropless(*arguments, **options),
    }


def time_case(case: LayerCase, runs: int) -> tuple[int, dict[str, Timing]]:
    """Returns the launches of a call, and how long each of the calls takes."""
    calls = calls_of(case)
    with (
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.cuda, "get_device_capability", lambda *device: CAPABILITY),
        patch.object(_grouped, "forward", _cuda.forward),
    ):
        calls[OPERATOR]()  # Compiles.
        before = NullLauncher.launches
        calls[OPERATOR]()
        launches = NullLauncher.launches - before
        return launches, time_in_turns(calls, runs, before=lambda: None)


def main() -> None:
    """Times the host's part of calls."""
    command = parser(__doc__, "json")
    command.add_argument("--runs", type=int, default=2000, help="timed calls of each case")
    given = command.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        command.error("TRITON_INTERPRET=1 has Triton interpret the kernels: unset it")
    from triton.runtime import driver

    driver.set_active(NullDriver())
    torch.set_num_threads(1)
    results, rows = [], []
    with torch.inference_mode():
        for case in CASES:
            launches, timings = time_case(case, given.runs)
            named = {name: asdict(timing) for name, timing in timings.items()}
            results.append(asdict(case) | {"launches": launches} | named)
            times = (digits(1e3 * t) for each in timings.values() for t in (each.median, each.best))
            rows.append([case.name, case.tokens, launches, *times])
    columns = ["layer", "T", "launches", "implementation, us", "best", "operator, us", "best"]
    print(table("host cost of a call, bfloat16", columns, rows))
    result = conditions(["torch", "triton"]) | {"runs": given.runs, "unit": "ms", "cases": results}
    write_json(given.json, result)


if __name__ == "__main__":
    main()
