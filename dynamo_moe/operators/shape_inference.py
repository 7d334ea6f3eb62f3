"""Types and shapes of a node's results, by the fake kernel of its PyTorch operator.

The fake kernel gives the shape for given sizes. Where an input's size is unknown, a symbol stands
for it, and PyTorch's tracer records every decision that the kernel bases on a symbol's value. A
shape without such decisions holds for all sizes. A decision on whether a size is a certain number
is tried both ways: nearly every kernel asks whether a size is 1, since strides depend on it, so
without this no symbolic size would be inferred (not even that of ``torch.clone``). With any other
decision nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import onnx
import onnx_ir as ir
import sympy
import torch
from onnx import TypeProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext
from onnx_ir import tensor_adapters
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.private.operators import SymbolicSizes
from dynamo_moe.private.pytorch import OpOverload, schema_of

Inference = Callable[[InferenceContext], None]

_MAX_DECISIONS = 4

# Sizes at which fake kernels are unlikely to do anything special; their values claim nothing.
_HINTS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)


def like(index: int) -> Inference:
    """Returns the inference of a single result that has an input's type and shape."""

    def infer(context: InferenceContext) -> None:
        input_type = context.get_input_type(index)
        if input_type is not None:
            context.set_output_type(0, input_type)

    return infer


def by_fake_kernel(
    torch_op: OpOverload, schema: OpSchema, attributes: Mapping[str, str]
) -> Inference:
    """Returns the inference that asks the operator's fake kernel.

    ``attributes`` has the name by argument, for the arguments that are not tensors.
    """

    def infer(context: InferenceContext) -> None:
        try:
            sizes: dict[str, None] = {}
            inputs = _inputs(context, schema, sizes)
            scalars = {
                argument.name: _scalar(context, argument, attributes[argument.name])
                for argument in schema_of(torch_op).arguments
                if argument.name in attributes
            }
            claims = _claims(torch_op, {**inputs, **scalars}, tuple(sizes))
        except Exception:  # The kernel is the user's: where it refuses, nothing is claimed.
            return
        for index, (dtype, shape) in enumerate(claims or ()):
            context.set_output_type(index, _type_of(dtype, shape, sizes))

    return infer


class _Input:
    """An input's dtype and sizes, unknown ones by name."""

    def __init__(self, proto: TypeProto | None, number: int, names: dict[str, None]) -> None:
        if proto is None or not proto.tensor_type.HasField("shape"):
            raise ValueError("an input's rank is unknown")
        tensor = proto.tensor_type
        self.dtype = tensor_adapters.to_torch_dtype(ir.DataType(tensor.elem_type))
        # A name in a file has no space.
        self.sizes: list[int | str] = [
            size.dim_value if size.HasField("dim_value") else size.dim_param or f" {number} {axis}"
            for axis, size in enumerate(tensor.shape.dim)
        ]
        names.update((size, None) for size in self.sizes if isinstance(size, str))


def _inputs(context: InferenceContext, schema: OpSchema, names: dict[str, None]) -> dict[str, Any]:
    values = [
        _Input(context.get_input_type(number), number, names) if context.has_input(number) else None
        for number in range(context.get_num_inputs())
    ]
    variadic = OpSchema.FormalParameterOption.Variadic
    return {
        formal.name: values[index:]
        if formal.option == variadic
        else next(iter(values[index:]), None)
        for index, formal in enumerate(schema.inputs)
    }


def _scalar(context: InferenceContext, argument: Any, name: str) -> Any:
    proto = context.get_attribute(name)
    if proto is None:
        return argument.default_value
    value = ir.serde.deserialize_attribute(proto).value
    if "bool" in str(argument.real_type):
        return [*map(bool, value)] if isinstance(value, (list, tuple)) else bool(value)
    return value


def _claims(
    torch_op: OpOverload,
    arguments: Mapping[str, Any],
    names: tuple[str, ...],
    known: Mapping[str, int] | None = None,
) -> list[tuple[torch.dtype, tuple[Any, ...]]] | None:
    """Returns the results' dtypes and shapes; None if they do not hold for all sizes."""
    known = known or {}
    if len(known) > _MAX_DECISIONS or len(names) > len(_HINTS):
        return None
    unknown = (name for name in names if name not in known)
    environment = SymbolicSizes(dict(zip(unknown, _HINTS, strict=False)))
    symbols = environment.symbols
    sizes = {**symbols, **known}

    def fake(value: _Input) -> Tensor:
        shape = [sizes[size] if isinstance(size, str) else size for size in value.sizes]
        return torch.empty(shape, dtype=value.dtype)

    with environment.fake_tensors(), torch.no_grad():
        fakes = pytree.tree_map_only(_Input, fake, dict(arguments))
        before = len(environment.decisions())
        results = pytree.tree_leaves(torch_op(**fakes))
        decisions = environment.decisions()[before:]
    of = {symbol.node.expr: name for name, symbol in symbols.items()}
    claims = [(r.dtype, tuple(_size(size, of) for size in r.shape)) for r in results]
    for decision in decisions:
        excluded = _excluded_size(decision, of)
        if excluded is None:
            return None
        name, number = excluded
        other = _claims(torch_op, arguments, names, {**known, name: number})
        if other != [(dtype, _at(shape, name, number)) for dtype, shape in claims]:
            return None
    return claims


def _excluded_size(decision: Any, of: Mapping[Any, str]) -> tuple[str, int] | None:
    """Returns name and number where the decision is that a size is not that number."""
    if isinstance(decision, sympy.Ne):
        for symbol, number in (decision.args, decision.args[::-1]):
            if symbol in of and number.is_Integer:
                return of[symbol], int(number)
    return None


def _size(size: Any, of: Mapping[Any, str]) -> Any:
    """Returns a size as a number or an expression of names; None if it depends on values."""
    if isinstance(size, int):
        return size
    named = {symbol: sympy.Symbol(name) for symbol, name in of.items()}
    expression = size.node.expr
    return expression.xreplace(named) if expression.free_symbols <= named.keys() else None


def _at(shape: tuple[Any, ...], name: str, number: int) -> tuple[Any, ...]:
    at = {sympy.Symbol(name): sympy.Integer(number)}
    sizes = [size.xreplace(at) if isinstance(size, sympy.Expr) else size for size in shape]
    return tuple(int(s) if getattr(s, "is_Integer", False) else s for s in sizes)


def _type_of(dtype: torch.dtype, shape: tuple[Any, ...], names: Collection[str]) -> TypeProto:
    sizes: list[int | str | None] = []
    for size in shape:
        of_a_file = isinstance(size, sympy.Symbol) and size.name in names and size.name[0] != " "
        sizes.append(size if isinstance(size, int) else size.name if of_a_file else None)
    elem_type = int(tensor_adapters.from_torch_dtype(dtype))
    return onnx.helper.make_tensor_type_proto(elem_type, sizes)
