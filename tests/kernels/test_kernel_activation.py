"""The non-linearity inside a kernel, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from custom_ops import ExpertOptions, activations
from custom_ops.kernels.activation import _gelu_for_halves, activate
from custom_ops.kernels.activation_gradient import activate_gradient
from custom_ops.options import POINTWISE


@triton.jit
def gelu_kernel(z_ptr, h_ptr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at)
    dtype: tl.constexpr = tl.float16 if ROUNDED else tl.float32
    tl.store(h_ptr + at, activate(z, z, False, "gelu", 0.0, 0.0, dtype))


@triton.jit
def halves_kernel(z_ptr, h_ptr, form: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(h_ptr + at, form(tl.load(z_ptr + at)))


@triton.jit
def both_kernel(z_ptr, h_ptr, dz_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at)
    tl.store(h_ptr + at, activate(z, z, False, ACTIVATION, 0.0, 0.0, tl.float32))
    dz, _ = activate_gradient(1.0, z, z, False, ACTIVATION, 0.0, 0.0)
    tl.store(dz_ptr + at, dz)


@triton.jit
def softcapped_kernel(
    gate_ptr, up_ptr, h_ptr, dgate_ptr, dup_ptr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at), tl.load(up_ptr + at)
    h = activate(gate, up, True, "softcapped_silu", ALPHA, LIMIT, tl.float32)
    tl.store(h_ptr + at, h)
    dgate, dup = activate_gradient(1.0, gate, up, True, "softcapped_silu", ALPHA, LIMIT)
    tl.store(dgate_ptr + at, dgate)
    tl.store(dup_ptr + at, dup)


def gelu_for_halves(z: Tensor) -> Tensor:
    h = torch.full_like(z, math.nan)
    halves_kernel[(len(z) // 1024,)](z, h, _gelu_for_halves, 1024)
    return h


def exact(z: Tensor) -> Tensor:
    z = z.double()
    return 0.5 * z * torch.special.erfc(-z / 2**0.5)


def test_gelu_for_halves_keeps_its_bounds():
    z = torch.linspace(-14, 14, 256 * 1024)
    error = (gelu_for_halves(z).double() - exact(z)).abs()
    assert error.max() < 3e-7
    near = (z.abs() < 6) & (z != 0)
    assert (error[near] / exact(z[near]).abs()).max() < 2e-4


def test_gelu_for_halves_at_the_ends():
    z = torch.tensor([math.inf, math.nan, 3e38, 1e-40, 0.0, -3e38, -math.inf, -1e-40] * 128)
    h = gelu_for_halves(z)[:8]
    assert h.isnan().tolist() == [False, True] + [False] * 6
    torch.testing.assert_close(
        h[[0, 2, 3, 4, 5, 6, 7]],
        torch.tensor([math.inf, 3e38, 5e-41, 0.0, 0.0, 0.0, -5e-41]),
        rtol=1e-6,
        atol=1e-45,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gelu_is_as_exact_as_its_dtype(dtype):
    z = torch.linspace(-5, 8, 16 * 1024)
    h = torch.full_like(z, math.nan, dtype=dtype)
    gelu_kernel[(16,)](z, h, dtype == torch.float16, 1024)
    # In float32, 1 + erf(z) is rounded before it scales z.
    rounded = exact(z) if dtype == torch.float16 else z
    bound = torch.finfo(dtype).eps * rounded.abs().clamp(min=2.0**-14)
    assert ((h.double() - exact(z)).abs() <= bound).all()


@pytest.mark.parametrize("activation", POINTWISE[5:])
def test_small_and_large_numbers(activation):
    sizes = torch.cat([torch.logspace(-9, 1, 384), torch.linspace(10, 100, 120), torch.zeros(8)])
    sizes[-8:-5] = torch.tensor([math.nan, 1e4, 1e38])
    z = torch.cat([sizes, -sizes])
    h, dz = torch.full_like(z, -7.0), torch.full_like(z, -7.0)
    both_kernel[(1,)](z, h, dz, activation, 1024)
    options, z = ExpertOptions(activation), z.double()[None]
    expected = activations.activate(z, options)
    bound = 1e-6 * expected.abs() + 5e-7 * z.abs().clamp(max=1)
    assert torch.equal(h.isnan(), z[0].isnan())
    assert ((h - expected).abs() <= bound)[~z.isnan()].all()
    slope = activations.activate_backward(torch.ones_like(z), z, options)
    assert ((dz - slope).abs() <= 2e-6)[~z.isnan()].all()


@pytest.mark.parametrize(("alpha", "limit"), [(4.0, 25.0), (1e-3, 1e3)])
def test_softcaps_of_small_and_large_numbers(alpha, limit):
    sizes = torch.cat([torch.logspace(-9, 2, 28), torch.tensor([0.0, 1e4, 1e30, math.inf])])
    numbers = torch.cat([sizes, -sizes])
    gate, up = torch.cartesian_prod(numbers, numbers).T.contiguous()
    h, dgate, dup = (torch.full_like(gate, -7.0) for _ in range(3))
    softcapped_kernel[(4,)](gate, up, h, dgate, dup, alpha, limit, 1024)
    options = ExpertOptions("softcapped_silu", gated=True, alpha=alpha, limit=limit)
    z = torch.cat([gate, up]).double()[None]
    expected = activations.activate(z, options)[0]
    # Below 2**-126, numbers of float32 lose their last digits.
    assert ((h - expected).abs() <= 5e-7 * expected.abs() + 2.0**-126).all()
    slopes = activations.activate_backward(torch.ones(1, len(gate)).double(), z, options)[0]
    found = torch.cat([dgate, dup])
    # 1 - tanh(v)^2 is rounded as 1 is.
    scales = torch.cat([torch.full_like(gate, limit), torch.full_like(up, alpha)])
    assert ((found - slopes).abs() <= 5e-7 * scales).all()
