"""Which blocks of a model compute the same of other weights: compared, not guessed.

Python does the same where everything that it reads is the same. A block is therefore described by
facts: what its modules, their attributes, hooks, functions and closures are. Blocks with equal
facts do the same with their own weights, as long as what they reach outside of themselves does not
change; ``state_of`` says whether it does. An attribute that differs between two blocks, such as a
layer's number, is no obstacle if the traced block does not read it, which only its trace shows.
"""

from __future__ import annotations

import enum
import functools
import os
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dynamo_moe.modules import ConvertedModule, ParameterCache
from dynamo_moe.private import attributes_of, change_count, own_parts
from dynamo_moe.weights.lazy_tensors import LazyTensor

Place = tuple[Hashable, ...]
"""Where a fact is: the path of a module, the name of its attribute, and the way from there."""

Facts = Mapping[Place, Hashable]

TRACED_UNITS = 3
"""Units of equal blocks that are traced: the first may compute what all share, the second and the
third show that the others are like them."""

# Blocks after which kinds of blocks may repeat; Gemma 3 has five with a window, then one without.
_PERIODS = range(1, 9)
# Values that a look at what a block reaches gives up after.
_MOST_VALUES = 50_000
SIMPLE = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.SymInt),
)
"""Types whose values are known by what they show."""
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_CONTAINERS = (*_LISTS, *_SETS, Mapping)
# Objects of Python's own that hold whatever they are given.
_NAMESPACES = (types.SimpleNamespace, threading.local)
_WRAPPERS = (
    *(property, staticmethod, classmethod, functools.cached_property, functools.partialmethod),
    *(types.BuiltinMethodType, types.MethodWrapperType, type(functools.cache(len))),
)
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

    def differences(self, other: Description) -> frozenset[tuple[str, str]] | None:
        """Returns the attributes that differ, as module path and name; None if more than that."""
        if self.facts == other.facts:
            return frozenset()
        places = {place for place, _ in self.facts.items() ^ other.facts.items()}
        found = frozenset((str(place[0]), str(place[1])) for place in places if len(place) > 1)
        fixed = _OF_EVERY_MODULE | {"forward", _TENSORS, _CHILDREN}
        if any(len(place) < 2 for place in places) or any(name in fixed for _, name in found):
            return None
        return found


@dataclass(frozen=True)
class Run:
    """Blocks of one container that follow each other, each like the one a period before.

    Attributes:
        paths: The blocks' paths.
        blocks: The blocks.
        period: Kinds of blocks; a unit has one of each.
        tensors: Each block's parameters and buffers, by their path in the block.
        differing: By kind, the attributes that differ between its blocks.
        outside: By kind, what its blocks refer to outside of themselves.
    """

    paths: Sequence[str]
    blocks: Sequence[nn.Module]
    period: int
    tensors: Sequence[Mapping[str, Tensor]]
    differing: Sequence[frozenset[tuple[str, str]]]
    outside: Sequence[Sequence[Any]]

    @property
    def traced(self) -> int:
        """Number of blocks that are traced."""
        return TRACED_UNITS * self.period

    def unit_tensors(self, start: int) -> dict[str, Tensor]:
        """Returns the tensors of the unit whose first block is the given one, by name."""
        places = range(start, start + self.period)
        return {
            f"{self.paths[place]}.{name}": tensor
            for place in places
            for name, tensor in self.tensors[place].items()
        }


