"""Recognising attention, by what a graph computes.

Legend: B batch, S new tokens, P tokens in the cache, L keys, H heads, G heads of keys and values,
D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import onnx_ir as ir

from dynamo_moe.graph.matching import (
    FLOATS,
    Dimension,
    Writer,
    are_alike,
    both_orders,
    dimensions,
    integers,
    is_last_axis,
    maker,
    only_use,
    operand,
    permutation,
    scalar,
    typed,
)

_RANK = 4

_MOST_NODES = 100
"""More nodes than an attention has."""


@dataclass(frozen=True)
class Attention:
    """``softmax(cap(scale * queries @ keys^T) + mask) @ values``.

    Attributes:
        queries: [B, H, S, D].
        keys: [B, H, L, D]; [B, G, L, D] where heads are not repeated yet.
        values: The same, of a width of their own.
        mask: What is added; it broadcasts to [B, H, S, L].
        scale: A factor.
        softcap: ``softcap * tanh(x / softcap)`` bounds what is scaled; 0 for no bound.
        sinks: Scores of one more key, whose value is zero, [1, H, 1, 1]: gpt-oss's attention sinks.
        gives_zeros: Whether a token that sees no key gets zeros, and not the mean of all values.
    """

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: ir.Value | None
    scale: float
    softcap: float = 0.0
    sinks: ir.Value | None = None
    gives_zeros: bool = False

    def options(self) -> dict[str, Any]:
        """Returns the attributes that operators of attention share."""
        return {"scale": self.scale, **({"softcap": self.softcap} if self.softcap else {})}


def attention_of(writer: Writer, node: ir.Node) -> Attention | None:
    """Returns the attention whose result [B, H, S, D] a node gives, if it gives one."""
    if node.domain or node.op_type != "MatMul" or len(dimensions(node.outputs[0])) != _RANK:
        return None
    found = _of_product(writer, node)
    return found if found is not None and _fits(found, node.outputs[0]) else None


def _fits(attention: Attention, result: ir.Value) -> bool:
    """Whether the operands have one dtype and go with each other without being broadcast."""
    tensors = attention.queries, attention.keys, attention.values, result
    dtypes = {tensor.dtype for tensor in tensors}
    match [dimensions(tensor) for tensor in tensors]:
        case [(batch, heads, tokens, width), (_, _, length, _), (_, _, its, depth), made]:
            sizes_fit = (
                dimensions(attention.keys) == (batch, heads, length, width)
                and dimensions(attention.values) == (batch, heads, its, depth)
                and made == (batch, heads, tokens, depth)
                and are_alike(length, its)  # A product sums over both.
            )
        case _:
            return False
    if not sizes_fit or attention.scale <= 0 or len(dtypes) > 1 or result.dtype not in FLOATS:
        return False
    return attention.mask is None or _mask_fits(attention.mask, (batch, heads, tokens, length))


def _mask_fits(mask: ir.Value, scores: tuple[Dimension, ...]) -> bool:
    """Whether a mask has an entry for each key, and broadcasts along the other axes at most."""
    sizes = dimensions(mask)
    if not 2 <= len(sizes) <= _RANK or not are_alike(sizes[-1], scores[-1]):
        return False
    others = zip(sizes[-2::-1], scores[-2::-1], strict=False)
    return all(size == 1 or are_alike(size, other) for size, other in others)


def _of_product(writer: Writer, node: ir.Node) -> Attention | None:
    """Returns the attention that ends with the product of weights and values."""
    weights = _weights(operand(node, 0))
    if weights is None:
        return None
    capped, mask = _unmasked(writer, weights.scores)
    product = _product(writer, capped)
    if product is None or (mask is not None and mask.dtype != node.outputs[0].dtype):
        return None
    return Attention(
        product.queries,
        product.keys,
        operand(node, 1),
        mask,
        product.scale,
        product.softcap,
        weights.sinks,
        weights.gives_zeros,
    )


def _unmasked(writer: Writer, value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Returns scores before what is added to them, and that: a mask, a bias of places, or both."""
    last = only_use(value, "Add")
    for scores, added in both_orders(last):
        if _product(writer, scores) is not None:
            return scores, added
    for inner, mask in both_orders(last):
        for scores, bias in both_orders(only_use(inner, "Add")):
            sizes = _broadcast(dimensions(bias), dimensions(mask))
            if sizes is not None and last is not None and _product(writer, scores) is not None:
                both = writer.node(last, "Add", [bias, mask]).outputs[0]
                return scores, typed(both, mask, sizes)
    return value, None


