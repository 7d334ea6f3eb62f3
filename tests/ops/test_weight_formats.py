"""Formats of weights: sizes, and what follows from a format with scales that has no kernels yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from custom_ops.dtypes import KERNEL_FLOATS
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.configs import shape_key
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.layer_shape import LayerShape
from custom_ops.options import ExpertOptions
from custom_ops.weight_formats import (
    FORMAT_NAMES,
    OPEN,
    StoredTensor,
    WeightFormat,
    plain_format,
)

HALF = torch.bfloat16
PACKED = WeightFormat(
    "packed",
    HALF,
    (StoredTensor("", torch.uint8, (1, 2)), StoredTensor("_scales", torch.uint8, (1, 32))),
    encoding="packed",
)
BLOCKS = WeightFormat(
    "blocks",
    HALF,
    (StoredTensor("", torch.uint8), StoredTensor("_scales", torch.float32, OPEN)),
    encoding="blocks",
    block=(128, 64),
)
SHAPE = LayerShape(8, 64, 32, 2, HALF, PACKED, ExpertOptions("silu", gated=True))


@pytest.mark.parametrize(
    ("weight_format", "rows", "columns", "size"),
    [
        (plain_format(torch.float32), 3, 33, 4 * 3 * 33),
        (plain_format(torch.float16), 3, 33, 2 * 3 * 33),
        (PACKED, 24, 64, 24 * 32 + 24 * 2),
        (PACKED, 3, 33, 3 * 17 + 3 * 2),
        (BLOCKS, 128, 64, 128 * 64 + 4),
        (BLOCKS, 129, 65, 129 * 65 + 4 * 2 * 2),
    ],
)
def test_the_bytes_of_an_expert(weight_format, rows, columns, size):
    assert weight_format.expert_bytes(rows, columns) == size


def test_the_bytes_of_a_layer_s_experts():
    assert SHAPE.matrices == {"w1": (64, 64), "w2": (64, 32)}
    assert SHAPE.expert_bytes == {"w1": 64 * 32 + 64 * 2, "w2": 64 * 16 + 64}


def test_plain_formats():
    plain = [plain_format(dtype) for dtype in KERNEL_FLOATS]
    assert [str(each) for each in plain] == ["float32", "float16", "bfloat16"]
    assert all(each.is_plain for each in plain)
    assert not PACKED.is_plain
    with pytest.raises(TypeError, match=r"weights must be one of float32, .*; got int8"):
        plain_format(torch.int8)


@pytest.mark.parametrize("change", [{"block": OPEN}, {"stored": PACKED.stored}])
def test_a_block_is_given_where_one_is_left_open(change):
    with pytest.raises(ValueError, match="block must be given where a tensor leaves it open"):
        replace(BLOCKS, **change)


def test_a_format_without_kernels_is_refused():
    with pytest.raises(
        TypeError, match=r"weight_format to be one of .*bfloat16, int4.*; got packed"
    ):
        Layer(SHAPE)


@pytest.fixture
def _with_kernels(monkeypatch):
    monkeypatch.setattr("custom_ops.kernels.layer.FORMAT_NAMES", (*FORMAT_NAMES, PACKED.name))


@pytest.mark.usefixtures("_with_kernels")
def test_every_tensor_of_a_weight_has_slots_and_is_copied():
    planned = plan(Layer(SHAPE, resident_experts=3), architecture("sm_90"))
    sizes = {each.name: each.size.evaluate({}) for each in planned.state[4:]}
    assert sizes == {
        "w1_slots": 3 * 64 * 32,
        "w1_scales_slots": 3 * 64 * 2,
        "w2_slots": 3 * 64 * 16,
        "w2_scales_slots": 3 * 64,
    }
    wave = planned.ranges[0].wave
    assert [each.side for each in wave] == [True, True, False, True, True, False]
    # A weight is copied once the last wave's product has read it, and read once it is copied whole.
    assert [each.after for each in wave] == [(2,), (), (1,), (5,), (), (4,)]


@pytest.mark.usefixtures("_with_kernels")
def test_a_measured_configuration_is_of_a_format():
    plain = map(plain_format, KERNEL_FLOATS)
    keys = {shape_key(Layer(replace(SHAPE, weight_format=each))) for each in plain}
    assert shape_key(Layer(SHAPE)) not in keys
