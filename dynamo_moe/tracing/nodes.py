"""Nodes of traced programs: their arguments and values, and how others are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from dynamo_moe import pytree

ASSERTIONS = frozenset(
    {torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default}
)
"""Assertions about the example's sizes and tensors, which a trace writes."""

# The entries of a node's metadata that describe its values, and the new sizes in them.
_VALUE_KEYS = ("val", "unbacked_bindings")


class NeedsRetraceError(Exception):
    """The program holds what only a trace of the whole program can decompose."""


class UnfollowedError(Exception):
    """The model does what no right graph is made of, here or by PyTorch."""


def all_nodes(program: ExportedProgram) -> list[fx.Node]:
    """Returns the nodes of all the program's graphs."""
    graphs = (
        module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)
    )
    return [node for graph_module in graphs for node in graph_module.graph.nodes]


def values(arguments: Any) -> Any:
    """Returns arguments with values in place of nodes."""
    return fx.map_arg(arguments, lambda node: node.meta["val"])


def add_call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Adds a call with its value; the rest of its metadata is another node's."""
    node = graph.call_function(target, args)
    node.meta = {**like.meta, "val": target(*values(args))}
    return node


def add_graph(graph: fx.Graph, like: fx.Node, added: fx.Graph, inputs: Sequence[Any]) -> Any:
    """Adds the calls of a graph to another, on ``inputs``, with their values; returns its results.

    The rest of the calls' metadata is another node's.

    Raises:
        NeedsRetraceError: If the graph has a constant, which is an attribute of another module.
    """
    if added.find_nodes(op="get_attr"):
        raise NeedsRetraceError(f"{like.target} makes a constant")
    copies: dict[fx.Node, Any] = dict(zip(added.find_nodes(op="placeholder"), inputs, strict=True))
    results = graph.graph_copy(added, copies)
    for node, copy in copies.items():
        if node.op == "call_function":
            copy.meta = {**like.meta, **{key: node.meta.get(key) for key in _VALUE_KEYS}}
    return results


class Call:
    """A call, as a function of those of its arguments that are nodes.

    Attributes:
        target: What is called.
        nodes: These arguments.
        values: Their values.
        key: Equal for calls that lead to equal traces.
    """

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        self.target = target
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.nodes = [leaf for leaf in self._leaves if isinstance(leaf, fx.Node)]
        self.values = values(self.nodes)
        self.key = target, self._spec, tuple(map(_description, values(self._leaves)))

    def __call__(self, *values: Any) -> Any:
        """Calls the node's target with other values."""
        remaining = iter(values)
        leaves = [next(remaining) if isinstance(x, fx.Node) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.target(*args, **kwargs)


def _description(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (tuple(map(str, value.shape)), value.dtype, value.device)
    return (type(value), str(value))
