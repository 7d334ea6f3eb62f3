"""Wrong arguments of both operators: the same errors in eager mode, on fakes and in a compile."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode

import custom_ops
from custom_ops._checks import remembered
from moe_cases import Case, make_case

META = torch.device("meta")
FLOATS = "one of float32, float16, bfloat16, float64"


def _zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


# T = 4, D = 6, H = 8, E = 3, K = 2; each row changes one thing and gives the error.
EXPERTS = [
    ({"x": _zeros()}, ValueError, "x must have at least 1 dimension [..., D], got 0"),
    ({"x": _zeros(4, 7)}, ValueError, "x's last dimension must be D = 6 as in w1 [E, F, D], got 7"),
    ({"x": _zeros(4, 6).long()}, TypeError, f"x must be {FLOATS}, got int64"),
    ({"x": _zeros(4, 6, dtype=torch.complex64)}, TypeError, f"x must be {FLOATS}, got complex64"),
    ({"w1": _zeros(8, 6)}, ValueError, "w1 must be [E, F, D], got [8, 6]"),
    ({"w2": _zeros(3, 6, 8, 1)}, ValueError, "w2 must be [E, D, H], got [3, 6, 8, 1]"),
    (
        {"w1": _zeros(0, 8, 6), "w2": _zeros(0, 6, 8)},
        ValueError,
        "E, D and H must be at least 1, got w1 [0, 8, 6] and w2 [0, 6, 8]",
    ),
    (
        {"x": _zeros(4, 0), "w1": _zeros(3, 8, 0), "w2": _zeros(3, 0, 8)},
        ValueError,
        "E, D and H must be at least 1, got w1 [3, 8, 0] and w2 [3, 0, 8]",
    ),
    (
        {"w1": _zeros(3, 0, 6), "w2": _zeros(3, 6, 0)},
        ValueError,
        "E, D and H must be at least 1, got w1 [3, 0, 6] and w2 [3, 6, 0]",
    ),
    ({"w2": _zeros(3, 5, 8)}, ValueError, "w2 must be [E, D, H] = [3, 6, 8], got [3, 5, 8]"),
    ({"w2": _zeros(2, 6, 8)}, ValueError, "w2 must be [E, D, H] = [3, 6, 8], got [2, 6, 8]"),
    (
        {"w1": _zeros(3, 9, 6)},
        ValueError,
        "w1 [E, F, D] must have F = H = 8 rows (H = 8 from w2 [E, D, H], gated=False), got 9",
    ),
    (
        {"gated": True},
        ValueError,
        "w1 [E, F, D] must have F = 2H = 16 rows (H = 8 from w2 [E, D, H], gated=True), got 8",
    ),
    ({"b1": _zeros(3, 7)}, ValueError, "b1 must be [E, F] = [3, 8], got [3, 7]"),
    ({"b1": _zeros(8)}, ValueError, "b1 must be [E, F] = [3, 8], got [8]"),
    ({"b2": _zeros(2, 6)}, ValueError, "b2 must be [E, D] = [3, 6], got [2, 6]"),
    ({"w1": _zeros(3, 8, 6).int()}, TypeError, f"w1 must be {FLOATS}, got int32"),
    ({"w2": _zeros(3, 6, 8).half()}, TypeError, "w2 must be float32 as w1, got float16"),
    ({"b1": _zeros(3, 8).bfloat16()}, TypeError, "b1 must be float32 as w1, got bfloat16"),
    ({"b2": _zeros(3, 6).double()}, TypeError, "b2 must be float32 as w1, got float64"),
    ({"w1": _zeros(3, 8, 6, device=META)}, ValueError, "w1 must be on x's device cpu, got meta"),
    ({"w2": _zeros(3, 6, 8, device=META)}, ValueError, "w2 must be on x's device cpu, got meta"),
    ({"b1": _zeros(3, 8, device=META)}, ValueError, "b1 must be on x's device cpu, got meta"),
    ({"b2": _zeros(3, 6, device=META)}, ValueError, "b2 must be on x's device cpu, got meta"),
    ({"x": _zeros(4, 6, device=META)}, ValueError, "w1 must be on x's device meta, got cpu"),
    (
        {"activation": "swish"},
        ValueError,
        "tanh, mish, hardswish, elu, leaky_relu, identity, softcapped_silu; got 'swish'",
    ),
    (
        {"activation": "clamped_swiglu"},
        ValueError,
        "activation 'clamped_swiglu' is a gating: it needs gated=True",
    ),
    (
        {"activation": "softcapped_silu"},
        ValueError,
        "activation 'softcapped_silu' is a gating: it needs gated=True",
    ),
    *(
        (
            {"activation": "softcapped_silu", "gated": True, name: value},
            ValueError,
            f"{name} must be in 2**-126..2**126 with activation 'softcapped_silu', got {value}",
        )
        for name in ("alpha", "limit")
        for value in (1e-39, 1e38, float("inf"))
    ),
    (
        {"activation": "softcapped_silu", "gated": True, "alpha": 0.0},
        ValueError,
        "alpha must be in 2**-126..2**126 with activation 'softcapped_silu', got 0.0",
    ),
    (
        {"activation": "softcapped_silu", "gated": True, "alpha": -4.0},
        ValueError,
        "alpha must be in 2**-126..2**126 with activation 'softcapped_silu', got -4.0",
    ),
    (
        {"interleaved": True},
        ValueError,
        "interleaved=True orders gate and up rows: it needs gated=True",
    ),
    ({"limit": 0.0}, ValueError, "limit must be positive, got 0.0"),
    ({"limit": float("nan")}, ValueError, "limit must be positive, got nan"),
    ({"pre_norm": "layer"}, ValueError, "pre_norm must be one of none, rms; got 'layer'"),
    *(
        (
            {"norm_eps": value},
            ValueError,
            f"norm_eps must be positive and a normal number of float32, got {value}",
        )
        for value in (0.0, -1e-6, 1e-39, 1e39, float("inf"), float("nan"))
    ),
]
ROUTER = [
    (
        {"router_weight": _zeros(4, 6)},
        ValueError,
        "router_weight must be [E, D] = [3, 6], got [4, 6]",
    ),
    (
        {"router_weight": _zeros(3, 6).int()},
        TypeError,
        f"router_weight must be {FLOATS}, got int32",
    ),
    (
        {"router_weight": _zeros(3, 6, device=META)},
        ValueError,
        "router_weight must be on x's device cpu, got meta",
    ),
    ({"router_bias": _zeros(3, 1)}, ValueError, "router_bias must be [E] = [3], got [3, 1]"),
    ({"router_bias": _zeros(3).long()}, TypeError, f"router_bias must be {FLOATS}, got int64"),
    (
        {"router_bias": _zeros(3, device=META)},
        ValueError,
        "router_bias must be on x's device cpu, got meta",
    ),
    ({"selection_bias": _zeros(4)}, ValueError, "selection_bias must be [E] = [3], got [4]"),
    (
        {"selection_bias": _zeros(3).long()},
        TypeError,
        f"selection_bias must be {FLOATS}, got int64",
    ),
    (
        {"selection_bias": _zeros(3, device=META)},
        ValueError,
        "selection_bias must be on x's device cpu, got meta",
    ),
    ({"n_group": 0}, ValueError, "n_group must be at least 1, got 0"),
    ({"n_group": 3}, ValueError, "n_group=3 needs a group_scoring, got 'none'"),
    (
        {"group_scoring": "sum"},
        ValueError,
        "group_scoring must be one of none, max, top2_sum; got 'sum'",
    ),
    (
        {"group_scoring": "max", "n_group": 3, "topk_group": 4},
        ValueError,
        "topk_group must be in 1..3 (the groups), got 4",
    ),
    (
        {"group_scoring": "max", "n_group": 2},
        ValueError,
        "n_group=2 must divide 3 experts into groups of 1 up",
    ),
    (
        {"group_scoring": "max", "n_group": 2, "topk_group": 2},
        ValueError,
        "n_group=2 must divide 3 experts into groups of 1 up",
    ),
    (
        {"group_scoring": "top2_sum", "n_group": 3},
        ValueError,
        "n_group=3 must divide 3 experts into groups of 2 up",
    ),
    (
        {"group_scoring": "max", "n_group": 3, "top_k": 2},
        ValueError,
        "top_k must be in 1..1 (the experts of 1 groups), got 2",
    ),
    ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ({"top_k": -2}, ValueError, "top_k must be at least 1, got -2"),
    ({"top_k": 4}, ValueError, "top_k must be in 1..3 (the experts), got 4"),
    (
        {"scoring": "top1"},
        ValueError,
        "scoring must be one of softmax, topk_softmax, sigmoid; got 'top1'",
    ),
]
IDS = "expert_ids must be [..., K] with x's leading dimensions and K >= 1, got"
ROUTING = [
    ({"expert_ids": _zeros(8).long()}, ValueError, f"{IDS} [8] for x [4, 6]"),
    ({"expert_ids": _zeros(4, 0).long()}, ValueError, f"{IDS} [4, 0] for x [4, 6]"),
    (
        {"expert_ids": _zeros(5, 2).long()},
        ValueError,
        "expert_ids must be [..., K] = [4, 2], got [5, 2]",
    ),
    (
        {"expert_weights": _zeros(4, 3)},
        ValueError,
        "expert_weights must be [..., K] = [4, 2], got [4, 3]",
    ),
    (
        {"expert_ids": _zeros(4, 2)},
        TypeError,
        "expert_ids must be one of int32, int64, got float32",
    ),
    (
        {"expert_ids": _zeros(4, 2, dtype=torch.int16)},
        TypeError,
        "expert_ids must be one of int32, int64, got int16",
    ),
    (
        {"expert_weights": _zeros(4, 2).int()},
        TypeError,
        f"expert_weights must be {FLOATS}, got int32",
    ),
    (
        {"expert_ids": _zeros(4, 2, dtype=torch.int64, device=META)},
        ValueError,
        "expert_ids must be on x's device cpu, got meta",
    ),
    (
        {"expert_weights": _zeros(4, 2, device=META)},
        ValueError,
        "expert_weights must be on x's device cpu, got meta",
    ),
]
refused = pytest.mark.parametrize(
    ("op", "changes", "error", "reason"),
    [("dropless", *row) for row in EXPERTS + ROUTER]
    + [("experts", *row) for row in EXPERTS + ROUTING],
)


def _case(op: str, changes: dict[str, Any]) -> Case:
    return make_case(op, (4,), width=6, hidden=8, experts=3).changed(**changes)


@refused
def test_in_eager_mode(
    op: str, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    _case(op, {})()  # That this was right is remembered.
    for _ in range(2):
        with pytest.raises(error, match=re.escape(reason)):
            _case(op, changes)()


@refused
def test_on_fakes(op: str, changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    case = _case(op, changes)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value)
            for name, value in case.arguments.items()
            if isinstance(value, Tensor)
        }
        fake = case.changed(**fakes)
        with pytest.raises(error, match=re.escape(reason)):
            fake()


@refused
@pytest.mark.first(40)
def test_in_a_compile(
    op: str, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    torch._dynamo.reset()
    case = _case(op, changes)
    compiled = torch.compile(
        lambda *arguments: case.overload(*arguments, **case.options),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(TorchRuntimeError, match=re.escape(reason)) as raised:
        compiled(*case.arguments.values())
    assert f"got {error.__name__}(" in str(raised.value)


@pytest.mark.parametrize(
    ("expert", "dtype"), [(3, torch.int64), (-2, torch.int32), (99, torch.int32)]
)
def test_an_expert_that_does_not_exist(expert: int, dtype: torch.dtype) -> None:
    case = _case("experts", {})
    ids = case.arguments["expert_ids"].to(dtype)
    ids[2, 1] = expert
    reason = f"expert_ids must be in 0..2, or -1 for no expert; got {expert}"
    with pytest.raises(ValueError, match=re.escape(reason)):
        case.changed(expert_ids=ids)()


@pytest.mark.parametrize("op", ["dropless", "experts"])
@pytest.mark.parametrize("shape", [(4,), (0,), (2, 3), ()])
def test_what_a_fake_accepts_has_the_result_s_shape(op: str, shape: tuple[int, ...]) -> None:
    case = make_case(op, shape, x_dtype=torch.float32, dtype=torch.bfloat16)
    result = case()
    meta = case.changed(
        **{
            name: value.to(META)
            for name, value in case.arguments.items()
            if isinstance(value, Tensor)
        }
    )()
    assert meta.device == META
    assert (meta.shape, meta.stride(), meta.dtype) == (result.shape, result.stride(), result.dtype)


@pytest.mark.parametrize("function", [custom_ops.dropless, custom_ops.experts])
def test_an_option_that_does_not_exist(function: Any) -> None:
    case = _case(function.__name__, {})
    reason = f"{function.__name__}() got an unexpected keyword argument 'gate'"
    with pytest.raises(TypeError, match=re.escape(reason)):
        function(**case.arguments, gate=True)


def test_a_check_is_remembered_for_all_that_looks_alike() -> None:
    seen = []

    @remembered
    def check(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        seen.append((arguments, options))
        return arguments[1:], options

    x = torch.zeros(2, 3)
    assert check(x, 1, gated=True) == check(x + 1, 1, gated=True) == ((1,), {"gated": True})
    assert len(seen) == 1
    for other in (x.double(), x.mT, x[:1], x.to(META)):
        check(other, 1, gated=True)
    check(x, 2, gated=True)
    check(x, 1, gated=False)
    check(x, None, gated=True)
    assert len(seen) == 8
    for tokens in range(3000):
        check(x.expand(tokens, 2, 3), 1)
    assert check(x, 2, gated=True) == ((2,), {"gated": True})


@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_derivatives_are_refused(trained: bool) -> None:
    """Without gradients of anything, PyTorch would take them for zeros."""
    x, router = torch.randn(2, 5, 4), torch.randn(3, 4)
    w1, w2 = torch.randn(3, 8, 4, requires_grad=trained), torch.randn(3, 4, 8)
    ids, weights = torch.zeros(2, 5, 1, dtype=torch.int64), torch.ones(2, 5, 1)
    for function in (
        lambda x: custom_ops.dropless(x, router, w1, None, w2, None, top_k=2),
        lambda x: custom_ops.experts(x, ids, weights, w1, None, w2, None),
        lambda x: custom_ops.rms_norm(x, torch.ones(4), 1e-6),
    ):
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
