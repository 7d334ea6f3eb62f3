"""A model's modules and attributes are found as PyTorch finds them, in less time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dynamo_moe.private.pytorch import has_attribute, modules_by_path


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Modules in modules, some of them in several places, and some places empty."""
    made: list[nn.Module] = [nn.Identity()]
    for _ in range(draw(st.integers(1, 8))):
        module = nn.Module()
        for place in range(draw(st.integers(0, 4))):
            module.add_module(f"part{place}", draw(st.sampled_from([None, *made])))
        made.append(module)
    return made[-1]


@given(models())
def test_modules_are_those_of_pytorch_in_their_order(model: nn.Module) -> None:
    assert modules_by_path(model) == list(model.named_modules())


def test_a_module_that_is_in_itself_is_found_once() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].around = model
    assert modules_by_path(model) == list(model.named_modules())


class Passing(nn.Module):
    """Has the attributes of the module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class Computed(nn.Module):
    """Has an attribute that may be computed, and one that may not."""

    @property
    def weight(self) -> int:
        return 1

    @property
    def bias(self) -> int:
        raise AttributeError("bias")

    def __getattribute__(self, name: str) -> Any:
        return 1 if name == "running_mean" else super().__getattribute__(name)


MODULES = [
    nn.Linear(1, 1, bias=False),
    nn.BatchNorm1d(1),
    nn.ModuleDict({"inner": nn.Identity()}),
    Passing(),
    Computed(),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_modules_have_the_attributes_that_python_finds(module: nn.Module) -> None:
    names = ["weight", "bias", "running_mean", "inner", "in_features", "forward", "absent"]
    module.set = None
    assert [has_attribute(module, name) for name in (*names, "set")] == [
        hasattr(module, name) for name in (*names, "set")
    ]
