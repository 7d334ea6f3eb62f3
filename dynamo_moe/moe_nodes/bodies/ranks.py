"""The function for a sum over ranks."""

from __future__ import annotations

import onnx_ir as ir

from dynamo_moe.moe_nodes.nodes import DOMAIN, SUM_OVER_RANKS
from dynamo_moe.operators.foreign import TENSORRT_COLLECTIVE, ForeignOperator


def sum_over_ranks_body(node: ir.Node, opset: int, collective: ForeignOperator) -> ir.Function:
    """Returns the function for a node ``SumOverRanks``: a runtime's own collective."""
    ranks = node.attributes["ranks"].as_int()
    attributes = []
    if collective == TENSORRT_COLLECTIVE:
        attributes = [
            ir.AttrString("collective_operation", "all_reduce"),
            ir.AttrString("reduce_op", "sum"),
            ir.AttrInt64("root", -1),
            ir.AttrInt64("nb_rank", ranks),
        ]
    part = ir.Value(name="y")
    reduce = ir.Node(
        collective.domain, collective.op_type, [part], attributes, name="all_reduce", version=1
    )
    reduce.outputs[0].name = "sum"
    opsets = {"": opset, collective.domain: 1}
    name = f"over_{ranks}"
    graph = ir.Graph([part], reduce.outputs, nodes=[reduce], opset_imports=opsets, name=name)
    return ir.Function(DOMAIN, SUM_OVER_RANKS, overload=name, graph=graph, attributes=[])