def runs_of(model: nn.Module) -> list[Run]:
    """Returns a model's runs of equal blocks that are longer than what is traced of them."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for tensor in _tensors_at({"": own_parts(module)}).values():
            counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    tied = {tensor for tensor, count in counts.items() if count > 1}
    found: list[Run] = []
    inside: list[str] = []
    for path, container in model.named_modules():
        if any(f"{path}.".startswith(each) for each in inside):
            continue
        if isinstance(container, ConvertedModule):
            # It computes with its experts' weights; nothing calls them in turn.
            inside.append(f"{path}." if path else "")
            continue
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for run in _runs(path, list(container.named_children()), tied):
            found.append(run)
            inside += [f"{each}." for each in run.paths]
    return found


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
    while start + TRACED_UNITS < len(children):
        candidates = []
        for period in _PERIODS:
            differing: list[frozenset[tuple[str, str]]] = [frozenset()] * period
            stop = start + period
            while stop < len(children):
                found = differences(stop, period)
                if found is None:
                    break
                differing[(stop - start) % period] |= found
                stop += 1
            stop -= (stop - start) % period
            if stop - start > TRACED_UNITS * period:
                candidates.append((len(frozenset().union(*differing)), period, stop, differing))
        if not candidates:
            start += 1
            continue
        _, period, stop, differing = min(candidates, key=lambda each: each[:2])
        yield Run(
            paths[start:stop],
            [child for _, child in children[start:stop]],
            period,
            [described[place].tensors for place in range(start, stop)],
            differing,
            [described[start + kind].outside for kind in range(period)],
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
        for name, value in attributes_of(module).items():
            if value is not parameters and value is not buffers and value is not children:
                reader.read(value, (path, name))
    return Description(reader.facts, tensors, reader.outside)


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

    def read(self, value: Any, place: Place) -> None:
        """Notes what a value is, and all that it holds."""
        kind = type(value)
        if kind in SIMPLE:
            self.facts[place] = (kind, repr(value))
        elif id(value) in self.known:
            self.facts[place] = self.known[id(value)]
        elif isinstance(value, ParameterCache):
            self.facts[place] = kind
        elif isinstance(value, (Tensor, nn.Module, enum.Enum)) or not (parts := _parts(value)):
            self.facts[place] = (kind, _Same(value))
            self.outside.append(value)
        elif id(value) in self._seen and not isinstance(value, (tuple, frozenset)):
            self.facts[place] = ("same", self._seen[id(value)])
        else:
            self._seen[id(value)] = place
            # Hooks are kept under numbers, which no two have in common.
            hooks = len(place) == 2 and place[1] in _OF_EVERY_MODULE
            self.facts[place] = (kind, len(value) if hooks else parts.fact)
            for name, part in parts.items:
                self.read(part, (*place, name))


@dataclass(frozen=True)
class _Same:
    """Equal for one object alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class _Parts:
    """What a value is made of: a fact of its own, and values by name."""

    fact: Any
    items: Iterable[tuple[Hashable, Any]] = field(default=())


def _parts(value: Any) -> _Parts | None:
    """Returns what a value is made of; None for what is known by its identity alone."""
    kind = type(value)
    if kind in _LISTS or _is_named_tuple(kind):
        return _Parts(len(value), enumerate(value))
    if kind in (dict, OrderedDict):
        if not all(type(key) in SIMPLE or isinstance(key, (type, enum.Enum)) for key in value):
            return None
        return _Parts(tuple((type(key), key) for key in value), enumerate(value.values()))
    if kind in _SETS:
        simple = all(type(item) in SIMPLE for item in value)
        return _Parts(tuple(sorted(map(repr, value)))) if simple else None
    if kind is types.FunctionType:
        cells = [_content(cell) for cell in value.__closure__ or ()]
        held = (value.__defaults__, value.__kwdefaults__, vars(value) or None, *cells)
        return _Parts((value.__code__, _Same(value.__globals__)), enumerate(held))
    if kind is types.MethodType:
        return _Parts("method", enumerate((value.__func__, value.__self__)))
    if kind is functools.partial:
        return _Parts("partial", enumerate((value.func, value.args, value.keywords)))
    if _is_plain(kind):
        return _Parts(kind, sorted(vars(value).items()))
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Empty so far.
        return _content


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


# --- What can change ---


