"""The default configurations: sizes alone decide, and every tile fits its device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.configs import GemmConfig, RangeConfig, default_ranges, shape_key
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan_with
from custom_ops.kernels.spec import MAX_TOKENS
from custom_ops.layer_shape import LayerShape
from custom_ops.options import ExpertOptions, WeightLayout
from custom_ops.weight_formats import plain_format
from layer_changes import changed

HALF = torch.bfloat16
SILU = ExpertOptions("silu", gated=True)
CLAMPED = ExpertOptions("clamped_swiglu", gated=True, interleaved=True)
LAYERS = {
    "mixtral": Layer(LayerShape(8, 4096, 14336, 2, HALF, plain_format(HALF), SILU)),
    "qwen3": Layer(LayerShape(128, 2048, 768, 8, HALF, plain_format(HALF), SILU)),
    "gpt-oss": Layer(
        LayerShape(
            32,
            2880,
            2880,
            4,
            HALF,
            plain_format(HALF),
            CLAMPED,
            b1=True,
            b2=True,
            layout=WeightLayout(w1_transposed=True, w2_transposed=True),
        )
    ),
    "deepseek-v3": Layer(LayerShape(256, 7168, 2048, 8, HALF, plain_format(HALF), SILU)),
    "swin": Layer(
        LayerShape(
            8, 384, 1536, 2, HALF, plain_format(HALF), ExpertOptions("gelu"), b1=True, b2=True
        )
    ),
    "narrow": Layer(LayerShape(5, 136, 24, 2, HALF, plain_format(HALF), ExpertOptions("relu"))),
    "float32": Layer(LayerShape(8, 384, 1536, 2, torch.float32, plain_format(torch.float32), SILU)),
}


def products(layer: Layer, device: str) -> list[tuple[GemmConfig, int]]:
    """The tiles of the default configurations, each with its columns of weights."""
    gates = layer.shape.options.rows_per_hidden
    return [
        (config, factor * config.block_n)
        for each in default_ranges(layer, architecture(device))
        for config, factor in ((each.up, gates), (each.down, 1))
        if isinstance(config, GemmConfig)
    ]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("device", [known.name for known in ARCHITECTURES.values()])
def test_a_stage_loads_while_another_is_multiplied(name, device):
    layer, on = LAYERS[name], architecture(device)
    for config, columns in products(layer, device):
        stage = (
            (config.block_m + columns)
            * config.block_k
            * layer.shape.weight_format.operand_dtype.itemsize
        )
        # Without asynchronous products Triton has one buffer less than stages.
        asynchronous = on.has_async_products and config.block_m >= 64
        buffers = config.num_stages - (not asynchronous)
        assert buffers * stage <= on.shared_memory - 1024
        assert config.num_stages >= 3 or not on.has_tensor_cores


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt-oss", "deepseek-v3", "swin"])
@pytest.mark.parametrize("device", ["sm_90", "sm_100"])
def test_two_programs_for_each_multiprocessor(name, device):
    on = architecture(device)
    for config, columns in products(LAYERS[name], device):
        stages = config.num_stages * (config.block_m + columns) * config.block_k
        stored = config.block_m * min(config.block_n, 64)
        assert 2 * (2 * (stages + stored) + 1024) <= on.shared_memory + 1024
        # Beside 64 accumulators, a thread has as many other registers.
        assert config.block_m * columns <= 64 * 32 * config.num_warps
        if config.block_m == 128:
            assert (columns, config.block_k, config.num_warps) == (128, 64, 8)


def test_programs_persist_where_registers_hold_two():
    def persistent(name: str, device: str) -> set[tuple[int, bool, bool]]:
        ranges = default_ranges(LAYERS[name], architecture(device))[1:]
        return {(each.up.block_m, each.up.persistent, each.down.persistent) for each in ranges}

    few = {(16, False, False), (32, False, False)}
    assert persistent("qwen3", "sm_90") == few | {(64, True, True), (128, True, True)}
    assert persistent("swin", "sm_90") == few | {(64, False, True), (128, False, True)}
    for device in ("sm_80", "sm_100", "sm_120"):
        assert persistent("qwen3", device) == few | {(64, False, False), (128, False, False)}
    assert not any(persists for _, *both in persistent("float32", "sm_90") for persists in both)


@pytest.mark.parametrize(
    ("changes", "maps"),
    [
        ({}, True),
        ({"w1_transposed": True}, False),
        ({"w1_transposed": True, "options": CLAMPED}, True),
        ({"w1_transposed": True, "options": ExpertOptions()}, True),
        ({"w2_transposed": True}, True),
    ],
)
def test_weights_come_by_tensor_maps_where_a_tile_is_one_box(changes, maps):
    last = default_ranges(changed(LAYERS["qwen3"], **changes), architecture("sm_90"))[-1]
    assert (last.up.tensor_maps, last.down.tensor_maps) == (maps, True)


@pytest.mark.parametrize(
    ("config", "at_once"),
    [
        (GemmConfig(128, 64, 64, 8, 3, persistent=True), 2),
        (GemmConfig(64, 64, 64, 4, 3, persistent=True), 2),
        (GemmConfig(128, 128, 64, 8, 4, persistent=True), 1),
    ],
)
def test_persistent_programs_are_as_many_as_run_at_once(config, at_once):
    def programs(device: str, tokens: int) -> int:
        ranges = (RangeConfig(MAX_TOKENS, "gemm", config, replace(config, persistent=False)),)
        layer = LAYERS["mixtral"]
        up = plan_with(layer, architecture(device), ranges).ranges[0].launches[-3]
        assert up.name == "expert_up_kernel"
        return up.grid[0].evaluate({**layer.shape.sizes, "T": tokens})

    assert programs("sm_90", 4096) == 132 * at_once
    assert programs("sm_100", 4096) == 148 * at_once
    assert programs("sm_90", 1) == min(132 * at_once, 2 * 14336 // config.block_n)


def test_a_measured_configuration_is_of_a_layout():
    layer = LAYERS["qwen3"]
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"w1_transposed": True},
        {"w2_transposed": True},
        {"w1_transposed": True, "w2_transposed": True},
        {"w1_transposed": True, "options": CLAMPED},
    )
    keys = [shape_key(changed(layer, **each)) for each in changes]
    assert keys[0] == "d2048-h768-e128-k8-gated-bf16-bf16"
    assert len(set(keys)) == len(keys)
