"""Folders that onnxruntime-genai, transformers.js and optimum open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai
import pytest
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe.cli import app
from moe_architectures import ARCHITECTURES

PROMPT, OTHER = [1, 17, 42, 5, 33], [9, 8]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single characters, of which A is 32, and a chat template."""
    characters = {chr(33 + number): number for number in range(60)}
    bpe = tokenizers.models.BPE(vocab={**characters, "<end>": 62, "<pad>": 63}, merges=[])
    made = tokenizers.Tokenizer(bpe)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.chat_template = "{% for message in messages %}A{{ message['content'] }}{% endfor %}"
    return fast


def made(name: str) -> Any:
    model = ARCHITECTURES[name].build()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 62, 63
    return model


@pytest.fixture(
    scope="module",
    params=["mixtral", "gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.every)],
)
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and the folder of its checkpoint's export."""
    folder = tmp_path_factory.mktemp(request.param)
    model = made(request.param)
    model.save_pretrained(folder / "checkpoint")
    tokenizer().save_pretrained(folder / "checkpoint")
    checkpoint = dynamo_moe.open_checkpoint(folder / "checkpoint")
    dynamo_moe.convert(checkpoint)
    report = dynamo_moe.export_language_model(checkpoint, folder / "genai", folder="genai")
    assert report.path == folder / "genai" / "model.onnx"
    assert {file.name for file in report.files} == {
        *("model.onnx", "genai_config.json", "tokenizer.json", "tokenizer_config.json"),
        "chat_template.jinja",
    }
    assert dict(report.nodes).get("com.microsoft::GroupQueryAttention")
    return model, folder / "genai"


class Genai:
    """A folder in onnxruntime-genai."""

    def __init__(self, folder: Path) -> None:
        self.model = onnxruntime_genai.Model(str(folder))

    def start(self, prompts: Sequence[Sequence[int]], length: int, **options: Any) -> Any:
        parameters = onnxruntime_genai.GeneratorParams(self.model)
        # No row ends before.
        options |= {"batch_size": len(prompts), "max_length": length, "min_length": length}
        parameters.set_search_options(**options)
        generator = onnxruntime_genai.Generator(self.model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator

    def finished(self, generator: Any) -> list[int]:
        while not generator.is_done():
            generator.generate_next_token()
        return generator.get_sequence(0).tolist()


def continued(model: Any, prompt: Sequence[int], length: int, **options: Any) -> list[int]:
    """Returns what transformers makes of one prompt."""
    ids = torch.tensor([prompt])
    options |= {"max_length": length, "min_length": length, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.first(1)
def test_greedy(opened: tuple[Any, Path]) -> None:
    model, folder = opened
    genai = Genai(folder)
    assert genai.finished(genai.start([PROMPT], 37)) == continued(model, PROMPT, 37)


def test_a_batch_with_padding(opened: tuple[Any, Path]) -> None:
    model, folder = opened
    genai = Genai(folder)
    padded = [*OTHER, *[63] * (len(PROMPT) - len(OTHER))]  # It pads on the right.
    generator = genai.start([PROMPT, padded], 20)
    genai.finished(generator)
    first, second = (generator.get_sequence(row).tolist() for row in range(2))
    assert first == continued(model, PROMPT, 20)
    new = 20 - len(PROMPT)
    assert second[len(PROMPT) :] == continued(model, OTHER, len(OTHER) + new)[len(OTHER) :]


@pytest.mark.first(1)
def test_beams(opened: tuple[Any, Path]) -> None:
    model, folder = opened
    genai = Genai(folder)
    found = genai.finished(genai.start([PROMPT], 17, num_beams=3))
    assert found == continued(model, PROMPT, 17, num_beams=3)


def test_a_prompt_in_parts_and_a_second_turn(opened: tuple[Any, Path]) -> None:
    model, folder = opened
    genai = Genai(folder)
    generator = genai.start([PROMPT], 40)
    generator.append_tokens(np.array([OTHER], np.int32))
    for _ in range(6):
        generator.generate_next_token()
    first = generator.get_sequence(0).tolist()
    assert first == continued(model, [*PROMPT, *OTHER], len(first))
    # The last token has been chosen, but not yet been read.
    generator.rewind_to(len(first) - 1)
    generator.append_tokens(np.array([[first[-1], *OTHER, *PROMPT]], np.int32))
    second = genai.finished(generator)
    assert second == continued(model, [*first, *OTHER, *PROMPT], 40)


def test_rewinding(opened: tuple[Any, Path]) -> None:
    model, folder = opened
    genai = Genai(folder)
    generator = genai.start([PROMPT], 30)
    for _ in range(8):
        generator.generate_next_token()
    generator.rewind_to(3)
    generator.append_tokens(np.array([OTHER], np.int32))
    assert genai.finished(generator) == continued(model, [*PROMPT[:3], *OTHER], 30)


def test_its_tokenizer(opened: tuple[Any, Path]) -> None:
    _, folder = opened
    found = onnxruntime_genai.Tokenizer(Genai(folder).model)
    messages = json.dumps([{"role": "user", "content": "BC"}])
    text = found.apply_chat_template(messages, add_generation_prompt=False)
    assert found.encode(text).tolist() == [32, 33, 34]


def test_a_growing_cache(tmp_path: Path) -> None:
    """A target without a shared cache: the runtime binds buffers of the size that they get."""
    model = made("mixtral")
    dynamo_moe.convert(model)
    options: Any = {"folder": "genai", "tokenizer": tokenizer(), "target": "plugin"}
    report = dynamo_moe.export_language_model(model, tmp_path / "genai", **options)
    config = json.loads((tmp_path / "genai/genai_config.json").read_text())
    assert not config["search"]["past_present_share_buffer"]
    assert "GroupQueryAttention" not in report.nodes
    model.set_experts_implementation("eager")
    genai = Genai(tmp_path / "genai")
    assert genai.finished(genai.start([PROMPT], 20)) == continued(model, PROMPT, 20)


def test_the_native_library_computes_the_layers(tmp_path: Path) -> None:
    """Of two configurations, whose nodes have one domain then: that of the library's operators."""
    model = made("mixtral")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.GELU()
    dynamo_moe.convert(model)
    options: Any = {"folder": "genai", "tokenizer": tokenizer(), "library": True}
    folder = tmp_path / "genai"
    report = dynamo_moe.export_language_model(model, folder, **options)
    library = folder / "libdynamo_moe.so"
    assert library in report.files
    assert report.operators == {"DroplessMoE": 2}
    nodes = [node for node in onnx.load(folder / "model.onnx").graph.node if node.domain]
    assert [(node.domain, node.op_type) for node in nodes] == 2 * [("moe", "DroplessMoE")]
    genai = Genai(folder)
    found = genai.finished(genai.start([PROMPT], 20))
    verified = dynamo_moe.verify(folder, model, library=True)
    assert len(verified.by_operator or ()) == 2
    model.set_experts_implementation("eager")
    assert found == continued(model, PROMPT, 20)
    config = json.loads((folder / "genai_config.json").read_text())
    entry = config["model"]["decoder"]["session_options"]["custom_ops_library"]
    assert entry == library.name  # It finds the library in the folder, wherever that is.


def test_a_model_without_layers_for_the_library(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    options: Any = {"folder": "genai", "tokenizer": tokenizer(), "library": True}
    (tmp_path / "genai").mkdir()
    (tmp_path / "genai" / "libdynamo_moe.so").touch()  # An earlier model's.
    report = dynamo_moe.export_language_model(model, tmp_path / "genai", **options)
    assert "no layer is one that the native library computes: it was left out" in report.notes
    assert not (tmp_path / "genai" / "libdynamo_moe.so").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "transformers"}, "library needs folder='genai', got 'transformers'"),
        ({}, "library needs folder='genai', got None"),
        ({"folder": "genai", "target": "onnxruntime"}, "needs target 'plugin', .*'onnxruntime'"),
    ],
)
def test_where_the_library_has_no_use(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export_language_model(made("mixtral"), tmp_path / "x", library=True, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v3", "keys and values of one shape"),
        ("qwen3_next", "keeps keys and values alone, but layer 0 .* keeps conv_state"),
    ],
)
def test_what_genai_cannot_run(name: str, reason: str, tmp_path: Path) -> None:
    model = made(name)
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=reason):
        dynamo_moe.export_language_model(model, tmp_path / "genai", folder="genai")
    assert not (tmp_path / "genai").exists()


