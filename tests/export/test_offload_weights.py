"""The safetensors files that the weights of offloaded layers lie in."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import dynamo_moe
from files_to_offload import arrays, by_hand, exported, linked, read, unchanged
from small_models import mlp_model


def test_the_weights_file_is_a_safetensors_file(tmp_path: Path) -> None:
    path = exported(tmp_path)
    report = dynamo_moe.offload_file(
        path, tmp_path / "copy.onnx", resident_experts=1, weights=tmp_path / "e.safetensors"
    )
    (written,) = tmp_path.glob("e.*.safetensors")
    assert report.weights_file == written
    checksum = report.layers[0].tensors["w1"].file.header_crc32
    assert written.name == f"e.{checksum:08x}.safetensors"
    stored = load_file(report.weights_file)
    assert {*stored} == {f"{layer}.mlp.{name}" for layer in (0, 1) for name in ("w1", "w2")}
    for name, array in arrays(path).items():
        if name in stored:
            np.testing.assert_array_equal(stored[name], array)
    content = report.weights_file.read_bytes()
    for source in (each for layer in report.layers for each in layer.sources):
        assert source.state() == "found"
        assert source.offset % 128 == 0
        assert source.file.header_bytes % 256 == 0
        header = content[: source.file.header_bytes]
        assert source.file.header_crc32 == zlib.crc32(header)
        assert source.file.file_bytes == len(content)


def test_a_file_of_other_values_is_written_beside_the_first(tmp_path: Path) -> None:
    path = exported(tmp_path)
    first = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    source = first.layers[0].tensors["w1"]
    written = source.path.stat()
    same = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    assert (first.is_weights_file_new, same.is_weights_file_new) == (True, False)
    assert (same.weights_file, source.path.stat()) == (first.weights_file, written)
    model = mlp_model()
    model[0].mlp.w1.data.view(-1)[0] += 1
    other = dynamo_moe.offload_file(
        exported(tmp_path, model), tmp_path / "copy.onnx", resident_experts=1
    )
    assert other.is_weights_file_new
    assert {source.state(), other.layers[0].tensors["w1"].state()} == {"found"}
    changed = other.layers[0].tensors["w1"]
    assert changed.path.stat().st_size == source.file.file_bytes
    assert changed.path != source.path
    # By their headers, either is told from the other one.
    changed.path.replace(source.path)
    assert source.state() == "changed"


def test_a_damaged_file_of_that_name_is_replaced(tmp_path: Path) -> None:
    path = exported(tmp_path)
    first = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    source = first.layers[0].tensors["w1"]
    source.path.write_bytes(source.path.read_bytes()[:-1])
    assert source.state() == "changed"
    dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert source.state() == "found"


def test_weights_are_removed_if_the_copy_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("dynamo_moe.files.offloading.save_model", fail)
    with pytest.raises(OSError, match="no room"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


def test_linked_weights_stay_in_their_file(tmp_path: Path) -> None:
    path = linked(tmp_path)
    report = dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=2)
    before, after = arrays(path), arrays(report.path)
    for layer in report.layers:
        for name, source in layer.tensors.items():
            assert source.path == tmp_path / "weights" / "model.safetensors"
            assert read(source) == before[f"{layer.name}.{name}"].tobytes()
            assert after[f"{layer.name}.{name}"].shape == (1,)
    assert report.weights_file is None
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "copy.onnx",
        "model.onnx",
        "weights",
    ]


def test_weights_that_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    reports = []
    for pad in (0, 8):
        (tmp_path / str(pad)).mkdir()
        path = linked(tmp_path / str(pad), pad)
        reports.append(
            dynamo_moe.offload_file(path, path.with_name("copy.onnx"), resident_experts=2)
        )
    (note,) = [note for report in reports for note in report.notes]
    assert "model.safetensors: weights that do not begin at a multiple of 16 bytes are" in note


def test_a_copy_in_another_folder_finds_the_other_weights(tmp_path: Path) -> None:
    path = linked(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "model.onnx"
    for _ in range(2):
        dynamo_moe.offload_file(path, copy, resident_experts=2)
    link = tmp_path / "elsewhere" / "weights" / "model.safetensors"
    assert link.readlink() == tmp_path / "weights" / "model.safetensors"
    link.unlink()
    link.write_bytes(b"another")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        dynamo_moe.offload_file(path, copy, resident_experts=2)


def test_links_that_cannot_be_made_are_said_before_weights_are_copied(tmp_path: Path) -> None:
    path = exported(tmp_path, external_data=True)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(tmp_path / entry.value)
    path.write_bytes(proto.SerializeToString())
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with pytest.raises(ValueError, match="not a file in the ONNX file's folder: no link is made"):
        dynamo_moe.offload_file(path, folder / "copy.onnx", resident_experts=2)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("name", [b"a\nb", b"a\x01", b"\xe9", b"a\xffb"])
def test_paths_that_an_engine_cannot_hold(tmp_path: Path, name: bytes) -> None:
    path = by_hand(tmp_path, unchanged)
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    message = "a path of weights must be UTF-8 without control characters"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload_file(path, folder / "copy.onnx", resident_experts=1)
    assert not [*folder.iterdir()]
    linked(folder)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload_file(
            folder / "model.onnx",
            folder / "copy.onnx",
            resident_experts=1,
            weights=tmp_path / "e.safetensors",
        )
    assert not [*tmp_path.glob("e.*")]


def test_nothing_that_is_read_is_overwritten(tmp_path: Path) -> None:
    path = linked(tmp_path)
    checkpoint = tmp_path / "weights" / "model.safetensors"
    content = path.read_bytes(), checkpoint.read_bytes()
    for output in (path, checkpoint):
        with pytest.raises(ValueError, match="is read to write it: name another file"):
            dynamo_moe.offload_file(path, output, resident_experts=1)
    dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1, weights=checkpoint)
    assert content == (path.read_bytes(), checkpoint.read_bytes())


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = exported(tmp_path)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("dynamo_moe.files.experts_file.shutil.disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"\.experts\.safetensors needs 36864 bytes, .* 100 left"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)


def test_a_file_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    path = exported(tmp_path, external_data=True)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(OSError, match="bytes before the end of"):
        dynamo_moe.offload_file(path, tmp_path / "copy.onnx", resident_experts=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
