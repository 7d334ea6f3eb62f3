"""``torch.ops.moe.experts`` on the CPU, against the two forms that transformers 5 has.

    python -m benchmarks.cpu_experts --json result.json

All compute the same experts in float32 on the same weights and the same routing, random and
uniform. Calls take turns, each round starting with another, and a write of 128 MiB before each
call empties the caches, as the rest of a model would.

Memory is measured in a process of its own: the peak resident set during one call less the
resident set just before it, result included, parameters and inputs not (Linux).
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from benchmarks._timing import Timing, interleave, record
from custom_ops import experts

OURS, GROUPED, BATCHED = "ours", "grouped_mm", "batched_mm"
# batched_mm copies both weights of every (token, expert) pair.
GATHERED_LIMIT = 8e9


@dataclass(frozen=True)
class Case:
    """Experts and a number of tokens."""

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    gated: bool = False

    @property
    def gathered_bytes(self) -> int:
        """What batched_mm copies of the weights."""
        matrices = 3 if self.gated else 2
        return 4 * self.tokens * self.top_k * matrices * self.width * self.hidden

    @property
    def hidden_bytes(self) -> int:
        """Every hidden row of every chosen expert, ``T*k*H`` float32."""
        return 4 * self.tokens * self.top_k * self.hidden


# Exact GELU and biases as in Swin-MoE, gated SiLU without biases as in Qwen3-30B-A3B.
SWIN = Case("Swin stage 1", 3136, 96, 384, 8, 2)
QWEN = Case("Qwen3-30B-A3B", 1, 2048, 768, 128, 8, gated=True)
CASES = (SWIN, QWEN, replace(QWEN, tokens=16), replace(QWEN, tokens=256))
ONE_TOKEN = (replace(QWEN, name="8 experts", experts=8), replace(QWEN, name="128 experts"))
MEMORY_CASES = (
    replace(SWIN, tokens=16384),
    replace(QWEN, name="Qwen3 with 16 experts", tokens=16384, experts=16),
)


def calls(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The implementations on one set of random weights, scaled so that results are near 1."""
    torch.manual_seed(0)
    T, D, H, E = case.tokens, case.width, case.hidden, case.experts
    rows = 2 * H if case.gated else H
    w1, w2 = torch.randn(E, rows, D).div_(D**0.5), torch.randn(E, D, H).div_(H**0.5)
    b1, b2 = (None, None) if case.gated else (torch.randn(E, rows), torch.randn(E, D))
    x = torch.randn(T, D)
    weights, ids = torch.randn(T, E).softmax(-1).topk(case.top_k)
    weights = weights / weights.sum(-1, keepdim=True)

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    # What transformers' functions read of an experts module.
    module = SimpleNamespace(
        num_experts=E,
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
    activation = "silu" if case.gated else "gelu"
    found: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: experts(
            x, ids, weights, w1, b1, w2, b2, activation=activation, gated=case.gated
        ),
        GROUPED: lambda: grouped_mm_experts_forward(module, x, ids, weights),
    }
    if case.gathered_bytes <= GATHERED_LIMIT:
        found[BATCHED] = lambda: batched_mm_experts_forward(module, x, ids, weights)
    return found


def check(found: dict[str, Callable[[], Tensor]]) -> None:
    """Compares the results, so that only equal work is timed."""
    expected = found[OURS]()
    for name, call in found.items():
        torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4, msg=name)


def measure(found: dict[str, Callable[[], Tensor]], runs: int) -> dict[str, Timing]:
    """Times calls with cold caches."""
    other_data = torch.zeros(32 * 2**20)
    return interleave(found, runs, before=lambda: other_data.add_(1))


@torch.inference_mode()
def peak_extra_bytes(case: Case, name: str, threads: int) -> int:
    """Peak resident set of one call, less what was resident before."""
    torch.set_num_threads(threads)
    calls(replace(case, tokens=1))[name]()  # Loads libraries and starts threads.
    call = calls(case)[name]
    Path("/proc/self/clear_refs").write_text("5")  # Peak := now
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    kib = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    if kib is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(kib[1]) * 1024


