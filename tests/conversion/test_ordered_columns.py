"""Packed experts whose columns lie in the order of their groups, as GPTQ's by activation do.

Legend: T tokens, D model width, H hidden width, E experts, K choices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import custom_ops
import dynamo_moe
from custom_ops.options import ExpertOptions
from custom_ops.packed_weights import ENCODINGS, PackedWeight
from dynamo_moe.conversion.packing import _in_order, _rows_in_order
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.weights.rounding import rounded
from listed_experts import COUNT, WIDTH, Listed

E, K, D, H = 5, 2, 32, 64
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gated": True, "activation": "silu"},
    {"residual": True},
    {"weight_on_input": True, "gated": True, "activation": "silu", "interleaved": True},
    {"pre_norm": "rms", "residual": True},
)


def permutations(count: int, size: int) -> Tensor:
    return torch.stack([torch.randperm(size) for _ in range(count)])


def packed(*shape: int) -> PackedWeight:
    matrices = (0.3 * torch.randn(*shape)).unbind()
    return PackedWeight.stacked([rounded(each, ENCODINGS["int4"], (1, 16)) for each in matrices])


def ordered_experts(*, gated: bool = False) -> tuple[PackedExperts, list[Tensor]]:
    """Returns packed experts, and w1, b1, w2 and b2 as they are without an order."""
    torch.manual_seed(0)
    rows = 2 * H if gated else H
    w1, w2, order_ED = packed(E, rows, D), packed(E, D, H), permutations(E, D)
    b1, b2 = torch.randn(E, rows), torch.randn(E, D)
    decoded = [ENCODINGS["int4"].decode(*each, dtype=torch.float32) for each in (w1, w2)]
    columns = order_ED[:, None].expand(-1, rows, -1)
    plain = torch.empty_like(decoded[0]).scatter_(2, columns, decoded[0])
    return PackedExperts("int4", w1, b1, w2, b2, order_ED), [plain, b1, decoded[1], b2]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_experts_compute_as_without_an_order(options: dict[str, Any]) -> None:
    experts, plain = ordered_experts(gated=options.get("gated", False))
    x, weights = torch.randn(2, 7, D), torch.rand(2, 7, K)
    ids = torch.randint(-1, E, (2, 7, K))
    ids[0, 0] = -1
    result = experts.experts(x, ids, weights, **options)
    torch.testing.assert_close(result, custom_ops.experts(x, ids, weights, *plain, **options))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_in_front_chooses_as_the_operator_s(scoring: str) -> None:
    experts, plain = ordered_experts()
    x, router, bias = torch.randn(9, D), torch.randn(E, D), torch.randn(E)
    options: Any = {"top_k": K, "scoring": scoring, "residual": True, "selection_bias": bias}
    expected = custom_ops.dropless(x, router, *plain, **options)
    torch.testing.assert_close(experts.dropless(x, router, **options), expected)


def test_tokens_and_weights_have_gradients() -> None:
    experts, plain = ordered_experts()
    ids = torch.randint(0, E, (6, K))
    gradients = []
    for compute in (experts.experts, lambda *args: custom_ops.experts(*args, *plain)):
        torch.manual_seed(1)
        x, weights = torch.randn(6, D).requires_grad_(), torch.rand(6, K).requires_grad_()
        compute(x, ids, weights).square().sum().backward()
        gradients.append((x.grad, weights.grad))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_bfloat16() -> None:
    experts, _ = ordered_experts()
    x, ids, weights = torch.randn(6, D).bfloat16(), torch.randint(0, E, (6, K)), torch.rand(6, K)
    result = experts.to(torch.bfloat16).experts(x, ids, weights)
    assert result.dtype == torch.bfloat16
    expected = experts.float().experts(x.float(), ids, weights)  # Of the rounded scales.
    torch.testing.assert_close(
        result.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max()
    )


@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[3:4], ids=str)
def test_hidden_units_in_an_order(options: dict[str, Any]) -> None:
    """The rows of w1 that give them follow the columns of w2."""
    torch.manual_seed(0)
    rows = 2 * H if options.get("gated") else H
    w1, b1, w2 = torch.randn(E, rows, D), torch.randn(E, rows), torch.randn(E, D, H)
    x, ids, weights = torch.randn(6, D), torch.randint(0, E, (6, K)), torch.rand(6, K)
    order_EH = permutations(E, H)
    rows_EF = _rows_in_order(order_EH, ExpertOptions(**options))
    moved = w2.gather(2, order_EH[:, None].expand(-1, D, -1))
    torch.testing.assert_close(
        custom_ops.experts(
            x, ids, weights, _in_order(rows_EF, w1), _in_order(rows_EF, b1), moved, None, **options
        ),
        custom_ops.experts(x, ids, weights, w1, b1, w2, None, **options),
        rtol=1e-4,
        atol=1e-4,
    )


def test_ranks_have_the_order_of_their_own_experts() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Listed()).eval()
    dynamo_moe.convert(model)
    dynamo_moe.quantize(model, "int4", group=16)
    layer: Any = model[0]
    layer.packed_experts.w1_order = permutations(COUNT, WIDTH)
    x = torch.randn(9, WIDTH)
    with torch.no_grad():
        expected, total = model(x), torch.zeros(9, WIDTH)
        for rank in range(3):
            with dynamo_moe.sharded(model, rank, 3):
                total += model(x)
    torch.testing.assert_close(total, expected)
