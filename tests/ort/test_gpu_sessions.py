"""Exported files in ONNX Runtime's CUDA provider, with kernels compiled for this device.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpu_cases
from moe_cases import OPS, Case, assert_matches, make_case
from packed_cases import PackedCase, packed_case

pytestmark = pytest.mark.gpu

TOKENS = (1, 5, 0, 300)
MOST = max(TOKENS)
#: How often a thread runs what it has run alone.
AGAIN = 50
TOKEN_TENSORS = ("x", "expert_ids", "expert_weights")


@pytest.fixture(scope="module", autouse=True)
def _packages():
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    if gpu_cases.PROVIDER not in runtime.get_available_providers():
        pytest.skip(f"this onnxruntime has no {gpu_cases.PROVIDER}")


class CaseLayer(nn.Module):
    """A call whose weights are the module's."""

    def __init__(self, case: Case | PackedCase) -> None:
        super().__init__()
        self.case = case
        for name, value in case.arguments.items():
            if isinstance(value, Tensor) and name not in TOKEN_TENSORS:
                self.register_buffer(name, value)

    def forward(self, x, expert_ids=None, expert_weights=None):
        given = {"x": x, "expert_ids": expert_ids, "expert_weights": expert_weights}
        held = {name: getattr(self, name, value) for name, value in self.case.arguments.items()}
        given = {name: value for name, value in given.items() if value is not None}
        return self.case.overload(**(held | given), **self.case.options)


def cut(case: Any, tokens: int) -> Any:
    """The case with its first tokens alone."""
    names = [name for name in TOKEN_TENSORS if name in case.arguments]
    return case.changed(**{name: case.arguments[name][:tokens] for name in names})


class File:
    """A case's layer in a file, with kernels for this device."""

    def __init__(self, case: Any, folder: Path, slots: int | None = None) -> None:
        import dynamo_moe
        import trt_plugin
        from dynamo_moe.files.kernel_layers import kernel_layers

        self.names = [name for name in TOKEN_TENSORS if name in case.arguments]
        self.path, self.kernels = folder / "model.onnx", folder / "model.moek"
        given = tuple(case.arguments[name] for name in self.names)
        shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in self.names}
        dynamo_moe.export(
            CaseLayer(case).eval(), given, self.path, dynamic_shapes=shapes, input_names=self.names
        )
        if slots is not None:
            whole, self.path = self.path, folder / "offloaded.onnx"
            dynamo_moe.offload_file(whole, self.path, resident_experts=slots)
        device = gpu_cases.architecture().name
        trt_plugin.compile(kernel_layers(self.path), [device], self.kernels, progress=False)

    def session(self, folder: Path | None = None, **provider: str) -> Any:
        """A session; one with a folder writes a profile there."""
        import onnxruntime

        import dynamo_moe

        options = onnxruntime.SessionOptions()
        options.enable_profiling = folder is not None
        options.profile_file_prefix = str((folder or Path()) / "profile")
        if gpu_cases.PROVIDER.startswith("CPU"):
            return dynamo_moe.session(self.path, options=options)
        providers = [(gpu_cases.PROVIDER, provider)]
        return dynamo_moe.session(
            self.path, options=options, providers=providers, kernels=self.kernels
        )

    def run(self, session: Any, case: Any) -> Tensor:
        (y,) = session.run(None, {name: case.arguments[name].numpy() for name in self.names})
        return torch.from_numpy(y)


def providers_of(profile: str) -> set[str]:
    """The providers that have computed MoE nodes, by a profile."""
    events = (event.get("args", {}) for event in json.loads(Path(profile).read_text()))
    found = (e for e in events if e.get("op_name", "").startswith("DroplessMoE"))
    # 1.18 has further events of a node, which name none.
    return {e["provider"] for e in found if "provider" in e}


def plain_case(op: str, dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    case = make_case(op, (MOST,), **{"width": 136, "hidden": 72, "dtype": dtype} | options)
    return gpu_cases.without_ties(case) if op == "dropless" else case


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_any_number_of_tokens(tmp_path, op, dtype):
    case = plain_case(op, dtype)
    file = File(case, tmp_path)
    session = file.session(tmp_path)
    for tokens in TOKENS:
        some = cut(case, tokens)
        assert_matches(file.run(session, some), some.oracle(), case.dtypes)
    assert providers_of(session.end_profiling()) == {gpu_cases.PROVIDER}


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
def test_packed_weights(tmp_path, form):
    sizes = {"shape": (MOST,), "width": 128, "hidden": 64, "group": 32}
    case = packed_case("experts", form, dtype=torch.float16, **sizes)
    file = File(case, tmp_path)
    session = file.session()
    for tokens in TOKENS:
        some = cut(case, tokens)
        expected = some.decoded(rounded=False).oracle()
        assert_matches(file.run(session, some), expected, case.plain.dtypes)


def test_threads_run_one_session(tmp_path):
    """Each gets the bits that it gets alone: no workspace passes to another stream too early."""
    case = plain_case("experts")
    file = File(case, tmp_path)
    session = file.session()
    parts = [cut(case, tokens) for tokens in (MOST, 7, MOST // 2, MOST // 5)]
    alone = [file.run(session, part) for part in parts]

    def again(number: int) -> bool:
        found = (file.run(session, parts[number]) for _ in range(AGAIN))
        return all(torch.equal(y, alone[number]) for y in found)

    with ThreadPoolExecutor(len(parts)) as threads:
        assert all(threads.map(again, range(len(parts))))


def test_a_captured_graph(tmp_path):
    """The first run loads, the second is captured, later ones are replays."""
    import onnxruntime

    case = plain_case("experts")
    file = File(case, tmp_path)
    session = file.session(enable_cuda_graph="1")
    binding = session.io_binding()
    given = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(case.arguments[name].numpy(), "cuda", 0)
        for name in file.names
    }
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    x = case.arguments["x"]
    y = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy(), "cuda", 0)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, y)
    for run in range(4):
        other = case.changed(x=x.roll(run, dims=0).contiguous())
        given["x"].update_inplace(other.arguments["x"].numpy())
        session.run_with_iobinding(binding)
        assert_matches(torch.from_numpy(y.numpy()), other.oracle(), case.dtypes)


@pytest.mark.parametrize("slots", [2, 5])
def test_offloaded_experts(tmp_path, slots):
    """Only the cuda provider has an operator for them."""
    case = plain_case("experts")
    file = File(case, tmp_path, slots)
    session = file.session()
    for tokens in TOKENS:
        some = cut(case, tokens)
        assert_matches(file.run(session, some), some.oracle(), case.dtypes)
