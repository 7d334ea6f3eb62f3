"""Decomposition operator by operator; as fallback, PyTorch's own of the whole program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx_ir.schemas import OpSignature
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import dynamo_moe
from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.tracing import decomposition, translate
from dynamo_moe.tracing.decomposition import decomposed
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.fixed_sizes import SizeTrials
from dynamo_moe.tracing.nodes import NeedsRetraceError, add_graph
from small_models import mlp_model

aten = torch.ops.aten


known = pytest.mark.skipif(
    tracer.missing() is not None, reason="needs a version of PyTorch that is known"
)


class Call(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Counts(nn.Module):
    """A module that changes its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


def traced(model: nn.Module, *args: Tensor) -> ExportedProgram:
    shapes = tuple({0: Dim.DYNAMIC} for _ in args)
    if isinstance(model, Call):
        return torch.export.export(model.eval(), args, dynamic_shapes=shapes)
    return torch.export.export(model.eval(), args)


def decompose(program: ExportedProgram) -> fx.GraphModule:
    registry, decompositions = translate._registered(20)
    is_registered = registry.is_registered
    return decomposed(program.graph_module, is_registered, decompositions, mode_of(program))


def mode_of(program: ExportedProgram) -> Any:
    return detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def operators(module: fx.GraphModule) -> list[torch._ops.OpOverload]:
    return [target for target in targets(module) if isinstance(target, torch._ops.OpOverload)]


@pytest.fixture
def retraces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """Collects the programs that went through ``torch.onnx.export``."""
    programs: list[ExportedProgram] = []
    original = translate._translate_by_torch

    def spied(program: ExportedProgram, opset: int) -> Any:
        programs.append(program)
        return original(program, opset)

    monkeypatch.setattr(translate, "_translate_by_torch", spied)
    return programs


