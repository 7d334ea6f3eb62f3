"""What is found in an engine's file, on files that are none."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

import trt_plugin
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from custom_ops.offload import WeightSource, cache_bytes
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from trt_plugin.bundle import Bundle, Program, read
from trt_plugin.bundle.records import FILE_HEADER, FILE_MAGIC, VERSION
from trt_plugin.engine import engine_file
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


def offloaded(resident: int, **sizes: int) -> tuple[Program, int]:
    """A program of an offloaded layer, and the bytes of its w1 and of its w2."""
    layer = layer_of(make_case("dropless", (5,), **{"width": 16, "hidden": 24, **sizes}))
    record = replace(layer, resident_experts=resident)
    size = (
        layer.shape.experts
        * layer.shape.width
        * layer.shape.hidden
        * layer.shape.weight_format.operand_dtype.itemsize
    )
    return uncompiled_program(plan(record, architecture("sm_89"))), size


def fields(layer: Program, path: Path, *places: tuple[int, int], shared: bool = False) -> bytes:
    """What an engine holds of a layer whose programs are named: w1's and w2's place in a file."""
    sources = [str(WeightSource.of(path, *place)).encode() for place in places]
    names = (b"\0w1_source\0R\0\0\0", b"\0\x0a\0\0\0w2_source\0\x06\0")
    parts = [name + text for name, text in zip(names, sources, strict=True)]
    cache = b"\x0d\0\0\0expert_cache\0\x05\0\0\0\x01\0\0\0" + bytes((shared, 0, 0, 0))
    return b"".join((b"programs_name\0", layer.layer.to_bytes(), bytes(16), *parts, cache))


def weights_file(path: Path, size: int) -> Path:
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes(size))
    return path


def test_offloaded_experts_and_their_files(tmp_path):
    first, size = offloaded(2)
    second, larger = offloaded(3, hidden=32)
    path = weights_file(tmp_path / "größe 1.safetensors", 2 * size + 2 * larger)
    places = [(10, size), (10 + size, size)]
    others = [(10 + 2 * size, larger), (10 + 2 * size + larger, larger)]
    found = contents(
        tmp_path,
        fields(second, path, *others),
        Bundle((first, second, program("sm_89"))).data,
        # TensorRT stores a field several times.
        *(
            fields(first, path, *places),
            fields(second, path, *others),
            fields(first, path, *places),
        ),
    )
    experts = first.layer.experts
    assert [(each.experts, each.resident_experts) for each in found.offloaded] == [
        (experts, 2),
        (experts, 3),
    ]
    assert [(each.tensors["w1"].offset, each.tensors["w2"].offset) for each in found.offloaded] == [
        (10, 10 + size),
        (10 + 2 * size, 10 + 2 * size + larger),
    ]
    read = found.to_dict()["offloaded"]
    assert [each["weight_bytes"] for each in read] == [2 * size, 2 * larger]
    assert [each["device_bytes"] for each in read] == [
        cache_bytes(experts, resident, (bytes_ // experts, bytes_ // experts))
        for resident, bytes_ in ((2, size), (3, larger))
    ]
    assert read[0]["tensors"]["w1"] == {
        "path": str(path),
        "offset": 10,
        "bytes": size,
        "state": "found",
    }
    assert f"{path}: found" in shown(found)
    assert [each.layers for each in found.offloaded] == [1, 1]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: changed" in shown(found)
    path.unlink()
    assert f"{path}: missing" in shown(found)


def shown(found: trt_plugin.EngineContents) -> str:
    text = io.StringIO()
    Console(width=250, file=text).print(found)
    return text.getvalue()


def test_layers_of_one_size_may_differ_in_their_slots(tmp_path):
    (two, size), (three, _) = offloaded(2), offloaded(3)
    path = weights_file(tmp_path / "e.safetensors", 4 * size)
    first, second = ([(10 + at * size, size) for at in places] for places in ((0, 1), (2, 3)))
    stored = (fields(three, path, *first), fields(two, path, *second), fields(two, path, *first))
    found = contents(tmp_path, Bundle((two, three)).data, *stored, *stored)
    assert [(each.tensors["w1"].offset, each.resident_experts) for each in found.offloaded] == [
        (10, 2),
        (10, 3),
        (10 + 2 * size, 2),
    ]
    assert f"{4 * size / 1000:.1f} kB on the host" in shown(found)


def test_layers_that_share_all_weights_have_slots_each(tmp_path):
    two, size = offloaded(2)
    path = weights_file(tmp_path / "e.safetensors", 4 * size)
    once, thrice = ([(10 + at * size, size) for at in places] for places in ((0, 1), (2, 3)))
    stored = (fields(two, path, *once), *[fields(two, path, *thrice)] * 3)
    found = contents(tmp_path, Bundle((two,)).data, *stored, *stored)
    assert [each.layers for each in found.offloaded] == [1, 3]
    device = found.offloaded[0].device_bytes
    assert device is not None
    assert f"{4 * device / 1000:.1f} kB on the GPU" in shown(found)


@pytest.mark.parametrize(
    ("shared", "expected", "text"),
    [
        ((True, True), True, "all contexts together"),
        ((False, False), False, "each context"),
        ((True, False), None, "each cache"),
    ],
)
def test_whether_contexts_share_their_slots(tmp_path, shared, expected, text):
    two, size = offloaded(2)
    path = weights_file(tmp_path / "e.safetensors", 2 * size)
    places = [(10, size), (10 + size, size)]
    layers = (fields(two, path, *places, shared=each) for each in shared)
    found = contents(tmp_path, Bundle((two,)).data, *layers)
    assert found.shared_cache is found.to_dict()["shared_cache"] is expected
    assert f"on the GPU for {text} instead of" in shown(found)


def test_slots_that_cannot_be_known_are_not_guessed(tmp_path):
    (two, size), (other, _) = offloaded(2), offloaded(2, hidden=32)
    path = weights_file(tmp_path / "e.safetensors", 2 * size)
    places = [(10, size), (10 + size, size)]
    before = fields(two, path, *places)
    # Of another size, resident, and none at all.
    for bundle in (Bundle((other,)), Bundle((program("sm_89"),)), Bundle(())):
        found = contents(tmp_path, bundle.data if bundle.programs else b"", before)
        (each,) = found.offloaded
        assert (each.experts, each.resident_experts, each.device_bytes) == (None, None, None)
        assert "an unknown size on the GPU" in shown(found)
    found = contents(tmp_path, b"a plan")
    assert (found.offloaded, found.shared_cache) == ((), None)


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
    monkeypatch.setattr(engine_file, "read", lambda data: checked.append(len(data)) or read(data))
    found = contents(tmp_path, *claims, true, bytes(rest))
    assert [each.program for each in found.programs] == [program("sm_89")]
    assert checked == [len(true)]


def test_what_is_no_engine(tmp_path):
    (tmp_path / "empty.engine").touch()
    with pytest.raises(ValueError, match=r"empty\.engine is empty: that is no engine"):
        trt_plugin.read_engine(tmp_path / "empty.engine")
    for name, expected in (("a.plan", True), ("a.trt", True), ("a.onnx", False), ("b", False)):
        assert trt_plugin.is_engine(name) is expected
