"""Which tiles of a layer's kernels are fastest on this machine's GPU? Writes them as data.

    python -m benchmarks.gpu.tune_kernels --shapes qwen3

For some numbers of tokens each launch of each candidate is timed by itself, in a CUDA graph with a
cold L2 cache. The sums of their launches' times rank whole plans; the first few are timed whole.
Ranges of tokens then join numbers that one configuration serves well. Few and many tokens take
turns, and after each number the table is written with what is known by then: what ends the process
loses little. The outcome is timed against the default at the end, and stays only if it is faster.

The data goes into ``custom_ops/kernels/tuned/sm_XX.json``, beside what is there already; layers of
the same sizes and dtypes take it from there. ``--dry-run`` runs the tuner without a GPU.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.common.report import digits, table
from benchmarks.gpu.candidates import blocks_m, few_candidates, gemm_candidates, mlp_candidates
from benchmarks.gpu.cells import launches_alone
from benchmarks.gpu.compiling import Compilation, compile_jobs, plan_jobs
from benchmarks.gpu.goals import geometric_mean
from benchmarks.gpu.layers import Shape, call_tensors, parameters_of
from benchmarks.gpu.selection import Part, choose_ranges, neighbours, parts_of, promising
from benchmarks.gpu.speed import Device, gpu_parser, parsed
from benchmarks.gpu.timing import Timer, release
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import RangeConfig, default_ranges, shape_key, write_ranges
from custom_ops.kernels.launch import launch
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS

T = TypeVar("T")
Ranges = tuple[RangeConfig, ...]
#: Microseconds of whole plans, by number of tokens.
Times = dict[int, dict[RangeConfig, float]]

TOKENS = tuple(2**power for power in range(15))
TUNED = Path(__file__).parents[2] / "custom_ops" / "kernels" / "tuned"
SAMPLES, FINAL_SAMPLES = 9, 40
# Whole plans that are timed for each path and height of tiles.
WHOLE_PLANS = 4
#: Which product a kernel computes.
PRODUCTS = {
    **dict.fromkeys(("few_up_kernel", "expert_up_kernel", "expert_mlp_kernel"), "up"),
    **dict.fromkeys(("few_down_kernel", "expert_down_kernel"), "down"),
}
# Share of a layer's time; what is not compiled by then is compiled when it is launched.
COMPILE_SHARE = 0.6


def candidates(
    layer: Layer, device: Architecture, tokens: int, limit: int
) -> Iterator[RangeConfig]:
    """Yields what may be fastest for a number of tokens; each part comes at least once.

    First and second products are paired one by one: they are timed by themselves. There are at most
    ``limit`` candidates of each, for each height of tiles.
    """
    gates = layer.shape.options.rows_per_hidden
    few = few_candidates(layer, tokens)[:limit]
    yield from (RangeConfig(MAX_TOKENS, "few", each, each) for each in few)
    for block_m in blocks_m(layer, tokens):
        for mlp in mlp_candidates(layer, device, block_m)[:limit]:
            yield RangeConfig(MAX_TOKENS, "mlp", mlp)
        ups = gemm_candidates(layer, device, block_m, layer.shape.hidden, layer.shape.width, gates)[
            :limit
        ]
        downs = gemm_candidates(layer, device, block_m, layer.shape.width, layer.shape.hidden, 1)[
            :limit
        ]
        if ups and downs:
            for index in range(max(len(ups), len(downs))):
                up, down = ups[index % len(ups)], downs[index % len(downs)]
                yield RangeConfig(MAX_TOKENS, "gemm", up, down)


@dataclass
class Tuner:
    """Times candidates for one layer."""

    layer: Layer
    device: Architecture
    timer: Timer
    tensors_for: Callable[[int], Mapping[str, Tensor]]  # of a number of tokens; with y
    deadline: float = float("inf")  # time.monotonic() after which no further part is timed
    failed: dict[Part, str] = field(default_factory=dict)  # why parts have no time

    def times(self, tokens: int, tried: Sequence[RangeConfig]) -> dict[RangeConfig, float]:
        """Returns microseconds of those whole plans whose parts are fastest."""
        parts = self._part_times(tokens, tried)
        return self.whole_times(tokens, promising(parts, WHOLE_PLANS))

    def whole_times(self, tokens: int, tried: Iterable[RangeConfig]) -> dict[RangeConfig, float]:
        """Returns microseconds of whole plans, without those that do not run."""
        return self.compare(tokens, {config: (config,) for config in tried}, SAMPLES)

    def compare(
        self, tokens: int, plans: Mapping[T, Ranges], samples: int = FINAL_SAMPLES
    ) -> dict[T, float]:
        """Returns microseconds of whole plans, timed in turns."""
        tensors = self.tensors_for(tokens)
        calls = {name: self._call(ranges, tensors) for name, ranges in plans.items()}
        found = self.timer(calls, samples=samples).times
        return {name: each.median for name, each in found.items()}

    def _call(self, ranges: Ranges, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        planned = plan_with(self.layer, self.device, ranges)
        size = planned.workspace_size(len(tensors["x"]))
        workspace = torch.empty(size, dtype=torch.uint8, device=tensors["x"].device)
        return lambda: launch(planned, tensors, workspace)

    def _part_times(self, tokens: int, tried: Sequence[RangeConfig]) -> dict[Part, float]:
        """Microseconds of the launches that candidates differ in."""
        tensors = self.tensors_for(tokens)
        found: dict[Part, float] = {}
        for config in tried:
            if time.monotonic() > self.deadline:
                break
            wanted = {p.product: p for p in parts_of(config) if p not in found | self.failed}
            if not wanted:
                continue
            calls: dict[Part, Callable[[], None]] = {}
            planned = plan_with(self.layer, self.device, (config,))
            for name, call in launches_alone(planned, tensors):
                part = wanted.get(PRODUCTS.get(name, ""))
                try:
                    call()
                except Exception as error:  # This tile may not fit the device.
                    if part is not None:
                        self.failed[part] = str(error)
                else:
                    if part is not None:
                        calls[part] = call
            timed = self.timer(calls, samples=SAMPLES)
            self.failed |= timed.failed
            found |= {part: each.median for part, each in timed.times.items()}
        return found


def interleaved(tokens: Sequence[int]) -> list[int]:
    """Returns numbers in an order in which the first few are spread over all of them."""
    bits = len(tokens).bit_length()
    return [tokens[i] for i in sorted(range(len(tokens)), key=lambda i: f"{i:0{bits}b}"[::-1])]


def tune(
    tuner: Tuner,
    tokens: Sequence[int],
    limit: int,
    save: Callable[[Times], None] = lambda _: None,
) -> Ranges:
    """Returns the ranges of the fastest configurations that were found, for numbers of tokens.

    After each number ``save`` gets the times so far.
    """
    times: Times = {}
    for count in interleaved(tokens):
        tried = list(candidates(tuner.layer, tuner.device, count, limit))
        default = plan_config(default_ranges(tuner.layer, tuner.device), count)
        measured = tuner.times(count, tried) | tuner.whole_times(count, [default])
        if measured:
            times[count] = measured
            fastest = min(measured, key=lambda each: measured[each])
            print(f"T {count}: {digits(measured[fastest])} us with {_short(fastest)}", flush=True)
            save(times)
    for count, others in neighbours(times, WHOLE_PLANS // 2).items():
        times[count] |= tuner.whole_times(count, others)
    return choose_ranges(times)


def plan_config(ranges: Iterable[RangeConfig], tokens: int) -> RangeConfig:
    """Returns the configuration for a number of tokens, as of one range for all."""
    found = next(each for each in ranges if tokens <= each.last_tokens)
    return replace(found, last_tokens=MAX_TOKENS)


def write(path: Path, layer: Layer, ranges: Ranges, conditions: Mapping[str, Any]) -> None:
    """Adds a layer's ranges to a table of tuned data, or replaces them; without any, removes it."""
    data = json.loads(path.read_text()) if path.exists() else {"shapes": {}}
    shapes = {key: each for key, each in data["shapes"].items() if key != shape_key(layer)}
    if ranges:
        shapes[shape_key(layer)] = write_ranges(ranges)
    data = {
        **{key: conditions[key] for key in ("hardware", "versions", "date")},
        "shapes": dict(sorted(shapes.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    beside.replace(path)


def tuning_jobs(
    layer: Layer, on: Architecture, tokens: Sequence[int], limit: int
) -> dict[str, Compilation]:
    """Returns the compilations of the candidates, in the order in which they are timed."""
    return {
        key: job
        for count in interleaved(tokens)
        for config in candidates(layer, on, count, limit)
        for key, job in plan_jobs(layer, on, [count], (config,))
    }


def tune_shape(shape: Shape, device: Device, given: Namespace, path: Path, budget: float) -> None:
    """Tunes one layer, reports what came of it, and writes it if it is faster than the default."""
    started = time.monotonic()
    layer, on = shape.layer(given.dtype).canonical(), device.architecture
    tokens, conditions = given.tokens or TOKENS, device.conditions()
    print(f"{shape.title}:", flush=True)
    if device.name == "cuda":
        jobs = tuning_jobs(layer, on, tokens, given.limit)
        compile_jobs(jobs, seconds=COMPILE_SHARE * budget)
    tensors_for = partial(call_tensors, parameters_of(shape, given.dtype, device.name))
    tuner = Tuner(layer, on, device.timer, tensors_for, started + budget)

    def save(times: Times) -> None:
        write(path, layer, choose_ranges(times), conditions)

    tuned = tune(tuner, tokens, given.limit, save)
    plans = {"default": default_ranges(layer, on), "tuned": tuned}
    if device.name == "cuda":
        compile_jobs(dict(chain(*(plan_jobs(layer, on, tokens, each) for each in plans.values()))))
    ratios, rows = [], []
    for count in tokens:
        times = tuner.compare(count, plans)
        ratios.append(times["default"] / times["tuned"])
        chosen = _short(plan_config(plans["tuned"], count))
        rows.append([count, times["default"], times["tuned"], f"{ratios[-1]:.2f}x", chosen])
    columns = ["T", "default", "tuned", "ratio", "configuration"]
    print(table(f"{shape.title}, us", columns, rows))
    ratio = geometric_mean(ratios)
    print(
        f"{shape.name}: {ratio:.3f}x faster than the default, in "
        f"{time.monotonic() - started:.0f} s; {len(tuner.failed)} parts did not run"
    )
    write(path, layer, tuned if ratio > 1 else (), conditions)
    if ratio > 1:
        print(f"written to {path}")


def _short(config: RangeConfig) -> str:
    parts = [part for part in (config.up, config.down) if part is not None]
    return " ".join([config.path, *(",".join(map(str, astuple(part))) for part in parts)])


@torch.inference_mode()
def main() -> None:
    """Tunes the kernels for this machine's GPU."""
    known = gpu_parser(__doc__, 900)
    known.add_argument(
        "--limit", type=int, default=24, help="candidates of each product and tile height"
    )
    known.add_argument("--output", type=Path, help="folder of tables, else the package's")
    given = parsed(known, known.parse_args())
    if given.dry_run and given.output is None:
        known.error("--dry-run needs --output: its times mean nothing")
    device = Device.chosen(given.dry_run)
    path = (given.output or TUNED) / f"{device.architecture.name}.json"
    deadline = time.monotonic() + given.budget
    for index, shape in enumerate(given.shapes):
        left = deadline - time.monotonic()
        tune_shape(shape, device, given, path, left / (len(given.shapes) - index))
        release()


if __name__ == "__main__":
    main()
