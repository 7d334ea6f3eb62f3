"""Records where the routers of small trained models send the bytes of a text.

    python -m benchmarks.residency.record

One model for each shape that is simulated, with that shape's experts, top-k and router, a width of
64 and two layers. They learn from the documentation of Python (the standard library's
``pydoc_data``), and read scikit-learn's descriptions of its data sets.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import conditions, table
from benchmarks.gpu.layers import SHAPES, Shape
from benchmarks.residency.language_model import ByteModel, choices, train
from benchmarks.residency.traces import ROUTING, SIMULATED, repeated

TOKENS = 4096


def training_text() -> bytes:
    """Python's documentation of its language."""
    return "\n".join(topics.values()).encode()


def recorded_text() -> bytes:
    """scikit-learn's descriptions of its data sets."""
    folder = files("sklearn.datasets.descr")
    pages = {page.name: page for page in folder.iterdir() if page.name.endswith(".rst")}
    return b"\n".join(pages[name].read_bytes() for name in sorted(pages))


def record(shape: Shape, *, steps: int, seconds: float, tokens: int) -> tuple[Any, dict[str, Any]]:
    """Trains a model; returns its routing, uint8 ``[layers, tokens, K]``, and what it learnt."""
    torch.manual_seed(0)
    model = ByteModel(shape.experts, shape.router)
    text = recorded_text()
    untrained, first_loss = choices(model, text, tokens)
    done, training_loss = train(model, training_text(), steps=steps, seconds=seconds)
    trained, loss = choices(model, text, tokens)
    return trained.numpy(), {
        "shape": shape.name,
        "steps": done,
        "bits per byte, training text": training_loss,
        "bits per byte": {"untrained": first_loss, "trained": loss},
        # Of the experts of a token, the share that the token before chose too.
        "repeated": {
            "uniform": shape.top_k / shape.experts,
            "untrained": repeated(untrained.numpy()),
            "trained": repeated(trained.numpy()),
        },
    }


def main() -> None:
    """Trains and records."""
    known = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known.add_argument("--output", type=Path, default=ROUTING, help="write routing to this file")
    known.add_argument("--steps", type=int, default=600, help="steps of training")
    known.add_argument("--seconds", type=float, default=240, help="most seconds of one training")
    known.add_argument("--tokens", type=int, default=TOKENS, help="tokens to record")
    given = known.parse_args()
    routing, rows = {}, []
    notes = conditions(["torch", "scikit-learn"]) | {"tokens": given.tokens, "models": []}
    for name in SIMULATED:
        routing[name], learnt = record(
            SHAPES[name], steps=given.steps, seconds=given.seconds, tokens=given.tokens
        )
        notes["models"].append(learnt)
        rows.append([name, *learnt["bits per byte"].values(), *learnt["repeated"].values()])
        print(*rows[-1])
        np.savez_compressed(given.output, notes=json.dumps(notes), **routing)
    columns = ["model", "bits, untrained", "trained", "repeated, uniform", "untrained", "trained"]
    print(table("Recorded routing", columns, rows))


if __name__ == "__main__":
    main()
