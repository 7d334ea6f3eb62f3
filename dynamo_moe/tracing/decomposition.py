"""Decomposing a traced program where it has operators that ONNX has no translation for.

``ExportedProgram.run_decompositions`` traces the whole program once more, which takes twice as long
as the first trace, though few operators need it. Here each of those is traced on its own, once for
equal arguments, and takes its node's place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS
from dynamo_moe.tracing.slice_writes import join, only_written, written_whole

__all__ = ["NeedsRetraceError", "decomposed"]

_aten = torch.ops.aten
_higher_order = torch.ops.higher_order

# Regions that change a mode which no longer matters once traced, and once autocast's casts are
# nodes: where their function is among the arguments. Its own arguments follow.
_REGIONS: Mapping[Any, int] = {
    _higher_order.wrap_with_set_grad_enabled: 1,
    _higher_order.wrap_with_autocast: 4,
}
# Composites whose results are new tensors, though nothing in their schema says so.
_FRESH = frozenset(
    {
        _aten.batch_norm.default,
        _aten.conv1d.default,
        _aten.conv2d.default,
        _aten.conv3d.default,
        _aten.group_norm.default,
        _aten.layer_norm.default,
        _aten.linear.default,
        _aten.matmul.default,
    }
)

# What a node's metadata say of its own values: these, and where new sizes are in them.
_OF_VALUES = ("val", "unbacked_bindings")

Decompositions = Mapping[Any, Callable[..., Any]]


class NeedsRetraceError(Exception):
    """The program holds what only a trace of the whole program can decompose."""


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
        decompositions: Of operators, by operator; composite ones need none.
        mode: The mode of the values.

    Raises:
        NeedsRetraceError: If the program has control flow, or changes tensors in ways that cannot
            be told from a single node.
    """
    work = _Decomposer(module, is_translated, decompositions)
    with mode, enable_python_dispatcher():
        return work.run()


