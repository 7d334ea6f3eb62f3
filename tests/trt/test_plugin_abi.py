"""Our declaration of TensorRT's interface, and what the library shows of itself.

The SDK's headers are in no package: TENSORRT_INCLUDE_DIR names a folder that has them, such as
``include`` of a checkout of NVIDIA/TensorRT.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from plugin_host import VERSIONS, attributes_of, build_library, host
from standin import CSRC, ROOT, build
from trt_plugin.bundle import Bundle
from trt_plugin.native import library_path

# Its cuda_runtime_api.h serves where there is no CUDA toolkit.
CUDA = ROOT / "tests" / "native" / "host" / "cuda"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def sdk() -> list[str]:
    """The compiler's flags for the SDK's headers."""
    folder = os.environ.get("TENSORRT_INCLUDE_DIR")
    if not folder:
        pytest.skip("TENSORRT_INCLUDE_DIR names no folder with TensorRT's headers")
    if not (Path(folder) / "NvInferRuntime.h").is_file():
        pytest.fail(f"TENSORRT_INCLUDE_DIR={folder} has no NvInferRuntime.h")
    return ["-DDYNAMO_MOE_TENSORRT_SDK", "-isystem", folder, "-idirafter", str(CUDA)]


def test_the_declaration_is_the_sdks(sdk):
    check = build("abi_check", [CSRC / "plugin" / "abi_check.cc"], *sdk)
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert ": 0 of 1" in done.stdout


def test_differences_are_found(sdk, tmp_path):
    declaration = (CSRC / "plugin" / "tensorrt_abi.h").read_text()
    names = "getPluginVersion() const noexcept = 0;", "getPluginNamespace() const noexcept = 0;"
    first, second = (f"  virtual const char* {name}\n" for name in names)
    assert first + second in declaration
    for old, new, difference in (
        (first + second, second + first, "slot of IPluginV3OneCore::getPluginVersion: declared 6"),
        ("kBF16 = 7", "kBF16 = 6", "DataType::kBF16: declared 6, the SDK has 7"),
        ("  float scale;\n", "  double scale;\n", "size of PluginTensorDesc"),
    ):
        (tmp_path / "plugin").mkdir(exist_ok=True)
        (tmp_path / "plugin" / "tensorrt_abi.h").write_text(declaration.replace(old, new))
        source = tmp_path / "abi_check.cc"
        source.write_text((CSRC / "plugin" / "abi_check.cc").read_text())
        options = ("-std=c++17", f"-I{tmp_path}", f"-I{CSRC}", *sdk)
        command = ["g++", *options, str(source), "-o", str(tmp_path / "check")]
        subprocess.run(command, check=True)
        done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert difference in done.stdout


@pytest.mark.slow
def test_a_library_of_the_sdks_headers_says_the_same(sdk, tmp_path):
    case = make_case("dropless", (5,), width=16, hidden=24)
    program = uncompiled_program(plan(layer_of(case), architecture("sm_80")))
    (tmp_path / "model.moek").write_bytes(Bundle((program,)).data)
    attributes = attributes_of(case) | {"kernels": str(tmp_path / "model.moek")}
    tensorrt = host(VERSIONS[-1])
    said = []
    for library in (library_path(), build_library(*sdk)):
        tensorrt.load(library)
        plugin = tensorrt.create("DroplessMoE", attributes)
        said.append((plugin.describe(), plugin.metadata(), tensorrt.field_names("DroplessMoE")))
        plugin.destroy()
    assert said[0] == said[1]


def test_the_library_needs_neither_tensorrt_nor_cuda():
    library = str(library_path())
    needed = output("readelf", "-d", library)
    for name in ("nvinfer", "libcuda", "libcudart"):
        assert name not in needed
    undefined = output("nm", "-D", "--undefined-only", library)
    assert "nvinfer" not in undefined
    assert " cu" not in undefined


def test_the_library_calls_its_own_functions():
    # Not those of a copy that the process loaded before: no relocation is looked up by these names.
    assert "dynamo_moe_program_open" in output("nm", "-D", str(library_path()))
    assert "dynamo_moe_" not in output("readelf", "--relocs", "--wide", str(library_path()))


def test_the_library_shows_what_tensorrt_looks_for():
    shown = output("nm", "-D", "--defined-only", str(library_path())).split()
    assert {"getCreators", "setLoggerFinder"} <= set(shown)
    assert not [name for name in shown if "nvinfer1" in name]
