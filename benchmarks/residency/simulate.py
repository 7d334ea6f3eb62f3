"""How often are experts on the device already, and what does a token take, by slots per layer?

    python -m benchmarks.residency.simulate --json result.json --plot result.png

A layer keeps R of its E experts on the device; the others are copied from host memory when a token
chooses them. Simulated are shapes of published models, one token a step and 256, in bfloat16 and
some of them packed, on routing that small trained models chose (`benchmarks.residency.record`) and
on drawn routing. `benchmarks.residency.timeline` says what the times contain. Nothing runs on a
GPU: with ``--measured``, the picture also has what `benchmarks.residency.measure` timed on one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.common.plots import SMALL, panels
from benchmarks.common.report import (
    conditions,
    digits,
    matching_cases,
    merged,
    parse,
    parser,
    table,
    write_json,
)
from benchmarks.gpu.layers import SHAPES, Shape
from benchmarks.residency import traces
from benchmarks.residency.policies import BELADY, HINTED, LFU, LRU, NONE, POLICIES, Hinted, Steps
from benchmarks.residency.timeline import (
    BF16,
    LAUNCH,
    LINKS,
    Link,
    resident_seconds,
    slot_bytes,
    step_seconds,
)
from custom_ops.weight_formats import WeightFormat, packed_format

TOKENS = 4096  # of a trace
PER_STEP = (1, 256)
#: The part of a trace's steps that fills the caches and does not count.
WARM_UP = 0.25
COLORS = {LRU: "#0b6e4f", LFU: "#c2570c", BELADY: "#3b5bdb", HINTED: "#111111"}
LINK_COLORS = dict(
    zip([link.name for link in LINKS], ("#c2570c", "#3b5bdb", "#0b6e4f"), strict=True)
)


@dataclass(frozen=True)
class Case:
    """A model's layers and a number of tokens per step, on one kind of routing."""

    shape: Shape
    per_step: int
    kind: str
    format_name: str = "bf16"

    @property
    def name(self) -> str:
        """The text that ``--case`` searches."""
        stored = "" if self.stored is BF16 else f", {self.format_name}"
        return f"{self.shape.title}, T={self.per_step}, {self.kind}{stored}"

    @property
    def stored(self) -> WeightFormat:
        """How the weights are stored, in host memory and in slots."""
        return FORMATS[self.format_name]


#: By the names of the cases.
FORMATS = {
    "bf16": BF16,
    "int4": packed_format("int4", torch.bfloat16, torch.bfloat16, (1, 128)),
    "mxfp4": packed_format("mxfp4", torch.bfloat16, torch.int8, (1, 32)),
    "fp8": packed_format("fp8", torch.bfloat16, torch.float32, (128, 128)),
}
#: As the models are published, and Qwen3 by GPTQ.
PUBLISHED = {"gpt-oss": "mxfp4", "deepseek": "fp8", "qwen3": "int4"}
CASES = [
    Case(SHAPES[name], per_step, kind)
    for name in traces.SIMULATED
    for per_step in PER_STEP
    for kind in traces.KINDS
] + [Case(SHAPES[name], 1, traces.RECORDED, stored) for name, stored in PUBLISHED.items()]


def slots(experts: int) -> Iterator[int]:
    """Yields the numbers of slots that are tried: 1, 2, 4, ..., three quarters, and all."""
    count = 1
    while count < experts:
        yield count
        count *= 2
    if 3 * experts // 4 > count // 2:
        yield 3 * experts // 4
    yield experts


@dataclass(frozen=True)
class Run:
    """What a policy did on the steps of all layers, after the warm-up.

    Attributes:
        active: The active experts of each step.
        copied: Those of them that were copied.
        ahead: Experts that were copied ahead of a step, on average over all steps.
    """

    active: Sequence[int]
    copied: Sequence[int]
    ahead: float

    @property
    def hit_rate(self) -> float:
        """The share of the active experts that were on the device."""
        return 1 - sum(self.copied) / sum(self.active)

    def seconds(self, case: Case, link: Link, resident: int) -> float:
        """The mean time of a layer."""
        return fmean(
            step_seconds(
                case.shape,
                link,
                tokens=case.per_step,
                active=active,
                copied=copied,
                resident=resident,
                stored=case.stored,
            )
            for active, copied in zip(self.active, self.copied, strict=True)
        )


def run(policy: str, layers: Iterable[Steps], experts: int, resident: int) -> Run:
    """Runs a policy on each layer's steps."""
    active: list[int] = []
    copied: list[int] = []
    ahead, count = 0, 0
    for steps in layers:
        cache = POLICIES[policy](steps, experts, resident)
        found = [cache.step(step) for step in steps]
        first = ceil(WARM_UP * len(steps))
        active += [len(step) for step in steps[first:]]
        copied += found[first:]
        if isinstance(cache, Hinted):
            ahead += cache.ahead
        count += len(steps)
    return Run(active, copied, ahead / count)


