"""Decompositions of the operators that compute gradients, against those operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_moe.tracing import gradients
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS

OWN = {
    target: each
    for target, each in DECOMPOSITIONS.items()
    if any(part in str(target) for part in ("backward", "native_layer_norm"))
}


class Compared(TorchDispatchMode):
    """Compares each operator of :data:`OWN` that runs with its decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in OWN:
            self.seen.add(func)
            ours = _pytree.tree_leaves(OWN[func].function(*args, **(kwargs or {})))
            theirs = _pytree.tree_leaves(result)
            assert [each is None for each in ours] == [each is None for each in theirs]
            torch.testing.assert_close(
                [each for each in ours if each is not None],
                [each for each in theirs if each is not None],
            )
        return result


def image(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, dtype=torch.float64, requires_grad=True)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    return image(2, 3, 5, 8), image(2, 3, 5, 8), image(2, 3, 5, 8)


def convolution(dims: int, size: int = 11, **options: Any) -> Callable[[], Tensor]:
    module = getattr(nn, f"Conv{dims}d")
    return lambda: module(4, 6, **options).double()(image(3, 4, *range(size, size + dims)))


def transposed(dims: int, **options: Any) -> Callable[[], Tensor]:
    module = getattr(nn, f"ConvTranspose{dims}d")
    return lambda: module(4, 6, **options).double()(image(3, 4, *range(5, 5 + dims)))


