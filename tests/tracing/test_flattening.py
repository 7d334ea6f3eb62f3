"""Nested arguments are flattened as PyTorch flattens them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from dynamo_moe.tracing import private
from dynamo_moe.tracing.flattening import defined_once

pytestmark = pytest.mark.skipif(
    private.missing() is not None,
    reason="needs a known version of PyTorch",
)

Pair = namedtuple("Pair", "first second")
flatten = defined_once(_pytree.tree_flatten)


@dataclass
class Box:
    """A class that PyTorch is told of."""

    held: Any


class Row(list[Any]):
    """A list of a class that PyTorch knows nothing of: a leaf."""


class Point(tuple[Any, ...]):
    """A tuple of such a class."""


_pytree.register_pytree_node(
    Box,
    lambda box: ([box.held], "box"),
    lambda children, _: Box(*children),
    serialized_type_name=f"{__name__}.Box",
)

leaf = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.float32))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3).map(kind) for kind in (list, tuple, deque, Row, Point)),
        *(
            st.dictionaries(st.text(max_size=1), inner, max_size=3).map(kind)
            for kind in (dict, OrderedDict, lambda held: defaultdict(list, held))
        ),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner),
    ),
    max_leaves=12,
)


@given(tree=trees)
def test_flattened_as_by_pytorch(tree: Any) -> None:
    leaves, structure = flatten(tree)
    expected, its = _pytree.tree_flatten(tree)
    assert all(one is other for one, other in zip(leaves, expected, strict=True))
    assert structure == its
    assert repr(structure) == repr(its)
    assert _pytree.tree_unflatten(leaves, structure) == tree


@given(tree=trees)
def test_leaves_of_the_callers_choice(tree: Any) -> None:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, (list, Pair))

    assert flatten(tree, is_leaf) == _pytree.tree_flatten(tree, is_leaf)
    assert flatten(tree, is_leaf=is_leaf) == _pytree.tree_flatten(tree, is_leaf=is_leaf)


def test_the_callers_function_is_asked_of_every_node() -> None:
    tree = {"a": [1, (2, None)], "b": Pair(3, Box(4))}
    asked: list[list[Any]] = [[], []]
    for function, seen in zip((flatten, _pytree.tree_flatten), asked, strict=True):
        function(tree, seen.append)
    assert asked[0] == asked[1]
    assert len(asked[0]) == 10


def test_nothing_is_left_to_the_garbage_collector() -> None:
    def outlives_its_call(function: Any) -> bool:
        def is_leaf(value: Any) -> bool:
            return isinstance(value, int)

        held = weakref.ref(is_leaf)
        enabled = gc.isenabled()
        gc.disable()
        try:
            function(([1, 2], {"a": 3}), is_leaf)
            del is_leaf
            return held() is not None
        finally:
            if enabled:
                gc.enable()

    assert not outlives_its_call(flatten)
    assert outlives_its_call(_pytree.tree_flatten)  # Else there is no need for ours.


def test_code_that_dynamo_reads() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        leaves, structure = flatten({"a": x, "b": [x]})
        return torch.stack(_pytree.tree_leaves(_pytree.tree_unflatten(leaves, structure))).sum(0)

    x = torch.arange(3.0)
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2)
