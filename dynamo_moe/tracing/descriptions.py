"""What a block is but for its weights: facts, which are equal where Python finds the same.

Most attributes of most blocks are the same simple values. Those are read all at once, and compared
as they are; facts are written of the rest alone.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynamo_moe.modules import ParameterCache
from dynamo_moe.private import (
    CHILDREN_TABLE,
    TENSOR_TABLES,
    attributes_of,
    modules_by_path,
    own_parts,
)
from dynamo_moe.tracing.contents import CONTAINERS, DICTS, Contents, is_plain
from dynamo_moe.tracing.parts import Same, is_plain_object, parts_of
from dynamo_moe.tracing.values import SIMPLE
from dynamo_moe.weights.lazy_tensors import LazyTensor

Place = tuple[Hashable, ...]
"""Where a fact is: the path of a module, the name of its attribute, and the way from there."""

_T = TypeVar("_T")

Facts = Mapping[Place, Any]

# A module's own dictionaries, such as those of its hooks, and flags.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = frozenset(name for name in _OF_EVERY_MODULE if "_hooks" in name)


@dataclass(frozen=True)
class Original:
    """What a block was when it was described.

    Attributes:
        tensors: What holds its parameters and buffers, by path.
        contents: What else it holds; None if that is not known.
    """

    tensors: dict[str, Tensor]
    contents: Contents | None

    def is_unchanged(self) -> bool:
        """Whether a block without its tensors is still what was described; False in doubt."""
        return self.contents is not None and self.contents.is_unchanged()


@dataclass(frozen=True)
class _Outline:
    """Which attributes a block's modules have, and how each is read.

    Attributes:
        names: The path of each module, and the names of its attributes.
        kinds: Of each attribute in turn, None for a fixed value, the type of a container that holds
            nothing, and ... for any other.
    """

    names: tuple[tuple[str, tuple[str, ...]], ...]
    kinds: tuple[Any, ...]

    @functools.cached_property
    def fixed(self) -> _Choice:
        """The attributes that are fixed values."""
        return _Choice(self.names, [kind is None for kind in self.kinds])

    @functools.cached_property
    def empty(self) -> _Choice:
        """The attributes that hold nothing."""
        return _Choice(self.names, [isinstance(kind, type) for kind in self.kinds])

    @functools.cached_property
    def others(self) -> list[list[str]]:
        """The names of any others, by module, but for the tables of tensors."""
        kinds = iter(self.kinds)
        return [
            [name for name in names if next(kinds) is ... and name not in TENSOR_TABLES]
            for _, names in self.names
        ]


class _Choice:
    """Some of a block's attributes: where they are, and what takes their values of all."""

    def __init__(self, names: Iterable[tuple[str, Sequence[str]]], chosen: Sequence[bool]) -> None:
        every = ((path, name) for path, each in names for name in each)
        self.places: list[Place] = [*itertools.compress(every, chosen)]
        indices = [*itertools.compress(itertools.count(), chosen)]
        # Of fewer than two it would not make a sequence.
        few = slice(*((indices[0], indices[0] + 1) if indices else (0, 0)))
        self.values: Callable[[Sequence[Any]], Sequence[Any]]
        self.values = operator.itemgetter(*indices if len(indices) > 1 else [few])


@dataclass(frozen=True)
class Description(Original):
    """What a block is, but for the values of its weights.

    Attributes:
        outside: Objects that it refers to and that are not its own.
    """

    outside: list[Any]
    # Most of what its modules' attributes are, read at once: facts take long to make and compare.
    _outline: _Outline
    _fixed: Sequence[Any]
    # All other facts.
    _others: Facts

    def original(self) -> Original:
        """Returns what is left to be asked when it has been compared."""
        return Original(self.tensors, self.contents)

    @property
    def facts(self) -> Facts:
        """What Python can read of it."""
        empty = self._outline.empty.places
        kinds = [kind for kind in self._outline.kinds if isinstance(kind, type)]
        fixed = map(_fact_of_simple, self._fixed)
        return {
            **self._others,
            **{place: (kind, None, place) for place, kind in zip(empty, kinds, strict=True)},
            **dict(zip(self._outline.fixed.places, fixed, strict=True)),
        }

    def differences(self, other: Description) -> frozenset[tuple[str, str]] | None:
        """Returns the attributes that differ, as module path and name; None if more than that."""
        if self._outline == other._outline:
            places = set(differing_places(self._others, other._others))
            if not all(map(operator.is_, self._fixed, other._fixed)):
                pairs = zip(self._outline.fixed.places, self._fixed, other._fixed, strict=True)
                places |= {
                    place
                    for place, own, its in pairs
                    if own is not its and _fact_of_simple(own) != _fact_of_simple(its)
                }
        else:
            places = differing_places(self.facts, other.facts)
        found = frozenset((str(place[0]), str(place[1])) for place in places if len(place) > 1)
        fixed = _OF_EVERY_MODULE | {"forward", _TENSORS}
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


