"""Language models token by token: ONNX Runtime and transformers write the same text."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import dynamo_moe
from dynamo_moe.language_models import example_case, performing
from engine_checks import checked_engine
from moe_architectures import ARCHITECTURES

KEY_VALUE = ("key", "value")
WITH_PAST = "text-generation-with-past"


def generate(session: Any, ids: np.ndarray, mask: np.ndarray, tokens: int) -> np.ndarray:
    """Greedy generation: the cache goes in and out of one file."""
    caches = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    past = {i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), np.float32) for i in caches}
    text, new = ids, ids
    for _ in range(tokens):
        logits, *present = session.run(None, {"input_ids": new, "attention_mask": mask, **past})
        new = logits[:, -1].argmax(-1)[:, None]
        text = np.concatenate([text, new], axis=1)
        mask = np.concatenate([mask, np.ones_like(new)], axis=1)
        past = {i.name: value for i, value in zip(caches, present, strict=True)}
    return text


# Sliding windows and sinks; grouped-query attention; latent attention and a shared expert.
@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.every) for name in ("mixtral", "deepseek_v3")),
        *(pytest.param(name, marks=pytest.mark.every) for name in ("qwen3_moe", "granitemoe")),
    ],
)
def test_32_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=32, do_sample=False, use_cache=True, pad_token_id=0
    )
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(report.path)
    np.testing.assert_array_equal(generate(session, ids.numpy(), mask.numpy(), 32), expected)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = ARCHITECTURES["mixtral"].build()
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("mixtral") / "model.onnx"
    dynamo_moe.export_language_model(model, path)
    return model, path


def test_names_and_dimensions(exported: tuple[Any, Path]) -> None:
    session = onnxruntime.InferenceSession(exported[1])
    inputs = {i.name: i.shape for i in session.get_inputs()}
    outputs = {o.name: o.shape for o in session.get_outputs()}
    cache = ["batch", 2, "past", 8]
    grown = ["batch", 2, "past + sequence", 8]
    parts = [f"{layer}.{part}" for layer in range(2) for part in KEY_VALUE]
    assert inputs == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        **{f"past_key_values.{part}": cache for part in parts},
    }
    assert outputs == {
        "logits": ["batch", "sequence", 64],
        **{f"present.{part}": grown for part in parts},
    }


@pytest.mark.parametrize("sizes", [(1, 5, 0), (1, 1, 1), (3, 1, 6), (2, 4, 3), (1, 1, 0)])
def test_prompts_and_steps(sizes: tuple[int, int, int], exported: tuple[Any, Path]) -> None:
    model, path = exported
    with performing(model, WITH_PAST):
        dynamo_moe.verify(path, model, [example_case(model, *sizes)])


def test_tensorrt_builds_a_generation_with_past(exported: tuple[Any, Path]) -> None:
    def shapes(batch: int, sequence: int, past: int) -> dict[str, list[int]]:
        caches = (f"past_key_values.{layer}.{part}" for layer in range(2) for part in KEY_VALUE)
        return {
            "input_ids": [batch, sequence],
            "attention_mask": [batch, past + sequence],
            **{name: [batch, 2, past, 8] for name in caches},
        }

    first, usual, largest = shapes(1, 1, 0), shapes(2, 1, 40), shapes(4, 16, 112)
    profile = {name: (first[name], usual[name], largest[name]) for name in first}
    engine = checked_engine(exported[1], shapes=profile)
    assert engine.built, engine.reason()


def test_the_model_as_it_is(exported: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = exported
    report = dynamo_moe.verify(path, model)
    sizes = [case.shapes["past_key_values.0.key"][2] for case in report.cases]
    assert sizes == [0, 6, 3, 0, 40, 0]  # A prompt, a step, a part of a prompt.
    assert all(case.routing_agreement == 1 for case in report.cases)
    path = tmp_path / "without.onnx"
    dynamo_moe.export_language_model(model, path, task="text-generation")
    assert dynamo_moe.verify(path, model, reference=copy.deepcopy(model)).passed
    assert "forward" not in vars(model)


def test_the_forward_comes_back(exported: tuple[Any, Path]) -> None:
    model, _ = exported
    forward = type(model).forward
    with performing(model, WITH_PAST):
        assert list(inspect.signature(model.forward).parameters)[2:] == ["past_key_values"]
    assert model.forward.__func__ is forward


def test_the_forward_comes_back_after_the_last_of_overlapping_contexts(
    exported: tuple[Any, Path],
) -> None:
    model, _ = exported
    forward = type(model).forward
    first, second = performing(model, WITH_PAST), performing(model, WITH_PAST)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert list(inspect.signature(model.forward).parameters)[2:] == ["past_key_values"]
    second.__exit__(None, None, None)
    assert model.forward.__func__ is forward


def test_hidden_states(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build().model
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export_language_model(model, path, task="feature-extraction")
    session = onnxruntime.InferenceSession(report.path)
    assert [o.name for o in session.get_outputs()] == ["last_hidden_state"]
    assert dynamo_moe.verify(path, model).passed


@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "qwen3_next", "lfm2_moe"])
def test_other_states_than_keys_and_values(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    with pytest.raises(ValueError, match=r"keeps more than keys and values .*: use task text-gen"):
        dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_unknown_task(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build()
    with pytest.raises(ValueError, match=r"task must be one of .*; got 'chat'"):
        dynamo_moe.export_language_model(model, tmp_path / "m.onnx", task="chat")


def test_a_cache_among_the_results_is_explained(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build()
    dynamo_moe.convert(model)
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(dynamo_moe.ExportError, match=r"pass use_cache=False, or use"):
        dynamo_moe.export(
            model, (), tmp_path / "m.onnx", kwargs={"input_ids": ids, "use_cache": True}
        )


def test_names_of_inputs_and_outputs(tmp_path: Path) -> None:
    linear = torch.nn.Linear(4, 3)
    path = tmp_path / "m.onnx"
    dynamo_moe.export(linear, torch.randn(2, 4), path, input_names=["a"], output_names=["b"])
    session = onnxruntime.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == ["a"]
    assert [o.name for o in session.get_outputs()] == ["b"]
    with pytest.raises(ValueError, match="output_names must be 1 different names"):
        dynamo_moe.export(linear, torch.randn(2, 4), path, output_names=["a", "b"])
