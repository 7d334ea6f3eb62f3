"""Models with an encoder: their two files and transformers write the same text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

import dynamo_moe
from cli_models import run
from dynamo_moe.files.model_parts import KEY
from engine_checks import checked_engine
from moe_architectures import ARCHITECTURES

TASK = "text2text-generation-with-past"
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "forced_eos_token_id": None,
}
GEMMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
}


def build(name: str, **changes: Any) -> Any:
    """Returns a small model whose tokens depend on what it reads."""
    if name == "switch_transformers":
        return ARCHITECTURES[name].build(**changes)
    code: Any = transformers
    kinds: dict[str, Callable[[], Any]] = {
        "t5": lambda: code.T5Config(**T5, num_decoder_layers=1, decoder_start_token_id=0),
        "umt5": lambda: code.UMT5Config(**T5, decoder_start_token_id=0),
        "bart": lambda: code.BartConfig(**BART, decoder_start_token_id=2),
        "marian": lambda: code.MarianConfig(**BART, decoder_start_token_id=2, pad_token_id=0),
        "t5gemma": lambda: code.T5GemmaConfig(
            encoder=GEMMA,
            decoder=GEMMA | {"num_hidden_layers": 3},
            decoder_start_token_id=2,
            vocab_size=64,
        ),
    }
    config = kinds[name]()
    torch.manual_seed(0)
    model = code.AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 2:
                is_table = "shared" in path or "embed" in path
                weight.normal_(0, 0.1 if is_table else 2 * weight.shape[1] ** -0.5)
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows with padding on their right, on their left, and without any."""
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[2, :3] = 0
    return ids, mask


def written(model: Any, *batch: torch.Tensor, **options: Any) -> np.ndarray:
    """Returns what a text begins with and 32 tokens, as transformers writes them."""
    model.generation_config.eos_token_id = None
    options = {
        "max_new_tokens": 32,
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
    } | options
    ids, *mask = batch
    text: torch.Tensor = model.generate(ids, attention_mask=next(iter(mask), None), **options)
    return text.numpy()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("switch_transformers", {}),
        ("t5", {}),
        pytest.param("bart", {}, marks=pytest.mark.every),
        pytest.param("switch_transformers", {"target": "onnxruntime"}, marks=pytest.mark.every),
        pytest.param("switch_transformers", {"target": "dense"}, marks=pytest.mark.every),
        pytest.param("umt5", {}, marks=pytest.mark.every),
        pytest.param("marian", {}, marks=pytest.mark.every),
        pytest.param("t5gemma", {}, marks=pytest.mark.every),
        ("t5gemma", {"bounded_windows": True}),
    ],
)
def test_32_greedy_tokens(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = build(name)
    batches = [prompts(), (prompts()[0][:1, :1],)]
    expected = [written(model, *batch) for batch in batches]
    assert len(np.unique(expected[0][:, 1:], axis=0)) == 3, "the text depends on what is read"
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK, **options)
    assert [file.name for file in report.files] == ["encoder.onnx", "decoder.onnx"]
    for batch, text in zip(batches, expected, strict=True):
        result = dynamo_moe.generate(tmp_path / "model", *batch, max_new_tokens=32)
        np.testing.assert_array_equal(result, text)
    assert dynamo_moe.verify(tmp_path / "model", model).passed


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build("switch_transformers")
    dynamo_moe.convert(model)
    folder = tmp_path_factory.mktemp("switch") / "model"
    dynamo_moe.export_language_model(model, folder, task=TASK)
    return model, folder


def test_names_and_dimensions(switch: tuple[Any, Path]) -> None:
    """Each MoE layer and each weight is in the file of its part alone."""
    _, folder = switch
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{part}.onnx") for part in ("encoder", "decoder")
    )
    read = ["batch", "encoder_sequence"]
    kept = {
        f"cross_attention.{layer}.{kind}": ["batch", 4, "encoder_sequence", 8]
        for layer in range(2)
        for kind in ("key", "value")
    }
    past = {
        f"past_key_values.{layer}.{kind}": ["batch", 4, "past", 8]
        for layer in range(2)
        for kind in ("key", "value")
    }
    assert {x.name: x.shape for x in encoder.get_inputs()} == {
        "input_ids": read,
        "attention_mask": read,
    }
    assert {x.name: x.shape for x in encoder.get_outputs()} == kept
    assert {x.name: x.shape for x in decoder.get_inputs()} == {
        "input_ids": ["batch", "sequence"],
        "encoder_attention_mask": read,
        **kept,
        **past,
    }
    assert [x.name for x in decoder.get_outputs()] == [
        "logits",
        *(name.replace("past_key_values", "present") for name in past),
    ]
    for part in ("encoder", "decoder"):
        graph = onnx.load(folder / f"{part}.onnx").graph
        assert sum(node.op_type == "DroplessMoEExperts" for node in graph.node) == 1
        of_layers = {x.name for x in graph.initializer if "block" in x.name}
        of_others = {name for name in of_layers if not name.startswith(part)}
        # The keys and values of attention to the encoder are the decoder's, and in its file.
        assert len(of_others) == (4 if part == "encoder" else 0)
        assert all(name.endswith((".k.weight", ".v.weight")) for name in of_others)


def test_a_text_that_has_begun(switch: tuple[Any, Path]) -> None:
    model, folder = switch
    ids, mask = prompts()
    begun = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, 3:5]], dim=1)
    text = written(model, ids, mask, decoder_input_ids=begun)
    result = dynamo_moe.generate(folder, ids, mask, max_new_tokens=32, decoder_input_ids=begun)
    np.testing.assert_array_equal(result[:, :3], begun)
    np.testing.assert_array_equal(result[:, 3:], text[:, -32:])


