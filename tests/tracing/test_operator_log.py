"""The log of a model's operators: what is equal in it, and that results without values are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.tracing.operator_log import (
    META,
    Forms,
    OperatorLog,
    Record,
    like_on_meta,
)

ROWS, WIDTH = 3, 4
Code = Callable[..., Any]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def logged(code: Code, *tensors: Tensor, forms: Forms | None = None) -> OperatorLog:
    """Returns the log of code that is given tensors; none: one of rows."""
    log = OperatorLog(forms or Forms())
    given = tensors or (meta(ROWS, WIDTH),)
    for position, tensor in enumerate(given):
        log.add_origin(tensor, ("input", position))
    with log:
        code(*given)
    return log


def records(code: Code, *tensors: Tensor, forms: Forms) -> Sequence[tuple[Any, ...]]:
    """Returns what code ran, with the names of what was there before."""
    log = logged(code, *tensors, forms=forms)
    return [
        (record.form, [use if use >= 0 else log.origins[-1 - use] for use in record.uses])
        for record in log.records
    ]


def test_values_are_numbered() -> None:
    log = logged(lambda x: (x + x).split(2)[1] * 2)
    add, split, multiply = log.records
    assert log.origins == [("input", 0)]
    assert (add.uses, add.results) == ((-1, -1), 0)
    assert (split.uses, split.results) == ((0,), 1)
    assert (multiply.uses, multiply.results) == ((2,), 3)
    assert log.values == 4


EQUAL: dict[str, tuple[Code, Code]] = {
    "slice": (lambda x: x[1:], lambda x: x[1 : ROWS + 5]),
    "whole slice": (lambda x: x.sin(), lambda x: x[:].sin()),
    "slice to the end": (lambda x: x[:, :-1], lambda x: x[:, : WIDTH - 1]),
    "view": (lambda x: x.view(WIDTH, -1), lambda x: x.view(-1, ROWS)),
    "reshape": (lambda x: x.view(2, -1), lambda x: x.reshape(2, 6)),
    "flatten": (lambda x: x.flatten(), lambda x: x.view(-1)),
    "view of the same shape": (lambda x: x.cos(), lambda x: x.view(ROWS, WIDTH).cos()),
    "expanded": (lambda x: x[:1].expand(2, WIDTH), lambda x: x[:1].expand(2, -1)),
    "clone": (lambda x: x.sin().cos(), lambda x: x.sin().clone().cos()),
    "detach": (lambda x: x.sin().cos(), lambda x: x.detach().sin().cos()),
    "contiguous": (lambda x: x.t().sin(), lambda x: x.t().contiguous().sin()),
    "constant": (lambda x: x + torch.tensor(1.5), lambda x: x + torch.tensor(1.5)),
    "device": (lambda x: x + torch.ones(4), lambda x: x + torch.ones(4, device="meta")),
    "function": (lambda x: x.relu(), F.relu),
    "keyword": (lambda x: x.sum(0), lambda x: x.sum(dim=0)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_computes_the_same_is_equal(name: str) -> None:
    forms = Forms()
    first, second = (records(code, forms=forms) for code in EQUAL[name])
    assert first == second != []


UNEQUAL: dict[str, tuple[Code, Code]] = {
    "operator": (lambda x: x.sin(), lambda x: x.cos()),
    "number": (lambda x: x * 2.0, lambda x: x * 3.0),
    "type of a number": (lambda x: x * 2.0, lambda x: x * 2),
    "truth": (lambda x: x.sum(0, keepdim=True), lambda x: x.sum(0, keepdim=False)),
    "sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "string": (
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
    ),
    "None": (lambda x: x.clamp(None, 1.0), lambda x: x.clamp(0.0, None)),
    "dtype": (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
    "argument": (lambda x: x.sin() + x.cos(), lambda x: x.cos() + x.sin()),
    "producer": (lambda x: (x.sin(), x.sin())[0].cos(), lambda x: (x.sin(), x.sin())[1].cos()),
    "start of a slice": (lambda x: x[:2], lambda x: x[1:]),
    "dimension of a slice": (lambda x: x[:3, :3][:2], lambda x: x[:3, :3][:, :2]),
    "step of a slice": (lambda x: x[:2], lambda x: x[::2]),
    "shape": (lambda x: x.view(2, 6), lambda x: x.view(6, 2)),
    "constant": (lambda x: x + torch.tensor(1.5), lambda x: x + torch.tensor(2.5)),
    "dtype of a constant": (
        lambda x: x + torch.tensor(1.0),
        lambda x: x + torch.tensor(1.0, dtype=torch.float64),
    ),
    "in place": (lambda x: x.sin().mul(2), lambda x: x.sin().mul_(2)),
    "infinity": (lambda x: x * float("inf"), lambda x: x * float("nan")),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_computes_another_thing_is_unequal(name: str) -> None:
    forms = Forms()
    first, second = (records(code, forms=forms) for code in UNEQUAL[name])
    assert first != second


def test_shapes_are_part_of_a_form() -> None:
    forms = Forms()
    first = records(torch.sin, meta(2, 3), forms=forms)
    assert first == records(torch.sin, meta(2, 3), forms=forms)
    assert first != records(torch.sin, meta(3, 2), forms=forms)
    assert first != records(torch.sin, meta(2, 3, dtype=torch.float16), forms=forms)


def test_constants_are_known_by_their_values() -> None:
    one, same, other = torch.ones(4), torch.ones(4), torch.zeros(4)
    log = logged(lambda x: x + one + same + other + one)
    uses = [record.uses[1] for record in log.records]
    assert uses == [-2, -2, -3, -2]
    assert log.origins[1] != log.origins[2]


def test_constants_without_values_are_known_by_themselves() -> None:
    one, other = meta(4), meta(4)
    log = logged(lambda x: x + one + other + one)
    assert [record.uses[1] for record in log.records] == [-2, -3, -2]


@pytest.mark.parametrize("strides", [(4, 1), (1, 3)])
def test_constants_of_any_layout(strides: tuple[int, int]) -> None:
    constant = torch.arange(12.0).as_strided((3, 4), strides)
    log = logged(lambda x: x + constant)
    assert log.origins[1][:3] == ("constant", torch.float32, (3, 4))


def test_origins_have_numbers() -> None:
    log = logged(torch.sin)
    assert log.number_of(("input", 0)) == -1
    assert log.number_of(("input", 1)) is None


# --- What is changed in place ---


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        (lambda x: x.mul_(2), [(-1,)]),
        (lambda x: x.view(-1).mul_(2), [(), (-1,)]),
        (lambda x: x[1:].t().mul_(2), [(), (), (-1,)]),
        (lambda x: x.sin().mul_(2), [(), (0,)]),
        (lambda x: x.sin().view(-1).mul_(2), [(), (), (0,)]),
        (lambda x: x.sin().split(1)[1].mul_(2), [(), (), (0,)]),
        (lambda x: x.sin().mul_(2).add_(1), [(), (0,), (0,)]),
        (lambda x: x.sin().detach().mul_(2), [(), (0,)]),
        (lambda x: x.sin().clone().mul_(2), [(), (1,)]),
        (lambda x: x.clone().mul_(2), [(0,)]),
        (lambda x: x.sin()[:].mul_(2), [(), (0,)]),
        (lambda x: torch._foreach_add_([x, x.sin()], 1), [(), (-1, 0)]),
        (lambda x: torch.sin(x, out=x), [(-1,)]),
        (lambda x: x.sin().cos(), [(), ()]),
    ],
)
def test_memory_that_is_changed(code: Code, writes: list[tuple[int, ...]]) -> None:
    assert [record.writes for record in logged(code).records] == writes


def _sum_after(change: Callable[[Tensor, Tensor], Any], of: Code) -> Code:
    def code(x: Tensor) -> Tensor:
        y = x.sin()
        z = of(y)
        change(y, z)
        return y + z

    return code


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        (_sum_after(lambda y, _: y.mul_(2), lambda y: y.clone()), (1, 0)),
        (_sum_after(lambda y, _: y.mul_(2), lambda y: y.detach()), (1, 1)),
        (_sum_after(lambda _, z: z.mul_(2), lambda y: y.detach()), (1, 1)),
        (_sum_after(lambda _, z: z.mul_(2), lambda y: y.clone()), (0, 1)),
        # The view is the second result, its change the third; then comes what it is a view of.
        (_sum_after(lambda _, z: z.mul_(2), lambda y: y[:1]), (3, 2)),
        (_sum_after(lambda y, _: y.mul_(2), lambda y: y[:1]), (2, 3)),
        (_sum_after(lambda y, _: torch._foreach_mul_([y], 2), lambda y: y[:1]), (2, 3)),
    ],
)
def test_what_is_read_after_a_change(code: Code, uses: tuple[int, ...]) -> None:
    assert logged(code).records[-1].uses == uses


@pytest.mark.parametrize("code", [lambda x: x.mul_(2), lambda x: x[1:].view(3, 1).mul_(2)])
def test_constants_keep_their_values(code: Code) -> None:
    constant = torch.ones(4)
    with pytest.raises(RuntimeError, match="a constant is changed in place"):
        logged(lambda x: code(constant))
    assert constant.tolist() == [1, 1, 1, 1]


def test_constants_that_code_makes_may_be_changed() -> None:
    log = logged(lambda x: x + torch.tensor([1.0, 2, 3, 4]).mul_(2))
    assert [record.uses for record in log.records] == [(-2,), (-1, 0)]


# --- Results without values ---


def _example() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(2, 4, 6), torch.rand(6, 6), torch.randint(0, 4, (2, 3))


RUNS: dict[str, Code] = {
    "product": lambda x, w, i: x @ w,
    "transposed product": lambda x, w, i: (x.transpose(1, 2) @ x, w.t() @ w),
    "linear": lambda x, w, i: F.linear(x, w, w[0]),
    "sum": lambda x, w, i: (x.sum(-1), x.sum(), x.mean(1, keepdim=True)),
    "comparison": lambda x, w, i: (x > 0.5) & (x < w[0]),
    "broadcast": lambda x, w, i: x.transpose(0, 1) + w[:1],
    "types": lambda x, w, i: (i + 1.5, i / 2, i // 2, x.half() + x, x.double()),
    "permuted": lambda x, w, i: x.permute(2, 0, 1).sin().exp(),
    "several": lambda x, w, i: (x.topk(2), x.max(1), x.split([1, 3], 1), x.unbind()),
    "attention": lambda x, w, i: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "norms": lambda x, w, i: (F.layer_norm(x, (6,)), F.group_norm(x, 2), F.softmax(x, -1)),
    "index": lambda x, w, i: (w[i], x[:, i[0]], w.index_select(0, i[0]), x.gather(1, i[..., None])),
    "embedding": lambda x, w, i: F.embedding(i, w),
    "made": lambda x, w, i: (torch.arange(3) + i, torch.zeros(2, 3) + i, torch.full((3,), 2) * i),
    "convolution": lambda x, w, i: F.conv1d(x, w[:, :4, None].contiguous(), padding=1),
    "in place": lambda x, w, i: x.sin().mul_(2).add_(w[0]).view(2, -1),
    "dropout": lambda x, w, i: F.dropout(x, 0.5, training=False),
    "cat": lambda x, w, i: (torch.cat([x, x], 1), torch.stack([w, w], -1), F.pad(x, (1, 2))),
    "where": lambda x, w, i: torch.where(x > 0.5, x, 0.0).masked_fill(x > 0.7, -1.0),
    "complex": lambda x, w, i: torch.view_as_complex(x.view(2, 4, 3, 2)).abs(),
}  # fmt: skip


def _layouts(results: Any) -> list[Any]:
    tensors = pytree.tree_leaves(results)
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("name", RUNS)
def test_results_are_real_ones_but_for_values(name: str) -> None:
    """The second time they are made from memory."""
    expected = _layouts(RUNS[name](*_example()))
    forms = Forms()
    for _ in range(2):
        with OperatorLog(forms):
            results = RUNS[name](*map(like_on_meta, _example()))
        assert _layouts(results) == expected
        assert all(tensor.is_meta for tensor in pytree.tree_leaves(results))


def test_results_from_memory_are_of_the_same_strides() -> None:
    forms = Forms()
    for x in (meta(2, 3), meta(3, 2).t(), meta(2, 3)):
        with OperatorLog(forms):
            assert x.sin().stride() == x.stride()


@pytest.mark.parametrize(
    "code", [lambda x: x * 2 + torch.ones(4), lambda x: x.index_put_((torch.arange(2),), x[:2])]
)
def test_real_constants_beside_tensors_without_values(code: Code) -> None:
    forms = Forms()
    for _ in range(2):
        with OperatorLog(forms):
            assert code(meta(ROWS, WIDTH)).is_meta


def test_constants_alone_are_computed() -> None:
    constant = torch.arange(4.0)
    log = OperatorLog(Forms())
    with log:
        result = constant * 2
    assert result.tolist() == [0, 2, 4, 6]
    assert len(log.records) == 1


@pytest.mark.parametrize(
    "code", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.nonzero()]
)
def test_values_cannot_be_asked_for(code: Code) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        logged(code)


def test_most_records() -> None:
    x = meta(2)
    with OperatorLog(Forms(), most_records=2) as log:
        x.sin().cos()
        with pytest.raises(RuntimeError, match="more than 2 operators run"):
            x.tan()
    assert len(log.records) == 3


def test_tensors_live_as_long_as_their_log() -> None:
    """Their ids would be given to others, which would be taken for them."""
    log = logged(lambda x: [x + number for number in range(50)])
    assert [record.uses for record in log.records] == [(-1,)] * 50
    assert [*map(type, log.records)] == [Record] * 50