def _broadcast(
    sizes: tuple[Dimension, ...], others: tuple[Dimension, ...]
) -> tuple[Dimension, ...] | None:
    """Returns the dimensions of a sum of two tensors, if they are known to go with each other."""
    rank = max(len(sizes), len(others))
    padded = ((1,) * (rank - len(each)) + each for each in (sizes, others))
    pairs = [*zip(*padded, strict=True)]
    if not all(1 in pair or are_alike(*pair) for pair in pairs):
        return None
    return tuple(other if one == 1 else one for one, other in pairs)


class _Weights(NamedTuple):
    """A softmax's operand, the sinks that it was taken with, and whether NaN becomes zero."""

    scores: ir.Value
    sinks: ir.Value | None = None
    gives_zeros: bool = False


def _weights(value: ir.Value) -> _Weights | None:
    """Returns what a value is the softmax of, over the keys; half precision may be widened."""
    kept = only_use(value, "Slice")
    weights = _uncast(value if kept is None else operand(kept, 0))
    guarded = _guarded(weights)
    softmax = only_use(weights, "Softmax") if guarded is None else maker(guarded, "Softmax")
    if softmax is None or not is_last_axis(softmax.attributes.get_int("axis", -1), value):
        return None
    scores = _uncast(operand(softmax, 0))
    if kept is None:
        return _Weights(scores, gives_zeros=guarded is not None)
    return _with_sinks(scores) if guarded is None and _drops_last(kept) else None


def _guarded(value: ir.Value) -> ir.Value | None:
    """Returns x if a value is x with zeros in place of NaN, which is all that x is used for."""
    choice = only_use(value, "Where")
    test = None if choice is None else maker(choice.inputs[0], "IsNaN")
    if choice is None or test is None or scalar(choice.inputs[1]) != 0:
        return None
    inner = operand(choice, 2)
    return inner if test.inputs[0] is inner and len(inner.uses()) == 2 else None


def _uncast(value: ir.Value) -> ir.Value:
    cast = only_use(value, "Cast")
    return value if cast is None else operand(cast, 0)


def _drops_last(node: ir.Node) -> bool:
    """Whether a Slice leaves out the last element of the last axis, and no more."""
    bounds = [integers(bound) for bound in node.inputs[1:]]
    return bounds in ([[0], [-1], [-1], [1]], [[0], [-1], [_RANK - 1], [1]])


def _with_sinks(value: ir.Value) -> _Weights | None:
    """Returns scores and the sinks behind them."""
    join = maker(value, "Concat")
    if join is None or len(join.inputs) != 2:
        return None
    wide = maker(join.inputs[1], "Expand")
    if wide is None or not is_last_axis(join.attributes.get_int("axis", 0), value):
        return None
    scores, sinks = operand(join, 0), operand(wide, 0)
    fits = dimensions(sinks) == (1, dimensions(scores)[1], 1, 1)
    return _Weights(scores, sinks) if fits else None


class _Product(NamedTuple):
    """``cap(scale * queries @ keys^T)``."""

    queries: ir.Value
    keys: ir.Value
    scale: float
    softcap: float


def _product(writer: Writer, value: ir.Value) -> _Product | None:
    """Returns the product that a value is; its factor may be at the result or at either operand."""
    inner, softcap = _uncapped(value)
    inner, scale = _unscaled(inner)
    product = only_use(inner, "MatMul")
    if product is None:
        return None
    queries, its = _unscaled(operand(product, 0))
    keys, other = _unscaled(operand(product, 1))
    by_head = _by_head(writer, keys)
    if by_head is None:
        return None
    return _Product(queries, by_head, scale * its * other, softcap)


