"""The operators on CUDA tensors: the Triton kernels, launched by Triton's JIT.

Where there are no kernels PyTorch's products compute, as on the CPU: for float64, for the sizes
that :class:`custom_ops.kernels.layer.Layer` does not take, and for more slots than the kernels
count. Those wait for the device, so a CUDA graph cannot capture them.

Weights whose memory is (out, in) or (in, out) are read as they lie. Other strides are copied at
every call, and so are tensors that do not begin at a multiple of 16 bytes.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from custom_ops import _grouped
from custom_ops.expert_weights import ExpertWeights, PackedExperts
from custom_ops.layer_shape import LayerShape
from custom_ops.options import ExpertOptions, RouterOptions, WeightLayout
from custom_ops.packed_weights import PackedMatrices
from custom_ops.weight_formats import (
    STORED_SUFFIXES,
    WHOLE_MATRIX,
    WeightFormat,
    packed_format,
    plain_format,
)

if TYPE_CHECKING:
    from custom_ops.kernels.architectures import Architecture
    from custom_ops.kernels.layer import Layer
    from custom_ops.kernels.spec import ForwardPlan


def forward(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> Tensor:
    """Computes the same as :func:`custom_ops._grouped.forward`."""
    plan = _plan(x_TD.device, **layer_fields(x_TD, routing, parameters, options, router))
    if plan is None or x_TD.shape[0] > plan.ranges[-1].last:
        return _grouped.forward(x_TD, routing, parameters, options, router)
    return _launched(plan, x_TD, readable(x_TD, routing, parameters))


def forward_routed(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same as :func:`custom_ops._grouped.forward_routed`."""
    plan = _plan(x_TD.device, **layer_fields(x_TD, routing, parameters, options, router))
    if plan is None or x_TD.shape[0] > plan.ranges[-1].last:
        return _grouped.forward_routed(x_TD, routing, parameters, options, router)
    size = x_TD.shape[0], router.top_k
    # They take the place of the workspace's.
    ids_TK = x_TD.new_empty(size, dtype=torch.int32)
    weights_TK = x_TD.new_empty(size, dtype=torch.float32)
    chosen = {"expert_ids": ids_TK, "expert_weights": weights_TK}
    y_TD = _launched(plan, x_TD, readable(x_TD, routing, parameters) | chosen)
    return y_TD, ids_TK, weights_TK


