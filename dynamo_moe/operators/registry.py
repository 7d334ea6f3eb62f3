"""The registry of PyTorch operators that become one ONNX node each, and how nodes are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.defs
import onnx_ir as ir
import onnxscript
from onnx.defs import OpSchema
from onnxscript.onnx_opset import opset18

from dynamo_moe.private.pytorch import OpOverload, schema_of

Arguments = Mapping[str, Any]
"""A call's arguments by name: tensors as ``ir.Value``, everything else as Python values."""

Filling = tuple[Sequence[int], ir.DataType | None] | tuple[Sequence[int], ir.DataType | None, int]
"""Sizes and dtype of what stands for an absent optional input, and its number if that is not 0."""

Fill = Callable[[str, Arguments], Filling]
"""What stands for an absent optional input, by its name and the call's arguments."""

Body = Callable[[ir.Node, int, str], ir.Function]
"""From a node, the opset and the target to the function that computes the node."""

_OPTIONAL = OpSchema.FormalParameterOption.Optional
_VARIADIC = OpSchema.FormalParameterOption.Variadic


class NodeError(ValueError):
    """A call of an operator cannot become its node."""


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """One operator of PyTorch and its ONNX node.

    Attributes:
        torch_op: The operator.
        schema: The node's schema; its inputs have the names of the operator's tensor arguments.
        attributes: From the arguments of a call to the node's attributes; None is left out.
        fixed: Attributes that every node has.
        body: Makes the function that computes a node in standard operators; None: there is none.
        fill: Gives what stands for an absent input with others behind it; None: it is left out.
        declaration: The arguments of its registration, to compare with those of another one.
    """

    torch_op: OpOverload
    schema: OpSchema
    attributes: Callable[[Arguments], Mapping[str, Any]]
    fixed: Mapping[str, Any]
    body: Body | None
    fill: Fill | None
    declaration: Any

    @property
    def name(self) -> str:
        """Domain and operator: ``moe::DroplessMoE``."""
        return f"{self.schema.domain}::{self.schema.name}"

    def translation(self) -> Callable[..., Any]:
        """Returns the function by which PyTorch's exporter turns a call into a node."""

        # A function, since the exporter writes attributes to it.
        def translate(*args: Any, **kwargs: Any) -> Any:
            return self._node(args, kwargs)

        translate.__name__ = translate.__qualname__ = self.schema.name
        return translate

    def _node(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        arguments = self._bound(args, kwargs)
        computed = self.attributes(arguments)
        # Those that are computed come first, and last where both have one.
        attributes = {**computed, **self.fixed, **computed}
        keywords = {
            name: self._attribute(name, value)
            for name, value in attributes.items()
            if value is not None
        }
        inputs = self._inputs(arguments)
        opset = onnxscript.values.Opset(self.schema.domain, self.schema.since_version)
        node = getattr(opset, self.schema.name)
        if any(formal.option == _VARIADIC for formal in self.schema.inputs):
            # The exporter would give all inputs passed by position to the variadic one.
            return node(**inputs, **keywords)
        return node(*inputs.values(), **keywords)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        formals = schema_of(self.torch_op).arguments
        values = {**dict(zip((formal.name for formal in formals), args, strict=False)), **kwargs}
        return {formal.name: values.get(formal.name, formal.default_value) for formal in formals}

    def _inputs(self, arguments: Arguments) -> dict[str, Any]:
        inputs = {formal.name: arguments[formal.name] for formal in self.schema.inputs}
        while inputs and next(reversed(inputs.values())) is None:
            inputs.popitem()
        if self.fill is not None:
            for formal in list(self.schema.inputs)[: len(inputs)]:
                if formal.option == _OPTIONAL and inputs[formal.name] is None:
                    inputs[formal.name] = _filled(*self.fill(formal.name, arguments))
        return inputs

    def _attribute(self, name: str, value: Any) -> ir.Attr:
        if name not in self.schema.attributes:
            raise NodeError(
                f"{self.torch_op}: the function of attributes returned {name!r}, which the schema "
                f"of {self.name} does not declare; it has {', '.join(self.schema.attributes)}"
            )
        kind = attribute_type(self.schema.attributes[name])
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, ir.Value) for item in items):
            raise NodeError(
                f"{self.torch_op}: {name!r} is computed by the model, but an attribute of an ONNX "
                "node is a constant: pass a constant, or make it a Tensor argument"
            )
        convert = {"FLOAT": float, "STRING": str}.get(kind.name.removesuffix("S"), int)
        converted = [convert(item) for item in items]
        plural = kind.name.endswith("S")
        return ir.Attr(name, kind, converted if plural else converted[0])


_OPERATORS: dict[OpOverload, Operator] = {}


def add(operator: Operator) -> None:
    """Registers an operator, and its schema with onnx; again under an equal declaration is fine.

    A PyTorch operator that was defined anew, as by a notebook's cell that is run again, takes the
    place of the one before.

    Raises:
        ValueError: If the PyTorch operator or the ONNX operator is registered differently.
    """
    for known in operators():
        if (
            known.torch_op != operator.torch_op
            and known.torch_op.name() == operator.torch_op.name()
        ):
            old = known.schema
            onnx.defs.deregister_schema(old.name, old.since_version, old.domain)
            del _OPERATORS[known.torch_op]
    for known in _OPERATORS.values():
        if known.torch_op == operator.torch_op or known.name == operator.name:
            if known.declaration == operator.declaration:
                return
            raise ValueError(
                f"{operator.torch_op} as {operator.name}: {known.torch_op} is already registered "
                f"as {known.name}, with another declaration"
            )
    schema = operator.schema
    if onnx.defs.has(schema.name, schema.domain):
        raise ValueError(f"{operator.name} is already registered with onnx, by someone else")
    onnx.defs.register_schema(schema)
    _OPERATORS[operator.torch_op] = operator


def operators() -> tuple[Operator, ...]:
    """Returns all operators, in the order of their registration."""
    return tuple(_OPERATORS.values())


def find(node: ir.Node) -> Operator | None:
    """Returns the node's operator; None if it is not registered."""
    domain, name = node.domain, node.op_type
    for operator in _OPERATORS.values():
        if operator.schema.name == name and operator.schema.domain == domain:
            return operator
    return None


def attribute_type(attribute: OpSchema.Attribute) -> ir.AttributeType:
    """Returns the type of an attribute that a schema declares."""
    number: Any = attribute.type
    return ir.AttributeType(number.value)


def _filled(shape: Sequence[int], dtype: ir.DataType | None, number: int = 0) -> Any:
    if dtype is None:
        raise ValueError("the dtype of an absent input must be known")
    numbers = ir.tensor(np.full(shape, number, dtype.numpy()))
    return opset18.Constant(value=ir.serde.serialize_tensor(numbers))
