"""Checkpoints: streamed into ONNX files without being held in memory, or linked from them."""

from __future__ import annotations

import errno
import filecmp
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import dynamo_moe
from dynamo_moe.language_models import example_case, performing
from dynamo_moe.weights import lazy_tensors
from dynamo_moe.weights.checkpoints import load_checkpoint
from moe_architectures import ARCHITECTURES

# Experts separate in the checkpoint, or stacked; transposed; with biases; with none of these.
FAMILIES = [
    "gpt_oss",
    "qwen3_moe",
    *(pytest.param(name, marks=pytest.mark.every) for name in ("deepseek_v3", "granitemoe")),
    *(pytest.param(name, marks=pytest.mark.every) for name in ("llama4", "mixtral")),
]


def save(name: str, folder: Path, **options: Any) -> Path:
    return save_model(ARCHITECTURES[name].build(), folder, **options)


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    model.config._experts_implementation = None
    model.save_pretrained(folder, **options)
    return folder


def one_layer() -> Any:
    return ARCHITECTURES["qwen3_moe"].build(num_hidden_layers=1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(one_layer(), tmp_path_factory.mktemp("checkpoint") / "qwen")


def export(model: Any, path: Path, **options: Any) -> dynamo_moe.ExportReport:
    path.parent.mkdir(exist_ok=True)
    dynamo_moe.convert(model)
    return dynamo_moe.export_language_model(
        model, path, **{"task": "text-generation", "external_data": True, **options}
    )


def assert_verified(model: Any, path: Path, task: Any = "text-generation") -> None:
    dynamo_moe.convert(model)
    with performing(model, task):
        dynamo_moe.verify(path, model, [example_case(model, *sizes) for sizes in ((1, 4), (3, 9))])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.first(1)
def test_streamed_and_in_memory_files_are_the_same(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / "checkpoint")
    whole = load_checkpoint(folder)
    export(whole, tmp_path / "whole" / "model.onnx")
    streamed = dynamo_moe.open_checkpoint(folder)
    assert any(isinstance(p, lazy_tensors.LazyTensor) for p in streamed.parameters())
    report = export(streamed, tmp_path / "streamed" / "model.onnx")
    assert set(report.operators) == {"DroplessMoE"}
    for file in ("model.onnx", "model.onnx.data"):
        assert filecmp.cmp(tmp_path / "whole" / file, tmp_path / "streamed" / file, shallow=False)
    assert_verified(ARCHITECTURES[name].build(), tmp_path / "streamed" / "model.onnx")


def test_the_unrolled_body_of_a_streamed_checkpoint(qwen: Path, tmp_path: Path) -> None:
    report = export(dynamo_moe.open_checkpoint(qwen), tmp_path / "model.onnx", body="unrolled")
    assert report.body == "unrolled"
    assert_verified(one_layer(), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.every
def test_shards_and_a_cast(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "checkpoint", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    half = dynamo_moe.open_checkpoint(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    report = export(half, tmp_path / "half.onnx")
    assert (
        report.parameters_bytes
        < 0.6 * export(dynamo_moe.open_checkpoint(folder), tmp_path / "full.onnx").parameters_bytes
    )
    whole = load_checkpoint(folder, dtype=torch.bfloat16)
    export(whole, tmp_path / "whole" / "half.onnx")
    data = "half.onnx.data"
    assert filecmp.cmp(tmp_path / data, tmp_path / "whole" / data, shallow=False)


@pytest.mark.slow
def test_experts_in_half_precision(qwen: Path, tmp_path: Path) -> None:
    model = dynamo_moe.open_checkpoint(qwen)
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx")
    whole = load_checkpoint(qwen)
    dynamo_moe.convert(whole, experts_dtype=torch.float16)
    with performing(whole, "text-generation-with-past"):
        dynamo_moe.verify(report.path, whole, [example_case(whole, 2, 3, 5)])


def test_the_model_stays_lazy(qwen: Path, tmp_path: Path) -> None:
    model = dynamo_moe.open_checkpoint(qwen)
    before = dict(model.named_parameters())
    export(model, tmp_path / "model.onnx")
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_opened_model_runs_once_its_weights_are_read(name: str, tmp_path: Path) -> None:
    expected, opened = ARCHITECTURES[name].build().eval(), tmp_path / "checkpoint"
    save_model(expected, opened)
    model: Any = dynamo_moe.open_checkpoint(opened)
    dynamo_moe.convert(model)
    tokens = torch.arange(12).reshape(2, 6)
    file = next(opened.glob("*.safetensors"))
    file.rename(file.with_suffix(".gone"))
    with pytest.raises(FileNotFoundError, match=file.name):
        dynamo_moe.read_weights(model)
    file.with_suffix(".gone").rename(file)
    weights = {id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    assert dynamo_moe.read_weights(model) == sum(weights.values())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    assert dynamo_moe.read_weights(model) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: Any, packed: bool) -> None:
    """Stacked ones, of which it reads rows, or packs them on the way, one by one."""
    expected = one_layer().eval()
    save_model(expected, tmp_path, save_original_format=False)
    model: Any = dynamo_moe.open_checkpoint(tmp_path)
    dynamo_moe.convert(expected)
    dynamo_moe.convert(model)
    if packed:
        dynamo_moe.quantize(expected, "int8")
        dynamo_moe.quantize(model, "int8")
    read: list[int] = []
    rows = lazy_tensors.Stored._read
    monkeypatch.setattr(
        lazy_tensors.Stored, "_read", lambda *args: read.append(args[2]) or rows(*args)
    )
    tokens = torch.arange(12).reshape(2, 6)
    with dynamo_moe.sharded(model, 1, 2), dynamo_moe.sharded(expected, 1, 2):
        dynamo_moe.read_weights(model)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    experts = sum(p.nbytes for n, p in one_layer().named_parameters() if ".experts." in n)
    others = sum(p.nbytes for n, p in one_layer().named_parameters() if ".experts." not in n)
    # Scales need an expert's greatest and least number, codes need the scales and all numbers.
    assert sum(read) == others + (5 if packed else 1) * experts // 2


def test_linked_weights(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path / "qwen")
    linked_model = dynamo_moe.open_checkpoint(tmp_path / "qwen")
    linked = export(linked_model, tmp_path / "linked.onnx", link_weights=True)
    copied = export(dynamo_moe.open_checkpoint(tmp_path / "qwen"), tmp_path / "copied.onnx")
    data = [Path(f"{report.path}.data").stat().st_size for report in (linked, copied)]
    # The experts are separate in the checkpoint; only they are fused into a new file.
    experts = [p for n, p in linked_model.named_parameters() if ".experts." in n]
    assert data[0] == sum(p.numel() * p.itemsize for p in experts)
    assert data[1] > data[0] + 10_000
    assert_verified(one_layer(), linked.path)


def test_experts_that_lie_as_in_out_are_linked(tmp_path: Path) -> None:
    folder = save("gpt_oss", tmp_path / "gpt_oss")
    report = export(dynamo_moe.open_checkpoint(folder), tmp_path / "linked.onnx", link_weights=True)
    graph = onnx.load(report.path, load_external_data=False).graph
    places = {
        tensor.name: entry.value
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    layers = [node for node in graph.node if node.domain == "moe"]
    for name in (name for layer in layers for name in layer.input[2:4]):
        assert places[name] == "gpt_oss/model.safetensors"
    assert_verified(load_checkpoint(folder), report.path)


def test_links_need_a_place_above_the_checkpoint(qwen: Path, tmp_path: Path) -> None:
    model = dynamo_moe.open_checkpoint(qwen)
    with pytest.raises(ValueError, match=r"linked from files in .* or below it only"):
        export(model, tmp_path / "model.onnx", link_weights=True)
    assert not list(tmp_path.iterdir())


class Interruption(BaseException):
    pass


def test_an_interrupted_export_leaves_the_old_file(qwen: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("old")

    def interrupt(phase: str, done: int, total: int) -> None:
        if done > total / 2:
            raise Interruption

    with pytest.raises(Interruption):
        export(dynamo_moe.open_checkpoint(qwen), path, progress=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_text() == "old"


def test_progress_counts_bytes(qwen: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = export(
        dynamo_moe.open_checkpoint(qwen),
        tmp_path / "model.onnx",
        progress=lambda *call: calls.append(call),
    )
    written = [done for phase, done, total in calls if total]
    assert {total for _, _, total in calls} == {0, report.parameters_bytes}
    assert (written[0], written[-1]) == (0, report.parameters_bytes)
    assert written == sorted(written)
    phases = list(dict.fromkeys(phase for phase, _, _ in calls))
    assert [phase for phase in phases if phase != "decomposition"] == [
        "capture",
        "translation",
        "optimization",
        "check",
        "serialization",
    ]


def test_a_full_disk_is_said_before_anything_is_written(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        OSError, match=r"needs \d+ bytes for its weights, .* has 1000 left"
    ) as error:
        export(dynamo_moe.open_checkpoint(qwen), tmp_path / "model.onnx")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _bytes(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def _header(content: bytes, change: Any) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + content[8 + length :]


def _entry(header: dict[str, Any]) -> dict[str, Any]:
    return header["lm_head.weight"]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: _without(f, "config.json"), FileNotFoundError, "holds no config.json"),
        (lambda f: _without(f, "model.safetensors"), FileNotFoundError, "holds neither"),
        (
            lambda f: _config(f, architectures=["NoSuchModel"]),
            ValueError,
            "names the architecture 'NoSuchModel', unknown here",
        ),
        (
            lambda f: _config(
                f, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}
            ),
            ValueError,
            r"is quantised: fp8 with weight_block_size=\[64, 64\] is not taken",
        ),
        (
            lambda f: _config(f, vocab_size=32),
            (ValueError, RuntimeError),
            "does not fit|mismatched",
        ),
        (
            lambda f: _bytes(f, lambda b: _header(b, lambda h: h.pop("lm_head.weight"))),
            ValueError,
            "missing keys lm_head.weight, 1 in all",
        ),
        (lambda f: _bytes(f, lambda b: b[:-1]), ValueError, "is cut off"),
        (lambda f: _bytes(f, lambda b: b[:5]), ValueError, "not a safetensors file"),
        (lambda f: _bytes(f, lambda b: b"\xff" * 8 + b[8:]), ValueError, "its header has"),
        (lambda f: _bytes(f, lambda b: b[:8] + b"x" + b[9:]), ValueError, "not a safetensors file"),
        (
            lambda f: _bytes(f, lambda b: _header(b, lambda h: _entry(h).update(dtype="F4"))),
            ValueError,
            "dtype F4 is unknown",
        ),
        (
            lambda f: _bytes(f, lambda b: _header(b, lambda h: _entry(h).update(shape=[3]))),
            ValueError,
            "has the bytes",
        ),
        (
            lambda f: _bytes(f, lambda b: _header(b, lambda h: _entry(h).pop("shape"))),
            ValueError,
            "not a safetensors file",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{}"),
            ValueError,
            "not an index",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "../secret.safetensors"}}'
            ),
            ValueError,
            "is not a file beside it",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "absent.safetensors"}}'
            ),
            FileNotFoundError,
            "lacks absent.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "model.safetensors"}}'
            ),
            ValueError,
            "lacks x, which the index places there",
        ),
    ],
)
def test_damaged_checkpoints(
    damage: Any, error: Any, message: str, qwen: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(qwen, folder)
    damage(folder)
    with pytest.raises(error, match=message):
        dynamo_moe.open_checkpoint(folder)


def test_only_floating_dtypes(qwen: Path) -> None:
    with pytest.raises(TypeError, match=re.escape("floating dtype, got torch.int8")):
        dynamo_moe.open_checkpoint(qwen, dtype=torch.int8)


@pytest.mark.every
def test_memory_of_a_larger_checkpoint(tmp_path: Path) -> None:
    """400 MB of weights pass through a process that never holds 200 MB more than before."""
    options = {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    config = ARCHITECTURES["qwen3_moe"].make_config(**options, num_experts=64)
    model = dynamo_moe_test_model(config)
    model.save_pretrained(tmp_path / "checkpoint")
    size = sum(p.nbytes for p in model.parameters())
    assert size > 350e6
    del model
    program = """
import resource, sys, torch
import dynamo_moe, dynamo_moe.exporting, onnxscript
import transformers.models.qwen3_moe.modeling_qwen3_moe
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = torch.nn.Sequential(torch.nn.Linear(4, 4))
dynamo_moe.export(small, torch.randn(2, 4), sys.argv[2])
before = peak()
model = dynamo_moe.open_checkpoint(sys.argv[1])
dynamo_moe.convert(model)
dynamo_moe.export_language_model(
    model, sys.argv[2], task="text-generation", external_data=True
)
print((peak() - before) * 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "checkpoint", tmp_path / "model.onnx"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(result.stdout.split()[-1]) < 200e6
    assert (tmp_path / "model.onnx.data").stat().st_size > 350e6


def dynamo_moe_test_model(config: Any) -> Any:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)
