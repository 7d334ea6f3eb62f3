"""Products of one tensor with several matrices as one product, whose result is split.

Such are the queries, keys and values of attention. The joined matrix is a weight, written as it is
computed, a few rows at a time; its name lists the weights that it is made of.

Legend: K columns in, N columns out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir
import torch
from torch import Tensor

from dynamo_moe.graph.matching import Writer, dimensions, operand, typed
from dynamo_moe.graph.stacked_weights import name_of_all
from dynamo_moe.moe_nodes.nodes import module_of
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import is_decoding
from dynamo_moe.weights.placeholders import as_ir


class _Product(NamedTuple):
    """``x @ weight + bias``.

    Attributes:
        node: The product's node.
        x: What is multiplied, of any shape [..., K].
        weight: [K, N].
        bias: [N], if there is one.
        result: [..., N].
    """

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    result: ir.Value


def join_products(model: ir.Model, *, link: bool = False) -> set[str]:
    """Joins the products of one tensor in the parts of one module, where that saves nodes.

    Args:
        model: The model, simplified, its weights with their values.
        link: Whether weights that lie in a file stay there: those are not joined.

    Returns:
        The names of the joined weights.
    """
    groups: dict[tuple[ir.Value, str, ir.DataType | None, bool], list[_Product]] = {}
    for node in model.graph:
        product = _product(node, link=link)
        if product is not None:
            module, dtype = module_of(node).rpartition(".")[0], product.weight.dtype
            key = product.x, module, dtype, product.bias is None
            groups.setdefault(key, []).append(product)
    writer, added = Writer(model.graph, "joined"), set()
    for products in groups.values():
        biased = sum(product.bias is not None for product in products)
        each = 2 if biased else 1
        if len(products) * each > each + 1:
            added |= _join(writer, products)
    return added


def _product(node: ir.Node, *, link: bool) -> _Product | None:
    """Returns the product with a weight that a node computes, if no other node has that weight."""
    if node.domain or node.op_type != "MatMul":
        return None
    weight, result = operand(node, 1), node.outputs[0]
    is_matrix = len(dimensions(weight)) == 2 and len(dimensions(result)) > 1
    if not is_matrix or not _can_be_joined(weight, link=link) or result.dtype != weight.dtype:
        return None
    users = [*result.uses()]
    if len(users) == 1 and not result.is_graph_output():
        add, place = users[0]
        other = add.inputs[1 - place] if not add.domain and add.op_type == "Add" else None
        if (
            other is not None
            and dimensions(other) == dimensions(weight)[1:]
            and other.dtype == weight.dtype
            and _can_be_joined(other, link=link)
        ):
            return _Product(node, operand(node, 0), weight, other, add.outputs[0])
    return _Product(node, operand(node, 0), weight, None, result)


def _can_be_joined(weight: ir.Value, *, link: bool) -> bool:
    """Whether a value is a weight of one node, which its file does not hold as another file does.

    Packed weights that decode stay alone, too: they may stay packed.
    """
    raw = _values(weight)
    if not weight.is_initializer() or weight.is_graph_output() or len(weight.uses()) > 1:
        return False
    if raw is None or is_decoding(raw):
        return False
    return not (link and getattr(raw, "origin", None) is not None)


def _join(writer: Writer, products: Sequence[_Product]) -> set[str]:
    """Puts one product in the place of several; returns the names of its weights."""
    first = products[0]
    sizes = [*map(_columns, products)]
    shape = (*dimensions(first.result)[:-1], sum(sizes))
    weights = [_joined([product.weight for product in products])]
    whole = writer.node(first.node, "MatMul", [first.x, weights[0]]).outputs[0]
    typed(whole, first.result, shape)
    biases = [product.bias for product in products if product.bias is not None]
    if biases:
        weights.append(_joined(biases))
        whole = writer.node(first.node, "Add", [whole, weights[1]]).outputs[0]
        typed(whole, first.result, shape)
    parts = writer.node(
        first.node,
        "Split",
        [whole, writer.ints(sizes)],
        {"axis": len(shape) - 1},
        results=len(products),
    )
    for product, part in zip(products, parts.outputs, strict=True):
        writer.replace(product.result, part)
    for product in products:
        made_by = product.result.producer()
        writer.graph.remove({node for node in (made_by, product.node) if node}, safe=True)
        for weight in (product.weight, product.bias):
            if weight is not None:
                writer.graph.initializers.pop(str(weight.name))
    for weight in weights:
        writer.graph.register_initializer(weight)
    return {str(weight.name) for weight in weights}


def _columns(product: _Product) -> int:
    size = dimensions(product.weight)[-1]
    if not isinstance(size, int):
        raise ValueError(f"weight {product.weight.name!r} has no size")
    return size


def _joined(weights: Sequence[ir.Value]) -> ir.Value:
    """Returns a weight of which others are parts, along the last axis."""
    joined = torch.cat([_lazy(weight) for weight in weights], -1)
    tensor = as_ir(joined, name_of_all([str(weight.name) for weight in weights]))
    shape = ir.Shape(joined.shape)
    return ir.Value(name=tensor.name, shape=shape, type=weights[0].type, const_value=tensor)


def _lazy(weight: ir.Value) -> Tensor:
    raw = _values(weight)
    if raw is None:
        raise ValueError(f"{weight.name!r} has no values")
    return raw if isinstance(raw, LazyTensor) else LazyTensor.of_memory(raw)


def _values(weight: ir.Value) -> Tensor | None:
    """Returns the tensor that a weight is of, in memory or lazy."""
    raw = getattr(weight.const_value, "raw", None)
    return raw if isinstance(raw, Tensor) else None
