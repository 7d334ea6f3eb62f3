"""Sanity checks of the models in public_moe: they run, make decisions and use every expert."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from public_moe import CASES, Case
from public_moe.surroundings import ClaimsCuda

# Of the tests' own models, which change seldom.
pytestmark = pytest.mark.every

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_case_has_a_name_and_an_origin_of_its_own():
    assert max(Counter(case.name for case in CASES).values()) == 1
    for case in CASES:
        assert case.origin
        assert case.convertible == (not case.reason), case.name


@each_case
def test_model_runs_and_is_the_same_every_time(case):
    results = [run(case, case.build(), case.args(2, 5, 0)) for _ in range(2)]
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    larger = run(case, case.build(), case.args(3, 7, 1))
    assert all(x.isfinite().all() for x in [*results[0], *larger])
    # Samples differ: no information is lost on the way.
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
    module, inputs, _ = first_call(case)
    for expert in experts_of(case, module):
        saved = [tensor.clone() for tensor in expert]
        with torch.no_grad():
            for tensor in expert:
                tensor.fill_(float("nan"))
            try:
                spoiled = run(case, module, *inputs)
            finally:
                for tensor, value in zip(expert, saved, strict=True):
                    tensor.copy_(value)
        assert spoiled[0].isnan().any()


@pytest.mark.parametrize("case", [c for c in CASES if not c.random], ids=lambda case: case.name)
def test_tokens_depend_on_each_other_only_where_the_case_says_so(case):
    module, inputs, together = first_call(case)
    x = inputs[0][0]
    together = together.reshape(x.shape)
    # Samples, then positions of a sequence.
    same = []
    for dim in {2: (0,), 3: (0, 1), 4: (0,)}[x.ndim]:
        half = x.shape[dim] // 2
        expected = together.narrow(dim, half, half)
        alone = run(case, module, *halved(inputs, dim))[0].reshape(expected.shape)
        same.append(torch.allclose(alone, expected, rtol=1e-4, atol=1e-4))
    assert all(same) != case.exact


def halved(inputs: Any, dim: int) -> Any:
    """Returns the second half of what is as long as the tokens; the first fills the capacities."""
    size = inputs[0][0].shape[dim]

    def half(x: Any) -> Any:
        is_along = isinstance(x, Tensor) and x.shape[dim : dim + 1] == (size,)
        return x.chunk(2, dim)[1].contiguous() if is_along else x

    return pytree.tree_map(half, inputs)


@cache
def first_call(case: Case) -> tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]], Tensor]:
    """Returns a model's first MoE module, the arguments its parent passes, and its result."""
    model = case.build()
    module = model.get_submodule(case.moe_paths[0])
    seen: list[Any] = []
    with module.register_forward_hook(lambda *call: seen.extend(call[1:]), with_kwargs=True):
        run(case, model, case.args(16, 8, 3))
    args, kwargs, result = seen
    return module, (args, kwargs), tensors(result)[0]


@torch.no_grad()
def run(
    case: Case, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[Tensor]:
    torch.manual_seed(1)
    with ClaimsCuda() if case.cuda_only else nullcontext():
        return tensors(module(*args, **(kwargs or {})))


def tensors(result: object) -> list[Tensor]:
    result = vars(result) if isinstance(result, SimpleNamespace) else result
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
