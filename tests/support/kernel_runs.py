"""Runs the Triton kernels on the cases of the operators' tests."""

from __future__ import annotations

import torch
from torch import Tensor

from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.architectures import Architecture, architecture
from custom_ops.kernels.configs import RangeConfig
from custom_ops.kernels.launch import launch
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.layer_shape import LayerShape
from custom_ops.options import ROUTER_OPTIONS, WeightLayout
from custom_ops.weight_formats import plain_format
from moe_cases import Case
from packed_cases import PackedCase


def layer_of(case: Case | PackedCase, *, tf32: bool = False) -> Layer:
    """The case's layer; its weights may be transposed views of (in, out) memory."""
    if isinstance(case, PackedCase):
        weight_format, case = case.format(), case.plain
    else:
        weight_format = plain_format(case.arguments["w1"].dtype)
    a, options = case.arguments, dict(case.options)
    router = {row.name: options.pop(row.name) for row in ROUTER_OPTIONS if row.name in options}
    dropless = case.op == "dropless"
    routing = ("router_weight", "router_bias") if dropless else ("expert_ids", "expert_weights")
    routing_dtype, weights_dtype = (None if a[n] is None else a[n].dtype for n in routing)
    top_k = a["top_k"] if dropless else a["expert_ids"].shape[-1]
    return Layer(
        LayerShape(
            experts=a["w1"].shape[0],
            width=a["x"].shape[-1],
            hidden=a["w2"].shape[-1],
            top_k=top_k,
            tokens_dtype=a["x"].dtype,
            weight_format=weight_format,
            options=ExpertOptions(**options),
            router=RouterOptions(top_k, **router) if dropless else None,
            routing_dtype=routing_dtype,
            weights_dtype=weights_dtype,
            selection_dtype=None if (bias := a.get("selection_bias")) is None else bias.dtype,
            b1=a["b1"] is not None,
            b2=a["b2"] is not None,
            layout=WeightLayout(
                w1_transposed=is_transposed(a["w1"]), w2_transposed=is_transposed(a["w2"])
            ),
        ),
        tf32=tf32,
    )


def is_transposed(weight: Tensor) -> bool:
    """Whether a weight is the transposed view of contiguous memory."""
    return not weight.is_contiguous() and weight.mT.is_contiguous()


def in_out(case: Case, *names: str) -> Case:
    """The case with weights that lie as (in, out)."""
    return case.changed(**{name: case.arguments[name].mT.contiguous().mT for name in names})


def call_tensors(case: Case | PackedCase) -> dict[str, Tensor]:
    """The case's tensors under the launchers' names, and y filled with NaN."""
    tensors = {name: value for name, value in case.arguments.items() if isinstance(value, Tensor)}
    return {**tensors, "y": torch.full_like(case.arguments["x"], float("nan"))}


def run_kernels(
    case: Case | PackedCase,
    device: str | Architecture = "sm_80",
    ranges: tuple[RangeConfig, ...] = (),
) -> Tensor:
    """The result of the case's plan on a workspace filled with NaN."""
    layer = layer_of(case)
    on = device if isinstance(device, Architecture) else architecture(device)
    chosen = plan_with(layer, on, ranges) if ranges else plan(layer, on)
    tensors = call_tensors(case)
    size = chosen.workspace_size(tensors["x"].shape[0])
    workspace = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :][:size]
    launch(chosen, tensors, workspace)
    return tensors["y"]
