"""``op_from_function``: autograd Functions of both styles, as operators and as nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxscript
import pytest
import torch
from onnxscript import opset18, script
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe import op_from_function

_opset = onnxscript.values.Opset("functions", 1)


class Leaky(torch.autograd.Function):
    """Old style, with a symbolic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, keep: bool = True) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, x * slope)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, dy, dy * ctx.slope), None, None

    @staticmethod
    def symbolic(g: Any, x: Any, slope: float, keep: bool) -> Any:
        y = g.op(
            "functions::Leaky", x, alpha_f=float(slope), keep_i=int(keep), mode_s="fast",
            plugin_version_s="3",
        )  # fmt: skip
        y.setType(x.type())
        return y


class Polar(torch.autograd.Function):
    """New style, with several results, one of which is saved."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.hypot(x, y), torch.atan2(y, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, dr: Tensor, dphi: Tensor) -> tuple[Tensor, Tensor]:
        x, y, r = ctx.saved_tensors
        return dr * x / r - dphi * y / r**2, dr * y / r + dphi * x / r**2

    @staticmethod
    def symbolic(g: Any, x: Any, y: Any) -> Any:
        return g.op("functions::Polar", y, x, outputs=2)


class Reversed(torch.autograd.Function):
    """Returns its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -dy


leaky = op_from_function(Leaky, "functions::leaky")
polar = op_from_function(Polar, "functions::polar")
reverse = op_from_function(Reversed, "functions::reverse")


@script(_opset)
def leaky_body(x, alpha: float):
    slope = opset18.CastLike(alpha, x)
    zero = opset18.CastLike(0.0, x)
    return opset18.Where(opset18.Greater(x, zero), x, opset18.Mul(x, slope))


@pytest.mark.parametrize("args", [(0.25,), (0.25, False), (0.25, True)], ids=str)
def test_values_and_gradients_in_the_old_style(args: tuple[Any, ...]) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    full = (*args, True)[:2]
    assert torch.equal(leaky(x, *args), Leaky.apply(x, *full))
    (expected,) = torch.autograd.grad(Leaky.apply(x, *full).square().sum(), x)
    (found,) = torch.autograd.grad(leaky(x, *args).square().sum(), x)
    assert torch.equal(found, expected)
    assert torch.autograd.gradcheck(lambda x: leaky(x, *args), (x,))


def test_values_and_gradients_in_the_new_style() -> None:
    x, y = (torch.rand(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for found, expected in zip(polar(x, y), Polar.apply(x, y), strict=True):
        assert torch.equal(found, expected)
    assert torch.autograd.gradcheck(polar, (x, y))


def test_a_result_that_is_the_argument() -> None:
    x = torch.randn(3, requires_grad=True)
    y = reverse(x)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, -torch.ones(3))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (leaky, (torch.randn(3, 4, requires_grad=True), 0.5, False)),
        (polar, (torch.rand(4, requires_grad=True), torch.rand(4))),
        (reverse, (torch.randn(3, requires_grad=True),)),
    ],
    ids=["old", "new", "identity"],
)
def test_opcheck(op: dynamo_moe.FunctionOp, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.op, args)


def test_what_symbolic_declares() -> None:
    assert leaky.declaration == {
        "domain": "functions",
        "op_type": "Leaky",
        "inputs": ["x"],
        "attributes": {"slope": "alpha", "keep": "keep"},
        "plugin_version": "3",
        "constants": {"mode": "fast"},
    }
    assert polar.declaration == {
        "domain": "functions",
        "op_type": "Polar",
        "inputs": ["y", "x"],
        "attributes": {},
    }
    assert reverse.declaration == {}


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), 0.25, False)


