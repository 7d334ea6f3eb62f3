"""``dynamo_moe.session``: exported files in ONNX Runtime with the native library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from body_layers import BIASED, DOUBLE, GATED, HALF, Layer, changed, check, oracle, run, to_model
from dynamo_moe.moe_nodes.bodies import body
from moe_cases import make_case
from packed_cases import PackedLayer, packed_case


class Model(nn.Module):
    """A layer of a case."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        case = make_case("dropless", **options)
        self.top_k = case.arguments.pop("top_k")
        self.options = case.options
        self.names = list(case.arguments)
        for name, value in case.arguments.items():
            if name != "x" and value is not None:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        given = {name: getattr(self, name, None) for name in self.names if name != "x"}
        return torch.ops.moe.dropless(x, **given, top_k=self.top_k, **self.options)


def nodes_of(session: ort.InferenceSession, path: Path, x: np.ndarray) -> set[str]:
    """What the session ran, by a profile."""
    session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    return {event.get("args", {}).get("op_name", "") for event in events}


def profiled(tmp_path: Path) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    return options


@pytest.mark.parametrize("external_data", [False, True])
def test_an_exported_file(tmp_path: Path, external_data: bool) -> None:
    model = Model(width=16, hidden=24)
    path = tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    dynamo_moe.export(
        model, torch.zeros(3, 16), path, dynamic_shapes=shapes, external_data=external_data
    )
    session = dynamo_moe.session(path, options=profiled(tmp_path))
    for tokens in (0, 1, 7, 100):
        x = torch.randn(tokens, 16)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-5, rtol=1e-5)
    ran = nodes_of(session, path, x.numpy())
    assert "DroplessMoE" in ran
    assert "TopK" not in ran


def test_layers_of_several_configurations(tmp_path: Path) -> None:
    # The function of each further one has a domain of its own, and one is in float64.
    groups = {"n_group": 1, "topk_group": 1}
    layers = [
        Layer(changed(BIASED, tokens_dtype=DOUBLE, experts_dtype=DOUBLE), **groups),
        Layer(GATED, **groups),
        Layer(changed(BIASED, tokens_dtype=HALF, experts_dtype=HALF), **groups),
    ]
    model = to_model(layers, body)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    session = dynamo_moe.session(path, options=profiled(tmp_path))
    arguments = layers[0].arguments(33)
    for layer, found in zip(layers, run(session, arguments), strict=True):
        tolerance = 5e-3 if layer is layers[2] else 1e-5
        np.testing.assert_allclose(found, oracle(layer, arguments), atol=tolerance)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event.get("args", {}).get("op_name", "") for event in events]
    assert ran.count("DroplessMoE") == 2
    assert ran.count("TopK") == 1


def test_a_file_of_float64_runs_its_body(tmp_path: Path) -> None:
    config = changed(BIASED, tokens_dtype=DOUBLE, experts_dtype=DOUBLE)
    layer = Layer(config, n_group=1, topk_group=1)
    ir.save(to_model([layer], body), tmp_path / "model.onnx")
    check(layer, dynamo_moe.session(tmp_path / "model.onnx"), layer.arguments(7))


def test_packed_weights(tmp_path: Path) -> None:
    """Of two formats, whose functions have domains of their own."""
    cases = [packed_case("dropless", form, biases=False) for form in ("int4", "fp8")]
    model = nn.Sequential(*map(PackedLayer, cases)).eval()
    path = tmp_path / "model.onnx"
    x = cases[0].arguments["x"]
    dynamo_moe.export(model, x, path)
    session = dynamo_moe.session(path, options=profiled(tmp_path))
    (found,) = session.run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-5, rtol=1e-5)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event.get("args", {}).get("op_name", "") for event in events]
    assert ran.count("DroplessMoEPacked") == 2
    assert "TopK" not in ran


def test_a_file_of_another_target(tmp_path: Path) -> None:
    model = Model(width=16, hidden=24)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.zeros(3, 16), path, target="dense")
    x = torch.randn(3, 16)
    (found,) = dynamo_moe.session(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-5, rtol=1e-5)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.onnx"):
        dynamo_moe.session(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.onnx"):
        dynamo_moe.session(tmp_path / "text.onnx")


def test_kernels_where_there_is_no_provider_for_them(tmp_path: Path) -> None:
    """The CPU's operators compute then, as ONNX Runtime leaves out what it lacks."""
    model = Model(width=16, hidden=24)
    path, kernels = tmp_path / "model.onnx", tmp_path / "model.moek"
    kernels.write_bytes(b"not read")
    dynamo_moe.export(model.eval(), torch.randn(4, 16), path, input_names=["x"])
    options = profiled(tmp_path)
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        session = dynamo_moe.session(
            path,
            options=options,
            providers=[("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"],
            kernels=kernels,
        )
    assert options.get_session_config_entry("dynamo_moe.kernels") == str(kernels)
    x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
    assert "DroplessMoE" in nodes_of(session, path, x)


def test_kernels_that_no_provider_takes(tmp_path: Path) -> None:
    model = Model(width=16, hidden=24)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model.eval(), torch.randn(4, 16), path)
    with pytest.raises(ValueError, match=r"CUDAExecutionProvider, which is not among \['CPUEx"):
        dynamo_moe.session(path, kernels=tmp_path / "model.moek")
    with pytest.raises(FileNotFoundError, match=r"model\.moek"):
        dynamo_moe.session(
            path, providers=["CUDAExecutionProvider"], kernels=tmp_path / "model.moek"
        )
    with pytest.raises(TypeError, match=r"a list of names, such as \['CUDAExecutionProvider'\]"):
        dynamo_moe.session(path, providers="CUDAExecutionProvider")


def test_offloaded_experts_where_there_is_no_provider_for_them(tmp_path: Path) -> None:
    model = Model(width=16, hidden=24)
    path, offloaded = tmp_path / "model.onnx", tmp_path / "offloaded.onnx"
    dynamo_moe.export(model.eval(), torch.randn(4, 16), path)
    dynamo_moe.offload_file(path, offloaded, resident_experts=2)
    message = r"offloaded experts of .*offloaded\.onnx are for .*, which is not among \["
    with pytest.raises(ValueError, match=rf"{message}'CPUExecutionProvider'\]"):
        dynamo_moe.session(offloaded)
    with pytest.raises(ValueError, match=rf"{message}.*'CPUExecutionProvider'"):
        dynamo_moe.session(offloaded, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
