"""Blocks are described at once, as by reading each of their attributes."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynamo_moe.tracing import descriptions
from dynamo_moe.tracing.descriptions import describe
from dynamo_moe.tracing.equal_blocks import tied_tensors


class Config:
    """Holds what it is given, as configurations do."""

    def __init__(self, *values: Any) -> None:
        self.__dict__.update({f"value{place}": value for place, value in enumerate(values)})


class Named(NamedTuple):
    first: Any
    second: Any


def _closing(value: Any) -> Callable[[], Any]:
    return lambda: value


# What all blocks may refer to.
SHARED = [
    *(Config(1, {}, [2.0, {}]), nn.Linear(1, 1), torch.ones(1), _closing([1]), max, {}, [], [{}]),
    *(set(), {1}, OrderedDict(), deque(), ({},), float("nan"), Named(1, {}), Config),
]
SIMPLE = [
    *(None, True, 1, 1.0, 0.0, -0.0, float("nan"), "1", b"1", 1j, ..., 257, 1e300, range(2)),
    *(slice(1), torch.float32, torch.Size([1]), torch.device("cpu"), frozenset({1}), ()),
]

# How to make a value for each block: the same recipe gives equal values where they hold no object
# of several blocks.
Recipe = Callable[[nn.Module, dict[int, Any]], Any]


def _kept(number: int, make: Recipe) -> Recipe:
    """Gives one object of a block wherever it has the same number."""

    def recipe(block: nn.Module, known: dict[int, Any]) -> Any:
        if number not in known:
            known[number] = make(block, known)
        return known[number]

    return recipe


def _values() -> st.SearchStrategy[Recipe]:
    simple = st.sampled_from([lambda block, known, value=value: value for value in SIMPLE])
    shared = st.sampled_from([lambda block, known, value=value: value for value in SHARED])
    own: list[Recipe] = [
        lambda block, known: {},
        lambda block, known: [],
        lambda block, known: set(),
        lambda block, known: OrderedDict(),
        lambda block, known: deque(),
        lambda block, known: block,
        lambda block, known: block.inner,
        lambda block, known: block.inner.weight,
        lambda block, known: block._modules,
        lambda block, known: block.inner._buffers,
        lambda block, known: 10**9,
    ]

    def around(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
        makers: list[Callable[..., Any]] = [
            *(lambda *each: [*each], lambda *each: each, lambda *each: {**dict(enumerate(each))}),
            *(Config, lambda *each: functools.partial(max, *each)),
            *(lambda *each: _closing(each), lambda *each: Named(each[:1], each)),
        ]
        parts = st.lists(inner, min_size=1, max_size=3)
        return st.builds(
            lambda make, each: (
                lambda block, known: make(*(recipe(block, known) for recipe in each))
            ),
            st.sampled_from(makers),
            parts,
        )

    kinds = st.recursive(simple | shared | st.sampled_from(own), around, max_leaves=4)
    return kinds | st.builds(_kept, st.integers(0, 2), kinds)


PLACES = ["", "inner", "inner.last"]
NAMES = ["first", "second", "third", "_forward_hooks", "training"]
Attributes = dict[tuple[str, str], Recipe]


def _attributes() -> st.SearchStrategy[Attributes]:
    places = st.tuples(st.sampled_from(PLACES), st.sampled_from(NAMES[:3]))
    return st.dictionaries(places, _values(), max_size=5)


def _block(attributes: Attributes) -> nn.Module:
    block = nn.Module()
    block.inner = nn.Linear(1, 1, bias=False)
    block.inner.last = nn.BatchNorm1d(1)
    known: dict[int, Any] = {}
    for (path, name), recipe in attributes.items():
        vars(block.get_submodule(path))[name] = recipe(block, known)
    return block


def _one_by_one(block: nn.Module, tied: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A description for which every attribute was read by itself, with all in it."""
    with monkeypatch.context() as patch:
        patch.setattr(descriptions._Reader, "has_each_once", lambda reader, empty: False)
        patch.setattr(descriptions._Reader, "_read_attribute", descriptions._Reader.read)
        return describe(block, tied)


