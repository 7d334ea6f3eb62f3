"""The operators on CUDA tensors: the Triton kernels, launched by Triton's JIT.

Where there are no kernels PyTorch's products compute, as on the CPU: for float64, for the sizes
that :class:`custom_ops.kernels.layer.Layer` does not take, and for more slots than the kernels
count. Those wait for the device, so a CUDA graph cannot capture them.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops._grouped import ExpertParameters
from custom_ops.options import ExpertOptions, RouterOptions

if TYPE_CHECKING:
    from custom_ops.kernels.spec import ForwardPlan


def forward(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertParameters,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> Tensor:
    """Computes what :func:`custom_ops._grouped.forward` computes.

    Weights whose memory is (out, in) or (in, out) are read as they lie. Other strides are copied at
    every call, and so is what does not begin at a multiple of 16 bytes.
    """
    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    routing_dtype, weights_dtype = (None if t is None else t.dtype for t in routing.values())
    w1, w1_transposed = _as_it_lies(w1_EFD)
    w2, w2_transposed = _as_it_lies(w2_EDH)
    plan = _plan(
        x_TD.device,
        experts=w1_EFD.shape[0],
        width=w1_EFD.shape[2],
        hidden=w2_EDH.shape[2],
        top_k=router.top_k if router else routing["expert_ids"].shape[1],
        tokens_dtype=x_TD.dtype,
        experts_dtype=w1_EFD.dtype,
        options=options,
        router=router,
        routing_dtype=routing_dtype,
        weights_dtype=weights_dtype,
        b1=b1_EF is not None,
        b2=b2_ED is not None,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
        w1_transposed=w1_transposed,
        w2_transposed=w2_transposed,
    )
    if plan is None or x_TD.shape[0] > plan.ranges[-1].last:
        return _grouped.forward(x_TD, routing, parameters, options, router)

    from custom_ops.kernels.launch import launch

    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    tensors = {"x": x_TD, **routing, "w1": w1, "b1": b1_EF, "w2": w2, "b2": b2_ED}
    present = {name: _aligned(tensor) for name, tensor in tensors.items() if tensor is not None}
    present["y"] = y_TD
    with torch.cuda.device(x_TD.device):
        launch(plan, present)
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


@lru_cache(maxsize=1024)
def _plan(device: torch.device, **layer: Any) -> ForwardPlan | None:
    """Returns the plan of a layer, given its fields, on a device; None where it has no kernels."""
    if torch.float64 in layer.values():
        return None

    from custom_ops.kernels.architectures import nearest_architecture
    from custom_ops.kernels.layer import Layer, NoKernelsError
    from custom_ops.kernels.plan import plan

    try:
        known = Layer(**layer)
    except NoKernelsError:
        return None
    return plan(known, nearest_architecture(*torch.cuda.get_device_capability(device)))


def _as_it_lies(weight: Tensor) -> tuple[Tensor, bool]:
    """Returns the weight; where ``weight.mT`` is contiguous and it is not, that one, and True."""
    if not weight.is_contiguous() and (transposed := weight.mT).is_contiguous():
        return transposed, True
    return weight, False


def _aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor as the kernels read it: contiguous, from a multiple of 16 bytes on."""
    contiguous = tensor.contiguous()
    return contiguous if contiguous.data_ptr() % 16 == 0 else contiguous.clone()
