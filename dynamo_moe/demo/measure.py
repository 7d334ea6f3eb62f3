"""Runs an exported file on real images in ONNX Runtime: its predictions and its time per image."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

Classifier = Callable[[Tensor], Tensor]
"""Images ``[B, C, H, W]`` to logits ``[B, classes]``."""


@dataclass(frozen=True)
class ImageComparison:
    """A classifier compared with its reference on the same images.

    Attributes:
        images: Number of images.
        accuracy: Fraction of images that the classifier gets right at every batch size.
        differing: Batch size -> number of images whose predicted class differs from the
            reference's.
        max_logit_difference: Largest absolute difference of a logit, over all batch sizes; NaN
            if any logit is NaN.
    """

    images: int
    accuracy: float
    differing: Mapping[int, int]
    max_logit_difference: float

    @property
    def worst(self) -> int:
        """Differing predictions at the batch size that has the most."""
        return max(self.differing.values())


def in_onnxruntime(path: Path) -> Classifier:
    """Returns the file as a classifier, on the CPU and on one thread.

    It uses one thread, as in training: the matrices are too small for more, and timings stay
    meaningful on a busy machine.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (graph_input,) = session.get_inputs()

    def classify(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {graph_input.name: images.numpy()})
        return torch.from_numpy(np.asarray(logits))

    return classify


def in_torch(model: nn.Module) -> Classifier:
    """Returns the model, which must be in evaluation mode, as a classifier without gradients."""

    @torch.no_grad()
    def classify(images: Tensor) -> Tensor:
        logits: Tensor = model(images)
        return logits

    return classify


def compare(
    classify: Classifier,
    reference: Tensor,
    images: Tensor,
    labels: Tensor,
    batch_sizes: Sequence[int],
) -> ImageComparison:
    """Classifies all images once per batch size; the last batch holds the rest.

    Args:
        classify: The classifier to compare with the reference.
        reference: Its logits ``[images, classes]``.
        images: ``[images, C, H, W]``.
        labels: True classes ``[images]``.
        batch_sizes: At least one.
    """
    expected = reference.argmax(dim=-1)
    right = torch.ones(len(images), dtype=torch.bool)
    differing, differences = {}, []
    for size in batch_sizes:
        logits = torch.cat([classify(batch) for batch in torch.split(images, size)])
        predicted = logits.argmax(dim=-1)
        differing[size] = int((predicted != expected).sum())
        right &= predicted == labels
        differences.append((logits.double() - reference.double()).abs().max())
    return ImageComparison(
        images=len(images),
        accuracy=float(right.double().mean()),
        differing=differing,
        # torch's maximum keeps a NaN; Python's drops it.
        max_logit_difference=float(torch.stack(differences).max()),
    )


def time_all(
    classifiers: Mapping[str, Classifier], images: Tensor, batch_size: int, rounds: int
) -> dict[str, float]:
    """Returns each classifier's median milliseconds per image.

    The classifiers take turns (A B A B ...), so that a slow moment of the machine affects all.
    """
    batches = [batch for batch in torch.split(images, batch_size) if len(batch) == batch_size]
    for classify in classifiers.values():
        classify(batches[0])
    times: dict[str, list[float]] = {name: [] for name in classifiers}
    for turn in range(rounds):
        batch = batches[turn % len(batches)]
        for name, classify in classifiers.items():
            start = time.perf_counter()
            classify(batch)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(ms) / batch_size for name, ms in times.items()}