class _Decomposer:
    def __init__(
        self,
        module: fx.GraphModule,
        is_translated: Callable[[Any], bool],
        decompositions: Decompositions,
    ) -> None:
        self._module = module
        self._is_translated = is_translated
        self._decompositions: dict[Any, Callable[..., Any]] = {**decompositions, **DECOMPOSITIONS}
        self._graph = fx.Graph()
        self._traces: dict[Any, fx.GraphModule] = {}

    def run(self) -> fx.GraphModule:
        outputs = self._copy(self._module, None)
        output = self._graph.output(outputs)
        output.meta = dict(next(iter(reversed(self._module.graph.nodes))).meta)
        result = fx.GraphModule(self._module, self._graph)
        result.meta.update(self._module.meta)
        return result

    def _copy(self, module: fx.GraphModule, arguments: Sequence[Any] | None) -> Any:
        """Copies a graph's nodes and returns its outputs; without arguments, its inputs too."""
        new: dict[fx.Node, Any] = {}
        written = _Written(module.graph.nodes)
        remaining = iter(arguments or ())
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            if node.op == "placeholder" and arguments is not None:
                new[node] = next(remaining)
            elif node.op == "get_attr" and _is_region(module, node):
                continue
            elif node.op != "call_function":
                if arguments is not None or isinstance(_attribute(module, node), fx.GraphModule):
                    raise NeedsRetraceError(f"{node.format_node()}")
                new[node] = copy = self._graph.node_copy(node)
                copy.name = node.name  # A new graph would rename what Python calls input.
            else:
                new[node] = self._call(module, node, new)
                names = written.names(node)
                if names and written_whole(node) is not None:
                    new[node] = join(self._graph, node, new[names[0]], new[node])
                new.update(dict.fromkeys(names, new[node]))
        raise AssertionError("a graph ends with its output")

    def _call(self, module: fx.GraphModule, node: fx.Node, new: dict[fx.Node, Any]) -> Any:
        """Returns what takes the place of a call's result."""
        target: Any = node.target
        if target in _REGIONS:
            function = _REGIONS[target]
            region = _attribute(module, node.args[function])
            given = fx.map_arg(node.args[function + 1 :], new.__getitem__)
            return self._copy(region, pytree.tree_leaves(given))
        if isinstance(target, HigherOrderOperator):
            raise NeedsRetraceError(f"{target} is control flow")
        if target is operator.getitem:
            whole: Any = fx.map_arg(node.args[0], new.__getitem__)
            place: Any = node.args[1]
            if not isinstance(whole, fx.Node):
                return whole[place]
        if isinstance(target, OpOverload):
            if target is _aten.copy_.default:
                return self._traced(_copied, node, new)
            if target is _aten.detach_.default:
                target = _aten.detach.default
            elif target._schema.is_mutable:
                target = _functional(target, node)
            better = DECOMPOSITIONS.get(target)
            if better is not None and better.applies(*_values(node.args), **_values(node.kwargs)):
                return self._traced(better.function, node, new)
            if self._decomposes(target):
                return self._traced(target, node, new)
        copy = self._graph.node_copy(node, new.__getitem__)
        copy.target = target
        return copy

    def _decomposes(self, target: OpOverload) -> bool:
        composite = target._can_decompose()
        if composite and any(value.alias_info is not None for value in target._schema.arguments):
            return True  # Views: one of the few that they come down to has the better translation.
        if self._is_translated(target):
            return False
        return composite or target in self._decompositions

    def _traced(self, target: Callable[..., Any], node: fx.Node, new: dict[fx.Node, Any]) -> Any:
        """Copies the nodes that an operator decomposes into."""
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = [
            _compact(leaf.meta["val"]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves
        ]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        key = (target, spec, tuple(map(_identity, values)))
        traced = self._traces.get(key)
        if traced is None:
            traced = self._trace(target, values, places, spec)
            if not _has_new_sizes(traced):
                self._traces[key] = traced
        copies: dict[fx.Node, Any] = {}
        given = [new[leaves[place]] for place in places]
        remaining = iter(given)
        for inner in traced.graph.nodes:
            if inner.op == "output":
                result = fx.map_arg(inner.args[0], copies.__getitem__)
                if key not in self._traces:
                    _keep_values(node, result, given)
                return result
            if inner.op == "placeholder":
                copies[inner] = next(remaining)
            elif inner.op == "get_attr":
                raise NeedsRetraceError(f"{target} makes a constant")
            else:
                copies[inner] = copy = self._graph.node_copy(inner, copies.__getitem__)
                own = {name: inner.meta.get(name) for name in _OF_VALUES}
                copy.meta = {**node.meta, **own}
        raise AssertionError("a graph ends with its output")

    def _trace(
        self, target: Callable[..., Any], values: Sequence[Any], places: Sequence[int], spec: Any
    ) -> fx.GraphModule:
        def call(*given: Any) -> Any:
            leaves = list(values)
            for place, value in zip(places, given, strict=True):
                leaves[place] = value
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return target(*args, **kwargs)

        traced: fx.GraphModule = make_fx(call, decomposition_table=self._decompositions)(
            *(values[place] for place in places)
        )
        written = _Written(traced.graph.nodes)
        for node in traced.graph.nodes:
            names = written.names(node)
            if names:
                if written_whole(node) is not None:
                    raise NeedsRetraceError(f"{target} writes slices")
                node.target = _functional(node.target, node)
            for name in names:
                name.replace_all_uses_with(node, partial(operator.lt, node))
        traced.graph.eliminate_dead_code()
        return traced


class _Written:
    """The tensors that a graph changes in place.

    A tensor whose memory no other shares until its last change can be followed by its new value
    from there on. Slices may share it that serve to be overwritten.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._origins: dict[fx.Node, fx.Node] = {}
        self._names: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, int] = {}
        calls = [node for node in nodes if isinstance(node.target, OperatorBase)]
        for place, node in enumerate(calls):
            if _writes(node):
                if not isinstance(node.args[0], fx.Node):
                    raise NeedsRetraceError(f"{node.format_node()} changes several tensors")
                changed = written_whole(node) or node.args[0]
                self._origins[node] = origin = self._origin(changed)
                self._names.setdefault(origin, [origin]).append(node)
                last[origin] = place
        for node in last:
            if not _is_fresh(node):
                raise NeedsRetraceError(f"{node.format_node()} is changed, and shares its memory")
        for place, node in enumerate(calls):
            later = any(last.get(self._origin(a), -1) > place for a in node.all_input_nodes)
            if later and not (_writes(node) or _is_fresh(node) or only_written(node)):
                raise NeedsRetraceError(f"{node.format_node()} shares memory that is changed")

    def names(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes that stand for the tensor that ``node`` changes, up to ``node``."""
        origin = self._origins.get(node)
        names = [] if origin is None else self._names[origin]
        return names[: names.index(node)] if names else []

    def _origin(self, node: Any) -> Any:
        return self._origins.get(node, node)


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    mutable = isinstance(target, OpOverload) and target._schema.is_mutable
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
    aliases = any(value.alias_info is not None for value in target._schema.returns)
    return not aliases and not target._can_decompose()


def _functional(target: OpOverload, node: fx.Node) -> OpOverload:
    """Returns the operator that gives what an operator such as ``add_`` writes."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name[-1] == "_" else None
    functional = getattr(packet, target._overloadname, None)
    if not isinstance(functional, OpOverload) or functional._schema.is_mutable:
        raise NeedsRetraceError(f"{target} changes a tensor")
    args, kwargs = _values((node.args, node.kwargs))
    if functional(*args, **kwargs).dtype != node.meta["val"].dtype:
        raise NeedsRetraceError(f"{target} changes a tensor of another dtype")
    return functional


def _values(arguments: Any) -> Any:
    """Returns arguments with values in place of nodes."""
    return fx.map_arg(arguments, lambda argument: argument.meta["val"])


def _copied(changed: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What ``copy_`` writes; the exporter's translation of ``copy`` forgets to expand it."""
    return source.to(changed.dtype).expand(changed.shape)


def _has_new_sizes(traced: fx.GraphModule) -> bool:
    """Whether a trace makes sizes that depend on values, as ``nonzero`` does.

    Another call makes others, though its arguments have the same sizes.
    """
    given, found = set[Any](), set[Any]()
    for node in traced.graph.nodes:
        sizes = found if node.op == "call_function" else given
        sizes.update(free_unbacked_symbols(node.meta.get("val")))
    return not found <= given


def _keep_values(node: fx.Node, result: Any, given: Sequence[Any]) -> None:
    """Lets what takes a node's place have the node's sizes, by the names that others know."""
    values = pytree.tree_leaves(node.meta["val"])
    for copy, value in zip(pytree.tree_leaves(result), values, strict=True):
        if isinstance(copy, fx.Node) and copy not in given:
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


def _identity(value: Any) -> Any:
    """What makes two arguments lead to the same trace."""
    if isinstance(value, Tensor):
        return (tuple(map(str, value.shape)), value.dtype, value.device)
    return (type(value), str(value))
