"""Blocks that compute the same of weights of their own, found by running the model.

The whole model runs without values, at the example's sizes and at larger ones, and its operators
are logged. Blocks are equal if they ran the same operators: of their own weights, of results of the
blocks before them, and of what all of them share. A trace may then pass over most of them, and is
right if what it gives, run at the same sizes, has the model's log without these blocks.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynamo_moe.model_lines import model_line
from dynamo_moe.private.pytorch import modules_by_path, own_parts
from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing.dynamic_shapes import DynamicExample
from dynamo_moe.tracing.failures import headline
from dynamo_moe.tracing.model_log import LoggedModel, ModelLog, Span
from dynamo_moe.tracing.plain_values import PlainValues

TRACED = 3
"""Units of equal blocks that are traced. The first stands beside what comes before them. Of the two
others, each between equal blocks, one shows that what becomes of the other is no coincidence."""

# Blocks after which kinds of blocks may repeat; Gemma 3 has five with a window, then one without.
_PERIODS = range(1, 9)
# How many times the example's the larger sizes are: the first that the model takes. Multiplied,
# sizes that are a sum of others, or multiples of a number, stay so.
_FACTORS = (1024, 16, 2)
# Code that runs an operator for each token would run too many at larger sizes.
_MOST_TIMES_AS_MANY = 4


class NotSharedError(Exception):
    """Equal blocks have to be traced one by one; the message says why."""


@dataclass(frozen=True)
class Run:
    """Blocks of one container that follow each other, each equal to the one a period before.

    Attributes:
        container: The container, a ModuleList or a Sequential.
        paths: The blocks' paths.
        blocks: The blocks.
        period: How many kinds of blocks there are; a unit has one of each.
        inputs: By unit, which of the example's leaves it alone takes, in one order.
        results: By unit, which of the model's results it computes, in one order.
    """

    container: nn.Module
    paths: Sequence[str]
    blocks: Sequence[nn.Module]
    period: int
    inputs: Sequence[Sequence[int]]
    results: Sequence[Sequence[int]]

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.blocks) // self.period

    @property
    def passed_over(self) -> range:
        """Which of the blocks are not traced."""
        return range(TRACED * self.period, len(self.blocks))

    @property
    def kinds(self) -> list[str]:
        """The names of the classes of a unit's blocks."""
        return [type(block).__name__ for block in self.blocks[: self.period]]

    def unit_paths(self, unit: int) -> Sequence[str]:
        """Returns the paths of a unit's blocks."""
        return self.paths[unit * self.period : (unit + 1) * self.period]

    def unit_tensors(self, unit: int) -> dict[str, Tensor]:
        """Returns the parameters and buffers of a unit's blocks by name."""
        tensors: dict[str, Tensor] = {}
        for block in range(unit * self.period, (unit + 1) * self.period):
            for path, module in modules_by_path(self.blocks[block]):
                prefix = ".".join(filter(None, (self.paths[block], path)))
                for table in own_parts(module)[:2]:
                    tensors |= {f"{prefix}.{name}": x for name, x in table.items() if x is not None}
        return tensors


