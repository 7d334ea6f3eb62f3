"""``dynamo_moe.verify``: passes what agrees, fails loudly on what does not."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.tolerances import Tolerance, tolerance_for
from small_models import OpLayer, OwnRouter, mlp_model, op_model


@pytest.fixture(scope="module")
def model_and_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = mlp_model()
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("verify") / "model.onnx"
    shapes = {"input": {1: "tokens"}}
    dynamo_moe.export(model, torch.randn(2, 5, 16), path, dynamic_shapes=shapes)
    return model, path


def altered(path: Path, folder: Path, name: str, factor: float) -> Path:
    """Returns a copy of the file with one weight scaled."""
    proto = onnx.load(path)
    (tensor,) = (t for t in proto.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor) * factor
    tensor.CopyFrom(numpy_helper.from_array(array.astype("float32"), name))
    onnx.save(proto, folder / "altered.onnx")
    return folder / "altered.onnx"


def test_default_cases_differ_from_the_example(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    report = dynamo_moe.verify(path, model)
    assert report.passed
    assert {case.shapes["input"] for case in report.cases} == {(1, 4, 16), (3, 7, 16), (2, 1, 16)}
    assert all(0 <= case.rms_error <= case.max_error < 2e-5 for case in report.cases)
    assert all(case.routing_agreement == 1.0 for case in report.cases)
    assert "ONNX Runtime" in report.runtime


def test_a_wrong_expert_fails(model_and_file: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "1.mlp.w2", 1.01)
    with pytest.raises(dynamo_moe.VerificationError, match="differs from the model") as raised:
        dynamo_moe.verify(wrong, model)
    report = raised.value.report
    assert not report.passed
    assert all(case.routing_agreement == 1.0 for case in report.cases)
    assert json.loads(json.dumps(report.to_dict()))["passed"] is False


@pytest.mark.parametrize("target", ["plugin", "dense", "onnxruntime"])
def test_a_wrong_router_shows_in_the_routing(tmp_path: Path, target: str) -> None:
    model = mlp_model(layers=1)
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target=target)
    wrong = altered(path, tmp_path, "0.mlp.router.weight", -1.0)
    with pytest.raises(dynamo_moe.VerificationError) as raised:
        dynamo_moe.verify(wrong, model, [(torch.randn(200, 16),)])
    # The top 2 of 6 became the bottom 2: never the same pair.
    assert raised.value.report.cases[0].routing_agreement == 0.0


def test_wrong_tokens_show_in_the_routing(
    model_and_file: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "0.mlp.w2", -3.0)
    with pytest.raises(dynamo_moe.VerificationError) as raised:
        dynamo_moe.verify(wrong, model, [(torch.randn(4, 64, 16),)])
    # Layer 0 is fed the same tokens; its wrong result turns some of layer 1's routing.
    assert 0.5 < raised.value.report.cases[0].routing_agreement < 1.0


def test_no_case_verifies_nothing(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(ValueError, match="inputs holds no case"):
        dynamo_moe.verify(path, model, [])


def test_inputs_that_are_no_cases(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(TypeError, match=r"as in \[\(x,\)\]; got a case of type Tensor"):
        dynamo_moe.verify(path, model, (torch.randn(2, 5, 16),))


def test_ids_that_the_model_does_not_know(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Embedding(2, 4)), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.zeros(2, dtype=torch.int64), path)
    with pytest.raises(ValueError, match="pass inputs of your own"):
        dynamo_moe.verify(path, model)


def test_arguments_are_bound_by_name(tmp_path: Path) -> None:
    class Subtract(nn.Module):
        def forward(self, first: Tensor, *, second: Tensor) -> Tensor:
            return first - 2 * second

    model, path = Subtract(), tmp_path / "model.onnx"
    example = {"second": torch.randn(2, 3), "first": torch.randn(2, 3)}
    dynamo_moe.export(model, (), path, kwargs=example)
    assert dynamo_moe.verify(path, model).passed


def test_axes_have_sizes_of_their_own(tmp_path: Path) -> None:
    class Image(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.mean(dim=-1)

    model, path = Image(), tmp_path / "model.onnx"
    shapes = {"image": {1: "height", 2: "width"}}
    dynamo_moe.export(model, torch.randn(2, 3, 4), path, dynamic_shapes=shapes)
    report = dynamo_moe.verify(path, model)
    assert len(set(report.cases[0].shapes["image"])) == 3


def test_not_an_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ValueError, match=r"text\.onnx is not an ONNX model"):
        dynamo_moe.verify(tmp_path / "text.onnx", nn.Identity())


@pytest.mark.parametrize("target", ["plugin", "dense", "onnxruntime"])
def test_routing_of_both_operators(tmp_path: Path, target: str) -> None:
    torch.manual_seed(0)
    model = op_model(OpLayer(activation="silu"), OwnRouter(activation="silu"))
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target=target)
    report = dynamo_moe.verify(path, model, [(torch.randn(50, 16),)])
    assert report.cases[0].routing_agreement == 1.0


def test_layers_that_share_the_graphs_input(tmp_path: Path) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = OpLayer(), OpLayer()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    model, path = Parallel().eval(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path)
    assert dynamo_moe.verify(path, model).cases[0].routing_agreement == 1.0


def test_nan_fails(model_and_file: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "1.norm.bias", float("nan"))
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(wrong, model)


def test_nan_of_any_output_fails(tmp_path: Path) -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x @ self.scale

    model, path = TwoOutputs(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 3), path)
    dynamo_moe.verify(path, model)
    with pytest.raises(dynamo_moe.VerificationError, match="max error nan"):
        dynamo_moe.verify(altered(path, tmp_path, "scale", float("nan")), model)


def test_keyword_cases(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    report = dynamo_moe.verify(path, model, [{"input": torch.randn(9, 2, 16)}])
    assert report.cases[0].shapes == {"input": (9, 2, 16)}


def test_inputs_of_several_kinds(tmp_path: Path) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 16)
            self.layer = OpLayer()

        def forward(self, ids: Tensor, scale: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(self.embedding(ids) * mask[..., None])
            return hidden, hidden.mean(dim=1) * scale

    model, path = Embedding().eval(), tmp_path / "model.onnx"
    example = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(16), torch.ones(2, 5).bool())
    dynamo_moe.export(
        model, example[:2], path, kwargs={"mask": example[2]},
        dynamic_shapes={"ids": {1: "length"}, "mask": {1: "length"}, "scale": {0: None}},
    )  # fmt: skip
    report = dynamo_moe.verify(path, model)
    assert [case.shapes["ids"] for case in report.cases] == [(1, 4), (3, 7), (2, 1)]
    with pytest.raises(ValueError, match=r"one tensor per input of the file \(ids, scale, mask\)"):
        dynamo_moe.verify(path, model, [example[:2]])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing\.onnx"):
        dynamo_moe.verify(tmp_path / "nothing.onnx", nn.Identity())


def test_tolerance_of_the_lowest_precision() -> None:
    assert tolerance_for({torch.float32, torch.float16}) == tolerance_for({torch.float16})
    assert tolerance_for({torch.float64}).max < tolerance_for({torch.float32}).max
    assert tolerance_for({torch.float32}, approximate_gelu=True).max == 1e-2


def test_own_tolerance(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(dynamo_moe.VerificationError, match="tolerance 1e-12"):
        dynamo_moe.verify(path, model, tolerance=Tolerance(max=1e-12, rms=1e-12))
