"""``verify(..., library=True)``: the native library's operators against the model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import dynamo_moe
from packed_cases import PackedLayer, packed_case
from small_models import mlp_model


class Layers(nn.Module):
    """Two layers with packed weights of two formats; the further ones compute in float64."""

    def __init__(self, double: int = 0) -> None:
        super().__init__()
        layers = [PackedLayer(packed_case("dropless", form, biases=False)) for form in FORMS]
        dtype = torch.float64
        cases = [packed_case("dropless", dtype=dtype, biases=False) for _ in range(double)]
        self.layers = nn.ModuleList([*layers, *map(PackedLayer, cases)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.case.plain.arguments["x"].dtype)).float()
        return x


FORMS = ("int4", "nvfp4")


def exported(model: nn.Module, path: Path, **options: object) -> Path:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    dynamo_moe.export(model.eval(), torch.zeros(3, 32), path, dynamic_shapes=shapes, **options)
    return path


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "isolated"])
def test_which_nodes_ran(isolated: bool, tmp_path: Path) -> None:
    model = Layers(double=1)
    path = exported(model, tmp_path / "model.onnx")
    names = [n.name for n in onnx.load(path).graph.node if n.domain.startswith("moe")]
    report = dynamo_moe.verify(path, model, isolated=isolated, library=True)
    assert report.passed
    assert (report.by_operator, report.by_function) == (tuple(names[:2]), (names[2],))
    caption = report.__rich__().caption
    assert "MoE nodes by the library's operators: 2; by functions: 1 (" in str(caption)
    assert report.to_dict()["by_operator"] == names[:2]
    assert all(case.routing_agreement == 1 for case in report.cases)
    assert dynamo_moe.verify(path, model).by_operator is None


def test_a_file_that_differs(tmp_path: Path) -> None:
    model = Layers()
    path = exported(model, tmp_path / "model.onnx")
    proto = onnx.load(path)
    (scales,) = (t for t in proto.graph.initializer if t.name == "layers.0.w1_scales")
    scales.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(scales), scales.name))
    onnx.save(proto, path)
    with pytest.raises(dynamo_moe.VerificationError, match="differs from the model"):
        dynamo_moe.verify(path, model, library=True)


def test_a_file_of_a_rank(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    report = dynamo_moe.export(model, torch.randn(2, 5, 16), tmp_path / "model.onnx", ranks=2)
    file = next(file for file in report.files if file.suffix == ".onnx")
    message = r"library needs a file for one device; .* is for rank \d of 2"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.verify(file, model, library=True)


def test_files_without_such_nodes(tmp_path: Path) -> None:
    model = Layers()
    path = exported(model, tmp_path / "model.onnx", target="dense")
    message = "has no node that the native library's operators compute .* with target 'plugin'"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.verify(path, model, library=True)


@pytest.mark.parametrize("library", [False, True])
def test_offloaded_experts(library: bool, tmp_path: Path) -> None:
    model = Layers()
    path, offloaded = exported(model, tmp_path / "model.onnx"), tmp_path / "offloaded.onnx"
    dynamo_moe.offload_file(path, offloaded, resident_experts=2)
    message = r"offloaded\.onnx: its experts are offloaded\. Verify the file that it was made from"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.verify(offloaded, model, library=library)