class EqualBlocks:
    """A model's runs of equal blocks, and the logs that show it.

    Attributes:
        runs: The runs.
        model: The model as it runs without values.
        logs: The inputs of the runs with which a trace is compared, and what the model ran.
    """

    model: LoggedModel

    @phase("capture")
    def __init__(self, model: nn.Module, example: DynamicExample) -> None:
        """Runs a model where it has blocks that may be equal.

        Raises:
            NotSharedError: If it cannot run without values, or at no larger sizes.
        """
        self.runs: list[Run] = []
        self._reasons: list[str] = []
        self.logs: list[tuple[Sequence[Any], ModelLog]] = []
        stacks = _stacks(model)
        if not stacks:
            return
        self.model = LoggedModel(model, example)
        blocks = [block for stack in stacks for block in stack.blocks]
        self.logs.append(self._first_log(blocks))
        logs = [self.logs[0][1]]
        if any(example.labels):
            self.logs.append(self._larger_log(blocks))
            logs += [self.logs[1][1], *self._odd_log(blocks)]
        for stack in stacks:
            views = [_StackLog(stack, log) for log in logs]
            runs = _runs(stack, views)
            self.runs += runs
            if not runs:
                self._reasons.append(f"{_name(stack)}: traced one by one: {_reason(stack, views)}")

    def _first_log(self, blocks: Sequence[nn.Module]) -> tuple[Sequence[Any], ModelLog]:
        inputs = self.model.inputs(1)
        try:
            return inputs, self.model.run(inputs, blocks)
        except Exception as error:  # The model's own code runs.
            line = model_line(error)
            reason = f"{type(error).__name__} at {line}" if line else headline(error)
            raise NotSharedError(f"the model cannot run without values: {reason}") from error

    def _larger_log(self, blocks: Sequence[nn.Module]) -> tuple[Sequence[Any], ModelLog]:
        most = _MOST_TIMES_AS_MANY * len(self.logs[0][1].operators.records)
        reason: Exception | None = None
        for factor in _FACTORS:
            inputs = self.model.inputs(factor)
            try:
                return inputs, self.model.run(inputs, blocks, most)
            except Exception as error:  # The model's own code runs.
                reason = error
        raise NotSharedError(f"the model runs at no larger sizes: {headline(reason)}") from reason

    def _odd_log(self, blocks: Sequence[nn.Module]) -> list[ModelLog]:
        """Returns a log at sizes that are no multiples, for blocks that round; or none.

        A size that is the sum of others is none here, so a program may run something else.
        """
        most = _MOST_TIMES_AS_MANY * len(self.logs[0][1].operators.records)
        try:
            return [self.model.run(self.model.inputs(_FACTORS[0], 1), blocks, most)]
        except Exception:  # The model's own code runs.
            return []

    def is_repeatable(self) -> bool:
        """Whether the model still runs what it ran, after a trace that passed over blocks.

        A counter of calls that could not be set back, such as an iterator, is at another number.
        """
        inputs, log = self.logs[0]
        try:
            now = self.model.run(inputs, ()).operators
        except Exception:  # The model's own code runs.
            return False
        before = log.operators
        return (now.records, now.origins) == (before.records, before.origins)

    def report(self) -> list[str]:
        """Returns, in words, how many blocks a trace has to run, or why each of them."""
        shared = [
            f"{len(run.blocks)} of {', '.join(dict.fromkeys(run.kinds))}: "
            f"{TRACED * run.period} traced"
            for run in self.runs
        ]
        return shared + self._reasons


# --- Before anything runs ---


class _Stack(NamedTuple):
    """Blocks of one container, each with what has to be equal before it runs."""

    container: nn.Module
    paths: Sequence[str]
    blocks: Sequence[nn.Module]
    facts: Sequence[Mapping[Any, Any]]


def _stacks(model: nn.Module) -> list[_Stack]:
    """Returns the containers that have more blocks of one class than would be traced of them."""
    modules = modules_by_path(model)
    children = (child for _, module in modules for child in own_parts(module)[2].values())
    occurrences = Counter(map(id, children))
    stacks: list[_Stack] = []
    values = PlainValues()
    for path, container in modules:
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        named = list(container.named_children())
        classes = Counter(type(block) for _, block in named)
        if not classes or max(classes.values()) <= TRACED:
            continue
        # One that a model has in several places has several paths, and is equal to no other.
        facts = [_facts(block, values) if occurrences[id(block)] == 1 else {} for _, block in named]
        paths = [f"{path}.{name}" if path else name for name, _ in named]
        stacks.append(_Stack(container, paths, [block for _, block in named], facts))
    return stacks


def _facts(block: nn.Module, values: PlainValues) -> dict[Any, Any]:
    """Returns a block's classes, the layout of its weights, and the plain values that it holds.

    Operators show what attributes do at the sizes that are tried. At others an attribute may still
    decide, as in ``if tokens > self.window``.
    """
    facts: dict[Any, Any] = {}
    for path, module in modules_by_path(block):
        facts[path] = type(module)
        for table in own_parts(module)[:2]:
            for name, tensor in table.items():
                facts[path, name] = None if tensor is None else _layout(tensor)
    return facts | values.of_modules(modules_by_path(block))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.shape, tensor.dtype, strides


def _may_be_equal(facts: Mapping[Any, Any], earlier: Mapping[Any, Any], distance: int) -> bool:
    """Whether two blocks differ at most in their numbers, and in real numbers.

    Real numbers, such as a rate of stochastic depth, are compared with no sizes.
    """
    if not facts or facts.keys() != earlier.keys():
        return False
    return all(_agree(value, earlier[name], distance) for name, value in facts.items())


def _agree(value: Any, other: Any, distance: int) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return _may_be_equal(value, other, distance)
    is_number = type(value) is int and value - other == distance
    return bool(value == other or is_number or type(value) is float)


