"""Programs whose sizes depend on values: loops over experts, selections, unique values.

Legend: T rows of the input, W their width, E experts, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import dynamo_moe
from dynamo_moe.models import swin_moe_digits
from traced_programs import Call, decompose, traced

W, E, K = 6, 4, 2

Step = Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]


def rows(number: int = 5) -> list[Tensor]:
    """Inputs of several lengths, some of which make comparisons select nothing or everything."""
    drawn = [torch.randn(t, W) for t in [number] * 4 + [1, 9]]
    return [*drawn, torch.rand(number, W) + 8, torch.rand(number, W) - 9]


# --- Checks ---


def failures(path: Path, model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[str]:
    """Yields what is wrong in ONNX Runtime: numbers, shapes, and names of sizes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2  # It warns of names whose sizes differ, and continues if it can.
    session = onnxruntime.InferenceSession(str(path), options)
    whole = onnxruntime.InferenceSession(with_all_results(path), options)
    (name,) = (value.name for value in session.get_inputs())
    for x in inputs:
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(model(x.clone()))
        try:
            actual = [torch.from_numpy(array) for array in session.run(None, {name: x.numpy()})]
            torch.testing.assert_close(actual, list(expected), rtol=1e-5, atol=1e-5)
            sizes = list(named_sizes(whole, {name: x.numpy()}))
        except (AssertionError, RuntimeError) as error:
            yield f"{type(error).__name__} for {tuple(x.shape)}: {error}"
            continue
        yield from (f"{dim} is {seen} for {tuple(x.shape)}" for dim, seen in sizes if len(seen) > 1)


def with_all_results(path: Path) -> bytes:
    """The file's model, with every named intermediate result added to its outputs."""
    model = onnx.load(str(path))
    own = {value.name for value in model.graph.output}
    made = {name for node in model.graph.node for name in node.output}
    model.graph.output.extend(value for value in model.graph.value_info if value.name in made - own)
    return model.SerializeToString()


def named_sizes(session: Any, feeds: dict[str, Any]) -> Iterator[tuple[str, set[int]]]:
    """Yields each named dimension's name with the sizes that it has in one run."""
    values = [*session.get_inputs(), *session.get_outputs()]
    arrays = [*feeds.values(), *session.run(None, feeds)]
    seen: dict[str, set[int]] = {}
    for value, array in zip(values, arrays, strict=True):
        assert len(value.shape) == array.ndim, value.name
        for dim, size in zip(value.shape, array.shape, strict=True):
            if dim is not None:
                seen.setdefault(str(dim), set()).add(size)
    for dim, sizes in seen.items():
        yield dim, sizes | {int(dim)} if dim.isdecimal() else sizes


def check(path: Path, model: nn.Module, inputs: Sequence[Tensor] | None = None) -> None:
    inputs = rows() if inputs is None else inputs
    dynamo_moe.export(model, inputs[0], path)
    assert not list(failures(path, model, inputs))


# --- Programs ---


def where_loop(x: Tensor) -> Tensor:
    weights, ids = x[:, :E].softmax(-1).topk(K)
    y = torch.zeros_like(x)
    for expert in range(E):
        token, slot = torch.where(ids == expert)
        y.index_add_(0, token, (x[token] * (expert + 1)).tanh() * weights[token, slot, None])
    return y


def one_hot_loop(x: Tensor) -> Tensor:
    weights, ids = x[:, :E].softmax(-1).topk(K)
    masks = F.one_hot(ids, E).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for expert in range(E):
        slot, token = torch.where(masks[expert])
        y = y.index_add(0, token, x[token].sin() * weights[token, slot, None] * expert)
    return y


def masked_loop(x: Tensor) -> Tensor:
    ids = x[:, :E].argmax(-1)
    y = torch.zeros_like(x)
    for expert in range(E):
        mask = ids == expert
        y[mask] = (x[mask] * (expert + 1)).tanh()
    return y


def nonzero_twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = (x > 0).nonzero(), (x < -1).nonzero()
    both = (x > 0).nonzero(as_tuple=True)
    return first, second, x[both]


def same_mask_twice(x: Tensor) -> Tensor:
    mask = x[:, 0] > 0
    return x[torch.where(mask)[0]] + x[torch.where(mask)[0]].cos()


def selections(x: Tensor) -> tuple[Tensor, ...]:
    chosen = [x.masked_select(x > bound) for bound in (-1.0, 0.0, 1.0)]
    return (*chosen, torch.cat([part * 2 for part in chosen]))


def of_equal_sizes(x: Tensor) -> tuple[Tensor, ...]:
    """Calls whose arguments have equal shapes but different values."""
    return tuple(x[torch.where(x[:, column] > 0)[0]] for column in range(3))


def unique_values(x: Tensor) -> tuple[Tensor, ...]:
    ids = x.round().long()
    values, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return values, inverse, counts, torch.unique(ids[:, 0]), torch.unique(ids[:, 1])


def counted(x: Tensor) -> tuple[Tensor, ...]:
    counts = [(x[:, column] > 0).sum().item() for column in (0, 1)]
    for count in counts:
        torch._check(count >= 0)
    return tuple(torch.arange(count, dtype=x.dtype) + 1 for count in counts)


