"""``torch.ops.moe.rms_norm``: root mean square normalisation over the last dimension.

The formula is that of Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Models
differ in where they round to half precision, and Gemma stores its weight less one.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from custom_ops import _cuda
from custom_ops._checks import check_rms_norm
from custom_ops._library import LIBRARY
from custom_ops.dtypes import accumulation_dtype
from custom_ops.tangents import check_no_tangents

LIBRARY.define(
    "rms_norm(Tensor x, Tensor weight, float eps=1e-6, *, "
    "bool weight_plus_one=False, bool round_before_weight=False) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_plus_one: bool = False,
    round_before_weight: bool = False,
) -> Tensor:
    """Divides each token by its root mean square, and multiplies by the weight.

    ``x / sqrt(mean(x²) + eps) * weight``, all in float32, or float64 where ``x`` is float64, and
    rounded to x's dtype at the end. Autocast changes nothing about it.

    Args:
        x: Tokens ``[..., D]``; float32, float16, bfloat16 or float64.
        weight: ``[D]``, floating.
        eps: Added to the mean of the squares, at least 0.
        weight_plus_one: Multiply by ``1 + weight``, as Gemma does.
        round_before_weight: Round to x's dtype before the multiplication too, as Llama does. A
            matter of half precision alone.

    Returns:
        ``[..., D]`` in x's dtype, contiguous.

    Raises:
        ValueError: If a shape, a device or ``eps`` does not fit.
        TypeError: If a dtype is not supported.
        NotImplementedError: If forward-mode derivatives are taken, as in ``torch.func.jvp``.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    check_no_tangents(x, weight)
    result: Tensor = torch.ops.moe.rms_norm(
        x, weight, eps, weight_plus_one=weight_plus_one, round_before_weight=round_before_weight
    )
    return result


@torch.library.register_fake("moe::rms_norm", lib=LIBRARY)
def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float = 1e-6, **options: bool) -> Tensor:
    check_rms_norm(x, weight, eps)
    return x.new_empty(x.shape)


@torch.library.impl(LIBRARY, "rms_norm", "CPU")
@torch.library.impl(LIBRARY, "rms_norm", "CUDA")
def _rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_plus_one: bool = False,
    round_before_weight: bool = False,
) -> Tensor:
    check_rms_norm(x, weight, eps)
    # There are kernels for all but float64.
    if x.is_cuda and torch.float64 not in (x.dtype, weight.dtype):
        y_TD = _cuda.rms_norm_forward(
            x.reshape(-1, x.shape[-1]), weight, eps, weight_plus_one, round_before_weight
        )
        return y_TD.view(x.shape)
    wide = accumulation_dtype(x)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        normed = normed.to(x.dtype).to(wide)
    return (normed * _factor(weight, wide, weight_plus_one)).to(x.dtype).contiguous()


def _factor(weight: Tensor, wide: torch.dtype, plus_one: bool) -> Tensor:
    return weight.to(wide) + 1 if plus_one else weight.to(wide)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    # The dispatcher leaves out arguments that equal the schema's defaults.
    x, weight, *rest = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = rest[0] if rest else 1e-6
    ctx.plus_one = keyword_only_inputs.get("weight_plus_one", False)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``n * weight``, where ``n = x * rsqrt(mean(x²) + eps)``, as if unrounded."""
    x, weight = ctx.saved_tensors
    with torch.autocast(x.device.type, enabled=False):
        wide = accumulation_dtype(x)
        scale = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + ctx.eps)
        normed, dy = x.to(wide) * scale, dy.to(wide)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dnormed = dy * _factor(weight, wide, ctx.plus_one)
            along = (dnormed * normed).mean(-1, keepdim=True)
            dx = (scale * (dnormed - normed * along)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = (dy * normed).reshape(-1, x.shape[-1])
            dweight = rows.sum(0).to(weight.dtype)
    return dx, dweight, None


torch.library.register_autograd(
    "moe::rms_norm", _backward, setup_context=_setup_context, lib=LIBRARY
)