# --- What blocks ran ---


class _StackLog:
    """The operators that a stack's blocks ran, by one log."""

    def __init__(self, stack: _Stack, log: ModelLog) -> None:
        self.results = log.results
        self._origins = log.operators.origins
        calls = [log.spans[id(block)] for block in stack.blocks]
        # One that is called several times, or not at all, is equal to no other.
        self.spans: list[Span | None] = [spans[0] if len(spans) == 1 else None for spans in calls]
        starts = [span.values.start if span else -1 for span in self.spans]
        self._starts = list(itertools.accumulate(starts, max))
        self.signatures: list[Any] = []
        self.externals: list[Sequence[int]] = []
        for path, span in zip(stack.paths, self.spans, strict=True):
            signature, externals = (None, ()) if span is None else self._described(log, path, span)
            self.signatures.append(signature)
            self.externals.append(externals)

    def _described(self, log: ModelLog, path: str, span: Span) -> tuple[Any, Sequence[int]]:
        """Returns a signature, equal for blocks that ran the same, and the values that it ran on.

        Returns:
            Its operators, None if it changes in place what is not its own; and the values that are
            neither its results nor its weights, in the order of their first uses.
        """
        externals: dict[int, int] = {}
        inside, prefix, origins = span.values, f"{path}.", self._origins
        names: dict[int, Any] = {}

        def name(value: int) -> Any:
            kind, *rest = origins[-1 - value] if value < 0 else ("result",)
            if kind == "weight" and rest[0].startswith(prefix):
                return rest[0][len(prefix) :]
            return -1 - externals.setdefault(value, len(externals))

        signature = []
        start, stop = inside.start, inside.stop
        for record in log.operators.records[span.records.start : span.records.stop]:
            if any(memory not in span.memories for memory in record.writes):
                return None, ()
            uses = []
            for value in record.uses:
                if start <= value < stop:
                    uses.append(value - start)
                else:
                    if value not in names:
                        names[value] = name(value)
                    uses.append(names[value])
            written = [memory - span.memories.start for memory in record.writes]
            writes = [None, *written] if written else ()
            signature.append((record.form, *uses, *writes))
        return (span.autocast, *signature), tuple(externals)

    def block_of(self, value: int) -> int | None:
        """Returns which block computed a value; None if none did."""
        block = bisect.bisect_right(self._starts, value) - 1
        span = self.spans[block] if block >= 0 else None
        return block if span is not None and value in span.values else None

    def offset(self, value: int, block: int) -> int:
        """Returns which of its block's values one is."""
        span = self.spans[block]
        return -1 if span is None else value - span.values.start

    def input_of(self, value: int) -> int | None:
        """Returns which leaf of the example a value is; None if it is none."""
        kind, *rest = self._origins[-1 - value] if value < 0 else ("result",)
        return rest[0] if kind == "input" else None

    def follows(self, block: int) -> bool:
        """Whether nothing ran between a block and the one before it."""
        span, before = self.spans[block], self.spans[block - 1]
        return bool(span and before and span.records.start == before.records.stop)

    def is_equal(self, block: int, period: int, start: int) -> bool:
        """Whether a block of a run that begins at ``start`` ran what the one a period before did.

        What both take is the same value; or a result of the block as far before each, in the same
        unit or in the one before; or an input of its own.
        """
        other = block - period
        if self.signatures[block] is None or self.signatures[block] != self.signatures[other]:
            return False
        if not all(self.follows(later) for later in range(other + 1, block + 1)):
            return False
        pairs = zip(self.externals[block], self.externals[other], strict=True)
        if not all(self._is_alike(value, its, block, period, start) for value, its in pairs):
            return False
        # An input of the model is common to all units, or each one's own.
        before = other - period
        return before < start or self._common(block, other) == self._common(other, before)

    def _common(self, block: int, other: int) -> list[bool]:
        """Returns where two blocks take the same input of the model."""
        pairs = zip(self.externals[block], self.externals[other], strict=True)
        return [value == its and self.input_of(value) is not None for value, its in pairs]

    def _is_alike(self, value: int, its: int, block: int, period: int, start: int) -> bool:
        source, its_source = self.block_of(value), self.block_of(its)
        if source is None or source < start:
            are_inputs = None not in (self.input_of(value), self.input_of(its))
            return value == its or are_inputs
        if (source - start) // period < (block - start) // period - 1:
            return False
        if block < start + 2 * period and (its_source is None or its_source < start):
            return True  # The first unit takes it from what comes before the run.
        same_offset = self.offset(value, source) == self.offset(its, source - period)
        return its_source == source - period and same_offset


