"""Giving a graph the nodes of equal blocks that were not traced.

A graph with the first three units of a run of equal blocks holds two that stand in the middle: the
second and the third. If both have the same nodes, each with its own weights, then so has every
further one. What is optimised, merged or moved over the ends of units is seen in both. That holds
as long as no weight's value decides, so the shared optimisation does without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import onnx_ir as ir
from torch import Tensor

from dynamo_moe.files.copies import Copies, Copy
from dynamo_moe.files.metadata import Layer
from dynamo_moe.moe_nodes.nodes import module_of, set_module
from dynamo_moe.operators.foreign import ONNXRUNTIME_SKIP_NORM
from dynamo_moe.tracing.equal_blocks import TRACED, NotSharedError
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import is_decoding, stored_tensors
from dynamo_moe.weights.placeholders import as_ir

THIRD = TRACED - 1
"""The unit that further ones are made of, the last in the graph."""


@dataclass(frozen=True)
class Units:
    """A run of equal units of blocks.

    Attributes:
        kinds: The names of the classes of its blocks.
        paths: By unit, the paths of its blocks.
        tensors: By unit, the parameters and buffers of its blocks, by name.
        ends: By unit in the graph, the names of the values that it ends with.
        inputs: By unit, the graph's inputs that it alone takes.
        kept: By unit in the graph, the names of its values that are results of the graph.
        positions: By unit, their places among the results.
    """

    kinds: Sequence[str]
    paths: Sequence[Sequence[str]]
    tensors: Sequence[Mapping[str, Tensor]]
    ends: Sequence[Sequence[str]]
    inputs: Sequence[Sequence[ir.Value]]
    kept: Sequence[Sequence[str]]
    positions: Sequence[Sequence[int]]

    def renamed(self, name: str, old: int, new: int) -> str:
        """Returns a name in one unit as it is in another."""
        for before, after in zip(self.paths[old], self.paths[new], strict=True):
            if name == before or name.startswith((f"{before}.", f"{before}/")):
                return after + name.removeprefix(before)
        return name

    def is_inside(self, name: str) -> bool:
        """Whether a name is one in a unit."""
        return any(self.renamed(name, unit, unit - 1) != name for unit in range(len(self.paths)))


@contextlib.contextmanager
def values_hidden(model: ir.Model, runs: Sequence[Units]) -> Iterator[None]:
    """Hides the values of equal blocks' weights, which are inputs of the graph for that time.

    An optimisation that reads them, such as dropping a bias of zeros, would be right for the traced
    blocks alone.
    """
    graph = model.graph
    hidden = [
        (value, value.const_value)
        for name, value in graph.initializers.items()
        if any(units.is_inside(name) for units in runs)
    ]
    for value, _ in hidden:
        graph.initializers.pop(str(value.name))
        value.const_value = None
        graph.inputs.append(value)
    try:
        yield
    finally:
        for value, tensor in hidden:
            graph.inputs.remove(value)
            value.const_value = tensor
            if value.uses() or value.is_graph_output():
                graph.register_initializer(value)


def before_sums(model: ir.Model, units: Units) -> Units:
    """Returns a run of which no unit ends with a sum that the next one's first norm computes.

    Units then end with what is summed.

    Raises:
        NotSharedError: If that is used after the last unit in another way, too.
    """
    makers = {str(output.name): node for node in model.graph for output in node.outputs}

    def is_fused(name: str) -> bool:
        node = makers.get(name)
        return node is not None and ONNXRUNTIME_SKIP_NORM.is_of(node.domain, node.op_type)

    sums = [any(map(is_fused, names)) for names in zip(*units.ends, strict=True)]
    if not any(sums):
        return units

    def terms(name: str) -> list[ir.Value]:
        return [term for term in makers[name].inputs[:2] if term is not None]

    ends = [
        [
            end
            for name, summed in zip(names, sums, strict=True)
            for end in ([str(term.name) for term in terms(name)] if summed else [name])
        ]
        for names in units.ends
    ]
    last = [name for name, summed in zip(units.ends[THIRD], sums, strict=True) if summed]
    carried = [term for name in last for term in terms(name)]
    inside, closing = ancestors(carried), {makers[name] for name in last}
    for term in carried:
        if any(user not in inside and user not in closing for user, _ in term.uses()):
            raise NotSharedError(f"{term.name} is used after its unit")
    return replace(units, ends=ends)


@dataclass(frozen=True)
class Instances:
    """The units of a run that its file has, and its graph has not.

    Attributes:
        units: The run.
        copies: Their nodes.
        values: By unit, its values by those of the third unit, the last one in the graph.
        ends: By unit of the run, the values that it ends with, and after them those that are to be
            results of the graph.
    """

    units: Units
    copies: Copies
    values: Sequence[Mapping[ir.Value, ir.Value]]
    ends: Sequence[Sequence[ir.Value]]


def instantiate(
    model: ir.Model, units: Units, layers: Sequence[Layer], weights: Collection[str]
) -> tuple[Instances, list[Layer], set[str]]:
    """Makes copies of the units that are not in an optimised graph, and adds their weights.

    Args:
        model: The graph with the first units.
        units: The run.
        layers: The graph's MoE layers.
        weights: The names of the initializers that are weights, and not constants of the nodes.

    Returns:
        The copies; the layers and the names of the weights, those of the new units among them.

    Raises:
        NotSharedError: If the units of the graph are not alike.
    """
    run = _Run(model, units, weights)
    run.check_alike()
    layers, copies = run.copy(layers, range(TRACED, len(units.paths)))
    return Instances(units, copies, run.values, run.ends), layers, run.weights


def add_results(model: ir.Model, runs: Sequence[Instances]) -> None:
    """Makes what the added units keep results of the graph, each at its place."""
    results: dict[int, ir.Value] = {}
    for run in runs:
        for unit in range(TRACED, len(run.ends)):
            kept = run.ends[unit][len(run.units.ends[0]) :]
            results.update(zip(run.units.positions[unit], kept, strict=True))
    for position in sorted(results):
        model.graph.outputs.insert(position, results[position])


class _Run:
    """A run in a graph, of whose third unit others are made."""

    def __init__(self, model: ir.Model, units: Units, weights: Collection[str]) -> None:
        self.weights = set(weights)
        self.values: list[dict[ir.Value, ir.Value]] = []
        self._graph, self._units = model.graph, units
        values = {str(value.name): value for value in model.graph.inputs}
        values |= {str(output.name): output for node in model.graph for output in node.outputs}
        try:
            pairs = zip(units.ends, units.kept, strict=True)
            self.ends = [[values[name] for name in (*ends, *kept)] for ends, kept in pairs]
        except KeyError as error:
            raise NotSharedError(f"the value {error} that ends a unit is gone") from None
        self._kept = set(self.ends[-1][len(units.ends[-1]) :])
        if self._kept and len(set(self.ends[-1])) < len(self.ends[-1]):
            raise NotSharedError("a value that ends a unit is another one as well")
        self._nodes = self._nodes_of(THIRD)
        self._check_uses()
        # Too large to be one, as they would be if their values were compared with others'.
        inside = set(self._nodes)
        self._constants = {
            value
            for node in self._nodes
            for value in node.inputs
            if value is not None
            and value.is_initializer()
            and value.name not in self.weights
            and all(user in inside for user, _ in value.uses())
        }

    def _nodes_of(self, unit: int) -> list[ir.Node]:
        inside = ancestors(self.ends[unit]) - ancestors(self.ends[unit - 1])
        return [node for node in self._graph if node in inside]

    def check_alike(self) -> None:
        """Checks that the third unit is like the second."""
        first, second, third = self.ends
        twin: dict[ir.Value, ir.Value] = dict(zip(first, second, strict=True))
        inside = set(self._nodes)
        used = [value for node in self._nodes for value in node.inputs if value is not None]
        outer = [value for value in used if value.producer() not in inside and value not in second]
        shared = ancestors(outer)  # What the first two units compute for all.
        nodes = [node for node in self._nodes_of(1) if node not in shared]
        if len(nodes) != len(self._nodes):
            raise NotSharedError("units have different numbers of nodes")
        for node, other in zip(nodes, self._nodes, strict=True):
            if node_key(node, _graph_key) != node_key(other, _graph_key) or len(node.inputs) != len(
                other.inputs
            ):
                raise NotSharedError(f"{node.name} and {other.name} differ")
            for value, its in zip(node.inputs, other.inputs, strict=True):
                if not self._is_twin(value, its, twin):
                    raise NotSharedError(f"{node.name} and {other.name} have different inputs")
            twin.update(zip(node.outputs, other.outputs, strict=True))
        if [twin.get(value) for value in second] != third:
            raise NotSharedError("units end in different ways")

    def _is_twin(
        self, value: ir.Value | None, its: ir.Value | None, twin: Mapping[ir.Value, ir.Value]
    ) -> bool:
        if value is None or its is None or value in twin:
            return (value if value is None else twin.get(value)) is its
        second, third = self._units.inputs[1:3]
        if its in third:
            return value is second[third.index(its)]
        if value.name in self.weights:
            name = self._units.renamed(str(value.name), 1, 2)
            if name != value.name:
                return its.name == name and _kind(value) == _kind(its)
        return value is its or self._is_equal_constant(value, its)

    def _is_equal_constant(self, value: ir.Value, its: ir.Value) -> bool:
        """Whether two are constants of equal values, too large to be one."""
        if {value.name, its.name} & self.weights:
            return False
        one, other = value.const_value, its.const_value
        return (
            value.is_initializer()
            and its.is_initializer()
            and one is not None
            and other is not None
            and _kind(value) == _kind(its)
            and one.tobytes() == other.tobytes()
        )

    def _check_uses(self) -> None:
        ends, inside = set(self.ends[-1]), set(self._nodes)
        own = {*self.ends[-2], *self._units.inputs[THIRD], *_outputs(self._nodes)}
        for node in self._nodes:
            captured = [value for value in _used(node)[len(node.inputs) :] if value is not None]
            if any(value in own or self._is_unit_weight(str(value.name)) for value in captured):
                raise NotSharedError(f"{node.name} has a graph that uses its block's own values")
            for output in node.outputs:
                outside = any(user not in inside for user, _ in output.uses())
                if output in self._kept:
                    if outside or not output.is_graph_output():
                        raise NotSharedError(f"{output.name} is used after its unit")
                elif output not in ends and (outside or output.is_graph_output()):
                    raise NotSharedError(f"{output.name} is used after its unit")

    def copy(
        self, layers: Sequence[Layer], units: Iterable[int]
    ) -> tuple[list[Layer], dict[ir.Node, list[Copy]]]:
        """Returns all layers, and copies of the third unit, which follow its last node.

        The graph is given their weights, and uses the last one's ends in place of the third's.
        """
        inside = set(self._nodes)
        carried = [end for end in self.ends[-1] if end not in self._kept]
        uses = {end: [use for use in end.uses() if use[0] not in inside] for end in carried}
        its_ends = ends = self.ends[-1]
        added: list[Layer] = []
        its = [layer for layer in layers if self._renamed(layer.name, 0) != layer.name]
        unit_values = self._unit_initializers()
        twins = _Twins(self._units)
        parts = [_Part.of(node) for node in self._nodes]
        modules = {part.module for part in parts}
        copies: list[Copy] = []
        unit = THIRD
        for unit in units:
            known = dict(zip(self.ends[THIRD - 1], ends, strict=True))
            known.update(zip(self._units.inputs[THIRD], self._units.inputs[unit], strict=True))
            known.update({value: self._initializer(value, unit, twins) for value in unit_values})
            paths = {module: self._module(module, unit) for module in modules}
            copies += [part.copied(paths[part.module], unit, known) for part in parts]
            ends = [known[end] for end in its_ends]
            self.values.append(known)
            self.ends.append(ends)
            if its:
                names = {str(value.name): str(copy.name) for value, copy in known.items()}
                added += [self._layer(layer, unit, names) for layer in its]
        for last, end in zip(ends, its_ends, strict=True):
            if end in self._kept:
                continue
            for user, index in uses[end]:
                user.replace_input_with(index, last)
                # The last unit's sum, where units end before it.
                set_module(user, self._renamed(module_of(user), unit))
            for index, output in enumerate(self._graph.outputs):
                if output is end:
                    self._graph.outputs[index] = last
        after = max((layers.index(layer) for layer in its), default=-1) + 1
        return [*layers[:after], *added, *layers[after:]], {self._nodes[-1]: copies}

    def _renamed(self, name: str, unit: int) -> str:
        return self._units.renamed(name, THIRD, unit)

    def _module(self, name: str, unit: int) -> str:
        """Returns a module of the third unit, or of the one before it, as it is for another unit.

        A sum at the end of a unit may be one of the next unit's nodes.
        """
        its = self._renamed(name, unit)
        return its if its != name else self._units.renamed(name, THIRD - 1, unit - 1)

    def _unit_initializers(self) -> list[ir.Value]:
        """Returns the third unit's weights and constants that other units have of their own."""
        used = dict.fromkeys(value for node in self._nodes for value in node.inputs)
        return [
            value
            for value in used
            if value is not None
            and value.is_initializer()
            and (value in self._constants or self._is_unit_weight(str(value.name)))
        ]

    def _is_unit_weight(self, name: str) -> bool:
        return name in self.weights and self._renamed(name, 0) != name

    def _initializer(self, value: ir.Value, unit: int, twins: _Twins) -> ir.Value:
        """Returns a weight or a constant of the third unit as it is in another unit."""
        if value in self._constants:
            name, tensor = f"{value.name}/{unit}", value.const_value
        else:
            name = self._renamed(str(value.name), unit)
            known = self._graph.initializers.get(name)
            if known is not None:
                return known
            tensor = as_ir(twins.of(value, unit), name, value.dtype)
            self.weights.add(name)
        made = ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
        self._graph.register_initializer(made)
        return made

    def _layer(self, layer: Layer, unit: int, names: Mapping[str, str]) -> Layer:
        def renamed(name: str) -> str:
            return names.get(name, self._renamed(name, unit))

        return replace(
            layer,
            name=self._renamed(layer.name, unit),
            tokens=renamed(layer.tokens),
            inputs=tuple(map(renamed, layer.inputs)),
        )


