"""Cheaper tracing gives the same graph as PyTorch's own, and leaves nothing behind."""

from __future__ import annotations

import threading
import typing
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnxscript import TracedOnnxFunction
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.onnx._internal.exporter._registration import ONNXRegistry

from dynamo_moe.models import SwinMoE, SwinMoEConfig
from dynamo_moe.moe_nodes.nodes import module_of, set_module
from dynamo_moe.private import exporter, tracer
from dynamo_moe.tracing import shortcuts

known = pytest.mark.skipif(
    tracer.missing() is not None or not hasattr(ShapeEnv(), "_replacements_version_counter"),
    reason="needs a known version of PyTorch that counts what it finds out",
)


class Sizes(nn.Module):
    """A module whose graph computes with sizes and learns about them on the way."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, columns = x.shape
        both = torch.cat([x, x.new_zeros(rows, max(columns, 7) - 6)], dim=1)
        part = both[: (rows + 1) // 2].reshape(-1)
        # From here on, y is known to have as many rows as x.
        return part.sum() + (x[:, :1] + y).relu() * (rows * columns) + torch.arange(rows)[:, None]


class Chosen(nn.Module):
    """A module with a size that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        found = x[x > 0]
        return torch.cat([found, found.new_ones(found.shape[0] + 2)]).view(2, -1)


