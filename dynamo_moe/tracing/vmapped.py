"""What a model computes under ``torch.vmap``, as operators on whole tensors.

A trace has it as it was called: functions that say where a batch dimension begins and ends, and
between them operators on tensors without that dimension, which exist nowhere else.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from dynamo_moe.private import tracer
from dynamo_moe.tracing.in_place import writes
from dynamo_moe.tracing.nodes import add_graph, values

_LOG = logging.getLogger(__name__)


def flatten_vmaps(program: ExportedProgram) -> None:
    """Replaces what a program computes under ``torch.vmap`` by what PyTorch makes of it.

    Where PyTorch cannot, or makes constants, it stays, and the program is traced once more to be
    translated.
    """
    graph, mode = program.graph, tracer.fake_mode(program)
    if mode is None or not any(map(_begins, graph.nodes)):
        return
    for region in [*_regions(graph)]:
        try:
            with mode, tracer.enable_python_dispatcher(), tracer.no_layers_left():
                traced = _traced(region)
        except Exception:  # Rules for batches, and whatever is under it.
            _LOG.info("a vmap stays as it is", exc_info=True)
            continue
        if not traced.find_nodes(op="get_attr"):
            _replace(program, region, traced)
    if not any(map(_begins, graph.nodes)):
        for node in graph.find_nodes(op="call_function", target=tracer.VMAP_PREPARES):
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


def _inputs(region: Sequence[fx.Node]) -> list[fx.Node]:
    inside = {*region}
    return [*dict.fromkeys(x for node in region for x in node.all_input_nodes if x not in inside)]


def _results(region: Sequence[fx.Node]) -> list[fx.Node]:
    inside = {*region}
    return [node for node in region if not node.users.keys() <= inside]


def _traced(region: Sequence[fx.Node]) -> fx.Graph:
    """Returns the operators on whole tensors that a region comes down to."""
    inputs, results = _inputs(region), _results(region)

    def run(*arguments: Any) -> Any:
        known: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
        for node in region:
            if node.op == "get_attr":
                known[node] = operator.attrgetter(str(node.target))(node.graph.owning_module)
            else:
                function: Any = node.target
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = function(*args, **kwargs)
        return [known[node] for node in results]

    traced: fx.GraphModule = tracer.make_fx(run)(*values(inputs))
    if any(map(writes, traced.graph.nodes)):  # PyTorch's rules for batches change shapes in place.
        traced = tracer.make_fx(torch.func.functionalize(traced))(*values(inputs))
    traced.graph.eliminate_dead_code()
    return traced.graph


def _replace(program: ExportedProgram, region: Sequence[fx.Node], traced: fx.Graph) -> None:
    """Puts the nodes of another graph in the place of a region."""
    results = _results(region)
    with program.graph.inserting_before(region[0]):
        replacements = add_graph(program.graph, region[0], traced, _inputs(region))
    for node, replacement in zip(results, replacements, strict=True):
        node.replace_all_uses_with(replacement)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg = TensorArgument(replacement.name)
    for node in reversed(region):
        program.graph.erase_node(node)
