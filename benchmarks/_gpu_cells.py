"""One cell of the benchmark: a layer, a number of tokens, a routing, and the versions that run it.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_floor import Floor, Rates, floor
from benchmarks._gpu_fused_moe import Config, candidates, fused_moe, fused_router
from benchmarks._gpu_goals import Verdict, judge
from benchmarks._gpu_peers import dense, dense_bytes, grouped, torch_router
from benchmarks._gpu_routing import Routing, draw
from benchmarks._gpu_shapes import Shape
from benchmarks._gpu_timing import Timer, Times
from custom_ops.routing import route

__all__ = ["DENSE", "FUSED", "GROUPED", "OURS", "Bench", "Cell", "Result"]

OURS, GROUPED, FUSED, DENSE = "ours", "grouped_mm", "fused_moe", "dense"

Call = Callable[[], Tensor]

# Every expert on every token is left out where it would take longer, or need more memory.
_DENSE_MICROSECONDS = 20_000
_DENSE_BYTES = 8e9
# A row that differs by more got other experts: the versions' routers round differently.
_ROW_ERROR = 0.05
_OTHER_ROWS = 0.01
_CHOOSING_SAMPLES = 7


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        shape: The layer.
        count: Tokens, or images.
        routing: One of :data:`benchmarks._gpu_routing.ROUTINGS`. With ``uniform`` a version
            contains its router; with others all get the same expert ids and weights.
    """

    shape: Shape
    count: int
    routing: str = "uniform"

    @property
    def tokens(self) -> int:
        """T."""
        return self.count * self.shape.per_image

    @property
    def routes(self) -> bool:
        """Whether the router is a part of it."""
        return self.routing == "uniform"

    def __str__(self) -> str:
        return f"{self.shape.name}:{self.count}:{self.routing}"


@dataclass
class Result:
    """What was measured in a cell.

    Attributes:
        cell: The cell.
        active: Experts that got a token.
        floor: The shortest times.
        cold: Microseconds with a cold L2 cache, by version.
        warm: With a warm one.
        left_out: Why a version is missing.
        wrong: In what versions differ from ours.
        config: The blocks of ``fused_moe``, the fastest of some.
    """

    cell: Cell
    active: int
    floor: Floor
    cold: dict[str, Times] = field(default_factory=dict)
    warm: dict[str, Times] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    config: Config | None = None

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
        floors = asdict(self.floor) | {"split": self.floor.split}
        return {
            "shape": self.cell.shape.name,
            "count": self.cell.count,
            "tokens": self.cell.tokens,
            "routing": self.cell.routing,
            "router included": self.cell.routes,
            "active experts": self.active,
            "floor us": floors,
            "cold us": {name: asdict(times) for name, times in self.cold.items()},
            "warm us": {name: asdict(times) for name, times in self.warm.items()},
            "share of split floor": self.share,
            "goal": None if self.verdict is None else asdict(self.verdict),
            "left out": self.left_out,
            "wrong": self.wrong,
            "fused_moe blocks": None if self.config is None else asdict(self.config),
        }


