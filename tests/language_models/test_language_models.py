"""Language models token by token: ONNX Runtime and transformers write the same text."""

from __future__ import annotations

import copy
import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV4ForCausalLM,
    MixtralForCausalLM,
    T5Config,
    T5Model,
)

import dynamo_moe
from architecture_table import write_row
from dynamo_moe.files.cache_entries import KEY
from dynamo_moe.generation import cache_of
from dynamo_moe.language_models import example_case, performing
from engine_checks import checked_engine
from example_program import EXAMPLE
from moe_architectures import ARCHITECTURES

KEY_VALUE = ("key", "value")
WITH_PAST = "text-generation-with-past"


# Sliding windows and sinks; states of convolutions, of a space with limits in prompts alone, and of
# linear attention; indexed keys.
FEW = ("gpt_oss", "lfm2_moe", "nemotron_h", "qwen3_next", "glm_moe_dsa")
WITH_ENCODER = ("switch_transformers",)  # test_encoders.py has more of them.
# What a file cannot keep, or PyTorch's exporter cannot export.
WITHOUT_A_FILE = {
    "qwen4_exp": "the indexer of its attention loops over the results of nonzero()",
}
# transformers asks the first layer how long the text is, one without keys: of several rows, tokens
# after the prompt attend to padding. Rows by themselves are right.
ROW_BY_ROW = ("minimax",)
# Padding is compressed with the tokens.
WITHOUT_PADDING = ("deepseek_v4",)


def generating() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in FEW else pytest.mark.every)
        for name, architecture in ARCHITECTURES.items()
        if architecture.model.endswith(("ForCausalLM", "ForConditionalGeneration"))
        and name not in WITHOUT_A_FILE
    ]


