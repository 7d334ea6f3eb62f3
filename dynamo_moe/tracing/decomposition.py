"""Decomposing a traced program where it has operators that ONNX has no translation for.

``ExportedProgram.run_decompositions`` traces the whole program once more, which takes twice as long
as the first trace, though few operators need it. Here each of those is traced on its own, once for
equal arguments, and takes its node's place.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import (
    FakeTensorMode,
    HigherOrderOperator,
    OperatorBase,
    OpOverload,
    schema_of,
    storage_key,
)
from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS
from dynamo_moe.tracing.fixed_sizes import FixedSizeError
from dynamo_moe.tracing.nodes import Call, NeedsRetraceError, add_call, add_graph, values

_aten = torch.ops.aten
_higher_order = torch.ops.higher_order

# Regions that only change a mode, which no longer matters once the program is traced and autocast's
# casts are nodes: the place of the region's function among the arguments. Its own arguments follow.
_REGIONS: Mapping[Any, int] = {
    _higher_order.wrap_with_set_grad_enabled: 1,
    _higher_order.wrap_with_autocast: 4,
}
# Composites whose results are new tensors, though nothing in their schema says so.
_FRESH = frozenset(
    getattr(_aten, name).default
    for name in (
        *("batch_norm", "group_norm", "layer_norm"),
        *("conv1d", "conv2d", "conv3d", "linear", "matmul"),
    )
)
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
        NeedsRetraceError: If the program has control flow without a translation, or changes tensors
            in ways that a single node does not show.
    """
    with mode, tracer.enable_python_dispatcher():
        return _Decomposer(is_translated, decompositions).run(module)


