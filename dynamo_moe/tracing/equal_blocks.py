"""Which blocks of a model compute the same of other weights: compared, not guessed.

Python does the same where everything that it reads is the same. A block is therefore described by
facts: what its modules, their attributes, hooks, functions and closures are. Blocks with equal
facts do the same with their own weights, as long as what they reach outside of themselves does not
change, which :mod:`dynamo_moe.tracing.reachable_state` tells. An attribute that differs between two
blocks, such as a layer's number, is no obstacle if the traced block does not read it, which only
its trace shows.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import operator
import types
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dynamo_moe.modules import ConvertedModule, ParameterCache
from dynamo_moe.private import TENSOR_TABLES, attributes_of, own_parts
from dynamo_moe.tracing.contents import DICTS, Contents, content_of, is_plain
from dynamo_moe.tracing.values import SIMPLE
from dynamo_moe.weights.lazy_tensors import LazyTensor

Place = tuple[Hashable, ...]
"""Where a fact is: the path of a module, the name of its attribute, and the way from there."""

Facts = Mapping[Place, Hashable]

FEWEST_TRACED, MOST_TRACED = 2, 3
"""Units of equal blocks that are traced: the first may compute what all share; the last leaves all
as it finds it, which shows that the others do what it does. Where the second does not, the third
may."""

# Blocks after which kinds of blocks may repeat; Gemma 3 has five with a window, then one without.
_PERIODS = range(1, 9)
# Types that hold others in a row, and without order.
LISTS = (list, tuple, deque)
SETS = (set, frozenset)
# A module's own dictionaries, such as those of its hooks, and flags.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


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
class Description:
    """What a block is, but for the values of its weights.

    Attributes:
        facts: What Python can read of it.
        tensors: What holds its parameters and buffers, by path.
        outside: Objects that it refers to and that are not its own.
    """

    facts: dict[Place, Hashable]
    tensors: dict[str, Tensor]
    outside: list[Any]
    # What the facts were read from; None if that is not known.
    _contents: Contents | None

    def is_unchanged(self) -> bool:
        """Whether a block without its tensors is still what was described; False in doubt."""
        return self._contents is not None and self._contents.is_unchanged()

    def differences(self, other: Description) -> frozenset[tuple[str, str]] | None:
        """Returns the attributes that differ, as module path and name; None if more than that."""
        if self.facts == other.facts:
            return frozenset()
        places = differing_places(self.facts, other.facts)
        found = frozenset((str(place[0]), str(place[1])) for place in places if len(place) > 1)
        fixed = _OF_EVERY_MODULE | {"forward", _TENSORS, _CHILDREN}
        if any(len(place) < 2 for place in places) or any(name in fixed for _, name in found):
            return None
        return found


def differing_places(facts: Facts, others: Facts) -> set[Place]:
    """Returns where facts are not those of others, or are not there at all."""
    if list(facts) == list(others):  # As those of most blocks are: C compares them.
        return {*itertools.compress(facts, map(operator.ne, facts.values(), others.values()))}
    absent = object()
    found = {place for place, fact in facts.items() if others.get(place, absent) != fact}
    return found | (others.keys() - facts.keys())


@dataclass(frozen=True)
class Run:
    """Blocks of one container that follow each other, each like the one a period before.

    Attributes:
        paths: The blocks' paths.
        blocks: The blocks.
        period: Kinds of blocks; a unit has one of each.
        described: What each block is before the trace.
        differing: By kind, the attributes that differ between its blocks.
        traced_units: Units that are traced.
    """

    paths: Sequence[str]
    blocks: Sequence[nn.Module]
    period: int
    described: Sequence[Description]
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
    """Returns a model's runs of equal blocks that are longer than what may be traced of them."""
    tied = tied_tensors(model)
    found: list[Run] = []
    inside: set[str] = set()
    for path, container in model.named_modules():
        if not inside.isdisjoint(itertools.accumulate(path.split("."), "{}.{}".format)):
            continue
        if isinstance(container, ConvertedModule):
            # It computes with its experts' weights; nothing calls them in turn.
            if not path:
                break
            inside.add(path)
            continue
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for run in _runs(path, list(container.named_children()), tied):
            found.append(run)
            inside.update(run.paths)
    return found


