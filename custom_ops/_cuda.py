"""The operators on CUDA tensors: the Triton kernels, launched by Triton's JIT.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops._grouped import ExpertParameters
from custom_ops.options import ExpertOptions, RouterOptions


def forward(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertParameters,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> Tensor:
    """Computes what :func:`custom_ops._grouped.forward` computes."""
    dtypes = {name: None if t is None else t.dtype for name, t in routing.items()}
    routing_dtype, weights_dtype, *_ = dtypes.values()
    if torch.float64 in (x_TD.dtype, *dtypes.values(), parameters.w1_EFD.dtype):
        # There are no kernels but PyTorch's own.
        return _grouped.forward(x_TD, routing, parameters, options, router)

    from custom_ops.kernels.architectures import nearest_architecture
    from custom_ops.kernels.launch import launch
    from custom_ops.kernels.layer import Layer
    from custom_ops.kernels.plan import plan

    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    layer = Layer(
        experts=w1_EFD.shape[0],
        width=w1_EFD.shape[2],
        hidden=w2_EDH.shape[2],
        top_k=router.top_k if router else routing["expert_ids"].shape[1],
        tokens_dtype=x_TD.dtype,
        experts_dtype=w1_EFD.dtype,
        options=options,
        router=router,
        routing_dtype=routing_dtype or torch.int64,
        weights_dtype=weights_dtype,
        selection_dtype=dtypes.get("selection_bias"),
        b1=b1_EF is not None,
        b2=b2_ED is not None,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
    )
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    tensors = {"x": x_TD, **routing, "w1": w1_EFD, "b1": b1_EF, "w2": w2_EDH, "b2": b2_ED}
    present = {name: _aligned(tensor) for name, tensor in tensors.items() if tensor is not None}
    with torch.cuda.device(x_TD.device):
        architecture = nearest_architecture(*torch.cuda.get_device_capability())
        launch(plan(layer, architecture), {**present, "y": y_TD})
    return y_TD


def rms_norm_forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, weight_plus_one: bool, round_before_weight: bool
) -> Tensor:
    """Returns ``[T, D]`` in x's dtype; the arguments are those of ``torch.ops.moe.rms_norm``."""
    from custom_ops.kernels.launch import launch_kernel
    from custom_ops.kernels.rms_norm import rms_norm_spec

    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if y_TD.numel():
        spec = rms_norm_spec(
            x_TD.shape[1],
            x_TD.dtype,
            weight_D.dtype,
            eps,
            weight_plus_one=weight_plus_one,
            round_before_weight=round_before_weight,
        )
        with torch.cuda.device(x_TD.device):
            launch_kernel(spec, {"x": _aligned(x_TD), "weight": _aligned(weight_D), "y": y_TD})
    return y_TD


def _aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor as the kernels read it: contiguous, from a multiple of 16 bytes on."""
    contiguous = tensor.contiguous()
    return contiguous if contiguous.data_ptr() % 16 == 0 else contiguous.clone()
