"""Models with an encoder: their two files and transformers write the same text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from dynamo_moe.language_models import performing
from dynamo_moe.language_models.parts import once, turn
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
        "bart": lambda: code.BartConfig(
            **BART, decoder_start_token_id=2, tie_word_embeddings=False
        ),
        "marian": lambda: code.MarianConfig(
            **BART, decoder_start_token_id=2, pad_token_id=0, **changes
        ),
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
        pytest.param("t5", {}, marks=pytest.mark.every),
        pytest.param("bart", {}, marks=pytest.mark.every),
        pytest.param("switch_transformers", {"target": "onnxruntime"}, marks=pytest.mark.every),
        pytest.param("switch_transformers", {"target": "dense"}, marks=pytest.mark.every),
        pytest.param("umt5", {}, marks=pytest.mark.every),
        pytest.param("marian", {}, marks=pytest.mark.every),
        pytest.param("t5gemma", {}, marks=pytest.mark.every),
        ("t5gemma", {"bounded_windows": True}),
    ],
)
@pytest.mark.first(1)
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


@pytest.mark.every
def test_hidden_tokens_that_see_none(tmp_path: Path) -> None:
    """In a window of padding alone, whose keys the decoder does not see either."""
    text = GEMMA | {"max_position_embeddings": 256}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    tokens = {"image_token_index": 63, "eoi_token_index": 62}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, **tokens)
    torch.manual_seed(0)
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    report = dynamo_moe.verify(tmp_path / "model", model)
    assert "hidden tokens" in {case.excepted for case in report.cases}


def test_verify_notices_other_keys(switch: tuple[Any, Path]) -> None:
    other = build("switch_transformers")
    with torch.no_grad():
        other.decoder.block[1].layer[1].EncDecAttention.v.weight[0, 0] += 1
    dynamo_moe.convert(other)
    with pytest.raises(dynamo_moe.VerificationError, match=r"encoder\.onnx"):
        dynamo_moe.verify(switch[1], other)
    assert dynamo_moe.verify(switch[1] / "decoder.onnx", other).passed


class Change:
    """Nodes in front of a graph, whose results take the place of what it reads."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []

    def number(self, name: str, value: int) -> str:
        self.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
        return name

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def instead_of(self, name: str, other: str) -> None:
        for node in self.graph.node:
            renamed = [other if x == name else x for x in node.input]
            del node.input[:]
            node.input.extend(renamed)

    def put_in_front(self) -> None:
        for node in reversed(self.nodes):
            self.graph.node.insert(0, node)


def read_eleven_tokens(change: Change) -> None:
    begin, end = change.number("begin", 0), change.number("end", 11)
    axes = {1: change.number("axis_1", 1), 2: change.number("axis_2", 2)}
    for value in [*change.graph.input]:
        axis = {"cross_attention": 2, "encoder_attention_mask": 1}.get(value.name.split(".")[0])
        if axis is not None:
            arguments = [begin, end, axes[axis]]
            first = change.node("Slice", [value.name, *arguments], f"{value.name}.first")
            change.instead_of(value.name, first)


def take_the_last_rows_mask(change: Change) -> None:
    mask = "encoder_attention_mask"
    row = change.node("Gather", [mask, change.number("last", -1)], "row", axis=0)
    shape = change.node("Shape", [mask], "rows")
    change.instead_of(mask, change.node("Expand", [row, shape], "all_rows"))


def read_padding_on_the_right_alone(change: Change) -> None:
    mask = "attention_mask"
    shape = change.node("Shape", [mask], "shape")
    length = change.node("Gather", [shape, change.number("one", 1)], "length")
    top = onnx.helper.make_node("TopK", [mask, length], ["sorted", "order"], axis=1)
    change.nodes.append(top)
    change.instead_of(mask, "sorted")


def take_far_tokens_for_nearer_ones(change: Change) -> None:
    """Beyond 45 tokens apart."""
    for tensor in change.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.dtype == np.int64 and value.size == 1 and value.item() == 15:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full_like(value, 12), tensor.name))


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("decoder", read_eleven_tokens),
        ("decoder", take_the_last_rows_mask),
        ("encoder", read_padding_on_the_right_alone),
        ("encoder", take_far_tokens_for_nearer_ones),
    ],
)
def test_verify_notices_what_is_read_otherwise(
    part: str, changed: Callable[[Change], None], switch: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = switch
    file = onnx.load(folder / f"{part}.onnx")
    change = Change(file.graph)
    changed(change)
    change.put_in_front()
    onnx.save(file, tmp_path / f"{part}.onnx")
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(tmp_path / f"{part}.onnx", model)


def test_what_is_found_in_a_turn_is_known_in_it() -> None:
    found: list[int] = []

    def find() -> int:
        found.append(0)
        return len(found)

    with turn():
        assert [once("a", find), once("a", find), once("b", find)] == [1, 1, 2]
        with turn():
            assert once("a", find) == 1
    assert once("a", find) == 3
    with turn():
        assert once("a", find) == 4


@pytest.mark.every
def test_threads_export_one_model(switch: tuple[Any, Path], tmp_path: Path) -> None:
    """One at a time has the encoder's role, and the other the decoder's."""
    model, folder = switch

    def export(number: int) -> bytes:
        path = tmp_path / str(number)
        dynamo_moe.export_language_model(model, path, task=TASK)
        return b"".join((path / f"{part}.onnx").read_bytes() for part in ("encoder", "decoder"))

    expected = b"".join((folder / f"{part}.onnx").read_bytes() for part in ("encoder", "decoder"))
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(export, range(2))] == [expected] * 2
    with performing(model, "encoder"), pytest.raises(ValueError, match="performs 'encoder' here"):
        dynamo_moe.verify(folder / "decoder.onnx", model)