def simulate(case: Case, tokens: int) -> dict[str, Any]:
    """Returns a case's hit rates, and milliseconds of all MoE layers per token."""
    ids_LTK = traces.trace(case.kind, case.shape, tokens)
    layers = [list(traces.steps(ids_TK, case.per_step)) for ids_TK in ids_LTK]
    experts, count = case.shape.experts, traces.SIMULATED[case.shape.name]
    per_token = 1e3 * count / case.per_step  # milliseconds of all layers

    def row(resident: int) -> dict[str, Any]:
        runs = {policy: run(policy, layers, experts, resident) for policy in POLICIES}
        return {
            "resident": resident,
            "GB": count * resident * slot_bytes(case.shape, case.stored) / 1e9,
            "hit rate": {policy: round(found.hit_rate, 4) for policy, found in runs.items()},
            "copied ahead": round(runs[HINTED].ahead, 3),
            "ms": {
                link.name: {
                    policy: float(f"{per_token * runs[policy].seconds(case, link, resident):.4g}")
                    for policy in (NONE, LRU)
                }
                for link in LINKS
            },
        }

    active = fmean(len(step) for steps in layers for step in steps)
    return {
        "name": case.name,
        "shape": case.shape.name,
        "tokens": case.per_step,
        "routing": case.kind,
        "weights": case.format_name,
        "top_k": case.shape.top_k,
        "active": round(active, 2),
        "repeated": round(traces.repeated(ids_LTK), 4),
        "ms, all on the device": {
            link.name: float(
                f"{per_token * resident_seconds(case.shape, link, active, case.stored):.4g}"
            )
            for link in LINKS
        },
        "rows": [row(resident) for resident in slots(experts)],
    }


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each case."""
    for case in cases:
        rows = [
            [
                row["resident"],
                f"{row['GB']:.1f}",
                *(f"{row['hit rate'][policy]:.3f}" for policy in (LRU, LFU, BELADY, HINTED)),
                *(digits(row["ms"][link.name][LRU]) for link in LINKS),
                digits(row["ms"][LINKS[0].name][NONE]),
            ]
            for row in case["rows"]
        ]
        columns = ["R", "GB", LRU, LFU, BELADY, HINTED]
        columns += [f"ms, {link.name}" for link in LINKS] + [f"{LINKS[0].name}, no cache"]
        print(table(case["name"], columns, rows))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws hit rates above and times per token below, a column a model, one token a step."""
    cases = {
        (case["shape"], case["routing"]): case
        for case in result["cases"]
        if case["tokens"] == 1 and case["weights"] == "bf16"
    }
    shapes = [name for name in traces.SIMULATED if (name, traces.RECORDED) in cases]
    measured = {
        each["shape"]: each["rows"]
        for each in result.get("measured", {}).get("layers", [])
        if each["tokens"] == 1
    }
    title = (
        "Simulated, one token a step, bfloat16"
        f"{'' if measured else '; nothing was measured on a GPU'}"
    )
    with panels(path, 2 * len(shapes), len(shapes), (3.8, 3.2), title) as axes:
        for panel, name in zip(axes, shapes, strict=False):
            _draw_hits(panel, [cases[name, kind] for kind in traces.KINDS if (name, kind) in cases])
        for panel, name in zip(axes[len(shapes) :], shapes, strict=True):
            _draw_times(panel, cases[name, traces.RECORDED], measured.get(name, []))
        for panel in axes[:: len(shapes) or 1]:
            panel.legend(fontsize=SMALL)


def _draw_hits(panel: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    recorded = cases[0]
    for policy in (LRU, LFU, BELADY):
        _line(panel, recorded, [row["hit rate"][policy] for row in recorded["rows"]],
              "-", color=COLORS[policy], label=policy)  # fmt: skip
    for case, line in zip(cases[1:], ("--", ":"), strict=False):
        _line(panel, case, [row["hit rate"][LRU] for row in case["rows"]],
              line, color=COLORS[LRU], label=f"{LRU}, {case['routing']}")  # fmt: skip
    panel.set(title=f"{SHAPES[recorded['shape']].title}, top {recorded['top_k']}", ylim=(0, 1.02))
    panel.set_ylabel("share of active experts on the device", fontsize=SMALL)
    _slots_axis(panel, recorded)


def _draw_times(panel: Any, case: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> None:
    for link, color in LINK_COLORS.items():
        _line(panel, case, [row["ms"][link][LRU] for row in case["rows"]],
              "-", color=color, label=link)  # fmt: skip
        _line(panel, case, [row["ms"][link][NONE] for row in case["rows"]],
              ":", color=color)  # fmt: skip
    panel.plot([], [], "k:", label="the same without a cache")
    if measured:
        points = zip(*((row["resident"], row["ms"]) for row in measured), strict=True)
        panel.plot(*points, "kx", label="measured")
    panel.set_yscale("log")
    panel.set_ylim(bottom=panel.get_ylim()[0] / 4)  # Room for the legend.
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_ylabel("ms of all MoE layers, per token", fontsize=SMALL)
    _slots_axis(panel, case)


def _line(
    panel: Any, case: Mapping[str, Any], values: Sequence[float], *style: Any, **kept: Any
) -> None:
    panel.plot([row["resident"] for row in case["rows"]], values, *style, **kept)


def _slots_axis(panel: Any, case: Mapping[str, Any]) -> None:
    # The others' labels would touch.
    ticks = [count for row in case["rows"] if (count := row["resident"]).bit_count() == 1]
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.set_xlabel("R, slots per layer", fontsize=SMALL)
    panel.tick_params(labelsize=SMALL)
    panel.axvline(case["top_k"], color="#bbbbbb", linewidth=1)


def main() -> None:
    """Simulates the cases."""
    known = parser(__doc__, "json", "plot")
    known.add_argument("--case", default="", help="only cases whose name contains this")
    known.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a trace, 512 at least")
    known.add_argument("--measured", type=Path, help="what benchmarks.residency.measure wrote")
    given = parse(known, plot)
    chosen = matching_cases(known, CASES, given.case)
    cases = merged([simulate(case, given.tokens) for case in chosen], CASES, given)
    result = conditions(["numpy", "torch"]) | {
        "tokens of a trace": given.tokens,
        "warm-up": WARM_UP,
        "seconds of a launch": LAUNCH,
        "links": [asdict(link) for link in LINKS],
        "recorded": traces.notes(),
        "cases": cases,
    }
    if given.measured:
        result["measured"] = json.loads(given.measured.read_text())
    write_json(given.json, result)
    show(cases)
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    main()
