"""What the optimised graph says about sizes."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from dynamo_moe.graph import passes

RESHAPED = """<ir_version: 10, opset_import: ["" : 20]>
model (float[n, 4] x, int64[2] sizes) => (float[a, b] y) {
  reshaped = Reshape(x, sizes)
  y = Relu(reshaped)
}"""


def test_unknown_sizes_have_no_names() -> None:
    # Counted names would be another one's in each of the blocks that are otherwise equal.
    model = ir.from_proto(onnx.parser.parse_model(RESHAPED))
    passes.optimize(model)
    (reshaped,) = (node for node in model.graph if node.op_type == "Reshape")
    assert reshaped.outputs[0].shape == ir.Shape([None, None])
