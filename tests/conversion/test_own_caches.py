"""What a layer remembers of its first call is not what a trial with other weights left there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hidden_conditions import Mixture
from torch import Tensor, nn

import dynamo_moe

MATRICES: dict[str, Tensor] = {}


@functools.cache
def transposed(gate: nn.Linear) -> Tensor:
    return gate.weight.t().contiguous()


class InADictionary(Mixture):
    """Transposes its router's matrix once."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = self.empty()

    def empty(self) -> Any:
        return {}

    def remembered(self) -> dict[str, Tensor]:
        return self.cache  # type: ignore[no-any-return]

    def matrix(self) -> Tensor:
        if "matrix" not in self.remembered():
            self.remembered()["matrix"] = self.gate.weight.t().contiguous()
        return self.remembered()["matrix"]

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.matrix()


class InAnInnerDictionary(InADictionary):
    def empty(self) -> Any:
        return SimpleNamespace(caches={"router": {}})

    def remembered(self) -> dict[str, Tensor]:
        return self.cache.caches["router"]  # type: ignore[no-any-return]


class InAModule(InADictionary):
    """In a global variable."""

    def remembered(self) -> dict[str, Tensor]:
        return MATRICES


class InAFunction(InADictionary):
    def matrix(self) -> Tensor:
        return transposed(self.gate)


class InAProperty(InADictionary):
    @functools.cached_property
    def at_first(self) -> Tensor:
        return self.gate.weight.t().contiguous()

    def matrix(self) -> Tensor:
        return self.at_first


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize(
    "kind", [InADictionary, InAnInnerDictionary, InAModule, InAFunction, InAProperty]
)
def test_caches_are_as_they_were(kind: Callable[[], Any], is_refused: bool) -> None:
    torch.manual_seed(0)
    MATRICES.clear()
    transposed.cache_clear()
    layer = kind()
    if is_refused:
        layer.tokens = lambda x: x.clamp(-100, 100)
    model: Any = nn.Sequential(layer).eval()
    report = dynamo_moe.convert(model)
    # Where trials find what others left, they fail.
    if is_refused or kind in (InADictionary, InAProperty):
        assert len(report.unrecognised) == is_refused
    assert not MATRICES
    assert not transposed.cache_info().currsize
    x = torch.randn(3, 16)
    plain = Mixture()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(model(x), plain(x))
