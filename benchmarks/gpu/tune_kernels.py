"""Which tiles of a layer's kernels are fastest on this machine's GPU? Writes them as data.

    python -m benchmarks.gpu.tune_kernels --shapes qwen3

For some numbers of tokens each launch of each candidate is timed by itself, in a CUDA graph with a
cold L2 cache. The sums of their launches' times rank whole plans; the first few are timed whole.
Ranges of tokens then join numbers that one configuration serves well. The outcome is timed against
the default at the end, and written only if it is faster.

The data goes into ``custom_ops/kernels/tuned/sm_XX.json``, beside what is there already; layers of
the same sizes and dtypes take it from there. ``--dry-run`` runs the tuner without a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.report import digits, table
from benchmarks.gpu.candidates import blocks_m, few_candidates, gemm_candidates, mlp_candidates
from benchmarks.gpu.cells import launches_alone
from benchmarks.gpu.compiling import Job, compile_jobs, plan_jobs
from benchmarks.gpu.goals import geometric_mean
from benchmarks.gpu.layers import Shape, parameters_of, random_tokens
from benchmarks.gpu.selection import Part, choose_ranges, neighbours, parts_of, promising
from benchmarks.gpu.speed import Device, gpu_parser, parsed
from benchmarks.gpu.timing import Timer, release
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.configs import (
    RangeConfig,
    default_ranges,
    shape_key,
    write_ranges,
)
from custom_ops.kernels.launch import launch
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS

TOKENS = tuple(2**power for power in range(15))
TUNED = Path(__file__).parents[2] / "custom_ops" / "kernels" / "tuned"
SAMPLES, FINAL_SAMPLES = 9, 40
# Whole plans that are timed for each path and height of tiles.
WHOLE_PLANS = 4
# Share of a layer's time; what is not compiled by then is compiled when it is launched.
COMPILE_SHARE = 0.6


def candidates(
    layer: Layer, device: Architecture, tokens: int, limit: int
) -> Iterator[RangeConfig]:
    """Yields what may be fastest for a number of tokens; each part comes at least once.

    First and second products are paired one by one: they are timed by themselves.

    Args:
        layer: The layer.
        device: Where it runs.
        tokens: T.
        limit: Most candidates of each product, for each height of tiles.
    """
    gates = layer.options.rows_per_hidden
    few = few_candidates(layer, tokens)[:limit]
    yield from (RangeConfig(MAX_TOKENS, "few", each, each) for each in few)
    for block_m in blocks_m(layer, tokens):
        for mlp in mlp_candidates(layer, device, block_m)[:limit]:
            yield RangeConfig(MAX_TOKENS, "mlp", mlp)
        ups = gemm_candidates(layer, device, block_m, layer.hidden, layer.width, gates)[:limit]
        downs = gemm_candidates(layer, device, block_m, layer.width, layer.hidden, 1)[:limit]
        if ups and downs:
            for index in range(max(len(ups), len(downs))):
                up, down = ups[index % len(ups)], downs[index % len(downs)]
                yield RangeConfig(MAX_TOKENS, "gemm", up, down)


@dataclass
class Tuner:
    """Times candidates for one layer.

    Attributes:
        layer: The layer.
        device: Where it runs.
        timer: What to time with.
        tensors_for: Makes a call's tensors, with y, for a number of tokens.
        deadline: The :func:`time.monotonic` after which no further part is timed.
        failed: Why parts have no time.
    """

    layer: Layer
    device: Architecture
    timer: Timer
    tensors_for: Callable[[int], Mapping[str, Tensor]]
    deadline: float = float("inf")
    failed: dict[Part, str] = field(default_factory=dict)

    def times(self, tokens: int, tried: Sequence[RangeConfig]) -> dict[RangeConfig, float]:
        """Returns microseconds of those whole plans whose parts are fastest."""
        parts = self._part_times(tokens, tried)
        return self.whole_times(tokens, promising(parts, WHOLE_PLANS))

    def whole_times(self, tokens: int, tried: Iterable[RangeConfig]) -> dict[RangeConfig, float]:
        """Returns microseconds of whole plans, without those that do not run."""
        names = {repr(config): config for config in tried}
        plans = {name: (config,) for name, config in names.items()}
        return {names[name]: us for name, us in self.compare(tokens, plans, SAMPLES).items()}

    def compare(
        self,
        tokens: int,
        plans: Mapping[str, tuple[RangeConfig, ...]],
        samples: int = FINAL_SAMPLES,
    ) -> dict[str, float]:
        """Returns microseconds of whole plans by name, timed in turns."""
        tensors = self.tensors_for(tokens)
        calls = {name: self._call(ranges, tensors) for name, ranges in plans.items()}
        found = self.timer(calls, samples=samples).times
        return {name: each.median for name, each in found.items()}

    def _call(
        self, ranges: tuple[RangeConfig, ...], tensors: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        planned = plan_with(self.layer, self.device, ranges)
        x = tensors["x"]
        size = planned.workspace_size(len(x))
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
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
            calls: dict[str, Callable[[], None]] = {}
            for name, call in launches_alone(
                plan_with(self.layer, self.device, (config,)), tensors
            ):
                part = wanted.get(product_of(name))
                try:
                    call()
                except Exception as error:  # This tile may not fit the device.
                    if part is not None:
                        self.failed[part] = str(error)
                    continue
                if part is not None:
                    calls[part.product] = call
            timed = self.timer(calls, samples=SAMPLES)
            self.failed |= {wanted[name]: why for name, why in timed.failed.items()}
            found |= {wanted[name]: each.median for name, each in timed.times.items()}
        return found


def product_of(kernel: str) -> str:
    """Returns which product a kernel computes: ``up``, ``down``, or neither, ``""``."""
    if kernel in ("few_up_kernel", "expert_up_kernel", "expert_mlp_kernel"):
        return "up"
    return "down" if kernel in ("few_down_kernel", "expert_down_kernel") else ""


def tune(tuner: Tuner, tokens: Sequence[int], limit: int) -> tuple[RangeConfig, ...]:
    """Returns the ranges of the fastest configurations that were found.

    Args:
        tuner: What times candidates.
        tokens: Numbers of tokens to look at.
        limit: Most candidates of each product.
    """
    times: dict[int, dict[RangeConfig, float]] = {}
    for count in tokens:
        tried = list(candidates(tuner.layer, tuner.device, count, limit))
        default = plan_config(default_ranges(tuner.layer, tuner.device), count)
        measured = tuner.times(count, tried) | tuner.whole_times(count, [default])
        if measured:
            times[count] = measured
            fastest = min(measured, key=lambda each: measured[each])
            print(f"T {count}: {digits(measured[fastest])} us with {_short(fastest)}", flush=True)
    for count, others in neighbours(times, WHOLE_PLANS // 2).items():
        times[count] |= tuner.whole_times(count, others)
    return choose_ranges(times)


def plan_config(ranges: Iterable[RangeConfig], tokens: int) -> RangeConfig:
    """Returns the configuration for a number of tokens, as of one range for all."""
    found = next(each for each in ranges if tokens <= each.last_tokens)
    return replace(found, last_tokens=MAX_TOKENS)


def compile_candidates(
    layer: Layer, device: Architecture, tokens: Sequence[int], limit: int, seconds: float
) -> None:
    """Compiles what :func:`tune` will launch, in parallel, for at most ``seconds``."""
    jobs: dict[str, Job] = {}
    for count in tokens:
        for config in candidates(layer, device, count, limit):
            for key, job in plan_jobs(layer, device, [count], (config,)):
                jobs.setdefault(key, job)
    compile_jobs(list(jobs.values()), seconds=seconds)


def write(
    path: Path, layer: Layer, ranges: tuple[RangeConfig, ...], conditions: Mapping[str, Any]
) -> None:
    """Adds a layer's ranges to a table of tuned data, or replaces them."""
    data = json.loads(path.read_text()) if path.exists() else {"shapes": {}}
    shapes = data["shapes"] | {shape_key(layer): write_ranges(ranges)}
    data = {
        **{key: conditions[key] for key in ("hardware", "versions", "date")},
        "shapes": dict(sorted(shapes.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def tensors_of(
    shape: Shape, dtype: torch.dtype, device: str
) -> Callable[[int], Mapping[str, Tensor]]:
    """Returns what makes a call's tensors, on parameters made once."""
    parameters = parameters_of(shape, dtype, device)

    def tensors(tokens: int) -> Mapping[str, Tensor]:
        x = random_tokens(parameters, tokens)
        return {**parameters, "x": x, "y": torch.empty_like(x)}

    return tensors


def tune_shape(
    shape: Shape,
    dtype: torch.dtype,
    device: Device,
    tokens: Sequence[int],
    limit: int,
    budget: float,
    path: Path,
) -> None:
    """Tunes one layer, reports what came of it, and writes it if it is faster than the default."""
    started = time.monotonic()
    layer, on = shape.layer(dtype).canonical(), device.architecture
    print(f"{shape.title}:", flush=True)
    if device.name == "cuda":
        compile_candidates(layer, on, tokens, limit, COMPILE_SHARE * budget)
    tensors_for = tensors_of(shape, dtype, device.name)
    tuner = Tuner(layer, on, device.timer, tensors_for, started + budget)
    plans = {"default": default_ranges(layer, on), "tuned": tune(tuner, tokens, limit)}
    if device.name == "cuda":
        jobs = {
            key: job for each in plans.values() for key, job in plan_jobs(layer, on, tokens, each)
        }
        compile_jobs(list(jobs.values()))
    times = {count: tuner.compare(count, plans) for count in tokens}
    ratios = {count: each["default"] / each["tuned"] for count, each in times.items()}
    rows = (
        [
            count,
            digits(each["default"]),
            digits(each["tuned"]),
            f"{ratios[count]:.2f}x",
            _short(plan_config(plans["tuned"], count)),
        ]
        for count, each in times.items()
    )
    columns = ["T", "default", "tuned", "ratio", "configuration"]
    print(table(f"{shape.title}, us", columns, rows))
    ratio = geometric_mean(ratios.values())
    print(
        f"{shape.name}: {ratio:.3f}x faster than the default, in "
        f"{time.monotonic() - started:.0f} s; {len(tuner.failed)} parts did not run"
    )
    if ratio > 1:
        write(path, layer, plans["tuned"], device.conditions())
        print(f"written to {path}")


def _short(config: RangeConfig) -> str:
    parts = [part for part in (config.up, config.down) if part is not None]
    return " ".join([config.path, *(",".join(map(str, astuple(part))) for part in parts)])


@torch.inference_mode()
def main() -> None:
    """Tunes the kernels for this machine's GPU."""
    known = gpu_parser(__doc__, 180)
    known.add_argument(
        "--limit", type=int, default=24, help="candidates of each product and tile height"
    )
    known.add_argument("--output", type=Path, help="file to write, else the package's")
    given = parsed(known)
    if given.dry_run and given.output is None:
        known.error("--dry-run needs --output: its times mean nothing")
    device = Device.chosen(given.dry_run)
    path = given.output or TUNED / f"{device.architecture.name}.json"
    for shape in given.shapes:
        tokens = given.tokens or TOKENS
        tune_shape(shape, given.dtype, device, tokens, given.limit, given.budget, path)
        release()


if __name__ == "__main__":
    main()
