"""Whether a traced program computes what the model does at sizes that it was not traced at.

Every decision by a symbolic size (:mod:`dynamo_moe.tracing.size_decisions`) is tried the other way:
the model and the program run at sizes for which it comes out differently. Most are harmless: the
model refuses such sizes, or gives what the program gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from dynamo_moe import pytree
from dynamo_moe.evaluation import one_thread
from dynamo_moe.private.pytorch import FakeTensor, FakeTensorMode, without_values
from dynamo_moe.tolerances import tolerance_for
from dynamo_moe.tracing.dynamic_shapes import DynamicExample, Labels, name_of, range_of
from dynamo_moe.tracing.program_runs import (
    Run,
    changed_parameters,
    model_run,
    program_run,
    shapes_run,
)
from dynamo_moe.tracing.size_conditions import compiled
from dynamo_moe.tracing.size_decisions import Decision

# Sizes that are tried, beside those next to the example's and to numbers in a condition.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 64, 65, 100, 129)
# Sizes for which a decision comes out differently, of which a model may refuse some.
_TRIALS = 3
# An example's larger sizes become smaller ones, if the decisions stay the same: a trial of 8 x 512
# tokens with T5's 32128 logits each took 7 GB.
_LARGE = 8
# The largest size that is tried, just beyond a usual limit, and those that are tried where no
# smaller one makes a difference: a condition may be on a product of sizes.
_LARGEST = 4097
_LARGE_SIZES = (256, 512, 1024, 2048, 4096)
# Numbers from here on are no sizes that a tensor has.
_NO_SIZE = 2**31
# Elements of the inputs up to which a run has one thread. T5-small's trials of 2 x 2 tokens take
# 0.2 s of it; with a thread on each of two busy cores, which wait for each other, up to 3 s.
_FEW_ELEMENTS = 2**15

Sizes = Mapping[sympy.Symbol, int]


class FixedSizeError(Exception):
    """The program is wrong at other sizes than the example's."""


class _Outcome(Enum):
    RIGHT = auto()
    WRONG = auto()
    OTHER_RANK = auto()
    """A result has another number of dimensions."""
    REFUSED = auto()
    """The reference does not take such sizes."""
    UNKNOWN = auto()


