"""Equal blocks as calls of one function: the file then shows a model's architecture.

The nodes of a unit are found from the values that it ends with, backwards, as long as they are
those of the third unit. What differs there, such as the first unit where it computes what all
share, stays as it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx.defs
import onnx_ir as ir

from dynamo_moe.files.block_functions import DOMAIN, copied, inlined_name
from dynamo_moe.files.copies import Copies, Copy
from dynamo_moe.files.model_files import is_small
from dynamo_moe.graph.instantiate import THIRD, Instances, ancestors, holds_graph, node_key


def make_functions(
    model: ir.Model, runs: Sequence[Instances], weights: Collection[str]
) -> tuple[Copies, dict[str, str]]:
    """Makes the units of each run calls of one function, in place.

    Args:
        model: The graph, named.
        runs: The runs, with copies of its nodes that its file has.
        weights: The names of the initializers that are passed to a function, however small.

    Returns:
        Copies of the calls that the file has, and the names that values inside of units have where
        :func:`dynamo_moe.files.block_functions.inline_blocks` undoes it, by their names before.
    """
    copies: dict[ir.Node, Sequence[Copy]] = {}
    renamed: dict[str, str] = {}
    taken = {function.name for function in model.functions.values()}
    taken |= {node.op_type for node in model.graph.all_nodes()}
    for run in runs:
        outlined = _Outlined(model, run, weights)
        if outlined.holds_graphs:  # Which use constants of the file's own graph.
            copies |= run.copies
            continue
        kind = "_".join(dict.fromkeys(run.units.kinds))
        # Not that of an operator either: TensorRT's parser finds functions by name alone.
        numbered = itertools.chain([kind], (f"{kind}_{number}" for number in itertools.count(2)))
        name = next(
            candidate
            for candidate in numbered
            if candidate not in taken and not onnx.defs.has(candidate)
        )
        taken.add(name)
        renamed |= outlined.replace(name)
        copies |= outlined.copies
    if DOMAIN in {domain for domain, _, _ in model.functions}:
        model.opset_imports[DOMAIN] = 1
        model.graph.sort()
    used = {value for added in copies.values() for copy in added for value in copy.inputs}
    for value in list(model.graph.initializers.values()):
        if not (value.uses() or value in used or value.is_graph_output()):
            del model.graph.initializers[str(value.name)]
    return copies, renamed


class _Outlined:
    """A run whose units become calls; the third is the pattern of its function.

    Attributes:
        holds_graphs: Whether a unit has a loop or a branch.
    """

    def __init__(self, model: ir.Model, run: Instances, weights: Collection[str]) -> None:
        self.copies: dict[ir.Node, Sequence[Copy]] = {**run.copies}
        self._model, self._units, self._weights = model, run.units, weights
        self._ends = ends = run.ends
        inside = ancestors(ends[2]) - ancestors(ends[1])
        self._nodes = [node for node in model.graph if node in inside]
        self.holds_graphs = any(map(holds_graph, self._nodes))
        self._results = [end for end in dict.fromkeys(ends[2]) if end.producer() in inside]
        used = dict.fromkeys(value for node in self._nodes for value in node.inputs)
        self._arguments = [
            value for value in used if value is not None and value.producer() not in inside
        ]
        self._arguments.sort(key=self._rank)
        # By unit, its values by those of the third; None if it is another.
        self._twins = [self._match(its) for its in ends[: THIRD + 1]]
        third = self._twins[THIRD]
        self._twins += [third and {**third, **its} for its in run.values]
        self._constants = [value for value in self._arguments if self._is_constant(value)]
        self._arguments = [value for value in self._arguments if value not in self._constants]

    def _rank(self, value: ir.Value) -> int:
        """Orders the function's inputs: what goes from unit to unit, what all share, weights."""
        return 0 if value in self._ends[1] else 2 if value.name in self._weights else 1

    def _is_constant(self, value: ir.Value) -> bool:
        """Whether all units but the first, which may be another, have one small constant."""
        if not value.is_initializer() or value.name in self._weights or not is_small(value):
            return False
        return all(twins is None or twins[value] is value for twins in self._twins[1:])

    def _match(self, ends: Sequence[ir.Value]) -> dict[ir.Value, ir.Value] | None:
        """Returns a unit's values by those of the third; None if it is another."""
        twins: dict[ir.Value, ir.Value] = {}
        pairs = [*zip(self._ends[2], ends, strict=True)]
        nodes: set[ir.Node] = set()
        for node in [*reversed(self._nodes), None]:
            if any(twins.setdefault(value, its) is not its for value, its in pairs):
                return None
            if node is None:
                break
            other = next(twins[output].producer() for output in node.outputs if output in twins)
            if other is None or other in nodes or node_key(node) != node_key(other):
                return None
            if [value is None for value in node.inputs] != [
                value is None for value in other.inputs
            ]:
                return None
            nodes.add(other)
            inputs = zip(node.inputs, other.inputs, strict=True)
            pairs = [(value, its) for value, its in inputs if value and its]
            pairs += zip(node.outputs, other.outputs, strict=True)
        results = {twins[result] for result in self._results}
        for output in (output for node in nodes for output in node.outputs):
            outside = any(user not in nodes for user, _ in output.uses())
            if output not in results and (outside or output.is_graph_output()):
                return None
        # A call has all its inputs before its first result.
        return None if ancestors([twins[value] for value in self._arguments]) & nodes else twins

    def replace(self, name: str) -> dict[str, str]:
        """Adds the function and its calls; returns the new names of what is in units."""
        function, inner = self._function(name)
        self._model.functions[function.identifier()] = function
        renamed: dict[str, str] = {}
        calls: dict[ir.Value, ir.Value] = {}
        added: list[Copy] = []
        for unit, twins in enumerate(self._twins):
            if twins is None or any(
                twins[constant] is not constant for constant in self._constants
            ):
                continue
            arguments = [calls.get(twins[value], twins[value]) for value in self._arguments]
            path = "-".join(self._units.paths[unit])
            if unit <= THIRD:
                call = self._call(name, path, arguments, twins, calls)
                if unit == THIRD:
                    self.copies = {call: added}
            else:
                results = [twins[result] for result in self._results]
                added.append(Copy(call, arguments, results, name=path))
            for value, its in inner.items():
                renamed[str(twins[value].name)] = inlined_name(path, its)
        return renamed

    def _function(self, name: str) -> tuple[ir.Function, dict[ir.Value, str]]:
        """Returns the function, and what the values between its nodes are called in it."""
        unique, unique_node = _unique_names(), _unique_names()
        inputs = [ir.Value(name=unique(self._input_name(value))) for value in self._arguments]
        known = dict(zip(self._arguments, inputs, strict=True))
        nodes = []
        for constant in self._constants:
            node = ir.node("Constant", [], {"value": constant.const_value})
            node.name = unique_node("constant")
            node.outputs[0].name = unique("constant")
            known[constant] = node.outputs[0]
            nodes.append(node)
        names = {result: unique("output") for result in self._results}
        inner = {}
        for original in self._nodes:
            node = copied(original, known)
            node.name = unique_node(self._local(original.name))
            for output, new in zip(original.outputs, node.outputs, strict=True):
                if output in names:
                    new.name = names[output]
                elif output.name:
                    new.name = unique(self._local(output.name))
                    inner[output] = new.name
            nodes.append(node)
        results = [known[result] for result in self._results]
        domains = {node.domain for node in nodes}
        imports = {
            domain: version
            for domain, version in self._model.opset_imports.items()
            if domain in domains
        }
        graph = ir.Graph(inputs, results, nodes=nodes, opset_imports=imports)
        return ir.Function(DOMAIN, name, graph=graph, attributes=[]), inner

    def _input_name(self, value: ir.Value) -> str:
        if value in self._ends[1]:
            return "input"
        second, third = self._units.inputs[1:3] or ((), ())
        if value not in third:
            return self._local(value.name)
        # past_key_values.1.key and past_key_values.2.key are past_key_values.key.
        names = (str(value.name), str(second[third.index(value)].name))
        parts = zip(*(name.split(".") for name in names), strict=False)
        return ".".join(part for part, other in parts if part == other) or "input"

    def _local(self, name: str | None) -> str:
        """Returns a name without the path of the block; with its place, if a unit has several."""
        paths = self._units.paths[2]
        for number, path in enumerate(paths):
            if name and name.startswith((f"{path}.", f"{path}/")):
                local = name.removeprefix(path)[1:]
                return local if len(paths) == 1 else f"{number}.{local}"
        return str(name)

    def _call(
        self,
        name: str,
        path: str,
        arguments: Sequence[ir.Value],
        twins: Mapping[ir.Value, ir.Value],
        calls: dict[ir.Value, ir.Value],
    ) -> ir.Node:
        """Puts a call in the place of a unit; ``calls`` has what came in the place of results."""
        graph = self._model.graph
        call = ir.Node(
            DOMAIN,
            name,
            arguments,
            num_outputs=len(self._results),
            name=path,
        )
        for result, output in zip(self._results, call.outputs, strict=True):
            old = twins[result]
            output.name, output.type, output.shape = old.name, old.type, old.shape
            calls[old] = output
        nodes = {twins[output].producer() for node in self._nodes for output in node.outputs}
        ordered = [node for node in graph if node in nodes]
        graph.insert_after(ordered[-1], call)
        for result in self._results:
            old = twins[result]
            old.replace_all_uses_with(calls[old], replace_graph_outputs=True)
        graph.remove(ordered, safe=True)
        return call


def _unique_names() -> Callable[[str], str]:
    """Returns a function that numbers names which have been given before."""
    counts: Counter[str] = Counter()

    def unique(name: str) -> str:
        counts[name] += 1
        return name if counts[name] == 1 else unique(f"{name}_{counts[name]}")

    return unique
