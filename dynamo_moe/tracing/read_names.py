"""The global names that the code of equal blocks uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Hashable, Iterator
from types import ModuleType
from typing import Any

from dynamo_moe.process_state import collector_paused
from dynamo_moe.tracing.library_code import file_of, is_installed_file, is_library_file
from dynamo_moe.tracing.plain_code import objection
from dynamo_moe.tracing.values import SIMPLE

_ABSENT = object()


class ReadNames:
    """The global names that the code of a block uses, from when it is watched on.

    Attributes:
        failure: Why the code is not known to be harmless; empty if it is.
    """

    def __init__(self) -> None:
        """Knows no names yet."""
        self.failure = ""
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
        with collector_paused():
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
        if is_library_file(file):
            return
        nested = any(code in each.co_consts for each, _ in self._codes.values())
        self._codes[id(code), id(holder)] = code, holder
        if not is_installed_file(file) and not self.failure:
            self.failure = objection(frame, SIMPLE, nested=nested) or ""
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
            if isinstance(holder[name], ModuleType):
                places += [(vars(holder[name]), attribute) for attribute in attributes]
