"""Random programs that change tensors through views of them, decomposed and run by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from test_decomposition import Call, decompose
from torch import Tensor, fx

from dynamo_moe.private import tracer
from dynamo_moe.tracing.nodes import NeedsRetraceError

pytestmark = pytest.mark.skipif(
    tracer.missing() is not None, reason="needs a version of PyTorch that is known"
)

# Some give a copy, depending on how the tensor lies in memory; the result of each has a dimension.
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[:1],
    lambda t: t[..., -2:],
    lambda t: t[::2],
    lambda t: t[..., 0] if t.ndim > 1 else t,
    lambda t: t[-1] if t.ndim > 1 else t,
    lambda t: t.transpose(0, -1),
    lambda t: t.movedim(0, -1),
    lambda t: t.reshape(-1),
    lambda t: t.flatten(),
    lambda t: t.contiguous(),
    lambda t: t.unsqueeze(1),
    lambda t: t.squeeze(-1) if t.ndim > 1 else t,
    lambda t: t.chunk(2, dim=-1)[0],
    lambda t: t.chunk(2, dim=0)[-1],
    lambda t: t.unbind(0)[0] if t.ndim > 1 else t,
    lambda t: t.diagonal() if t.ndim > 1 else t,
    lambda t: t.detach(),
    lambda t: t.float(),
    lambda t: t.expand_as(t),
    lambda t: t.clone(),
    lambda t: t.cos(),
]
CHANGES: list[Callable[[Tensor, Tensor], object]] = [
    lambda t, x: t.add_(1),
    lambda t, x: t.mul_(t.mean()),
    lambda t, x: t.fill_(0.5),
    lambda t, x: t.zero_(),
    lambda t, x: t.copy_(t.flip(0)),
    lambda t, x: t.copy_(x[0, 0]),
    lambda t, x: t.sub_(x.sum()),
    lambda t, x: t.masked_fill_(t > 0, 0.25),
    lambda t, x: t.clamp_(-0.5, 0.5),
    lambda t, x: t[:1].neg_(),
    lambda t, x: t.copy_(t.double() / 2),
    lambda t, x: t.index_copy_(0, x[:1, 0].long() * 0, t[-1:].clone()),
    lambda t, x: F.relu(t, inplace=True),
]


class RowMajor(fx.Interpreter):
    """Runs a program as ONNX does, whose tensors have no strides."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result.contiguous() if isinstance(result, Tensor) else result


steps = st.tuples(
    st.booleans(), st.integers(0, 9), st.integers(0, 10 * len(VIEWS) * len(CHANGES) - 1)
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(st.lists(steps, min_size=2, max_size=7))
def test_random_views_and_changes(program: list[tuple[bool, int, int]]) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        tensors, read = [x * 2], []
        for is_change, which, how in program:
            tensor = tensors[which % len(tensors)]
            if is_change:
                CHANGES[how % len(CHANGES)](tensor, x)
                read.append(tensors[how % len(tensors)].sin())
            else:
                tensors.append(VIEWS[how % len(VIEWS)](tensor))
        return (*read, *(tensor + 0 for tensor in tensors))

    try:
        run(torch.randn(3, 4))
    except RuntimeError:  # PyTorch itself refuses it.
        reject()
    exported = torch.export.export(Call(run).eval(), (torch.randn(3, 4),))
    try:
        result = decompose(exported)
    except NeedsRetraceError as error:
        event(str(error).rpartition(" is ")[2])
        reject()
    x = torch.randn(3, 4)
    torch.testing.assert_close(tuple(RowMajor(result).run(x)), run(x))
