"""A trace that passes over equal blocks, compared with the model, and what of it is whose."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.nn.modules.module import register_module_forward_hook

from dynamo_moe import pytree
from dynamo_moe.private.pytorch import (
    CHILDREN_TABLE,
    HOOK_TABLES,
    TENSOR_TABLES,
    attributes_of,
    own_parts,
    submodules_replaced,
)
from dynamo_moe.tracing.equal_blocks import TRACED, EqualBlocks, NotSharedError, Run
from dynamo_moe.tracing.failures import headline
from dynamo_moe.tracing.model_log import ModelLog, Span


@dataclass(frozen=True)
class ProgramUnits:
    """The traced units of a run in a program.

    Attributes:
        run: The run.
        ends: By traced unit, the nodes whose values the next unit, or what follows the run, uses.
        inputs: By unit of the run, the names of the program's inputs that it alone takes.
    """

    run: Run
    ends: Sequence[Sequence[fx.Node]]
    inputs: Sequence[Sequence[str]]


class SharedTrace:
    """Lets the blocks of runs be passed over while a model is traced.

    Attributes:
        units: By run, what the program has of it, once it is known.
        positions: By tensor of the program that is a result of the model, its place among these.
    """

    def __init__(self, equal: EqualBlocks) -> None:
        """Takes a model's equal blocks."""
        self.units: list[ProgramUnits] = []
        self._equal = equal
        # The results of the last traced unit's blocks, by the ids of the blocks.
        self._results: dict[int, Any] = {}
        # None stands for what the program returns in the place of a result of a block that was
        # passed over.
        self._program_positions: list[int | None] = []
        self.positions: list[int] = []

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Puts what returns the last traced unit's results in the place of the blocks after it."""
        containers = [run.container for run in self._equal.runs]
        tables = {id(container): dict(own_parts(container)[2]) for container in containers}
        for run in self._equal.runs:
            children = tables[id(run.container)]
            names = {id(child): name for name, child in children.items()}
            for position in run.passed_over:
                source = run.blocks[(TRACED - 1) * run.period + position % run.period]
                self._results[id(source)] = None
                stand_in = _stand_in(run.blocks[position], self._returning(id(source)))
                children[names[id(run.blocks[position])]] = stand_in

        def note(module: nn.Module, _: Any, result: Any) -> None:
            if id(module) in self._results:
                self._results[id(module)] = result

        replaced = {id(container): container for container in containers}
        hook = register_module_forward_hook(note)
        try:
            with submodules_replaced([*replaced.values()], [*tables.values()]):
                yield
        finally:
            hook.remove()
            self._results.clear()

    def _returning(self, source: int) -> Callable[..., Any]:
        def forward(*_: Any, **__: Any) -> Any:
            return self._results[source]

        return forward

    def check(self, program: ExportedProgram) -> None:
        """Checks that a program is the model's without the blocks that were passed over.

        Raises:
            NotSharedError: If it is not.
        """
        matches = []
        for inputs, log in self._equal.logs:
            try:
                traced = self._equal.model.run_program(program, inputs)
            except Exception as error:  # An operator of the program.
                raise NotSharedError(f"the trace runs otherwise: {headline(error)}") from error
            matches.append(_result_positions(log, traced, self._equal.runs))
        if any(positions != matches[0] for positions in matches):
            raise NotSharedError("the trace has other results at other sizes")
        self._program_positions = matches[0]

    def mark(self, program: ExportedProgram) -> None:
        """Makes the ends of the traced units results of the program, after its own.

        What stands for results of blocks that were passed over is none any longer.

        Raises:
            NotSharedError: If the units' parts of the program differ.
        """
        output = program.graph.output_node()
        results: Any = output.args[0]
        positions = self._program_positions
        kept = [number for number, position in enumerate(positions) if position is not None]
        by_position = {
            position: results[number]
            for number, position in enumerate(positions)
            if position is not None
        }
        self.positions = [
            position for position, node in by_position.items() if isinstance(node, fx.Node)
        ]
        self.units = [
            _program_units(
                program,
                run,
                [[by_position[position] for position in unit] for unit in run.results[:TRACED]],
            )
            for run in self._equal.runs
        ]
        ends = [node for units in self.units for unit in units.ends for node in unit]
        specs = program.graph_signature.output_specs
        specs[:] = [specs[number] for number in kept]
        specs.extend(
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in ends
        )
        output.args = ((*by_position.values(), *ends),)


