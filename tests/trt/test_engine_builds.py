"""Engines that TensorRT for RTX builds of exported files, without a GPU: none of them runs here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import dynamo_moe
import trt_plugin
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import swin_moe_digits
from engine_command import run_command
from interpreted_gpu import uncompiled_program
from standin import ROOT
from tensorrt_wheels import RTX, install
from trt_plugin.bundle import Bundle
from trt_plugin.native import library_path

pytestmark = pytest.mark.slow

SHAPES = ("--shapes", "images=1x1x8x8:4x1x8x8:16x1x8x8")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with the demo's model for two targets, and a model without MoE layers."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    for target in ("plugin", "onnxruntime"):
        dynamo_moe.export(model, torch.randn(4, 1, 8, 8), folder / f"{target}.onnx", target=target)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    dynamo_moe.export(plain, torch.randn(4, 8), folder / "plain.onnx")
    return folder


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A copy of it that a test may write to."""
    return Path(shutil.copytree(exported, tmp_path / "files"))


def bundle_of(path: Path, architectures: Sequence[str]) -> Bundle:
    """Writes a bundle of a file's layers, whose kernels have no code, beside the file."""
    bundle = Bundle(
        tuple(
            uncompiled_program(plan(each.layer, architecture(name)))
            for each in kernel_layers(path)
            for name in architectures
        )
    )
    bundle.save(path.with_suffix(".moek"))
    return bundle


def test_an_engine_for_two_architectures_holds_the_kernels_of_both(folder):
    bundle = bundle_of(folder / "plugin.onnx", ["sm_80", "sm_89", "sm_120"])
    targets = ("--arch", "sm_89", "--arch", "120")
    code, out, error = run_command("engine", folder / "plugin.onnx", *targets, *SHAPES, "--json")
    assert code == 0, error
    report = json.loads(out)
    assert report["builder"].startswith("TensorRT for RTX 1.7")
    assert report["architectures"] == ["sm_89", "sm_120"]
    assert report["inputs"] == [{"name": "images", "dtype": "float", "shape": [-1, 1, 8, 8]}]
    assert [each["plugin"] for each in report["plugin_layers"]] == ["DroplessMoE"] * 2
    assert [each["name"].split("/")[0] for each in report["plugin_layers"]] == [
        "stages.0.block1.mlp",
        "stages.1.block1.mlp",
    ]
    assert report["layers"] > 100
    assert report["profiles"] == 1
    # The engine's file has the bundle's programs, byte for byte.
    contents = trt_plugin.read_engine(folder / "plugin.engine")
    assert contents.tensorrt == report["builder"]
    assert contents.bytes == report["contents"]["bytes"]
    assert {"sm_89", "sm_120"} <= set(contents.architectures)
    stored = {each.program.data for each in contents.programs}
    given = {program.data for program in bundle.programs if program.architecture in (89, 120)}
    assert len(given) == 4
    assert given <= stored <= {program.data for program in bundle.programs}
    assert contents.library is None


def test_inspect_shows_an_engine(folder):
    bundle_of(folder / "plugin.onnx", ["sm_89"])
    code, out, error = run_command(
        *("engine", folder / "plugin.onnx", "-o", folder / "model.plan", "--with-library"), *SHAPES
    )
    assert code == 0, error
    assert "Wrote" in error
    assert "2 of them plugins" in out
    code, out, error = run_command("inspect", folder / "model.plan")
    assert code == 0, error
    assert "Engine of TensorRT for RTX 1.7" in out
    assert out.count("sm_89") == 2
    assert "Plugin's library: in it, as it is installed here" in out
    assert "Not known: names and number of its layers" in " ".join(out.split())
    # Another version of the library: the same but for one byte.
    data = (folder / "model.plan").read_bytes()
    library = library_path().read_bytes()
    (folder / "model.plan").write_bytes(data.replace(library, library[:-1] + b"?"))
    assert trt_plugin.read_engine(folder / "model.plan").library == "other"
    code, _, error = run_command("inspect", folder / "model.plan", "--picture", "a.svg")
    assert code == 2
    assert "is not an ONNX file" in error


def test_a_model_without_moe_layers_needs_neither_bundle_nor_library(folder):
    several = ("--shapes", "input=1x8", "--shapes", "input=2x8:16x8:64x8")
    file = folder / "plain.onnx"
    code, out, error = run_command("engine", file, *several, "--arch", "86", "--json")
    assert code == 0, error
    report = json.loads(out)
    assert (report["architectures"], report["profiles"]) == (["sm_86"], 2)
    assert report["plugin_layers"] == report["contents"]["programs"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("onnxruntime.onnx", "--arch", "89"),
            (
                '(MoE): creator && "Plugin not found, are the plugin name, version, and namespace '
                "correct?\"; node 'MoE_2'"
            ),
        ),
        (
            ("onnxruntime.onnx", "--arch", "89"),
            "com.microsoft::MoE is for ONNX Runtime: export the model for target plugin, or dense",
        ),
        (("plain.onnx",), "symbolic sizes: input [?, 8]; give the smallest, usual and largest"),
        (
            ("plain.onnx", "--arch", "sm_90", "--shapes", "input=4x8"),
            "does not build for sm_90; it builds for sm_75, sm_80, sm_86, sm_89, sm_120, sm_121",
        ),
        (
            ("plugin.onnx", "--arch", "sm_120", *SHAPES),
            "the bundle has no kernels for sm_120 of the layer dropless, 2 of 8 experts, ",
        ),
        (
            ("plugin.onnx", *SHAPES, "--builder", "tensorrt"),
            "building an engine needs TensorRT: pip install 'dynamo-moe[tensorrt]'",
        ),
        (
            ("plain.onnx", "--shapes", "input=4x8", "--timing-cache", "t"),
            "--timing-cache: TensorRT for RTX measures nothing when it builds",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_errors_say_what_to_do(folder, arguments, message):
    bundle_of(folder / "plugin.onnx", ["sm_89"])
    file, *options = arguments
    code, out, error = run_command("engine", folder / file, *options)
    assert code in (1, 2)
    assert out == ""
    assert message in error
    assert not (folder / file).with_suffix(".engine").exists()


def test_without_a_bundle_and_a_gpu_the_architectures_are_asked_for(folder):
    code, _, error = run_command("engine", folder / "plugin.onnx", *SHAPES, CUDA_VISIBLE_DEVICES="")
    assert code == 2
    assert "there is no GPU that PyTorch can use: name a GPU architecture with --arch" in error


def test_a_missing_link_is_made_before_it_ends_the_process(folder, tmp_path):
    # The wheels, but for the link that the tests' installation has made, by links to their files.
    packages = tmp_path / "packages"
    for name in ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"):
        (packages / name).mkdir(parents=True)
        for file in (install(RTX) / name).iterdir():
            if file.name not in ("libtensorrt_rtx.so", "__pycache__"):
                (packages / name / file.name).hardlink_to(file)
    bundle_of(folder / "plugin.onnx", ["sm_89"])
    command = ("engine", folder / "plugin.onnx", *SHAPES)
    code, _, error = run_command(*command, PYTHONPATH=f"{packages}:{ROOT}")
    assert code == 0, error
    assert (packages / "tensorrt_rtx_libs" / "libtensorrt_rtx.so").readlink() == Path(
        "libtensorrt_rtx.so.1"
    )
