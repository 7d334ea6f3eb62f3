"""The global names that the code of equal blocks uses."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynamo_moe.private import OpOverload, active_modes
from dynamo_moe.process_state import collector_paused
from dynamo_moe.tracing.library_code import (
    file_of,
    is_installed_file,
    is_library,
    is_library_file,
)
from dynamo_moe.tracing.plain_code import objection
from dynamo_moe.tracing.values import SIMPLE

_ABSENT = object()


class ReadNames:
    """The global names that the code of a block uses, from when it is watched on.

    Attributes:
        objection: Why the code is not known to be harmless; empty if it is.
    """

    def __init__(self, *, proves: bool = True) -> None:
        """Knows no names yet; a block that ``proves`` nothing may do what is done once."""
        self.objection = ""
        self._proves = proves
        # By identity, since functions of two files may have equal code; kept, so that it stays.
        self._codes: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._cells: dict[tuple[int, str], Any] = {}
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}

    def values(self) -> dict[Hashable, Any]:
        """Returns what the names stand for now."""
        found: dict[Hashable, Any] = {
            (holder.get("__name__"), name, key): holder.get(name, _ABSENT)
            for (key, name), (holder, _) in self._places.items()
        }
        found.update(self._cells)
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the names of all functions that are called in the context.

        The garbage collector, which may run anybody's callbacks, is not among their callers.
        """
        before = sys.gettrace()
        with collector_paused(), _OperatorsUnwatched():
            sys.settrace(self._note)
            try:
                yield
            finally:
                sys.settrace(before)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        code, holder = frame.f_code, frame.f_globals
        if (id(code), id(holder)) in self._codes:
            return
        file = file_of(code, holder)
        imports = code.co_name == "<module>" and not self._proves
        if imports or is_library_file(file):
            return
        nested = any(code in each.co_consts for each, _ in self._codes.values())
        self._codes[id(code), id(holder)] = code, holder
        if self._proves and not self.objection and not is_installed_file(file):
            self.objection = objection(frame, SIMPLE, nested=nested) or ""
        for name in code.co_names:
            self._note_name(holder, name, code.co_names)
        for name in () if nested else code.co_freevars:
            self._cells[id(code), name] = frame.f_locals.get(name)

    def _note_name(self, holder: dict[str, Any], name: str, attributes: Collection[str]) -> None:
        """Notes a name, and where it is a Python module what may be read of that."""
        places = [(holder, name)]
        seen = set()
        while places:
            holder, name = places.pop()
            if name not in holder or (id(holder), name) in seen:
                continue
            seen.add((id(holder), name))
            self._places.setdefault((id(holder), name), (holder, name))
            if isinstance(holder[name], types.ModuleType):
                places += [(vars(holder[name]), attribute) for attribute in attributes]


class _OperatorsUnwatched(TorchFunctionMode):
    """Lets PyTorch's own functions run unwatched where they call nobody else's.

    A trace runs through far more of their code than of the model's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._modes = active_modes()
        self._is_own = _are_untouched() and not foreign_modes()

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        watching = sys.gettrace()
        sys.settrace(None)
        try:
            calls_own = self._is_own and _is_own(func) and active_modes() == self._modes
            if not (calls_own and _is_data(args) and _is_data(kwargs)):
                sys.settrace(watching)
            return func(*args, **kwargs)
        finally:
            sys.settrace(watching)


_OWN_OPERATORS = ("aten", "prim", "prims")
_COMPILED = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
)


def _are_untouched() -> bool:
    """Whether PyTorch's functions, which call each other, are those that it came with."""
    functions = (
        value
        for holder in (torch, torch.nn.functional, Tensor)
        for name, value in vars(holder).items()
        if isinstance(value, types.FunctionType) and (name[0] != "_" or name[:2] == "__")
    )
    return all(is_library_file(function.__code__.co_filename) for function in functions)


def _is_own(function: Any) -> bool:
    """Whether a function is PyTorch's, and not one of its wrappers around another's."""
    if isinstance(function, OpOverload):
        return function.namespace in _OWN_OPERATORS
    if isinstance(function, types.FunctionType):
        made = "<locals>" in function.__qualname__
        of_library = is_library(sys.modules.get(function.__module__))
        return of_library and not made and is_library_file(function.__code__.co_filename)
    return isinstance(function, _COMPILED)


def foreign_modes() -> list[Any]:
    """Returns the active modes that are not of PyTorch or this package."""
    return [m for m in active_modes() if m is not None and not _is_of_library(type(m))]


def _is_of_library(kind: type) -> bool:
    return is_library(sys.modules.get(kind.__module__))


def _is_data(value: Any) -> bool:
    """Whether a value is made of numbers and of PyTorch's tensors, and has no code of its own."""
    kind = type(value)
    if kind in (tuple, list):
        return all(map(_is_data, value))
    if kind is dict:
        return all(map(_is_data, value.values()))
    if kind is slice:
        return _is_data((value.start, value.stop, value.step))
    return kind in SIMPLE or (issubclass(kind, Tensor) and _is_of_library(kind))
