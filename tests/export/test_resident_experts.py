"""How many experts of each layer get a slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_moe.files.resident_experts import ExpertSizes, choose, share

LAYERS = st.lists(
    st.builds(
        ExpertSizes,
        st.just("layer"),
        st.just("layer/DroplessMoE"),
        st.integers(1, 64),
        st.tuples(st.integers(1, 2**32), st.integers(1, 2**32)),
    ),
    min_size=1,
    max_size=5,
)


def used(layers: list[ExpertSizes], slots: list[int]) -> int:
    return sum(layer.device_bytes(count) for layer, count in zip(layers, slots, strict=True))


@given(LAYERS, st.fractions(0, 2))
def test_the_largest_share_that_fits(layers, fraction):
    whole = [layer.experts for layer in layers]
    memory = int(fraction * used(layers, whole))
    # By hand: every share of every layer, the largest first.
    shares = sorted({(count, size) for size in whole for count in range(1, size + 1)})
    expected = max(
        (
            slots
            for count, size in shares
            if used(layers, slots := [count * each // size for each in whole]) <= memory
        ),
        default=[0],
    )
    if 0 in expected:
        with pytest.raises(ValueError, match="less than one expert"):
            share(layers, memory)
        return
    slots = share(layers, memory)
    assert slots == expected
    assert used(layers, slots) <= memory
    assert (slots == whole) == (memory >= used(layers, whole))


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 2**32), st.integers(0, 2**40))
def test_of_equal_layers_no_more_fit(count, experts, size, memory):
    layers = [ExpertSizes("layer", "node", experts, (size, size))] * count
    fitting = [n for n in range(1, experts + 1) if used(layers, [n] * count) <= memory]
    if fitting:
        assert share(layers, memory) == [fitting[-1]] * count
    else:
        with pytest.raises(ValueError, match="less than one expert"):
            share(layers, memory)


@given(LAYERS)
def test_the_error_says_how_much_is_enough(layers):
    with pytest.raises(ValueError, match="need") as caught:
        share(layers, 0)
    needed = int(str(caught.value).rpartition("need ")[2].split()[0])
    assert min(share(layers, needed)) >= 1
    with pytest.raises(ValueError, match="less than one expert"):
        share(layers, needed - 1)


def test_a_layer_has_several_names():
    first = ExpertSizes("blocks.0.mlp.experts", "blocks.0.mlp/DroplessMoE", 8, (100, 100))
    second = ExpertSizes("node", "node", 4, (100, 100))
    for name in ("blocks.0.mlp.experts", "blocks.0.mlp/DroplessMoE", "blocks.0.mlp"):
        assert choose([first, second], {name: 3}, None) == [3, None]
        assert choose([first, second], {"*": 2, name: 3}, None) == [3, 2]
    assert choose([first, second], 4, None) == [4, 4]