def written(name: str, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the prompts and 32 tokens after each, as transformers writes them."""
    options = {"max_new_tokens": 32, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    if name not in ROW_BY_ROW:
        whole: torch.Tensor = model.generate(ids, attention_mask=mask, **options)
        return whole
    prompts = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    rows = [model.generate(row, attention_mask=torch.ones_like(row), **options) for row in prompts]
    return torch.cat([ids, torch.cat([row[:, -32:] for row in rows])], dim=1)


@pytest.mark.parametrize("name", generating())
@pytest.mark.first(3)
def test_32_greedy_tokens(name: str, tmp_path: Path) -> None:
    """The same as transformers', for a batch with padding on the left, and for a batch of one."""
    model = ARCHITECTURES[name].build()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 1 if name in WITHOUT_PADDING else 0
    batches = [(ids, mask), (ids[:1, :7], mask[:1, :7])]
    expected = [written(name, model, *batch) for batch in batches]
    dynamo_moe.convert(model)
    path: Any = tmp_path / "model.onnx"
    if name in WITH_ENCODER:
        dynamo_moe.export_language_model(model, path, task="text2text-generation-with-past")
        runnable = path
    else:
        dynamo_moe.export_language_model(model, path)
        runnable = onnxruntime.InferenceSession(path)
    for batch, text in zip(batches, expected, strict=True):
        result = dynamo_moe.generate(runnable, *batch, max_new_tokens=32)
        np.testing.assert_array_equal(result, text)
    write_row(f"{name}.tokens", {"equal": True})
    dynamo_moe.verify(path, model)


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


# Beside a layer of all tokens; alone, where the mask alone tells how many there were; as chunks.
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("gpt_oss", "sliding_window"),
        pytest.param("afmoe", "sliding_window", marks=pytest.mark.every),
        pytest.param("llama4", "attention_chunk_size", marks=pytest.mark.every),
    ],
)
def test_bounded_windows(name: str, option: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build(**{option: 6})
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = written(name, model, ids, mask)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx", bounded_windows=True)
    text = dynamo_moe.generate(report.path, ids, mask, max_new_tokens=32)
    np.testing.assert_array_equal(text, expected)
    session = onnxruntime.InferenceSession(report.path)
    key = cache_of(session)[0]
    assert (key.shape, key.update, key.window) == (("batch", 2, "last_5", 8), "appended", 5)
    verified = dynamo_moe.verify(report.path, model)
    shapes = [case.shapes["past_key_values.0.key"][2] for case in verified.cases]
    assert shapes == [0, 5, 3, 0, 5, 0]


def test_a_window_of_another_length_is_refused() -> None:
    model: Any = ARCHITECTURES["gpt_oss"].build(sliding_window=6)
    dynamo_moe.convert(model)
    with performing(model, WITH_PAST, bounded_windows=True):
        case = example_case(model, 2, 1, 9)
        case["past_key_values"][0] = tuple(part[:, :, 1:] for part in case["past_key_values"][0])
        with pytest.raises(
            ValueError, match=r"\.0\.key must be \[2, 2, 5, 8\] after 9 tokens, got"
        ):
            model(**case)


def test_states_in_the_file_and_its_metadata(tmp_path: Path) -> None:
    model = ARCHITECTURES["zaya"].build()
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(report.path)
    kept = {i.name: i.shape for i in session.get_inputs()[2:6]}
    assert kept == {
        "past_key_values.0.key": ["batch", 2, "past", 8],
        "past_key_values.0.value": ["batch", 2, "past", 8],
        "past_key_values.0.conv_state": ["batch", 48, 2],
        "past_key_values.0.recurrent_state": ["batch", 8],
    }
    entries = cache_of(session)
    assert [entry.input for entry in entries] == [i.name for i in session.get_inputs()[2:]]
    assert [entry.output for entry in entries] == [o.name for o in session.get_outputs()[1:]]
    assert {entry.input: list(entry.shape) for entry in entries[:4]} == kept
    assert [entry.role for entry in entries[:4]] == [
        "key",
        "value",
        "conv_state",
        "recurrent_state",
    ]
    assert [entry.initial for entry in entries[:4]] == ["empty", "empty", "zeros", "zeros"]
    assert [entry.update for entry in entries[:4]] == [*["appended"] * 2, *["replaced"] * 2]


def test_layers_that_keep_nothing_have_no_names() -> None:
    model: Any = ARCHITECTURES["nemotron_h"].build()
    dynamo_moe.convert(model)
    with performing(model, WITH_PAST):
        names = [kept.name for kept in model.forward.cache.tensors]
    assert names == ["0.conv_state", "0.recurrent_state", "2.key", "2.value"]


def test_keys_and_values_need_no_metadata(exported: tuple[Any, Path]) -> None:
    session = onnxruntime.InferenceSession(exported[1])
    assert KEY not in session.get_modelmeta().custom_metadata_map
    entries = cache_of(session)
    assert [entry.role for entry in entries] == ["key", "value"] * 2
    assert entries[0].shape == ("batch", 2, "past", 8)


def test_a_prompt_in_parts_goes_on_from_the_states(tmp_path: Path) -> None:
    """Transformers' own code for Jamba begins every part of several tokens with zeros."""
    model: Any = ARCHITECTURES["jamba"].build()
    dynamo_moe.convert(model)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with performing(model, WITH_PAST), torch.no_grad():
        past = model.forward.cache.empty(2)
        whole, _ = model(ids, mask, past)
        _, past = model(ids[:, :4], mask[:, :4], past)
        rest, _ = model(ids[:, 4:], mask, past)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v32",
        *(pytest.param(n, marks=pytest.mark.every) for n in ("dots3_note", "glm_moe_dsa")),
    ],
)
@pytest.mark.every
def test_an_indexer_that_chooses_tokens(name: str, tmp_path: Path) -> None:
    """Five of up to 70; its many heads have no equal scores."""
    model = ARCHITECTURES[name].build(index_topk=5, index_n_heads=24)
    model.generation_config.eos_token_id = None
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    for length in (1, 30):
        ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        text = dynamo_moe.generate(report.path, ids, max_new_tokens=40)
        np.testing.assert_array_equal(text, expected)
    assert dynamo_moe.verify(report.path, model).passed


BOUNDED = {"bounded_windows": True}