def tied_tensors(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters and buffers that a model has in several places."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for tensor in _tensors_at({"": own_parts(module)}).values():
            counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    return {tensor for tensor, count in counts.items() if count > 1}


def _runs(
    path: str, children: Sequence[tuple[str, nn.Module]], tied: Collection[int]
) -> Iterator[Run]:
    paths = [f"{path}.{name}" if path else name for name, _ in children]
    kinds = [type(child) for _, child in children]
    described: dict[int, Description] = {}

    def differences(place: int, period: int) -> frozenset[tuple[str, str]] | None:
        if kinds[place] is not kinds[place - period]:
            return None
        for each in (place, place - period):
            if each not in described:
                described[each] = describe(children[each][1], tied)
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
            [described[place] for place in range(start, stop)],
            differing,
        )
        start = stop


# --- Facts ---

_TENSORS, _CHILDREN = "tensors", "children"


def describe(block: nn.Module, tied: Collection[int] | None = None) -> Description:
    """Describes a block; without its tensors where it is not told which tensors are tied."""
    modules = dict(block.named_modules())
    own = {path: own_parts(module) for path, module in modules.items()}
    tensors = _tensors_at(own)
    reader = _Reader(modules, tensors)
    for path, module in modules.items():
        ordinary = tied is None or _is_ordinary(type(module))
        reader.facts[path,] = type(module) if ordinary else object()  # Equal to nothing.
        parameters, buffers, children = own[path]
        for name, child in children.items():
            reader.facts[path, _CHILDREN, name] = reader.known.get(id(child))
        for kind, held in (("parameter", parameters), ("buffer", buffers)):
            reader.facts[path, _TENSORS, kind] = tuple(dict.keys(held))
            for name, tensor in held.items() if tied is not None else ():
                place = (path, _TENSORS, kind, name)
                if tensor is None:
                    reader.facts[place] = None
                    continue
                # What is tied belongs to no block: equal to nothing.
                single = tied is not None and id(tensor) not in tied
                reader.facts[place] = _tensor_fact(tensor) if single else object()
                if not isinstance(tensor, LazyTensor):  # A placeholder stands for it, without any.
                    reader.read(attributes_of(tensor) or None, (*place, "attributes"))
        reader.read_attributes(module, path, own[path])
    contents = None if tied is None else reader.contents()
    return Description(reader.facts, tensors, reader.outside, contents)


def _is_ordinary(kind: type[nn.Module]) -> bool:
    """Whether a module's attributes are in its ``__dict__`` alone, and read as they are."""
    own = any("__getattribute__" in vars(base) for base in kind.__mro__[:-1])
    return not own and kind.__basicsize__ == nn.Module.__basicsize__