def in_own_process(case: Case, name: str, threads: int) -> int:
    """:func:`peak_extra_bytes` in a fresh process, which has no freed memory to reuse."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(peak_extra_bytes, case, name, threads).result()


def time_cases(chosen: str, runs: int) -> tuple[Table, list[dict[str, object]]]:
    """Each case's implementations against ours."""
    table = Table(
        "case",
        "T",
        "version",
        "median ms",
        "best ms",
        "this / ours",
        title="experts, float32",
    )
    results = []
    for case in CASES:
        if chosen not in case.name:
            continue
        found = calls(case)
        check(found)
        timings = measure(found, runs)
        for name in (OURS, GROUPED, BATCHED):
            head = (case.name, str(case.tokens)) if name == OURS else ("", "")
            if name not in timings:
                table.add_row(*head, name, f"left out: copies {case.gathered_bytes / 1e9:.0f} GB")
                continue
            timing, ratio = timings[name], timings[name].median / timings[OURS].median
            table.add_row(
                *head, name, f"{timing.median:.2f}", f"{timing.best:.2f}", f"{ratio:.2f}x"
            )
        results.append(asdict(case) | {name: asdict(t) for name, t in timings.items()})
    return table, results


def time_one_token(runs: int) -> tuple[Table, dict[str, object]]:
    """What idle experts cost: one token of 8 experts out of 128, and out of 8."""
    few, many = ONE_TOKEN
    found = {case.name: calls(case) for case in ONE_TOKEN}
    for same in found.values():
        check(same)
    turns = {f"{case} {name}": call for case, same in found.items() for name, call in same.items()}
    timings = measure(turns, runs)
    table = Table("version", f"{few.name}, ms", f"{many.name}, ms", "ratio", title="one token")
    results: dict[str, object] = {}
    for name in found[few.name]:
        low, high = (timings[f"{case.name} {name}"] for case in ONE_TOKEN)
        ratio = high.median / low.median
        table.add_row(name, f"{low.median:.2f}", f"{high.median:.2f}", f"{ratio:.2f}")
        results[name] = {few.name: asdict(low), many.name: asdict(high), "ratio": ratio}
    return table, results


def measure_memory(threads: int) -> tuple[Table, list[dict[str, object]]]:
    """Peak extra memory, relative to every hidden row at once."""
    table = Table(
        "case", "T", "T*k*H, MB", "version", "peak MB", "peak / T*k*H", title="extra memory"
    )
    results = []
    for case in MEMORY_CASES:
        names = [OURS, GROUPED] + [BATCHED] * (case.gathered_bytes <= GATHERED_LIMIT)
        peaks = {name: in_own_process(case, name, threads) for name in names}
        for name, peak in peaks.items():
            ratio = peak / case.hidden_bytes
            head = (case.name, str(case.tokens), f"{case.hidden_bytes / 1e6:.0f}")
            head = head if name == OURS else ("", "", "")
            table.add_row(*head, name, f"{peak / 1e6:.0f}", f"{ratio:.2f}")
        results.append(asdict(case) | {"T*k*H bytes": case.hidden_bytes, "peak bytes": peaks})
    return table, results


def main(
    threads: Annotated[int, typer.Option(help="Threads of PyTorch.")] = 2,
    runs: Annotated[int, typer.Option(help="Timed calls of each implementation.")] = 21,
    case: Annotated[str, typer.Option(help="Time only cases whose name contains this.")] = "",
    memory: Annotated[bool, typer.Option(help="Also measure memory.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Compares the experts' CPU implementations in time and memory."""
    torch.set_num_threads(threads)
    console = Console()
    environment = record(["torch", "transformers"]) | {"threads": threads, "runs": runs}
    with torch.inference_mode():
        table, cases = time_cases(case, runs)
        console.print(table)
        table, one_token = time_one_token(runs)
        console.print(table)
    results = environment | {"cases": cases, "one token": one_token}
    if memory:
        table, results["memory"] = measure_memory(threads)
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