# In blocks of 4 and 16 tokens: none waits, some do, one more is a block of both. With three blocks
# for each token, an indexer chooses; its many heads have no equal scores.
@pytest.mark.parametrize(
    ("options", "chosen"),
    [({}, 3), *(pytest.param(each, 128, marks=pytest.mark.every) for each in ({}, BOUNDED))],
)
def test_blocks_of_tokens(options: dict[str, Any], chosen: int, tmp_path: Path) -> None:
    model = ARCHITECTURES["deepseek_v4"].build(
        sliding_window=8, index_topk=chosen, index_n_heads=2 if chosen > 3 else 24
    )
    model.generation_config.eos_token_id = None
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx", **options)
    session = onnxruntime.InferenceSession(report.path)
    entries = {entry.input.removeprefix("past_key_values."): entry for entry in cache_of(session)}
    assert entries["0.key"].shape[2] == ("last_7" if options else "past")
    waiting, full = entries["0.buffer_kv"], entries["1.compressed_kv.indexer"]
    assert (waiting.shape[1], waiting.initial, waiting.update) == (
        "rest_of_16",
        "empty",
        "replaced",
    )
    assert (full.shape[1], full.initial, full.update) == ("blocks_of_4", "empty", "appended")
    assert entries["1.overlap_gate.compressor"].initial == "zeros"
    ids = torch.randint(3, 64, (2, 47), generator=torch.Generator().manual_seed(1))
    for length, steps in ((1, 20), (16, 5), (47, 5)):
        prompt = ids[:, :length]
        mask = torch.ones_like(prompt)
        expected = model.generate(
            prompt, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
        text = dynamo_moe.generate(session, prompt, max_new_tokens=steps)
        np.testing.assert_array_equal(text, expected)
    verified = dynamo_moe.verify(report.path, model)
    assert verified.passed
    # A step and parts of a prompt behind what fills a block of 4, and one of 16.
    lengths = [case.shapes["attention_mask"][1] for case in verified.cases]
    assert lengths[6:] == [4, 9, 11, 16, 33, 35]
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    with pytest.raises(ValueError, match=r"row 1 of attention_mask has padding, which this file"):
        dynamo_moe.generate(session, ids, mask, max_new_tokens=1)


@pytest.mark.every
def test_blocks_of_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    """Transformers keeps the biases of places in float32, and so what they are added to."""
    source = ARCHITECTURES["deepseek_v4"].build(
        compress_rates={"heavily_compressed_attention": 16, "compressed_sparse_attention": 8}
    )
    source.to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    model = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.bfloat16, experts_implementation="eager"
    )
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    graph = onnx.load(report.path, load_external_data=False).graph
    dtypes = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)
    }
    kept = [name for name in dtypes if name.startswith("past_key_values.")]
    assert {dtypes[name] for name in kept} == {TensorProto.BFLOAT16, TensorProto.FLOAT}
    for name in kept:
        assert dtypes[name] == dtypes[name.replace("past_key_values", "present")], name
    # A first token alone fills no block.
    with performing(model, WITH_PAST):
        cases = [example_case(model, 1, length, 0) for length in (1, 3, 19)]
        for case in cases:
            case["past_key_values"] = model.forward.cache.empty(1)
    assert dynamo_moe.verify(report.path, model, cases).passed


@pytest.mark.every
def test_tensorrt_builds_blocks_of_tokens(tmp_path: Path) -> None:
    model = ARCHITECTURES["deepseek_v4"].build(sliding_window=8)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    profiles = runpy.run_path(str(EXAMPLE / "build_text_engine.py"))["profiles"]
    prompts, steps = profiles(str(report.path), batch=4, prompt=40, length=100)
    assert prompts["past_key_values.0.buffer_kv"] == ((1, 0, 8), (1, 0, 8), (4, 0, 8))
    assert steps["past_key_values.0.buffer_kv"] == ((1, 0, 8), (1, 8, 8), (4, 15, 8))
    assert steps["past_key_values.1.compressed_kv.indexer"] == ((1, 0, 8), (1, 10, 8), (4, 24, 8))
    for shapes in (prompts, steps):
        engine = checked_engine(report.path, shapes=shapes)
        assert engine.built, engine.reason()


@pytest.mark.every
def test_blocks_of_a_prompt_alone(tmp_path: Path) -> None:
    """A model without a cache has blocks of all its tokens, however many these are."""
    model = ARCHITECTURES["deepseek_v4"].build(sliding_window=8)
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export_language_model(model, path, task="text-generation")
    assert not report.notes
    assert dynamo_moe.verify(path, model).passed


