"""How far the outputs of a file are from those of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# An axis along which there are fewer elements has no RMS of its own: some are small by chance.
_FEWEST = 8
# Parts of an output that are smaller than this share of it count as if they were as large: what
# float32 rounds in the large parts reaches them, by a mean, a norm or a softmax.
_SMALLEST_SHARE = 0.01


def worst_errors(
    what: str, results: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, float]:
    """Returns the largest of the outputs' errors: of the worst element, and the RMS.

    An element's error is relative to the RMS of its row or of its column, the smaller; that of the
    errors to the RMS of the output. A complex number is a pair of real ones in a file. Integers and
    booleans are equal, or the error is infinite; so are infinities and NaN.

    Args:
        what: Whose the results are, for messages.
        results: The outputs.
        expected: Those of the model.

    Raises:
        ValueError: If the outputs are not as many, or of other shapes.
    """
    if not expected:
        raise ValueError("the model returns no tensor: nothing would be verified")
    if len(results) != len(expected):
        raise ValueError(f"the {what} has {len(results)} outputs, the model {len(expected)}")
    errors = [_errors(result, wanted) for result, wanted in zip(results, expected, strict=True)]
    # Not Python's max, which loses a NaN that is not first.
    max_error, rms_error = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
    return max_error, rms_error


def _errors(result: Tensor, expected: Tensor) -> tuple[float, float]:
    if expected.is_complex():  # A file has pairs of real numbers.
        expected = torch.view_as_real(expected.resolve_conj())
    if result.shape != expected.shape:
        raise ValueError(
            f"the file returns {list(result.shape)} where the model returns {list(expected.shape)}"
        )
    floats = result.is_floating_point(), expected.is_floating_point()
    if not all(floats):
        same = result.dtype == expected.dtype and torch.equal(result, expected)
        return (0.0, 0.0) if same else (torch.inf, torch.inf)
    result, expected = result.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(result[~finite].nan_to_num(1.0), expected[~finite].nan_to_num(1.0)):
        return torch.inf, torch.inf
    if not finite.any():
        return 0.0, 0.0
    # What is infinite in both is equal, and says nothing of the others.
    difference = (result - expected).where(finite, 0.0)
    squares = expected.square().where(finite, 0.0)
    rms = squares.mean().sqrt().clamp_min(1e-30)
    rms_error = difference.square().mean().sqrt() / rms
    return float((difference.abs() / _scale(squares, rms)).max()), float(rms_error)


def _scale(squares: Tensor, rms: Tensor) -> Tensor:
    """Returns what each element's error is relative to."""
    scale = rms
    if squares.ndim:
        rows = squares.reshape(-1, squares.shape[-1])
        for axis in (0, 1):
            if rows.shape[axis] >= _FEWEST:
                of_axis = rows.mean(dim=axis, keepdim=True).sqrt().expand_as(rows)
                scale = torch.minimum(scale, of_axis.reshape_as(squares))
    return scale.clamp_min(_SMALLEST_SHARE * rms)
