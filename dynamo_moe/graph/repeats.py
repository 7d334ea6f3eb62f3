"""Repeated normalisations, which a trace writes out one by one, as a Loop.

Sinkhorn's method divides a matrix by the sums of its rows and of its columns in turn, twenty times
in DeepSeek-V4. TensorRT for RTX 1.7 builds an engine of three such steps in 0.5 s, of five in 2.5 s
and of seven in 27 s, but of the Loop in 0.1 s. In ONNX Runtime the Loop takes as long as the steps,
plus some 6 microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from dynamo_moe.graph.matching import operand

_FEWEST_STEPS = 4


@dataclass(frozen=True)
class _Step:
    """``x / (ReduceSum(x, axes) + epsilon)``, whose parts nothing else uses."""

    reduce: ir.Node
    add: ir.Node
    divide: ir.Node
    key: tuple[object, ...]
    """Steps with equal keys compute the same of what they are given."""

    @property
    def operand(self) -> ir.Value:
        return operand(self.divide, 0)

    @property
    def result(self) -> ir.Value:
        return self.divide.outputs[0]


def roll_repeats(model: ir.Model) -> None:
    """Replaces runs of equal steps in a model's main graph by a Loop each, in place."""
    steps = {id(step.operand): step for node in model.graph if (step := _step(node)) is not None}
    inner = {id(step.result) for step in steps.values()}
    for first in [step for value, step in steps.items() if value not in inner]:
        chain = [first]
        while (following := steps.get(id(chain[-1].result))) is not None:
            chain.append(following)
        start, period, count = _longest_run([step.key for step in chain])
        if period * count >= _FEWEST_STEPS:
            _roll(model.graph, chain[start : start + period * count], period)


def _step(divide: ir.Node) -> _Step | None:
    """Returns the step that ends with a node, if one does."""
    if (divide.domain, divide.op_type) != ("", "Div"):
        return None
    divided = operand(divide, 0)
    add = operand(divide, 1).producer()
    if add is None or (add.domain, add.op_type) != ("", "Add"):
        return None
    reduce = operand(add, 0).producer()
    if reduce is None or (reduce.domain, reduce.op_type) != ("", "ReduceSum"):
        return None
    axes = None if len(reduce.inputs) < 2 else ir.convenience.get_const_tensor(operand(reduce, 1))
    results = divided, reduce.outputs[0], add.outputs[0]
    uses = [len(value.uses()) for value in results]
    if (
        axes is None
        or reduce.inputs[0] is not divided
        or uses != [2, 1, 1]
        or any(value.is_graph_output() for value in results)
        or divided.dtype != divide.outputs[0].dtype
        or divided.shape is None
        or divided.shape != divide.outputs[0].shape
    ):
        return None
    attributes = {name: attribute.value for name, attribute in reduce.attributes.items()}
    added = id(operand(add, 1))
    key = tuple(axes.numpy().tolist()), attributes, added, divided.dtype, str(divided.shape)
    return _Step(reduce, add, divide, key)


def _longest_run(keys: Sequence[object]) -> tuple[int, int, int]:
    """Returns start, period and count of the repetition that spares most keys.

    >>> _longest_run("cabababd")
    (1, 2, 3)
    """
    best, spared = (0, 1, 1), 0
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - period):
            count = 1
            while (
                keys[start + count * period : start + (count + 1) * period]
                == keys[start : start + period]
            ):
                count += 1
            if (count - 1) * period > spared:
                best, spared = (start, period, count), (count - 1) * period
    return best


def _roll(graph: ir.Graph, steps: Sequence[_Step], period: int) -> None:
    """Replaces steps, which repeat after a period, by a Loop."""
    first, last = steps[0], steps[-1]
    name = first.divide.name or first.result.name
    body = _body(steps[:period], f"{name}/repeated")
    # The parser of TensorRT for RTX 1.7 refuses a Loop without a condition.
    limits = [
        ir.Value(name=f"{name}/repeats", const_value=ir.tensor(len(steps) // period)),
        ir.Value(name=f"{name}/true", const_value=ir.tensor(True)),
    ]
    for limit in limits:
        graph.register_initializer(limit)
    loop = ir.node("Loop", [*limits, first.operand], {"body": body}, name=f"{name}/Loop")
    result = loop.outputs[0]
    result.name, result.type, result.shape = last.result.name, last.result.type, last.result.shape
    # What the steps add may be computed between the first step and the last.
    graph.insert_before(last.divide, loop)
    last.result.replace_all_uses_with(result, replace_graph_outputs=True)
    nodes = [node for step in steps for node in (step.reduce, step.add, step.divide)]
    graph.remove(nodes[::-1], safe=True)


def _body(steps: Sequence[_Step], name: str) -> ir.Graph:
    """Returns the Loop's body: one pass over the steps of a period."""
    trip = ir.Value(name=f"{name}/trip", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    go_on = ir.Value(name=f"{name}/go_on", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    carried = _like(steps[0].operand, f"{name}/given")
    kept = ir.node("Identity", [go_on], name=f"{name}/Identity")
    kept.outputs[0].name, kept.outputs[0].type = f"{name}/kept", go_on.type
    kept.outputs[0].shape = go_on.shape
    nodes, known = [kept], {id(steps[0].operand): carried}
    for node in (node for step in steps for node in (step.reduce, step.add, step.divide)):
        output = _like(node.outputs[0], f"{name}/{node.outputs[0].name}")
        inputs = [known.get(id(value), value) for value in node.inputs]
        attributes = list(node.attributes.values())
        nodes.append(
            ir.Node("", node.op_type, inputs, attributes, outputs=[output], name=node.name)
        )
        known[id(node.outputs[0])] = output
    return ir.Graph(
        [trip, go_on, carried], [kept.outputs[0], nodes[-1].outputs[0]], nodes=nodes, name=name
    )


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=value.shape)
