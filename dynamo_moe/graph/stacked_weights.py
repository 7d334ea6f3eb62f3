"""Experts' weights that are separate in the model become one weight in the file.

A layer whose experts are modules of their own stacks their weights on the way into its node. What
is computed from weights alone is a weight too: its values are computed while the file is written, a
few rows at a time, and its name lists the weights that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from dynamo_moe.graph.passes import merge_equal_nodes
from dynamo_moe.moe_nodes.nodes import moe_nodes
from dynamo_moe.operators.foreign import foreign_operator
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.placeholders import as_ir


def fold_stacked_weights(model: ir.Model) -> None:
    """Makes one weight of what an MoE node's input is computed from, where that is weights alone.

    The node is ours, or one of a runtime, which may want a layer's weights in another order.

    A weight that is also used elsewhere is left to be stacked by the runtime: the file would hold
    it twice. Layers that share experts have one stack.
    """
    if _fold(model):
        merge_equal_nodes(model)
        _fold(model)


def _fold(model: ir.Model) -> bool:
    """Folds what can be; returns whether weights that are used elsewhere were left."""
    has_left = False
    foreign = [node for node in model.graph if foreign_operator(node.domain, node.op_type)]
    for node in [*moe_nodes(model), *foreign]:
        for position, value in enumerate(node.inputs):
            if position == 0 or value is None or value.is_initializer():
                continue
            made_by: list[ir.Node] = []
            leaves: list[ir.Value] = []
            lazy = _expression(value, made_by, leaves)
            parts = [*leaves, *(o for maker in made_by for o in maker.outputs if o is not value)]
            users = [user for part in parts for user, _ in part.uses()]
            if lazy is None:
                continue
            if any(user not in made_by for user in users):
                has_left = True
                continue
            tensor = as_ir(lazy, name_of_all([str(leaf.name) for leaf in leaves]))
            weight = ir.Value(
                name=tensor.name, shape=ir.Shape(lazy.shape), type=value.type, const_value=tensor
            )
            value.replace_all_uses_with(weight)
            for maker in made_by:
                if maker.graph is not None and not any(o.uses() for o in maker.outputs):
                    maker.graph.remove(maker, safe=True)
            for leaf in leaves:
                if not leaf.uses():
                    model.graph.initializers.pop(str(leaf.name), None)
            model.graph.register_initializer(weight)
    return has_left


def name_of_all(names: Sequence[str]) -> str:
    """Returns a name for what is made of several weights, from theirs.

    Example:
        >>> name_of_all([f"mlp.experts.{e}.{w}.weight" for e in range(8) for w in ("w1", "w3")])
        'mlp.experts.0-7.w1+w3.weight'
    """
    parts = [name.split(".") for name in names]
    if len({len(words) for words in parts}) > 1:
        return "+".join(dict.fromkeys(names))
    return ".".join(_range(list(dict.fromkeys(column))) for column in zip(*parts, strict=True))


def _range(words: list[str]) -> str:
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(words) == len(numbers) > 1 and all(b - a == 1 for a, b in pairwise(numbers)):
        return f"{words[0]}-{words[-1]}"
    return "+".join(words)


def _expression(
    value: ir.Value, made_by: list[ir.Node], leaves: list[ir.Value]
) -> LazyTensor | None:
    """Returns a value that is computed from weights as a lazy tensor; None if it is no such value.

    Its nodes are added to ``made_by``, each after those that use it, its weights to ``leaves``.
    """
    raw = getattr(value.const_value, "raw", None)
    if value.is_initializer():
        if not isinstance(raw, Tensor):
            return None
        leaves.append(value)
        return raw if isinstance(raw, LazyTensor) else LazyTensor.of_memory(raw)
    node = value.producer()
    if node is None or node.domain or node.op_type not in _MEANINGS:
        return None
    made_by.append(node)
    operands = [
        _expression(operand, made_by, leaves)
        for operand in (node.inputs if node.op_type == "Concat" else node.inputs[:1])
        if operand is not None
    ]
    if any(operand is None for operand in operands):
        return None
    if node.op_type == "Split":
        result = _part(value, operands[0])
    else:
        result = _MEANINGS[node.op_type](node, operands)
    return result if isinstance(result, LazyTensor) else None


def _concat(node: ir.Node, operands: list[Tensor]) -> Tensor:
    axis = node.attributes["axis"].as_int()
    makers = [value.producer() for value in node.inputs if value is not None]
    # What stacks in PyTorch adds an axis to each first.
    if axis == 0 and all(m is not None and m.op_type == "Unsqueeze" for m in makers):
        return torch.stack([operand.squeeze(0) for operand in operands])
    return torch.cat(operands, axis)


def _part(value: ir.Value, operand: Tensor | None) -> Tensor | None:
    """Returns the part of a tensor that one of the outputs of a Split is."""
    node = value.producer()
    if operand is None or node is None or any(output.shape is None for output in node.outputs):
        return None
    axis = node.attributes.get_int("axis", 0) % operand.ndim
    sizes = [output.shape[axis] for output in node.outputs if output.shape is not None]
    parts = [size for size in sizes if isinstance(size, int)]
    if len(parts) < len(node.outputs) or sum(parts) != operand.shape[axis]:
        return None
    number = list(node.outputs).index(value)
    return operand.narrow(axis, sum(parts[:number]), parts[number])


def _reshape(node: ir.Node, operands: list[Tensor]) -> Tensor | None:
    sizes = _constant(node.inputs[1])
    return operands[0].reshape(sizes) if sizes and 0 not in sizes else None


def _constant(value: ir.Value | None) -> list[int]:
    """Returns a constant's integers, none if it is another value; a shape is joined of several."""
    node = None if value is None else value.producer()
    if value is None or (node is not None and node.domain):
        return []
    if node is not None and node.op_type == "Concat":
        parts = [_constant(value) for value in node.inputs]
        return [number for part in parts for number in part] if all(parts) else []
    casts = node is not None and node.op_type == "Cast"
    if node is not None and (casts or node.op_type == "Reshape"):
        widens = not casts or node.attributes["to"].as_int() == ir.DataType.INT64
        return _constant(node.inputs[0]) if widens else []
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return []
    numbers: list[int] = tensor.numpy().reshape(-1).tolist()
    return numbers


