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
        st.integers(1, 512),
        st.integers(1, 2**32),
    ),
    min_size=1,
    max_size=8,
)


def total(layers: list[ExpertSizes]) -> int:
    return sum(layer.experts * layer.expert_bytes for layer in layers)


@given(LAYERS, st.fractions(0, 2))
def test_slots_fit_into_the_memory(layers, fraction):
    memory = int(fraction * total(layers))
    try:
        slots = share(layers, memory)
    except ValueError:
        # Some layer's share is less than one expert.
        assert any(layer.experts * memory < total(layers) for layer in layers)
        return
    used = sum(count * layer.expert_bytes for count, layer in zip(slots, layers, strict=True))
    assert used <= memory
    for count, layer in zip(slots, layers, strict=True):
        assert 1 <= count <= layer.experts
        # The same share of each, but for what rounding takes.
        wanted = min(1, memory / total(layers)) * layer.experts
        assert wanted - 1 < count + 1e-6
        assert count <= wanted + 1e-6
    if memory >= total(layers):
        assert slots == [layer.experts for layer in layers]


@given(st.integers(1, 16), st.integers(1, 512), st.integers(1, 2**32), st.integers(0, 2**48))
def test_of_equal_layers_no_more_fit(count, experts, expert_bytes, memory):
    layers = [ExpertSizes("layer", "node", experts, expert_bytes)] * count
    fit = min(experts, memory // (count * expert_bytes))
    if fit == 0:
        with pytest.raises(ValueError, match="less than one expert"):
            share(layers, memory)
    else:
        assert share(layers, memory) == [fit] * count


@given(LAYERS)
def test_the_error_says_how_much_is_enough(layers):
    with pytest.raises(ValueError, match="need") as caught:
        share(layers, 0)
    needed = int(str(caught.value).rpartition("need ")[2].split()[0])
    assert 1 in share(layers, needed)
    with pytest.raises(ValueError, match="less than one expert"):
        share(layers, needed - 1)


def test_a_layer_has_several_names():
    first = ExpertSizes("blocks.0.mlp.experts", "blocks.0.mlp/DroplessMoE", 8, 100)
    second = ExpertSizes("node", "node", 4, 100)
    for name in ("blocks.0.mlp.experts", "blocks.0.mlp/DroplessMoE", "blocks.0.mlp"):
        assert choose([first, second], {name: 3}, None) == [3, None]
        assert choose([first, second], {"*": 2, name: 3}, None) == [3, 2]
    assert choose([first, second], 4, None) == [4, 4]
