"""Tensors that a graph changes in place: what shares their memory, and how a change is followed.

ONNX has values, no memory. A tensor that is changed is followed by its new value from there on, and
so is every tensor that shares its memory: each is taken from the new value again, by the views that
led to it, where it is read next. What a change of a view makes of the whole,
``torch.func.functionalize`` says.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import HigherOrderOperator, OpOverload, schema_of, storage_key
from dynamo_moe.tracing.nodes import NeedsRetraceError, values

_aten = torch.ops.aten
# Python's operators that change a tensor, of which functionalization has no form without a change.
_NAMED: dict[Any, OpOverload] = {
    _aten.__iand__.Tensor: _aten.bitwise_and_.Tensor,
    _aten.__iand__.Scalar: _aten.bitwise_and_.Scalar,
    _aten.__ior__.Tensor: _aten.bitwise_or_.Tensor,
    _aten.__ior__.Scalar: _aten.bitwise_or_.Scalar,
    _aten.__ixor__.Tensor: _aten.bitwise_xor_.Tensor,
    _aten.__ixor__.Scalar: _aten.bitwise_xor_.Scalar,
    _aten.__ilshift__.Tensor: _aten.bitwise_left_shift_.Tensor,
    _aten.__ilshift__.Scalar: _aten.bitwise_left_shift_.Tensor_Scalar,
    _aten.__irshift__.Tensor: _aten.bitwise_right_shift_.Tensor,
    _aten.__irshift__.Scalar: _aten.bitwise_right_shift_.Tensor_Scalar,
}


def writes(node: fx.Node) -> bool:
    """Whether a node changes a tensor."""
    target: Any = node.target
    mutable = isinstance(target, OpOverload) and schema_of(target).is_mutable
    return mutable and target is not _aten.detach_.default


class Memories:
    """What the tensors of a graph that are changed share their memory with.

    Attributes:
        parents: For a view, the node that it is a view of; for a change, the tensor that it has
            changed.
        owners: For each of these nodes, the tensor that was first in its memory.
    """

    def __init__(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node] = ()) -> None:
        """Finds them.

        Args:
            nodes: The graph's, with their values.
            inputs: Those of the program, of which nobody reads what is written into them.

        Raises:
            NeedsRetraceError: If memory is changed that comes from elsewhere, or is shared in ways
                that the graph does not show.
        """
        self.parents: dict[fx.Node, fx.Node] = {}
        self.owners: dict[fx.Node, fx.Node] = {}
        changes = {node: number for number, node in enumerate(nodes) if writes(node)}
        if not changes:
            return
        hidden = set()  # Nodes that may share memory in a way that no first argument shows.
        for node in nodes:
            if node.target is operator.getitem:
                shared = [n for n in node.all_input_nodes if n in self.parents or n in hidden]
            else:
                shared = _shares_memory_of(node)
            # A view at an index whose sign is not known makes a size that no other view has.
            if shared and shared == [*node.args[:1]] and not node.meta.get("unbacked_bindings"):
                self.parents[node] = shared[0]
                self.owners[node] = self.owners[shared[0]]
            else:
                self.owners[node] = node
                hidden.update([node] if shared else [])
        last = {self.owners[_changed_by(node)]: number for node, number in changes.items()}
        memories = Counter(map(_memory, inputs))
        for owner in last:
            is_input = owner in inputs and memories[_memory(owner)] == 1
            if not is_input and (owner in hidden or not _is_new(owner)):
                raise NeedsRetraceError(f"{owner.format_node()} is changed, and shares its memory")
        for number, node in enumerate(nodes):
            read = (self.owners[argument] for argument in node.all_input_nodes)
            if node in hidden and any(last.get(owner, -1) > number for owner in read):
                raise NeedsRetraceError(f"{node.format_node()} may share memory that is changed")

    def views(self, node: fx.Node) -> list[fx.Node]:
        """Returns the views that lead from the owner of a node's memory to it, in that order."""
        views = []
        while node in self.parents:
            if not writes(node):
                views.append(node)
            node = self.parents[node]
        return views[::-1]


class Values:
    """Nodes of a new graph, by those of the old one whose values they have by now."""

    def __init__(self, memories: Memories, again: Callable[[fx.Node, Values], Any]) -> None:
        """Knows none yet; ``again`` makes a view anew, with what it is a view of looked up here."""
        self._memories = memories
        self._again = again
        self._nodes: dict[fx.Node, Any] = {}
        self._changes: Counter[fx.Node] = Counter()  # of an owner's memory
        self._seen: dict[fx.Node, int] = {}  # how many of them a node's value has seen

    def __setitem__(self, old: fx.Node, new: Any) -> None:
        self._nodes[old] = new
        self._seen[old] = self._changes[self._memories.owners.get(old, old)]

    def __getitem__(self, old: fx.Node) -> Any:
        parent = self._memories.parents.get(old)
        if parent is not None and self._seen.get(old) != self._changes[self._memories.owners[old]]:
            self[old] = self[parent] if writes(old) else self._again(old, self)
        return self._nodes[old]

    def change(self, old: fx.Node, new: Any) -> None:
        """Says what the owner of an old node's memory has become."""
        owner = self._memories.owners[old]
        self._changes[owner] += 1
        self[owner] = new