def _cast(node: ir.Node, operands: list[Tensor]) -> Tensor | None:
    """Bytes with a sign as bytes without."""
    to_bytes = node.attributes["to"].as_int() == ir.DataType.UINT8
    is_signed = operands[0].dtype == torch.int8
    return operands[0].view(torch.uint8) if to_bytes and is_signed else None


def _xor(node: ir.Node, operands: list[Tensor]) -> Tensor | None:
    """Bytes whose bits are turned by a constant."""
    tensor = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] else None
    if tensor is None or tensor.size != 1 or operands[0].dtype != torch.uint8:
        return None
    return operands[0].bitwise_xor(int(tensor.numpy().item()))


def _slice(node: ir.Node, operands: list[Tensor]) -> Tensor | None:
    bounds = [_constant(value) for value in node.inputs[1:]]
    if len(bounds) != 4 or any(len(numbers) != 1 for numbers in bounds) or bounds[3] != [1]:
        return None
    (start,), (end,), (axis,), _ = bounds
    first, last, _ = slice(start, end).indices(operands[0].shape[axis])
    return operands[0].narrow(axis, first, max(last - first, 0))


_MEANINGS: dict[str, Callable[[ir.Node, list[Any]], Any]] = {
    "BitwiseXor": _xor,
    "Cast": _cast,
    "Concat": _concat,
    "Identity": lambda node, operands: operands[0],
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": lambda node, operands: None,  # Of several outputs, each has its own.
    "Transpose": lambda node, operands: operands[0].permute(*node.attributes["perm"].as_ints()),
    "Unsqueeze": lambda node, operands: operands[0].unsqueeze(*_constant(node.inputs[1])),
}