class SizeTrials:
    """Trials of a model's trace, and of what becomes of it, at other sizes than the example's.

    Without ``has_values`` the model's weights have none, and only the shapes and dtypes of results
    are compared.

    Attributes:
        notes: Decisions that could not be tried, for the user of the file.
        sizes: Sizes that decisions name.
    """

    def __init__(
        self,
        model: nn.Module,
        example: DynamicExample,
        *,
        has_values: bool = True,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Makes trials of a model that is traced with an example; ``prepare`` runs before a run."""
        self.notes: list[str] = []
        self.sizes: set[int] = set()
        self._model, self._example = model, example
        self._has_values, self._prepare = has_values, prepare
        self._decisions: list[Decision] = []
        self._taken: dict[tuple[Any, ...], bool] = {}

    def check_trace(self, program: ExportedProgram, decisions: Sequence[Decision]) -> None:
        """Compares a model with its trace at sizes where decisions come out differently.

        Args:
            program: A program whose inputs' sizes are the decisions' symbols.
            decisions: What was decided by sizes as it was traced.

        Raises:
            FixedSizeError: With the line of the model that decides.
        """
        self._decisions = [*decisions]
        self._check(program, decisions, self._model_run(program), self._program_run(program))

    def check_decomposed(
        self, program: ExportedProgram, decisions: Sequence[Decision], module: fx.GraphModule
    ) -> None:
        """Compares a trace with its decomposition, at sizes that the model takes.

        The trace's decisions hold as it is decomposed, and are not made again: an operator that the
        trace has for any size may become others for the example's alone. So they are tried again.

        Args:
            program: The trace, which has been compared with the model.
            decisions: What was decided by sizes as it was decomposed.
            module: The trace's graph, decomposed.

        Raises:
            FixedSizeError: With the line of the model that decides.
        """
        model, run = self._model_run(program), self._program_run(program)

        def where_taken(leaves: Sequence[Any]) -> Sequence[Any]:
            if _shapes(leaves) not in self._taken:
                model(leaves)
            elif not self._taken[_shapes(leaves)]:
                raise ValueError("the model refuses these sizes")
            return run(leaves)

        known = {decision.condition for decision in self._decisions}
        new = [decision for decision in decisions if decision.condition not in known]
        decisions = [*self._decisions, *new]
        self._check(program, decisions, where_taken, self._program_run(program, module))

    def _model_run(self, program: ExportedProgram) -> Run:
        """Returns a run of the model, of which it is kept whether it takes inputs of such sizes."""
        model = model_run(self._model, self._example, changed_parameters(program))

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            self._taken[_shapes(leaves)] = False
            with contextlib.nullcontext() if self._has_values else without_values():
                results = model(leaves)
            self._taken[_shapes(leaves)] = True
            return results

        return run

    def _program_run(self, program: ExportedProgram, module: fx.GraphModule | None = None) -> Run:
        run = program_run if self._has_values else shapes_run
        return run(program, module)

    def check_example(self, program: ExportedProgram) -> None:
        """Compares a model with its trace at the example.

        Raises:
            ValueError: If they are not the same, or the weights have no values to compare with.
        """
        leaves = pytree.tree_leaves((self._example.args, self._example.kwargs))
        if not self._has_values:
            raise ValueError(
                "a layer is routed by its own code, and its trace cannot be compared with it: the "
                "weights have no values"
            )
        changed = changed_parameters(program)
        runs = program_run(program), model_run(self._model, self._example, changed)
        if not all(map(_equal, *(self._running(run)(leaves) for run in runs))):
            raise ValueError("a layer is routed by its own code, whose trace computes other values")

    def _check(
        self,
        program: ExportedProgram,
        decisions: Sequence[Decision],
        reference: Run,
        candidate: Run,
    ) -> None:
        """Compares two computations; the reference may raise errors for sizes that it refuses."""
        decisions = [decision for decision in decisions if decision.condition.free_symbols]
        if not decisions or self._example.shapes is None:
            return
        if not self._has_values and FakeTensorMode is None:
            self._note(
                f"{len(decisions)} decisions by sizes could not be compared at other sizes than "
                "the example's: the weights have no values, and PyTorch's fake tensors, with which "
                "shapes could be compared, have moved"
            )
            return
        conditions = [decision.condition for decision in decisions]
        numbers = {int(n) for c in conditions for n in c.atoms(sympy.Integer)}
        self.sizes |= {number for number in numbers if number <= _LARGEST}
        runs = self._running(reference), self._running(candidate)
        trials = _Trials(program, self._example, conditions, *runs)
        for decision in decisions:
            what = decision.line or trials.described(decision.condition)
            if trials.is_beyond(decision.condition):
                self._note(
                    f"{what} was decided for the example's sizes, and could not be compared at "
                    f"sizes above {_LARGEST}, for which it comes out differently"
                )
            for where, outcome in trials.against(decision.condition):
                if outcome is _Outcome.WRONG:
                    raise FixedSizeError(
                        f"{what} was decided for the example, and is wrong where {where}"
                    )
                if outcome is _Outcome.OTHER_RANK:
                    self._note(
                        f"{what}: a result of the model has another rank where {where}, which a "
                        "file cannot have"
                    )
                if outcome is _Outcome.UNKNOWN and decision.line:
                    self._note(
                        f"{what} was decided for the example's sizes, and could not be compared "
                        "at others"
                    )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _running(self, run: Run) -> Run:
        """Returns a run without gradients, in which each run draws the same random numbers.

        It gets copies of the inputs: a model may change them in place.
        """

        def running(leaves: Sequence[Any]) -> Sequence[Any]:
            few = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) <= _FEW_ELEMENTS
            threads = one_thread() if few else contextlib.nullcontext()
            if self._has_values and self._prepare is not None:
                self._prepare()
            eager = torch.compiler.set_stance("force_eager")  # Of parts that are compiled.
            with torch.no_grad(), torch.random.fork_rng(devices=()), threads, eager:
                return run([*map(_copied, leaves)])

        return running


class _Trials:
    """Two computations, and the sizes to run both at."""

    def __init__(
        self,
        program: ExportedProgram,
        example: DynamicExample,
        conditions: Sequence[Any],
        reference: Run,
        candidate: Run,
    ) -> None:
        self._reference, self._candidate = reference, candidate
        self._leaves = pytree.tree_leaves((example.args, example.kwargs))
        shapes = _input_shapes(program)
        labelled = [*_labelled_sizes(shapes, self._leaves, example.labels)]
        self._same, self._example = _sizes(labelled)
        self._ranges = [
            (expression.xreplace(self._same), *range_of(label)) for expression, _, label in labelled
        ]
        self._shapes = [
            (name, shape and [size.xreplace(self._same) for size in shape])
            for name, shape in shapes
        ]
        known = dict.fromkeys(c.xreplace(self._same) for c in conditions)
        tried = [c for c in known if c.free_symbols and c.free_symbols <= {*self._example}]
        self._relations = [c for c in tried if _is_relation(c)]
        self._others = [c for c in tried if not _is_relation(c)]
        self._outcomes: dict[tuple[int, ...], _Outcome] = {}
        self._answers: dict[Any, bool | None] = {}
        self._compiled: dict[Any, tuple[list[Any], Callable[..., Any]]] = {}
        smaller = self._smaller_example()
        self._bases = [self._example] if smaller == self._example else [smaller, self._example]

    def _smaller_example(self) -> Sizes:
        """Returns sizes for which all decisions are the example's, and none is large."""
        base = self._example
        for symbol, example_size in self._example.items():
            for size in (
                size for size in _SIZES if example_size > _LARGE and 1 < size < example_size
            ):
                smaller = self._related({**base, symbol: size}, {symbol})
                if smaller is not None and all(self._holds(c, smaller) for c in self._others):
                    base = smaller
                    break
        return base

    def against(self, condition: Any) -> Iterator[tuple[str, _Outcome]]:
        """Runs both at sizes for which a condition does not hold.

        They are near small sizes, for which every decision is the example's. Where there are none,
        or the model takes none of them, they are near the example's own.

        Yields:
            The sizes in words, and the outcome: unknown if the two differ not only there, but at
            the sizes that these are near to.
        """
        condition = condition.xreplace(self._same)
        for base in self._bases if condition in self._others else []:
            compared = False
            for sizes in self._violating(condition, base):
                outcome = self._outcome(sizes)
                if outcome is not _Outcome.RIGHT and self._outcome(base) is not _Outcome.RIGHT:
                    outcome = _Outcome.UNKNOWN
                if base is self._example or outcome not in {_Outcome.REFUSED, _Outcome.UNKNOWN}:
                    compared = True
                    yield self._named(sizes, base), outcome
            if compared:
                return

    def _violating(self, condition: Any, base: Sizes) -> list[Sizes]:
        """Returns a few sizes for which a condition does not hold, near the given ones and far."""
        violations = self._violations(condition, base)
        broken = [(len(self._broken(self._others, sizes)), sizes) for sizes in violations]
        # Those that change as few other decisions as possible.
        fewest = min((count for count, _ in broken), default=0)
        simplest = [sizes for count, sizes in broken if count == fewest]
        step = max(1, (len(simplest) - 1) // (_TRIALS - 1))
        return [*simplest[:1], *simplest[step::step][: _TRIALS - 1]]

    def _violations(self, condition: Any, base: Sizes) -> Iterator[Sizes]:
        symbols = sorted(condition.free_symbols, key=str)
        numbers = map(int, condition.atoms(sympy.Integer))
        near = {number + more for number in numbers for more in (-1, 0, 1)}
        together = [symbols] if len(symbols) > 1 else []
        groups = [*([symbol] for symbol in symbols), *together]
        found = False
        # What seems to be how sizes must fit each other may follow from the decision itself, as
        # where a loop has made as many rows as it had turns: the model knows.
        for fitting in (True, False):
            for group in groups if not found else []:
                current = base[group[0]]
                for size in _by_distance({*_SIZES, *near, current - 1, current + 1}, current):
                    violation = self._violation(condition, base, group, size, fitting=fitting)
                    if violation is not None:
                        found = True
                        yield violation
        for group in groups if not found else []:
            large = (self._violation(condition, base, group, size) for size in _LARGE_SIZES)
            yield from [violation for violation in large if violation is not None][:1]

    def _violation(
        self,
        condition: Any,
        base: Sizes,
        group: Sequence[Any],
        size: int,
        *,
        fitting: bool = True,
    ) -> Sizes | None:
        """Returns sizes that break a condition, its symbols of one size.

        Others are changed until they fit it; unless ``fitting``, they stay as they are.
        """
        sizes = {**base, **dict.fromkeys(group, size)}
        if not 0 < size <= _LARGEST or self._holds(condition, sizes) is not False:
            return None
        if not fitting:
            return None if self._exceeds(sizes) else sizes
        related = self._related(sizes, set(group))
        if related is None or self._holds(condition, related) is not False:
            return None
        return related

    def is_beyond(self, condition: Any) -> bool:
        """Whether a condition holds up to the largest size that is tried, and not beyond."""
        condition = condition.xreplace(self._same)
        if condition not in self._others or any(self._violations(condition, self._example)):
            return False
        numbers = [int(number) for number in condition.atoms(sympy.Integer)]
        beyond = [
            {**self._example, symbol: number + 1}
            for symbol in condition.free_symbols
            for number in numbers
            if _LARGEST <= number < _NO_SIZE
        ]
        return any(
            self._holds(condition, sizes) is False and not self._exceeds(sizes) for sizes in beyond
        )

    def _related(self, sizes: Sizes, fixed: set[Any]) -> Sizes | None:
        """Changes other sizes until those that must fit each other do, all in their ranges."""
        for _ in self._relations:
            broken = self._broken(self._relations, sizes)
            if not broken:
                break
            changed = (
                {**sizes, symbol: size}
                for symbol in sorted(broken[0].free_symbols - fixed, key=str)
                for size in _by_distance(_SIZES, sizes[symbol])
            )
            sizes = min(
                (candidate for candidate in changed if self._holds(broken[0], candidate)),
                key=lambda candidate: len(self._broken(self._relations, candidate)),
                default={},
            )
            if not sizes:
                return None
        return None if self._broken(self._relations, sizes) or self._exceeds(sizes) else sizes

    def _exceeds(self, sizes: Sizes) -> bool:
        """Whether a size is out of the range that the user has given it."""
        return any(
            (least is not None and _at(expression, sizes) < least)
            or (greatest is not None and _at(expression, sizes) > greatest)
            for expression, least, greatest in self._ranges
        )

    def _broken(self, conditions: Sequence[Any], sizes: Sizes) -> list[Any]:
        return [condition for condition in conditions if self._holds(condition, sizes) is False]

    def _named(self, sizes: Sizes, base: Sizes) -> str:
        """Says which sizes differ from others."""
        return " and ".join(
            f"{name}.shape[{dimension}] is {_at(size, sizes)}"
            for name, shape in self._shapes
            for dimension, size in enumerate(shape or ())
            if _at(size, sizes) != _at(size, base)
        )

    def described(self, condition: Any) -> str:
        """Says a condition in terms of the inputs."""
        names = {
            size: sympy.Symbol(f"{name}.shape[{dimension}]")
            for name, shape in reversed(self._shapes)
            for dimension, size in enumerate(shape or ())
        }
        return str(condition.xreplace(self._same).xreplace(names))

    def _holds(self, condition: Any, sizes: Sizes) -> bool | None:
        """Whether a condition holds; None if that cannot be told.

        The search for sizes that fit asks the same questions again and again. Remembering the
        answers takes a fifth off the export of a small Mixtral with its cache.
        """
        if condition not in self._compiled:
            self._compiled[condition] = compiled(condition)
        symbols, function = self._compiled[condition]
        key = condition, tuple(sizes.get(symbol) for symbol in symbols)
        if key not in self._answers:
            self._answers[key] = function(*key[1])
        return self._answers[key]

    def _outcome(self, sizes: Sizes) -> _Outcome:
        """Runs both at the sizes, once."""
        key = tuple(sizes.values())
        if key not in self._outcomes:
            self._outcomes[key] = self._run(sizes)
        return self._outcomes[key]

    def _run(self, sizes: Sizes) -> _Outcome:
        leaves = [
            leaf if shape is None else _resized(leaf, [_at(size, sizes) for size in shape])
            for (_, shape), leaf in zip(self._shapes, self._leaves, strict=True)
        ]
        try:
            expected = self._reference(leaves)
        except Exception:  # The model's own code runs.
            return _Outcome.REFUSED
        try:
            results = self._candidate(leaves)
        except Exception:  # The reference has just run at these sizes.
            return _Outcome.WRONG
        if len(results) == len(expected) and all(map(_equal, results, expected)):
            return _Outcome.RIGHT
        if [*map(_rank, results)] != [*map(_rank, expected)]:
            return _Outcome.OTHER_RANK
        return _Outcome.WRONG


def _input_shapes(program: ExportedProgram) -> list[tuple[str, list[Any] | None]]:
    """Returns the inputs' names and shapes, as expressions; None for what is no tensor."""
    placeholders = program.graph.find_nodes(op="placeholder")
    return [
        (node.name, _shape(node.meta.get("val")))
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


def _shape(value: Any) -> list[Any] | None:
    if not isinstance(value, Tensor):
        return None
    return [sympy.Integer(s) if isinstance(s, int) else s.node.expr for s in value.shape]


def _labelled_sizes(
    shapes: Sequence[tuple[str, Any]], leaves: Sequence[Any], labels: Sequence[Labels]
) -> Iterator[tuple[Any, int, Any]]:
    """Yields the inputs' sizes as expressions, the example's, and their labels."""
    tensors = iter(labels)
    for (_, shape), leaf in zip(shapes, leaves, strict=True):
        of_tensor = next(tensors) if isinstance(leaf, Tensor) else {}
        for dimension, size in enumerate(shape or ()):
            yield size, leaf.shape[dimension], of_tensor.get(dimension)


def _sizes(sizes: Iterable[tuple[Any, int, Any]]) -> tuple[dict[Any, Any], Sizes]:
    """Returns which symbols stand for a size of one name, and the example's sizes by symbol."""
    same: dict[Any, Any] = {}
    example: dict[Any, int] = {}
    first: dict[Any, Any] = {}
    for expression, size, label in sizes:
        if expression.is_Symbol:
            same[expression] = first.setdefault((name_of(label) or expression, size), expression)
            example[same[expression]] = size
    for expression, size, _ in sizes:
        # A size such as 2*n where n is that of no input.
        for symbol in expression.free_symbols - same.keys():
            same[symbol] = symbol
            (example[symbol],) = map(int, sympy.solve(expression - size, symbol))
    return same, example


def _is_relation(condition: Any) -> bool:
    """Whether a condition only says how sizes must fit each other."""
    if len(condition.free_symbols) < 2:
        return False
    if not isinstance(condition, sympy.core.relational.Relational):
        return True
    return not any(side.is_number and side != 0 for side in condition.args)


def _by_distance(sizes: Collection[int], centre: int) -> list[int]:
    return sorted(sizes, key=lambda size: abs(size - centre))


def _at(size: Any, sizes: Sizes) -> int:
    return int(size.xreplace(sizes))  # subs takes ten times as long.


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeats or cuts a tensor, so that its values stay those of the example."""
    for dimension, size in enumerate(shape):
        old = tensor.shape[dimension]
        if size != old:
            indices = torch.arange(size, device=tensor.device) % old
            tensor = tensor.index_select(dimension, indices)
    return tensor


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)


def _rank(result: Any) -> int | None:
    return result.ndim if isinstance(result, Tensor) else None


def _equal(result: Any, right: Any) -> bool:
    if not isinstance(right, Tensor) or not isinstance(result, Tensor):
        return bool(result == right)
    if result.shape != right.shape or result.dtype != right.dtype:
        return False
    if any(x.is_meta or isinstance(x, FakeTensor) for x in (result, right)):
        return True
    same = torch.equal(result, right)  # As a rule. What follows takes ten times as long.
    if same or not right.is_floating_point():
        return same
    numbers = right.double()
    finite = numbers[numbers.isfinite()]
    rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    bound = tolerance_for({right.dtype}).max * rms
    return torch.allclose(result.double(), numbers, rtol=0, atol=bound, equal_nan=True)
