"""Which experts each layer chose, in a file and in PyTorch, and how far the two agree."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import Tensor

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from custom_ops.options import RouterOptions
from custom_ops.routing import route
from dynamo_moe.files import metadata
from dynamo_moe.moe_nodes.nodes import DROPLESS, EXPERTS, INPUTS
from dynamo_moe.private import TorchDispatchMode

__all__ = ["RoutingRecorder", "agreement", "layers_of", "routing_graph"]


def layers_of(proto: onnx.ModelProto) -> list[metadata.Layer]:
    """Returns what a file's metadata says of its MoE layers."""
    return metadata.from_metadata({prop.key: prop.value for prop in proto.metadata_props})


def routing_graph(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Makes the file's outputs the expert ids of its layers, in order, in place.

    None where the file names no layers, or optimisation removed a value that decides the routing.
    """
    layers = layers_of(proto)
    known = {name for node in proto.graph.node for name in node.output}
    known |= {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    used = {name for layer in layers for name in _routing_inputs(layer)}
    if not layers or not used <= known:
        return None
    del proto.graph.output[:]
    for place, layer in enumerate(layers):
        _watch(proto.graph, layer, f"dynamo_moe.layer{place}")
    return proto


def _routing_inputs(layer: metadata.Layer) -> list[str]:
    """The values of the graph that decide the layer's routing."""
    inputs = dict(zip(INPUTS[layer.op_type], layer.inputs, strict=False))
    if layer.op_type == EXPERTS:
        return [inputs["expert_ids"]]
    return [inputs[name] for name in ("x", "router_weight", "router_bias") if inputs.get(name)]


def _watch(graph: onnx.GraphProto, layer: metadata.Layer, name: str) -> None:
    """Adds the layer's expert ids, as the file's own tokens and router give them, as an output.

    The top-k of logits is that of their scores: every scoring is monotonic.
    """

    def add(op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{name}.{len(graph.node)}.{output}" for output in range(outputs)]
        graph.node.append(onnx.helper.make_node(op_type, inputs, names, **attributes))
        return names[-1]

    inputs = _routing_inputs(layer)
    ids = inputs[0]
    if layer.op_type == DROPLESS:
        tokens, weight, *bias = (add("Cast", value, to=onnx.TensorProto.FLOAT) for value in inputs)
        logits = add("MatMul", tokens, add("Transpose", weight, perm=[1, 0]))
        for value in bias:
            logits = add("Add", logits, value)
        top_k = add("Constant", value_ints=[layer.attributes["top_k"]])
        ids = add("TopK", logits, top_k, outputs=2)
    graph.output.append(onnx.ValueInfoProto(name=add("Identity", ids)))


class RoutingRecorder(TorchDispatchMode):
    """Notes the routing of every MoE operator that runs inside it, but for branches of cond."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not.
        self.ids: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.moe.experts.default:
            self.ids.append(args[1])
        elif func is torch.ops.moe.dropless.default:
            tokens, weight, top_k = args[0], args[1], args[6]
            bias = args[7] if len(args) > 7 else None
            options = RouterOptions(top_k, scoring=kwargs.get("scoring", "softmax"))
            self.ids.append(route(tokens.reshape(-1, tokens.shape[-1]), weight, bias, options)[0])
        return func(*args, **kwargs)


def agreement(routed: list[Tensor], watched: list[Tensor]) -> float | None:
    """Returns the fraction of (token, layer) pairs whose sets of experts agree."""
    if not watched or len(watched) != len(routed):
        return None
    same = []
    for ours, file in zip(routed, watched, strict=True):
        ids, other = (value.reshape(-1, ours.shape[-1]).sort(dim=-1)[0] for value in (ours, file))
        same.append((ids == other).all(dim=-1))
    return float(torch.cat(same).double().mean())
