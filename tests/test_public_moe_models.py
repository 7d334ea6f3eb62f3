"""The models of public_moe are what they claim to be: they run, decide and use every expert."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from public_moe import CASES, Case
from public_moe.surroundings import ClaimsCuda

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_case_has_a_name_and_an_origin_of_its_own():
    assert max(Counter(case.name for case in CASES).values()) == 1
    for case in CASES:
        assert case.origin
        assert case.convertible == (not case.reason), case.name


@each_case
def test_model_runs_and_is_the_same_every_time(case):
    with torch.no_grad():
        results = [run(case, case.build(), case.args(2, 5, 0)) for _ in range(2)]
        larger = run(case, case.build(), case.args(3, 7, 1))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(x.isfinite().all() for x in [*results[0], *larger])
    # Samples differ: nothing is lost on the way.
    assert results[0][0].std(0).mean() > 0.1


@each_case
def test_moe_modules_are_where_they_should_be(case):
    model = case.build()
    modules = [model.get_submodule(path) for path in case.moe_paths]
    assert len(set(modules)) == case.layers >= 1
    for module in modules:
        assert len(experts_of(case, module)) == case.num_experts


@each_case
def test_every_expert_gets_tokens(case):
    model = case.build()
    module = model.get_submodule(case.moe_paths[0])
    args = case.args(64, 16, 3)
    for expert in experts_of(case, module):
        with torch.no_grad():
            saved = [tensor.clone() for tensor in expert]
            for tensor in expert:
                tensor.fill_(float("nan"))
            seen = []
            hook = module.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
            try:
                run(case, model, args)
            finally:
                hook.remove()
                for tensor, value in zip(expert, saved, strict=True):
                    tensor.copy_(value)
        assert tensors(seen[0])[0].isnan().any()


def run(case: Case, model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    with ClaimsCuda() if case.cuda_only else nullcontext():
        return tensors(model(*args))


def tensors(result: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def experts_of(case: Case, module: nn.Module) -> list[list[Tensor]]:
    """Returns the tensors of each expert."""
    if case.expert_slices is not None:
        return case.expert_slices(module)
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == case.num_experts:
            return [list(expert.parameters()) for expert in part]
    stacks = [p for p in module.parameters() if p.ndim == 3 and len(p) == case.num_experts]
    assert stacks, "found neither a list nor a stack of experts"
    return [[stack[expert] for stack in stacks] for expert in range(case.num_experts)]
