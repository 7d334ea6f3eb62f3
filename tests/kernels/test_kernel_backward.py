"""The kernels' backward pass in Triton's interpreter, against autograd through the oracle."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops import ExpertOptions, _cuda_backward, _grouped
from custom_ops._grouped import ExpertParameters
from moe_cases import EXPERT_FORMS, NORM_FORMS, Case, assert_matches, make_case

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("x", "expert_weights", "w1", "b1", "w2", "b2")


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def gradients(case: Case, *, module: Any = _cuda_backward, train: bool = True) -> dict[str, Tensor]:
    """The gradients of an ``experts`` case by the arguments' names, for a fixed ``dy``."""
    a = case.arguments
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(a["x"].shape, generator=generator).bfloat16().to(a["x"].dtype)
    results = module.experts_backward(
        dy,
        a["x"],
        a["expert_ids"],
        a["expert_weights"],
        ExpertParameters(a["w1"], a["b1"], a["w2"], a["b2"]),
        ExpertOptions(**case.options),
        train_parameters=train,
    )
    return dict(zip(NAMES, results, strict=True))


def check(case: Case) -> dict[str, Tensor]:
    actual, expected = gradients(case), case.gradients(Case.oracle)
    for name, gradient in expected.items():
        assert actual[name].dtype == case.arguments[name].dtype
        assert_matches(actual[name], gradient.double(), case.dtypes, name)
    return actual


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_every_form_of_expert(form):
    check(make_case("experts", (7,), width=24, hidden=40, **form))
