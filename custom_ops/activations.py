"""The expert's non-linearity and its derivative, on the rows of one expert.

Legend: R rows, H hidden width, F = H, or 2H when gated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from custom_ops.options import GATINGS, ExpertOptions

_aten = torch.ops.aten

_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "quick_gelu": lambda z: torch.sigmoid(1.702 * z).mul_(z),
    "tanh": torch.tanh,
    "mish": torch.nn.functional.mish,
    "hardswish": torch.nn.functional.hardswish,
    "elu": torch.nn.functional.elu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "identity": torch.clone,  # Callers change the result in place.
}

_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda dh, z: _aten.gelu_backward(dh, z, approximate="tanh"),
    "silu": _aten.silu_backward,
    "relu": lambda dh, z: _aten.threshold_backward(dh, z, 0),
    "relu2": lambda dh, z: dh * 2 * torch.relu(z),
    "quick_gelu": lambda dh, z: _aten.silu_backward(dh, 1.702 * z),
    "tanh": lambda dh, z: _aten.tanh_backward(dh, torch.tanh(z)),
    "mish": _aten.mish_backward,
    "hardswish": _aten.hardswish_backward,
    "elu": lambda dh, z: _aten.elu_backward(dh, 1, 1, 1, False, z),
    "leaky_relu": lambda dh, z: _aten.leaky_relu_backward(dh, z, 0.01, False),
    "identity": lambda dh, z: dh,
}


def activate(z_RF: Tensor, options: ExpertOptions) -> Tensor:
    """Returns the hidden rows ``[R, H]`` of the pre-activations ``[R, F]``."""
    if not options.gated:
        return _FORWARD[options.activation](z_RF)
    gate_RH, up_RH = _split(z_RF, options)
    if options.activation not in GATINGS:
        return _FORWARD[options.activation](gate_RH).mul_(up_RH)
    if options.activation == "softcapped_silu":
        gate_c_RH = torch.tanh(gate_RH / options.alpha).mul_(options.alpha)
        up_c_RH = torch.tanh(up_RH / options.limit).mul_(options.limit)
        return torch.sigmoid(gate_RH).mul_(gate_c_RH).mul_(up_c_RH)
    gate_RH = gate_RH.clamp(max=options.limit)
    up_RH = up_RH.clamp(-options.limit, options.limit)
    alpha, shift = _clamped_form(options)
    return torch.sigmoid(gate_RH * alpha).mul_(gate_RH).mul_(up_RH + shift)


def activate_backward(dh_RH: Tensor, z_RF: Tensor, options: ExpertOptions) -> Tensor:
    """Returns the gradient of ``activate`` with respect to ``z_RF``, ``[R, F]``."""
    if not options.gated:
        return _BACKWARD[options.activation](dh_RH, z_RF)
    gate_RH, up_RH = _split(z_RF, options)
    dz_RF = torch.empty_like(z_RF)
    dgate_RH, dup_RH = _split(dz_RF, options)
    if options.activation not in GATINGS:
        dgate_RH.copy_(_BACKWARD[options.activation](dh_RH * up_RH, gate_RH.contiguous()))
        dup_RH.copy_(dh_RH * _FORWARD[options.activation](gate_RH))
        return dz_RF
    if options.activation == "softcapped_silu":
        gate_tanh_RH = torch.tanh(gate_RH / options.alpha)
        up_tanh_RH = torch.tanh(up_RH / options.limit)
        sigmoid_RH = torch.sigmoid(gate_RH)
        gate_c_RH = options.alpha * gate_tanh_RH
        slope_RH = 1 - gate_tanh_RH.square() + gate_c_RH * (1 - sigmoid_RH)
        dgate_RH.copy_(dh_RH * options.limit * up_tanh_RH * sigmoid_RH * slope_RH)
        dup_RH.copy_(dh_RH * gate_c_RH * sigmoid_RH * (1 - up_tanh_RH.square()))
        return dz_RF
    gate_c_RH = gate_RH.clamp(max=options.limit)
    up_c_RH = up_RH.clamp(-options.limit, options.limit)
    alpha, shift = _clamped_form(options)
    sigmoid_RH = torch.sigmoid(gate_c_RH * alpha)
    slope_RH = sigmoid_RH * (1 + alpha * gate_c_RH * (1 - sigmoid_RH))
    dgate_RH.copy_((gate_RH <= options.limit) * dh_RH * (up_c_RH + shift) * slope_RH)
    dup_RH.copy_((up_RH.abs() <= options.limit) * dh_RH * gate_c_RH * sigmoid_RH)
    return dz_RF


def _clamped_form(options: ExpertOptions) -> tuple[float, float]:
    """Returns a and s of ``gate * sigmoid(a * gate) * (up + s)``."""
    return (options.alpha, 1.0) if options.activation == "clamped_swiglu" else (1.0, 0.0)


def _split(z_RF: Tensor, options: ExpertOptions) -> tuple[Tensor, Tensor]:
    """Returns views of the gate and the up columns, ``[R, H]`` each."""
    if options.interleaved:
        return z_RF[:, ::2], z_RF[:, 1::2]
    gate_RH, up_RH = z_RF.chunk(2, dim=1)
    return gate_RH, up_RH
