"""Names of a finished graph that depend on the graph alone.

The tracer and the optimiser count what they make, so their names depend on the way. Here nodes are
named after their module and operator, their results after them, and constants and outputs in the
order in which they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import onnx_ir as ir

from dynamo_moe.files.copies import Copies, Copy, with_copies
from dynamo_moe.moe_nodes.nodes import module_of


def name_canonically(
    model: ir.Model, weights: Collection[str], copies: Copies | None = None
) -> dict[str, str]:
    """Names all but the inputs and the weights of a graph, and orders its weights by their use.

    Args:
        model: The graph.
        weights: The names of its initializers that are weights, and not constants of the nodes.
        copies: Copies of its nodes, which are named with them.

    Returns:
        The new names by the old ones.
    """
    graph = model.graph
    kept = list(graph.inputs)
    kept += [value for name, value in graph.initializers.items() if name in weights]
    taken = {str(value.name) for value in kept}
    fixed = set(kept)
    renamed: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def unique(name: str) -> str:
        counts[name] += 1
        number = counts[name]
        numbered = name if number == 1 else f"{name}_{number}"
        return numbered if numbered not in taken else unique(name)

    for output in graph.outputs:
        if output not in fixed:
            renamed[str(output.name)] = output.name = unique("output")
            fixed.add(output)
    nodes = list(with_copies(graph.all_nodes(), copies or {}))
    initializers = _by_use(graph, nodes)
    graph.initializers.clear()
    for value in initializers:
        value.metadata_props.clear()
        if value not in fixed:
            name = unique("constant")
            renamed[str(value.name)] = name
            value.name = name
        graph.initializers.add(value)
    for node in nodes:
        module, operator = _module_of(node), node.op_type
        node.name = its = unique(f"{module}/{operator}" if module else operator)
        for position, output in enumerate(node.outputs):
            if not isinstance(node, Copy):
                output.metadata_props.clear()  # The tracer's name of it.
            if output not in fixed and (before := output.name):
                name = f"{its}:{position}" if position else its
                renamed[before] = name
                output.name = name
    return renamed


def _module_of(node: ir.Node | Copy) -> str:
    return node.module if isinstance(node, Copy) else module_of(node)


def _by_use(graph: ir.Graph, nodes: Sequence[ir.Node | Copy]) -> list[ir.Value]:
    """Returns a graph's initializers in the order in which its nodes use them."""
    initializers = dict.fromkeys(graph.initializers.values())
    used = (value for node in nodes for value in node.inputs if value in initializers)
    return [value for value in dict.fromkeys((*used, *initializers)) if value is not None]