@pytest.mark.parametrize("rate", [1, 2])
def test_the_smallest_blocks_are_refused(rate: int, tmp_path: Path) -> None:
    rates = {"heavily_compressed_attention": rate, "compressed_sparse_attention": rate}
    model = ARCHITECTURES["deepseek_v4"].build(compress_rates=rates)
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=r"layer 0 of .* keeps buffer_kv .* in blocks of fewer"):
        dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_blocks_of_different_texts_are_refused() -> None:
    model = ARCHITECTURES["deepseek_v4"].build()
    dynamo_moe.convert(model)
    with performing(model, WITH_PAST):
        case = example_case(model, cached=9)
        first, (key, *_) = case["past_key_values"]
        _, (_, *blocks) = example_case(model, cached=8)["past_key_values"]
        case["past_key_values"] = [first, (key, *blocks)]
        with pytest.raises(ValueError, match=r"blocks of 4 are of 8 tokens, others of 9"):
            model(**case)


def test_states_that_do_not_begin_with_zeros_are_refused(tmp_path: Path) -> None:
    """ZAYA's delayed values are a bias before the first token, if it has one."""
    model = ARCHITECTURES["zaya"].build(attention_bias=True)
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=r"begins with states that are not zeros .*: use task"):
        dynamo_moe.export_language_model(model, tmp_path / "model.onnx")


def test_a_model_without_a_cache_is_refused(tmp_path: Path) -> None:
    """A BERT with a head of language, which reads what comes after a token too."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    model = BertLMHeadModel(BertConfig(num_attention_heads=2, **sizes)).eval()
    with pytest.raises(ValueError, match=r"BertLMHeadModel gives no cache .*None: use task text-g"):
        dynamo_moe.export_language_model(model, tmp_path / "model.onnx")


class CallsItPastKeyValues(MixtralForCausalLM):
    """As transformers did before 5.24."""

    def forward(
        self, input_ids: Any, attention_mask: Any, past_key_values: Any = None, **options: Any
    ) -> Any:
        outputs = super().forward(input_ids, attention_mask, cache=past_key_values, **options)
        return SimpleNamespace(logits=outputs.logits, past_key_values=outputs.cache)


def test_a_cache_by_its_older_name(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build()
    model.__class__ = CallsItPastKeyValues
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    assert dynamo_moe.verify(report.path, model).passed


def test_tensors_of_another_number_or_length_are_refused(exported: tuple[Any, Path]) -> None:
    model, _ = exported
    with performing(model, WITH_PAST):
        case = example_case(model)
        past = case["past_key_values"]
        with pytest.raises(ValueError, match="must hold 4 tensors, got 2"):
            model(**case | {"past_key_values": past[:1]})
        shorter = [past[0], tuple(part[:, :, 1:] for part in past[1])]
        with pytest.raises(ValueError, match=r"differ in their past, 1\.key at first"):
            model(**case | {"past_key_values": shorter})


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


def test_unconverted_experts_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES["mixtral"].build()

    def fail(*_: Any, **__: Any) -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)

    monkeypatch.setattr(model.model.layers[0].mlp.experts, "forward", fail)
    with pytest.raises(dynamo_moe.ExportError, match="MoE modules are not converted, which is"):
        dynamo_moe.export_language_model(model, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    assert not capfd.readouterr().err


def test_the_cache_of_a_decoder_behind_an_encoder_is_explained(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    model = T5Model(T5Config(**sizes, num_layers=1))
    ids = torch.ones(2, 4, dtype=torch.int64)
    kwargs = {"input_ids": ids, "decoder_input_ids": ids}
    with pytest.raises(dynamo_moe.ExportError, match=r"pass use_cache=False, or use"):
        dynamo_moe.export(model, (), tmp_path / "m.onnx", kwargs=kwargs)


def test_names_of_inputs_and_outputs(tmp_path: Path) -> None:
    linear = torch.nn.Linear(4, 3)
    path = tmp_path / "m.onnx"
    dynamo_moe.export(linear, torch.randn(2, 4), path, input_names=["a"], output_names=["b"])
    session = onnxruntime.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == ["a"]
    assert [o.name for o in session.get_outputs()] == ["b"]
    with pytest.raises(ValueError, match="output_names must be 1 different names"):
        dynamo_moe.export(linear, torch.randn(2, 4), path, output_names=["a", "b"])