def test_a_task_without_a_cache(tmp_path: Path) -> None:
    model = made("mixtral")
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match="needs a cache"):
        dynamo_moe.export_language_model(
            model, tmp_path / "genai", task="text-generation", folder="genai"
        )


@pytest.mark.parametrize("options", [{"target": "plugin"}, {"opset": 20}, {"fuse": False}])
def test_what_cannot_share_a_cache(options: dict[str, Any], tmp_path: Path) -> None:
    model = made("mixtral")
    dynamo_moe.convert(model)
    options = {"target": "onnxruntime", "shared_cache": True, **options}
    with pytest.raises(ValueError, match="shared_cache needs target 'onnxruntime'"):
        dynamo_moe.export_language_model(model, tmp_path / "m.onnx", **options)


def test_attention_that_writes_into_no_buffer(tmp_path: Path) -> None:
    model = made("deepseek_v2")
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=r"past_key_values\.0\.key is used by Concat"):
        dynamo_moe.export_language_model(
            model, tmp_path / "m.onnx", target="onnxruntime", shared_cache=True
        )


def test_a_shared_cache_in_onnx_runtime(tmp_path: Path) -> None:
    """One buffer is the past and the present of each step."""
    model = made("mixtral")
    expected = continued(model, PROMPT, 16)
    dynamo_moe.convert(model)
    path = tmp_path / "m.onnx"
    dynamo_moe.export_language_model(model, path, target="onnxruntime", shared_cache=True)
    session = onnxruntime.InferenceSession(path)
    shapes = {value.name: value.shape for value in session.get_inputs() if "past" in value.name}
    buffers = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(
            np.full((1, shape[1], 32, shape[3]), np.nan, np.float32)
        )
        for name, shape in shapes.items()
    }
    text, new = list(PROMPT), list(PROMPT)
    while len(text) < 16:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([new]))
        binding.bind_cpu_input("attention_mask", np.ones((1, len(text)), np.int64))
        binding.bind_output("logits")
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        session.run_with_iobinding(binding)
        new = [int(binding.copy_outputs_to_cpu()[0][0, -1].argmax())]
        text += new
    assert text == expected


