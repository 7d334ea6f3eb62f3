"""Engines that TensorRT for RTX builds of exported files, without a GPU: none of them runs here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_moe
import trt_plugin
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import DroplessMoEMlp, swin_moe_digits
from engine_checks import programs_of
from engine_command import Done, run_commands
from moe_architectures import ARCHITECTURES
from packed_cases import PackedLayer, packed_case
from small_models import mlp_model
from standin import ROOT
from tensorrt_wheels import RTX, environment, install
from trt_plugin.bundle import Bundle
from trt_plugin.compiling.cubin import inspect_cubin
from trt_plugin.native import library_path

pytestmark = pytest.mark.slow

SHAPES = ("--shapes", "images=1x1x8x8:4x1x8x8:16x1x8x8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the demo's model for each target, and a model without MoE layers."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    for target in ("plugin", "dense", "onnxruntime"):
        dynamo_moe.export(model, torch.randn(4, 1, 8, 8), folder / f"{target}.onnx", target=target)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    dynamo_moe.export(plain, torch.randn(4, 8), folder / "plain.onnx")
    ranks = mlp_model()
    dynamo_moe.convert(ranks)
    for target in ("plugin", "dense"):
        path = folder / f"{target}_ranks.onnx"
        dynamo_moe.export(ranks, torch.randn(3, 16), path, target=target, ranks=2)
    return folder


def bundle_of(path: Path, architectures: Sequence[str]) -> Bundle:
    """Returns a bundle of a file's layers, whose kernels have no code."""
    return Bundle(
        tuple(
            program
            for layer in kernel_layers(path)
            for program in programs_of(layer, architectures)
        )
    )


@pytest.fixture(scope="module")
def built(folder) -> dict[str, Done]:
    """What the commands said that build engines, which are beside the files."""
    bundle = bundle_of(folder / "plugin.onnx", ["sm_80", "sm_89", "sm_120"])
    bundle.save(folder / "plugin.moek")
    # Each layer for an architecture of its own, both of which sm_89 runs.
    one, other = kernel_layers(folder / "plugin.onnx")
    mixed = Bundle((*programs_of(one, ["sm_89"]), *programs_of(other, ["sm_80"])))
    mixed.save(folder / "mixed.moek")
    several = ("--shapes", "input=1x8", "--shapes", "input=2x8:16x8:64x8")
    bundle_of(folder / "plugin_ranks.rank0.onnx", ["sm_89"]).save(folder / "ranks.moek")
    ranks = ("--ranks", "--arch", "89", "--shapes", "input=1x16:3x16:8x16", "--json")
    names = ("two architectures", "with library", "inspected", "dense", "plain", "mixed")
    names += ("plugin ranks", "dense ranks")
    commands = (
        ("engine", folder / "plugin.onnx", "--arch", "sm_89", "--arch", "120", *SHAPES, "--json"),
        ("engine", folder / "plugin.onnx", "-o", folder / "b.plan", "--with-library", *SHAPES),
        ("inspect", folder / "b.plan"),
        ("engine", folder / "dense.onnx", "--arch", "sm_89", "--arch", "120", *SHAPES, "--json"),
        ("engine", folder / "plain.onnx", *several, "--arch", "86", "--json"),
        (
            *("engine", folder / "plugin.onnx", "-o", folder / "mixed.engine", *SHAPES),
            *("--kernels", folder / "mixed.moek", "--arch", "89", "--no-share-kernels"),
        ),
        ("engine", folder / "plugin_ranks.onnx", *ranks, "--kernels", folder / "ranks.moek"),
        ("engine", folder / "dense_ranks.onnx", *ranks),
    )
    done = dict(zip(names, run_commands(*commands), strict=True))
    assert [each.code for each in done.values()] == [0] * len(done), done
    return done


@pytest.mark.every
def test_an_engine_for_two_architectures_holds_the_kernels_of_both(folder, built):
    report = json.loads(built["two architectures"].out)
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
    assert contents.bytes == report["contents"]["bytes"]
    bundle = trt_plugin.read(folder / "plugin.moek")
    stored = {each.program.data for each in contents.programs}
    given = {program.data for program in bundle.programs if program.architecture in {89, 120}}
    assert len(given) == 4
    assert stored == given
    assert contents.architectures == ("sm_89", "sm_120")
    assert contents.library is None


@pytest.mark.parametrize(("target", "plugins"), [("plugin", 2), ("dense", 0)])
def test_each_rank_has_an_engine(folder, built, target, plugins):
    reports = json.loads(built[f"{target} ranks"].out)["ranks"]
    assert [Path(report["path"]).name for report in reports] == [
        f"{target}_ranks.rank{rank}.engine" for rank in range(2)
    ]
    for report in reports:
        assert [each["plugin"] for each in report["plugin_layers"]] == [
            "DroplessMoEExperts"
        ] * plugins
        contents = trt_plugin.read_engine(report["path"])
        assert contents.bytes == report["contents"]["bytes"]
        assert {stored.program.layer.experts for stored in contents.programs} == (
            {3} if plugins else set()
        )