@settings(deadline=None, max_examples=300)
@given(_attributes(), _attributes(), st.booleans())
def test_blocks_differ_where_their_attributes_do(
    attributes: Attributes, others: Attributes, both: bool
) -> None:
    blocks = [_block(attributes), _block({**attributes, **others} if both else attributes)]
    tied = tied_tensors(nn.ModuleList(blocks))
    common = descriptions.Common()
    first, second = (describe(block, tied, common) for block in blocks)
    with pytest.MonkeyPatch.context() as patch:
        one, other = (_one_by_one(block, tied, patch) for block in blocks)
    assert first.differences(second) == one.differences(other)
    assert second.differences(first) == other.differences(one)
    assert (first.facts == second.facts) is (one.facts == other.facts)
    assert first.is_unchanged() is one.is_unchanged()


def test_submodules_in_another_order_are_a_difference() -> None:
    """Code that goes through them, such as a sequence's, computes something else."""
    first, second = nn.Module(), nn.Module()
    for block, names in ((first, "ab"), (second, "ba")):
        for name in names:
            block.add_module(name, nn.Linear(1, 1))
    assert describe(first, ()).differences(describe(second, ())) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "value0", 2),
        lambda config: config.value1.append(2),
        lambda config: config.value2.__closure__[0].cell_contents.append(2),
        lambda config: setattr(config, "other", 1),
    ],
)
def test_a_change_after_an_earlier_description_is_a_difference(
    change: Callable[[Config], Any],
) -> None:
    block, common = nn.Module(), descriptions.Common()
    block.config = Config(1, [1], _closing([1]))
    first = describe(block, (), common)
    common = common.after_changes()
    assert describe(block, (), common).differences(first) == frozenset()
    change(block.config)
    common = common.after_changes()
    assert describe(block, (), common).differences(first) == {("", "config")}


def test_what_is_not_changed_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block, common = nn.Module(), descriptions.Common()
    block.config = Config(1, [1])
    first = describe(block, (), common)
    monkeypatch.setattr(descriptions._Reading, "of", None)
    assert describe(block, (), common.after_changes()).differences(first) == frozenset()


class Slotted:
    """Keeps a value beside its attributes."""

    __slots__ = ("__dict__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Shown:
    """Shows what any other does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "shown"


def _with_attribute(value: Any, number: int) -> Any:
    value.number = number
    return value


def _named(name: str) -> Any:
    function = _closing(1)
    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (deque([1], maxlen=2), deque([1], maxlen=3)),
        (deque(maxlen=2), deque(maxlen=3)),
        ({0, 8}, {8, 0}),
        ({0.0: 1}, {-0.0: 1}),
        (Slotted(1), Slotted(2)),
        (slice(Shown(1)), slice(Shown(2))),
        (_named("one"), _named("other")),
        (_with_attribute(OrderedDict(a=1), 1), _with_attribute(OrderedDict(a=1), 2)),
        (
            _with_attribute(functools.partial(max, 1), 1),
            _with_attribute(functools.partial(max, 1), 2),
        ),
    ],
)
def test_values_that_look_alike_are_a_difference(one: Any, other: Any) -> None:
    first, second = nn.Module(), nn.Module()
    first.value, second.value = one, other
    assert describe(first, ()).differences(describe(second, ())) == {("", "value")}


def test_hooks_that_are_called_otherwise_are_a_difference() -> None:
    blocks = [nn.Module(), nn.Module()]
    for block, with_kwargs in zip(blocks, [(True, False), (False, True)], strict=True):
        for each in with_kwargs:
            block.register_forward_hook(max, with_kwargs=each)
    first, second = (describe(block, ()) for block in blocks)
    assert first.differences(second) is None
