"""Caches that have room for all tokens from the beginning, and are written in place."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import dynamo_moe
from dynamo_moe.files.cache_entries import PAST_LENGTH
from dynamo_moe.generation import cache_of
from dynamo_moe.language_models import performing
from moe_architectures import ARCHITECTURES

PROMPT = [[5, 9, 17, 33], [0, 0, 40, 7]]
MASK = [[1, 1, 1, 1], [0, 0, 1, 1]]
LENGTH = 48


def built(name: str) -> Any:
    model = ARCHITECTURES[name].build()
    model.generation_config.eos_token_id = None
    dynamo_moe.convert(model)
    return model


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = built("mixtral")
    path = tmp_path_factory.mktemp("mixtral") / "model.onnx"
    dynamo_moe.export_language_model(model, path, cache_length=LENGTH)
    return model, path


def with_the_model(model: Any, path: Path) -> None:
    """Checks that a file writes what the model does, and agrees with it wherever tokens begin."""
    text = dynamo_moe.generate(path, PROMPT, MASK, max_new_tokens=LENGTH - 3)
    expected = model.generate(
        torch.tensor(PROMPT),
        attention_mask=torch.tensor(MASK),
        max_new_tokens=LENGTH - 3,
        do_sample=False,
        pad_token_id=0,
    )
    np.testing.assert_array_equal(text, expected)
    report = dynamo_moe.verify(path, model)
    assert report.passed, report
    # The last case would be too long.
    lengths = [case.shapes["input_ids"][1] for case in report.cases]
    assert lengths == [5, 1, 4, 33, 2]


def test_the_file_is_that_of_the_model(mixtral: tuple[Any, Path]) -> None:
    with_the_model(*mixtral)


def test_shapes_stay_the_same(mixtral: tuple[Any, Path]) -> None:
    _, path = mixtral
    session = onnxruntime.InferenceSession(path)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes["attention_mask"] == ["batch", LENGTH]
    assert shapes[PAST_LENGTH] == [1]
    buffers = {name: shape for name, shape in shapes.items() if name.startswith("past_key")}
    assert {*map(tuple, buffers.values())} == {("batch", 2, LENGTH, 8)}
    outputs = {value.name: value.shape for value in session.get_outputs()}
    assert outputs["present.1.value"] == ["batch", 2, LENGTH, 8]
    (key, *_) = cache_of(session)
    assert (key.update, key.initial, key.room) == ("written", "zeros", LENGTH)
    # Each is an input that the writing node alone changes, whose result is the output.
    graph = onnx.load(path).graph
    writes = [node for node in graph.node if node.op_type == "TensorScatter"]
    assert {node.input[0] for node in writes} == buffers.keys()
    assert {node.output[0] for node in writes} == outputs.keys() - {"logits"}


def test_one_buffer_can_be_both(mixtral: tuple[Any, Path]) -> None:
    model, path = mixtral
    session = onnxruntime.InferenceSession(path)
    with performing(model, "text-generation-with-past", cache_length=LENGTH):
        case = model.forward.cache.random(1, 0, torch.Generator().manual_seed(0))
        mask = torch.zeros(1, LENGTH, dtype=torch.int64)
        mask[:, :7] = 1
        arguments = (torch.tensor([[3, 8]]), mask, torch.tensor([5]), case)
        with torch.no_grad():
            expected, kept = model(*arguments)
    binding = session.io_binding()
    names = [value.name for value in session.get_inputs()]
    inputs = [*arguments[:3], *(tensor for layer in case for tensor in layer)]
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy().copy())
        for name, tensor in zip(names, inputs, strict=True)
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("logits")
    for name in names[3:]:
        present = name.replace("past_key_values", "present")
        binding.bind_ortvalue_output(present, values[name])
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(binding.get_outputs()[0].numpy(), expected, rtol=1e-4, atol=1e-5)
    flat = [tensor for layer in kept for tensor in layer]
    for name, tensor in zip(names[3:], flat, strict=True):
        np.testing.assert_allclose(values[name].numpy(), tensor, rtol=1e-4, atol=1e-5)


# gpt-oss has windows and sinks, LFM2 states of convolutions, DeepSeek-V3.2 keys of an indexer.
KINDS = ("gpt_oss", "lfm2_moe", "deepseek_v32")
OTHERS = (
    *("axk2", "bailing_hybrid", "dots3_note", "glm_moe_dsa", "granitemoehybrid", "hy_v4"),
    *(
        "inkling",
        "inkling2",
        "inkling2_loop",
        "jamba",
        "kimi_linear",
        "minimax_m3_vl",
        "nemotron_h",
        "qwen3_5_moe",
        "qwen3_next",
        "zaya",
    ),
    *("afmoe", "aria", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4", "glm4_moe", "glm4_moe_lite"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1"),
    *("lara_mini", "sarvam_mla", "sarvam_moe"),
    *("laguna", "llama4", "mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)


@pytest.mark.parametrize(
    "name", [*KINDS, *(pytest.param(name, marks=pytest.mark.every) for name in OTHERS)]
)
@pytest.mark.first(1)
def test_of_other_models(name: str, tmp_path: Path) -> None:
    model = built(name)
    dynamo_moe.export_language_model(model, tmp_path / "m.onnx", cache_length=LENGTH)
    with_the_model(model, tmp_path / "m.onnx")


@pytest.mark.every
def test_dense_and_half_precision(tmp_path: Path) -> None:
    model = ARCHITECTURES["qwen3_moe"].build().half()
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(
        model, tmp_path / "m.onnx", cache_length=LENGTH, target="dense"
    )
    assert report.nodes["TensorScatter"] == 2 * model.config.num_hidden_layers
    assert dynamo_moe.verify(report.path, model).passed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_length": 7}, "an integer of at least 8, got 7"),
        ({"cache_length": True}, "an integer of at least 8, got True"),
        ({"task": "text-generation"}, "task text-generation-with-past, got 'text-generation'"),
        ({"folder": "genai"}, "a file alone: no runtime that opens a folder for 'genai'"),
        ({"target": "onnxruntime"}, "'onnxruntime' has shared_cache"),
        ({"bounded_windows": True}, "all tokens in all layers, without bounded_windows"),
        ({"opset": 23}, "an opset of at least 24, got 23"),
    ],
)
def test_options_are_checked(
    options: dict[str, Any], reason: str, mixtral: tuple[Any, Path], tmp_path: Path
) -> None:
    given = {"cache_length": LENGTH} | options
    with pytest.raises(ValueError, match=reason):
        dynamo_moe.export_language_model(mixtral[0], tmp_path / "m.onnx", **given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "layers of the kind DeepseekV4HCACache keep something else"),
        ("minimax", "MiniMaxForCausalLM has a MiniMaxCache"),
    ],
)
def test_what_has_no_room_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        dynamo_moe.export_language_model(built(name), tmp_path / "m.onnx", cache_length=LENGTH)


def test_the_shortest(mixtral: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = mixtral
    report = dynamo_moe.export_language_model(
        model, tmp_path / "m.onnx", cache_length=8, opset=None
    )
    verified = dynamo_moe.verify(report.path, model)
    assert [case.shapes["input_ids"][1] for case in verified.cases] == [5, 1, 4]


def test_a_model_that_counts_keys_is_refused(tmp_path: Path) -> None:
    """GPT-Neo's masks end with the last key, which in a buffer is a token to come."""
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: Any = GPTNeoForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4
    with pytest.raises(ValueError, match=r"something else with a cache of a fixed length .* keys"):
        dynamo_moe.export_language_model(model, tmp_path / "m.onnx", cache_length=24)
    dynamo_moe.export_language_model(model, tmp_path / "m.onnx")


def test_the_example_takes_no_memory() -> None:
    model = built("mixtral")
    with performing(model, "text-generation-with-past", cache_length=2**22):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kept = model.forward.cache.empty(2)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(tensor.nbytes for layer in kept for tensor in layer)
    assert size == 2**31
    assert (after - before) * 1024 < size / 100


def test_a_text_must_fit(mixtral: tuple[Any, Path]) -> None:
    _, path = mixtral
    with pytest.raises(ValueError, match=r"has room for 48 tokens, .* what may follow are 49"):
        dynamo_moe.generate(path, PROMPT, MASK, max_new_tokens=46)
