"""Views by a rule are those of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamo_moe.tracing.plain_views import layout_of


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (torch.ops.aten.transpose.int, (0, 3)),
        (torch.ops.aten.unsqueeze.default, (4,)),
        (torch.ops.aten.unsqueeze.default, (-5,)),
        (torch.ops.aten.t.default, ()),
        (torch.ops.aten.relu.default, ()),
    ],
)
def test_what_is_no_plain_view_is_left_to_pytorch(operator: Any, given: tuple[int, ...]) -> None:
    assert layout_of(operator, given, ((2, 3, 4), (12, 4, 1))) is None


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (2, 3, 4)])
def test_plain_views_are_pytorchs(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layout = (tuple(x.shape), x.stride())
    for place in range(-x.ndim - 1, x.ndim + 1):
        found = layout_of(torch.ops.aten.unsqueeze.default, (place,), layout)
        result = x.unsqueeze(place)
        assert found == ([*result.shape], [*result.stride()])
    for first in range(-x.ndim, x.ndim):
        for second in range(-x.ndim, x.ndim):
            found = layout_of(torch.ops.aten.transpose.int, (first, second), layout)
            result = x.transpose(first, second)
            assert found == ([*result.shape], [*result.stride()])
    if x.ndim in (1, 2):
        found = layout_of(torch.ops.aten.t.default, (), layout)
        assert found == ([*x.t().shape], [*x.t().stride()])
