"""Rotary embeddings that change with the length of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dynamo_moe

SIZES: Any = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _llama(rope: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config).eval()


def _longrope() -> Any:
    """Phi-3.5's: other frequencies from 17 tokens on."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    }
    config = transformers.Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        pad_token_id=0,
        rope_parameters=rope,
    )
    return transformers.Phi3ForCausalLM(config).eval()


def _frequencies(model: Any, length: int) -> torch.Tensor:
    model(torch.ones(1, length, dtype=torch.int64))
    frequencies: torch.Tensor = model.model.rotary_emb.inv_freq.clone()
    return frequencies


@pytest.mark.parametrize("task", ["text-generation", "text-generation-with-past"])
def test_other_frequencies_for_long_prompts(tmp_path: Path, task: Any) -> None:
    model, path = _longrope(), tmp_path / "m.onnx"
    report = dynamo_moe.export_language_model(model, path, task=task)
    assert report.notes == ()  # Its buffer of frequencies is overwritten, which a trace shows.
    lengths = {case.shapes["attention_mask"][1] for case in dynamo_moe.verify(path, model).cases}
    assert min(lengths) < 16 < max(lengths)
    short, long = (_frequencies(model, length) for length in (16, 17))
    assert not torch.equal(short, long)


@pytest.mark.parametrize(
    "export",
    [
        dynamo_moe.export_language_model,
        lambda model, path: dynamo_moe.export_language_model(model, path, task="text-generation"),
        lambda model, path: dynamo_moe.export(model, torch.ones(1, 5, dtype=torch.int64), path),
    ],
    ids=["cache", "prompt", "export"],
)
def test_frequencies_of_the_longest_prompt_so_far_are_refused(
    tmp_path: Path, export: Callable[[Any, Path], Any]
) -> None:
    model = _llama({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    message = r"decides by the values of a tensor at .*modeling_rope_utils\.py:\d+"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        export(model, tmp_path / "m.onnx")
