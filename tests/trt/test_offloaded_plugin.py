"""The plugin of layers whose experts lie in files, on the stand-in driver."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernel_runs import in_out, run_kernels
from offloaded_layers import EXPERTS, VERSION, Offloaded, small_case
from plugin_host import (
    NAMES,
    RUNTIME,
    VERSIONS,
    Description,
    Field,
    attributes_of,
    describe,
    host,
)
from plugin_layers import checked_host
from standin import OUT_OF_MEMORY, RESOURCES
from standin_gpu import StandinGpu
from trt_plugin.plugin import sharing_kernels

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NOTHING = dict.fromkeys(RESOURCES, 0)


@pytest.fixture(params=VERSIONS)
def tensorrt(request):
    with checked_host(request.param) as tensorrt:
        yield tensorrt


def summary(tensorrt, name: str = "experts", resident: int = 2, whose: str = "for each context"):
    """Takes the message about the cache that comes first; returns the others."""
    first, *others = tensorrt.messages()
    wanted = rf"own 3 {NAMES[name]} layer: {resident} of {EXPERTS} experts at a time are on the "
    assert re.fullmatch(rf"{wanted}device, in \d+ bytes {whose}", first), first
    return others


@pytest.mark.each_value
@pytest.mark.parametrize("resident", [1, 2, EXPERTS])
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_the_same_bits_as_fully_resident(driver, tensorrt, tmp_path, op, resident):
    case = small_case(op, dtype=torch.float16, activation="silu", gated=True)
    offloaded = Offloaded(driver, tmp_path, case, resident)
    plugin, size = offloaded.engine(tensorrt)
    context = plugin.attach()
    plugin.destroy()
    for _ in range(2):
        y = context.run(offloaded.inputs(), size)
        assert torch.equal(y, run_kernels(case, "sm_80"))
    assert summary(tensorrt, op, resident) == []
    # One event for each launch of a wave that another waits for, and three of the call.
    live = {"memory": 1, "registrations": 2, "pinned memory": 0, "streams": 1, "events": 7}
    assert driver.live() == live
    context.destroy()
    assert driver.live() == NOTHING


def test_a_layer_that_lies_as_in_out(driver, tmp_path):
    tensorrt = host(VERSIONS[-1])
    case = in_out(small_case(activation="silu", gated=True), "w1", "w2")
    offloaded = Offloaded(driver, tmp_path, case, w1_transposed=1, w2_transposed=1)
    plugin, size = offloaded.engine(tensorrt)
    y = plugin.run(offloaded.inputs(), size)
    assert torch.equal(y, run_kernels(case, "sm_80"))
    assert summary(tensorrt) == []
    plugin.destroy()


# --- Contexts ---


@pytest.mark.parametrize("shared", [0, 1])
def test_contexts_have_their_own_cache_or_share_one(driver, tensorrt, tmp_path, shared):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case, expert_cache=shared)
    plugin, size = offloaded.engine(tensorrt)
    contexts = [plugin.attach() for _ in range(2)]
    # A clone of a context is none itself.
    clone = contexts[0].clone()
    for context in contexts:
        assert torch.equal(context.run(offloaded.inputs(), size), run_kernels(case, "sm_80"))
    others = summary(tensorrt, whose="that all contexts share" if shared else "for each context")
    assert len(others) == 1
    live = driver.live()
    assert (live["memory"], live["streams"]) == ((1, 1) if shared else (2, 2))
    # Of each tensor there is one, whoever uses it.
    assert live["registrations"] == 2
    contexts.pop(0).destroy()
    assert driver.live()["memory"] == 1  # The clone has none of the context's.
    for each in (*contexts, clone, plugin):
        each.destroy()
    assert driver.live() == NOTHING


def test_copies_of_a_layer_share_a_cache(driver, tensorrt, tmp_path):
    """An engine with several profiles may have a layer several times."""
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case, expert_cache=1)
    fields, size = offloaded.engine_fields(tensorrt)
    copies = [
        tensorrt.create(NAMES["experts"], fields, RUNTIME, "layer", VERSION) for _ in range(2)
    ]
    for copy in copies:
        y = copy.run(offloaded.inputs(), size)
        assert torch.equal(y, run_kernels(case, "sm_80"))
    assert (driver.live()["memory"], driver.live()["streams"]) == (1, 1)
    # What they share outlives the first of them.
    copies[0].destroy()
    y = copies[1].run(offloaded.inputs(), size)
    assert torch.equal(y, run_kernels(case, "sm_80"))
    copies[1].destroy()
    assert driver.live() == NOTHING
    assert len(summary(tensorrt, whose="that all contexts share")) == 1


def test_layers_with_other_weights_share_no_cache(driver, tmp_path):
    tensorrt = host(VERSIONS[-1])
    layers = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        offloaded = Offloaded(driver, folder, small_case(seed=seed), expert_cache=1)
        layers.append((offloaded, *offloaded.engine(tensorrt)))
    for offloaded, plugin, size in layers:
        y = plugin.run(offloaded.inputs(), size)
        assert torch.equal(y, run_kernels(offloaded.case, "sm_80"))
    assert driver.live()["memory"] == 2
    for _, plugin, _ in layers:
        plugin.destroy()
    assert driver.live() == NOTHING
    tensorrt.messages()


def test_layers_that_use_the_same_weights_pin_them_once(driver, tensorrt, tmp_path):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case)
    layers = [offloaded.engine(tensorrt) for _ in range(2)]
    for plugin, size in layers:
        plugin.run(offloaded.inputs(), size)
    assert driver.live()["registrations"] == 2
    assert len(summary(tensorrt)) == 1
    for plugin, _ in layers:
        plugin.destroy()
    assert driver.live() == NOTHING


def test_a_shared_cache_is_not_captured(driver, tensorrt, tmp_path):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case, expert_cache=1)
    plugin, size = offloaded.engine(tensorrt)
    plugin.run(offloaded.inputs(), size)
    summary(tensorrt, whose="that all contexts share")
    stream = driver.create_stream(offloaded.gpu.context)
    capture = driver.begin_capture(stream)
    workspace = torch.empty(size + 256, dtype=torch.uint8)
    y = torch.empty_like(case.arguments["x"])
    assert plugin.enqueue(offloaded.inputs(), y, workspace.data_ptr(), stream=stream) != 0
    driver.end_capture(capture)
    (message,) = tensorrt.messages()
    assert "with the attribute expert_cache=0, each has its own" in message
    plugin.destroy()


# --- What an engine stores ---


def test_an_engine_stores_where_the_experts_lie(driver, tensorrt, tmp_path):
    offloaded = Offloaded(driver, tmp_path, small_case(), expert_cache=1)
    fields, _ = offloaded.engine_fields(tensorrt)
    assert list(fields) == ["programs", "w1_source", "w2_source", "expert_cache"]
    assert fields["w1_source"].data.decode() == offloaded.sources[0]
    assert fields["w2_source"] == Field.of(offloaded.sources[1])
    assert fields["expert_cache"] == Field.of(1)
    # A layer of an engine stores the same again.
    plugin = tensorrt.create(NAMES["experts"], fields, RUNTIME, "layer", VERSION)
    assert plugin.serialize() == fields
    plugin.destroy()


def test_layers_with_equal_kernels_have_their_own_experts(driver, tensorrt, tmp_path):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case)
    with sharing_kernels():
        both = [
            tensorrt.create(NAMES["experts"], offloaded.attributes, version=VERSION)
            for _ in range(2)
        ]
    described = [describe(each) for each in offloaded.inputs()]
    for plugin in both:
        assert plugin.configure(described, described[0]) == 0
    fields = [plugin.serialize() for plugin in both]
    assert [next(iter(each)) for each in fields] == ["programs", "programs_name"]
    assert [len(each) for each in fields] == [4, 4]
    for plugin in both:
        plugin.destroy()
    name = fields[1]["programs_name"].data
    older = replace(fields[1]["programs_name"], data=name[:-8], length=len(name) - 8)
    changed = fields[1] | {"programs_name": older}
    assert tensorrt.create(NAMES["experts"], changed, RUNTIME, version=VERSION) is None
    (error,) = tensorrt.messages()
    assert "programs_name must have 128 bytes, got 120: build the engine with this version" in error
    loaded = [tensorrt.create(NAMES["experts"], each, RUNTIME, "layer", VERSION) for each in fields]
    size = loaded[0].workspace(described, described[0])
    for plugin in loaded:
        y = plugin.run(offloaded.inputs(), size)
        assert torch.equal(y, run_kernels(case, "sm_80"))
    assert len(summary(tensorrt)) == 1
    for plugin in loaded:
        plugin.destroy()


BAD_FIELDS = {
    "one field": (slice(0, 1), {}, "has 4 fields where its experts are offloaded, got 1"),
    "no source": (slice(0, 4), {"w2_source": Field.of("")}, "got w2_source in the place of w2_so"),
    "a number": (slice(0, 4), {"w1_source": Field.of(3)}, "got w1_source in the place of w1_sour"),
    "no choice": (
        slice(0, 4),
        {"expert_cache": Field.of(2)},
        "expert_cache must be in 0..1, got 2",
    ),
    "a text": (slice(0, 4), {"expert_cache": Field.of("a")}, "in the place of expert_cache"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_fields_of_an_engine(driver, tmp_path, name):
    tensorrt = host(VERSIONS[-1])
    part, changes, message = BAD_FIELDS[name]
    fields, _ = Offloaded(driver, tmp_path, small_case()).engine_fields(tensorrt)
    changed = dict(list((fields | changes).items())[part])
    assert tensorrt.create(NAMES["experts"], changed, RUNTIME, version=VERSION) is None
    (error,) = tensorrt.messages()
    assert message in error


BAD_ATTRIBUTES = {
    "too many": ({"resident_experts": 7}, "resident_experts must be in 1..6, got 7"),
    "negative": ({"resident_experts": -1}, "resident_experts must be in 1..6, got -1"),
    "no slots": ({"resident_experts": 0}, "resident_experts must be in 1..6, got 0"),
    "missing": ({"resident_experts": None}, "attribute resident_experts is missing"),
    "no w1": ({"w1_source": None}, "attribute w1_source is missing"),
    "no w2": ({"w2_source": None}, "attribute w2_source is missing"),
    "no choice": ({"expert_cache": 2}, "attribute expert_cache must be in 0..1, got 2"),
    "other slots": ({"resident_experts": 3}, "residual=0 w1_transposed=0 w2_transposed=0 resident"),
}


@pytest.mark.parametrize("name", BAD_ATTRIBUTES)
def test_attributes(driver, tmp_path, name):
    tensorrt = host(VERSIONS[-1])
    changes, message = BAD_ATTRIBUTES[name]
    attributes = Offloaded(driver, tmp_path, small_case()).attributes | changes
    given = {key: value for key, value in attributes.items() if value is not None}
    assert tensorrt.create(NAMES["experts"], given, version=VERSION) is None
    (error,) = tensorrt.messages()
    assert message in error


# --- The two versions ---


@pytest.mark.parametrize("name", NAMES.values())
def test_the_second_version_has_more_fields(name):
    tensorrt = host(VERSIONS[-1])
    first, second = (tensorrt.field_names(name, version) for version in ("1", VERSION))
    added = {"resident_experts": Field.INT32, "expert_cache": Field.INT32}
    added |= {"w1_source": Field.CHAR, "w2_source": Field.CHAR}
    assert second == first | added
    assert not first.keys() & added.keys()


@pytest.mark.parametrize("phase", ["build", "runtime"])
def test_a_plugin_has_its_creators_version(driver, tensorrt, tmp_path, phase):
    offloaded = Offloaded(driver, tmp_path, small_case())
    if phase == "build":
        plugin = tensorrt.create(NAMES["experts"], offloaded.attributes, version=VERSION)
    else:
        plugin, _ = offloaded.engine(tensorrt)
    clone = plugin.clone()
    for each in (plugin, clone):
        assert each.describe().startswith("DroplessMoEExperts/2/: ")
        each.destroy()


@pytest.mark.parametrize("name", ["resident_experts", "w1_source", "w2_source", "expert_cache"])
def test_the_first_version_refuses_what_the_second_has(driver, tensorrt, tmp_path, name):
    offloaded = Offloaded(driver, tmp_path, small_case())
    attributes = attributes_of(offloaded.case) | {
        name: {"expert_cache": 1, **offloaded.attributes}[name]
    }
    assert tensorrt.create(NAMES["experts"], attributes) is None
    (error,) = tensorrt.messages()
    known = error.partition(f"unknown attribute {name}; known are top_k, num_experts, ")[2]
    assert known
    assert name not in known


def test_layers_of_the_other_version(driver, tensorrt, tmp_path):
    case = small_case()
    fields, _ = Offloaded(driver, tmp_path, case).engine_fields(tensorrt)
    whole = StandinGpu(driver).bundle(tmp_path / "whole.moek", case)
    for stored, version, other in (
        (fields, "1", "2"),
        ({"programs": whole.read_bytes()}, "2", "1"),
    ):
        assert tensorrt.create(NAMES["experts"], stored, RUNTIME, version=version) is None
        (error,) = tensorrt.messages()
        assert error.endswith(f"field programs is of the plugin's version {other}, not {version}")


@pytest.mark.parametrize("shape", [(2,), (), (EXPERTS, 24, 16)])
def test_only_a_placeholder_stands_for_weights(driver, tmp_path, shape):
    tensorrt = host(VERSIONS[-1])
    offloaded = Offloaded(driver, tmp_path, small_case())
    plugin = tensorrt.create(NAMES["experts"], offloaded.attributes, version=VERSION)
    described = [describe(each) for each in offloaded.inputs()]
    described[3] = Description(shape, torch.float32)
    assert plugin.configure(described, described[0]) != 0
    (error,) = tensorrt.messages()
    assert "w1 must have shape [1], got [" in error
    plugin.destroy()


# --- Files ---


def test_a_folder_of_the_environment_comes_first(driver, tensorrt, tmp_path, monkeypatch):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case)
    plugin, size = offloaded.engine(tensorrt)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    # A folder without the file does not hide it.
    monkeypatch.setenv("DYNAMO_MOE_WEIGHTS", str(moved))
    context = plugin.attach()
    context.destroy()
    offloaded.file.rename(moved / offloaded.file.name)
    context = plugin.attach()
    assert torch.equal(context.run(offloaded.inputs(), size), run_kernels(case, "sm_80"))
    assert summary(tensorrt) == []
    context.destroy()
    plugin.destroy()


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def change_a_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))


BAD_FILES = {
    "missing": (Path.unlink, r"model.safetensors: No such file or directory; the environment"),
    "short": (shorten, r"model.safetensors must have \d+ bytes, got \d+; the engine was built"),
    "another dtype": (
        change_a_dtype,
        r"model.safetensors have a header with checksum [0-9a-f]{8}, expected [0-9a-f]{8}; the",
    ),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), r"model.safetensors: it is not a f"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), r"model.safetensors: it is not a fi"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_refused(driver, tensorrt, tmp_path, name):
    change, message = BAD_FILES[name]
    offloaded = Offloaded(driver, tmp_path, small_case())
    plugin, _ = offloaded.engine(tensorrt)
    context = plugin.attach()
    change(offloaded.file)
    described = [describe(each) for each in offloaded.inputs()]
    # When a context is made, when it runs, and when an engine is built.
    assert plugin.attach() is None
    assert context.shape_change(described, described[0]) != 0
    built = tensorrt.create(NAMES["experts"], offloaded.attributes, version=VERSION)
    assert built.configure(described, described[0]) != 0
    for error in tensorrt.messages():
        assert re.search(message, error), error
    for each in (built, context, plugin):
        each.destroy()
    assert driver.live() == NOTHING


BAD_SOURCES = {
    "no path": (lambda fields: fields[:5], "the source of weights must be '<offset> <bytes> "),
    "relative": (lambda fields: [*fields[:5], "a.safetensors"], "the source of weights must be"),
    "no number": (lambda fields: ["x", *fields[1:]], "the source of weights must be"),
    "negative": (lambda fields: ["-8", *fields[1:]], "the source of weights must be"),
    "in the header": (
        lambda fields: ["8", *fields[1:]],
        "must lie behind a header of 8 bytes or",
    ),
    "beyond": (lambda fields: [fields[2], *fields[1:]], "must lie behind a header of 8 bytes or"),
    "of another size": (
        lambda fields: [fields[0], str(int(fields[1]) // 2), *fields[2:]],
        "the layer's w1 must have 9216 bytes, it has 4608 in ",
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_sources_that_are_refused(driver, tmp_path, name):
    tensorrt = host(VERSIONS[-1])
    change, message = BAD_SOURCES[name]
    offloaded = Offloaded(driver, tmp_path, small_case())
    source = " ".join(change(offloaded.sources[0].split(" ", 5)))
    attributes = offloaded.attributes | {"w1_source": source}
    plugin = tensorrt.create(NAMES["experts"], attributes, version=VERSION)
    described = [describe(each) for each in offloaded.inputs()]
    assert plugin.configure(described, described[0]) != 0
    (error,) = tensorrt.messages()
    assert message in error
    plugin.destroy()


@pytest.mark.parametrize("function", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_files_that_cannot_be_pinned_are_copied(driver, tensorrt, tmp_path, function):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case)
    plugin, size = offloaded.engine(tensorrt)
    driver.fail(function, OUT_OF_MEMORY)
    assert torch.equal(plugin.run(offloaded.inputs(), size), run_kernels(case, "sm_80"))
    (warning,) = summary(tensorrt)
    assert re.search(
        rf"own 2 .*model.safetensors: \d+ bytes are copied to pinned memory, .*{function}: "
        r"CUDA_ERROR_OUT_OF_MEMORY .* \(ulimit -l, now .*\) may be raised, .* ext4 or xfs",
        warning,
    )
    assert driver.live()["pinned memory"] == 1
    assert driver.live()["registrations"] == 1
    plugin.destroy()
    assert driver.live() == NOTHING


def test_weights_that_do_not_begin_at_a_multiple_of_16_are_copied(driver, tensorrt, tmp_path):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case, multiple=8)
    plugin, size = offloaded.engine(tensorrt)
    assert torch.equal(plugin.run(offloaded.inputs(), size), run_kernels(case, "sm_80"))
    (warning,) = summary(tensorrt)
    assert re.search(r"the weights begin at byte \d+, not at a multiple of 16", warning)
    assert driver.live()["pinned memory"] == 2
    plugin.destroy()
    assert driver.live() == NOTHING


def test_a_device_that_cannot_pin_pages_that_it_only_reads(driver, tensorrt, tmp_path):
    case = small_case()
    offloaded = Offloaded(driver, tmp_path, case)
    plugin, size = offloaded.engine(tensorrt)
    driver.set_registers_read_only(False)
    assert torch.equal(plugin.run(offloaded.inputs(), size), run_kernels(case, "sm_80"))
    (warning,) = summary(tensorrt)
    assert "(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED is 0)" in warning
    assert "ulimit" not in warning
    assert driver.live()["pinned memory"] == 2
    plugin.destroy()
    assert driver.live() == NOTHING


def test_no_pinned_memory_at_all(driver, tensorrt, tmp_path):
    offloaded = Offloaded(driver, tmp_path, small_case())
    plugin, _ = offloaded.engine(tensorrt)
    driver.fail("cuMemHostRegister", OUT_OF_MEMORY)
    driver.fail("cuMemHostAlloc", OUT_OF_MEMORY)
    described = [describe(each) for each in offloaded.inputs()]
    assert plugin.shape_change(described, described[0]) != 0
    (error,) = tensorrt.messages()
    assert re.search(
        r"model.safetensors: \d+ bytes of pinned memory: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY "
        r".*; nor can the file's own pages be pinned: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY "
        r".*; a limit on locked memory \(ulimit -l, now .*\) may be raised",
        error,
    )
    assert driver.live() == NOTHING
    plugin.destroy()
