"""PyTorch's own samples of its operators, as one-operator models."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="PyTorch's samples need it")

from operator_samples import DTYPES, models, names, ours, outcome, stock

# Operators that vision and language models use: those that PyTorch's exporter cannot translate, or
# translates incorrectly for some arguments, and related ones.
COMMON = (
    "amax",
    "aminmax",
    "atan2",
    "atleast_1d",
    "bucketize",
    "cdist",
    "copysign",
    "corrcoef",
    "cov",
    "cumprod",
    "cumsum",
    "erfinv",
    "fft.fft2",
    "fft.irfft2",
    "i0",
    "index_add",
    "index_put",
    "masked.std",
    "masked_scatter",
    "masked_select",
    "mode",
    "nanmedian",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_max_pool1d",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.avg_pool2d",
    "nn.functional.avg_pool3d",
    "nn.functional.batch_norm",
    "nn.functional.conv_transpose2d",
    "nn.functional.embedding_bag",
    "nn.functional.grid_sample",
    "nn.functional.interpolate.bicubic",
    "nn.functional.interpolate.bilinear",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.pad.circular",
    "nn.functional.pad.replicate_negative",
    "nn.functional.pdist",
    "nn.functional.pixel_shuffle",
    "nn.functional.scaled_dot_product_attention",
    "nonzero",
    "repeat_interleave",
    "roll",
    "scatter_reduce.amax",
    "scatter_reduce.mean",
    "searchsorted",
    "squeeze.multiple",
    "tensor_split",
    "true_divide",
    "unique",
    "_upsample_bilinear2d_aa",
)

# Valid files whose results differ from PyTorch's, or that give none. Those of torch.onnx.export are
# no better.
_ONE = "of one element, where PyTorch's is NaN"
_NO_ROW = "without a row, where ONNX Runtime's fused product fails"
WRONG = {
    "__rpow__": "of integers beyond what float32 holds",
    "_native_batch_norm_legit": "changes the running statistics that it is given",
    "addmm": "of integers, and of empty matrices, where ONNX Runtime leaves out beta",
    "addmm.decomposed": "of integers, which ONNX Runtime has no Gemm for",
    "nn.functional.adaptive_avg_pool3d": _NO_ROW,
    "nn.functional.linear_cross_entropy": "by a Reshape that ONNX Runtime refuses",
    "nn.functional.pixel_shuffle": "of integers, which ONNX Runtime has no DepthToSpace for",
    "mode": "of long rows, where PyTorch gives another place of the number",
    "special.log_ndtr": "beyond where float32 holds the integral",
    "std": _ONE,
    "std.unbiased": _ONE,
    "std_mean": _ONE,
    "std_mean.unbiased": _ONE,
    "topk": "of equal values, of which another is chosen",
    "var": _ONE,
    "var.unbiased": _ONE,
    "var_mean": _ONE,
    "var_mean.unbiased": _ONE,
}


def check(name: str, dtype: str) -> None:
    for number, model, expected in models(name, dtype):
        result, why = outcome(ours, model, expected)
        if result != "right":
            assert outcome(stock, model, expected)[0] != "right", f"sample {number}: {why}"
            assert result == "refused" or name in WRONG, f"sample {number}: {why}"


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.first(25)
def test_common_operators(name: str) -> None:
    for number, model, expected in models(name, "float32", count=2):
        result, why = outcome(ours, model, expected)
        assert result == "right", f"sample {number}: {why}"


def test_the_other_exporter_is_asked() -> None:
    for _, model, expected in models("cos", "float32", count=1):
        assert outcome(stock, model, expected) == ("right", "")


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for dtype in DTYPES for name in names(dtype)]
)
def test_at_least_as_right_as_the_other_exporter(name: str, dtype: str) -> None:
    check(name, dtype)
