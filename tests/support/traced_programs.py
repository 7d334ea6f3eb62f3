"""Programs of ``torch.export``, what our decomposition makes of them, and their files' numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram

from dynamo_moe.operators.registry import operators as registered
from dynamo_moe.tracing import translate
from dynamo_moe.tracing.decomposition import decomposed


class Call(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def traced(model: nn.Module, *args: Tensor) -> ExportedProgram:
    shapes = tuple({0: Dim.DYNAMIC} for _ in args)
    if isinstance(model, Call):
        return torch.export.export(model.eval(), args, dynamic_shapes=shapes)
    return torch.export.export(model.eval(), args)


def decompose(program: ExportedProgram) -> fx.GraphModule:
    registry, decompositions = translate._registered(20, registered())
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


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(path))
    names = [value.name for value in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def check_numbers(path: Path, model: nn.Module, *inputs: Tensor) -> None:
    actual = run(path, *inputs)
    with torch.no_grad():
        expected = model(*(tensor.clone() for tensor in inputs))
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# --- Programs that change tensors in place ---


def several(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(x).clamp_(-1, 1)
    return y.sub_(y.sum())


def router(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = x.softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(torch.float64), ids
