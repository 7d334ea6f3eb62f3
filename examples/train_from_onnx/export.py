"""Writes a Swin-MoE for handwritten digits as a training graph, and its first parameters."""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_moe
from dynamo_moe.models import swin_moe_digits


def loss(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Returns the loss, and how many images are right."""
    return {
        "loss": F.cross_entropy(logits, labels, label_smoothing=0.1),
        "correct": (logits.argmax(-1) == labels).sum(),
    }


def export(folder: Path, seed: int = 0) -> None:
    """Writes ``digits.onnx``, and ``digits.npz`` with parameters and buffers by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    # The model computes the same in training; a converted layer is one node in eval() alone.
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    example = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    dynamo_moe.export_training(model, loss, *example, folder / "digits.onnx")
    held = (*model.named_parameters(), *model.named_buffers())
    np.savez(folder / "digits.npz", **{name: tensor.detach().numpy() for name, tensor in held})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the parameters")
    given = parser.parse_args()
    export(given.folder, given.seed)
