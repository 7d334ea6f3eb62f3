"""Products of one tensor in one module as one product: which are joined, and which are not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from torch import Tensor, nn

import dynamo_moe

D, BIASED = 16, {"MatMul": 1, "Add": 1, "Split": 1}


class Projections(nn.Module):
    """Products of one tensor, of different widths."""

    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(D, 8 * (number + 1), bias) for number, bias in enumerate(biases)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x).sin() for part in self.parts)


def joined(
    model: nn.Module, folder: Path, x: Tensor | None = None, **options: Any
) -> dict[str, int]:
    """Exports a model, checks its numbers, and returns its nodes by operator."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, D) if x is None else x
    report = dynamo_moe.export(
        model, (x,), folder / "m.onnx", **{"target": "onnxruntime"} | options
    )
    assert dynamo_moe.verify(report.path, model, inputs=[(x,)]).passed
    nodes = onnx.load(report.path).graph.node
    return dict(
        Counter(n.op_type for n in nodes if n.op_type in {"MatMul", "Gemm", "Add", "Split"})
    )


@pytest.mark.parametrize(
    ("biases", "counts"),
    [
        ((False,) * 3, {"MatMul": 1, "Split": 1}),
        ((True,) * 3, BIASED),
        ((True,) * 2, BIASED),
        ((True, True, False), {"MatMul": 2, "Add": 1, "Split": 1}),
        ((False,) * 2, {"MatMul": 2}),
        ((True, False), {"MatMul": 2, "Add": 1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products(biases: Any, counts: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(2, 3, D).to(dtype)
    assert joined(Projections(*biases).to(dtype), tmp_path, x) == counts


def test_names_say_what_a_weight_is_made_of(tmp_path: Path) -> None:
    joined(Projections(True, True), tmp_path)
    names = [tensor.name for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer]
    assert {"parts.0-1.weight", "parts.0-1.bias"} <= {*names}


@pytest.mark.parametrize(
    "options", [{"target": "plugin"}, {"target": "dense"}, {"fuse": False}, {"opset": 20}]
)
def test_other_files_keep_their_products(options: Any, tmp_path: Path) -> None:
    assert joined(Projections(*[False] * 3), tmp_path, **options)["MatMul"] == 3


class TwoModules(nn.Module):
    """Attention and what stands beside it read one tensor; their products stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Projections(False, False), Projections(False, False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.one(x), *self.other(x))


class OneWeightTwice(Projections):
    """The first part's weight and bias are used for another tensor, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*super().forward(x), self.parts[0](x.cos()))


class ResultAsItIs(Projections):
    """Products are results of the graph, before a bias is added."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        products = [x @ part.weight.T for part in self.parts]
        return (*products, *(y + part.bias for y, part in zip(products, self.parts, strict=True)))


class OwnInputs(Projections):
    """Each part has an input of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x + number) for number, part in enumerate(self.parts))


def test_near_misses(tmp_path: Path) -> None:
    assert joined(TwoModules(), tmp_path) == {"MatMul": 4}
    assert joined(OneWeightTwice(*[False] * 3), tmp_path)["MatMul"] == 4
    assert joined(OwnInputs(*[True] * 3), tmp_path)["MatMul"] == 3
    counts = joined(ResultAsItIs(*[True] * 3), tmp_path)
    assert counts == {"MatMul": 1, "Split": 1, "Add": 3}


def checkpoint(folder: Path) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64)
    )
    model.save_pretrained(folder)
    return model


@pytest.mark.every
def test_streamed_weights_are_joined_as_they_are_written(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    files: list[bytes] = []
    for each in (model, dynamo_moe.open_checkpoint(tmp_path)):
        report = dynamo_moe.export_language_model(
            each, tmp_path / f"{len(files)}.onnx", target="onnxruntime"
        )
        assert report.nodes["Split"] == 5
        files.append(report.path.read_bytes())
    assert files[0] == files[1]


def test_linked_weights_stay_as_they_lie(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    model = dynamo_moe.open_checkpoint(tmp_path)
    report = dynamo_moe.export_language_model(
        model, tmp_path / "m.onnx", target="onnxruntime", link_weights=True
    )
    assert "Split" not in report.nodes
    file = onnx.load(report.path, load_external_data=False)
    names = {tensor.name for tensor in file.graph.initializer}
    assert "model.layers.4.self_attn.q_proj.weight" in names