class _Part(NamedTuple):
    """A node of the third unit, whose parts take time to ask for.

    Attributes:
        node: The node.
        module: The path of the PyTorch module that it comes from.
        inputs: Its inputs.
        outputs: Its results, with their names, shapes and types.
    """

    node: ir.Node
    module: str
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[tuple[ir.Value, str | None, ir.Shape | None, ir.TypeProtocol | None]]

    @classmethod
    def of(cls, node: ir.Node) -> _Part:
        """Returns a node with its parts."""
        outputs = [(output, output.name, output.shape, output.type) for output in node.outputs]
        return cls(node, module_of(node), node.inputs, outputs)

    def copied(self, module: str, unit: int, known: dict[ir.Value, ir.Value]) -> Copy:
        """Returns the node as it is in another unit; its results become ``known``."""
        inputs = [None if value is None else known.get(value, value) for value in self.inputs]
        outputs = []
        for output, name, shape, kind in self.outputs:
            its = name and f"{name}/{unit}"
            known[output] = made = ir.Value(name=its, shape=shape, type=kind)
            outputs.append(made)
        return Copy(self.node, inputs, outputs, module)


class _Twins:
    """Weights that are made of a unit's tensors, made of another unit's.

    Which part of which tensor a weight is, is looked for once for all units.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self._lazy: dict[int, str] = {}
        # By id, what a tensor of the unit is decoded from: its name, and the part's place.
        self._stored: dict[int, tuple[str, int]] = {}
        self._in_memory: dict[int, list[tuple[str, Tensor]]] = {}
        # By id, a tensor and what it is a part of.
        self._wholes: dict[int, tuple[Tensor, list[tuple[str, int]]]] = {}
        for name, tensor in units.tensors[THIRD].items():
            if isinstance(tensor, LazyTensor):
                self._lazy[id(tensor)] = name
                for place, part in enumerate(stored_tensors(tensor)):
                    self._stored[id(part)] = name, place
            else:
                address = tensor.untyped_storage().data_ptr()
                self._in_memory.setdefault(address, []).append((name, tensor))

    def of(self, weight: ir.Value, unit: int) -> Tensor:
        """Returns the values of a weight of the third unit as they are in another unit.

        Raises:
            NotSharedError: If they are not made of the unit's own tensors.
        """
        raw = getattr(weight.const_value, "raw", None)
        if not isinstance(raw, Tensor):
            raise NotSharedError(f"the values of {weight.name} have been changed")

        def other(tensor: Tensor) -> Tensor | None:
            return self._other(tensor, unit)

        twin = other(raw)
        if twin is None and isinstance(raw, LazyTensor):
            try:
                twin = raw.of_others(other)
            except ValueError as error:
                raise NotSharedError(f"{weight.name}: {error}") from None
        if twin is None:
            raise NotSharedError(f"{weight.name}: its values are of no tensor of its block")
        if is_decoding(twin) and not is_decoding(raw):
            raise NotSharedError(f"{weight.name} is packed in unit {unit + 1}")
        return twin

    def _other(self, tensor: Tensor, unit: int) -> Tensor | None:
        if id(tensor) in self._stored:
            return self._twin_part(*self._stored[id(tensor)], unit)
        if isinstance(tensor, LazyTensor):
            name = self._lazy.get(id(tensor))
            return None if name is None else self._twin(name, unit)
        if id(tensor) not in self._wholes:
            self._wholes[id(tensor)] = tensor, self._wholes_of(tensor)
        views = {}
        for name, offset in self._wholes[id(tensor)][1]:
            view = twin = self._twin(name, unit)
            if (tensor.shape, tensor.stride()) != (twin.shape, twin.stride()):
                start = twin.storage_offset() + offset
                view = twin.detach().as_strided(tensor.shape, tensor.stride(), start)
            views[view.data_ptr()] = view
        # Several tensors of a block may be parts of one, and must be in the other block too.
        return next(iter(views.values())) if len(views) == 1 else None

    def _twin(self, name: str, unit: int) -> Tensor:
        return self._units.tensors[unit][self._units.renamed(name, THIRD, unit)]

    def _twin_part(self, name: str, place: int, unit: int) -> Tensor:
        """Returns a part of what a tensor is decoded from, as it is in another unit."""
        parts, twins = (
            list(stored_tensors(tensor))
            for tensor in (self._units.tensors[THIRD][name], self._twin(name, unit))
        )
        if [(x.shape, x.dtype) for x in parts] != [(x.shape, x.dtype) for x in twins]:
            raise NotSharedError(f"{name} and that of unit {unit + 1} are not packed alike")
        return twins[place]

    def _wholes_of(self, tensor: Tensor) -> list[tuple[str, int]]:
        """Returns the tensors that one is a part of, and where in them it begins."""
        return [
            (name, int(tensor.storage_offset() - whole.storage_offset()))
            for name, whole in self._in_memory.get(tensor.untyped_storage().data_ptr(), ())
            if _is_part(tensor, whole)
        ]


def _is_part(tensor: Tensor, whole: Tensor) -> bool:
    """Whether the elements of one tensor lie between the first and the last of another."""
    first, last = _extent(tensor)
    start, end = _extent(whole)
    return start <= first and last <= end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first element and of its last one."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + sum(steps) * tensor.element_size()


def ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """Returns the nodes that values are computed by."""
    nodes: set[ir.Node] = set()
    remaining = [value.producer() for value in values]
    while remaining:
        node = remaining.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        remaining += [value.producer() for value in _used(node) if value is not None]
    return nodes


def holds_graph(node: ir.Node) -> bool:
    """Whether a node is a loop or a branch."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _used(node: ir.Node) -> list[ir.Value | None]:
    """Returns the values that a node uses, inside its graphs too."""
    used = list(node.inputs)
    for attribute in node.attributes.values():
        graphs = (
            [attribute.as_graph()]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.as_graphs()
            if attribute.type == ir.AttributeType.GRAPHS
            else []
        )
        for graph in graphs:
            used += [value for inner in graph for value in _used(inner)]
            used.extend(graph.outputs)  # They refuse to be added to a list.
    return used