def check_numbers(path: Path, model: nn.Module, *inputs: Tensor) -> None:
    session = onnxruntime.InferenceSession(str(path))
    names = [value.name for value in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    actual = [torch.from_numpy(array) for array in session.run(None, feeds)]
    with torch.no_grad():
        expected = model(*(tensor.clone() for tensor in inputs))
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# --- In place ---


def add(x: Tensor) -> Tensor:
    y = x * 2
    y += 1
    return y * x


def relu(x: Tensor) -> Tensor:
    return F.relu(x * 2 - 1, inplace=True)


def several(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(x).clamp_(-1, 1)
    return y.sub_(y.sum())


def before_and_after(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y.cos()
    y.add_(1)
    return z, y.cos()


def router(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = x.softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(torch.float64), ids


def viewed_afterwards(x: Tensor) -> Tensor:
    y = torch.zeros_like(x).masked_fill_(x > 0, 1.0)
    return y[:, :2] + y.view(-1, 2, 3).sum(2)


def integers_added(x: Tensor) -> Tensor:
    return (x * 2).add_(x.argsort(-1))


def copied(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float64).copy_(x[:, :1])


def the_same_tensor(x: Tensor) -> Tensor:
    y = x * 2
    z = y.contiguous()
    y.add_(1)
    return z


def former_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 2
    z = y.add_(1)
    a = z.cos()
    b = y.mul_(3)
    return a, z, b


def slice_of_an_input(x: Tensor) -> Tensor:
    x[:, :2] = 0
    return x * 2


def to_input(x: Tensor) -> Tensor:
    return x.add_(1) * 2


FRESH = [
    add,
    former_results,
    relu,
    several,
    before_and_after,
    router,
    viewed_afterwards,
    integers_added,
    copied,
    the_same_tensor,
    slice_of_an_input,
    to_input,
]


@pytest.mark.parametrize("function", FRESH)
def test_in_place_on_a_tensor_of_its_own(tmp_path: Path, retraces, function) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    result = decompose(traced(model, torch.randn(3, 6)))
    assert not any(target._schema.is_mutable for target in operators(result))
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    check_numbers(path, model, torch.randn(5, 6))


# --- Slices that are filled ---


def halves(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 10)
    y[:, :4] = x[:, :4] * 2
    y[:, 4:] = x.cos()
    return y


def halves_from_the_end(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 10)
    y[:, -6:] = x.cos()
    y[:, :-6] = x[:, 2:]
    return y


def overlapping(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 6)
    y[:, 2:4] = x[:, :2]
    y[:, 3:5] = 1.0
    y[:, :1] = x[:, :1].double()
    y[:, 2:2] = 7.0
    return y


def read_in_between(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    y[:, 1:3] = 0
    z = y + 1
    y[:, 5:] = x[:, :1]
    return y, z


def two_dimensions(x: Tensor) -> Tensor:
    y = x.new_zeros(4, x.shape[0], 6)
    y[1:3] = x
    y[:, :, 2:5] = x[:, :3]
    y[2:, :, :] = 3.0
    return y


def everything(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:] = x + 1
    return y


def changed_afterwards(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 6)
    y[:, :2] = x[:, 4:]
    y += x
    y[:, 2:4] = 5
    return y


def joined_before(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.cat([x, x])
    rows[:, 1:3] = 0
    columns = torch.cat([x, x * 2], -1)
    columns[:, 6:] = x.cos()
    return rows, columns


FILLED = [
    joined_before,
    halves,
    halves_from_the_end,
    overlapping,
    read_in_between,
    two_dimensions,
    everything,
    changed_afterwards,
]


@pytest.mark.parametrize("function", FILLED)
def test_slices_that_are_filled(tmp_path: Path, retraces, function) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    result = decompose(traced(model, torch.randn(3, 6)))
    assert not any(target._schema.is_mutable for target in operators(result))
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    for rows in (5, 1, 0):
        check_numbers(path, model, torch.randn(rows, 6))


@pytest.mark.parametrize("function", [halves, halves_from_the_end])
def test_what_is_filled_whole_is_one_concatenation(tmp_path: Path, function) -> None:
    report = dynamo_moe.export(Call(function), torch.randn(3, 6), tmp_path / "m.onnx")
    assert report.nodes["Concat"] == 1
    assert not set(report.nodes) & {"ScatterND", "ConstantOfShape"}


# --- In place on shared memory ---


def every_other(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 6)
    y[:, ::2] = x[:, :3]
    return y


def rows_of_a_range(x: Tensor) -> Tensor:
    y = x * 2
    y[: x.shape[0] - 1] = 0
    return y


def slices_of_slices(x: Tensor) -> Tensor:
    y = x.new_zeros(4, x.shape[0], 6)
    y[1:3, :, 2:4] = 1.0
    return y


def slice_that_is_read(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 6)
    part = y[:, 1:4]
    part.copy_(x[:, :3])
    y[:, 2:3] = 9.0
    return part * 2


def slice_added_to(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2] += 1
    return y


def to_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0].add_(1)
    return y


def viewed_before(x: Tensor) -> Tensor:
    y = x * 2
    z = y.view(-1)
    y.add_(1)
    return z * 3


def split_before(x: Tensor) -> Tensor:
    y = x * 2
    first, _ = y.chunk(2, dim=1)
    y.add_(1)
    return first


def of_lower_precision(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float16).add_(x).float()


def taken_from_the_end(x: Tensor) -> Tensor:
    y = x * 2
    y[-1] = x[0]
    y[..., -2] -= y[..., 0]
    return y


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    columns = y.transpose(0, 1)
    columns[1] = 7.0
    y[:2].t().mul_(3)
    return columns, y


def through_halves(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    first, second = y.chunk(2, dim=1)
    for column in second.unbind(1):
        column.add_(first[:, 0])
    first.copy_(second * 2)
    return y, first, second


def read_between(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    z = y.view(-1, 2)
    before = z.cos()
    y[1:] += 1
    between = z.cos()
    z[:, 0] = 5.0
    return before, between, y, z


def broadcast(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 3, 6)
    y[:, 1] = x[:1]
    y[:, :, 2] = 4
    return y


def by_indices(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:4][x[:, 1:4] > 0] = 8.0
    y[:, 0].index_fill_(0, torch.tensor([1]), 3.0)
    y[1].masked_fill_(x[0] > 0, -1.0)
    return y


def column_by_column(x: Tensor) -> Tensor:
    """As transformers' code solves the triangular systems of chunks."""
    y = -x[:, None] * torch.eye(6)
    for i in range(1, 6):
        row = y[..., i, :i].clone()
        y[..., i, :i] = row + (row[..., None] * y[..., :i, :i].clone()).sum(-2)
    return y


def of_several_results(x: Tensor) -> tuple[Tensor, Tensor]:
    scores, ids = x.topk(3, dim=1)
    scores[:, 0] = 0
    ids[:, 1:].add_(1)
    return scores, ids


def converted(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape, dtype=torch.int64)
    y[:, 2:4] = x[:, :2] * 3
    y[:, 0] = 2.7
    return y.float()


def whole_of_a_flat_view(x: Tensor) -> Tensor:
    y = x * 2
    y.flatten().reshape(-1, 3)[:, 1] = 6.0
    return y


SHARED = [
    every_other,
    rows_of_a_range,
    slices_of_slices,
    slice_that_is_read,
    slice_added_to,
    to_view,
    viewed_before,
    split_before,
    of_lower_precision,
    taken_from_the_end,
    transposed,
    through_halves,
    read_between,
    broadcast,
    by_indices,
    column_by_column,
    of_several_results,
    converted,
    whole_of_a_flat_view,
]


@pytest.mark.parametrize("function", SHARED)
def test_views_of_what_is_changed(tmp_path: Path, retraces, function) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Call(function), torch.randn(3, 6), path)
    assert not retraces
    check_numbers(path, Call(function), torch.randn(3, 6))


@pytest.mark.parametrize("function", [read_between, through_halves, transposed])
def test_views_of_what_is_changed_at_any_size(tmp_path: Path, retraces, function) -> None:
    path, shapes = tmp_path / "m.onnx", ({0: "rows"},)
    dynamo_moe.export(Call(function), torch.randn(3, 6), path, dynamic_shapes=shapes)
    assert not retraces
    for rows in (3, 2, 8):
        check_numbers(path, Call(function), torch.randn(rows, 6))


def viewed_by_a_region_before(x: Tensor) -> Tensor:
    y = x * 2
    with torch.autocast("cpu", enabled=False):
        z = y.view(-1)
    y.add_(1)
    return z


def changed_in_a_region(x: Tensor) -> Tensor:
    y = x * 2
    with torch.autocast("cpu", enabled=False):
        y[:, 0].add_(1)
    return y


def in_another_order(x: Tensor) -> Tensor:
    """A copy in row-major order would not be changed by its flat view."""
    y = torch.zeros_like(x.t())
    y.t().reshape(-1).add_(1)
    return y + x.t()


def viewed_in_a_list(x: Tensor) -> Tensor:
    y = x * 2
    z, _ = torch.broadcast_tensors(y, x[0])
    y.add_(1)
    return z


def at_an_index_of_unknown_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    index = x[:, 0].argmax().item()
    row = y[index]
    y.add_(1)
    y[index] = 4
    return y, row * 1


def of_the_same_type(x: Tensor) -> Tensor:
    """Its schema does not say that the tensor itself may be the result."""
    y = x * 2
    y.type_as(x)[:, 0].add_(1)
    return y


def turned_in_place(x: Tensor) -> Tensor:
    y = x * 2
    z = y.view(-1)
    y.t_()
    return z * 1


@pytest.mark.parametrize(
    "function",
    [
        viewed_by_a_region_before,
        changed_in_a_region,
        in_another_order,
        viewed_in_a_list,
        at_an_index_of_unknown_sign,
        of_the_same_type,
        turned_in_place,
    ],
)
def test_in_place_that_needs_the_whole_program(tmp_path: Path, retraces, function) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    with pytest.raises(NeedsRetraceError):
        decompose(traced(model, torch.randn(3, 6)))
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert len(retraces) == 1
    check_numbers(path, model, torch.randn(3, 6))


def after_dropout(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.add_(1)
    z = F.dropout(y, training=False)
    a = z.cos()
    z.mul_(3)
    F.dropout(y, training=False).add_(x)
    return a, y, z


def dropout_that_is_changed_later(x: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's own decomposition copies the tensor, which its forward does not."""
    y = x * 2
    z = F.dropout(y, training=False)
    y.add_(1)
    return z + 0, y


def dropout_of_a_view(x: Tensor) -> Tensor:
    y = x * 2
    z = F.dropout(y[:, :2], training=False)
    y.add_(1)
    return z + y[:, :2]


def dropout_that_is_viewed(x: Tensor) -> Tensor:
    y = x * 2
    F.dropout(y, training=False).view(-1).add_(1)
    return y


def alpha_dropout(x: Tensor) -> Tensor:
    y = x * 2
    z = F.alpha_dropout(y, training=False)
    y.add_(1)
    return z


def feature_dropout(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.feature_dropout(y, 0.5, train=False)
    y.add_(1)
    return z


def dropout_in_a_region(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.dropout(x * 2, training=False)
    with torch.autocast("cpu", torch.bfloat16):
        z = F.dropout(y * 3, training=False)
    return F.dropout(z, training=False), y


def dropout_of_an_input(x: Tensor) -> Tensor:
    z = F.dropout(x, training=False)
    z.mul_(2)
    return x + z


@pytest.mark.parametrize(
    "function",
    [
        after_dropout,
        alpha_dropout,
        feature_dropout,
        dropout_in_a_region,
        dropout_that_is_changed_later,
        dropout_of_a_view,
        dropout_that_is_viewed,
        dropout_of_an_input,
    ],
)
def test_what_dropout_gives_is_changed(tmp_path: Path, retraces, function) -> None:
    model, path, x = Call(function), tmp_path / "m.onnx", torch.randn(5, 6)
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    expected = pytree.tree_leaves(model(x.clone()))
    actual = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})[-len(expected) :]
    for array, tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(array), tensor)


def turned(x: Tensor) -> Tensor:
    y = torch.view_as_complex((x * 2).view(-1, 3, 2))
    y.unsqueeze(0).mul_(2)
    return torch.view_as_real(y)


def test_a_complex_tensor_that_is_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dynamo_moe.ExportError, match="no translation to ONNX for complex tensors"):
        dynamo_moe.export(Call(turned), torch.randn(3, 6), tmp_path / "m.onnx")


def test_buffer_that_changes(tmp_path: Path, retraces) -> None:
    model, path, x = Counts(), tmp_path / "m.onnx", torch.randn(3, 6)
    model.total += 3
    dynamo_moe.export(model, x, path)
    assert not retraces
    # A file keeps nothing from call to call.
    for _ in range(2):
        check_numbers(path, copy.deepcopy(model), torch.randn(3, 6))


def test_buffer_whose_memory_another_one_shares() -> None:
    program = traced(Counts(), torch.randn(3, 6))
    graph = program.graph_module.graph
    total = next(iter(graph.nodes))
    with graph.inserting_after(total):
        half = graph.placeholder("half")
    half.meta["val"] = total.meta["val"][:3]
    with pytest.raises(NeedsRetraceError, match="is changed, and shares its memory"):
        decompose(program)


def test_a_constant_needs_the_whole_program() -> None:
    """It is an attribute of a module that the program's graph does not have."""
    added = make_fx(lambda x: x * torch.tensor(2.0))(torch.randn(3)).graph
    graph = fx.Graph()
    x = graph.placeholder("x")
    like = graph.call_function(torch.ops.aten.neg.default, (x,))
    with pytest.raises(NeedsRetraceError, match=r"aten\.neg\.default makes a constant"):
        add_graph(graph, like, added, [x])
    assert list(graph.nodes) == [x, like]


# --- Control flow and regions ---


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x * 2, (x,))


def loop(x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    _, y = while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.zeros((), dtype=torch.int64), x)
    )
    return y


def a_scan(x: Tensor) -> Tensor:
    """Its body has operators that have no translation, writes in place and promotes dtypes."""
    from torch._higher_order_ops.scan import scan

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = state + F.silu(row)
        return state, F.logsigmoid(state.clone().mul_(2)) + torch.arange(6)

    return scan(step, x.new_zeros(6), x, dim=0)[1]


def nested(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 3, lambda x: x.sin(), F.logsigmoid, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x * 2, (x,))


@pytest.mark.parametrize("function", [branches, loop, a_scan, nested])
def test_control_flow(tmp_path: Path, retraces, function) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    for x in (torch.rand(5, 6), -torch.rand(5, 6), torch.rand(1, 6) / 8):
        check_numbers(path, model, x)


def test_control_flow_without_a_translation() -> None:
    program = traced(Call(branches), torch.randn(3, 6))
    with pytest.raises(NeedsRetraceError, match="cond is control flow"):
        decomposed(program.graph_module, lambda target: False, {}, mode_of(program))


def without_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    with torch.no_grad():
        y = y + 1
        first, second = y.cos(), y.sin()
    return first + x, second


def in_full_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = F.relu(x.float() * 2, inplace=True)
    return y + 1


@pytest.mark.parametrize("function", [without_gradients, in_full_precision])
def test_regions_are_inlined(tmp_path: Path, retraces, function) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    program = traced(model, torch.randn(3, 6))
    regions = set(targets(program.graph_module)) & set(decomposition._REGIONS)
    assert regions
    result = decompose(program)
    assert not set(targets(result)) & set(decomposition._REGIONS)
    assert not any(node.op == "get_attr" for node in result.graph.nodes)
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    check_numbers(path, model, torch.randn(5, 6))


# --- Operators without a translation ---


def pooled(x: Tensor) -> Tensor:
    # Transposed to channels last, which PyTorch decomposes into an in-place change.
    return F.adaptive_avg_pool1d(x.view(-1, 3, 2).mT, 1)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (6,)) + F.cosine_similarity(x, x.flip(0), dim=1)[:, None]


def spread(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.std(0), torch.var_mean(x, 0)[0]


def shifted(x: Tensor) -> Tensor:
    return x.diff(dim=0).square()


def chosen(x: Tensor) -> Tensor:
    return F.hardshrink(x, 0.2) + F.pairwise_distance(x, x * 2)[:, None]


UNTRANSLATED = [
    (pooled, aten.adaptive_avg_pool1d.default),
    (normed, aten.rms_norm.default),
    (spread, aten.std.dim),
    (shifted, aten.diff.default),
    (chosen, aten.pairwise_distance.default),
]


@pytest.mark.parametrize(("function", "operator"), UNTRANSLATED)
def test_operators_without_a_translation(tmp_path: Path, retraces, function, operator) -> None:
    model, path = Call(function), tmp_path / "m.onnx"
    program = traced(model, torch.randn(3, 6))
    assert operator in targets(program.graph_module)
    result = decompose(program)
    assert operator not in targets(result)
    for node in result.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert "stack_trace" in node.meta, node
    dynamo_moe.export(model, torch.randn(3, 6), path)
    assert not retraces
    for rows in (2, 9):
        check_numbers(path, model, torch.randn(rows, 6))


def test_sizes_stay_symbolic() -> None:
    result = decompose(traced(Call(normed), torch.randn(3, 6)))
    *_, output = result.graph.nodes
    size, width = output.args[0][0].meta["val"].shape
    assert isinstance(size, torch.SymInt)
    assert width == 6


def casts(x: Tensor) -> tuple[Tensor, ...]:
    same = x.to(x.dtype).to("cpu").to(dtype=torch.float32, device="cpu")
    return same * 2, x.to(torch.float64).to(torch.int64), (x > 0).to(x)


def other_names(x: Tensor) -> tuple[Tensor, ...]:
    some, others = x > 0, x < 1
    combined = (some & others) | (some ^ others)
    return combined, torch.min(x, -x), torch.max(x, x.mean()), torch.divide(x, 2)


@pytest.mark.parametrize("function", [casts, other_names])
def test_one_operator_instead_of_another_takes_no_trace(
    tmp_path: Path, retraces, monkeypatch: pytest.MonkeyPatch, function
) -> None:
    monkeypatch.delattr(tracer, "make_fx")
    dynamo_moe.export(Call(function), torch.randn(5, 6), tmp_path / "m.onnx")
    assert not retraces
    check_numbers(tmp_path / "m.onnx", Call(function), torch.randn(3, 6))


def kept_apart(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y.to(torch.float32, copy=True)
    y += 1
    return y, z


def test_a_copy_of_the_same_dtype_is_one(tmp_path: Path) -> None:
    dynamo_moe.export(Call(kept_apart), torch.randn(5, 6), tmp_path / "m.onnx")
    check_numbers(tmp_path / "m.onnx", Call(kept_apart), torch.randn(3, 6))


def test_equal_arguments_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.rms_norm(x, (6,))
        return F.rms_norm(x[:, :4], (4,)) + F.rms_norm(x.transpose(0, 1)[:4].transpose(0, 1), (4,))

    count = 0
    original = tracer.make_fx

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    program = traced(Call(repeated), torch.randn(3, 6))
    monkeypatch.setattr(tracer, "make_fx", counted)
    result = decompose(program)
    assert count == 2
    x = torch.randn(4, 6)
    torch.testing.assert_close(result(x)[0], repeated(x))


@pytest.mark.parametrize("function", [several, router, without_gradients, pooled])
def test_the_program_is_left_as_it_was(function) -> None:
    program = traced(Call(function), torch.randn(3, 6))
    code = program.graph_module.code
    values = [id(node.meta.get("val")) for node in program.graph.nodes]
    decompose(program)
    assert program.graph_module.code == code
    assert [id(node.meta.get("val")) for node in program.graph.nodes] == values
    program.graph_module.graph.lint()


# --- The interface to PyTorch ---


class Named(nn.Module):
    """Arguments whose names are Python's own, or similar to its keywords."""

    def forward(self, input: Tensor, type: Tensor, all: Tensor) -> Tensor:
        return F.relu(input * type, inplace=True) + all


def test_arguments_with_names_of_python(tmp_path: Path, retraces) -> None:
    model, path = Named(), tmp_path / "m.onnx"
    dynamo_moe.export(model, tuple(torch.randn(3, 6) for _ in range(3)), path)
    assert not retraces
    assert [value.name for value in onnx.load(path).graph.input] == ["input", "type", "all"]
    check_numbers(path, model, *(torch.randn(5, 6) for _ in range(3)))


def a_moe_model() -> tuple[nn.Module, Tensor, Tensor]:
    model = mlp_model(layers=1)
    dynamo_moe.convert(model)
    return model, torch.randn(2, 5, 16), torch.randn(3, 5, 16)


def a_transformer() -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return layer.eval(), torch.randn(2, 5, 16), torch.randn(3, 5, 16)


def a_router() -> tuple[nn.Module, Tensor, Tensor]:
    return Call(router), torch.randn(3, 6), torch.randn(5, 6)


def an_untranslated() -> tuple[nn.Module, Tensor, Tensor]:
    return Call(chosen), torch.randn(3, 6), torch.randn(5, 6)


def unknown_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "KNOWN_VERSIONS", ((2, 0), (2, 1)))


def failing_steps(patch: pytest.MonkeyPatch) -> None:
    def fail(program: ExportedProgram, opset: int) -> None:
        raise RuntimeError("moved")

    patch.setattr(translate, "_translate_in_steps", fail)


@known
@pytest.mark.each_value
@pytest.mark.parametrize("hinder", [unknown_version, failing_steps])
@pytest.mark.parametrize("make", [a_moe_model, a_transformer, a_router, an_untranslated])
def test_both_ways_lead_to_the_same_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retraces, make, hinder
) -> None:
    torch.manual_seed(0)
    model, example, other = make()
    paths = [tmp_path / name for name in ("steps.onnx", "torch.onnx")]
    in_steps = dynamo_moe.export(model, example, paths[0])
    assert not retraces
    hinder(monkeypatch)
    by_torch = dynamo_moe.export(model, example, paths[1])
    assert len(retraces) == 1
    assert in_steps.nodes == by_torch.nodes
    if make is not a_moe_model:
        for path in paths:
            check_numbers(path, model, other)
    else:
        for path in paths:
            assert dynamo_moe.verify(path, model, [(other,)]).passed


def test_signatures_are_derived_once_and_nothing_is_left_behind() -> None:
    derived: list[str] = []
    original = vars(OpSignature)["from_op_schema"]

    def counting(schema: onnx.defs.OpSchema) -> OpSignature:
        derived.append(schema.name)
        return original.__get__(None, OpSignature)(schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpSignature, "from_op_schema", staticmethod(counting))
        ours = vars(OpSignature)["from_op_schema"]
        program = traced(Call(lambda x: x * 2 + x * 3), torch.randn(3, 6))
        trials = SizeTrials(DynamicExample((torch.randn(3, 6),), {}, None, []))
        translate._translate_in_steps(program, 20, trials)
        assert vars(OpSignature)["from_op_schema"] is ours
    assert derived.count("Mul") == 1
    assert vars(OpSignature)["from_op_schema"] is original


def test_one_tensor_twice_is_two_inputs(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 + b

    x, path = torch.randn(3, 6), tmp_path / "m.onnx"
    dynamo_moe.export(Sum(), (x,), path, kwargs={"b": x})
    assert [value.name for value in onnx.load(path).graph.input] == ["a", "b"]
    check_numbers(path, Sum(), torch.randn(5, 6), torch.randn(5, 6))


@pytest.mark.parametrize("value", [False, True, 1])
def test_masks_that_are_filled(tmp_path: Path, value: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return (x > 0.5).masked_fill(x[:, :1] < 0, value)

    path, x = tmp_path / "model.onnx", torch.randn(7, 9)
    dynamo_moe.export(Call(function), x, path)
    assert dynamo_moe.verify(path, Call(function), [(x,)]).passed
