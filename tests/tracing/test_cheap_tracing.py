"""Programs traced in less time are those that PyTorch traces, to the memory of each value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram

from dynamo_moe.private import tracer
from dynamo_moe.tracing import shortcuts

pytestmark = pytest.mark.skipif(
    tracer.missing() is not None,
    reason="needs a known version of PyTorch",
)

WIDTH = 6
Step = Callable[[Tensor], Tensor]

# Each takes and gives a tensor (batch, length, 6).
STEPS: dict[str, Step] = {
    "relu": torch.relu,
    "square": lambda x: x * x,
    "broadcast": lambda x: x + x.mean(0, keepdim=True) * x[:, :1],
    "promote": lambda x: x * torch.arange(x.shape[1])[:, None],
    "product": lambda x: x @ x.new_ones(WIDTH, WIDTH),
    "scores": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "heads": lambda x: x.view(*x.shape[:2], 2, 3).transpose(1, 2).transpose(1, 2).flatten(2),
    "order": lambda x: (x.transpose(0, 1) * 2).transpose(0, 1),
    "copy": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "self": lambda x: x.contiguous().to(torch.float32),
    "halves": lambda x: torch.cat([part.neg() for part in x.chunk(2, -1)], -1),
    "split": lambda x: torch.stack(x.split(2, -1), -1).flatten(2),
    "pad": lambda x: nn.functional.pad(x, (0, 0, 1, 0))[:, 1:],
    "flip": lambda x: x.flip(1),
    "pairs": lambda x: torch.cat([x, x], 1)[:, : (x.shape[1] + 1) // 2 * 2][:, : x.shape[1]],
    "rolled": lambda x: torch.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1),
    "flat": lambda x: x.reshape(-1, WIDTH).sort(-1).values.reshape(x.shape),
    "inplace": lambda x: x.clone().add_(1).mul_(x),
    "through a view": lambda x: _written(x.clone()),
    "chosen": lambda x: x + x[x > 0].sum(),
    "first": lambda x: x * x.topk(1, -1).values,
    "drawn": lambda x: x + torch.rand_like(x),
    "constant": lambda x: x * torch.tensor(2.0).item(),
    "scalar": lambda x: x * torch.tensor([1.0, 2.0]).sum(),
    "learned": lambda x: x + torch.zeros(x.shape[0] * 2)[: x.shape[0], None, None],
    "expanded": lambda x: x * x.select(1, 0).unsqueeze(1).expand(-1, x.shape[1], -1),
    "sizes of others": lambda x: (
        x.new_ones(x.shape[:2]).unsqueeze(-1) * x + x.new_ones(x.shape[1], 1)
    ),
    "summed": lambda x: x.cumsum(1) + torch.einsum("bli,bmi->blm", x, x).sum(-1, keepdim=True),
    "one of two": lambda x: torch.where(x > x.mean(), x, x[0]),
    "numbers": lambda x: x * 2 + x * 2.0 + x * True + (x + 1j).real,
    "half": lambda x: _in_half_precision(x) + x.half().float(),
    "normalised": lambda x: nn.functional.layer_norm(x, (WIDTH,)) + nn.functional.gelu(x),
    "windows": lambda x: nn.functional.unfold(x[:, None], (1, WIDTH)).transpose(1, 2),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x.transpose(0, 0)),
    "equal": lambda x: x + x.new_zeros(x.shape[1], WIDTH).unsqueeze_(0),
    "unsqueezed": lambda x: (x.unsqueeze(-2).transpose(1, -2) * x.unsqueeze(1)).sum(1),
    "matrices": lambda x: x + x[0].t().t() * x[:, 0, 0].t()[:, None, None],
    # What comes after them is found out with more known of the sizes than what came before.
    "not one": lambda x: x * 2 if x.shape[1] != 1 else x,
    "more than two": lambda x: x + 1 if x.shape[0] > 2 else x,
    "more than four": lambda x: x + 1 if x.shape[1] > 4 else x,
    "few of them": lambda x: x[:2].sum(0) + x[:, :4].sum(1, keepdim=True) * x,
    "even": lambda x: x - 1 if x.shape[1] % 2 == 1 else x,
    "same sizes": lambda x: x if x.shape[0] == x.shape[1] else x.abs(),
}


def _written(x: Tensor) -> Tensor:
    x[:, 0].zero_()
    x.view(-1)[:3] = 1
    return x


def _in_half_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.new_ones(WIDTH, WIDTH)).float()


class Steps(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for name in self.names:
                x = STEPS[name](x) * self.weight
        return x


def traced(model: nn.Module) -> ExportedProgram:
    example = (torch.randn(3, 5, WIDTH),)
    shapes = ((Dim.DYNAMIC, Dim.DYNAMIC, Dim.STATIC),)
    with tracer.sizes_of_one():
        return torch.export.export(model, example, dynamic_shapes=shapes)


def expanded(size: int | torch.SymInt) -> str:
    """A size of memory as a sum: n rows, or one after n - 1 others, are as many bytes."""
    return str(sympy.expand(size.node.expr) if isinstance(size, torch.SymInt) else size)


def description(program: ExportedProgram) -> list[Any]:
    """The nodes, with all of their values but what they compute, and what is known of the sizes."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    mode = next(each.fake_mode for each in values if isinstance(each, FakeTensor))
    known = str([guard.expr for guard in mode.shape_env.guards])  # Before is_contiguous finds more.
    memories: dict[int, int] = {}

    def of(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [of(each) for each in value]
        if not isinstance(value, Tensor):
            return str(value)
        memory = value.untyped_storage()
        place = memories.setdefault(memory._cdata, len(memories))
        return (
            *(str(value.shape), str(value.stride()), str(value.storage_offset())),
            *(value.dtype, value.device, value.requires_grad, value.is_contiguous()),
            *(place, expanded(memory.nbytes()), str(torch._C._dispatch_keys(value))),
        )

    # Sizes that are only compared take names, which are another number then.
    places = {node: f"node {place}" for place, node in enumerate(program.graph.nodes)}

    def given(values: Any) -> str:
        return str(torch.fx.node.map_arg(values, places.get))

    nodes = [
        (
            *(node.op, str(node.target), given(node.args), given(node.kwargs)),
            *(of(node.meta.get("val")), str(node.meta.get("unbacked_bindings"))),
        )
        for node in program.graph.nodes
    ]
    outputs = [spec.kind for spec in program.graph_signature.output_specs]
    found_out = (mode.shape_env.replacements, mode.shape_env.deferred_runtime_asserts)
    return [*nodes, known, str(outputs), *map(str, (*found_out, program.range_constraints))]


def described(model: nn.Module) -> list[Any] | str:
    """The program's description, or how its trace fails: not all steps fit after each other."""
    try:
        return description(traced(model))
    except Exception as error:
        return type(error).__name__


def check(model: nn.Module) -> list[Any] | str:
    with tracer._dynamo_config.patch(fake_tensor_cache_enabled=False):
        plain = described(model)
    with shortcuts._cheap_tracing():
        cheap = described(model)
    assert cheap == plain
    return plain


@pytest.mark.parametrize("name", STEPS)
def test_each_step_repeated(name: str) -> None:
    assert isinstance(check(Steps([name, "relu"])), list)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(STEPS)), min_size=2, max_size=5))
def test_random_steps(names: list[str]) -> None:
    check(Steps(names))
