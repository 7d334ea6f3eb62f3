"""Engines that TensorRT for RTX builds without their experts; none of them runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
import torch
from onnx import numpy_helper

import dynamo_moe
import trt_plugin
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.files.offloading import offloaded_kernel_layers
from dynamo_moe.language_models import example_case, performing
from engine_checks import programs_of
from engine_command import run_commands
from moe_architectures import ARCHITECTURES
from trt_plugin.bundle import Bundle

pytestmark = pytest.mark.slow

RESIDENT = 3
SHAPES = [
    option
    for name in ("input_ids", "attention_mask")
    for option in ("--shapes", f"{name}=1x1:1x4:2x8")
]


class Built(NamedTuple):
    """A model's file, and engines of it with and without its experts."""

    file: Path
    whole: trt_plugin.EngineContents
    offloaded: trt_plugin.EngineContents
    report: dict
    inspected: str


def weights_of(engine: Path) -> Path:
    (file,) = engine.parent.glob(f"{engine.name}.experts.*.safetensors")
    return file


def bundle_of(file: Path, copy: Path) -> Path:
    """Writes programs without code for a file's layers, offloaded or not; returns their bundle."""
    others = offloaded_kernel_layers(file, resident_experts=RESIDENT - 1)
    layers = [*dict.fromkeys((*kernel_layers(file), *kernel_layers(copy), *others))]
    bundle = file.with_suffix(".both.moek")
    Bundle(tuple(program for layer in layers for program in programs_of(layer, ["sm_89"]))).save(
        bundle
    )
    return bundle


@pytest.fixture(
    scope="module", params=["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.every)]
)
def built(request, tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = ARCHITECTURES[request.param].build()
    dynamo_moe.convert(model)
    file = folder / "model.onnx"
    dynamo_moe.export_language_model(model, file, task="text-generation", external_data=True)
    content = file.read_bytes()
    copy = folder / "copy.onnx"
    dynamo_moe.offload_file(file, copy, resident_experts=RESIDENT)
    kernels = ("--kernels", bundle_of(file, copy), "--arch", "sm_89", *SHAPES, "--json")
    whole, offloaded, inspected = run_commands(
        ("engine", file, "-o", folder / "whole.engine", *kernels),
        ("engine", file, "--resident-experts", str(RESIDENT), *kernels),
        ("inspect", folder / "model.engine"),
    )
    assert (whole.code, offloaded.code, inspected.code) == (0, 0, 0), (whole, offloaded)
    assert file.read_bytes() == content
    with performing(model, "text-generation"):
        dynamo_moe.verify(file, model, [example_case(model, 1, 4)])
    return Built(
        file,
        trt_plugin.read_engine(folder / "whole.engine"),
        trt_plugin.read_engine(folder / "model.engine"),
        json.loads(offloaded.out),
        inspected.out,
    )


def test_the_engine_is_smaller_by_its_experts(built):
    weights = built.report["offload"]["memory"]["weight_bytes"]
    assert weights == sum(each.weight_bytes for each in built.offloaded.offloaded) > 100_000
    # What an engine holds beside kernels; the texts of the sources take up a little.
    whole, rest = (each.bytes - each.program_bytes for each in (built.whole, built.offloaded))
    assert weights - 4096 < whole - rest <= weights
    assert len(built.report["plugin_layers"]) == 2


def test_the_engine_has_the_places_of_the_weights(built):
    tensors = {
        each.name: numpy_helper.to_array(each) for each in onnx.load(built.file).graph.initializer
    }
    nodes = [each for each in onnx.load(built.file).graph.node if each.op_type == "DroplessMoE"]
    places = []
    for each in built.offloaded.offloaded:
        assert (each.experts, each.resident_experts) == (6, RESIDENT)
        assert each.weight_bytes / 2 < each.device_bytes < each.weight_bytes / 2 + 2048
        places.append(
            tuple(
                source.path.read_bytes()[source.offset :][: source.bytes]
                for source in each.tensors.values()
            )
        )
        assert each.tensors["w1"].path == weights_of(built.file.with_name("model.engine"))
    assert places == [tuple(tensors[name].tobytes() for name in node.input[2:4]) for node in nodes]
    assert f"{RESIDENT} of 6" in built.inspected
    assert f"{weights_of(built.file.with_name('model.engine')).name}: found" in built.inspected


def test_the_engines_programs_are_of_offloaded_layers(built):
    assert {each.program.layer.resident_experts for each in built.whole.programs} == {0}
    assert {each.program.layer.resident_experts for each in built.offloaded.programs} == {RESIDENT}


@pytest.mark.every
def test_slots_are_known_of_each_layer(built, tmp_path):
    first, second = (each["name"] for each in built.report["offload"]["layers"])
    engine, bundle = tmp_path / "e.engine", built.file.with_suffix(".both.moek")
    slots = [f"{first}={RESIDENT}", f"{second}={RESIDENT - 1}"]
    options = [option for each in slots for option in ("--resident-experts", each)]
    (done,) = run_commands(
        (
            *("engine", built.file, "-o", engine, "--kernels", bundle, "--arch", "sm_89"),
            *(*SHAPES, *options, "--share-expert-cache"),
        )
    )
    assert done.code == 0, done
    found = trt_plugin.read_engine(engine)
    known = [(each.layers, each.resident_experts, each.experts) for each in found.offloaded]
    assert known == [(1, RESIDENT, 6), (1, RESIDENT - 1, 6)]
    assert (built.offloaded.shared_cache, found.shared_cache) == (False, True)


@pytest.mark.every
def test_a_bundle_without_the_offloaded_layers_is_named(built, tmp_path):
    whole = Bundle(tuple(each.program for each in built.whole.programs))
    whole.save(tmp_path / "whole.moek")
    (done,) = run_commands(
        (
            *("engine", built.file, "--resident-experts", "2", "--arch", "sm_89", *SHAPES),
            *("--kernels", tmp_path / "whole.moek", "-o", tmp_path / "e.engine"),
        )
    )
    assert done.code == 1
    assert f"{built.file}: " in done.error
    assert "whole.moek has no kernels of this layer: " in done.error
    assert "resident_experts=2" in done.error
    # It is said before the weights are copied.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["whole.moek"]


@pytest.mark.every
def test_a_failed_build_leaves_the_engine_that_was_there(built, tmp_path):
    engine, bundle = tmp_path / "e.engine", built.file.with_suffix(".both.moek")
    changed = onnx.load(built.file)
    for tensor in changed.graph.initializer:
        if tensor.name.endswith("w1"):
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    other = tmp_path / "other.onnx"
    onnx.save(changed, other)
    build = ("-o", engine, "--resident-experts", str(RESIDENT), "--kernels", bundle, *SHAPES)
    first, failed, second = run_commands(
        ("engine", built.file, "--arch", "sm_89", *build),
        # The bundle has no kernels for it.
        ("engine", other, "--arch", "sm_120", *build),
        ("inspect", engine),
    )
    assert (first.code, failed.code) == (0, 1), (first, failed)
    assert "no kernels for sm_120" in failed.error
    assert f"{weights_of(engine).name}: found" in second.out
