"""Which calls of a method show that nothing else gets hold of the method or of an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_moe.tracing.direct_calls import DirectCall, direct_call, place_in


class Watched:
    """Notes how its method is read, and where it is called from."""

    found: list[DirectCall | None]
    called: list[int]

    def __getattribute__(self, name: str) -> Any:
        if name == "update":
            frame: Any = inspect.currentframe()
            Watched.found.append(direct_call(frame.f_back, "update"))
        return object.__getattribute__(self, name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        frame: Any = inspect.currentframe()
        Watched.called.append(place_in(frame.f_back))


class Owner:
    number = 3


def ran(function: Callable[[Any, Any], Any]) -> DirectCall | None:
    Watched.found, Watched.called = [], []
    for _ in range(20):  # Python rewrites code that runs often.
        function(Watched(), Owner())
    assert len(set(Watched.found)) == 1
    found = Watched.found[0]
    if found is not None:
        assert set(Watched.called) == {found.call}
    return found


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (lambda cache, owner: cache.update(), 0),
        (lambda cache, owner: cache.update(1, owner, owner.number), 1),
        (lambda cache, owner: cache.update(owner.number, 1, owner.number, None), 2),
        (lambda cache, owner: cache.update(1, keys=owner, layer_idx=owner.number), 1),
    ],
)
def test_direct(function: Callable[[Any, Any], Any], attributes: int) -> None:
    found = ran(function)
    assert found is not None
    assert len(found.attributes) == attributes


@pytest.mark.parametrize(
    "function",
    [
        lambda cache, owner: cache.update,
        lambda cache, owner: getattr(cache, "update")(),  # noqa: B009
        lambda cache, owner: [cache.update],
        lambda cache, owner: str(cache.update),
        lambda cache, owner: cache.update.__self__,
        lambda cache, owner: cache.update(owner.number.real),
        lambda cache, owner: cache.update(owner.number + 1),
        lambda cache, owner: cache.update(-owner.number),
        lambda cache, owner: cache.update([owner.number]),
        lambda cache, owner: cache.update(str(owner.number)),
        lambda cache, owner: cache.update(*(owner.number,)),
        lambda cache, owner: cache.update(owner.number or 1),
        lambda cache, owner: cache.update(owner.number if owner else 1),
        lambda cache, owner: cache.update(owner.number == 3),
        lambda cache, owner: cache.update(f"{owner.number}"),
        lambda cache, owner: cache.update(lambda: owner.number),
    ],
)
def test_not_direct(function: Callable[[Any, Any], Any]) -> None:
    assert ran(function) is None