def _by_head(writer: Writer, value: ir.Value) -> ir.Value | None:
    """Returns [B, H, L, D] of keys [B, H, D, L] that are made of it by turning axes."""
    sizes = dimensions(value)
    turned = only_use(value, "Transpose")
    order = None if turned is None else permutation(turned)
    if turned is None or order is None or len(order) != _RANK:
        return None
    order = order[0], order[1], order[3], order[2]
    source = operand(turned, 0)
    if order == (0, 1, 2, 3):
        return source
    keys = writer.node(turned, "Transpose", [source], {"perm": order}).outputs[0]
    return typed(keys, source, (sizes[0], sizes[1], sizes[3], sizes[2]))


def _uncapped(value: ir.Value) -> tuple[ir.Value, float]:
    """Returns what is bounded, and the bound; the value itself and 0 if it is not bounded."""
    bounded, softcap = _unscaled(value)
    tanh = only_use(bounded, "Tanh")
    if tanh is None:
        return value, 0.0
    inner, factor = _unscaled(operand(tanh, 0))
    return (inner, softcap) if math.isclose(factor * softcap, 1, rel_tol=1e-6) else (value, 0.0)


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Returns what a value is but for a constant factor, and the factor."""
    for inner, factor in both_orders(only_use(value, "Mul")):
        number = scalar(factor)
        if number is not None:
            return inner, number
    division = only_use(value, "Div")
    divisor = None if division is None else scalar(division.inputs[1])
    if division is not None and divisor:
        return operand(division, 0), 1 / divisor
    return value, 1.0


# --- Repeated heads and the cache ---


def without_repeats(attention: Attention) -> Attention:
    """Takes keys and values before their heads are repeated."""
    keys, values = _unrepeated(attention.keys), _unrepeated(attention.values)
    if keys is None or values is None or dimensions(keys)[1] != dimensions(values)[1]:
        return attention
    return replace(attention, keys=keys, values=values)


def _unrepeated(value: ir.Value) -> ir.Value | None:
    """Returns [B, G, L, D] of which each head is repeated to [B, H, L, D]."""
    merged = maker(value, "Reshape")
    wide = None if merged is None else maker(merged.inputs[0], "Expand")
    narrow = None if wide is None else maker(wide.inputs[0], "Unsqueeze")
    if narrow is None or wide is None or integers(narrow.inputs[1]) != [2]:
        return None
    source = operand(narrow, 0)
    match dimensions(source), dimensions(wide.outputs[0]):
        case (batch, int(groups), *rest), (_, _, int(repeats), *_) as repeated:
            is_repeat = repeated == (batch, groups, repeats, *rest)
            fits = dimensions(value) == (batch, groups * repeats, *rest)
            return source if is_repeat and fits else None
    return None


class Cache(NamedTuple):
    """Keys or values of the tokens so far, of the new ones, and of all: [B, G, P | S | L, D]."""

    past: ir.Value
    new: ir.Value
    present: ir.Value


def caches_of(node: ir.Node, attention: Attention) -> list[Cache]:
    """Returns the caches of keys and of values, if inputs of the graph hold them.

    The attention that a node ends must be the only one to use them: it is what makes them then.
    """
    caches: list[Cache] = []
    if attention.keys is attention.values:
        return caches
    for value in (attention.keys, attention.values):
        join = maker(value, "Concat")
        if join is None or len(join.inputs) != 2 or not value.is_graph_output():
            return []
        if not _leads_only_to(value, node, attention):
            return []
        past, new = operand(join, 0), operand(join, 1)
        if not past.is_graph_input() or join.attributes.get_int("axis", 0) not in (2, -2):
            return []
        caches.append(Cache(past, new, value))
    return caches


def _leads_only_to(value: ir.Value, end: ir.Node, attention: Attention) -> bool:
    """Whether all that is computed of keys or values is a node's operand, but for graph outputs.

    What they are compared with, and the mask, must not be.
    """
    seen: set[ir.Node] = set()
    left = [value]
    while left:
        users = {user for user, _ in left.pop().uses()} - seen - {end}
        seen |= users
        outputs = [output for user in users for output in user.outputs]
        if len(seen) > _MOST_NODES or any(output.is_graph_output() for output in outputs):
            return False
        left += outputs
    others = attention.queries, attention.mask, attention.sinks
    return not any(other is not None and other.producer() in seen for other in others)
