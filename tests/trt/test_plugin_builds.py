"""Engines of TensorRT for RTX, built without a GPU: what they hold of the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import dynamo_moe
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import DroplessMoEMlp
from engine_checks import programs_of
from standin import ROOT
from tensorrt_wheels import RTX, environment
from trt_plugin.bundle import Bundle

pytestmark = pytest.mark.slow
LAYERS = 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """The bundle of a file with equal layers, for two architectures; the file lies beside it."""
    torch.manual_seed(0)
    layers = [DroplessMoEMlp(16, 24, num_experts=4, top_k=2) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).eval()
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("rtx") / "model.onnx"
    dynamo_moe.export(model, (torch.randn(4, 16),), path)
    (layer,) = set(kernel_layers(path))
    bundle = path.with_suffix(".moek")
    Bundle(tuple(programs_of(layer))).save(bundle)
    return bundle


@pytest.fixture(scope="module")
def report(bundle) -> dict:
    """What tests/support/real_builds.py reports."""
    script = ROOT / "tests" / "support" / "real_builds.py"
    path = bundle.with_suffix(".onnx")
    # The first layer's output is not used.
    model = onnx.load(path)
    model.graph.node[1].input[0] = model.graph.input[0].name
    unused = path.with_name("unused.onnx")
    onnx.save(model, unused)
    done = subprocess.run(
        [sys.executable, script, path, unused, bundle],
        env=environment(RTX),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "[dynamo-moe]" not in done.stderr
    return json.loads(done.stdout)


def test_the_network_has_a_plugin_for_each_layer(report):
    names = [f"{number}/DroplessMoE" for number in range(LAYERS)]
    # router_bias, which this layer lacks, is filled with zeros.
    assert report["layers"] == [[name, "FLOAT", [-1, 16], *7 * ["FLOAT"]] for name in names]
    assert report["messages"] == []


def test_the_engine_holds_the_programs_of_all_architectures(report):
    # TensorRT stores a layer's field twice.
    assert report["alone"] == [2 * LAYERS, 2 * LAYERS, 0]
    assert report["same bytes"]


def test_equal_layers_store_their_programs_once(report):
    assert report["shared"] == [2, 2, 2 * (LAYERS - 1)]
    # And again for each profile.
    assert report["shared, 2 profiles"] == [4, 4, 4 * (LAYERS - 1)]


def test_a_layer_that_tensorrt_drops_stores_nothing(report):
    assert report["shared, one unused"] == [2, 2, 2 * (LAYERS - 2)]


def test_the_environment_narrows_the_architectures(report):
    assert report["narrowed"] == [0, 2 * LAYERS, 0]


@pytest.mark.parametrize("option", ["streaming", "user allocation"])
def test_options_of_the_builder(report, option):
    assert report[option] == report["alone"]


def test_the_engine_can_hold_the_library(report):
    assert report["library"] == 1


def test_a_refusal_arrives_in_the_logger(report, bundle):
    assert not report["parsed"]
    assert report["refused"][0] == (
        "DroplessMoE 0/DroplessMoE: the environment variable DYNAMO_MOE_ARCHITECTURES names sm_90, "
        f"{bundle} has this layer for sm_89, sm_120"
    )
