"""Operators of tests that are registered for export, and models around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import onnxscript
import torch
from onnxscript import opset18, opset22, script
from torch import Tensor, nn

import dynamo_moe

LIBRARY = torch.library.Library("registered", "FRAGMENT")
DOMAIN = "registered"
OPS = torch.ops.registered

OPSET = onnxscript.values.Opset(DOMAIN, 1)


def define(schema: str, function: Callable[..., Any] | None = None) -> Any:
    """Defines an operator whose kernel is also its fake kernel."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    if function is not None:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(OPS, name)


class Call(nn.Module):
    """A linear layer, an operator applied to its result, and another layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.after(self.function(self.before(x)))


def exported(
    path: Path, function: Callable[..., Any], **options: Any
) -> tuple[Call, onnx.ModelProto]:
    torch.manual_seed(0)
    model = Call(function).eval()
    shapes = {"x": {1: "tokens"}}
    dynamo_moe.export(model, torch.randn(2, 3, 8), path, dynamic_shapes=shapes, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return model, proto


def only(proto: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    (node,) = [node for node in proto.graph.node if node.op_type == op_type]
    return node


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def other_shapes(path: Path, model: nn.Module) -> None:
    cases = [(torch.randn(*shape, 8),) for shape in ((1, 1), (5, 2), (3, 17))]
    dynamo_moe.verify(path, model, cases)


# One operator with attributes of every kind.


@torch.library.custom_op("registered::scaled", mutates_args=())
def scaled(
    x: Tensor,
    slope: float = 0.1,
    power: int = 1,
    flip: bool = False,
    mode: str = "plain",
    steps: list[int] | None = None,
) -> Tensor:
    y = torch.where(x > 0, x, x * slope) * power
    return -y if flip else y


@scaled.register_fake
def _(x, slope=0.1, power=1, flip=False, mode="plain", steps=None):
    return torch.empty_like(x)


@script(OPSET)
def scaled_body(x, slope: float, power: int, flip: int):
    wide = opset18.CastLike(opset18.Constant(value_float=slope), x)
    factor = opset18.CastLike(opset18.Constant(value_int=power), x)
    zero = opset18.CastLike(0.0, x)
    y = opset18.Mul(opset18.Where(opset18.Greater(x, zero), x, opset18.Mul(x, wide)), factor)
    sign = opset18.CastLike(opset18.Constant(value_int=flip), x)
    two = opset18.CastLike(2.0, x)
    return opset18.Sub(y, opset18.Mul(opset18.Mul(two, sign), y))


dynamo_moe.register_op(scaled, domain=DOMAIN, op_type="Scaled", body=scaled_body)


def call_scaled(x: Tensor) -> Tensor:
    return scaled(x, 0.25, 3, True, "other", [4, 5])


relu = define("relu(Tensor x) -> Tensor", torch.relu)


@script(OPSET)
def relu_18(x):
    return opset18.Relu(opset18.Cast(opset18.Cast(x, to=1), to=1))


dynamo_moe.register_op(relu, domain=DOMAIN, op_type="Relu18", body=relu_18)


@script(OPSET)
def relu_22(x):
    return opset22.Relu(x)


def relu_op(name: str) -> Any:
    return define(f"{name}(Tensor x) -> Tensor", torch.relu)
