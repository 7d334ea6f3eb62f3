"""Changes in place, of tensors and of views of them: files by hand, random programs by PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import dynamo_moe
from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.tolerances import tolerance_for
from dynamo_moe.tracing.nodes import NeedsRetraceError
from traced_programs import Call, check_numbers, decompose, operators, router, several, traced

pytest_plugins = ("traced_programs",)

aten = torch.ops.aten


class Counts(nn.Module):
    """A module that changes its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


# --- Tensors of their own ---


def add(x: Tensor) -> Tensor:
    y = x * 2
    y += 1
    return y * x


def relu(x: Tensor) -> Tensor:
    return F.relu(x * 2 - 1, inplace=True)


def before_and_after(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y.cos()
    y.add_(1)
    return z, y.cos()


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


def bits(x: Tensor) -> tuple[Tensor, Tensor]:
    mask, numbers = x > 0, (x * 8).to(torch.int64).abs()
    mask &= x < 1
    mask |= x > 2
    mask ^= x > 3
    numbers <<= 1
    numbers >>= torch.tensor(2)
    numbers &= 13
    numbers |= numbers + 2
    numbers ^= 5
    return x * mask, numbers


FRESH = [
    add,
    bits,
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


def turned_by_einsum(x: Tensor) -> Tensor:
    """Its schema says that the result is a new tensor, where it is a view."""
    y = x * 2
    z = torch.einsum("ij->ji", y)
    y.add_(1)
    return z * 1


def changed_by_einsum(x: Tensor) -> Tensor:
    y = x * 2
    torch.einsum("ij->ij", y)[:, 0] = 3
    return y


def given_dimensions(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, z = x[0] * 2, x[1] * 3
    a, b = torch.atleast_2d([y, z])
    y.add_(1)
    b.mul_(2)
    return a * 1, b, z


@pytest.mark.parametrize(
    "function",
    [
        turned_by_einsum,
        changed_by_einsum,
        given_dimensions,
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


# --- Changes that are refused, or that a first trace does not see ---


def overlapping_windows(x: Tensor) -> Tensor:
    y = x * 2
    y.unfold(1, 3, 1).mul_(2)
    return y


def windows_with_gaps(x: Tensor) -> Tensor:
    """PyTorch makes zeros of the gaps."""
    y = x * 2
    y.unfold(1, 2, 3).transpose(0, 1)[0].add_(1)
    return y


@pytest.mark.parametrize("function", [overlapping_windows, windows_with_gaps])
@pytest.mark.parametrize("shapes", [None, ({0: "rows"},)])
def test_windows_that_are_changed_are_refused(tmp_path: Path, function, shapes) -> None:
    with pytest.raises(dynamo_moe.ExportError, match=r"unfold gives at .*: y\.unfold\(1"):
        dynamo_moe.export(
            Call(function), torch.randn(3, 6), tmp_path / "m.onnx", dynamic_shapes=shapes
        )


def windows_that_are_read(x: Tensor) -> Tensor:
    y = x * 2
    windows = y.unfold(1, 3, 1)
    y.add_(1)
    return (windows * 1).mul_(2)


def test_windows_of_what_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Call(windows_that_are_read), torch.randn(3, 6), path)
    check_numbers(path, Call(windows_that_are_read), torch.randn(5, 6))


class Data(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def data_of_a_weight(m: Any, x: Tensor) -> Tensor:
    return x * m.weight.data + x.data.sum()


def changed_by_data(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y + 1
    y.data[:, 0].add_(1)
    m.weight.data[0] = 3.0
    return y + z, x * m.weight


@pytest.mark.parametrize("function", [data_of_a_weight, changed_by_data])
def test_data_is_the_tensor_itself(tmp_path: Path, function) -> None:
    model, path = Data(function), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(3, 6), path, dynamic_shapes=({0: "rows"},))
    assert torch.equal(model.weight, torch.ones(6))
    check_numbers(path, model, torch.randn(5, 6))


def changed_weight(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        m.weight.detach().mul_(2)
    return x * m.weight if x.shape[0] > 9 else x * 2 * (m.weight / 2)


def test_a_trial_changes_no_weight(tmp_path: Path) -> None:
    """The branch is tried at other sizes, by running the model."""
    model, path = Data(changed_weight), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(3, 6), path, dynamic_shapes=({0: "rows"},))
    assert torch.equal(model.weight, torch.ones(6))
    for rows in (3, 12):
        check_numbers(path, Data(changed_weight), torch.randn(rows, 6))


def new_data(m: Any, x: Tensor) -> Tensor:
    m.weight.data = m.weight.data * 2
    return x * m.weight


def data_in_a_branch(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.data + 1, torch.clone, (x * 2,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (new_data, r"\.data is assigned at .*: m\.weight\.data = m\.weight\.data \* 2"),
        (data_in_a_branch, r"a tensor's \.data is read within a loop or a branch"),
    ],
)
def test_data_that_no_trace_follows_is_refused(tmp_path: Path, function, message) -> None:
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(Data(function), torch.randn(3, 6), tmp_path / "m.onnx")


class SharedBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Buffer(torch.ones(6))
        self.part = nn.Buffer(self.whole[:3])

    def forward(self, x: Tensor) -> Tensor:
        self.part.add_(1)
        return x + self.whole


def test_buffers_that_share_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dynamo_moe.ExportError, match=r"part.* is changed, and shares its memory"):
        dynamo_moe.export(SharedBuffers(), torch.randn(3, 6), tmp_path / "m.onnx")


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


# --- Running statistics, which norms in training change ---


class Normed(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6, momentum=0.3)
        self.norm.running_mean = torch.randn(6)
        self.norm.running_var = torch.rand(6) + 1
        self.function = function

    def forward(self, x: Tensor) -> Any:
        self.norm.train()
        return self.function(self, x)


def statistics_of_two_batches(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    variance = m.norm.running_var.view(2, 3)
    y = m.norm(m.norm(x) * 3)
    return y, m.norm.running_mean * 2, variance * 2, m.norm.num_batches_tracked + 0


def then_in_evaluation(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.norm(x.half())
    m.norm.eval()
    return y.float(), m.norm(x)


def of_instances(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    instances = x[:, :, None] * torch.arange(1.0, 5.0)
    y = F.instance_norm(instances, m.norm.running_mean, m.norm.running_var, use_input_stats=True)
    return y, m.norm.running_mean + 0, m.norm.running_var + 0


def of_a_program_that_is_traced_again(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.norm(x)
    return y, (x * 2).t_(), m.norm.running_mean + m.norm.running_var


def unread_in_a_region(m: Any, x: Tensor) -> Tensor:
    """PyTorch's exporter makes a norm in evaluation of it."""
    with torch.autocast("cpu", torch.bfloat16):
        return m.norm(x).float()


@pytest.mark.parametrize(
    "function",
    [
        statistics_of_two_batches,
        then_in_evaluation,
        of_instances,
        of_a_program_that_is_traced_again,
        unread_in_a_region,
    ],
)
def test_running_statistics(tmp_path: Path, function) -> None:
    path, shapes = tmp_path / "m.onnx", ({0: "rows"},)
    dynamo_moe.export(Normed(function), torch.randn(3, 6), path, dynamic_shapes=shapes)
    for rows in (3, 2, 8):
        model, x = Normed(function), torch.randn(rows, 6)
        feeds = {"x": x.numpy()}
        actual = [*map(torch.from_numpy, onnxruntime.InferenceSession(path).run(None, feeds))]
        expected = [tensor.detach() for tensor in pytree.tree_leaves(model(x))]
        bounds = tolerance_for({torch.float16} if function is then_in_evaluation else {x.dtype})
        torch.testing.assert_close(actual, expected, rtol=bounds.max, atol=bounds.max)


def read_after_a_region(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.batch_norm(x, m.norm.running_mean, m.norm.running_var, training=True)
    return y + m.norm.running_mean


def read_after_a_branch(m: Any, x: Tensor) -> Tensor:
    def normed(x: Tensor) -> Tensor:
        return F.batch_norm(x, m.norm.running_mean, m.norm.running_var, training=True)

    return torch.cond(x.sum() > 0, normed, torch.clone, (x,)) + m.norm.running_mean


@pytest.mark.parametrize("function", [read_after_a_region, read_after_a_branch])
def test_statistics_of_a_region_that_are_read_are_refused(tmp_path: Path, function) -> None:
    with pytest.raises(dynamo_moe.ExportError, match="statistics within a branch, a loop or a"):
        dynamo_moe.export(Normed(function), torch.randn(3, 6), tmp_path / "m.onnx")


# --- Random programs ---

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


@pytest.mark.skipif(tracer.missing() is not None, reason="needs a version of PyTorch that is known")
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