# --- Facts ---

_TENSORS = "tensors"
_TABLES = (*TENSOR_TABLES, CHILDREN_TABLE)
# Containers that say no more than their type where they hold nothing.
_ALIKE_IF_EMPTY = CONTAINERS - {deque}
_IS_TENSOR = functools.partial(operator.is_not, None)
# Types whose values never change.
_FIXED = SIMPLE - {slice, torch.Size, torch.SymInt}


def describe(
    block: nn.Module, tied: Collection[int] | None = None, common: Common | None = None
) -> Description:
    """Describes a block.

    Args:
        block: The block.
        tied: Tensors that are equal to none; without them the block's tensors are left out.
        common: What descriptions have in common, if nothing changes while they are made.
    """
    common = common or Common()
    modules = dict(modules_by_path(block))
    own = {path: own_parts(module) for path, module in modules.items()}
    held = [attributes_of(module) for module in modules.values()]
    values = (*itertools.chain.from_iterable(each.values() for each in held),)
    tensors = _tensors_at(own)
    outline = common.outline(modules, held, values)
    reader = _Reader(modules, own, tensors, tied, common)
    reader.read_modules(held, outline, values)
    if not reader.has_each_once(outline.empty.values(values)):
        # Something is in several places, which only facts tell.
        outline = _Outline(outline.names, (...,) * len(outline.kinds))
        reader = _Reader(modules, own, tensors, tied, common)
        reader.read_modules(held, outline, values)
    contents = None if tied is None else reader.contents()
    fixed = outline.fixed.values(values)
    return Description(tensors, contents, reader.outside, outline, fixed, reader.facts)


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
        tensor.device,
        tensor.requires_grad,
        isinstance(tensor, LazyTensor) and tensor.origin is not None,
    )


def _fact_of_simple(value: Any) -> Hashable:
    if type(value) is slice:  # Which may be of any objects.
        parts = value.start, value.stop, value.step
        return slice, tuple(
            _fact_of_simple(part) if type(part) in SIMPLE else Same(part) for part in parts
        )
    return type(value), repr(value)


@dataclass(frozen=True)
class _Reading:
    """What a value is by itself, which it is in every block that knows nothing in it otherwise.

    Attributes:
        value: The value.
        fact: What it is.
        ways: From it to each object in it that may be there twice.
        outside: Objects that it refers to.
        contents: What the fact comes from; None if that is not all known.
    """

    value: Any
    fact: Any
    ways: Mapping[int, Place]
    outside: Sequence[Any]
    contents: Contents | None

    @classmethod
    def of(cls, value: Any) -> _Reading:
        """Reads a value."""
        reader = _Reader({}, {}, {}, None, Common())
        fact = reader.read(value, ())
        return cls(value, fact, reader.seen, reader.outside, reader.contents())

    def is_unchanged(self) -> bool:
        """Whether the value is still what was read; False in doubt."""
        return self.contents is not None and self.contents.is_unchanged()

    @functools.cached_property
    def objects(self) -> Set[int]:
        """The ids of what a block may know otherwise."""
        return {*self.ways, *map(id, self.outside)}


