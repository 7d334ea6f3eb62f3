"""Which blocks of a model compute the same of other weights: compared, not guessed.

Python does the same where everything that it reads is the same. A block is therefore described by
facts: what its modules, their attributes, hooks, functions and closures are. Blocks with equal
facts do the same with their own weights, as long as what they reach outside of themselves does not
change, which :mod:`dynamo_moe.tracing.reachable_state` tells. An attribute that differs between two
blocks, such as a layer's number, is no obstacle if the traced block does not read it, which only
its trace shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private import calls_forward_alone, modules_by_path, own_parts
from dynamo_moe.tracing.descriptions import Common, Description, Original, describe

FEWEST_TRACED, MOST_TRACED = 2, 3
"""Units of equal blocks that are traced: the first may compute what all share; the last leaves all
as it finds it, which shows that the others do what it does. Where the second does not, the third
may."""

# Blocks after which kinds of blocks may repeat; Gemma 3 has five with a window, then one without.
_PERIODS = range(1, 9)


class NotSharedError(Exception):
    """Blocks cannot be shared; the reason is for the log alone, since nothing is lost but time.

    Attributes:
        run: The run that they are; None if it is not known which.
    """

    def __init__(self, reason: str, run: Run | None = None) -> None:
        """Takes the reason, and the run."""
        super().__init__(reason)
        self.run = run


@dataclass(frozen=True)
class Run:
    """Blocks of one container that follow each other, each like the one a period before.

    Attributes:
        paths: The blocks' paths.
        blocks: The blocks.
        period: Kinds of blocks; a unit has one of each.
        described: What each block was before the trace.
        differing: By kind, the attributes that differ between its blocks.
        traced_units: Units that are traced.
    """

    paths: Sequence[str]
    blocks: Sequence[nn.Module]
    period: int
    described: Sequence[Original]
    differing: Sequence[frozenset[tuple[str, str]]]
    traced_units: int = FEWEST_TRACED

    @property
    def traced(self) -> int:
        """Number of blocks that are traced."""
        return self.traced_units * self.period

    def unit_tensors(self, start: int) -> dict[str, Tensor]:
        """Returns the tensors of the unit whose first block is the given one, by name."""
        places = range(start, start + self.period)
        return {
            f"{self.paths[place]}.{name}": tensor
            for place in places
            for name, tensor in self.described[place].tensors.items()
        }


def runs_of(model: nn.Module) -> list[Run]:
    """Returns a model's runs of equal blocks that are longer than what may be traced of them.

    There are none where code runs around the model's forward, which may look for what is taken from
    blocks that are passed over.
    """
    if not calls_forward_alone(model):
        return []
    modules = modules_by_path(model)
    children = (child for _, module in modules for child in own_parts(module)[2].values())
    counts = Counter(id(child) for child in children)
    several = {child for child, count in counts.items() if count > 1}
    tied = tied_tensors(model)
    common = Common()
    found: list[Run] = []
    inside: set[int] = set()
    for path, container in modules:
        if id(container) in inside:
            continue
        if isinstance(container, ConvertedModule):
            # It computes with its experts' weights; nothing calls them in turn.
            inside.update(id(part) for _, part in modules_by_path(container))
        elif isinstance(container, (nn.ModuleList, nn.Sequential)):
            for run in _runs(path, list(container.named_children()), several, tied, common):
                found.append(run)
                inside.update(id(part) for each in run.blocks for _, part in modules_by_path(each))
    return found


def tied_tensors(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters and buffers that a model has in several places."""
    parts = (own_parts(module) for _, module in modules_by_path(model))
    tables = (table for parameters, buffers, _ in parts for table in (parameters, buffers))
    tensors = (id(each) for table in tables for each in dict.values(table) if each is not None)
    return {tensor for tensor, count in Counter(tensors).items() if count > 1}


def _runs(
    path: str,
    children: Sequence[tuple[str, nn.Module]],
    several: Collection[int],
    tied: Collection[int],
    common: Common,
) -> Iterator[Run]:
    paths = [f"{path}.{name}" if path else name for name, _ in children]
    # One that a model has in several places is equal to no other: it has several paths.
    kinds = [type(child) if id(child) not in several else object() for _, child in children]
    described: dict[int, Description] = {}

    def differences(place: int, period: int) -> frozenset[tuple[str, str]] | None:
        if kinds[place] is not kinds[place - period]:
            return None
        for each in (place, place - period):
            if each not in described:
                described[each] = describe(children[each][1], tied, common)
        return described[place].differences(described[place - period])

    start = 0
    while start + MOST_TRACED < len(children):
        best = None
        fewest: float = math.inf  # Attributes that differ.
        for period in _PERIODS:
            differing: list[frozenset[tuple[str, str]]] = [frozenset()] * period
            names: frozenset[tuple[str, str]] = frozenset()
            stop = start + period
            while stop < len(children) and len(names) < fewest:
                found = differences(stop, period)
                if found is None:
                    break
                differing[(stop - start) % period] |= found
                names |= found
                stop += 1
            stop -= (stop - start) % period
            if len(names) < fewest and stop - start > MOST_TRACED * period:
                best, fewest = (period, stop, differing), len(names)
        if best is None:
            start += 1
            continue
        period, stop, differing = best
        yield Run(
            paths[start:stop],
            [child for _, child in children[start:stop]],
            period,
            [described[place].original() for place in range(start, stop)],
            differing,
        )
        start = stop