class Switching(nn.Module):
    """A module that computes with or without gradients, here and there."""

    def __init__(self, modes: list[bool]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        for mode in self.modes:
            with torch.set_grad_enabled(mode):
                x = (x + x.shape[0]).relu() if mode else x.sin()
        return x * 2


def a_network() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = SwinMoEConfig(
        image_size=32, patch_size=2, embed_dim=12, depths=(2, 2), num_heads=(2, 2),
        window_size=4, num_experts=4, moe_stages=(1,),
    )  # fmt: skip
    return SwinMoE(config), (torch.randn(2, 3, 32, 32),)


def traced(model: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    shapes = tuple(dict.fromkeys(range(1 if x.ndim > 2 else x.ndim), Dim.DYNAMIC) for x in example)
    return torch.export.export(model.eval(), example, dynamic_shapes=shapes)


def text(program: ExportedProgram) -> list[tuple[Any, ...]]:
    """The nodes with the shapes of their values, and the known facts about the symbols."""
    nodes = [
        (
            node.op,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            str(getattr(node.meta.get("val"), "shape", node.meta.get("val"))),
        )
        for node in program.graph.nodes
    ]
    return [*nodes, tuple(map(str, program.range_constraints.items()))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: (Sizes(), (torch.randn(5, 9), torch.randn(5, 3))),
        lambda: (Chosen(), (torch.tensor([[1.0, -1.0], [2.0, 3.0]]),)),
        pytest.param(a_network, marks=pytest.mark.slow),
    ],
)
def test_the_graph_is_the_same(make: Any) -> None:
    torch.manual_seed(0)
    model, example = make()
    plain = traced(model, example)
    with shortcuts._cheap_tracing():
        cheap = traced(model, example)
    assert text(plain) == text(cheap)


@known
def test_size_arithmetic_is_done_once() -> None:
    class Repeats(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(30):
                x = x * 2 + 1
            return x

    def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
        calls, original = [0], SymNode._mul

        def counting(size: Any, other: Any) -> Any:
            calls[0] += 1
            return original(size, other)

        monkeypatch.setattr(SymNode, "_mul", counting)
        return calls

    counts = []
    for cheap in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch)
            if cheap:
                with shortcuts._cheap_tracing():
                    traced(Repeats(), (torch.randn(3, 4),))
            else:
                traced(Repeats(), (torch.randn(3, 4),))
        counts.append(calls[0])
    assert counts[1] * 5 < counts[0]


@known
def test_what_an_operator_gives_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeats(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(30):
                x = x.transpose(0, 1).relu().transpose(0, 1) * 2
            return x

    found, original = [0], FakeTensorMode._dispatch_impl

    def counting(*arguments: Any) -> Any:
        found[0] += 1
        return original(*arguments)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", counting)
    with shortcuts._cheap_tracing():
        traced(Repeats(), (torch.randn(3, 4),))
    # A few for the first of each operator, and what detaches the values of nodes.
    assert found[0] < 30


def test_an_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "KNOWN_VERSIONS", ((2, 0), (2, 1)))
    before = SymNode._mul
    with shortcuts._cheap_tracing():
        assert SymNode._mul is before


@known
def test_the_registry_of_translations_reads_no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    make = exporter.torchlib.__wrapped__
    plain = ONNXRegistry.from_torchlib(opset_version=20)

    def unwanted(_: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(TracedOnnxFunction, "function_ir", property(unwanted))
    found = make(20)
    assert found.functions == plain.functions


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + 1


def test_graphs_of_others_have_their_code() -> None:
    codes: list[str] = []
    kept = []
    with tracer.graphs_compiled_late():
        thread = threading.Thread(target=lambda: codes.append(fx.symbolic_trace(Relu()).code))
        thread.start()
        thread.join()
        called = fx.symbolic_trace(Relu())
        assert called(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]
        kept.append(fx.symbolic_trace(Relu()))
    assert codes == [called.code] == [kept[0].code]
    assert kept[0](torch.tensor([-1.0])).tolist() == [1.0]


def a_graph(source: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(source))


@known
@pytest.mark.parametrize(
    ("operator", "opset", "keeps"),
    [("Relu", 20, True), ("DFT", 20, False), ("Relu", 99, False), ("Relu", 17, False)],
)
def test_graphs_of_operators_that_change_are_converted(
    operator: str, opset: int, keeps: bool
) -> None:
    model = a_graph(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        model (float[2, 4, 1] x) => (float[a, b, c] y) {{ y = {operator}(x) }}"""
    )
    assert exporter.keeps_meaning(model, opset) == keeps
    model.graph[0].version = 21
    assert not exporter.keeps_meaning(model, 20)


def test_members_of_protocols_are_looked_up_once() -> None:
    tensor, before = ir.tensor([1]), typing.__dict__.get("_get_protocol_attrs")
    with exporter.members_looked_up_once():
        assert isinstance(tensor, ir.TensorProtocol)
        assert not isinstance(1, ir.TensorProtocol)
    assert typing.__dict__.get("_get_protocol_attrs") is before


@known
def test_nodes_of_a_translation_know_their_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Relu()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    program = torch.export.export(Outer(), (torch.ones(2),))
    plain = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False).model
    with exporter.translating(set_module)():
        quick = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False).model
    expected = [(node.op_type, module_of(node)) for node in plain.graph]
    assert [(node.op_type, module_of(node)) for node in quick.graph] == expected
    assert {"inner", ""} == {module for _, module in expected}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("modes", [[False], [False, True, False], [True, False, False, True]])
@known
def test_where_gradients_are_switched_off_is_no_region(modes: list[bool], enabled: bool) -> None:
    model, example = Switching(modes), (torch.randn(3, 4),)
    with torch.set_grad_enabled(enabled):
        regions = traced(model, example)
        with tracer.without_gradients():
            plain = traced(model, example)
    has_regions = any("wrap_with_set_grad_enabled" in str(each) for each in text(regions))
    assert has_regions == any(mode != enabled for mode in modes)
    operators = [str(node.target) for node in plain.graph.nodes if node.op == "call_function"]
    each = {True: ["aten.add.Tensor", "aten.relu.default"], False: ["aten.sin.default"]}
    expected = [*(name for mode in modes for name in each[mode]), "aten.mul.Tensor"]
    assert [name for name in operators if name != "aten.sym_size.int"] == expected
    torch.testing.assert_close(plain.module()(*example), model(*example))