def node_key(node: ir.Node, graph_key: Callable[[ir.Graph], Any] = str) -> Any:
    """Returns a key that nodes share which compute the same of their inputs.

    Args:
        node: The node.
        graph_key: Returns a key of a graph of the node's; unless given, none share one.
    """

    def key(attribute: ir.Attr) -> Any:
        if attribute.type == ir.AttributeType.TENSOR:
            return attribute.as_tensor().dtype, attribute.as_tensor().tobytes()
        if attribute.type == ir.AttributeType.GRAPH:
            return graph_key(attribute.as_graph())
        return attribute.type, str(attribute.value)

    attributes = {name: key(attribute) for name, attribute in sorted(node.attributes.items())}
    outputs = [_kind(output) for output in node.outputs]
    return node.domain, node.op_type, node.overload, attributes, outputs


def _graph_key(graph: ir.Graph) -> Any:
    """Returns a key that graphs share which compute the same of their inputs and of values outside.

    A value of the graph is known by its place, one from outside by itself.
    """
    places: dict[ir.Value | None, int] = {}
    for value in graph.inputs:
        places[value] = len(places)
    nodes = []
    for node in graph:
        nodes.append((node_key(node, _graph_key), [places.get(x, x) for x in node.inputs]))
        for output in node.outputs:
            places[output] = len(places)
    results = [places.get(value, value) for value in graph.outputs]
    return [_kind(value) for value in graph.inputs], nodes, results


def _outputs(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    return [output for node in nodes for output in node.outputs]


def _kind(value: ir.Value) -> tuple[str, str]:
    return str(value.type), str(value.shape)