def state_of(roots: Mapping[Hashable, Any], others: Collection[int]) -> dict[Place, Hashable]:
    """Returns the state of all that Python reaches from some values.

    Args:
        roots: The values, by a name.
        others: The ids of modules and tensors that must not be reached, since code could find
            another block there each time.

    Raises:
        NotSharedError: If one of them is reached, or something whose state cannot be read.
    """
    state: dict[Place, Hashable] = {}
    seen: set[int] = set()
    remaining: list[tuple[Place, Any]] = [((place,), root) for place, root in roots.items()]
    while remaining:
        place, value = remaining.pop()
        kind = type(value)
        if kind in SIMPLE:
            state[place] = (kind, repr(value))
            continue
        state[place] = (kind, id(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in others:
            raise NotSharedError(f"a block reaches another one by way of {_words(place)}")
        if len(seen) > _MOST_VALUES:
            raise NotSharedError("a block reaches too much to look at")
        fact, parts = _held_by(value)
        state[(*place, "state")] = fact
        remaining.extend(((*place, name), part) for name, part in parts)
    return state


def _words(place: Place) -> str:
    return " ".join(map(str, place))


def _hidden(value: Any) -> Hashable:
    """Returns the state of an object that is in no attribute; None for other objects."""
    if isinstance(value, Tensor):
        return change_count(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, (bytearray, memoryview, numpy.ndarray)):
        return bytes(value)
    return None


def _held_by(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns a fact on a value's state, and the values that it holds."""
    hidden = _hidden(value)
    if hidden is not None:
        return hidden, []
    if isinstance(value, ContextVar):
        return None, [("value", value.get(None))]
    if isinstance(value, weakref.ref):
        return None, [("referent", value())]
    if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(_HERE):
        return None, []  # What watches the trace.
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        parts = _parts(value)
        return None, list(parts.items) if parts is not None else []
    if isinstance(value, _WRAPPERS):
        names = ("fget", "fset", "fdel", "func", "__func__", "__self__", "__wrapped__")
        of_own = not is_library_file(_file_of_wrapped(value))
        fact = value.cache_info() if of_own and hasattr(value, "cache_info") else None
        return fact, [(name, getattr(value, name, None)) for name in names]
    kind = value if isinstance(value, type) else type(value)
    held = [] if isinstance(value, type) else _contents(value)
    size = len(held)
    if kind in (*_LISTS, *_SETS, dict):
        return size, held
    if is_library(sys.modules.get(kind.__module__)) and not isinstance(value, nn.Module):
        known = isinstance(value, (type, *_CONTAINERS, *_NAMESPACES)) or _is_constant(kind)
        if not known:
            raise NotSharedError(f"a block reaches a {kind.__name__}, whose state is hidden")
        if isinstance(value, (*_CONTAINERS, *_NAMESPACES)):
            held += attributes_of(value).items()
        return size, held
    held += attributes_of(value).items()
    if isinstance(value, type):
        return size, [*held, *(("base", base) for base in value.__mro__[1:])]
    return size, [*held, *_slots(value), ("class", kind)]


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Returns what an object keeps in slots.

    Raises:
        NotSharedError: If a class that it inherits from keeps more than that.
    """
    for base in type(value).__mro__:
        known = issubclass(base, nn.Module) or base in (*_CONTAINERS, *_NAMESPACES)
        known = known or not is_library(sys.modules.get(base.__module__)) or _is_constant(base)
        if not known and base.__module__ not in ("collections", "collections.abc", "threading"):
            raise NotSharedError(f"a block reaches a {base.__name__}, whose state is hidden")
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield name, getattr(value, name, None)


def _contents(value: Any) -> list[tuple[Any, Any]]:
    """Returns what a container holds."""
    if isinstance(value, Mapping):
        return list(enumerate(part for pair in value.items() for part in pair))
    return list(enumerate(value)) if isinstance(value, (*_LISTS, *_SETS)) else []


def _file_of_wrapped(value: Any) -> str | None:
    """Returns the file of a function in a wrapper; that of this package for an installed one."""
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    file = getattr(code, "co_filename", None)
    return __file__ if is_installed_file(file) else file


def _is_constant(kind: type) -> bool:
    """Whether objects of a library's class have no state that a model would change."""
    root = kind.__module__.partition(".")[0]
    return root in _OF_CONSTANTS and not hasattr(kind, "__next__")


# Functions, descriptors, patterns, locks, operators, loggers.
_OF_CONSTANTS = frozenset(
    {
        *("builtins", "types", "functools", "re", "typing", "_thread", "operator", "logging"),
        *("_abc", "abc", "dataclasses", "enum", "inspect", "pathlib"),
        *("torch", "custom_ops", "dynamo_moe"),
    }
)
_HERE = str(Path(__file__).parent)
# Whose code a trace runs beside the model's: no state that a model reads is there.
_LIBRARIES = tuple(
    f"{Path(spec.origin).parent.resolve()}{os.sep}"
    for spec in map(find_spec, ("torch", "sympy", "mpmath", "numpy", "custom_ops", "dynamo_moe"))
    if spec is not None and spec.origin is not None
)
_STANDARD = f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.cache
def is_library_file(file: str | None) -> bool:
    """Whether a file is of PyTorch and what it needs, of Python, or of this package."""
    if file is None:
        return False
    if file.startswith("<"):
        return file.startswith("<frozen ")
    path = str(Path(file).resolve())
    standard = path.startswith(_STANDARD) and not any(each in path for each in _INSTALLED)
    return standard or path.startswith(_LIBRARIES)


@functools.cache
def is_installed_file(file: str | None) -> bool:
    """Whether a file is of an installed package, which changes between versions alone."""
    return file is not None and any(each in file for each in _INSTALLED)


def file_of(code: types.CodeType, names: Mapping[str, Any]) -> str | None:
    """Returns the file of a function's code; of generated code, that of the function's module."""
    file = code.co_filename
    if not file.startswith("<") or file.startswith("<frozen "):
        return file
    module = sys.modules.get(str(names.get("__name__")))
    of_module = module is not None and vars(module) is names
    return getattr(module, "__file__", None) if of_module else None


def is_library(module: Any) -> bool:
    """Whether a Python module is of PyTorch and what it needs, of Python, or of this package."""
    file = getattr(module, "__file__", None)
    if module is None or file is not None:
        return is_library_file(file)
    name = module.__name__
    root = name.partition(".")[0]
    return name in sys.builtin_module_names or (name != root and is_library(sys.modules.get(root)))