# --- transformers.js and optimum ---


def test_the_names_that_transformers_js_and_optimum_know(tmp_path: Path) -> None:
    model = made("mixtral")
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(
        model, tmp_path / "web", folder="transformers", tokenizer=tokenizer(), external_data=True
    )
    assert {file.relative_to(tmp_path).as_posix() for file in report.files} == {
        *("web/onnx/model.onnx", "web/onnx/model.onnx_data"),
        *("web/config.json", "web/generation_config.json"),
        *("web/tokenizer.json", "web/tokenizer_config.json", "web/chat_template.jinja"),
    }
    config = transformers.AutoConfig.from_pretrained(tmp_path / "web")
    assert config.model_type == "mixtral"
    web = json.loads((tmp_path / "web/config.json").read_text())
    assert web["transformers.js_config"] == {"use_external_data_format": True}
    locations = {
        entry.value
        for tensor in onnx.load(report.path, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {"model.onnx_data"}
    assert dynamo_moe.verify(report.path, model).passed


def test_bad_folders(tmp_path: Path) -> None:
    model = made("mixtral")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="folder must be one of genai, transformers; got 'gguf'"):
        dynamo_moe.export_language_model(model, tmp_path / "x", folder="gguf")  # type: ignore[arg-type]
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        dynamo_moe.export_language_model(model, tmp_path / "file", folder="transformers")
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent to make x in"):
        dynamo_moe.export_language_model(model, tmp_path / "absent/x", folder="genai")


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    model = made("mixtral")
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(model, tmp_path / "genai", folder="genai")
    assert "no tokenizer was found beside the weights: pass tokenizer, or add its files" in (
        report.notes
    )


def test_a_folder_that_is_the_checkpoints_own(tmp_path: Path) -> None:
    """Its config.json says how the checkpoint is quantised, and stays."""
    folder = tmp_path / "checkpoint"
    made("mixtral").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "a_note": "kept"}))
    tokenizer().save_pretrained(folder)
    opened = dynamo_moe.open_checkpoint(folder)
    dynamo_moe.convert(opened)
    options: Any = {"folder": "transformers", "external_data": True}
    report = dynamo_moe.export_language_model(opened, folder, **options)
    config = json.loads((folder / "config.json").read_text())
    assert config["a_note"] == "kept"
    assert config["transformers.js_config"] == {"use_external_data_format": True}
    assert folder / "tokenizer.json" in report.files
    dynamo_moe.open_checkpoint(folder)
    # Weights inside the file: those beside it would be of an earlier one.
    dynamo_moe.export_language_model(opened, folder, folder="transformers", external_data=False)
    assert [file.name for file in (folder / "onnx").iterdir()] == ["model.onnx"]


