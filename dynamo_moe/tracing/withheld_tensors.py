"""Tensors of modules that no code may look for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


class Withheld(dict[str, Any]):
    """A module's tensors by name, of which none may be looked for."""

    def __init__(
        self, held: Mapping[str, Any], names: Collection[str], fail: Callable[[str], Any]
    ) -> None:
        super().__init__(held)
        self._names, self._fail = names, fail

    def _check(self, name: object) -> None:
        if name in self._names:
            self._fail(f"{name} of one that is passed over is read")

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a tensor that may be looked for."""
        self._check(name)
        return super().get(name, default)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        self._fail("tensors of one that is passed over are listed or replaced")

    __iter__ = __reversed__ = __len__ = __eq__ = __repr__ = __or__ = __ror__ = __ior__ = _refuse
    __setitem__ = __delitem__ = keys = values = items = copy = _refuse
    pop = popitem = setdefault = update = clear = _refuse
