"""The forward pass of a layer as a list of launches for every number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.combine import combine_step
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig, ranges_for
from custom_ops.kernels.expert_mlp import expert_mlp_step
from custom_ops.kernels.few_tokens import few_step, few_sum_step
from custom_ops.kernels.grouped_gemm import expert_down_step, expert_up_step
from custom_ops.kernels.index_sort import index_sort_step
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.residency import residency_step, state_buffers, wave_launches, waves
from custom_ops.kernels.router import router_step
from custom_ops.kernels.row_scale import row_scale_step
from custom_ops.kernels.spec import MAX_SLOTS, ForwardPlan, KernelSpec, Step, TokenRange


@lru_cache(maxsize=256)
def plan(layer: Layer, architecture: Architecture) -> ForwardPlan:
    """Returns the launches of a layer on an architecture.

    Router, norm, index sort, first product, second product, combination; few tokens need no sort,
    small widths have both products in one kernel. Where only some of the experts are resident,
    products and copies run in waves. Nothing on the host waits for the device. Equal layers share
    a plan.
    """
    layer = layer.canonical()
    return plan_with(layer, architecture, ranges_for(layer, architecture))


def plan_with(
    layer: Layer, architecture: Architecture, ranges: tuple[RangeConfig, ...]
) -> ForwardPlan:
    """Returns the plan for given configurations, as the tuner tries them."""
    layer = layer.canonical()
    most = MAX_SLOTS // layer.shape.top_k
    first, planned = 1, []
    for config in ranges:
        last = min(config.last_tokens, most)
        ahead, products, end = _stages(layer, architecture, config, first)
        span = TokenRange.of(first, last, (*ahead, *products, *end))
        if layer.resident_experts is not None:
            wave = wave_launches(layer, architecture, _launches(products))
            span = replace(
                span,
                launches=_launches(ahead),
                waves=waves(layer),
                wave=wave,
                epilogue=_launches(end),
            )
        planned.append(span)
        first = config.last_tokens + 1
    return ForwardPlan(layer, architecture, tuple(planned), state_buffers(layer))


def _launches(steps: Iterable[Step]) -> tuple[KernelSpec, ...]:
    return tuple(launch for step in steps for launch in step.launches)


def _stages(
    layer: Layer, architecture: Architecture, config: RangeConfig, first_tokens: int
) -> tuple[list[Step], list[Step], list[Step]]:
    """Returns the steps ahead of the experts' products, the products, and the steps behind them."""
    last_tokens = config.last_tokens
    in_waves = layer.resident_experts is not None
    ahead = []
    if layer.shape.router is not None:
        ahead.append(router_step(layer, architecture, first_tokens, last_tokens))
    if layer.shape.options.pre_norm != "none":
        ahead.append(row_scale_step(layer, architecture))
    match config.up, config.down:
        case FewConfig() as up, FewConfig() as down:
            products = [few_step(layer, architecture, up, down)]
            if not in_waves:
                return ahead, products, []
            ahead.append(residency_step(layer, architecture, block_m=None))
            return ahead, products, [few_sum_step(layer, architecture)]
        case MlpConfig() as mlp, None:
            block_m, products = mlp.block_m, [expert_mlp_step(layer, architecture, mlp)]
        case GemmConfig() as up, GemmConfig() as down:
            block_m = up.block_m
            products = [
                expert_up_step(layer, architecture, up),
                expert_down_step(layer, architecture, down),
            ]
        case _:
            raise ValueError(f"no path takes the configuration {config}")
    ahead.append(index_sort_step(layer, architecture, block_m, last_tokens))
    if in_waves:
        ahead.append(residency_step(layer, architecture, block_m))
    return ahead, products, [combine_step(layer, architecture)]
