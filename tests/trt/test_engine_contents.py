"""What is found in an engine's file, on files that are none."""

from __future__ import annotations

from functools import cache

import pytest

import trt_plugin
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from trt_plugin.bundle import Bundle, Program, read
from trt_plugin.bundle.records import FILE_HEADER, FILE_MAGIC, VERSION
from trt_plugin.engine import contents as contents_module
from trt_plugin.native import library_path


@cache
def program(name: str) -> Program:
    case = make_case("dropless", (5,), width=16, hidden=24)
    return uncompiled_program(plan(layer_of(case), architecture(name)))


def contents(tmp_path, *parts: bytes) -> trt_plugin.EngineContents:
    path = tmp_path / "model.engine"
    path.write_bytes(b"".join(parts))
    return trt_plugin.read_engine(path)


def test_programs_are_counted_and_listed_once(tmp_path):
    both = Bundle((program("sm_120"), program("sm_89")))
    one = Bundle((program("sm_89"),))
    found = contents(tmp_path, b"a plan", both.data, b"?", one.data, both.data[:40], one.data)
    assert [(each.program, each.copies) for each in found.programs] == [
        (program("sm_120"), 1),
        (program("sm_89"), 3),
    ]
    assert found.architectures == ("sm_89", "sm_120")
    sizes = [len(each.program.data) * each.copies for each in found.programs]
    assert found.program_bytes == sum(sizes) == found.to_dict()["program_bytes"]
    assert found.library is None


def test_damaged_programs_do_not_count(tmp_path):
    data = Bundle((program("sm_89"),)).data
    for damaged in (data[:-1], data[:500] + b"?" + data[501:], data[:8], data[:12]):
        found = contents(tmp_path, b"a plan", damaged)
        assert (found.programs, found.architectures, found.program_bytes) == ((), (), 0)


def test_the_plugins_library_is_found(tmp_path):
    library = library_path().read_bytes()
    assert contents(tmp_path, b"a plan", library).library == "installed"
    assert contents(tmp_path, b"a plan", library, b"?").programs == ()
    assert contents(tmp_path, b"a plan", library[:-1]).library == "other"
    # The library's name alone, as in an error's text, is no library.
    assert contents(tmp_path, b"dynamo_moe_program_open failed").library is None


def test_false_headers_cost_no_more_than_the_bytes_they_have(tmp_path, monkeypatch):
    true = Bundle((program("sm_89"),)).data
    # Each claims the rest of the file, or another version.
    rest, count = 2**20, 4000
    claims = [
        FILE_HEADER.pack(FILE_MAGIC, version, 1, rest, 0, 0)
        for version in (VERSION, VERSION + 1)
        for _ in range(count)
    ]
    checked = []
    monkeypatch.setattr(
        contents_module, "read", lambda data: checked.append(len(data)) or read(data)
    )
    found = contents(tmp_path, *claims, true, bytes(rest))
    assert [each.program for each in found.programs] == [program("sm_89")]
    assert checked == [len(true)]


def test_what_is_no_engine(tmp_path):
    (tmp_path / "empty.engine").touch()
    with pytest.raises(ValueError, match=r"empty\.engine is empty: that is no engine"):
        trt_plugin.read_engine(tmp_path / "empty.engine")
    for name, expected in (("a.plan", True), ("a.trt", True), ("a.onnx", False), ("b", False)):
        assert trt_plugin.is_engine(name) is expected
