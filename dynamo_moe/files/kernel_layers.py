"""The MoE nodes of an ONNX file, as the kernels' layers."""

from __future__ import annotations

from os import PathLike

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from custom_ops.kernels.layer import Layer
from custom_ops.weight_formats import ZERO_POINTS
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import has_one_zero_point, is_moe, moe_nodes, parse
from dynamo_moe.moe_nodes.schemas import SCHEMAS
from dynamo_moe.operators.schemas import is_own_domain


def kernel_layers(path: str | PathLike[str]) -> list[Layer]:
    """Reads what kernels the MoE nodes of a file need, without its external data.

    Nodes in branches, loops and functions are found too; ``com.microsoft::MoE`` is not one of ours.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model, or there are no kernels for a node, which is
            named.
    """
    return kernel_layers_of(load_graph(path))


def kernel_layers_of(stored: onnx.ModelProto) -> list[Layer]:
    """Returns the kernels' layers of a graph's MoE nodes, as :func:`kernel_layers` of its file.

    Raises:
        ValueError: If there are no kernels for a node, which is named.
    """
    layers = []
    for node in moe_nodes(inlined_model(stored)):
        try:
            layers.append(_layer(node).canonical())
        except (ValueError, TypeError) as error:
            name = node.name or next((output.name for output in node.outputs if output.name), "")
            raise ValueError(f"node {name!r}: {error}") from None
    return layers


def inlined_model(stored: onnx.ModelProto) -> ir.Model:
    """Returns a model whose MoE nodes are all in its graph, and not in functions.

    The dtypes and shapes of their inputs are inferred where the file does not say them.
    """
    model = ir.from_proto(inlined(stored))
    if any(is_moe(node) for function in model.functions.values() for node in function.all_nodes()):
        # A function's types and weights are those of its call.
        common_passes.InlinePass(lambda function: not is_own_domain(function.domain))(model)
    inputs = [value for node in moe_nodes(model) for value in node.inputs if value is not None]
    if any(value.dtype is None or value.shape is None for value in inputs):
        import dynamo_moe.moe_nodes.translation  # noqa: F401  onnx asks the schemas it registers.

        # Not strict: where the file contradicts itself, what is not known is named by who needs it.
        common_passes.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    return model


def _layer(node: ir.Node) -> Layer:
    parsed = parse(node)
    for name, given in parsed.inputs.items():
        if name.endswith(ZERO_POINTS) and has_one_zero_point(given) is None:
            raise ValueError(f"the shape of its input {name}, {given.name!r}, is not known")
    first_of: dict[str, tuple[str, ir.Value]] = {}
    for formal in SCHEMAS[node.op_type].inputs:
        value = parsed.inputs.get(formal.name)
        if value is None:
            continue
        first, like = first_of.setdefault(formal.type_str, (formal.name, value))
        if value.dtype != like.dtype:
            raise ValueError(
                f"{formal.name} must have the dtype of {first}, {_text(like)}; got {_text(value)}"
            )
    return Layer(parsed.shape, resident_experts=parsed.resident_experts)


def _text(value: ir.Value) -> str:
    return value.dtype.name.lower() if value.dtype else "unknown"