def _stand_in(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Returns a module of a block's class and attributes, without its parts and its hooks."""
    stand_in: nn.Module = object.__new__(type(block))
    parts: dict[str, Any] = {name: {} for name in (*TENSOR_TABLES, CHILDREN_TABLE)}
    parts |= {name: OrderedDict() for name in HOOK_TABLES}
    attributes_of(stand_in).update({**attributes_of(block), **parts, "forward": forward})
    return stand_in


# --- What the program runs, against the model ---


def _result_positions(whole: ModelLog, traced: ModelLog, runs: Sequence[Run]) -> list[int | None]:
    """Returns which of a model's results those of a trace are.

    Raises:
        NotSharedError: If the trace did not run what the model ran without some blocks.
    """
    known: dict[int, int] = {}  # The trace's values by the model's.

    def twin(value: int) -> int | None:
        if value >= 0:
            return known.get(value)
        return traced.operators.number_of(whole.operators.origins[-1 - value])

    # By its first record, a block that was passed over, and whose results stood for its own.
    skipped: dict[int, tuple[Span, Span | None]] = {}
    for run in runs:
        spans = [whole.spans[id(block)][0] for block in run.blocks]
        last_unit = len(run.blocks) - run.period
        for block in run.passed_over:
            source = (TRACED - 1) * run.period + block % run.period
            stands_for = spans[source] if block >= last_unit else None
            skipped[spans[block].records.start] = spans[block], stands_for
    # Of what stands for others as well, a trace does not show which of both it uses.
    ambiguous: set[int] = set()
    remaining = iter(traced.operators.records)
    records = whole.operators.records
    position = 0
    while position < len(records) or position in skipped:
        if position in skipped:
            span, source_span = skipped.pop(position)
            position = span.records.stop
            if source_span is not None:
                values = zip(span.values, source_span.values, strict=True)
                ambiguous.update(source_span.values)
                known.update({value: known[its] for value, its in values})
            continue
        record, its = records[position], next(remaining, None)
        position += 1
        if not ambiguous.isdisjoint(record.uses):
            raise NotSharedError("what an earlier block computes is used after the last one")
        if its is None or its.form != record.form or [*map(twin, record.uses)] != [*its.uses]:
            raise NotSharedError("the trace runs other operators than the model")
        stop = records[position].results if position < len(records) else whole.operators.values
        known.update(zip(range(record.results, stop), itertools.count(its.results), strict=False))
    if next(remaining, None) is not None:
        raise NotSharedError("the trace runs more operators than the model")
    return _matched_results(whole, traced, runs, twin)


def _matched_results(
    whole: ModelLog, traced: ModelLog, runs: Sequence[Run], twin: Callable[[int], int | None]
) -> list[int | None]:
    absent = {position for run in runs for unit in run.results[TRACED:] for position in unit}
    inputs = [leaf for run in runs for unit in run.inputs[TRACED:] for leaf in unit]
    unchanged = {traced.operators.number_of(("input", leaf)) for leaf in inputs}
    expected = [position for position in range(len(whole.results)) if position not in absent]
    positions: list[int | None] = []
    for result in traced.results:
        if result in unchanged:
            # The layer of a cache as it was before stands for the layer as it will be.
            positions.append(None)
            continue
        value = whole.results[expected[0]] if expected else None
        if expected and (twin(value) if isinstance(value, int) else value) == result:
            positions.append(expected.pop(0))
        elif absent and result == "None":
            positions.append(None)  # A layer of a cache that nothing has filled.
        else:
            raise NotSharedError("the trace has other results than the model")
    if expected:
        raise NotSharedError("the trace has fewer results than the model")
    return positions


# --- What of it belongs to which unit ---


def _program_units(
    program: ExportedProgram, run: Run, results: Sequence[Sequence[fx.Node]]
) -> ProgramUnits:
    """Returns the units of a run in a program, whose second and third are compared.

    Raises:
        NotSharedError: If they differ in more than their weights.
    """
    first, second, third = units = [_nodes_of(program, run, unit) for unit in range(TRACED)]
    if len(second) != len(third):
        raise NotSharedError("the trace has more nodes of one block than of another")
    twins = dict(zip(second, third, strict=True))
    # By what the third unit takes of the second, what the second takes of the first.
    carried: dict[fx.Node, fx.Node] = {}
    for node, other in twins.items():
        for before, its in _pairs(node, other):
            if its in second and carried.setdefault(its, before) is not before:
                raise NotSharedError(f"{other.name} takes results in another way than {node.name}")
            if its in third and twins.get(before) is not its:
                raise NotSharedError(f"{other.name} is computed otherwise than {node.name}")
    if any(before not in first for before in carried.values()):
        raise NotSharedError("the first of equal blocks has other results")
    ends = [[*carried.values()], [*carried], [twins[node] for node in carried]]
    inside = {*third}
    used_after = {
        node
        for node in third
        if node not in results[-1] and any(user not in inside for user in node.users)
    }
    if not used_after <= {*ends[-1]}:
        raise NotSharedError("more is used of the last of equal blocks than of others")
    both = [node for lists in (ends, results) for unit in lists for node in unit]
    if len({*both}) < len(both):
        raise NotSharedError("what a block passes on is a result of the model as well")
    if not all(isinstance(node.meta.get("val"), Tensor) for node in both):
        raise NotSharedError("equal blocks pass on sizes")
    if any(node.meta.get("unbacked_bindings") for unit in units for node in unit):
        raise NotSharedError("equal blocks read sizes from data")  # Each has one name in a file.
    names = program.graph_signature.user_inputs
    return ProgramUnits(run, ends, [[str(names[leaf]) for leaf in unit] for unit in run.inputs])


def _nodes_of(program: ExportedProgram, run: Run, unit: int) -> dict[fx.Node, None]:
    """Returns the nodes that were traced in a unit's blocks, in order."""
    paths = {*run.unit_paths(unit)}
    return dict.fromkeys(
        node
        for node in program.graph.nodes
        if any(path in paths for path, _ in node.meta.get("nn_module_stack", {}).values())
    )


def _pairs(node: fx.Node, other: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields the nodes that two calls take in the same places.

    Raises:
        NotSharedError: If the calls differ in anything else.
    """
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    its_leaves, its_spec = pytree.tree_flatten((other.args, other.kwargs))
    if node.target != other.target or spec != its_spec:
        raise NotSharedError(f"{other.name} is another call than {node.name}")
    for leaf, its in zip(leaves, its_leaves, strict=True):
        if isinstance(leaf, fx.Node) and isinstance(its, fx.Node):
            yield leaf, its
        elif type(leaf) is not type(its) or repr(leaf) != repr(its):
            raise NotSharedError(f"{other.name} takes {its!r}, and {node.name} {leaf!r}")
