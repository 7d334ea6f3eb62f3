"""Changes to the whole process while it exports: one lock, and everything restored.

PyTorch's tracer and exporter are steered by attributes of classes and modules, and by flags, which
all threads share. Whoever changes one holds this lock meanwhile, so exports that overlap take
turns. The lock is re-entrant: a model's forward and a progress callback may export in turn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any

_LOCK = RLock()
# New objects before the garbage collector looks for some that are unused.
_YOUNG_OBJECTS = 1_000_000

Change = Callable[[], AbstractContextManager[Any]]


class ProcessState:
    """A set of changes that hold while its context is entered, once or several times.

    The first to enter makes the changes, the last to leave undoes them in reverse, in whatever
    order the contexts in between end, and on exceptions too. That order is free among the contexts
    of one state alone: if two states need the same change, it is a state itself, which both take as
    one of their changes.

    With ``side_by_side``, threads may be in the context together. Then a lock of its own is held
    only while the changes are made or undone, by whichever threads come first and last.

    Example:
        >>> class Settings:
        ...     limit = 1
        >>> with ProcessState(lambda: replaced(Settings, "limit", lambda limit: limit + 1))():
        ...     Settings.limit
        2
        >>> Settings.limit
        1
    """

    def __init__(self, *changes: Change, side_by_side: bool = False) -> None:
        """Keeps functions that return the context of a change each; none is made yet."""
        self._changes = changes
        self._while_inside: AbstractContextManager[Any] = nullcontext() if side_by_side else _LOCK
        self._at_the_ends = RLock() if side_by_side else _LOCK
        self._entered = 0
        self._undo = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Makes the changes, and waits for other threads first unless they may be inside, too."""
        with self._while_inside:
            with self._at_the_ends:
                if not self._entered:
                    with ExitStack() as stack:
                        for change in self._changes:
                            stack.enter_context(change())
                        self._undo = stack.pop_all()
                self._entered += 1
            try:
                yield
            finally:
                with self._at_the_ends:
                    self._entered -= 1
                    if not self._entered:
                        self._undo.close()


exclusive = ProcessState()
"""The lock alone."""


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


collector_paused = ProcessState(_no_garbage_collected, side_by_side=True)
"""Without the garbage collector and the callbacks that it runs.

It takes a quarter of the time of imports and finds nothing.
"""


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Lets the garbage collector look at new objects only, and less often.

    With PyTorch and transformers loaded there are half a million older ones, which an export makes
    it go through: 0.3 s each time. At the usual pace it takes another twentieth of the time.
    """
    if gc.get_freeze_count():  # Somebody else's.
        yield
        return
    young, *older = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(young and max(young, _YOUNG_OBJECTS), *older)  # 0 means never.
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()


collecting_seldom = ProcessState(_only_new_garbage, side_by_side=True)
"""With a garbage collector that looks at new objects only, and less often."""


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a class or a module; a :class:`ProcessState` makes it safe.

    Args:
        owner: The class or module, which has the attribute itself.
        name: The attribute.
        replacement: A function from the attribute's value to the one that takes its place.
    """
    original = vars(owner)[name]  # As it is stored: a static method stays one.
    setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
