"""Where an offloaded layer's weights lie, and whether the file is still the same."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from custom_ops.offload import FileIdentity, WeightSource


def safetensors(path: Path, text: str = '{"__metadata__":{}}', data: bytes = bytes(64)) -> Path:
    header = text.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_the_text_of_a_source(tmp_path):
    path = safetensors(tmp_path / "a file.safetensors")
    source = WeightSource.of(path, 32, 48)
    content = path.read_bytes()
    assert str(source) == f"32 48 {len(content)} 27 {zlib.crc32(content[:27]):08x} {path}"
    assert WeightSource.parse(str(source)) == source
    assert source.state() == "found"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "32 48 91 27 0000abcd a/relative/path",
        "32 48 91 27 abcd /path",
        "32 48 91 27 0000ABCD /path",
        "32 -48 91 27 0000abcd /path",
        "32  48 91 27 0000abcd /path",
        "32 48 91 0000abcd /path",
        "32 48 91 27 0000abcd ",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="a weight's source must be <offset> <bytes>"):
        WeightSource.parse(text)


def test_a_path_with_spaces_and_other_letters():
    text = "32 48 91 27 0000abcd /models/größe 7 /x y.safetensors"
    assert str(WeightSource.parse(text)) == text
    assert WeightSource.parse(text).path == Path("/models/größe 7 /x y.safetensors")


def test_files_that_are_missing_or_changed(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    source = WeightSource.of(path, 32, 48)
    safetensors(path, data=bytes(63))
    assert source.state() == "changed"
    safetensors(path, text=json.dumps({"__metadata__": {}}))
    assert source.state() == "changed"
    path.write_bytes(b"short")
    assert source.state() == "changed"
    path.unlink()
    assert source.state() == "missing"


def test_what_is_no_file_is_not_opened(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    source = WeightSource.of(path, 32, 48)
    path.unlink()
    os.mkfifo(path)
    assert source.state() == "changed"
    path.unlink()
    path.mkdir()
    assert source.state() == "changed"


def test_the_environment_names_another_folder(tmp_path, monkeypatch):
    path = safetensors(tmp_path / "model.safetensors")
    source = WeightSource.of(path, 32, 48)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("DYNAMO_MOE_WEIGHTS", str(other))
    # Without the file there, it is looked for where it was.
    assert (source.locate(), source.state()) == (path, "found")
    path.rename(other / path.name)
    assert (source.locate(), source.state()) == (other / path.name, "found")
    safetensors(path)
    safetensors(other / path.name, data=b"")
    assert source.state() == "changed"
    monkeypatch.setenv("DYNAMO_MOE_WEIGHTS", "")
    assert (source.locate(), source.state()) == (path, "found")


def test_a_link_keeps_its_name(tmp_path):
    path = safetensors(tmp_path / "0123abcd")
    link = tmp_path / "model.safetensors"
    link.symlink_to(path)
    assert WeightSource.of(link, 32, 48).path == link


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header has 0 bytes"),
        (b"\x05\0\0\0\0\0\0\0{}", "its header has 5 bytes"),
        (b"\xff" * 100, "its header has 18446744073709551615 bytes"),
        (b"\x02\0\0\0\0\0\0\0{]", "Expecting property name"),
    ],
)
def test_what_is_not_a_safetensors_file(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"file is not a safetensors file: {message}"):
        FileIdentity.of(path)


@pytest.mark.parametrize(("offset", "size"), [(26, 8), (27, 65), (91, 1)])
def test_bytes_that_are_no_tensors(tmp_path, offset, size):
    path = safetensors(tmp_path / "file")
    with pytest.raises(ValueError, match=f"no tensor in its bytes {offset} to {offset + size}"):
        WeightSource.of(path, offset, size)
