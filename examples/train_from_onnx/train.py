"""Trains a model from its training graph, in ONNX Runtime and NumPy: SGD with momentum.

Neither PyTorch nor dynamo_moe is here: the graph has the loss and the gradients.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH_SIZE = 64
PEAK_RATE = 0.1
MOMENTUM = 0.9
# A longer gradient is scaled down to this norm: the first ones of a transformer are long.
MAX_NORM = 1.0

Arrays = dict[str, np.ndarray]


class Trainer:
    """A training graph with its parameters, buffers and the optimizer's momentum.

    Args:
        path: The graph, as ``export_training`` writes it.
        state: Parameters and buffers by their names.
    """

    def __init__(self, path: Path, state: Arrays) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(path, options)
        self._names = [value.name for value in self._session.get_outputs()]
        given = {value.name for value in self._session.get_inputs()}
        self.state = {name: value for name, value in state.items() if name in given}
        self._momentum = {
            name: np.zeros_like(value)
            for name, value in self.state.items()
            if f"{name}.grad" in self._names
        }

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> float:
        """Changes the parameters by one step, and returns the loss before it."""
        found = self._run(images, labels, self._names)
        norm = math.sqrt(sum(float(np.square(found[f"{n}.grad"]).sum()) for n in self._momentum))
        scale = np.float32(min(1.0, MAX_NORM / max(norm, 1e-12)))
        for name, before in self._momentum.items():
            momentum = np.float32(MOMENTUM) * before + scale * found[f"{name}.grad"]
            self._momentum[name] = momentum
            self.state[name] = self.state[name] - np.float32(rate) * momentum
        self.state |= {
            name.removesuffix(".new"): value
            for name, value in found.items()
            if name.endswith(".new")
        }
        return float(found["loss"])

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Returns the fraction of images that the model classifies rightly."""
        return int(self._run(images, labels, ["correct"])["correct"]) / len(labels)

    def _run(self, images: np.ndarray, labels: np.ndarray, names: list[str]) -> Arrays:
        feeds = {"images": images, "labels": labels, **self.state}
        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        return dict(zip(names, self._session.run(names, feeds, options), strict=True))


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns images ``[N, 1, 8, 8]`` in [-1, 1] and labels ``[N]``: for training, then to test."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 1, 8, 8) / 8 - 1
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0
    )
    return train_x, train_y, test_x, test_y


def batches(
    images: np.ndarray, labels: np.ndarray, random: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the images once in random order, each shifted by up to a pixel in both directions."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    ends = range(BATCH_SIZE, len(images), BATCH_SIZE)
    for batch in np.split(random.permutation(len(images)), ends):
        row, column = random.integers(0, 3, (2, len(batch)))
        yield windows[batch, :, row, column], labels[batch]


def rate_at(progress: float) -> float:
    """Returns the learning rate: a linear warm-up, then a cosine to 0; progress is from 0 to 1."""
    warmup = 0.1
    if progress < warmup:
        return PEAK_RATE * progress / warmup
    return PEAK_RATE * (0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def train(folder: Path, epochs: int, *, quiet: bool = False) -> float:
    """Trains ``digits.onnx`` from ``digits.npz``; returns the accuracy on the test images."""
    train_x, train_y, test_x, test_y = digits()
    trainer = Trainer(folder / "digits.onnx", dict(np.load(folder / "digits.npz")))
    random = np.random.default_rng(0)
    steps, step, began = epochs * math.ceil(len(train_x) / BATCH_SIZE), 0, time.perf_counter()
    for epoch in range(epochs):
        losses = []
        for images, labels in batches(train_x, train_y, random):
            losses.append(trainer.step(images, labels, rate_at(step / steps)))
            step += 1
        if not quiet:
            print(
                f"epoch {epoch + 1:2} of {epochs}: loss {np.mean(losses):.3f}, "
                f"{trainer.accuracy(test_x, test_y):.1%} of the test images right "
                f"({time.perf_counter() - began:.0f} s)"
            )
    np.savez(folder / "trained.npz", **trainer.state)
    return trainer.accuracy(test_x, test_y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with digits.onnx and digits.npz")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--minimum", type=float, default=0.9, help="accuracy, for exit code 0")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the result alone")
    given = parser.parse_args()
    reached = train(given.folder, given.epochs, quiet=given.quiet)
    print(f"{reached:.1%} of the test images are right after {given.epochs} epochs")
    sys.exit(reached < given.minimum)
