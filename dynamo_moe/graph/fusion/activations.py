"""SiLU as one node: Sigmoid-Weighted Linear Units, Elfwing et al., 2017."""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.graph.matching import Writer, both_orders, only_use
from dynamo_moe.operators.foreign import ONNXRUNTIME_QUICK_GELU


def fuse_silu(writer: Writer) -> None:
    """Makes ``x * sigmoid(x)`` one node of ONNX Runtime's, which gives ``x * sigmoid(alpha * x)``.

    In half precision it would round in other places.
    """
    operator = ONNXRUNTIME_QUICK_GELU
    for node in list(writer.graph):
        if node.domain or node.op_type != "Mul" or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        for x, factor in both_orders(node):
            sigmoid = only_use(factor, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is x:
                options = {"alpha": 1.0}
                new = writer.node(node, operator.op_type, [x], options, domain=operator.domain)
                writer.replace(node.outputs[0], new.outputs[0])
                break
