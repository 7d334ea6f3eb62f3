"""Writes layers, inputs and expected results for tests/native/run_cases.cc, as files.

    python tests/support/launcher_cases.py FOLDER --arch sm_90

Every kernel runs in some case, on small sizes that its blocks do not divide.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from custom_ops.kernels.architectures import Architecture, architecture, nearest_architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.kernels.spec import ForwardPlan
from dynamo_moe.tolerances import tolerance_for
from gpu_cases import PATHS, one_multiprocessor, runs_on, without_ties
from kernel_runs import in_out, is_transposed, layer_of
from moe_cases import OPS, Case, make_case
from trt_plugin.bundle import Program
from trt_plugin.compiling.ahead_of_time import compile_plans, limit_tokens

TOKENS = (1, 3, 40, 300)
WIDTHS = (56, 136)
_WEIGHTS = ("w1", "w2")
_GATED = {"activation": "silu", "gated": True}
Compile = Callable[[Sequence[ForwardPlan]], Sequence[Program]]


def make_cases(on: Architecture) -> Iterator[tuple[ForwardPlan, Case]]:
    """Yields calls, each with the plan to run it by."""
    for op in OPS:
        for width in WIDTHS:
            for tokens in TOKENS:
                yield _planned(_case(op, tokens, width=width), on)
    groups = {"group_scoring": "top2_sum", "n_group": 4, "topk_group": 2}
    for tokens, experts in ((3, 8), (40, 8), (300, 64)):
        sizes = {"width": 56, "experts": experts, "selection_bias": True}
        yield _planned(_case("dropless", tokens, scoring="sigmoid", **sizes, **groups), on)
    # One program can neither read the router's weight nor sort all slots.
    for tokens in (3, 300):
        yield _planned(_case("dropless", tokens, width=520, experts=128, top_k=8), on)
    for width in WIDTHS:
        for tokens in (3, 300):
            normed = _case("experts", tokens, width=width, pre_norm="rms", residual=True)
            yield _planned(normed, on)
    for tokens in (1, 40, 300):
        gated = _case("experts", tokens, width=136, **_GATED)
        for weights in ((), ("w1",), ("w2",), _WEIGHTS):
            yield _planned(in_out(gated, *weights), on)
    yield _planned(in_out(_case("experts", 40, width=56, **_GATED), *_WEIGHTS), on)
    for tokens in (1, 40, 300):
        gated = _case("experts", tokens, width=136, **_GATED)
        yield _planned(gated, on, resident_experts=3)
    case = _case("dropless", 40, width=120, **_GATED)
    for name, ranges in PATHS.items():
        if runs_on(name, on):
            yield plan_with(layer_of(case), one_multiprocessor(on), ranges), case


def _planned(
    case: Case, on: Architecture, resident_experts: int | None = None
) -> tuple[ForwardPlan, Case]:
    return _plan(replace(layer_of(case), resident_experts=resident_experts), on), case


@lru_cache
def _plan(layer: Layer, on: Architecture) -> ForwardPlan:
    # Kernels for more tokens would only be compiled.
    return limit_tokens(plan(layer, on), max(TOKENS))


def _case(op: str, tokens: int, **sizes: object) -> Case:
    case = make_case(op, (tokens,), **{"hidden": 72, "experts": 8, "dtype": torch.bfloat16} | sizes)
    return without_ties(case) if op == "dropless" and tokens > 1 else case


def write_cases(folder: Path, cases: Sequence[tuple[ForwardPlan, Case]], compile_: Compile) -> None:
    """Writes cases and their programs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = list(dict.fromkeys(plan for plan, _ in cases))
    for number, program in enumerate(compile_(plans)):
        (folder / f"program{number}").write_bytes(program.data)
    data, lines = bytearray(), []
    for planned, case in cases:
        expected = case.oracle().to(case.arguments["x"].dtype)
        tensors = {name: t for name, t in case.arguments.items() if isinstance(t, Tensor)}
        tensors["y"] = expected
        permitted = tolerance_for(case.dtypes).max
        lines.append(f"program{plans.index(planned)} {len(expected)} {permitted} {len(tensors)}")
        for name, tensor in tensors.items():
            lies = tensor.mT if name in _WEIGHTS and is_transposed(tensor) else tensor
            content = lies.contiguous().view(torch.uint8).numpy().tobytes()
            lines.append(f"  {name} {len(data)} {len(content)}")
            data += content
    (folder / "tensors").write_bytes(data)
    (folder / "cases").write_text("\n".join(lines) + "\n")


def compiled(plans: Sequence[ForwardPlan]) -> Sequence[Program]:
    """Returns the programs of plans."""
    return compile_plans(plans, progress=False).programs


def main() -> None:
    """Writes the cases for an architecture."""
    known = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known.add_argument("folder", type=Path)
    known.add_argument("--arch", help="such as sm_90; default: of this machine's GPU")
    given = known.parse_args()
    if given.arch:
        on = architecture(given.arch)
    else:
        on = nearest_architecture(*torch.cuda.get_device_capability())
    write_cases(given.folder, list(make_cases(on)), compiled)


if __name__ == "__main__":
    main()