def capacity(x: Tensor) -> tuple[Tensor, ...]:
    """A number of rows that is computed as a tensor, from a constant and a fraction of a size."""
    rows = torch.ceil(torch.tensor(2.0) * (x.shape[0] / E)).to(torch.int64)
    rows = torch.maximum(rows, torch.tensor(1))
    return torch.zeros(int(rows) * E + 1, W), x


def reduced(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions over the last dimension of tensors that may have no rows."""
    token = torch.where(x[:, 0] > 0)[0]
    y = F.layer_norm(x[token], (W,)) * x[token].square().mean(-1, keepdim=True)
    return y, x[token].sum(-1), x[token].amax(-1), x[token].argmax(-1), F.rms_norm(y, (W,))


def in_regions(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for column in range(3):
        with torch.no_grad():
            token = torch.where(x[:, column] > 0)[0]
        y = y.index_add(0, token, x[token] * 2)
    return y


PROGRAMS = [
    where_loop,
    one_hot_loop,
    masked_loop,
    nonzero_twice,
    same_mask_twice,
    selections,
    of_equal_sizes,
    unique_values,
    counted,
    capacity,
    reduced,
    in_regions,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_and_sizes(tmp_path: Path, program) -> None:
    torch.manual_seed(0)
    check(tmp_path / "m.onnx", Call(program))


@pytest.mark.parametrize("program", [where_loop, one_hot_loop, of_equal_sizes, in_regions])
def test_each_call_has_sizes_of_its_own(program) -> None:
    model = traced(Call(program), torch.randn(5, W))
    named = symbols(model.graph.nodes)
    result = decompose(model).graph
    assert named <= symbols(result.nodes)
    calls = [n for n in result.nodes if n.target is torch.ops.aten.nonzero.default]
    assert len(symbols(calls)) == len(calls) > 1


def symbols(nodes: Iterable[fx.Node]) -> set[str]:
    return {str(s) for node in nodes for s in free_unbacked_symbols(node.meta.get("val"))}


def test_swin_moe_unconverted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = swin_moe_digits().eval(), tmp_path / "m.onnx"
    inputs = [torch.rand(batch, 1, 8, 8) for batch in (2, 1, 3, 2, 2, 2)]
    with pytest.warns(UserWarning, match="are not converted"):
        dynamo_moe.export(model, inputs[0], path)
    assert not list(failures(path, model, inputs))


# --- Random programs ---


class Steps(nn.Module):
    """Consecutive steps, each with a bound and a column of its own."""

    def __init__(self, steps: Sequence[tuple[str, float, int]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, outputs = x, []
        for name, bound, column in self.steps:
            y, *more = STEPS[name](y, bound, column)
            outputs += more
        return (y, *outputs)


def added_rows(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    token, place = torch.where(y > bound)
    return (y.index_add(0, token, y[token].cos() * y[token, place, None].sigmoid()),)


def put_rows(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    token = (y[:, column] > bound).nonzero().squeeze(1)
    return (y.index_put((token,), y[token].sin()),)


def accumulated(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    token, place = (y > bound).nonzero(as_tuple=True)
    return (y.index_put((token, place), y[token, place].tanh(), accumulate=True),)


def selected(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    return y + 0.1, y.masked_select(y > bound)


def filtered(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    part = y[y[:, column] > bound]
    return y * 1.1, part.sum(0), part.softmax(-1), part.norm(dim=-1)


def assigned(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    y = y.clone()
    y[y > bound] = y[y > bound] * 0.5
    return (y,)


def unique(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    values, counts = torch.unique((y[:, column] * 2).round(), return_counts=True)
    return y - 0.1, values, counts


def joined(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    above, below = y[y[:, column] > bound], y[y[:, column] <= bound]
    return y, torch.cat([above, below])


def experts(y: Tensor, bound: float, column: int) -> tuple[Tensor, ...]:
    weights, ids = y[:, :E].softmax(-1).topk(K)
    masks = F.one_hot(ids, E).permute(2, 1, 0)
    result = y
    for expert in range(E):
        slot, token = torch.where(masks[expert])
        rows = (y[token] * (expert + 1)).cos() * weights[token, slot, None]
        result = result.index_add(0, token, rows)
    return (result,)


STEPS = {
    step.__name__: step
    for step in (
        added_rows,
        put_rows,
        accumulated,
        selected,
        filtered,
        assigned,
        unique,
        joined,
        experts,
    )
}

programs = st.lists(
    st.tuples(
        st.sampled_from(sorted(STEPS)),
        st.sampled_from([-20.0, -0.5, 0.0, 0.5, 20.0]),  # -20 selects everything, 20 nothing.
        st.integers(0, W - 1),
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=8, database=None)
@given(steps=programs)
@pytest.mark.every
def test_random_programs(tmp_path_factory: pytest.TempPathFactory, steps) -> None:
    torch.manual_seed(0)
    check(tmp_path_factory.mktemp("random") / "m.onnx", Steps(steps).eval())
