"""How fast are the experts on a CPU, against the two forms that transformers 5 has?

    python -m benchmarks.cpu.experts --json result.json

All compute the same experts in float32 on the same weights and the same routing, random and
uniform. Calls take turns, and a write of 128 MiB before each call empties the caches, as the rest
of a model would.

Memory is measured in a process of its own: the peak resident set during one call less the
resident set just before it, result included, parameters and inputs not (Linux).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from benchmarks.common.layers import LayerCase
from benchmarks.common.report import conditions, parser, table, write_json
from benchmarks.common.timing import (
    Timing,
    fresh_processes,
    reset_peak,
    resident_bytes,
    time_in_turns,
)
from custom_ops import experts

OURS, GROUPED, BATCHED = "ours", "grouped_mm", "batched_mm"
# batched_mm copies both weights of every (token, expert) pair.
GATHERED_LIMIT = 8e9

T = TypeVar("T")
Call = Callable[[], Tensor]


class Case(LayerCase):
    """Experts and a number of tokens."""

    @property
    def hidden_bytes(self) -> int:
        """Every hidden row of every chosen expert, ``T*k*H`` float32."""
        return 4 * self.tokens * self.top_k * self.hidden

    @property
    def gathered_bytes(self) -> int:
        """What batched_mm copies of the weights."""
        return self.hidden_bytes * self.width * (3 if self.gated else 2)


SWIN = Case("Swin stage 1", 3136, 96, 384, 8, 2)
QWEN = Case("Qwen3-30B-A3B", 1, 2048, 768, 128, 8, gated=True)
CASES = (SWIN, QWEN, replace(QWEN, tokens=16), replace(QWEN, tokens=256))
ONE_TOKEN = (replace(QWEN, name="8 experts", experts=8), replace(QWEN, name="128 experts"))
MEMORY_CASES = (
    replace(SWIN, tokens=16384),
    replace(QWEN, name="Qwen3 with 16 experts", tokens=16384, experts=16),
)


def calls(case: Case) -> dict[str, Call]:
    """Returns the implementations on one set of random weights, whose results are near 1."""
    torch.manual_seed(0)
    p = case.parameters()
    w1, w2, b1, b2 = p["w1"], p["w2"], p.get("b1"), p.get("b2")
    x = torch.randn(case.tokens, case.width)
    weights, ids = torch.randn(case.tokens, case.experts).softmax(-1).topk(case.top_k)
    weights = weights / weights.sum(-1, keepdim=True)

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    # The attributes that transformers' functions read of an experts module.
    module: Any = SimpleNamespace(
        num_experts=case.experts,
        has_gate=case.gated,
        has_bias=b1 is not None,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        gate_up_proj=w1,
        up_proj=w1,
        up_proj_bias=b1,
        down_proj=w2,
        down_proj_bias=b2,
        act_fn=F.gelu,
        _apply_gate=apply_gate,
    )
    form: dict[str, Any] = {"activation": case.activation, "gated": case.gated}
    found: dict[str, Call] = {
        OURS: lambda: experts(x, ids, weights, w1, b1, w2, b2, **form),
        GROUPED: lambda: grouped_mm_experts_forward(module, x, ids, weights),
    }
    if case.gathered_bytes <= GATHERED_LIMIT:
        found[BATCHED] = lambda: batched_mm_experts_forward(module, x, ids, weights)
    return found


def measure(found: Mapping[T, Call], runs: int) -> dict[T, Timing]:
    """Times calls with cold caches."""
    other_data = torch.zeros(32 * 2**20)
    return time_in_turns(found, runs, before=lambda: other_data.add_(1))


def checked_calls(case: Case) -> dict[str, Call]:
    """Compares the results, so that only equal work is timed."""
    found = calls(case)
    expected = found[OURS]()
    for name, call in found.items():
        torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4, msg=name)
    return found


@torch.inference_mode()
def peak_extra_bytes(case: Case, name: str, threads: int) -> int:
    """Returns the peak resident set of one call, less what was resident before."""
    torch.set_num_threads(threads)
    calls(replace(case, tokens=1))[name]()  # Loads libraries and starts threads.
    call = calls(case)[name]
    reset_peak()
    before = resident_bytes()
    call()
    return resident_bytes(peak=True) - before


def time_cases(runs: int) -> list[dict[str, Any]]:
    """Times each case's implementations against ours."""
    results, rows = [], []
    for case in CASES:
        timings = measure(checked_calls(case), runs)
        results.append(asdict(case) | {name: asdict(t) for name, t in timings.items()})
        for name, timing in timings.items():
            ratio = f"{timing.median / timings[OURS].median:.2f}x"
            rows.append([case.name, case.tokens, name, timing.median, timing.best, ratio])
        if BATCHED not in timings:
            copies = f"left out: copies {case.gathered_bytes / 1e9:.0f} GB"
            rows.append([case.name, case.tokens, f"{BATCHED}, {copies}", None, None, None])
    columns = ["case", "T", "version", "median ms", "best ms", "this / ours"]
    print(table("experts, float32", columns, rows))
    return results


def time_one_token(runs: int) -> dict[str, Any]:
    """Times what idle experts cost: one token with 8 experts in all, and with 8 of 128."""
    few, many = (case.name for case in ONE_TOKEN)
    found = {
        (name, case.name): call for case in ONE_TOKEN for name, call in checked_calls(case).items()
    }
    timings = measure(found, runs)
    results, rows = {}, []
    for name in dict.fromkeys(name for name, _ in found):
        low, high = timings[name, few], timings[name, many]
        ratio = high.median / low.median
        results[name] = {few: asdict(low), many: asdict(high), "ratio": ratio}
        rows.append([name, low.median, high.median, f"{ratio:.2f}"])
    print(table("one token", ["version", f"{few}, ms", f"{many}, ms", "ratio"], rows))
    return results


def measure_memory(threads: int) -> list[dict[str, Any]]:
    """Measures peak extra memory, relative to every hidden row at once."""
    results, rows = [], []
    for case in MEMORY_CASES:
        names = [OURS, GROUPED] + [BATCHED] * (case.gathered_bytes <= GATHERED_LIMIT)
        with fresh_processes() as processes:
            peaks = {
                name: processes.submit(peak_extra_bytes, case, name, threads).result()
                for name in names
            }
        total = case.hidden_bytes
        results.append(asdict(case) | {"T*k*H bytes": total, "peak bytes": peaks})
        for name, peak in peaks.items():
            megabytes = f"{total / 1e6:.0f}", name, f"{peak / 1e6:.0f}"
            rows.append([case.name, case.tokens, *megabytes, f"{peak / total:.2f}"])
    columns = ["case", "T", "T*k*H, MB", "version", "peak MB", "peak / T*k*H"]
    print(table("extra memory", columns, rows))
    return results


def main() -> None:
    """Compares the experts' CPU implementations in time and memory."""
    known = parser(__doc__, "json")
    known.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    known.add_argument("--runs", type=int, default=21, help="timed calls of each implementation")
    given = known.parse_args()
    torch.set_num_threads(given.threads)
    result = conditions(["torch", "transformers"])
    result |= {"threads": given.threads, "runs": given.runs}
    with torch.inference_mode():
        result |= {"cases": time_cases(given.runs), "one token": time_one_token(given.runs)}
    result["memory"] = measure_memory(given.threads)
    write_json(given.json, result)


if __name__ == "__main__":
    main()
