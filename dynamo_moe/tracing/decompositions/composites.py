"""Decompositions of composites whose own code decides by sizes, or by values, as a trace runs it.

A trace has no values, and the results of a decision by a size are those of the example. So the
operators in ``COMPOSITES`` are computed by these functions in the trace already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_moe.private import tracer
from dynamo_moe.tracing.decompositions.table import decomposes

_aten = torch.ops.aten

COMPOSITES = (_aten.chunk.default, _aten.tensor_split.sections, _aten.cov.default)


def _is_symbolic(x: Tensor, parts: int, dim: int = 0) -> bool:
    """Whether a number of parts is asked for of a symbolic size."""
    takes = x.ndim > 0 and tracer.has_static_value(parts) and parts > 0
    return takes and not tracer.has_static_value(x.shape[dim])


def _has_all_chunks(x: Tensor, chunks: int, dim: int = 0) -> bool:
    """Whether a size is symbolic, and there are as many chunks as are asked for.

    Chunks of ``(size + chunks - 1) // chunks`` leave nothing for the last one at some sizes up to
    the square of ``chunks - 1``, and at none beyond.
    """
    if not _is_symbolic(x, chunks, dim):
        return False
    size = x.shape[dim]
    rest = size % chunks
    return (tracer.has_static_value(rest) and rest == 0) or size > (chunks - 1) ** 2


def _parts(x: Tensor, lengths: Sequence[int], dim: int) -> list[Tensor]:
    """Takes parts of these lengths, and the rest: the exporter may make a sequence of a split."""
    begins = [0, *itertools.accumulate(lengths)]
    rest = x.shape[dim] - begins[-1]
    return [x.narrow(dim, *part) for part in zip(begins, [*lengths, rest], strict=True)]


@decomposes(_aten.chunk.default, when=_has_all_chunks)
def _chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    return _parts(x, [(size + chunks - 1) // chunks] * (chunks - 1), dim)


@decomposes(_aten.tensor_split.sections, when=_is_symbolic)
def _tensor_split(x: Tensor, sections: int, dim: int = 0) -> list[Tensor]:
    """The first sections are those that are longer by one."""
    size = x.shape[dim]
    lengths = [(size + sections - 1 - number) // sections for number in range(sections - 1)]
    return _parts(x, lengths, dim)


def _takes_weights(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> bool:
    """Whether the call is one that PyTorch takes, but for the values of the weights."""
    observations = x.shape[-1] if x.ndim else 1
    weights = [weight for weight in (fweights, aweights) if weight is not None]
    return x.ndim <= 2 and all(w.ndim == 1 and w.shape[0] == observations for w in weights)


@decomposes(_aten.cov.default, when=_takes_weights)
def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """PyTorch warns of too few observations, for which it asks for a value."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    weights = torch.ones_like(rows[0], dtype=torch.int64) if fweights is None else fweights
    degrees = weights.sum() - correction
    if aweights is not None:
        weights = weights * aweights
        total = weights.sum()
        degrees = total - correction * (weights * aweights).sum() / total
    means = (rows * weights).sum(1, keepdim=True) / weights.sum()
    apart = rows - means
    return (apart @ (apart * weights).T.conj() / degrees.clamp(min=0)).squeeze()