def test_no_folder_is_left_by_an_export_that_fails(tmp_path: Path) -> None:
    model = made("mixtral")
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match="shared_cache needs"):
        dynamo_moe.export_language_model(model, tmp_path / "x", folder="genai", fuse=False)
    with pytest.raises(ValueError, match="leave out link_weights"):
        dynamo_moe.export_language_model(
            model, tmp_path / "x", folder="transformers", link_weights=True
        )
    assert not (tmp_path / "x").exists()


def test_bounded_windows_are_not_for_genai(tmp_path: Path) -> None:
    model = made("gpt_oss")
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match="leave out bounded_windows"):
        dynamo_moe.export_language_model(
            model, tmp_path / "x", folder="genai", bounded_windows=True
        )


def test_layouts_that_need_a_transpose(tmp_path: Path) -> None:
    """Gemma 3 norms queries and keys after their heads come first."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        eos_token_id=62,
        pad_token_id=63,
        bos_token_id=61,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    report = dynamo_moe.export_language_model(
        model, tmp_path / "genai", folder="genai", tokenizer=tokenizer()
    )
    assert report.nodes["com.microsoft::GroupQueryAttention"] == 2
    assert dynamo_moe.verify(report.path, model).passed
    genai = Genai(tmp_path / "genai")
    assert genai.finished(genai.start([PROMPT], 24)) == continued(model, PROMPT, 24)


@pytest.mark.first(1)
def test_the_command_line(opened: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = opened
    checkpoint, out = folder.parent / "checkpoint", tmp_path / "out"
    mine = tmp_path / "out.unverified" / "mine.txt"
    mine.parent.mkdir()
    mine.touch()
    out.mkdir()
    (out / "notes.txt").touch()
    run = CliRunner().invoke(
        app, ["export", str(checkpoint), str(out), "--format", "genai", "--verify", "--json"]
    )
    assert run.exit_code == 0, run.output
    assert sorted(file.name for file in out.iterdir()) == [
        *("chat_template.jinja", "genai_config.json", "model.onnx", "notes.txt"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert mine.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.unverified"]
    run = CliRunner().invoke(app, ["verify", str(out), str(checkpoint), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["passed"]
