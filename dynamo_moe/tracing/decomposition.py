"""Decomposing a traced program where it has operators that ONNX has no translation for.

``ExportedProgram.run_decompositions`` traces the whole program once more, which takes twice as long
as the first trace, though few operators need it. Here each of those is traced on its own, once for
equal arguments, and takes its node's place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    schema_of,
)
from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS
from dynamo_moe.tracing.filled_ranges import overwrites_one_range, with_range
from dynamo_moe.tracing.fixed_sizes import FixedSizeError
from dynamo_moe.tracing.in_place import (
    Memories,
    Values,
    changed,
    is_known_view,
    named,
    view_of,
    writes,
)
from dynamo_moe.tracing.nodes import ASSERTIONS, Call, NeedsRetraceError, add_graph, values

_aten = torch.ops.aten
_higher_order = torch.ops.higher_order

# Regions that only change a mode, which no longer matters once the program is traced and autocast's
# casts are nodes: the place of the region's function among the arguments. Its own arguments follow.
_REGIONS: Mapping[Any, int] = {
    _higher_order.wrap_with_set_grad_enabled: 1,
    _higher_order.wrap_with_autocast: 4,
}
# What composites come down to, with the same arguments: ONNX knows no strides.
_SIMPLER = {_aten.reshape.default: _aten.view.default}

Decompositions = Mapping[Any, Callable[..., Any]]


@phase("decomposition")
def decomposed(
    module: fx.GraphModule,
    is_translated: Callable[[Any], bool],
    decompositions: Decompositions,
    mode: FakeTensorMode,
) -> fx.GraphModule:
    """Returns a program of operators that have translations, as far as they decompose into them.

    Args:
        module: The traced program, with values in its nodes' metadata; left as it is.
        is_translated: Whether an operator has a translation.
        decompositions: Decompositions by operator; composite operators need none.
        mode: The mode of the fake tensors that are the nodes' values.

    Raises:
        NeedsRetraceError: If the program has control flow without a translation, or changes memory
            that is shared in ways that its graph does not show.
    """
    with mode, tracer.enable_python_dispatcher():
        return _Decomposer(is_translated, decompositions).run(module)


def _take_no_offsets(graph: fx.Graph) -> None:
    """Replaces the offsets of tensors in memory, which files do not have, by equal sizes.

    A trace finds a size again by any tensor that shows it, such as the rest from there on. Of those
    that only its assertions compare, nothing is left.

    Raises:
        FixedSizeError: If there is no such size.
    """
    offset = _aten.sym_storage_offset.default
    if not graph.find_nodes(op="call_function", target=offset):
        return
    for node in [*graph.nodes]:
        if node.target in ASSERTIONS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    sizes: dict[str, fx.Node] = {}
    for node in [*graph.nodes]:
        value = node.meta.get("val")
        if node.target is offset:
            if str(value) not in sizes:
                raise FixedSizeError(f"{value} is known as the offset of a tensor alone")
            node.replace_all_uses_with(sizes[str(value)])
            graph.erase_node(node)
        elif isinstance(value, torch.SymInt):
            sizes.setdefault(str(value), node)


class _Decomposer:
    def __init__(
        self, is_translated: Callable[[Any], bool], decompositions: Decompositions
    ) -> None:
        self._is_translated = is_translated
        self._decompositions: dict[Any, Callable[..., Any]] = {**decompositions, **DECOMPOSITIONS}
        self._graph = fx.Graph()
        self._traces: dict[Any, fx.Graph] = {}

    def run(self, module: fx.GraphModule, *, is_branch: bool = False) -> fx.GraphModule:
        """Returns a module decomposed; ``is_branch``: it is a branch or a loop of another."""
        self._graph, outside = fx.Graph(), self._graph
        inputs = [] if is_branch else module.graph.find_nodes(op="placeholder")
        output = self._graph.output(self._copy(module, None, inputs))
        output.meta = dict(module.graph.output_node().meta)
        _take_no_offsets(self._graph)
        result = fx.GraphModule(module, self._graph)
        result.meta.update(module.meta)
        self._graph = outside
        for node in result.graph.find_nodes(op="get_attr"):
            inner = _attribute(node)
            if isinstance(inner, fx.GraphModule):
                setattr(result, node.target, self.run(inner, is_branch=True))
        return result

    def _copy(
        self,
        module: fx.GraphModule,
        arguments: Sequence[Any] | None,
        inputs: Sequence[fx.Node] = (),
    ) -> Any:
        """Copies a graph's nodes and returns its outputs; without arguments, its inputs too."""
        memories = Memories([*module.graph.nodes], inputs)
        new = Values(memories, self._call)
        remaining = iter(arguments or ())
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            if node.op == "placeholder" and arguments is not None:
                new[node] = next(remaining)
            elif node.op == "get_attr" and _is_region(node):
                continue
            elif node.op != "call_function":
                if arguments is not None:
                    raise NeedsRetraceError(f"{node.format_node()} is in a region")
                new[node] = copy = self._graph.node_copy(node)
                copy.name = node.name  # A new graph would rename what Python calls input.
            elif writes(node):
                new.change(node, self._changed_owner(node, memories, new))
            else:
                new[node] = self._call(node, new)
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node, new: Values, target: Any = None) -> Any:
        """Returns the node or nodes that replace a call's result; ``target`` is called instead."""
        target = node.target if target is None else target
        if target in _REGIONS:
            function = _REGIONS[target]
            region = _attribute(node.args[function])
            arguments = fx.map_arg(node.args[function + 1 :], new.__getitem__)
            return self._copy(region, pytree.tree_leaves(arguments))
        if isinstance(target, HigherOrderOperator) and not self._is_translated(target):
            raise NeedsRetraceError(f"{target} is control flow")
        if target is operator.getitem:
            whole: Any = fx.map_arg(node.args[0], new.__getitem__)
            index: Any = node.args[1]
            if not isinstance(whole, fx.Node):
                return whole[index]
        if isinstance(target, OpOverload):
            if target is _aten.detach_.default:
                target = _aten.detach.default
            better = _better(target, node)
            if better is not target:
                target = better
            elif _is_only_cast(node):
                return self._cast(node, new)
            target = _SIMPLER.get(target, target)
            if not isinstance(target, OpOverload) or self._decomposes(target):
                return self._traced(Call(target, node.args, node.kwargs), node, new)
        copy = self._graph.node_copy(node, new.__getitem__)
        copy.target = target
        return copy

    def _changed_owner(self, node: fx.Node, memories: Memories, new: Values) -> Any:
        """Returns what a change of a tensor, or of a view of it, makes of its memory's owner."""
        tensor: Any = node.args[0]
        owner, views = memories.owners[tensor], memories.views(tensor)
        if not views or overwrites_one_range(node, views):
            value = self._written(node, new)
            if value is not None:
                return with_range(self._graph, node, views, new[owner], value)
        if not all(map(is_known_view, views)):
            raise NeedsRetraceError(f"{node.format_node()} changes what is not known as a view")
        if not _is_compact(owner.meta["val"]):  # Another order might not have these views.
            raise NeedsRetraceError(f"{owner.format_node()} is no row-major tensor, and is changed")
        steps = [view_of(step) for step in (*views, node)]
        return self._traced(Call(changed, (owner, steps), {}), node, new)

    def _written(self, node: fx.Node, new: Values) -> Any:
        """Returns what a change writes into its tensor; None if no operator gives that alone."""
        if node.target is _aten.copy_.default:
            if _is_alike(*values(node.args[:2])):
                return new[cast(fx.Node, node.args[1])]
            return self._traced(Call(_copied, node.args, node.kwargs), node, new)
        functional = _functional(node)
        return None if functional is None else self._call(node, new, functional)

    def _cast(self, node: fx.Node, new: Values) -> fx.Node:
        """Returns the node that replaces a cast."""
        operand, dtype = cast(fx.Node, node.args[0]), node.meta["val"].dtype
        if operand.meta["val"].dtype == dtype:
            return cast(fx.Node, new[operand])
        copy = self._graph.node_copy(node, new.__getitem__)
        copy.target = _aten._to_copy.default
        copy.args, copy.kwargs = copy.args[:1], {"dtype": dtype}
        return copy

    def _decomposes(self, target: OpOverload) -> bool:
        composite = tracer.can_decompose(target)
        if composite and any(value.alias_info is not None for value in schema_of(target).arguments):
            return True  # Views come down to a few operators, whose translations are better.
        if self._is_translated(target):
            return False
        return composite or target in self._decompositions

    def _traced(self, call: Call, node: fx.Node, new: Values) -> Any:
        """Copies the nodes that a call in the place of a node decomposes into."""
        traced = self._traces.get(call.key)
        if traced is None:
            traced = self._trace(call)
            if not _has_new_sizes(traced):
                self._traces[call.key] = traced
        inputs = [new[argument] for argument in call.nodes]
        result = add_graph(self._graph, node, traced, inputs)
        if call.key not in self._traces:
            _keep_values(node, result, inputs)
        return result

    def _trace(self, call: Call) -> fx.Graph:
        trace = tracer.make_fx(call, decomposition_table=self._decompositions)
        traced: fx.GraphModule = trace(*map(_compact, call.values))
        if any(map(writes, traced.graph.nodes)):
            if call.target is changed:  # PyTorch decomposes what it makes of a diagonal so.
                raise NeedsRetraceError("a view of a tensor that is changed has no inverse")
            traced = self.run(traced, is_branch=True)
        traced.graph.eliminate_dead_code()
        return traced.graph