def test_torch_export_looks_into_a_function(tmp_path: Path) -> None:
    report = dynamo_moe.export(Model(Leaky.apply), torch.randn(2, 8), tmp_path / "m.onnx")
    assert "Where" in report.nodes
    assert not any("::" in name for name in report.nodes)


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_the_operator_is_one_node(tmp_path: Path, target: str) -> None:
    dynamo_moe.register_op(leaky.op, **leaky.declaration, body=leaky_body)
    path = tmp_path / "m.onnx"
    model = Model(leaky).eval()
    dynamo_moe.export(model, torch.randn(2, 8), path, target=target)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    if target == "plugin":
        (node,) = [node for node in proto.graph.node if node.domain == "functions"]
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert found == {
            "alpha": 0.25,
            "keep": 0,
            "mode": b"fast",
            "plugin_version": b"3",
            "plugin_namespace": b"",
        }
    dynamo_moe.verify(path, model, [(torch.randn(n, 8),) for n in (1, 5)])


def test_several_results_in_the_order_of_symbolic(tmp_path: Path) -> None:
    dynamo_moe.register_op(polar.op, **polar.declaration)

    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            r, phi = polar(x, y)
            return r + phi

    path = tmp_path / "m.onnx"
    dynamo_moe.export(Both(), (torch.rand(3), torch.rand(3)), path)
    (node,) = [node for node in onnx.load(path).graph.node if node.op_type == "Polar"]
    assert list(node.input) == ["y", "x"]
    assert len(node.output) == 2


def test_apply_can_be_replaced() -> None:
    class Own(Leaky):
        pass

    own = op_from_function(Own, "functions::own")
    Own.apply = own
    x = torch.randn(3)
    assert torch.equal(Own.apply(x, 0.5), Leaky.apply(x, 0.5))


def test_schema_and_fake_of_ones_own() -> None:
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, times):
            return torch.from_numpy(x.numpy() * times)

    def fake(x: Tensor, times: int) -> Tensor:
        return torch.empty_like(x)

    op = op_from_function(
        ByNumpy, "functions::by_numpy", schema="(Tensor x, int times) -> Tensor", fake=fake
    )
    assert torch.equal(op(torch.ones(2), 3), torch.full((2,), 3.0))
    torch.library.opcheck(op.op, (torch.ones(2), 3), test_utils=("test_schema", "test_faketensor"))


