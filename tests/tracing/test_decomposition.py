"""Decomposition operator by operator; as fallback, PyTorch's own of the whole program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx_ir.schemas import OpSignature
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.tracing import decomposition, translate
from dynamo_moe.tracing.decomposition import decomposed
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.fixed_sizes import SizeTrials
from dynamo_moe.tracing.nodes import NeedsRetraceError, add_graph
from small_models import mlp_model
from traced_programs import (
    Call,
    check_numbers,
    decompose,
    mode_of,
    router,
    several,
    targets,
    traced,
)

pytest_plugins = ("traced_programs",)

aten = torch.ops.aten


known = pytest.mark.skipif(
    tracer.missing() is not None, reason="needs a version of PyTorch that is known"
)


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


def constants(x: Tensor) -> Tensor:
    """PyTorch's exporter writes none of them."""
    from torch._higher_order_ops.scan import scan

    def branch(x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2, 3, 4, 5, 6])
        weights[0] = 7
        return x * weights

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return state + row * torch.tensor([1.0, 2, 3, 4, 5, 6]), state + torch.tensor(0.5)

    branched = torch.cond(x.sum() > 0, branch, lambda x: x - torch.tensor(2.0), (x,))
    return branched + scan(step, x.new_zeros(6), x, dim=0)[1]


@pytest.mark.parametrize("function", [branches, loop, a_scan, nested, constants])
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
        model, x = Call(lambda x: x * 2 + x * 3), torch.randn(3, 6)
        program = traced(model, x)
        trials = SizeTrials(model, DynamicExample((x,), {}, None, []))
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
