"""Language models with a cache: the blocks are traced once for all, in the default task too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from test_shared_architectures import deepseek_v3, language_model, llama, mixtral, qwen3_moe
from torch import nn
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe.cli import app
from dynamo_moe.files.block_functions import DOMAIN
from dynamo_moe.graph import pipeline
from shared_exports import opened_twice

pytest_plugins = ("shared_exports",)

WITH_PAST = "text-generation-with-past"


def qwen2() -> Any:
    return language_model("Qwen2", num_hidden_layers=5)


def stablelm() -> Any:
    """Its LayerNorms make named tuples of PyTorch's, each of a class of its own."""
    return language_model("StableLm", num_hidden_layers=5)


def gemma2() -> Any:
    return language_model("Gemma2", num_hidden_layers=8, sliding_window=3)


def gpt_oss() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return language_model("GptOss", num_hidden_layers=8, sliding_window=3, **experts)


def converted(make: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()[0].eval()
    dynamo_moe.convert(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, qwen2, stablelm, qwen3_moe, mixtral, deepseek_v3])
def test_files_are_those_of_whole_traces(
    compared: Callable[..., int], tmp_path: Path, make: Callable[[], Any]
) -> None:
    assert compared(functools.partial(converted, make), task=WITH_PAST) == 1
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", converted(make))


@pytest.mark.slow
@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_models_that_compute_with_weights_alone(
    shared: Callable[..., int], tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Traced whole, such nodes are folded, whatever is cached."""
    model = converted(make)
    assert shared(model, task=WITH_PAST) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model)


@pytest.mark.slow
@pytest.mark.parametrize("link", [False, True])
def test_checkpoints(tmp_path: Path, compared: Callable[..., int], link: bool) -> None:
    torch.manual_seed(0)
    model = mixtral()[0].eval()
    assert compared(opened_twice(model, tmp_path), task=WITH_PAST, link_weights=link) == 1
    dynamo_moe.convert(model)
    dynamo_moe.verify(tmp_path / "True" / "model.onnx", model)


@pytest.mark.slow
def test_layers_as_functions(tmp_path: Path) -> None:
    model = converted(gemma2)
    path = tmp_path / "model.onnx"
    dynamo_moe.export_language_model(model, path, layers_as_functions=True)  # type: ignore[arg-type]
    graph = onnx.load(path)
    (function,) = (each for each in graph.functions if each.domain == DOMAIN)
    given = [name for name in function.input if name.startswith("past")]
    assert given == [f"past_key_values.{name}" for name in ("key", "value", "key_2", "value_2")]
    results = [f"output_{number}" for number in range(2, 6)]
    assert list(function.output) == ["output", *results]
    calls = [node for node in graph.graph.node if node.domain == DOMAIN]
    assert [node.output[1] for node in calls] == [f"present.{n}.key" for n in range(0, 8, 2)]
    dynamo_moe.verify(path, model)


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    llama()[0].save_pretrained(folder)  # type: ignore[operator]
    counts: list[Any] = []
    instantiate = pipeline.instantiate
    monkeypatch.setattr(
        pipeline, "instantiate", lambda *args: (counts.append(1), instantiate(*args))[1]
    )
    path = tmp_path / "model.onnx"
    result = CliRunner().invoke(app, ["export", "--hf", str(folder), str(path), "-q"])
    assert result.exit_code == 0, result.output
    assert counts == [1]
    assert [each.name for each in onnx.load(path, load_external_data=False).graph.output][-1] == (
        "present.4.value"
    )