def _launched(plan: ForwardPlan, x_TD: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    from custom_ops.kernels import launch as launcher

    tensors["y"] = y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    # By its index, since PyTorch takes a microsecond to find that of a device.
    with torch.cuda.device(x_TD.get_device()):
        launcher.launch(plan, tensors)
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
        with torch.cuda.device(x_TD.get_device()):
            launch_kernel(spec, {"x": aligned(x_TD), "weight": aligned(weight_D), "y": y_TD})
    return y_TD


def layer_fields(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> dict[str, Any]:
    """Returns the arguments of :func:`layer_of` for a call, by which its layers are cached."""
    w1_EFD, b1_EF, w2_EDH, b2_ED = parameters
    experts, width, hidden = w2_EDH.shape
    routing_dtype, weights_dtype, *_ = [None if t is None else t.dtype for t in routing.values()]
    selection_bias = routing.get("selection_bias")
    experts_dtype = w1_EFD.dtype
    # Asking costs a microsecond, and other dtypes have no TF32.
    tf32 = experts_dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "tf32": tf32,
        "experts_dtype": experts_dtype,
        "packed": _packed_format(parameters) if isinstance(parameters, PackedExperts) else None,
        "transposed": (_is_transposed(w1_EFD), _is_transposed(w2_EDH)),
        "experts": experts,
        "width": width,
        "hidden": hidden,
        "top_k": router.top_k if router else routing["expert_ids"].shape[1],
        "tokens_dtype": x_TD.dtype,
        "options": options,
        "router": router,
        "routing_dtype": routing_dtype,
        "weights_dtype": weights_dtype,
        "selection_dtype": None if selection_bias is None else selection_bias.dtype,
        "b1": b1_EF is not None,
        "b2": b2_ED is not None,
    }


def layer_of(
    *,
    tf32: bool,
    experts_dtype: torch.dtype,
    transposed: tuple[bool, bool],
    packed: WeightFormat | None = None,
    resident_experts: int | None = None,
    **fields: Any,
) -> Layer:
    """Returns the layer of a call.

    Raises:
        ValueError: If there are no kernels for the layer.
        TypeError: If there are none for a dtype.
    """
    from custom_ops.kernels.layer import Layer

    layout = WeightLayout(*transposed)
    weight_format = packed or plain_format(experts_dtype)
    shape = LayerShape(weight_format=weight_format, layout=layout, **fields)
    return Layer(shape, tf32, resident_experts)


def _packed_format(parameters: PackedExperts) -> WeightFormat:
    first, second = (
        weight.encoding.blocks(weight.shape[1], weight.shape[2], weight.packed.scales.shape[1:])
        for weight in (parameters.w1, parameters.w2)
    )
    block = next(block for block in first if block in second)
    zero_points_block = None
    if parameters.w1.packed.zero_points is not None:
        zero_points_block = WHOLE_MATRIX if _has_one_zero_point(parameters) else block
    return packed_format(
        parameters.w1.encoding.name,
        parameters.w1.dtype,
        parameters.w1.packed.scales.dtype,
        block,
        zero_points_block=zero_points_block,
    )


def _has_one_zero_point(parameters: PackedExperts) -> bool:
    """Whether each expert's matrix has one, in both weights."""
    points = (parameters.w1.packed.zero_points, parameters.w2.packed.zero_points)
    return all(tensor is not None and tensor.shape[1:] == (1, 1) for tensor in points)


def readable(
    x_TD: Tensor, routing: Mapping[str, Any], parameters: ExpertWeights | PackedExperts
) -> dict[str, Tensor]:
    """Returns a launch's inputs by name; a weight that is transposed as the memory has it."""
    _, b1_EF, _, b2_ED = parameters
    tensors = {"x": x_TD, **routing, **stored(parameters), "b1": b1_EF, "b2": b2_ED}
    return {name: aligned(tensor) for name, tensor in tensors.items() if tensor is not None}


def stored(parameters: ExpertWeights | PackedExperts) -> dict[str, Tensor]:
    """Returns the tensors that store w1 and w2, by name; one that is transposed as it lies."""
    w1_EFD, _, w2_EDH, _ = parameters
    tensors: dict[str, Tensor] = {}
    for name, weight in (("w1", w1_EFD), ("w2", w2_EDH)):
        if isinstance(weight, Tensor):
            tensors[name] = _as_it_lies(weight)
            continue
        for suffix, tensor in zip(STORED_SUFFIXES, weight.packed, strict=True):
            if tensor is not None:
                tensors[name + suffix] = tensor
    return tensors


def aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor as the kernels read it: contiguous, from a multiple of 16 bytes on."""
    contiguous = tensor.contiguous()
    return contiguous if contiguous.data_ptr() % 16 == 0 else contiguous.clone()


def _is_transposed(weight: Tensor | PackedMatrices) -> bool:
    return isinstance(weight, Tensor) and _as_it_lies(weight) is not weight


def _as_it_lies(weight: Tensor) -> Tensor:
    if weight.is_contiguous():
        return weight
    transposed = weight.mT
    return transposed if transposed.is_contiguous() else weight


@lru_cache(maxsize=1024)
def _plan(device: torch.device, **fields: Any) -> ForwardPlan | None:
    """Returns the plan of a layer, given its fields, on a device; None where it has no kernels."""
    known = layer_on(device, **fields)
    if known is None:
        return None

    from custom_ops.kernels.plan import plan

    return plan(*known)


def layer_on(device: torch.device, **fields: Any) -> tuple[Layer, Architecture] | None:
    """Returns a layer and where it runs, or None where it has no kernels."""
    if torch.float64 in fields.values():
        return None

    from custom_ops.kernels.architectures import nearest_architecture
    from custom_ops.kernels.layer import NoKernelsError

    try:
        layer = layer_of(**fields)
    except NoKernelsError:
        return None
    return layer, nearest_architecture(*torch.cuda.get_device_capability(device))
