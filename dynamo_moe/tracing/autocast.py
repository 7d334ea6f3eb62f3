"""Autocast in a traced program: its casts become operators of the program.

``torch.export`` keeps ``with torch.autocast(...)`` as a region of operators without their casts,
which are only made when the region runs. To find the casts of an operator, it is called under the
same autocast, on tensors without values, and the calls that reach PyTorch's dispatcher are noted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    schema_of,
)
from dynamo_moe.tracing.nodes import Call, add_graph, all_nodes

_LOG = logging.getLogger(__name__)

_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Arguments: device type, dtype, enabled, whether casts are cached, the region, its arguments.
_wrap_with_autocast = torch.ops.higher_order.wrap_with_autocast
_SYMBOLIC = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)

State = Mapping[str, torch.dtype]
"""The dtype of the autocast that is enabled, by device type."""


@contextlib.contextmanager
def autocast_inside(model: nn.Module) -> Iterator[None]:
    """Moves the autocast that is active into the model's forward.

    A trace sees an autocast that is entered, but not one that is active already. What the export
    itself computes is not to be cast.
    """
    active = {
        device: torch.get_autocast_dtype(device)
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }
    if not active:
        yield
        return
    with contextlib.ExitStack() as stack:
        if "forward" in vars(model):
            stack.callback(setattr, model, "forward", model.forward)
        stack.callback(delattr, model, "forward")
        for device, dtype in active.items():
            model.forward = _forward_under_autocast(model.forward, device, dtype)
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _forward_under_autocast(
    original: Callable[..., Any], device: str, dtype: torch.dtype
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return original(*args, **kwargs)

    return forward


def with_casts(program: ExportedProgram, *, strict: bool) -> ExportedProgram:
    """Returns the program with autocast's casts as nodes, and autocast disabled in all regions.

    The program may be changed in place. The values of a strict trace have their dtypes without
    autocast.
    """
    if not any(n.target is _wrap_with_autocast and n.args[2] for n in all_nodes(program)):
        return program
    try:
        if strict:
            _retype(program.graph_module)
        _Casts().insert(program.graph_module, {})
    except Exception:  # Whatever it is, a second trace of the program casts too.
        _LOG.info("The whole program is traced again for its casts", exc_info=True)
        traced_again: ExportedProgram = program.run_decompositions({})
        return traced_again
    return program


@contextlib.contextmanager
def _autocast(state: State) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype in state.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


class _Valued(fx.Interpreter):
    """Runs a graph on tensors without values, and gives its nodes the values that they have."""

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "call_function":
            node.meta["val"] = result
        return result

    def get_attr(self, *args: Any) -> Any:
        attribute = super().get_attr(*args)
        return type(self)(attribute).run if isinstance(attribute, fx.GraphModule) else attribute


def _retype(module: fx.GraphModule) -> None:
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with _mode(inputs), tracer.enable_python_dispatcher(), torch.no_grad():
        _Valued(module).run(*inputs)


class _Casts:
    """Inserts casts into graphs; what autocast does to equal calls is found out once."""

    def __init__(self) -> None:
        self._known: dict[Any, fx.Graph | None] = {}

    def insert(self, module: fx.GraphModule, state: State) -> None:
        """Inserts the casts of a graph and of those that it calls, given the autocast around it."""
        for node in list(module.graph.nodes):
            inner = state
            if node.target is _wrap_with_autocast:
                device, dtype, enabled, *rest = node.args
                inner = {other: state[other] for other in state if other != device}
                if enabled:
                    inner[device] = dtype or torch.get_autocast_dtype(device)
            for argument in node.all_input_nodes:
                called = (
                    getattr(module, argument.target, None) if argument.op == "get_attr" else None
                )
                if isinstance(called, fx.GraphModule):
                    self.insert(called, inner)
            if node.target is _wrap_with_autocast:
                node.args = (device, dtype, False, *rest)
            elif state and isinstance(node.target, OpOverload):
                self._cast(node, state)
        module.recompile()

    def _cast(self, node: fx.Node, state: State) -> None:
        call = Call(node.target, node.args, node.kwargs)
        devices = {value.device.type for value in call.values if isinstance(value, Tensor)}
        state = {device: state[device] for device in state if device in devices}
        if not state or not _may_be_cast(node, call.values):
            return
        key = call.key, tuple(state.items())
        if key not in self._known:
            self._known[key] = _under_autocast(call, state)
        graph = self._known[key]
        if graph is not None:
            _replace(node, graph, call.nodes)


def _may_be_cast(node: fx.Node, values: Sequence[Any]) -> bool:
    """Whether an operator computes with floating-point numbers, and makes no sizes from data."""
    target: Any = node.target
    if any(argument.alias_info is not None for argument in schema_of(target).arguments):
        return False  # Views and changes in place are never cast.
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    return _from_data(pytree.tree_leaves(node.meta.get("val"))) <= _from_data(values)


def _from_data(values: Sequence[Any]) -> set[Any]:
    """Returns the symbols of sizes that are read from data."""
    symbolic = (value for value in values if isinstance(value, _SYMBOLIC))
    return set().union(*map(tracer.free_unbacked_symbols, symbolic))


def _under_autocast(call: Call, state: State) -> fx.Graph | None:
    """Returns the graph of an operator under autocast; None if that is the operator alone.

    Either it is cast as a whole, or it decomposes into operators that are.
    """
    recorder = _Recorder(call.values)
    with _mode(call.values), tracer.enable_python_dispatcher(), torch.no_grad():
        with _autocast(state), torch.inference_mode(), recorder:
            # In another mode, operators decompose before they are seen.
            result = call(*call.values)
        if len(recorder.calls) > 1:
            return recorder.finish(result)
        if not tracer.can_decompose(recorder.calls[0]):
            return None
        plain = tracer.make_fx(call)(*call.values).graph
        with _autocast(state):
            cast = tracer.make_fx(call)(*call.values).graph
    return None if _targets(cast) == _targets(plain) else cast


def _mode(values: Sequence[Any]) -> FakeTensorMode:
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _replace(node: fx.Node, graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Puts a graph's nodes in the place of one."""
    with node.graph.inserting_before(node):
        results = add_graph(node.graph, node, graph, inputs)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Recorder(TorchDispatchMode):
    """Notes, as a graph, the calls that are made with tensors meanwhile."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OpOverload] = []
        self._graph = fx.Graph()
        self._inputs = inputs
        self._nodes: dict[int, fx.Node] = {}
        self._noted: list[Any] = []  # As long as a value lives, no other has its id.
        for number, value in enumerate(inputs):
            self._note(value, self._graph.placeholder(f"given_{number}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            self.calls.append(func)
            self._note(result, self._graph.call_function(func, *self._nodes_of(args, kwargs or {})))
        return result

    def finish(self, result: Any) -> fx.Graph:
        """Returns the graph that gives ``result``, with the values of its nodes."""
        self._graph.output(*self._nodes_of(result))
        self._graph.eliminate_dead_code()
        _Valued(nn.Module(), graph=self._graph).run(*self._inputs)
        return self._graph

    def _note(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                self._note(part, self._graph.call_function(operator.getitem, (node, number)))
        else:
            self._noted.append(value)
            self._nodes.setdefault(_id(value), node)

    def _nodes_of(self, *values: Any) -> Any:
        return pytree.tree_map_only(_SYMBOLIC, lambda value: self._nodes[_id(value)], values)


def _id(value: Any) -> int:
    """Identifies a tensor or a symbolic number; on its way through PyTorch, the latter's node."""
    return id(value if isinstance(value, Tensor) else value.node)
