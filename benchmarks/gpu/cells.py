"""One cell of the benchmark: a layer, a number of tokens, a routing, and the versions that run it.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.fused_moe import Config, candidates, fused_moe, fused_router
from benchmarks.gpu.goals import Floor, Rates, Verdict, expected_active, floor, judge
from benchmarks.gpu.layers import (
    Parameters,
    Routing,
    Shape,
    call_tensors,
    random_routing,
    random_tokens,
)
from benchmarks.gpu.peers import dense, grouped, torch_router
from benchmarks.gpu.timing import Timer, Times, reason
from custom_ops.kernels.launch import launch
from custom_ops.kernels.spec import ForwardPlan
from custom_ops.routing import route

OURS, GROUPED, FUSED, DENSE = "ours", "grouped_mm", "fused_moe", "dense"
PEERS = (GROUPED, FUSED, DENSE)

Call = Callable[[], Tensor]

# Every expert on every token is left out where it would take longer, or need more memory.
_DENSE_MICROSECONDS = 20_000
_DENSE_BYTES = 8e9
# A row that differs by more went to other experts: the versions' routers round differently.
_ROW_ERROR = 0.05
_OTHER_ROWS = 0.01
_CHOOSING_SAMPLES = 7


@dataclass(frozen=True)
class Cell:
    """What is measured.

    With ``uniform`` routing a version contains its router; with the others of
    :data:`benchmarks.gpu.layers.ROUTINGS` all get the same expert ids and weights.
    """

    shape: Shape
    count: int  # tokens, or images
    routing: str = "uniform"

    @property
    def tokens(self) -> int:
        """T."""
        return self.count * self.shape.per_image

    @property
    def routes(self) -> bool:
        """Whether the router is a part of it."""
        return self.routing == "uniform"

    def floor(self, active: float, rates: Rates, itemsize: int) -> Floor:
        """The shortest times if ``active`` experts get a token."""
        return floor(self.shape, self.tokens, active, rates, itemsize=itemsize, router=self.routes)

    def __str__(self) -> str:
        return f"{self.shape.name}:{self.count}:{self.routing}"


@dataclass
class Result:
    """What was measured in a cell, by version: microseconds with a cold and a warm L2 cache."""

    cell: Cell
    active: int  # experts that got a token
    floor: Floor
    cold: dict[str, Times] = field(default_factory=dict)
    warm: dict[str, Times] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # why a version is missing
    wrong: dict[str, str] = field(default_factory=dict)  # how results differ from ours
    config: Config | None = None  # the blocks of `fused_moe`, the fastest of some

    @property
    def share(self) -> float | None:
        """The split floor over our time."""
        return self.floor.split / self.cold[OURS].median if OURS in self.cold else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether our time meets its goal, where it has one."""
        if not self.cell.routes or OURS not in self.cold:
            return None
        return judge(self.cell.shape, self.cell.count, self.floor, self.cold[OURS].median)

    def ratio(self, version: str) -> float | None:
        """Another version's time over ours, both with a cold cache."""
        if version not in self.cold or OURS not in self.cold:
            return None
        return self.cold[version].median / self.cold[OURS].median

    def to_json(self) -> dict[str, Any]:
        """The result as JSON's types."""
        return {
            "shape": self.cell.shape.name,
            "count": self.cell.count,
            "tokens": self.cell.tokens,
            "routing": self.cell.routing,
            "router included": self.cell.routes,
            "active experts": self.active,
            "floor us": asdict(self.floor) | {"split": self.floor.split},
            "cold us": {name: asdict(times) for name, times in self.cold.items()},
            "warm us": {name: asdict(times) for name, times in self.warm.items()},
            "share of split floor": self.share,
            "goal": self.verdict and asdict(self.verdict),
            "left out": self.left_out,
            "wrong": self.wrong,
            "fused_moe blocks": self.config and asdict(self.config),
        }


