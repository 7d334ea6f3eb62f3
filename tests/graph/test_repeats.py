"""Repeated normalisations as a Loop: what the steps use, and what keeps them apart."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.graph.repeats import roll_repeats


class _AddsLater(nn.Module):
    """What its steps add is computed after the first step's sum."""

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        for _ in range(6):
            total = x.sum(-1, keepdim=True)
            total = total + torch.exp(e)
            x = x / total
        return x


def test_what_the_steps_add_may_be_computed_after_the_first_sum(tmp_path: Path) -> None:
    model = _AddsLater()
    report = dynamo_moe.export(model, (torch.rand(3, 4), torch.rand(3, 1)), tmp_path / "m.onnx")
    assert report.nodes["Loop"] == 1
    assert "ReduceSum" not in report.nodes
    x, e = torch.rand(5, 4), torch.rand(5, 1)
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    (y,) = session.run(None, dict(zip(names, (x.numpy(), e.numpy()), strict=True)))
    np.testing.assert_allclose(y, model(x, e).numpy(), rtol=1e-5)


def test_steps_whose_reductions_have_other_attributes_are_kept_apart() -> None:
    """With empty axes, ``noop_with_empty_axes`` decides between the element and the whole sum."""
    steps = "".join(
        f"""
        s{step} = ReduceSum<keepdims = 1, noop_with_empty_axes = {int(step < 3)}>(x{step}, axes)
        t{step} = Add(s{step}, epsilon)
        x{step + 1} = Div(x{step}, t{step})"""
        for step in range(6)
    )
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 18]>
        steps (float[2, 3] x0) => (float[2, 3] x6)
        <int64[0] axes = {{}}, float epsilon = {{0.5}}>
        {{{steps}
        }}
        """
    )
    rolled = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    roll_repeats(rolled)
    x = np.random.default_rng(0).random((2, 3), np.float32)
    before, after = (
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {"x0": x}
        )
        for proto in (model, ir.to_proto(rolled))
    )
    np.testing.assert_array_equal(before, after)