def _better(target: Any, node: fx.Node) -> Any:
    """Returns our own function for a call; another name's operator may have one in turn."""
    better = DECOMPOSITIONS.get(target)
    while better is not None and better.applies(*values(node.args), **values(node.kwargs)):
        target = better.function
        better = DECOMPOSITIONS.get(target)
    return target


def _is_only_cast(node: fx.Node) -> bool:
    """Whether a node gives a tensor of another dtype, or the tensor itself, and does no more."""
    target: Any = node.target
    if target.overloadpacket is not _aten.to:
        return False
    options = (*node.args[1:], *node.kwargs.values())
    if any(option is True or isinstance(option, torch.memory_format) for option in options):
        return False
    tensor: Any = values(node.args[0])
    return bool(tensor.device == node.meta["val"].device)


def _functional(node: fx.Node) -> OpOverload | None:
    """Returns the operator that gives what one such as ``add_`` writes; None if there is none."""
    schema = schema_of(named(node.target))
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name[-1] == "_" else None
    functional = getattr(packet, schema.overload_name or "default", None)
    if not isinstance(functional, OpOverload) or schema_of(functional).is_mutable:
        return None
    same = functional(*values(node.args), **values(node.kwargs)).dtype == node.meta["val"].dtype
    return functional if same else None


