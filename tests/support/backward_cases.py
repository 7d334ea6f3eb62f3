"""Runs the backward pass's kernels on this machine's GPU, and compares the gradients.

    python tests/support/backward_cases.py

Few and small, for compute-sanitizer. With --dry-run they run in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", str(int("--dry-run" in sys.argv)))

import pytest
import torch
from torch import Tensor

import gpu_cases
import interpreter
from custom_ops.kernels.architectures import Architecture, architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.launch import launch
from gpu_cases import POISON, on_gpu
from kernel_runs import in_out, is_transposed, layer_of
from moe_cases import Case, assert_matches, make_case

# One range of tokens for each height of tiles.
TOKENS = (20, 150)
#: The results of a backward pass by the arguments that they are the gradients of.
RESULTS = {
    "x": "dx", "expert_weights": "dweights", "w1": "dw1", "b1": "db1", "w2": "dw2", "b2": "db2",
}  # fmt: skip


def make_cases() -> Iterator[Case]:
    """Yields calls on sizes that blocks do not divide; every kernel runs in some, in every form."""
    gated = {"activation": "silu", "gated": True}
    for tokens in TOKENS:
        sizes = {"width": 136, "hidden": 72, "experts": 8}
        yield make_case("experts", (tokens,), dtype=torch.bfloat16, **gated, **sizes)
        interleaved = make_case("experts", (tokens,), interleaved=True, **gated, **sizes)
        yield in_out(interleaved, "w1", "w2")
        yield make_case(
            "experts", (tokens,), pre_norm="rms", weight_on_input=True, residual=True,
            dtype=torch.float16, **sizes,
        )  # fmt: skip


def gradients(case: Case, on: Architecture) -> dict[str, Tensor]:
    """The gradients by argument, for the gradient ``dy`` of the result, all ones.

    Workspace and results are poisoned beforehand, and each tensor is an allocation of its own.
    """
    given = {name: value for name, value in case.arguments.items() if isinstance(value, Tensor)}
    lies = {name: given[name].mT for name in ("w1", "w2") if is_transposed(given[name])}
    tensors = given | lies
    results = {RESULTS[name]: _poisoned(tensors[name]) for name in RESULTS if name in given}
    planned = backward_plan(layer_of(case), on, train_parameters=True)
    size = planned.workspace_size(len(given["x"]))
    workspace = torch.full((size,), POISON, dtype=torch.uint8, device=given["x"].device)
    launch(planned, {**tensors, "dy": torch.ones_like(given["x"]), **results}, workspace)
    return {
        name: results[result].mT if name in lies else results[result]
        for name, result in RESULTS.items()
        if result in results
    }


def _poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor.view(torch.uint8), POISON).view(tensor.dtype)


def check(case: Case, on: Architecture) -> None:
    """Compares the gradients with the oracle's."""
    # Of float64, since autograd rounds a gradient to its tensor's dtype.
    leaves = case.changed(**{name: each.double() for name, each in case.floats.items()}).with_grad()
    leaves.oracle().sum().backward()
    for name, gradient in gradients(on_gpu(case), on).items():
        assert_matches(gradient.cpu(), leaves.arguments[name].grad, case.dtypes, name)


def main() -> None:
    """Runs all cases."""
    cases = list(make_cases())
    with pytest.MonkeyPatch.context() as patch:
        if "--dry-run" in sys.argv:
            interpreter.repair(patch)
            patch.setattr(gpu_cases, "DEVICE", "cpu")
            patch.setattr(gpu_cases, "architecture", lambda: architecture("sm_90"))
        for case in cases:
            check(case, gpu_cases.architecture())
    sys.stdout.write(f"{len(cases)} backward passes, 0 wrong\n")


if __name__ == "__main__":
    main()