PACKED: dict[str, dict[str, Any]] = {
    "int4": {"zero_points": "groups", "biases": False},
    "mxfp4": {"interleaved": True},
    "fp8": {"scales_dtype": torch.float16},
    "nvfp4": {},
    "int8": {"biases": False},
}


@pytest.mark.every
def test_packed_weights_reach_the_plugin_as_they_are_and_need_none_in_dense_files(tmp_path):
    commands = []
    for name, options in PACKED.items():
        case = packed_case(
            "dropless", name, shape=(4,), dtype=torch.float16, width=64, gated=True,
            activation="silu", **options,
        )  # fmt: skip
        path = tmp_path / f"{name}.onnx"
        dynamo_moe.export(PackedLayer(case).eval(), (case.arguments["x"],), path)
        bundle_of(path, ["sm_89", "sm_120"]).save(path.with_suffix(".moek"))
        commands.append(("engine", path, "--shapes", "x=1x64:4x64:64x64", "--json"))
        dense = tmp_path / f"{name}_dense.onnx"
        dynamo_moe.export(PackedLayer(case).eval(), (case.arguments["x"],), dense, target="dense")
        on = ("--arch", "sm_89", "--json")
        commands.append(("engine", dense, "--shapes", "x=1x64:4x64:64x64", *on))
    done_in_turn = run_commands(*commands)
    for done in done_in_turn[1::2]:
        assert done.code == 0, done
        assert json.loads(done.out)["plugin_layers"] == []
    for name, done in zip(PACKED, done_in_turn[::2], strict=True):
        assert done.code == 0, done
        report = json.loads(done.out)
        assert report["architectures"] == ["sm_89", "sm_120"]
        (plugin,) = report["plugin_layers"]
        assert plugin["plugin"] == "DroplessMoEPacked"
        stored = trt_plugin.read_engine(tmp_path / f"{name}.engine").programs
        assert {each.program.layer.to_dict()["weight_format"] for each in stored} == {name}


def test_layers_may_have_kernels_for_different_architectures(folder, built):
    contents = trt_plugin.read_engine(folder / "mixed.engine")
    assert {each.program.architecture for each in contents.programs} == {80, 89}
    stored = {each.program.data for each in contents.programs}
    assert stored == {each.data for each in trt_plugin.read(folder / "mixed.moek").programs}


def test_inspect_shows_an_engine(folder, built):
    assert "2 of them plugins" in built["with library"].out
    # Without --arch, those of the bundle.
    assert "sm_80, sm_89, sm_120" in built["with library"].out
    assert "Wrote" in built["with library"].error
    out = built["inspected"].out
    assert out.startswith("Engine  ")
    assert [out.count(name) for name in ("sm_80", "sm_89", "sm_120")] == [2, 2, 2]
    assert "Plugin's library: in it, as it is installed here" in out
    assert "Not known: names and number of its layers" in " ".join(out.split())


def test_another_version_of_the_library_is_told_apart(folder, built, tmp_path):
    library = library_path().read_bytes()
    data = (folder / "b.plan").read_bytes()
    assert data.count(library) == 1
    (tmp_path / "c.plan").write_bytes(data.replace(library, library[:-1] + b"?"))
    contents = trt_plugin.read_engine(tmp_path / "c.plan")
    assert contents.library == "other"
    # A program that is damaged does not count.
    program = contents.programs[0]
    at = data.find(program.program.data)
    (tmp_path / "c.plan").write_bytes(data[: at + 300] + b"?" + data[at + 301 :])
    assert trt_plugin.read_engine(tmp_path / "c.plan").programs != contents.programs


def test_files_without_moe_nodes_need_no_bundle(built):
    report = json.loads(built["dense"].out)
    assert report["architectures"] == ["sm_89", "sm_120"]
    assert report["layers"] > 100
    assert report["plugin_layers"] == report["contents"]["programs"] == []
    report = json.loads(built["plain"].out)
    assert (report["architectures"], report["profiles"]) == (["sm_86"], 2)
    assert report["plugin_layers"] == report["contents"]["programs"] == []


