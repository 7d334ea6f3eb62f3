"""Both operators under torch.compile, torch.export and autocast."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from moe_cases import OPS, Case, assert_matches, make_case

both_ops = pytest.mark.parametrize("op", OPS)
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _positional(case: Case) -> Callable[..., Tensor]:
    return lambda *arguments: case.overload(*arguments, **case.options)


def _tokens_first(case: Case) -> dict[str, Tensor]:
    return {
        n: case.arguments[n] for n in ("x", "expert_ids", "expert_weights") if n in case.arguments
    }


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("dropless", "aot_eager"),
        ("experts", "aot_eager"),
        pytest.param("experts", "inductor", marks=needs_compiler),
        # Inductor generates C++ for the router's gradient.
        pytest.param("dropless", "inductor", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
@pytest.mark.first(2)
def test_compiled_once_for_every_number_of_tokens(op: str, backend: str) -> None:
    options = {"activation": "silu", "gated": True}
    case = make_case(op, **options)
    compiler = CompileCounterWithBackend(backend)
    compiled = torch.compile(_positional(case), fullgraph=True, backend=compiler)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 12, 3, 40):
            case = make_case(op, (tokens,), **options).with_grad()
            for tensor in _tokens_first(case).values():
                torch._dynamo.mark_dynamic(tensor, 0)
            result = compiled(*case.arguments.values())
            assert_matches(result, case.oracle(), case.dtypes)
            expected = case.gradients(Case.oracle)
            actual = case.gradients(lambda same: compiled(*same.arguments.values()))
            for name, gradient in actual.items():
                assert_matches(gradient, expected[name], case.dtypes, name)
    assert compiler.frame_count == 1
    targets = [node.target for node in compiler.graphs[0].graph.nodes]
    assert targets.count(case.overload) == 1


@pytest.mark.slow
@both_ops
def test_compiled_for_any_sizes(op: str) -> None:
    case = make_case(op)
    compiled = torch.compile(
        _positional(case),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for sizes in ({"width": 8, "hidden": 6}, {"width": 14, "hidden": 3}, {"experts": 9}):
        other = make_case(op, (6,), **sizes).with_grad()
        assert_matches(compiled(*other.arguments.values()), other.oracle(), other.dtypes)


class _Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *inputs: Tensor) -> Tensor:
        changes = zip(_tokens_first(self.case), inputs, strict=True)
        return self.case.changed(**dict(changes))()


@both_ops
def test_exported_as_one_node_for_every_number_of_tokens(op: str) -> None:
    case = make_case(op)
    inputs = tuple(_tokens_first(case).values())
    tokens = torch.export.Dim("tokens")
    exported = torch.export.export(
        _Layer(case), inputs, dynamic_shapes={"inputs": tuple({0: tokens} for _ in inputs)}
    )
    for program in (exported, exported.run_decompositions({})):
        targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert targets == [case.overload]
        for number in (1, 2, 33):
            others = tuple(_tokens_first(make_case(op, (number,), seed=1)).values())
            assert torch.equal(program.module()(*others), _Layer(case)(*others))


@both_ops
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_experts_alone(
    op: str, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    case = make_case(op, x_dtype=x_dtype)
    names = ("w1", "b1", "w2", "b2")
    cast = case.changed(**{name: case.arguments[name].to(dtype) for name in names})
    expected = cast.gradients()

    def under_autocast(same: Case) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return same()

    assert under_autocast(case).dtype == x_dtype
    assert torch.equal(under_autocast(case), cast())
    for name, gradient in case.gradients(under_autocast).items():
        assert gradient.dtype == case.arguments[name].dtype
        assert torch.equal(gradient, expected[name].to(gradient.dtype)), name


@both_ops
def test_autocast_leaves_float64(op: str) -> None:
    case = make_case(op, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case()
    assert torch.equal(result, case())


@both_ops
def test_autocast_compiled(op: str) -> None:
    case = make_case(op).with_grad()
    compiled = torch.compile(_positional(case), fullgraph=True, backend="aot_eager")

    def under_autocast(same: Case) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(*same.arguments.values())

    result = under_autocast(case)
    assert result.dtype == torch.float32
    precision = {torch.bfloat16}
    assert_matches(result, case.oracle(), precision)
    expected = case.gradients(Case.oracle)
    for name, gradient in case.gradients(under_autocast).items():
        assert gradient.dtype == torch.float32
        assert_matches(gradient, expected[name], precision, name)


@both_ops
def test_backward_inside_autocast(op: str) -> None:
    gradients = []
    for inside in (False, True):
        case = make_case(op, (6,)).with_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = case().float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        leaves = [value for value in case.arguments.values() if isinstance(value, Tensor)]
        gradients.append([leaf.grad for leaf in leaves if leaf.requires_grad])
    assert all(gradient is not None for gradient in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