def _take_no_offsets(graph: fx.Graph) -> None:
    """Replaces the offsets of tensors in memory, which files do not have, by equal sizes.

    A trace finds a size again by any tensor that shows it, such as the rest from there on.

    Raises:
        FixedSizeError: If there is no such size.
    """
    sizes: dict[str, fx.Node] = {}
    for node in [*graph.nodes]:
        value = node.meta.get("val")
        if node.target is torch.ops.aten.sym_storage_offset.default:
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
            inner = _attribute(result, node)
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
        new: dict[fx.Node, Any] = {}
        nodes = [*module.graph.nodes]
        written = _Written(nodes, inputs)
        remaining = iter(arguments or ())
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            if node.op == "placeholder" and arguments is not None:
                new[node] = next(remaining)
            elif node.op == "get_attr" and _is_region(module, node):
                continue
            elif node.op != "call_function":
                if arguments is not None:
                    raise NeedsRetraceError(f"{node.format_node()} is in a region")
                new[node] = copy = self._graph.node_copy(node)
                copy.name = node.name  # A new graph would rename what Python calls input.
            else:
                new[node] = self._call(module, node, new)
                names = written.names(node)
                if names and _written_whole(node) is not None:
                    new[node] = _join(self._graph, node, new[names[0]], new[node])
                new.update(dict.fromkeys(names, new[node]))
        raise AssertionError("a graph ends with its output")

    def _call(self, module: fx.GraphModule, node: fx.Node, new: dict[fx.Node, Any]) -> Any:
        """Returns the node or nodes that replace a call's result."""
        target: Any = node.target
        if target in _REGIONS:
            function = _REGIONS[target]
            region = _attribute(module, node.args[function])
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
            if target is _aten.copy_.default:
                return self._traced(_copied, node, new)
            if target is _aten.detach_.default:
                target = _aten.detach.default
            elif schema_of(target).is_mutable:
                target = _functional(target, node)
            better = DECOMPOSITIONS.get(target)
            if better is not None and better.applies(*values(node.args), **values(node.kwargs)):
                target = better.function
            elif _is_only_cast(node):
                return self._cast(node, new)
            target = _SIMPLER.get(target, target)
            if not isinstance(target, OpOverload) or self._decomposes(target):
                return self._traced(target, node, new)
        copy = self._graph.node_copy(node, new.__getitem__)
        copy.target = target
        return copy

    def _cast(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> fx.Node:
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

    def _traced(self, target: Callable[..., Any], node: fx.Node, new: dict[fx.Node, Any]) -> Any:
        """Copies the nodes that an operator decomposes into."""
        call = Call(target, node)
        traced = self._traces.get(call.key)
        if traced is None:
            traced = self._trace(call, target)
            if not _has_new_sizes(traced):
                self._traces[call.key] = traced
        inputs = [new[argument] for argument in call.nodes]
        result = add_graph(self._graph, node, traced, inputs)
        if call.key not in self._traces:
            _keep_values(node, result, inputs)
        return result

    def _trace(self, call: Call, target: Callable[..., Any]) -> fx.Graph:
        trace = tracer.make_fx(call, decomposition_table=self._decompositions)
        traced: fx.Graph = trace(*map(_compact, call.values)).graph
        written = _Written([*traced.nodes])
        for node in traced.nodes:
            names = written.names(node)
            if names:
                if _written_whole(node) is not None:
                    raise NeedsRetraceError(f"{target} writes slices")
                node.target = _functional(node.target, node)
            for name in names:
                name.replace_all_uses_with(node, partial(operator.lt, node))
        traced.eliminate_dead_code()
        return traced


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


class _Written:
    """The tensors that a graph changes in place.

    A tensor whose memory no other shares until its last change can be followed by its new value
    from there on; such as a buffer, which a file does not keep from call to call. Slices may share
    it that serve to be overwritten.
    """

    def __init__(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node] = ()) -> None:
        """Finds them.

        Args:
            nodes: The graph's.
            inputs: Those of the program, of which nobody reads what is written into them.

        Raises:
            NeedsRetraceError: If others share a tensor's memory.
        """
        memories = Counter(map(_memory, inputs))
        self._origins: dict[fx.Node, fx.Node] = {}
        self._names: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, int] = {}
        calls = [node for node in nodes if isinstance(node.target, OperatorBase)]
        for number, node in enumerate(calls):
            if _writes(node):
                if not isinstance(node.args[0], fx.Node):
                    raise NeedsRetraceError(f"{node.format_node()} changes several tensors")
                changed = _written_whole(node) or node.args[0]
                self._origins[node] = origin = self._origin(changed)
                self._names.setdefault(origin, [origin]).append(node)
                last[origin] = number
        for node in last:
            is_alone = node in inputs and memories[_memory(node)] == 1
            if not (is_alone or _is_fresh(node)):
                raise NeedsRetraceError(f"{node.format_node()} is changed, and shares its memory")
        for number, node in enumerate(calls):
            later = any(last.get(self._origin(a), -1) > number for a in node.all_input_nodes)
            if later and not (_writes(node) or _is_fresh(node) or _only_written(node)):
                raise NeedsRetraceError(f"{node.format_node()} shares memory that is changed")

    def names(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes that stand for the tensor that ``node`` changes, up to ``node``."""
        origin = self._origins.get(node)
        names = [] if origin is None else self._names[origin]
        return names[: names.index(node)] if names else []

    def _origin(self, node: Any) -> Any:
        return self._origins.get(node, node)


def _memory(node: fx.Node) -> Any:
    """Returns what an input of a program shares with those of the same memory."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, Tensor) else node


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    mutable = isinstance(target, OpOverload) and schema_of(target).is_mutable
    return mutable and target is not _aten.detach_.default


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node's result has memory of its own, by its schema."""
    target: Any = node.target
    if target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_fresh(node.args[0])
    if not isinstance(target, OpOverload):
        return False
    if target in _FRESH:
        return True
    aliases = any(value.alias_info is not None for value in schema_of(target).returns)
    return not aliases and not tracer.can_decompose(target)


def _functional(target: OpOverload, node: fx.Node) -> OpOverload:
    """Returns the operator that gives what an operator such as ``add_`` writes."""
    schema = schema_of(target)
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name[-1] == "_" else None
    functional = getattr(packet, schema.overload_name or "default", None)
    if not isinstance(functional, OpOverload) or schema_of(functional).is_mutable:
        raise NeedsRetraceError(f"{target} changes a tensor")
    if functional(*values(node.args), **values(node.kwargs)).dtype != node.meta["val"].dtype:
        raise NeedsRetraceError(f"{target} changes a tensor of another dtype")
    return functional


def _copied(changed: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The copy that ``copy_`` writes; the exporter's translation of ``copy`` does not expand it."""
    return source.to(changed.dtype).expand(changed.shape)


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


def _is_region(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(_attribute(module, node), fx.GraphModule) and all(
        user.target in _REGIONS for user in node.users
    )


def _attribute(module: fx.GraphModule, node: Any) -> Any:
    return operator.attrgetter(node.target)(module) if node.op == "get_attr" else None


def _compact(value: Any) -> Any:
    """Returns a tensor of the same sizes in row-major order, as all of ONNX's are."""
    return value.new_empty(value.shape) if isinstance(value, Tensor) else value


# --- Tensors that a program fills slice by slice: without writing, their parts joined ---
# Rotary embeddings of multi-head latent attention are put together so.

# Operators whose result does not depend on what they overwrite, beyond its shape.
_OVERWRITE = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
)


class _Cut(NamedTuple):
    """The arguments of a slice."""

    dimension: int = 0
    start: Any = None
    end: Any = None
    step: Any = 1

    @property
    def is_whole(self) -> bool:
        """Whether it reaches from the first element to the last, whatever the size."""
        return self.start in (None, 0) and self.end in (None, sys.maxsize) and self.step == 1


def _written_whole(write: fx.Node) -> Any:
    """Returns the tensor of which a node overwrites a slice, if the slice has no other use."""
    if write.target not in _OVERWRITE or write.users:
        return None
    views = _views(write)
    # A slice of a slice is not one range of the whole.
    parts = [view for view in views if not _cut(view).is_whole]
    return views[-1].args[0] if views and len(parts) <= 1 else None


def _only_written(node: Any) -> bool:
    """Whether a node is a slice of known bounds that is made only to be overwritten."""
    return (
        isinstance(node, fx.Node)
        and node.target is _aten.slice.Tensor
        and all(
            user.args[0] is node and (user.target in _OVERWRITE or _only_written(user))
            for user in node.users
        )
        and (_cut(node).is_whole or _bounds(node) is not None)
    )


def _join(graph: fx.Graph, write: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    """Adds the tensor that a write leaves behind: its ``_written_whole`` with the value in it.

    Both, ``whole`` from before the write, are nodes of ``graph``.
    """
    parts = [view for view in _views(write) if not _cut(view).is_whole]
    bounds = _bounds(parts[0]) if parts else None
    if bounds is None:
        return value
    dimension, start, end, size = bounds
    joined = [
        *_rest(graph, write, whole, (dimension, 0, start)),
        value,
        *_rest(graph, write, whole, (dimension, end, size)),
    ]
    return add_call(graph, write, _aten.cat.default, joined, dimension)


def _rest(
    graph: fx.Graph, write: fx.Node, whole: fx.Node, reach: tuple[int, int, int]
) -> list[Any]:
    """Returns nodes that make up a range of a dimension: the parts that were joined, if it can."""
    dimension, start, end = reach
    if start >= end:
        return []
    if whole.target is _aten.cat.default and _joined_along(whole) == dimension:
        joined: Any = whole.args[0]
        sizes = [part.meta["val"].shape[dimension] for part in joined]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        starts = [0, *ends]
        if start in starts and end in ends:
            return list(joined[starts.index(start) : ends.index(end) + 1])
    return [add_call(graph, write, _aten.slice.Tensor, whole, dimension, start, end)]


def _joined_along(cat: Any) -> int:
    """Returns the dimension that a concatenation joins its parts along."""
    dimension: int = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    rank: int = cat.meta["val"].ndim
    return dimension % rank


def _views(write: fx.Node) -> list[Any]:
    """Returns the slices that lead to what a node overwrites, the last one first."""
    views: list[Any] = []
    view: Any = write.args[0]
    while _only_written(view):
        views.append(view)
        view = view.args[0]
    return views


def _cut(view: Any) -> _Cut:
    return _Cut(*view.args[1:])


def _bounds(view: Any) -> tuple[int, int, int, int] | None:
    """Returns dimension, start, end and size, none of them negative; None: they are symbolic."""
    dimension, start, end, step = _cut(view)
    size = view.args[0].meta["val"].shape[dimension]
    known = all(isinstance(number, int) for number in (size, start or 0, end or 0))
    if not known or step != 1:
        return None
    start, end, _ = slice(start, end).indices(size)
    return dimension % view.meta["val"].ndim, start, max(start, end), size