class Bench:
    """Measures the cells of one layer, whose parameters it holds.

    Args:
        shape: The layer.
        parameters: Its parameters, all of one dtype.
        timer: What to time with.
        rates: What the device does at best.
        versions: Which to time besides ours.
        configs: The blocks that ``fused_moe`` may take; None: those worth trying.
    """

    def __init__(
        self,
        shape: Shape,
        parameters: Mapping[str, Tensor | None],
        timer: Timer,
        rates: Rates,
        versions: tuple[str, ...] = (GROUPED, FUSED, DENSE),
        configs: tuple[Config, ...] | None = None,
    ) -> None:
        self.shape = shape
        self.parameters = parameters
        self.timer = timer
        self.rates = rates
        self.versions = versions
        self.configs = configs
        self._best: dict[int, Config] = {}

    def measure(self, cell: Cell) -> Result:
        """Runs one cell."""
        x_TD = self.tokens(cell)
        routing = self._routing(cell, x_TD)
        weight = self.parameters["w1"]
        itemsize = x_TD.element_size() if weight is None else weight.element_size()
        result = Result(
            cell,
            active := int(routing[0].unique().numel()),
            floor(
                self.shape, cell.tokens, active, self.rates, itemsize=itemsize, router=cell.routes
            ),
        )
        calls = self._calls(cell, x_TD, routing, result)
        self._compare(calls, result)
        for found, cold in ((result.cold, True), (result.warm, False)):
            measured = self.timer(calls, cold=cold)
            found.update(measured.times)
            result.left_out |= measured.failed
        return result

    def tokens(self, cell: Cell) -> Tensor:
        """The tokens ``[T, D]``."""
        like = self.parameters["w1"]
        if like is None:
            raise ValueError("the layer has no experts")
        generator = torch.Generator(like.device).manual_seed(2)
        size = (cell.tokens, self.shape.width)
        return torch.randn(size, generator=generator, dtype=like.dtype, device=like.device)

    def ours(self, x_TD: Tensor, routing: Routing | None) -> Tensor:
        """Our operator, ``dropless`` or ``experts``."""
        p, options = self.parameters, self.shape.options
        experts = (p["w1"], p["b1"], p["w2"], p["b2"])
        form = {
            "activation": options.activation,
            "gated": options.gated,
            "interleaved": options.interleaved,
        }
        result: Tensor
        if routing is not None:
            result = torch.ops.moe.experts(x_TD, *routing, *experts, **form)
        else:
            router = self.shape.router
            result = torch.ops.moe.dropless(
                x_TD, p["router_weight"], *experts, router.top_k, p["router_bias"],
                scoring=router.scoring, renormalize=router.renormalize,
                routed_scaling=router.routed_scaling, **form,
            )  # fmt: skip
        return result

    def _routing(self, cell: Cell, x_TD: Tensor) -> Routing:
        if not cell.routes:
            sizes = (cell.tokens, self.shape.experts, self.shape.top_k)
            return draw(cell.routing, *sizes, str(x_TD.device))
        router_weight = self.parameters["router_weight"]
        if router_weight is None:
            raise ValueError("the layer has no router")
        return route(x_TD, router_weight, self.parameters["router_bias"], self.shape.router)

    def _calls(self, cell: Cell, x_TD: Tensor, routing: Routing, result: Result) -> dict[str, Call]:
        given = None if cell.routes else routing

        def with_router(
            router: Callable[..., Routing], experts: Callable[..., Tensor], *more: object
        ) -> Call:
            def call() -> Tensor:
                chosen = given or router(self.shape, self.parameters, x_TD)
                return experts(self.shape, self.parameters, x_TD, chosen, *more)

            return call

        calls: dict[str, Call] = {OURS: partial(self.ours, x_TD, given)}
        if GROUPED in self.versions:
            calls[GROUPED] = with_router(torch_router, grouped)
        if FUSED in self.versions:
            tried = {
                config: with_router(fused_router, fused_moe, config)
                for config in self.configs or candidates(self.shape, cell.tokens)
            }
            result.config = self._fastest(cell, tried)
            if result.config is None:
                result.left_out[FUSED] = "no configuration runs"
            else:
                calls[FUSED] = tried[result.config]
        if DENSE in self.versions:
            reason = self._without_dense(cell, x_TD.element_size())
            if reason:
                result.left_out[DENSE] = reason
            else:
                calls[DENSE] = with_router(torch_router, dense)
        return calls

    def _fastest(self, cell: Cell, tried: Mapping[Config, Call]) -> Config | None:
        """The fastest configuration, chosen once for each number of tokens."""
        if cell.count not in self._best:
            names = {str(config): config for config in tried}
            calls = {name: tried[config] for name, config in names.items()}
            times = self.timer(calls, samples=_CHOOSING_SAMPLES).times
            if not times:
                return None
            self._best[cell.count] = names[min(times, key=lambda name: times[name].median)]
        return self._best[cell.count]

    def _without_dense(self, cell: Cell, itemsize: int) -> str:
        operations = 2 * cell.tokens * self.shape.experts * self.shape.width
        operations *= self.shape.rows + self.shape.hidden
        microseconds = 1e6 * operations / self.rates.flops
        if microseconds > _DENSE_MICROSECONDS:
            return f"would take over {microseconds / 1e3:.0f} ms"
        needed = dense_bytes(self.shape, cell.tokens, itemsize)
        return f"needs {needed / 1e9:.0f} GB" if needed > _DENSE_BYTES else ""

    def _compare(self, calls: dict[str, Call], result: Result) -> None:
        """Compares results row by row, so that only equal work is timed."""
        try:
            expected = calls[OURS]().float()
        except Exception as error:
            result.wrong[OURS] = str(error)
            del calls[OURS]
            return
        if not expected.isfinite().all():
            result.wrong[OURS] = "not finite"
        norm = expected.norm(dim=-1)
        for name in [name for name in calls if name != OURS]:
            try:
                actual = calls[name]().float()
            except Exception as error:
                result.left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                del calls[name]
                continue
            other = int(((actual - expected).norm(dim=-1) > _ROW_ERROR * norm).sum())
            if other > _OTHER_ROWS * len(expected):
                result.wrong[name] = f"{other} of {len(expected)} rows differ from ours"
