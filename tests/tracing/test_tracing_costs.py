"""Traced as PyTorch traces, but for what it repeats: the same graph, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynamo_moe.models import SwinMoE, SwinMoEConfig
from dynamo_moe.tracing import known_torch
from dynamo_moe.tracing.tracing_costs import cheap_tracing

known = pytest.mark.skipif(
    not known_torch.is_known() or not hasattr(ShapeEnv(), "_replacements_version_counter"),
    reason="needs a version of PyTorch that is known, and counts what it finds out",
)
without_traces = pytest.mark.skipif(
    not hasattr(getattr(torch.fx, "config", None), "do_not_emit_stack_traces"),
    reason="needs a version of PyTorch that can leave out stack traces",
)


class Sizes(nn.Module):
    """A module whose graph computes with sizes, and learns of them on its way."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, columns = x.shape
        both = torch.cat([x, x.new_zeros(rows, max(columns, 7) - 6)], dim=1)
        part = both[: (rows + 1) // 2].reshape(-1)
        # From here on, y has as many rows as x.
        return part.sum() + (x[:, :1] + y).relu() * (rows * columns) + torch.arange(rows)[:, None]


class Chosen(nn.Module):
    """A module with a size that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        found = x[x > 0]
        return torch.cat([found, found.new_ones(found.shape[0] + 2)]).view(2, -1)


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
    """The nodes with the shapes of their values, and what is known of the symbols."""
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
        a_network,
    ],
)
def test_the_graph_is_the_same(make: Any) -> None:
    torch.manual_seed(0)
    model, example = make()
    plain = traced(model, example)
    with cheap_tracing():
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
                with cheap_tracing():
                    traced(Repeats(), (torch.randn(3, 4),))
            else:
                traced(Repeats(), (torch.randn(3, 4),))
        counts.append(calls[0])
    assert counts[1] * 5 < counts[0]


@without_traces
def test_nothing_is_left_behind() -> None:
    before = SymNode._mul, SymNode._eq, torch.fx.config.do_not_emit_stack_traces

    @cheap_tracing()
    def fails() -> None:
        assert torch.fx.config.do_not_emit_stack_traces
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        fails()
    assert (SymNode._mul, SymNode._eq, torch.fx.config.do_not_emit_stack_traces) == before


@without_traces
def test_overlapping_contexts_leave_nothing_behind() -> None:
    before = SymNode._mul
    first, second = cheap_tracing(), cheap_tracing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert SymNode._mul is before
    second.__exit__(None, None, None)
    assert SymNode._mul is before
    assert not torch.fx.config.do_not_emit_stack_traces
    with cheap_tracing():
        assert torch.fx.config.do_not_emit_stack_traces


def test_an_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_torch, "KNOWN_VERSIONS", ())
    before = SymNode._mul
    with cheap_tracing():
        assert SymNode._mul is before
