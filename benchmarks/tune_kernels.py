"""Finds the fastest tiles of layers on this machine's GPU, and writes them as data.

    python -m benchmarks.tune_kernels --shapes qwen3

For some numbers of tokens each launch of each candidate is timed by itself, in a CUDA graph with a
cold L2 cache. The sums of their launches' times rank whole plans; the first few are timed whole.
Ranges of tokens then join numbers that one configuration serves well. What is written is tried
against the default at the end, and kept only if it is faster.

The data goes into ``custom_ops/kernels/tuned/sm_XX.json``, beside what is there already; layers of
the same sizes and dtypes take it from there. ``--dry-run`` runs the tuner without a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks._device import HAS_GPU
from benchmarks._gpu_breakdown import only
from benchmarks._gpu_candidates import blocks_m, few_candidates, gemm_candidates, mlp_candidates
from benchmarks._gpu_cells import Bench, Cell
from benchmarks._gpu_compile import compile_jobs, jobs_of
from benchmarks._gpu_floor import Rates
from benchmarks._gpu_goals import geometric_mean
from benchmarks._gpu_report import environment
from benchmarks._gpu_selection import Part, choose_ranges, neighbours, parts_of, promising
from benchmarks._gpu_shapes import SHAPES, Shape, chosen, parameters
from benchmarks._gpu_timing import GraphTimer, HostTimer, Timer, release
from custom_ops.kernels.architectures import Architecture, architecture, nearest_architecture
from custom_ops.kernels.configs import (
    FewConfig,
    GemmConfig,
    MlpConfig,
    RangeConfig,
    default_ranges,
    shape_key,
    write_ranges,
)
from custom_ops.kernels.launch import launch
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS, ForwardPlan

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TUNED = Path(__file__).parents[1] / "custom_ops" / "kernels" / "tuned"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAMPLES, FINAL_SAMPLES = 9, 40
# Whole plans that are timed for each path and height of tiles.
WHOLE_PLANS = 4
# Of a layer's time; what is not compiled by then is compiled when it is launched, or left out.
COMPILE_SHARE = 0.6

Report = Callable[[int, int], None]


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
        deadline: By :func:`time.monotonic`.
        failed: Why parts have no time.
    """

    layer: Layer
    device: Architecture
    timer: Timer
    tensors_for: Callable[[int], Mapping[str, Tensor]]
    deadline: float = float("inf")
    failed: dict[Part, str] = field(default_factory=dict)

    def times(self, tokens: int, tried: Sequence[RangeConfig]) -> dict[RangeConfig, float]:
        """Returns microseconds of whole plans: of those that their parts promise most."""
        parts = self._part_times(tokens, tried)
        return self.whole_times(tokens, promising(parts, WHOLE_PLANS))

    def whole_times(
        self, tokens: int, tried: Iterable[RangeConfig], samples: int = SAMPLES
    ) -> dict[RangeConfig, float]:
        """Returns microseconds of whole plans, without those that do not run."""
        tensors = self.tensors_for(tokens)
        names = {repr(config): config for config in tried}
        calls = {name: self._call((config,), tensors) for name, config in names.items()}
        found = self.timer(calls, samples=samples).times
        return {names[name]: each.median for name, each in found.items()}

    def compare(
        self, tokens: int, plans: Mapping[str, tuple[RangeConfig, ...]]
    ) -> dict[str, float]:
        """Returns microseconds of whole plans by name, timed in turns."""
        tensors = self.tensors_for(tokens)
        calls = {name: self._call(ranges, tensors) for name, ranges in plans.items()}
        found = self.timer(calls, samples=FINAL_SAMPLES).times
        return {name: each.median for name, each in found.items()}

    def _call(
        self, ranges: tuple[RangeConfig, ...], tensors: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        planned = plan_with(self.layer, self.device, ranges)
        workspace = self._workspace(planned, tensors)
        return lambda: launch(planned, tensors, workspace)

    def _workspace(self, planned: ForwardPlan, tensors: Mapping[str, Tensor]) -> Tensor:
        x = tensors["x"]
        size = planned.workspace_size(len(x))
        return torch.empty(size, dtype=torch.uint8, device=x.device)

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
            planned = plan_with(self.layer, self.device, (config,))
            workspace = self._workspace(planned, tensors)
            calls: dict[str, Callable[[], None]] = {}
            for index, spec in enumerate(planned.at(tokens).launches):
                alone = only(planned, tokens, index)
                call = partial(launch, alone, tensors, workspace)
                part = wanted.get(product_of(spec.name))
                try:
                    call()
                except Exception as error:
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


def tune(
    tuner: Tuner, tokens: Sequence[int], limit: int, report: Report = lambda done, total: None
) -> tuple[RangeConfig, ...]:
    """Returns the ranges of the fastest configurations that were found.

    Args:
        tuner: What times candidates.
        tokens: Numbers of tokens to look at.
        limit: Most candidates of each product.
        report: Told how many numbers of tokens are done, of how many.
    """
    times: dict[int, dict[RangeConfig, float]] = {}
    for done, count in enumerate(tokens):
        report(done, len(tokens))
        tried = list(candidates(tuner.layer, tuner.device, count, limit))
        default = plan_config(default_ranges(tuner.layer, tuner.device), count)
        measured = tuner.times(count, tried) | tuner.whole_times(count, [default])
        if measured:
            times[count] = measured
    for count, others in neighbours(times, WHOLE_PLANS // 2).items():
        times[count] |= tuner.whole_times(count, others)
    report(len(tokens), len(tokens))
    return choose_ranges(times)


def plan_config(ranges: Iterable[RangeConfig], tokens: int) -> RangeConfig:
    """Returns the configuration for a number of tokens, as of one range for all."""
    found = next(each for each in ranges if tokens <= each.last_tokens)
    return replace(found, last_tokens=MAX_TOKENS)


def compile_candidates(
    layer: Layer,
    device: Architecture,
    tokens: Sequence[int],
    limit: int,
    deadline: float,
    report: Report,
) -> None:
    """Compiles what :func:`tune` will launch, in parallel, until the deadline."""
    jobs: dict[str, Any] = {}
    for count in tokens:
        for config in candidates(layer, device, count, limit):
            jobs |= {
                key: job
                for key, job in jobs_of(layer, device, [count], (config,))
                if key not in jobs
            }
    compile_jobs(list(jobs.values()), deadline=deadline, report=report)


def write(
    path: Path, layer: Layer, ranges: tuple[RangeConfig, ...], found: Mapping[str, Any]
) -> None:
    """Adds a layer's ranges to a table of tuned data, or replaces them."""
    data = json.loads(path.read_text()) if path.exists() else {"shapes": {}}
    shapes = data["shapes"] | {shape_key(layer): write_ranges(ranges)}
    data = {
        "hardware": found["hardware"],
        "versions": found["versions"],
        "date": found["date"],
        "shapes": dict(sorted(shapes.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def tensors_of(
    shape: Shape, dtype: torch.dtype, timer: Timer
) -> Callable[[int], dict[str, Tensor]]:
    """Returns what makes a call's tensors, on parameters made once."""
    given = parameters(shape, dtype, "cuda" if HAS_GPU else "cpu")
    bench = Bench(shape, given, timer, Rates(1.0, 1.0))
    present = {name: tensor for name, tensor in given.items() if tensor is not None}

    def tensors(tokens: int) -> dict[str, Tensor]:
        x = bench.tokens(Cell(replace(shape, per_image=1), tokens))
        return {**present, "x": x, "y": torch.empty_like(x)}

    return tensors


def main(
    shapes: Annotated[
        str, typer.Option(help=f"Beginnings of names, of {', '.join(SHAPES)}. Default: all.")
    ] = "",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens to look at.")] = ",".join(
        map(str, TOKENS)
    ),
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bf16",
    budget: Annotated[float, typer.Option(help="Seconds for each layer.")] = 180,
    limit: Annotated[int, typer.Option(help="Candidates of each product and tile height.")] = 24,
    output: Annotated[Path | None, typer.Option(help="File to write, else the package's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try it without a GPU.")] = False,
) -> None:
    """Tunes the kernels for this machine's GPU."""
    console = Console()
    try:
        wanted = chosen("tiny" if dry_run and not shapes else shapes)
        counts = sorted({int(count) for count in tokens.split(",")})
        kind = DTYPES["fp32" if dry_run else dtype]
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(str(error)) from None
    if not dry_run and not HAS_GPU:
        console.print("needs a CUDA device; --dry-run tries the tuner without one")
        raise typer.Exit(2)
    on_gpu = HAS_GPU and not dry_run
    device = (
        nearest_architecture(*torch.cuda.get_device_capability()) if on_gpu else architecture(80)
    )
    timer: Timer = GraphTimer(quick=True) if on_gpu else HostTimer()
    found = environment("cuda" if on_gpu else "cpu")
    path = output or TUNED / f"{device.name}.json"
    if dry_run and output is None:
        raise typer.BadParameter("--dry-run needs --output: its times mean nothing")
    with torch.inference_mode():
        for shape in wanted:
            tune_shape(shape, kind, device, timer, counts, limit, budget, path, found, console)
            release()


def tune_shape(
    shape: Shape,
    dtype: torch.dtype,
    device: Architecture,
    timer: Timer,
    counts: Sequence[int],
    limit: int,
    budget: float,
    path: Path,
    found: Mapping[str, Any],
    console: Console,
) -> None:
    """Tunes one layer, says what came of it, and writes it if it is faster than the default."""
    started = time.monotonic()
    layer = shape.layer(dtype).canonical()
    with Progress(console=console, transient=True) as progress:

        def report(title: str) -> Report:
            task = progress.add_task(f"{shape.name}: {title}")
            return lambda done, total: progress.update(task, completed=done, total=total)

        if isinstance(timer, GraphTimer):
            compile_candidates(
                layer, device, counts, limit,
                started + COMPILE_SHARE * budget, report("compiling"),
            )  # fmt: skip
        tuner = Tuner(layer, device, timer, tensors_of(shape, dtype, timer), started + budget)
        ranges = tune(tuner, counts, limit, report("timing"))
        plans = {"default": default_ranges(layer, device), "tuned": ranges}
        if isinstance(timer, GraphTimer):
            jobs = {k: j for p in plans.values() for k, j in jobs_of(layer, device, counts, p)}
            compile_jobs(list(jobs.values()), report=report("compiling what was chosen"))
        times = {count: tuner.compare(count, plans) for count in counts}
    ratio = geometric_mean(each["default"] / each["tuned"] for each in times.values())
    console.print(_table(shape, plans["tuned"], times))
    console.print(
        f"{shape.name}: {ratio:.3f}x faster than the default, in "
        f"{time.monotonic() - started:.0f} s; {len(tuner.failed)} parts did not run",
        highlight=False,
    )
    if ratio > 1:
        write(path, layer, ranges, found)
        console.print(f"written to {path}", highlight=False)


def _table(
    shape: Shape, ranges: tuple[RangeConfig, ...], times: Mapping[int, Mapping[str, float]]
) -> Table:
    table = Table(title=f"{shape.title}, us", title_justify="left")
    for name in ("T", "default", "tuned", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("configuration")
    for count, each in times.items():
        config = plan_config(ranges, count)
        ratio = f"{each['default'] / each['tuned']:.2f}x"
        parts = " ".join(_short(part) for part in (config.up, config.down) if part is not None)
        table.add_row(
            str(count), f"{each['default']:.1f}", f"{each['tuned']:.1f}", ratio,
            f"{config.path} {parts}",
        )  # fmt: skip
    return table


def _short(config: FewConfig | GemmConfig | MlpConfig) -> str:
    return ",".join(str(value) for value in asdict(config).values())


if __name__ == "__main__":
    typer.run(main)