@pytest.mark.every
def test_a_folder_is_replaced_as_a_whole(
    switch: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = switch
    copied = shutil.copytree(folder, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    replace = Path.replace

    def fails(self: Path, target: Path) -> Path:
        if Path(target) == copied / "decoder.onnx" and "old" not in self.parts:
            raise OSError("the disk is full")
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        with pytest.raises(OSError, match="the disk is full"):
            dynamo_moe.export_language_model(model, copied, task=TASK, external_data=True)
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before
    report = dynamo_moe.export_language_model(model, copied, task=TASK, external_data=True)
    assert sorted(report.files) == sorted(copied.iterdir())
    assert report.layers == ("encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp")
    assert report.operators == {"DroplessMoEExperts": 2}
    (copied / "vision.onnx").touch()
    with pytest.raises(ValueError, match=r"has vision\.onnx of another task: name another folder"):
        dynamo_moe.export_language_model(model, copied, task=TASK)
    with pytest.raises(ValueError, match=r"has vision\.onnx of another task"):
        dynamo_moe.generate(copied, [[5]], max_new_tokens=1)


@pytest.mark.parametrize("capacity", [2, pytest.param(64, marks=pytest.mark.every)])
@pytest.mark.every
def test_experts_of_a_capacity(capacity: int, tmp_path: Path) -> None:
    """In one call they drop tokens that they take in several."""
    model = build("switch_transformers", expert_capacity=capacity)
    ids, mask = prompts()
    expected = written(model, ids, mask)
    dynamo_moe.convert(model)
    dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    result = dynamo_moe.generate(tmp_path / "model", ids, mask, max_new_tokens=32)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.every
def test_two_vocabularies_and_another_beginning(tmp_path: Path) -> None:
    model = build("marian", decoder_vocab_size=40, share_encoder_decoder_embeddings=False)
    model.generation_config.decoder_start_token_id = None
    model.generation_config.bos_token_id = 7
    expected = written(model, *prompts(), pad_token_id=0)
    assert (expected[:, 0] == 7).all()
    dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    result = dynamo_moe.generate(tmp_path / "model", *prompts(), max_new_tokens=32)
    np.testing.assert_array_equal(result, expected)
    model.generation_config.decoder_start_token_id = [3, 4, 5]
    with performing(model, "decoder"):
        described = model.forward.parts.described()
    assert described.decoder_start_token_id is None


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
    with pytest.raises(ValueError, match=r"decoder_input_ids must be integers \[1, L\] of at "):
        dynamo_moe.generate(folder, [[5]], max_new_tokens=1, decoder_input_ids=[[0], [0]])
    with pytest.raises(ValueError, match="row 0 of attention_mask has no 1"):
        dynamo_moe.generate(folder, [[5]], [[0]], max_new_tokens=1)
    with pytest.raises(ValueError, match="a model with an encoder takes no pixel_values: pictures"):
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
    with pytest.raises(ValueError, match="writes several files, none of which links its weights"):
        refused(t5, link_weights=True)
    t5.__class__ = ReadsItsEncoder
    with pytest.raises(ValueError, match="ReadsItsEncoder computes other logits than its encoder"):
        refused(t5)
    whisper = transformers.WhisperConfig(**BART, pad_token_id=0)
    with pytest.raises(ValueError, match="takes input_features, not input_ids"):
        refused(transformers.WhisperForConditionalGeneration(whisper).eval())
    assert not list(tmp_path.iterdir())


def test_what_lazy_weights_do_not_show_verify_does(tmp_path: Path) -> None:
    model = build("t5")
    model.save_pretrained(tmp_path / "checkpoint")
    opened = dynamo_moe.open_checkpoint(tmp_path / "checkpoint")
    opened.__class__ = model.__class__ = ReadsItsEncoder
    report = dynamo_moe.export_language_model(opened, tmp_path / "model", task=TASK)
    assert any("were not compared with the whole model" in note for note in report.notes)
    with pytest.raises(ValueError, match="ReadsItsEncoder computes other logits than its encoder"):
        dynamo_moe.verify(tmp_path / "model", model)


@pytest.mark.every
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
