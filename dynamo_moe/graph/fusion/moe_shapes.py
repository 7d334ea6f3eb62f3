"""ONNX Runtime's MoE operators of tokens as they come, without a Reshape behind them.

Legend: B batch, S tokens, T = B * S, D model width.
"""

from __future__ import annotations

from dynamo_moe.graph.matching import Writer, dimensions, maker, only_user, operand, typed
from dynamo_moe.operators.foreign import ONNXRUNTIME_MOE, ONNXRUNTIME_QMOE

_OPERATORS = (ONNXRUNTIME_MOE, ONNXRUNTIME_QMOE)


def keep_moe_shapes(writer: Writer) -> None:
    """Lets MoE nodes take [B, S, D] in place of [T, D] that is [B, S, D] again behind them.

    So they do with [T, D] of a size with another name.
    """
    for node in list(writer.graph):
        if not any(operator.is_of(node.domain, node.op_type) for operator in _OPERATORS):
            continue
        flat = operand(node, 0)
        merge = maker(flat, "Reshape")
        guard = only_user(node.outputs[0], "Where")  # It uses the tokens once more.
        split = None if guard is None else only_user(guard.outputs[0], "Reshape")
        if merge is None or guard is None or split is None or guard.inputs[1] is not flat:
            continue
        tokens, result = operand(merge, 0), split.outputs[0]
        sizes = dimensions(tokens)
        if (
            len(sizes) not in (2, 3)
            or dimensions(result) != sizes
            or sizes[-1] != dimensions(flat)[-1]
        ):
            continue
        node.replace_input_with(0, tokens)
        typed(node.outputs[0], tokens, sizes)
        guard.replace_input_with(1, tokens)
        writer.replace(result, guard.outputs[0])
