"""The forward pass of a layer as a list of launches for every number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.combine import combine_step
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig, ranges_for
from custom_ops.kernels.expert_mlp import expert_mlp_step
from custom_ops.kernels.few_tokens import few_step
from custom_ops.kernels.grouped_gemm import expert_down_step, expert_up_step
from custom_ops.kernels.index_sort import index_sort_step
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.router import router_step
from custom_ops.kernels.row_scale import row_scale_step
from custom_ops.kernels.spec import MAX_SLOTS, ForwardPlan, Step, TokenRange


@lru_cache(maxsize=256)
def plan(layer: Layer, architecture: Architecture) -> ForwardPlan:
    """Returns what runs for a layer on an architecture.

    Router, norm, index sort, first product, second product, combination; few tokens need no sort,
    small widths have both products in one kernel. Nothing on the host waits for the device. Equal
    layers share a plan.
    """
    layer = layer.canonical()
    return plan_with(layer, architecture, ranges_for(layer, architecture))


def plan_with(
    layer: Layer, architecture: Architecture, ranges: tuple[RangeConfig, ...]
) -> ForwardPlan:
    """Returns the plan for given configurations, as the tuner tries them."""
    layer = layer.canonical()
    most = MAX_SLOTS // layer.top_k
    first, planned = 1, []
    for config in ranges:
        steps = _steps(layer, architecture, config, first)
        planned.append(TokenRange.of(first, min(config.last_tokens, most), steps))
        first = config.last_tokens + 1
    return ForwardPlan(layer, architecture, tuple(planned))


def _steps(
    layer: Layer, architecture: Architecture, config: RangeConfig, first_tokens: int
) -> Iterator[Step]:
    last_tokens = config.last_tokens
    if layer.router is not None:
        yield router_step(layer, architecture, first_tokens, last_tokens)
    if layer.options.pre_norm != "none":
        yield row_scale_step(layer, architecture)
    match config.up, config.down:
        case FewConfig() as up, FewConfig() as down:
            yield few_step(layer, architecture, up, down)
        case MlpConfig() as mlp, None:
            yield index_sort_step(layer, architecture, mlp.block_m, last_tokens)
            yield expert_mlp_step(layer, architecture, mlp)
            yield combine_step(layer, architecture)
        case GemmConfig() as up, GemmConfig() as down:
            yield index_sort_step(layer, architecture, up.block_m, last_tokens)
            yield expert_up_step(layer, architecture, up)
            yield expert_down_step(layer, architecture, down)
            yield combine_step(layer, architecture)
        case _:
            raise ValueError(f"no path takes the configuration {config}")
