"""Decompositions of losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_moe.tracing.decompositions.table import decomposes

_NONE, _MEAN = 0, 1


def _is_beyond_onnx(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> bool:
    # ONNX's operator takes no single sample without a batch.
    return label_smoothing != 0 or target.is_floating_point() or logits.ndim == 1


@decomposes(torch.ops.aten.cross_entropy_loss.default, when=_is_beyond_onnx)
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The exporter leaves the smoothing out, and takes no probabilities as targets."""
    class_dim = 0 if logits.ndim == 1 else 1
    classes = logits.shape[class_dim]
    log_probabilities = F.log_softmax(logits, class_dim)
    scale = None
    if weight is not None:
        scale = weight.reshape([-1] + [1] * (logits.ndim - 1 - class_dim))
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / classes
        scaled = log_probabilities * target
        losses = -(scaled if scale is None else scaled * scale).sum(class_dim)
        # Its mean is over the samples, whatever the weights of their classes are.
        return (
            losses if reduction == _NONE else losses.mean() if reduction == _MEAN else losses.sum()
        )
    ignored = target == ignore_index
    known = target.masked_fill(ignored, 0)
    scaled = log_probabilities if scale is None else log_probabilities * scale
    smooth = -scaled.sum(class_dim)
    sharp = -scaled.gather(class_dim, known.unsqueeze(class_dim)).squeeze(class_dim)
    losses = sharp * (1 - label_smoothing) + smooth * (label_smoothing / classes)
    losses = losses.masked_fill(ignored, 0)
    if reduction == _NONE:
        return losses
    total = losses.sum()
    if reduction != _MEAN:
        return total
    counted = torch.ones_like(losses) if weight is None else weight[known]
    return total / counted.masked_fill(ignored, 0).sum()