@dataclass
class Bench:
    """Measures the cells of one layer, whose parameters have one dtype."""

    shape: Shape
    parameters: Parameters
    timer: Timer
    rates: Rates
    versions: tuple[str, ...] = PEERS  # besides ours
    configs: tuple[Config, ...] | None = None  # blocks of `fused_moe`; None: those worth trying
    _fastest: dict[int, Config] = field(default_factory=dict)

    def measure(self, cell: Cell) -> Result:
        """Runs one cell."""
        x_TD = random_tokens(self.parameters, cell.tokens)
        routing = self._routing(cell, x_TD)
        active = int(routing[0].unique().numel())
        result = Result(cell, active, cell.floor(active, self.rates, x_TD.element_size()))
        calls = self._calls(cell, x_TD, routing, result)
        self._compare(calls, result)
        for found, cold in ((result.cold, True), (result.warm, False)):
            measured = self.timer(calls, cold=cold)
            found.update(measured.times)
            result.left_out |= measured.failed
        return result

    def _routing(self, cell: Cell, x_TD: Tensor) -> Routing:
        if not cell.routes:
            sizes = (cell.tokens, self.shape.experts, self.shape.top_k)
            return random_routing(cell.routing, *sizes, x_TD.device)
        weight, bias = self.parameters["router_weight"], self.parameters.get("router_bias")
        selection_bias = self.parameters.get("selection_bias")
        return route(x_TD, weight, bias, self.shape.router, selection_bias)

    def _ours(self, x_TD: Tensor, routing: Routing | None) -> Call:
        p, options = self.parameters, asdict(self.shape.options)
        experts = (p["w1"], p.get("b1"), p["w2"], p.get("b2"))
        if routing is not None:
            return partial(torch.ops.moe.experts, x_TD, *routing, *experts, **options)
        biases = {name: p.get(name) for name in ("router_bias", "selection_bias")}
        router = asdict(self.shape.router) | biases
        dropless: Any = torch.ops.moe.dropless
        return partial(dropless, x_TD, p["router_weight"], *experts, **router, **options)

    def _calls(self, cell: Cell, x_TD: Tensor, routing: Routing, result: Result) -> dict[str, Call]:
        given = None if cell.routes else routing
        layer = self.shape, self.parameters, x_TD

        def with_router(
            router: Callable[..., Routing], experts: Callable[..., Tensor], *more: object
        ) -> Call:
            return lambda: experts(*layer, given or router(*layer), *more)

        calls: dict[str, Call] = {OURS: self._ours(x_TD, given)}
        if GROUPED in self.versions:
            calls[GROUPED] = with_router(torch_router, grouped)
        if FUSED in self.versions:
            tried = {
                config: with_router(fused_router, fused_moe, config)
                for config in self.configs or candidates(self.shape, cell.tokens)
            }
            result.config = self._choose(cell, tried)
            if result.config is None:
                result.left_out[FUSED] = "no configuration runs"
            else:
                calls[FUSED] = tried[result.config]
        if DENSE in self.versions:
            if excuse := self._without_dense(cell, x_TD.element_size()):
                result.left_out[DENSE] = excuse
            else:
                calls[DENSE] = with_router(torch_router, dense)
        return calls

    def _choose(self, cell: Cell, tried: Mapping[Config, Call]) -> Config | None:
        """The fastest configuration, chosen once for each number of tokens."""
        if cell.count not in self._fastest:
            times = self.timer(tried, samples=_CHOOSING_SAMPLES).times
            if not times:
                return None
            self._fastest[cell.count] = min(times, key=lambda config: times[config].median)
        return self._fastest[cell.count]

    def _without_dense(self, cell: Cell, itemsize: int) -> str:
        """Why every expert on every token is left out, or nothing."""
        rows, D = cell.tokens * self.shape.experts, self.shape.width
        inner = self.shape.rows + self.shape.hidden
        microseconds = 1e6 * 2 * rows * D * inner / self.rates.flops
        if microseconds > _DENSE_MICROSECONDS:
            return f"would take over {microseconds / 1e3:.0f} ms"
        needed = itemsize * rows * (inner + 2 * D)  # bytes of what `dense` allocates
        return f"needs {needed / 1e9:.0f} GB" if needed > _DENSE_BYTES else ""

    def _compare(self, calls: dict[str, Call], result: Result) -> None:
        """Compares results row by row, so that only equal work is timed."""
        try:
            expected = calls[OURS]().float()
        except Exception as error:  # That ours fails is a result.
            result.wrong[OURS] = str(error)
            del calls[OURS]
            return
        if not expected.isfinite().all():
            result.wrong[OURS] = "not finite"
        norm = expected.norm(dim=-1)
        for name in [name for name in calls if name != OURS]:
            try:
                actual = calls[name]().float()
            except Exception as error:  # Another kernel may not take the shape.
                result.left_out[name] = reason(error)
                del calls[name]
                continue
            other = int(((actual - expected).norm(dim=-1) > _ROW_ERROR * norm).sum())
            if other > _OTHER_ROWS * len(expected):
                result.wrong[name] = f"{other} of {len(expected)} rows differ from ours"


# --- The launches of a layer ---

# The stages of the floor that a kernel computes; norm and sort compute none.
_STAGES: Mapping[str, tuple[str, ...]] = {
    "route_kernel": ("router",),
    "router_logits_kernel": ("router",),
    "few_up_kernel": ("up",),
    "expert_up_kernel": ("up",),
    "few_down_kernel": ("down", "combine"),
    "expert_down_kernel": ("down",),
    "expert_mlp_kernel": ("up", "down"),
    "combine_kernel": ("combine",),
}


@dataclass(frozen=True)
class LaunchTime:
    """Microseconds of one launch by itself, with a cold and with a warm L2 cache."""

    kernel: str
    programs: int  # of its grid
    cold: float
    warm: float
    floor: float  # of the stages that it computes, 0 if it computes none


def launches_alone(
    plan: ForwardPlan, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each launch's kernel, and a call that makes this launch alone, on tensors with y.

    All share a workspace: a call needs those before it to have run once.
    """
    span = plan.at(len(tensors["x"]))
    size = plan.workspace_size(len(tensors["x"]))
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors["x"].device)
    for spec in span.launches:
        alone = replace(plan, ranges=(replace(span, first=1, launches=(spec,)),))
        yield spec.name, partial(launch, alone, tensors, workspace)


def time_launches(
    cell: Cell, plan: ForwardPlan, parameters: Parameters, timer: Timer, rates: Rates
) -> list[LaunchTime]:
    """Times every launch by itself, on what the launches before it have left.

    The sum is not the layer's time: alone, a launch neither finds its inputs in the cache where the
    one before left them, nor starts while that one ends.
    """
    tensors = call_tensors(parameters, cell.tokens)
    sizes = {**plan.layer.shape.sizes, "T": cell.tokens}
    active = expected_active(cell.shape.experts, cell.shape.top_k, cell.tokens)
    shortest = cell.floor(active, rates, tensors["x"].element_size())
    alone = list(launches_alone(plan, tensors))
    for _, call in alone:
        call()
    return [
        LaunchTime(
            name,
            math.prod(axis.evaluate(sizes) for axis in spec.grid),
            timer({name: call}).times[name].median,
            timer({name: call}, cold=False).times[name].median,
            sum(getattr(shortest, stage) for stage in _STAGES.get(name, ())),
        )
        for (name, call), spec in zip(alone, plan.at(cell.tokens).launches, strict=True)
    ]