class Common:
    """What descriptions have in common that are made while nothing changes."""

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}
        self._earlier: dict[int, _Reading] = {}
        self._equal: dict[Any, Any] = {}
        self._names: dict[Any, tuple[str, ...]] = {}
        self._outlines: dict[Any, _Outline] = {}
        self._ordinary: dict[type[nn.Module], bool] = {}

    def after_changes(self) -> Common:
        """Returns what descriptions have in common still when something has changed since."""
        found = Common()
        found._equal, found._names = self._equal, self._names
        found._outlines = self._outlines
        found._earlier = {**self._earlier, **self._readings}
        return found

    def equal(self, value: _T) -> _T:
        """Returns the first of equal values."""
        first: _T = self._equal.setdefault(value, value)
        return first

    def names(self, names: tuple[str, ...], without: tuple[str, ...]) -> tuple[str, ...]:
        """Returns names but for some."""
        if not without:
            return names
        key = names, without
        if key not in self._names:
            self._names[key] = tuple(name for name in names if name not in without)
        return self._names[key]

    def outline(
        self, paths: Iterable[str], held: Sequence[Mapping[str, Any]], values: Sequence[Any]
    ) -> _Outline:
        """Returns which attributes modules have, by what they hold and the values of all of it."""
        names = (*itertools.chain.from_iterable(held),)
        key = (*paths,), (*map(len, held),), names, (*map(type, values),)
        if key not in self._outlines:
            kinds = (
                None
                if kind in _FIXED
                else kind
                if kind in _ALIKE_IF_EMPTY and name not in _TABLES
                else ...
                for name, kind in zip(names, key[-1], strict=True)
            )
            own = zip(key[0], map(tuple, held), strict=True)
            self._outlines[key] = self.equal(_Outline((*own,), (*kinds,)))
        found = self._outlines[key]
        if not any(found.empty.values(values)):
            return found
        kinds = (
            ... if isinstance(kind, type) and value else kind
            for kind, value in zip(found.kinds, values, strict=True)
        )
        return self.equal(_Outline(found.names, (*kinds,)))

    def reading(self, value: Any) -> _Reading:
        """Returns what a value is by itself."""
        known = self._readings.get(id(value))
        if known is None:
            known = self._earlier.get(id(value))
            if known is None or not known.is_unchanged():
                known = _Reading.of(value)
            self._readings[id(value)] = known
        return known

    def is_ordinary(self, kind: type[nn.Module]) -> bool:
        """Whether a module's attributes are in its ``__dict__`` alone, and read as they are."""
        if kind not in self._ordinary:
            own = any("__getattribute__" in vars(base) for base in kind.__mro__[:-1])
            self._ordinary[kind] = not own and kind.__basicsize__ == nn.Module.__basicsize__
        return self._ordinary[kind]