class Doubled(torch.autograd.Function):
    """Saves a result, marks another, and checks whether gradients are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float = 2.0) -> tuple[Tensor, Tensor]:
        y = torch.exp(x * times)
        size = x.sum()
        ctx.mark_non_differentiable(size)
        ctx.times = times
        if ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]:
            ctx.save_for_backward(y)
        return y, size

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dsize: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return dy * y * ctx.times, None


doubled = op_from_function(Doubled, "functions::doubled")


def test_what_forward_says_of_its_results() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert [y.requires_grad for y in doubled(x)] == [True, False]
    assert torch.autograd.gradcheck(lambda x: doubled(x)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: doubled(x)[0], (x,))
    assert not any(y.requires_grad for y in doubled(x.detach()))


def test_arguments_by_name() -> None:
    x = torch.randn(3)
    assert torch.equal(doubled(x, times=3.0)[0], torch.exp(x * 3))


def test_results_that_share_memory() -> None:
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = (x * 2).chunk(2, -1)
            return first, second

        @staticmethod
        def backward(ctx: Any, dfirst: Tensor, dsecond: Tensor) -> Tensor:
            return 2 * torch.cat([dfirst, dsecond], -1)

    halves = op_from_function(Halves, "functions::halves")
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(torch.cat(halves(x), -1), x * 2)
    assert torch.autograd.gradcheck(halves, (x,))
    torch.library.opcheck(halves.op, (x,))


class Drop(torch.autograd.Function):
    """Draws random numbers, and saves what depends on them beside the result."""

    @staticmethod
    def forward(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        kept = (torch.rand_like(x) > p).to(x.dtype)
        return x * kept, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dkept: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.saved_tensors[0], None


def test_random_numbers_beside_a_setup_context() -> None:
    drop = op_from_function(Drop, "functions::drop")
    x = torch.ones(64, requires_grad=True)
    y, _ = drop(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y)


# Functions that are refused.


@pytest.mark.parametrize("wanted", [True, False], ids=["gradients", "none"])
def test_random_numbers_without_a_setup_context(wanted: bool) -> None:
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = torch.rand_like(x) > p if p else torch.ones_like(x)
        ctx.save_for_backward(kept)
        return x * kept

    drop = op_from_function(function(forward), f"functions::old_drop_{wanted}".lower())
    x = torch.ones(20, requires_grad=wanted)
    assert torch.equal(drop(x, 0.0), x)
    with pytest.raises(ValueError, match=r"Refused\.forward draws random numbers.*setup_context"):
        drop(x, 0.5)


def function(forward: Any, symbolic: Any = None, **more: Any) -> type[torch.autograd.Function]:
    members: dict[str, Any] = {"forward": staticmethod(forward), **more}
    if symbolic is not None:
        members["symbolic"] = staticmethod(symbolic)
    return type("Refused", (torch.autograd.Function,), members)


def plain(ctx: Any, x: Tensor, slope: float) -> Tensor:
    return x * slope


def untyped(ctx: Any, x: Tensor, slope) -> Tensor:
    return x * slope


def no_result(ctx: Any, x: Tensor):
    return x


def number(ctx: Any, x: Tensor) -> int:
    return 3


def many(ctx: Any, *xs: Tensor) -> Tensor:
    return xs[0]


def odd(ctx: Any, x: Tensor, options: dict) -> Tensor:
    return x


def dirty(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.add_(1)


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (untyped, TypeError, "argument 'slope' is not annotated: annotate it"),
        (no_result, TypeError, "result is not annotated"),
        (number, TypeError, "must return tensors.*returns int"),
        (many, TypeError, r"takes \*xs: .*; an operator takes a fixed number"),
        (odd, TypeError, r"Refused\.forward: .*options"),
        (dirty, ValueError, r"calls ctx\.mark_dirty: it changes its arguments"),
    ],
)
def test_forwards_that_are_refused(forward: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        op_from_function(function(forward), "functions::refused")


def two_nodes(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::Second", g.op("functions::First", x), slope_f=slope)


def constant_input(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, 3.0, slope_f=slope)


def computed(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope + 1)


def wrong_kind(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_i=slope)


def tensor_attribute(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_t=torch.tensor(slope))


def standard(g: Any, x: Any, slope: float) -> Any:
    return g.op("LeakyRelu", x, alpha_f=slope)


def looks(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, rank_i=x.rank)


def other_calls(g: Any, x: Any, slope: float) -> Any:
    return g.constant(slope)


def two_results(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope, outputs=2)


def depends(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, **({"small_i": 1} if slope < 1 else {"large_i": 1}))


def branch(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope, half_i=0 if slope > 0.5 else 1)


def special_value(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope if slope != 0.25 else 7.0)


def other_name(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One" if slope else "functions::Zero", x, slope_f=slope)


def given_twice(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope, again_f=slope)


def sizes_of_a_type(g: Any, x: Any, slope: float) -> Any:
    return g.op("functions::One", x, slope_f=slope, rank_i=len(x.type().sizes()))


@pytest.mark.parametrize(
    ("symbolic", "message"),
    [
        (branch, "compares 'slope'.*symbolic=False"),
        (special_value, "compares 'slope'"),
        (other_name, "compares 'slope'"),
        (given_twice, "gives 'slope' to the attributes slope, again; it must be one"),
        (sizes_of_a_type, r"asks for x\.type\(\)\.sizes"),
        (two_nodes, r"must make one node, it makes 2 \(functions::First, functions::Second\)"),
        (constant_input, "gives its node the inputs x, 3.0; the operator has the tensors x"),
        (computed, "computes the attribute 'slope' from 'slope'"),
        (wrong_kind, "'slope' as _i, but the argument 'slope' is float: annotate it int"),
        (tensor_attribute, "gives the attribute 'slope_t'; only _f, _i and _s"),
        (standard, "makes 'LeakyRelu', which is not an operator of your own"),
        (looks, r"asks for x\.rank"),
        (other_calls, r"uses g\.constant; only g\.op"),
        (two_results, "must return the 1 results of its node.*has 2"),
        (depends, "compares 'slope'"),
    ],
)
def test_symbolics_that_are_refused(symbolic: Any, message: str) -> None:
    refused = function(plain, symbolic)
    with pytest.raises(ValueError, match=message):
        op_from_function(refused, "functions::refused")
    op_from_function(refused, f"functions::{symbolic.__name__}", symbolic=False)


def optional(
    ctx: Any, x: Tensor, bias: Tensor | None, slope: float | None, sizes: list[int]
) -> Tensor:
    return x


def follows_none(g: Any, x: Any, bias: Any, slope: float | None, sizes: list[int]) -> Any:
    if len(sizes) > 1:
        raise NotImplementedError("no more than one size")
    inputs = [x] if bias is None else [x, bias]
    given = {} if slope is None else {"slope_f": float(slope)}
    y = g.op("functions::Optional", *inputs, sizes_i=sizes, **given)
    return y.setType(x.type().with_sizes([1]))


def default_of_its_own(g: Any, x: Any, bias: Any, slope: float | None, sizes: list[int]) -> Any:
    slope = 1.0 if slope is None else slope
    return g.op("functions::Optional", x, bias, slope_f=slope, sizes_i=sizes)


def flag_of_an_input(g: Any, x: Any, bias: Any, slope: float | None, sizes: list[int]) -> Any:
    flag = int(bias is not None)
    return g.op("functions::Optional", x, bias, slope_f=slope, sizes_i=sizes, bias_i=flag)


def test_optional_arguments_of_symbolic() -> None:
    made = op_from_function(function(optional, follows_none), "functions::follows_none")
    assert made.declaration["inputs"] == ["x", "bias"]
    assert made.declaration["attributes"] == {"slope": "slope", "sizes": "sizes"}
    for symbolic, message in (
        (default_of_its_own, "another node where 'slope' is None; .* without 'slope'"),
        (flag_of_an_input, "another node where 'bias' is None; .* without 'bias'"),
    ):
        with pytest.raises(ValueError, match=message):
            op_from_function(function(optional, symbolic), "functions::refused")


def test_a_symbolic_that_cannot_take_none() -> None:
    def symbolic(g: Any, x: Any, bias: Any, slope: float | None, sizes: list[int]) -> Any:
        inputs = [x] if bias is None else [x, bias]
        return g.op("functions::Given", *inputs, slope_f=float(slope), sizes_i=sizes)

    made = op_from_function(function(optional, symbolic), "functions::given")
    assert made.declaration["attributes"] == {"slope": "slope", "sizes": "sizes"}


def test_flags_of_symbolic() -> None:
    def forward(ctx: Any, x: Tensor, first: bool, second: bool) -> Tensor:
        return x

    def follows(g: Any, x: Any, first: bool, second: bool) -> Any:
        return g.op("functions::Flags", x, first_i=int(first), other_i=1 if second else 0)

    def branches(g: Any, x: Any, first: bool, second: bool) -> Any:
        return g.op("functions::First" if first else "functions::Second", x)

    made = op_from_function(function(forward, follows), "functions::flags")
    assert made.declaration["attributes"] == {"first": "first", "second": "other"}
    with pytest.raises(ValueError, match="makes other nodes for other 'first'"):
        op_from_function(function(forward, branches), "functions::refused")


def test_a_forward_that_changes_its_argument_unsaid() -> None:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(2)

    op = op_from_function(function(forward), "functions::in_place")
    with pytest.raises(ValueError, match="forward changes its arguments"):
        op(torch.ones(2))


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.autograd\.Function class"):
        op_from_function(torch.relu, "functions::relu")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("(Tensor x, *, float slope) -> Tensor", "'slope' must not be keyword-only"),
        ("(Tensor(a!) x, float slope) -> Tensor", "the schema says that 'x' changes"),
        ("(Tensor x, float slope) -> ()", "it returns nothing"),
    ],
)
def test_schemas_that_are_refused(schema: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        op_from_function(function(plain), "functions::refused", schema=schema)
