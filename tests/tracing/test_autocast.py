"""``torch.autocast`` in a model: the file has the same casts as the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.tracing import autocast, capture
from small_models import OpLayer, OwnRouter

# Autocast warns if its device is not there.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")

HALF, BFLOAT = torch.float16, torch.bfloat16


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.linear, self.norm = nn.Linear(16, 4), nn.Linear(16, 16), nn.LayerNorm(16)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def region(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        y = m.linear(x)
        return y, torch.cat([y, x], -1), y.prod(-1)  # Lower precision, widest, float32.


def full_precision_router(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        y = m.linear(x)
        with torch.autocast(x.device.type, enabled=False):
            scores = m.router(x.float()).softmax(-1)
        return m.linear(y) * scores.sum(-1, keepdim=True), scores


def of_another_device(m: Model, x: Tensor) -> Any:
    with torch.autocast("cuda", HALF):
        y = m.linear(x)
        with torch.autocast("cpu", HALF), torch.autocast("cuda", enabled=False):
            return y, m.linear(x)


@torch.autocast("cpu", HALF)
def decorated(m: Model, x: Tensor) -> Any:
    return m.linear(x), x[x > 0]  # The size of the second result depends on data.


def composite(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        # einsum may use a matrix product or not: only the first is cast.
        product = torch.einsum("td,ed->te", x, m.router.weight)
        scaled = torch.einsum("td,d->td", x, m.linear.bias)
        return product, scaled, m.norm(x), F.cosine_similarity(m.linear(x), x)


def attention(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        heads = m.linear(x).view(-1, 4, 4).transpose(0, 1)[None]
        return F.scaled_dot_product_attention(heads, heads.float(), heads)


def norm_of_half(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        y = m.norm(m.linear(x))  # A CPU's autocast does not cast the norm's own parameters.
        return y, F.group_norm(y[..., None], 4, m.norm.weight, m.norm.bias)


def with_other_modes(m: Model, x: Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", HALF):
        y = m.linear(x)
        with torch.inference_mode():
            z = m.linear(x)
        with torch.enable_grad():
            return y, z, m.linear(y)


def several_results(m: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", HALF):
        values, places = m.linear(x).topk(2)
        return values, places, *m.linear(x).split(8, -1)


FUNCTIONS = [
    region,
    full_precision_router,
    of_another_device,
    decorated,
    composite,
    attention,
    norm_of_half,
    with_other_modes,
    several_results,
]


def check(path: Path, model: nn.Module, x: Tensor) -> None:
    """Checks that the file's results are the model's, in the model's dtypes."""
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(str(path))
    (name,) = (value.name for value in session.get_inputs())
    actual = session.run(None, {name: x.numpy()})
    with torch.no_grad():
        result = model(x)
    expected = result if isinstance(result, tuple) else (result,)
    assert [str(value.dtype) for value in actual] == [str(e.dtype)[6:] for e in expected]
    for value, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, right.detach().numpy(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_regions_keep_their_casts(tmp_path: Path, function) -> None:
    model = Model(function).eval()
    dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
    check(tmp_path / "m.onnx", model, torch.randn(7, 16))


@pytest.mark.parametrize("function", [full_precision_router, composite, norm_of_half])
def test_regions_where_torch_exports(tmp_path: Path, monkeypatch, function) -> None:
    monkeypatch.setattr(tracer, "KNOWN_VERSIONS", ((2, 0), (2, 1)))
    model = Model(function).eval()
    dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
    check(tmp_path / "m.onnx", model, torch.randn(7, 16))


@pytest.mark.parametrize("function", [full_precision_router, composite])
def test_regions_of_a_strict_trace(tmp_path: Path, monkeypatch, function) -> None:
    """A retrace, which gives values the dtypes that they would have without autocast."""
    trace = capture._trace

    def strict_alone(*args: Any, strict: bool, **options: Any) -> Any:
        if not strict:
            raise RuntimeError("the model needs a strict trace")
        return trace(*args, strict=strict, **options)

    monkeypatch.setattr(capture, "_trace", strict_alone)
    model = Model(function).eval()
    dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
    check(tmp_path / "m.onnx", model, torch.randn(7, 16))


def test_regions_where_a_second_trace_casts(tmp_path: Path, monkeypatch) -> None:
    def unable(*args: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(autocast._Casts, "insert", unable)
    model = Model(full_precision_router).eval()
    dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
    check(tmp_path / "m.onnx", model, torch.randn(7, 16))


def test_autocast_around_the_export(tmp_path: Path) -> None:
    model = Model(lambda m, x: (m.linear(x), m.router(x.float()).softmax(-1))).eval()
    own = model.forward
    with torch.autocast("cpu", HALF):
        dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
        assert torch.is_autocast_enabled("cpu")
        check(tmp_path / "m.onnx", model, torch.randn(7, 16))
    assert model.forward == own
    assert "forward" not in vars(model)


def test_autocast_around_a_forward_of_the_instance(tmp_path: Path) -> None:
    model = Model(region).eval()
    model.forward = own = lambda x: model.linear(x) @ model.linear.weight  # type: ignore[method-assign]
    with torch.autocast("cpu", HALF):
        dynamo_moe.export(model, torch.randn(4, 16), tmp_path / "m.onnx")
        check(tmp_path / "m.onnx", model, torch.randn(7, 16))
    assert model.forward is own


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = OpLayer(), OwnRouter(activation="silu", gated=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return self.second(self.first(x))


@pytest.mark.parametrize("target", ["plugin", "dense"])
def test_layers_cast_their_experts_alone(tmp_path: Path, target: str) -> None:
    model, path = Layers().eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 5, 16), path, target=target)
    assert report.layers == ("first", "second")
    check(path, model, torch.randn(3, 5, 16))
    weights = {w.name: w.data_type for w in onnx.load(path).graph.initializer}
    # The experts' parameters are stored in the dtype they compute in, under their own names.
    assert weights["first.router_weight"] == onnx.TensorProto.FLOAT
    for name in ("first.w1", "first.w2", "second.w1", "second.w2"):
        assert weights[name] == onnx.TensorProto.FLOAT16


def test_a_weight_that_is_used_in_both_dtypes(tmp_path: Path) -> None:
    def both(m: Model, x: Tensor) -> Any:
        with torch.autocast("cpu", HALF):
            y = m.linear(x)
        return y, m.linear(x)

    model, path = Model(both).eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(4, 16), path)
    check(path, model, torch.randn(7, 16))
    weights = {w.name: w.data_type for w in onnx.load(path).graph.initializer}
    assert weights["linear.weight"] == onnx.TensorProto.FLOAT


def test_bfloat16(tmp_path: Path) -> None:
    """ONNX Runtime has no bfloat16 products on a CPU, so this only checks the dtypes."""

    def mixed(m: Model, x: Tensor) -> Any:
        with torch.autocast("cpu", BFLOAT):
            y = m.linear(x)
            with torch.autocast("cpu", enabled=False):
                scores = m.router(x).softmax(-1)
            return y, scores, y @ m.router.weight.T, y * scores.sum(-1, keepdim=True)

    model, path = Model(mixed).eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(4, 16), path)
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    bfloat, single = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    assert [o.type.tensor_type.elem_type for o in graph.output] == [bfloat, single, bfloat, single]
    weights = {w.name: w.data_type for w in graph.initializer}
    assert weights["linear.weight"] == bfloat
    assert weights["router.bias"] == single
    evaluated = onnx.reference.ReferenceEvaluator(str(path))
    x = torch.randn(7, 16)
    results = evaluated.run(None, {graph.input[0].name: x.numpy()})
    for result, right in zip(results, model(x), strict=True):
        np.testing.assert_allclose(
            result.astype(np.float32), right.detach().float().numpy(), rtol=0.03, atol=0.03
        )
