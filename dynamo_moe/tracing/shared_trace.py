"""A trace that passes over equal blocks, and what of its program belongs to which unit of them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.nn.modules.module import register_module_forward_hook

from dynamo_moe import pytree
from dynamo_moe.private import (
    CHILDREN_TABLE,
    HOOK_TABLES,
    TENSOR_TABLES,
    attributes_of,
    own_parts,
    submodules_replaced,
)
from dynamo_moe.tracing.equal_blocks import TRACED, EqualBlocks, NotSharedError, Run


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
        places: By result of the program that is the model's, its place among the model's.
    """

    def __init__(self, equal: EqualBlocks) -> None:
        """Takes a model's equal blocks."""
        self.units: list[ProgramUnits] = []
        self._equal = equal
        # The results of the last traced unit's blocks, by the ids of the blocks.
        self._results: dict[int, Any] = {}
        self._program_places: list[int | None] = []
        self.places: list[int] = []

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Puts what returns the last traced unit's results in the place of the blocks after it."""
        containers = [run.container for run in self._equal.runs]
        tables = {id(container): dict(own_parts(container)[2]) for container in containers}
        for run in self._equal.runs:
            children = tables[id(run.container)]
            names = {id(child): name for name, child in children.items()}
            for place in run.passed_over:
                source = run.blocks[(TRACED - 1) * run.period + place % run.period]
                self._results[id(source)] = None
                stand_in = _stand_in(run.blocks[place], self._returning(id(source)))
                children[names[id(run.blocks[place])]] = stand_in

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
        self._program_places = self._equal.places(program)

    def mark(self, program: ExportedProgram) -> None:
        """Makes the ends of the traced units results of the program, after its own.

        What stands for results of blocks that were passed over is none any longer.

        Raises:
            NotSharedError: If the units' parts of the program differ.
        """
        output = program.graph.output_node()
        results: Any = output.args[0]
        kept = [number for number, place in enumerate(self._program_places) if place is not None]
        self.places = [place for place in self._program_places if place is not None]
        by_place = dict(zip(self.places, (results[number] for number in kept), strict=True))
        self.units = [
            _program_units(
                program,
                run,
                [[by_place[place] for place in unit] for unit in run.results[:TRACED]],
            )
            for run in self._equal.runs
        ]
        ends = [node for units in self.units for unit in units.ends for node in unit]
        specs = program.graph_signature.output_specs
        specs[:] = [specs[number] for number in kept]
        specs.extend(
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in ends
        )
        output.args = ((*by_place.values(), *ends),)


def _stand_in(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Returns a module of a block's class and attributes, without its parts and its hooks."""
    stand_in: nn.Module = object.__new__(type(block))
    parts: dict[str, Any] = {name: {} for name in (*TENSOR_TABLES, CHILDREN_TABLE)}
    parts |= {name: OrderedDict() for name in HOOK_TABLES}
    attributes_of(stand_in).update({**attributes_of(block), **parts, "forward": forward})
    return stand_in


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