def _copied(changed: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The copy that ``copy_`` writes; the exporter's translation of ``copy`` does not expand it."""
    return source.to(changed.dtype).expand(changed.shape)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and [*map(str, one.shape)] == [*map(str, other.shape)]


def _has_new_sizes(traced: fx.Graph) -> bool:
    """Whether a trace makes sizes that depend on values, as ``nonzero`` does.

    Another call makes others, though its arguments have the same sizes.
    """
    input_symbols, new_symbols = set[Any](), set[Any]()
    for node in traced.nodes:
        sizes = new_symbols if node.op == "call_function" else input_symbols
        sizes.update(tracer.free_unbacked_symbols(node.meta.get("val")))
    return not new_symbols <= input_symbols


def _keep_values(node: fx.Node, result: Any, inputs: Sequence[Any]) -> None:
    """Gives what replaces a node the node's own sizes, whose names other nodes use."""
    values = pytree.tree_leaves(node.meta["val"])
    for copy, value in zip(pytree.tree_leaves(result), values, strict=True):
        if isinstance(copy, fx.Node) and copy not in inputs:
            copy.meta["val"] = value


def _is_region(node: fx.Node) -> bool:
    return isinstance(_attribute(node), fx.GraphModule) and all(
        user.target in _REGIONS for user in node.users
    )


def _attribute(node: Any) -> Any:
    return operator.attrgetter(node.target)(node.graph.owning_module)


def _is_compact(value: Tensor) -> bool:
    """Whether a tensor is in row-major order."""
    return [*map(str, value.stride())] == [*map(str, _compact(value).stride())]


def _compact(value: Any) -> Any:
    """Returns a tensor of the same sizes in row-major order, as all of ONNX's are."""
    return value.new_empty(value.shape) if isinstance(value, Tensor) else value