class _Reader:
    """Reads values into facts that are equal where Python finds the same.

    Attributes:
        facts: What they are.
        outside: Objects that they refer to.
        seen: Where each object was found first, by its id.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        own: Mapping[str, Sequence[dict[str, Any]]],
        tensors: Mapping[str, Tensor],
        tied: Collection[int] | None,
        common: Common,
    ) -> None:
        self.facts: dict[Place, Any] = {}
        self.outside: list[Any] = []
        self.seen: dict[int, Place] = {}
        self._modules, self._own, self._tied, self._common = modules, own, tied, common
        self._known: dict[int, str] = {id(m): f"module {p}" for p, m in modules.items()}
        for path, tensor in tensors.items():
            self._known.setdefault(id(tensor), f"tensor {path}")
        # What the facts come from, as Contents takes it.
        self._plain: list[Any] = []
        self._empty: list[Any] = []
        self._owners: list[tuple[Any, Collection[str]]] = []
        self._others: list[Contents] = []
        self._sees_all = True

    def contents(self) -> Contents | None:
        """Returns what the facts come from; None if that is not all known."""
        if not self._sees_all:
            return None
        return Contents(self._plain, empty=self._empty, owners=self._owners, others=self._others)

    def has_each_once(self, empty: Sequence[Any]) -> bool:
        """Whether containers that were not read as attributes are in one place each."""
        ids = {*map(id, empty)}
        return len(ids) == len(empty) and self.seen.keys().isdisjoint(ids)

    def read_modules(
        self, held: Sequence[dict[str, Any]], outline: _Outline, values: Sequence[Any]
    ) -> None:
        """Notes what modules are that hold some attributes, but for those the outline tells."""
        self._empty += outline.empty.values(values)
        parts = zip(self._modules.items(), held, outline.names, outline.others, strict=True)
        for (path, module), attributes, (_, names), others in parts:
            self._read_structure(module, path)
            *tables, children = self._own[path]
            # Others stand for those with tensors in a trace.
            replaced: tuple[str, ...] = ()
            for name, table in zip(TENSOR_TABLES, tables, strict=True):
                if any(map(_IS_TENSOR, dict.values(table))):
                    replaced += (name,)
                else:
                    self._plain.append(table)
            self._plain.append(children)
            self._owners.append((module, self._common.names(names, replaced)))
            for name in others:
                if (value := attributes[name]) is not children:
                    self.facts[path, name] = self._read_attribute(value, (path, name))

    def _read_structure(self, module: nn.Module, path: str) -> None:
        """Notes a module's class, its submodules and its tensors."""
        kind = type(module)
        ordinary = self._tied is None or self._common.is_ordinary(kind)
        *tables, children = self._own[path]
        self.facts[path,] = (
            kind if ordinary else object(),  # Equal to nothing.
            [(name, self._known.get(id(child))) for name, child in children.items()],
            [[*dict.keys(table)] for table in tables],
        )
        if self._tied is None:
            return
        for table in tables:
            for name, tensor in table.items():
                place = (path, _TENSORS, name)
                if tensor is None:
                    self.facts[place] = None
                    continue
                # What is tied belongs to no block: equal to nothing.
                single = id(tensor) not in self._tied
                self.facts[place] = _tensor_fact(tensor) if single else object()
                # A placeholder stands for a lazy tensor, without any attributes.
                if not isinstance(tensor, LazyTensor) and (held := attributes_of(tensor)):
                    self.facts[*place, "attributes"] = self.read(held, (*place, "attributes"))

    def _read_attribute(self, value: Any, place: Place) -> Any:
        """Returns what an attribute is: by itself, if the block knows nothing in it otherwise."""
        kind = type(value)
        alone = kind in SIMPLE or (kind in CONTAINERS and not value) or id(value) in self._known
        if alone or id(value) in self.seen or place[-1] in _OF_EVERY_MODULE:
            return self.read(value, place)
        reading = self._common.reading(value)
        known = (self.seen.keys(), self._known.keys())
        if not all(each.isdisjoint(reading.objects) for each in known):
            return self.read(value, place)
        for each, way in reading.ways.items():
            self.seen[each] = (*place, *way)
        self.outside += reading.outside
        if reading.contents is None:
            self._sees_all = False
        else:
            self._others.append(reading.contents)
        return reading.fact

    def read(self, value: Any, place: Place) -> Any:
        """Returns what a value is, and all that it holds."""
        kind = type(value)
        if kind in SIMPLE:
            return _fact_of_simple(value)
        if kind in CONTAINERS and not value:
            self._plain.append(value)
            kept = getattr(value, "maxlen", None)
            return kind, kept, self.seen.setdefault(id(value), place)
        if id(value) in self._known:
            # Something else may stand for a tensor in a trace.
            self._sees_all &= isinstance(value, nn.Module)
            return self._known[id(value)]
        if id(value) in self.seen:
            return "same", self.seen[id(value)]
        if isinstance(value, ParameterCache):
            return kind
        if isinstance(value, (Tensor, nn.Module, enum.Enum)) or not (parts := parts_of(value)):
            self.outside.append(value)
            return kind, Same(value)
        if not isinstance(value, (tuple, frozenset)):
            self.seen[id(value)] = place
        hooks = len(place) == 2 and place[1] in _HOOKS
        self._note_contents(value)
        fact = self._numbers_of(str(place[0]), value) if hooks else parts.fact
        return kind, fact, {name: self.read(part, (*place, name)) for name, part in parts.items}

    def _numbers_of(self, path: str, hooks: Iterable[Any]) -> tuple[int, ...]:
        """Returns which of a module's hooks some are; no two modules have their keys in common."""
        held = attributes_of(self._modules[path])
        known = {key for name in _HOOKS & held.keys() for key in held[name]}
        ordered = sorted(known)
        return tuple(ordered.index(key) for key in hooks)

    def _note_contents(self, value: Any) -> None:
        kind = type(value)
        if kind in DICTS or is_plain(value):
            self._plain.append(value)
        elif is_plain_object(kind):
            self._owners.append((value, [*vars(value)]))
            self.outside.append(kind)
        elif kind is functools.partial:  # Which can be given another state.
            self._sees_all = False