def changed_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the inputs of a graph whose memory it changes, or may change in a graph it calls."""
    changed: set[int] = set()
    for node in module.graph.nodes:
        if writes(node):
            changed |= _memories(values(node.args[0]))
        elif isinstance(node.target, HigherOrderOperator):
            graphs = (getattr(module, str(n.target), None) for n in node.all_input_nodes)
            if any(changed_inputs(g) for g in graphs if isinstance(g, fx.GraphModule)):
                tensors = [n for n in node.all_input_nodes if n.op != "get_attr"]
                changed |= _memories(values(tensors))
    inputs = module.graph.find_nodes(op="placeholder")
    return {node for node in inputs if changed & _memories(values(node))}


def changed_windows(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the calls of ``unfold`` through whose results a tensor is changed.

    PyTorch makes zeros of what is in no window, and sums of what is in several.
    """
    windows = [node for node in nodes if node.target is _aten.unfold.default]
    found = []
    for write in filter(writes, nodes if windows else ()):
        seen: Any = write
        while isinstance(seen, fx.Node) and _memories(values(seen)) == _memories(values(write)):
            found += [seen] if seen in windows else []
            seen = seen.args[0] if seen.args else None
    return found


def _changed_by(write: fx.Node) -> fx.Node:
    """Returns the one tensor whose values a node changes, its first argument."""
    if torch.Tag.inplace_view in cast(OpOverload, write.target).tags:
        raise NeedsRetraceError(f"{write.format_node()} changes a tensor's shape")
    arguments = schema_of(cast(OpOverload, write.target)).arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    first = write.args[0] if write.args else None
    if written != arguments[:1] or not isinstance(first, fx.Node):
        raise NeedsRetraceError(f"{write.format_node()} changes several tensors")
    return first


def _shares_memory_of(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose memory a node's results may have.

    An operator whose schema does not say that it never shares any is tried on its values.
    """
    target: Any = node.target
    if writes(node):
        return [_changed_by(node)]
    if isinstance(target, HigherOrderOperator):
        return node.all_input_nodes
    if not isinstance(target, OpOverload):
        return []
    aliases = any(value.alias_info is not None for value in schema_of(target).returns)
    if node.meta.get("unbacked_bindings"):
        return node.all_input_nodes if aliases else []
    if not (aliases or tracer.can_decompose(target)):
        return []
    results = _memories(target(*values(node.args), **values(node.kwargs)))
    return [source for source in node.all_input_nodes if results & _memories(values(source))]


def _is_new(node: fx.Node) -> bool:
    """Whether a node is a new tensor, and the only one that stands for it."""
    source: Any = node
    if node.target is operator.getitem:
        source, index = node.args
        if [user for user in source.users if user.args[1:] == (index,)] != [node]:
            return False
    return isinstance(source.target, OpOverload)


def _memory(node: fx.Node) -> Any:
    """Returns what an input of a program shares with those of the same memory."""
    return next(iter(_memories(values(node))), node)


def _memories(value: Any) -> set[int]:
    return {storage_key(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}


View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments behind the first, which is what it is a view of."""


def is_known_view(node: fx.Node) -> bool:
    """Whether PyTorch says of a node's operator that its result is a view, or may be one.

    ``torch.func.functionalize`` takes what others give for new tensors.
    """
    target: Any = node.target
    if target is operator.getitem:
        return True
    return any(value.alias_info is not None for value in schema_of(target).returns)


def named(target: Any) -> Any:
    """Returns an operator of Python's, such as ``&=``, by the name that it has beside others."""
    return _NAMED.get(target, target)


def view_of(node: fx.Node) -> View:
    """Returns what a node does with its first argument."""
    return named(node.target), node.args[1:], dict(node.kwargs)


def changed(whole: Tensor, steps: Sequence[View]) -> Tensor:
    """Returns what a tensor would be after a change, which is the last step behind views of it."""
    *views, (write, arguments, options) = steps

    def change(whole: Tensor) -> Tensor:
        result = view = whole.clone()
        for function, args, kwargs in views:
            view = function(view, *args, **kwargs)
        if write is _aten.copy_.default:  # Its functional twin does not expand.
            view.copy_(arguments[0].to(view.dtype).expand(view.shape))
        else:
            write(view, *arguments, **options)
        return result

    functional: Tensor = torch.func.functionalize(change)(whole)
    return functional
