"""Trains a `SwinMoE` on scikit-learn's digits: 1797 real 8x8 images of handwritten digits."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import track
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor, nn

from dynamo_moe.evaluation import one_thread
from dynamo_moe.models import DroplessMoEMlp

_BATCH_SIZE = 64
_PEAK_LEARNING_RATE = 3e-3
_WARMUP_FRACTION = 0.1
_WEIGHT_DECAY = 0.05
_BALANCE_WEIGHT = 0.01
_SMOOTHING = 0.1
_MAX_SHIFT = 1


@dataclass(frozen=True)
class Split:
    """Images `[B, 1, 8, 8]`, float32 in [-1, 1], and their labels `[B]`, int64 in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        test_accuracy: Fraction of the test images that are classified correctly.
        seconds: Wall time of the training.
        losses: Mean loss of each epoch.
        expert_usage: For each MoE layer, by its name in the model, the fraction of the choices
            that falls on each expert, over the test images.
    """

    test_accuracy: float
    seconds: float
    losses: tuple[float, ...]
    expert_usage: dict[str, tuple[float, ...]]


def load_digits_split(seed: int = 0) -> Split:
    """Loads the digits: 80 % for training and 20 % for testing, with equal shares of each class."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )

    def to_images(pixels: object) -> Tensor:
        return torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1

    return Split(
        to_images(train_x), torch.as_tensor(train_y), to_images(test_x), torch.as_tensor(test_y)
    )


def train(
    model: nn.Module, split: Split, *, epochs: int = 40, seed: int = 0, quiet: bool = False
) -> TrainingResult:
    """Trains a classifier of `[B, 1, 8, 8]` images in place and leaves it in evaluation mode.

    On one machine, the result depends only on the model's initial weights and the seed, which
    decides the order of the images and their shifts. Training runs on one thread, whatever torch's
    setting: the matrices are too small for more, and on two busy cores, two threads waiting for
    each other made a step 11 times slower (336 ms instead of 30 ms).

    Raises:
        ValueError: `epochs` is less than 1.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    start = time.perf_counter()
    with one_thread():
        losses = _fit(model, split, epochs, seed, quiet)
        return TrainingResult(
            test_accuracy=accuracy(model, split.test_images, split.test_labels),
            seconds=time.perf_counter() - start,
            losses=losses,
            expert_usage=expert_usage(model, split.test_images),
        )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Fraction of the images that the model classifies correctly."""
    return float((model(images).argmax(dim=-1) == labels).double().mean())


@torch.no_grad()
def expert_usage(model: nn.Module, images: Tensor) -> dict[str, tuple[float, ...]]:
    """For each MoE layer, by its name, the fraction of the choices that falls on each expert."""
    with _moe_inputs(model) as seen:
        model(images)
    return {name: tuple(layer.expert_usage(x).tolist()) for name, (layer, x) in seen.items()}


def _fit(model: nn.Module, split: Split, epochs: int, seed: int, quiet: bool) -> tuple[float, ...]:
    generator = torch.Generator().manual_seed(seed)
    shifted = _shifted(split.train_images)
    count = len(split.train_images)
    steps = epochs * math.ceil(count / _BATCH_SIZE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / steps))
    losses: list[float] = []
    model.train()
    for _ in track(range(epochs), "Training", disable=quiet):
        total = 0.0
        for batch in torch.split(torch.randperm(count, generator=generator), _BATCH_SIZE):
            shift = torch.randint(len(shifted), batch.shape, generator=generator)
            loss = _loss(model, shifted[shift, batch], split.train_labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        losses.append(total / count)
    model.eval()
    return tuple(losses)


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with _moe_inputs(model) as seen:
        logits = model(images)
    balance = sum(layer.load_balancing_loss(x) for layer, x in seen.values())
    return F.cross_entropy(logits, labels, label_smoothing=_SMOOTHING) + _BALANCE_WEIGHT * balance


@contextmanager
def _moe_inputs(model: nn.Module) -> Iterator[dict[str, tuple[DroplessMoEMlp, Tensor]]]:
    """Collects, by layer name, the input of every MoE layer that runs inside the ``with`` block."""
    seen: dict[str, tuple[DroplessMoEMlp, Tensor]] = {}
    names = {m: name for name, m in model.named_modules() if isinstance(m, DroplessMoEMlp)}

    def keep(layer: DroplessMoEMlp, args: tuple[Tensor]) -> None:
        seen[names[layer]] = (layer, args[0])

    handles = [layer.register_forward_pre_hook(keep) for layer in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rate(progress: float) -> float:
    """Linear warm-up, then a cosine to 0; `progress` runs from 0 to 1."""
    if progress < _WARMUP_FRACTION:
        return progress / _WARMUP_FRACTION
    return 0.5 + 0.5 * math.cos(math.pi * (progress - _WARMUP_FRACTION) / (1 - _WARMUP_FRACTION))


def _shifted(images: Tensor) -> Tensor:
    """All shifts by up to `_MAX_SHIFT` pixels, filled with background: `[9, B, 1, 8, 8]`."""
    size, offsets = images.shape[-1], range(2 * _MAX_SHIFT + 1)
    padded = F.pad(images, [_MAX_SHIFT] * 4, value=-1.0)
    return torch.stack(
        [padded[..., row : row + size, col : col + size] for row in offsets for col in offsets]
    )
