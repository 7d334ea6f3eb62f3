"""What a model computes under ``torch.vmap``, as operators on whole tensors.

A trace has it as it was called: functions that say where a batch dimension begins and ends, and
between them operators on tensors without that dimension, which exist nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from dynamo_moe.private import tracer
from dynamo_moe.tracing.in_place import writes
from dynamo_moe.tracing.nodes import NeedsRetraceError, add_graph, values


def flatten_vmaps(program: ExportedProgram) -> None:
    """Replaces what a program computes under ``torch.vmap`` by what PyTorch makes of it.

    Where that makes a constant, it stays, and the program is traced once more to be translated.
    """
    graph, mode = program.graph, tracer.fake_mode(program)
    if mode is None or not any(map(_begins, graph.nodes)):
        return
    with mode, tracer.enable_python_dispatcher():
        for region in [*_regions(graph)]:
            try:
                _flatten(graph, region)
            except NeedsRetraceError:
                return
    for node in graph.nodes:  # Calls that prepare PyTorch for it.
        if getattr(node.target, "__module__", "") == tracer.VMAP_BEGINS.__module__:
            graph.erase_node(node)
    program.graph_module.recompile()


def _begins(node: fx.Node) -> bool:
    return tracer.VMAP_BEGINS is not None and node.target is tracer.VMAP_BEGINS


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the nodes from where a first batch dimension begins to where the last one ends."""
    region: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        depth += _begins(node)
        if depth:
            region.append(node)
        if node.target is tracer.VMAP_ENDS:
            depth -= 1
            if not depth:
                yield region
                region = []


def _flatten(graph: fx.Graph, region: list[fx.Node]) -> None:
    """Puts operators on whole tensors in the place of a region's nodes."""
    inside = set(region)
    inputs = [*dict.fromkeys(x for node in region for x in node.all_input_nodes if x not in inside)]
    results = [node for node in region if not node.users.keys() <= inside]

    def run(*arguments: Any) -> Any:
        known: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
        for node in region:
            if node.op == "get_attr":
                known[node] = operator.attrgetter(str(node.target))(graph.owning_module)
            else:
                function: Any = node.target
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = function(*args, **kwargs)
        return [known[node] for node in results]

    traced = tracer.make_fx(run)(*values(inputs))
    if any(map(writes, traced.graph.nodes)):  # PyTorch's rules for batches change shapes in place.
        traced = tracer.make_fx(torch.func.functionalize(traced))(*values(inputs))
    traced.graph.eliminate_dead_code()
    with graph.inserting_before(region[0]):
        replacements = add_graph(graph, results[0], traced.graph, inputs)
    for node, replacement in zip(results, replacements, strict=True):
        node.replace_all_uses_with(replacement)
    for node in reversed(region):
        graph.erase_node(node)
