"""``sum_over_ranks`` of a rank that is alone; in a group it is tried by tests/ranks."""

from __future__ import annotations

import pytest
import torch

import custom_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    y = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.moe.sum_over_ranks.default, (y, 2))


def test_a_rank_alone_has_its_part() -> None:
    y = torch.randn(4, 3, requires_grad=True)
    total = custom_ops.sum_over_ranks(y.mT, 8)
    assert torch.equal(total, y.mT)
    assert total.is_contiguous()
    total.backward(torch.full_like(total, 2.0))
    assert torch.equal(y.grad, torch.full((4, 3), 2.0))


def test_errors() -> None:
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        custom_ops.sum_over_ranks(torch.ones(2), 0)
    with pytest.raises(RuntimeError, match="'unheard', and this process has no group of this name"):
        custom_ops.sum_over_ranks(torch.ones(2), 2, "unheard")
