"""Inverse transforms of real signals of any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.tracing.decompositions.fourier import _real_inverse


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("dims", [[1], [2, 1], [0, 1, 2]])
def test_the_signal_is_pytorchs(dims: list[int], length: int) -> None:
    torch.manual_seed(0)
    shape = [3, 5, 4]
    shape[dims[-1]] = length // 2 + 1
    half = torch.randn(shape, dtype=torch.complex64)
    for normalization in range(3):
        expected = torch.ops.aten._fft_c2r(half, dims, normalization, length)
        result = _real_inverse(half, dims, normalization, length)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Autocorrelation(nn.Module):
    """As in Autoformer (https://arxiv.org/abs/2106.13008, equation 6)."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        return torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[1], dim=1)


def test_a_file_takes_every_length(tmp_path: Path) -> None:
    model, shapes = Autocorrelation(), {"x": {1: "length"}}
    report = dynamo_moe.export(
        model, torch.randn(2, 6, 4), tmp_path / "m.onnx", dynamic_shapes=shapes
    )
    assert report.notes == ()
    inputs = [(torch.randn(2, length, 4),) for length in (6, 1, 7, 12)]
    assert dynamo_moe.verify(report.path, model, inputs).passed