def _tensors_at(own: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Tensor]:
    """Returns the tensors of modules by path, of the parts that each module has."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, (parameters, buffers, _) in own.items()
        # Those of a block that is passed over refuse to be listed by their own methods.
        for held in (parameters, buffers)
        for name, tensor in dict.items(held)
        if tensor is not None
    }


def _tensor_fact(tensor: Tensor) -> Hashable:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        isinstance(tensor, LazyTensor) and tensor.origin is not None,
    )


class _Reader:
    """Reads values into facts that are equal where Python finds the same."""

    def __init__(self, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        self.facts: dict[Place, Any] = {}
        self.outside: list[Any] = []
        self.known: dict[int, str] = {id(m): f"module {p}" for p, m in modules.items()}
        for path, tensor in tensors.items():
            self.known.setdefault(id(tensor), f"tensor {path}")
        self._seen: dict[int, Place] = {}
        # What the facts come from, as Contents takes it.
        self._plain: list[Any] = []
        self._owners: list[tuple[Any, Collection[str]]] = []
        self._sees_all = True

    def contents(self) -> Contents | None:
        """Returns what the facts come from; None if that is not all known."""
        return Contents(self._plain, owners=self._owners) if self._sees_all else None

    def read_attributes(self, module: nn.Module, path: str, own: Sequence[dict[str, Any]]) -> None:
        """Notes what a module's attributes are, but for ``own``: its tensors and submodules."""
        held = attributes_of(module)
        *tables, children = own
        # Others stand for those with tensors in a trace.
        without = [table for table in tables if all(x is None for x in dict.values(table))]
        self._plain += [*without, children]
        names = [
            name
            for name, value in held.items()
            if name not in TENSOR_TABLES or any(value is table for table in without)
        ]
        self._owners.append((module, names))
        for name in names:
            if held[name] is not children and name not in TENSOR_TABLES:
                self.read(held[name], (path, name))

    def read(self, value: Any, place: Place) -> None:
        """Notes what a value is, and all that it holds."""
        kind = type(value)
        if kind in SIMPLE:
            self.facts[place] = (kind, repr(value))
        elif kind in DICTS and not value:  # As most hooks are.
            self.facts[place] = (kind, self._seen.setdefault(id(value), place))
            self._plain.append(value)
        elif id(value) in self.known:
            self.facts[place] = self.known[id(value)]
            # Something else may stand for a tensor in a trace.
            self._sees_all &= isinstance(value, nn.Module)
        elif isinstance(value, ParameterCache):
            self.facts[place] = kind
        elif isinstance(value, (Tensor, nn.Module, enum.Enum)) or not (parts := parts_of(value)):
            self.facts[place] = (kind, _Same(value))
            self.outside.append(value)
        elif id(value) in self._seen and not isinstance(value, (tuple, frozenset)):
            self.facts[place] = ("same", self._seen[id(value)])
        else:
            self._seen[id(value)] = place
            # Hooks are kept under numbers, which no two have in common.
            hooks = len(place) == 2 and place[1] in _OF_EVERY_MODULE
            self.facts[place] = (kind, len(value) if hooks else parts.fact)
            self._note_contents(value)
            for name, part in parts.items:
                self.read(part, (*place, name))

    def _note_contents(self, value: Any) -> None:
        kind = type(value)
        if kind in DICTS or is_plain(value):
            self._plain.append(value)
        elif _is_plain(kind):
            self._owners.append((value, [*vars(value)]))
            self.outside.append(kind)
        elif kind is functools.partial:  # Which can be given another state.
            self._sees_all = False


@dataclass(frozen=True)
class _Same:
    """Equal for one object alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Parts(NamedTuple):
    """What a value is made of: a fact of its own, and values by name."""

    fact: Any
    items: Iterable[tuple[Hashable, Any]] = ()


def parts_of(value: Any) -> Parts | None:
    """Returns what a value is made of; None for what is known by its identity alone."""
    kind = type(value)
    if kind in LISTS or _is_named_tuple(kind):
        return Parts(len(value), enumerate(value))
    if kind in DICTS:
        if not all(type(key) in SIMPLE or isinstance(key, (type, enum.Enum)) for key in value):
            return None
        return Parts(tuple((type(key), key) for key in value), enumerate(value.values()))
    if kind in SETS:
        simple = all(type(item) in SIMPLE for item in value)
        return Parts(tuple(sorted(map(repr, value)))) if simple else None
    if kind is types.FunctionType:
        return Parts((value.__code__, _Same(value.__globals__)), enumerate(held_by_function(value)))
    if kind is types.MethodType:
        return Parts("method", enumerate((value.__func__, value.__self__)))
    if kind is functools.partial:
        return Parts("partial", enumerate((value.func, value.args, value.keywords)))
    if _is_plain(kind):
        return Parts(kind, sorted(vars(value).items()))
    return None


def held_by_function(value: types.FunctionType) -> tuple[Any, ...]:
    """Returns what a function holds beside its code and its module's names."""
    cells = map(content_of, value.__closure__ or ())
    return value.__defaults__, value.__kwdefaults__, vars(value) or None, *cells


def _is_named_tuple(kind: type) -> bool:
    """Whether objects of a class are what their items say, and nothing else."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


class _Plain:
    pass


def _is_plain(kind: type) -> bool:
    """Whether objects of a class are what their ``__dict__`` says, and nothing else."""
    return (
        not issubclass(kind, type)
        and kind.__basicsize__ == _Plain.__basicsize__
        and kind.__itemsize__ == 0
        and hasattr(kind, "__dict__")
        and "__dict__" in {name for base in kind.__mro__ for name in vars(base)}
        and not hasattr(kind, "__next__")
    )