def _runs(stack: _Stack, logs: Sequence[_StackLog]) -> list[Run]:
    runs = []
    start = 0
    while start + TRACED < len(stack.blocks):
        period, stop = _longest(stack, logs, start)
        run = _run(stack, logs, start, stop, period) if stop - start > TRACED * period else None
        runs += [run] if run is not None else []
        start = stop if run is not None else start + 1
    return runs


def _longest(stack: _Stack, logs: Sequence[_StackLog], start: int) -> tuple[int, int]:
    """Returns the period, and the end, of the run that spares a trace most blocks."""
    best, spared = (1, start), 0
    for period in _PERIODS:
        stop = _stop(stack, logs, start, period)
        if stop - start - TRACED * period > spared:
            best, spared = (period, stop), stop - start - TRACED * period
        if stop == len(stack.blocks):
            break
    return best


def _stop(stack: _Stack, logs: Sequence[_StackLog], start: int, period: int) -> int:
    """Returns where a run of whole units ends."""
    stop = start + period
    while (
        stop < len(stack.blocks)
        and _may_be_equal(stack.facts[stop], stack.facts[stop - period], period)
        and all(log.is_equal(stop, period, start) for log in logs)
    ):
        stop += 1
    return stop - (stop - start) % period


def _run(
    stack: _Stack, logs: Sequence[_StackLog], start: int, stop: int, period: int
) -> Run | None:
    """Returns a run with its inputs and results; None if its units have different ones."""
    forms = []
    for log in logs:
        inputs = _unit_inputs(log, start, stop, period)
        leaves = [leaf for unit in inputs for leaf in unit]
        results = [_results(log, range(unit, unit + period)) for unit in range(start, stop, period)]
        # What the last unit ends with may be the model's result as well.
        offsets = sorted(set.intersection(*map(set, results)))
        if len(set(leaves)) < len(leaves) or any(len(unit) > len(offsets) for unit in results[:-1]):
            return None
        forms.append((inputs, [[unit[offset] for offset in offsets] for unit in results]))
    if any(form != forms[0] for form in forms):
        return None
    return Run(
        stack.container,
        stack.paths[start:stop],
        stack.blocks[start:stop],
        period,
        *forms[0],
    )


def _unit_inputs(log: _StackLog, start: int, stop: int, period: int) -> list[list[int]]:
    """Returns, by unit, the example's leaves that other units do not take."""
    inputs: list[list[int]] = [[] for _ in range(start, stop, period)]
    for kind in range(period):
        second, third = (log.externals[start + unit * period + kind] for unit in (1, 2))
        slots = [
            slot
            for slot, values in enumerate(zip(second, third, strict=True))
            if len({*values}) == 2 and log.input_of(values[0]) is not None
        ]
        for unit, leaves in enumerate(inputs):
            externals = log.externals[start + unit * period + kind]
            leaf_numbers = [log.input_of(externals[slot]) for slot in slots]
            leaves += [leaf for leaf in leaf_numbers if leaf is not None]
    return inputs


def _results(log: _StackLog, blocks: range) -> dict[tuple[int, int], int]:
    """Returns which of the model's results are values of a unit, by block and offset."""
    results = {}
    for position, value in enumerate(log.results):
        block = log.block_of(value) if isinstance(value, int) else None
        if block is not None and block in blocks:
            results[block - blocks.start, log.offset(int(value), block)] = position
    return results


def _name(stack: _Stack) -> str:
    kinds = dict.fromkeys(type(block).__name__ for block in stack.blocks)
    return f"{len(stack.blocks)} of {', '.join(kinds)}"


def _reason(stack: _Stack, logs: Sequence[_StackLog]) -> str:
    """Returns in what the second and the third block of a stack without equal ones differ."""
    facts, other = stack.facts[1:3]
    if not _may_be_equal(other, facts, 1):
        names = {
            name
            for name in (*facts, *other)
            if not _may_be_equal({0: other.get(name)}, {0: facts.get(name)}, 1)
        }
        shown = {name if isinstance(name, str) else ".".join(filter(None, name)) for name in names}
        return f"they differ in {min(shown)}" if shown else "one is in several places"
    if any(None in log.spans[1:3] for log in logs):
        return "they are not called once each"
    if any(log.signatures[1] is None for log in logs):
        return "they change what they are given"
    return "they run different operators"