def test_verify_notices_other_keys(switch: tuple[Any, Path]) -> None:
    other = build("switch_transformers")
    with torch.no_grad():
        other.decoder.block[1].layer[1].EncDecAttention.v.weight[0, 0] += 1
    dynamo_moe.convert(other)
    with pytest.raises(dynamo_moe.VerificationError, match=r"encoder\.onnx"):
        dynamo_moe.verify(switch[1], other)
    assert dynamo_moe.verify(switch[1] / "decoder.onnx", other).passed


def test_what_it_begins_with_may_be_unknown(switch: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = switch
    for part in ("encoder", "decoder"):
        file = onnx.load(folder / f"{part}.onnx")
        (entry,) = (entry for entry in file.metadata_props if entry.key == KEY)
        described = json.loads(entry.value)
        assert described.pop("decoder_start_token_id") == 0
        entry.value = json.dumps(described)
        onnx.save(file, tmp_path / f"{part}.onnx")
    with pytest.raises(ValueError, match="does not say what it begins with: pass decoder_input_"):
        dynamo_moe.generate(tmp_path, [[5]], max_new_tokens=1)
    assert dynamo_moe.generate(
        tmp_path, [[5]], max_new_tokens=1, decoder_input_ids=[[0]]
    ).shape == (1, 2)


def test_arguments_of_generate(switch: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = switch
    with pytest.raises(ValueError, match=r"decoder_input_ids must be integers \[1, S\], got int64"):
        dynamo_moe.generate(folder, [[5]], max_new_tokens=1, decoder_input_ids=[[0], [0]])
    with pytest.raises(ValueError, match="row 0 of attention_mask has no 1"):
        dynamo_moe.generate(folder, [[5]], [[0]], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"an encoder of text sees no pictures \(pixel_values\)"):
        dynamo_moe.generate(folder, [[5]], max_new_tokens=1, pixel_values=np.zeros(3))
    decoder = folder / "decoder.onnx"
    with pytest.raises(ValueError, match="decoder_input_ids are for the folder of a model with an"):
        dynamo_moe.generate(decoder, [[5]], max_new_tokens=1, decoder_input_ids=[[0]])
    (tmp_path / "encoder.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no decoder\.onnx"):
        dynamo_moe.generate(tmp_path, [[5]], max_new_tokens=1)


class ReadsItsEncoder(transformers.T5ForConditionalGeneration):
    """Its logits depend on more than the keys and values of attention."""

    def forward(self, cache: Any = None, **options: Any) -> Any:
        outputs = super().forward(cache=cache, **options)
        outputs.logits = outputs.logits + outputs.encoder_last_hidden_state.mean()
        return outputs


def test_what_the_parts_cannot_say_is_refused(tmp_path: Path) -> None:
    def refused(model: Any, **options: Any) -> None:
        with torch.no_grad():
            dynamo_moe.export_language_model(model, tmp_path / "model", **{"task": TASK} | options)

    t5 = build("t5")
    with pytest.raises(
        ValueError, match=f"T5ForConditionalGeneration has an encoder: use .*{TASK}"
    ):
        refused(t5, task="text-generation-with-past")
    with pytest.raises(ValueError, match=r"no folder for transformers can hold .* has an encoder"):
        refused(t5, folder="transformers")
    with pytest.raises(ValueError, match="sees no pictures"):
        refused(t5, task="image-text-to-text")
    with pytest.raises(ValueError, match="MixtralForCausalLM has no encoder: choose another task"):
        refused(ARCHITECTURES["mixtral"].build())
    t5.__class__ = ReadsItsEncoder
    with pytest.raises(ValueError, match="ReadsItsEncoder computes other logits than its encoder"):
        refused(t5)
    whisper = transformers.WhisperConfig(**BART, pad_token_id=0)
    with pytest.raises(ValueError, match="takes input_features, not input_ids"):
        refused(transformers.WhisperForConditionalGeneration(whisper).eval())
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_on_the_command_line(switch: tuple[Any, Path], tmp_path: Path) -> None:
    build("switch_transformers").save_pretrained(tmp_path / "checkpoint")
    out = tmp_path / "model"
    options = ("--task", TASK, "--verify", "-q")
    result = run("export", str(tmp_path / "checkpoint"), "-o", str(out), *options)
    assert result.exit_code == 0, result.output
    for part in ("encoder", "decoder"):
        assert (out / f"{part}.onnx").read_bytes() == (switch[1] / f"{part}.onnx").read_bytes()


def test_tensorrt_builds_both(switch: tuple[Any, Path]) -> None:
    def sizes(batch: int, read: int, new: int, past: int) -> dict[str, list[int]]:
        known = {"batch": batch, "encoder_sequence": read, "sequence": new, "past": past}
        return {
            value.name: [
                known.get(x.dim_param, x.dim_value) for x in value.type.tensor_type.shape.dim
            ]
            for value in graph.input
        }

    for part in ("encoder", "decoder"):
        path = switch[1] / f"{part}.onnx"
        graph = onnx.load(path).graph
        first, usual, largest = sizes(1, 1, 1, 0), sizes(2, 20, 1, 40), sizes(4, 64, 16, 112)
        profile = {name: (first[name], usual[name], largest[name]) for name in first}
        engine = checked_engine(path, shapes=profile)
        assert engine.built, engine.reason()