CASES: dict[str, Callable[[], Tensor]] = {
    "conv1d": convolution(1, kernel_size=3),
    "conv2d": convolution(2, kernel_size=3, padding=1),
    "conv2d strided": convolution(2, kernel_size=(3, 5), stride=(2, 3), padding=(0, 2)),
    "conv2d dilated": convolution(2, kernel_size=3, stride=2, dilation=(2, 3), bias=False),
    "conv2d grouped": convolution(2, kernel_size=3, stride=3, padding=1, groups=2),
    "conv2d point": convolution(2, kernel_size=1, stride=4),
    "conv3d": convolution(3, size=6, kernel_size=3, stride=2, padding=1),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, stride=2, groups=4).double()(image(2, 4, 8, 9)),
    "transposed1d": transposed(1, kernel_size=4, stride=2),
    "transposed2d": transposed(2, kernel_size=3, stride=3, padding=1, output_padding=2, groups=2),
    "transposed2d dilated": transposed(2, kernel_size=3, dilation=2),
    "max": lambda: F.max_pool2d(image(2, 3, 9, 8), 3, 2, 1),
    "max dilated": lambda: F.max_pool2d(image(3, 9, 8), 2, 1, dilation=2, ceil_mode=True),
    "max3d": lambda: F.max_pool3d(image(2, 3, 5, 6, 7), 2),
    "adaptive max": lambda: F.adaptive_max_pool2d(image(2, 3, 9, 8), (4, 3)),
    "adaptive max3d": lambda: F.adaptive_max_pool3d(image(2, 3, 5, 6, 7), 2),
    "avg": lambda: F.avg_pool2d(image(2, 3, 9, 8), 3, 2, 1),
    "avg not padding": lambda: F.avg_pool2d(image(2, 3, 9, 8), 3, 2, 1, count_include_pad=False),
    "avg ceil": lambda: F.avg_pool2d(image(3, 10, 8), (3, 2), (3, 3), 1, ceil_mode=True),
    "avg divided": lambda: F.avg_pool2d(image(2, 3, 9, 8), 2, divisor_override=7),
    "avg3d": lambda: F.avg_pool3d(image(2, 3, 5, 6, 7), 3, 2, 1),
    "adaptive avg": lambda: F.adaptive_avg_pool2d(image(2, 3, 9, 8), (4, 3)),
    "adaptive avg3d": lambda: F.adaptive_avg_pool3d(image(2, 3, 5, 6, 7), (2, 3, 4)),
    "nearest1d": lambda: F.interpolate(image(2, 3, 7), 10),
    "nearest2d": lambda: F.interpolate(image(2, 3, 7, 6), scale_factor=(1.7, 0.6)),
    "nearest3d": lambda: F.interpolate(image(2, 3, 3, 4, 5), (5, 6, 3)),
    "exact": lambda: F.interpolate(image(2, 3, 7, 6), (10, 4), mode="nearest-exact"),
    "exact1d": lambda: F.interpolate(image(2, 3, 7), 5, mode="nearest-exact"),
    "exact3d": lambda: F.interpolate(image(2, 3, 3, 4, 5), 7, mode="nearest-exact"),
    "linear": lambda: F.interpolate(image(2, 3, 7), 12, mode="linear"),
    "bilinear": lambda: F.interpolate(image(2, 3, 7, 6), (12, 4), mode="bilinear"),
    "bilinear scale": lambda: F.interpolate(
        image(2, 3, 7, 6), scale_factor=1.7, mode="bilinear", recompute_scale_factor=False
    ),
    "bilinear corners": lambda: F.interpolate(
        image(2, 3, 7, 6), (12, 4), mode="bilinear", align_corners=True
    ),
    "trilinear": lambda: F.interpolate(image(2, 3, 3, 4, 5), (5, 6, 3), mode="trilinear"),
    "bicubic": lambda: F.interpolate(image(2, 3, 7, 6), (12, 4), mode="bicubic"),
    "bicubic corners": lambda: F.interpolate(
        image(2, 3, 7, 6), (12, 9), mode="bicubic", align_corners=True
    ),
    "pad1d": lambda: F.pad(image(2, 3, 7), (2, 3), mode="replicate"),
    "pad2d": lambda: F.pad(image(2, 3, 7, 6), (2, 0, 1, 3), mode="replicate"),
    "pad3d": lambda: F.pad(image(2, 3, 4, 5, 6), (2, 0, 1, 3, 4, 1), mode="replicate"),
    "attention": lambda: F.scaled_dot_product_attention(*heads()),
    "attention causal": lambda: F.scaled_dot_product_attention(
        *heads(), is_causal=True, scale=0.3
    ),
    "attention masked": lambda: F.scaled_dot_product_attention(
        *heads(), attn_mask=image(5, 5).detach()
    ),
    "layer norm": lambda: F.layer_norm(image(3, 4, 5), (4, 5)),
    "layer norm weighted": lambda: F.layer_norm(image(3, 4), (4,), image(4), image(4)),
    "unfold": lambda: image(2, 9, 3).unfold(1, 4, 2),
    "unfold apart": lambda: image(2, 3, 9).unfold(-1, 2, 3),
    "weight norm": lambda: torch._weight_norm(image(4, 3, 2), image(4, 1, 1)),
    "weight norm last": lambda: torch._weight_norm(image(4, 3), image(1, 3), 1),
    "distances": lambda: torch.cdist(image(2, 4, 3), image(2, 5, 3)[:, 1:] + 1),
    "distances 1": lambda: torch.cdist(image(4, 3), image(5, 3), p=1),
    "distances 3": lambda: torch.cdist(image(4, 3), image(5, 3), p=3),
    "distances of most": lambda: torch.cdist(image(4, 3), image(5, 3), p=math.inf),
    "hardshrink": lambda: F.hardshrink(image(50), 0.7),
    "softshrink": lambda: F.softshrink(image(50), 0.7),
}  # fmt: skip


def run(name: str) -> set[Any]:
    torch.manual_seed(0)
    with Compared() as compared:
        y = CASES[name]()
        y.backward(torch.randn(y.shape, dtype=y.dtype))
    return compared.seen


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_pytorch(name):
    assert run(name)


def test_every_decomposition_is_tested():
    assert set().union(*map(run, CASES)) == OWN.keys()


def test_dropout_of_attention_is_refused():
    x = image(1, 1, 2, 4).detach()
    with pytest.raises(ValueError, match="dropout must be 0"):
        gradients._attention(x, x, x, x, x, x[..., 0], 0.1, False)
