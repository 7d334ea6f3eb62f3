"""Engines of TensorRT for RTX, built without a GPU: what they hold of the plugin."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import nn

import dynamo_moe
import trt_plugin
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import DroplessMoEMlp
from engine_checks import programs_of
from small_models import OpLayer
from tensorrt_builds import Build, build
from trt_plugin.bundle import Bundle

pytestmark = pytest.mark.slow
LAYERS = 3


class Engine(NamedTuple):
    """An engine, and what was said when it was built."""

    said: Build
    data: bytes


class Builder:
    """Builds engines of a file with equal layers, for two architectures.

    Attributes:
        onnx: The file.
        bundle: The layers' programs.
    """

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        layers = [DroplessMoEMlp(16, 24, num_experts=4, top_k=2) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).eval()
        dynamo_moe.convert(model)
        self.onnx = folder / "model.onnx"
        dynamo_moe.export(model, (torch.randn(4, 16),), self.onnx)
        (layer,) = set(kernel_layers(self.onnx))
        self.bundle = self.onnx.with_suffix(".moek")
        self._programs = programs_of(layer)
        Bundle(tuple(self._programs)).save(self.bundle)
        self.build = cache(self._build)

    def _build(
        self,
        onnx: Path | None = None,
        *,
        bundle: Path | None = None,
        architectures: str = "",
        **options: Any,
    ) -> Engine:
        engine = self.onnx.with_suffix(".engine")
        variables = {"DYNAMO_MOE_KERNELS": str(bundle or self.bundle)}
        if architectures:
            variables["DYNAMO_MOE_ARCHITECTURES"] = architectures
        said = build(
            onnx or self.onnx,
            *("SM89", "SM120"),
            engine=engine,
            library=trt_plugin.library_path(),
            variables=variables,
            **options,
        )
        return Engine(said, engine.read_bytes() if said.built else b"")

    def counts(self, engine: Engine) -> list[int]:
        """How often the engine holds each program, and names that stand for them."""
        programs = [engine.data.count(program.data) for program in self._programs]
        return [*programs, engine.data.count(b"programs_name")]


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Builder:
    return Builder(tmp_path_factory.mktemp("rtx"))


def test_the_network_has_a_plugin_for_each_layer(builder):
    said = builder.build().said
    # router_bias, which this layer lacks, is filled with zeros.
    assert said.plugins == tuple(
        (f"{number}/DroplessMoE", "DroplessMoE", 8 * ("FLOAT",), (-1, 16))
        for number in range(LAYERS)
    )
    assert not said.errors
    assert not said.warnings
    assert "[dynamo-moe]" not in said.stderr


def test_offloaded_and_other_layers(builder):
    copy, bundle = (builder.onnx.with_name(name) for name in ("copy.onnx", "copy.moek"))
    dynamo_moe.offload_file(builder.onnx, copy, resident_experts={"1": 2})
    layers = dict.fromkeys(kernel_layers(copy))
    assert len(layers) == 2
    Bundle(tuple(program for layer in layers for program in programs_of(layer))).save(bundle)
    said, data = builder.build(copy, bundle=bundle)
    # Each node has all attributes of its plugin's version.
    assert not said.errors
    assert not said.warnings
    assert len(said.plugins) == LAYERS
    # As often as a layer's programs.
    assert data.count(b"w1_source") == data.count(b"expert_cache") == 2


def test_routers_that_round(builder):
    torch.manual_seed(0)
    model = nn.Sequential(
        OpLayer(logits_dtype="tokens", routing_weights_dtype="tokens"),
        OpLayer(logits_dtype="tokens"),
    ).half()
    path, copy = (builder.onnx.with_name(name) for name in ("rounds.onnx", "offloaded.onnx"))
    dynamo_moe.export(model.eval(), (torch.randn(4, 16).half(),), path)
    dynamo_moe.offload_file(path, copy, resident_experts={"1": 2})
    bundle = path.with_suffix(".moek")
    layers = dict.fromkeys((*kernel_layers(path), *kernel_layers(copy)))
    Bundle(tuple(program for layer in layers for program in programs_of(layer))).save(bundle)
    for each in (path, copy):
        said, data = builder.build(each, bundle=bundle)
        assert not said.errors
        assert not said.warnings
        assert [plugin[1] for plugin in said.plugins] == 2 * ["DroplessMoE"]
        of_file = (program for layer in kernel_layers(each) for program in programs_of(layer))
        assert all(program.data in data for program in of_file)


def test_the_engine_holds_the_programs_of_all_architectures(builder):
    # TensorRT stores a layer's field twice.
    assert builder.counts(builder.build()) == [2 * LAYERS, 2 * LAYERS, 0]
    again = builder.build(flags=())
    assert again.data == builder.build().data


def test_equal_layers_store_their_programs_once(builder):
    assert builder.counts(builder.build(share_kernels=True)) == [2, 2, 2 * (LAYERS - 1)]
    # And again for each profile.
    twice = builder.build(share_kernels=True, profiles=2)
    assert builder.counts(twice) == [4, 4, 4 * (LAYERS - 1)]


def test_a_layer_that_tensorrt_drops_stores_nothing(builder):
    model = onnx.load(builder.onnx)
    model.graph.node[1].input[0] = model.graph.input[0].name
    unused = builder.onnx.with_name("unused.onnx")
    onnx.save(model, unused)
    engine = builder.build(unused, share_kernels=True)
    assert builder.counts(engine) == [2, 2, 2 * (LAYERS - 2)]


def test_the_environment_narrows_the_architectures(builder):
    engine = builder.build(architectures="sm_120")
    assert builder.counts(engine) == [0, 2 * LAYERS, 0]


@pytest.mark.parametrize("option", ["WEIGHT_STREAMING", "REQUIRE_USER_ALLOCATION"])
def test_options_of_the_builder(builder, option):
    assert builder.counts(builder.build(flags=(option,))) == [2 * LAYERS, 2 * LAYERS, 0]


def test_the_engine_can_hold_the_library(builder):
    library = trt_plugin.library_path()
    engine = builder.build(serialized_plugins=(library,))
    assert engine.data.count(library.read_bytes()) == 1


def test_a_refusal_arrives_in_the_logger(builder):
    said = builder.build(architectures="sm_90").said
    assert not said.parsed
    assert said.errors[0] == (
        "DroplessMoE 0/DroplessMoE: the environment variable DYNAMO_MOE_ARCHITECTURES names sm_90, "
        f"{builder.bundle} has this layer for sm_89, sm_120"
    )