def test_errors_say_what_to_do(folder, tmp_path):
    bundle_of(folder / "plugin.onnx", ["sm_89"]).save(tmp_path / "old.moek")
    (tmp_path / "new.onnx").write_bytes((folder / "plugin.onnx").read_bytes())
    shown = "does not build for sm_90; it builds for sm_75, sm_80, sm_86, sm_89, sm_120, sm_121"
    cases = {
        (folder / "onnxruntime.onnx", "--arch", "89", *SHAPES): (
            1,
            (
                r"not parse .*node 'stages\.0\.block1\.mlp/MoE' \(MoE\): .*\"Plugin not found, .*; "
                r"node 'stages\.1\.block1\.mlp/MoE' .*"
                "com.microsoft::MoE is for ONNX Runtime: export the model for target plugin"
            ),
        ),
        (folder / "plain.onnx",): (
            1,
            r"symbolic sizes: input \[\?, 8\]; give the smallest, usual and largest",
        ),
        (folder / "plain.onnx", "--arch", "sm_90", "--shapes", "input=4x8"): (1, shown),
        (
            *(folder / "plugin.onnx", "--kernels", tmp_path / "old.moek"),
            *("--arch", "120", *SHAPES),
        ): (1, "the bundle has no kernels for sm_120 of the layer dropless, 2 of 8 experts, "),
        (folder / "plugin.onnx", *SHAPES, "--builder", "tensorrt"): (
            1,
            r"building an engine needs TensorRT: pip install 'dynamo-moe\[tensorrt\]'",
        ),
        (folder / "plain.onnx", "--shapes", "input=4x8", "--timing-cache", "t"): (
            2,
            "--timing-cache: TensorRT for RTX measures nothing when it builds",
        ),
        # Without a bundle: kernels would be compiled, but for what?
        (tmp_path / "new.onnx", *SHAPES): (
            2,
            "there is no GPU that PyTorch can use: name a GPU architecture with --arch",
        ),
    }
    out = tmp_path / "none.engine"
    ran = run_commands(*(("engine", *arguments, "-o", out) for arguments in cases))
    for done, (code, message) in zip(ran, cases.values(), strict=True):
        assert (done.code, done.out) == (code, ""), done
        assert re.search(message, done.error), done.error
    assert not out.exists()


@pytest.mark.every
def test_a_missing_link_is_made_before_it_ends_the_process(folder, tmp_path):
    # The wheels without the link that the tests' installation has made, as links to their files.
    packages = tmp_path / "packages"
    for name in ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"):
        (packages / name).mkdir(parents=True)
        for file in (install(RTX) / name).iterdir():
            if file.name not in {"libtensorrt_rtx.so", "__pycache__"}:
                (packages / name / file.name).symlink_to(file)
    bundle = tmp_path / "b.moek"
    bundle_of(folder / "plugin.onnx", ["sm_89"]).save(bundle)
    command = ("engine", folder / "plugin.onnx", *SHAPES, "--kernels", bundle)
    (done,) = run_commands((*command, "-o", tmp_path / "a.engine"), PYTHONPATH=f"{packages}:{ROOT}")
    assert done.code == 0, done
    link = packages / "tensorrt_rtx_libs" / "libtensorrt_rtx.so"
    assert link.readlink() == Path("libtensorrt_rtx.so.1")
    # The same where the plugin is loaded before.
    link.unlink()
    script = (
        "import sys, trt_plugin; trt_plugin.load(); profile = ((1, 1, 8, 8),) * 3; model, out, "
        "bundle = sys.argv[1:]; trt_plugin.build_engine(model, out, {'images': profile}, "
        "kernels=bundle, progress=False)"
    )
    subprocess.run(
        [sys.executable, "-c", script, folder / "plugin.onnx", tmp_path / "b.engine", bundle],
        env={**os.environ, "PYTHONPATH": f"{packages}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=True,
    )
    assert link.readlink() == Path("libtensorrt_rtx.so.1")


@pytest.mark.every
def test_the_engine_holds_compiled_kernels_byte_for_byte(tmp_path):
    torch.manual_seed(0)
    model = DroplessMoEMlp(16, 24, num_experts=4, top_k=2).eval()
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(4, 16), path, input_names=["x"])
    # The command takes the bundle that is beside the file.
    bundle = trt_plugin.compile(
        kernel_layers(path),
        ["sm_89"],
        path.with_suffix(".moek"),
        max_tokens=16,
        jobs=1,
        progress=False,
        cache=False,
    )
    (program,) = bundle.programs
    assert all(inspect_cubin(kernel.image).registers for kernel in program.kernels)
    shapes = ("--shapes", "x=1x16:4x16:16x16")
    (done,) = run_commands(("engine", path, "--arch", "sm_89", *shapes))
    assert done.code == 0, done
    (stored,) = trt_plugin.read_engine(path.with_suffix(".engine")).programs
    assert stored.program.data == program.data
    assert stored.program.to_dict() == program.to_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2_moe", {}),
        pytest.param("qwen3_moe", {"cache_length": 64}, marks=pytest.mark.every),
    ],
)
@pytest.mark.every
def test_an_engine_that_writes_text(name, options, tmp_path):
    """examples/run_engine's script: a profile without past tokens, and one of single tokens."""
    model: Any = ARCHITECTURES[name].build()
    dynamo_moe.convert(model)
    dynamo_moe.export_language_model(model, tmp_path / "model.onnx", target="dense", **options)
    script = ROOT / "examples/run_engine/build_text_engine.py"
    files = (tmp_path / "model.onnx", tmp_path / "model.engine")
    sizes = ("--arch", "sm_89", "--batch", "4", "--prompt", "32", "--length", "64")
    done = subprocess.run(
        [sys.executable, script, *files, *sizes],
        env=environment(RTX),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].endswith("TensorRT for RTX 1.7.1.116, 2 profiles")
    assert (tmp_path / "model.engine").stat().st_size > 0
