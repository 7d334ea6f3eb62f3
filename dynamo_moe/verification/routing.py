"""Which experts each layer chose, in a file and in PyTorch, and how far the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import Tensor

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from custom_ops.options import ROUTER_OPTIONS, RouterOptions
from custom_ops.routing import route
from dynamo_moe.files import metadata
from dynamo_moe.moe_nodes.nodes import INPUTS
from dynamo_moe.private.pytorch import TorchDispatchMode, schema_of


def add_routing_outputs(proto: onnx.ModelProto) -> list[str]:
    """Makes the expert ids of the file's layers further outputs of its graph, in place.

    Returns:
        Their names, in the layers' order; none where the file names no layers, or an optimisation
        removed a value that decides the routing.
    """
    layers = metadata.layers_of(proto)
    known = {name for node in proto.graph.node for name in node.output}
    known |= {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    used = {name for layer in layers for name in _routing_inputs(layer).values()}
    if not used <= known:
        return []
    return [
        _add_routing_output(proto.graph, layer, f"dynamo_moe.layer{index}")
        for index, layer in enumerate(layers)
    ]


def _routing_inputs(layer: metadata.Layer) -> dict[str, str]:
    """Returns the values of the graph that decide the layer's routing, by the inputs' names."""
    inputs = dict(zip(INPUTS[layer.op_type], layer.inputs, strict=False))
    if "expert_ids" in inputs:
        return {"expert_ids": inputs["expert_ids"]}
    names = ("x", "router_weight", "router_bias", "selection_bias")
    return {name: inputs[name] for name in names if inputs.get(name)}


def _add_routing_output(graph: onnx.GraphProto, layer: metadata.Layer, name: str) -> str:
    """Adds an output: the layer's expert ids, as the file's own tokens and router give them.

    Without a selection bias and groups the top-k of logits is that of their scores: every scoring
    is monotonic.
    """

    def add(op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{name}.{len(graph.node)}.{output}" for output in range(outputs)]
        graph.node.append(onnx.helper.make_node(op_type, inputs, names, **attributes))
        return names[-1]

    def add_first(op_type: str, *inputs: str, **attributes: Any) -> str:
        add(op_type, *inputs, outputs=2, **attributes)
        return str(graph.node[-1].output[0])

    def ints(*values: int) -> str:
        return add("Constant", value_ints=values)

    def members_of_best_groups(ranked: str) -> str:
        count, size = options["n_group"], options["num_experts"] // options["n_group"]
        groups = add("Reshape", ranked, ints(-1, count, size))
        best = 2 if options["group_scoring"] == "top2_sum" else 1
        scores = add("ReduceSum", add_first("TopK", groups, ints(best)), ints(2), keepdims=0)
        chosen = add("TopK", scores, ints(options["topk_group"]), outputs=2)
        ascending = add_first("TopK", chosen, ints(options["topk_group"]), largest=0)
        members = add("Reshape", ints(*range(count * size)), ints(count, size))
        return add("Flatten", add("Gather", members, ascending), axis=1)

    routing_inputs = _routing_inputs(layer)
    ids = next(iter(routing_inputs.values()))
    if "router_weight" in routing_inputs:
        options = layer.attributes
        inputs = {
            input_name: add("Cast", value, to=onnx.TensorProto.FLOAT)
            for input_name, value in routing_inputs.items()
        }
        inputs["x"] = add("Flatten", inputs["x"], axis=-1)
        ranked = add("MatMul", inputs["x"], add("Transpose", inputs["router_weight"], perm=[1, 0]))
        if "router_bias" in inputs:
            ranked = add("Add", ranked, inputs["router_bias"])
        if options.get("logits_dtype") == "tokens":
            rounded = add("CastLike", ranked, routing_inputs["x"])
            ranked = add("Cast", rounded, to=onnx.TensorProto.FLOAT)
        limited = options.get("topk_group", 1) < options.get("n_group", 1)
        if limited or "selection_bias" in inputs:
            scoring = {"softmax": "Softmax", "sigmoid": "Sigmoid", "topk_softmax": "Identity"}
            ranked = add(scoring[options.get("scoring", "softmax")], ranked)
        if "selection_bias" in inputs:
            ranked = add("Add", ranked, inputs["selection_bias"])
        top_k = ints(options["top_k"])
        if limited:
            members = members_of_best_groups(ranked)
            indices = add("TopK", add("GatherElements", ranked, members, axis=1), top_k, outputs=2)
            ids = add("GatherElements", members, indices, axis=1)
        else:
            ids = add("TopK", ranked, top_k, outputs=2)
    output = add("Identity", ids)
    graph.output.append(onnx.ValueInfoProto(name=output))
    return output


_WITH_ROUTER = (torch.ops.moe.dropless.default, torch.ops.moe.dropless_packed.default)


class RoutingRecorder(TorchDispatchMode):
    """Records the routing of every MoE operator that runs inside it, except in branches of cond."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # It has no annotations.
        self.ids: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.moe.experts.default, torch.ops.moe.experts_packed.default):
            self.ids.append(args[1])
        elif func in _WITH_ROUTER:
            names = (argument.name for argument in schema_of(func).arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            options = RouterOptions(
                given["top_k"],
                **{row.name: given.get(row.name, row.default) for row in ROUTER_OPTIONS},
            )
            x_TD = given["x"].reshape(-1, given["x"].shape[-1])
            biases = given.get("router_bias"), given.get("selection_bias")
            routed = route(x_TD, given["router_weight"], biases[0], options, biases[1])
            self.ids.append(routed[0])
        return func(*args, **kwargs)


class ChoicesOfFile(TorchDispatchMode):
    """Lets a model take the experts of a file where their scores are close to the model's choice.

    Rounding decides between such scores; what the experts compute can still be compared.

    Args:
        in_file: The file's expert ids of each layer.
        closeness: By how much the lowest scores of both choices may differ, as a share of the
            token's largest.

    Attributes:
        taken: (token, layer) pairs for which that made a difference.
    """

    supports_higher_order_operators = True

    def __init__(self, in_file: Sequence[Tensor], closeness: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # It has no annotations.
        self._waiting = [ids.reshape(-1, ids.shape[-1]).long() for ids in in_file]
        self._closeness = closeness
        self.taken = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or args[0].ndim < 2:
            return result
        values, ids = result
        for place, file_ids in enumerate(self._waiting):
            choice = self._choice(args[0], values, ids, file_ids)
            if choice is not None:
                del self._waiting[: place + 1]
                return choice
        return result

    def _choice(
        self, scores: Tensor, values: Tensor, ids: Tensor, file_ids: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Returns a top-k with a layer's choice in the file; None if it is not of that layer."""
        experts, (tokens, top_k) = scores.shape[-1], file_ids.shape
        is_alike = (*ids.shape[-1:], ids.numel()) == (top_k, tokens * top_k)
        if not is_alike or not tokens or file_ids.max() >= experts:
            return None
        scores_TE, ids_TK = scores.reshape(-1, experts), ids.reshape(-1, top_k)
        differs_T = ~_same(ids_TK, file_ids)
        file_values = scores_TE.gather(-1, file_ids)
        lost_T = values.reshape(-1, top_k).amin(-1) - file_values.amin(-1)
        largest_T = scores_TE.abs().where(scores_TE.isfinite(), 0.0).amax(-1)
        if (differs_T & ~(lost_T <= self._closeness * largest_T)).any():
            return None
        self.taken += int(differs_T.sum())
        takes_T1 = differs_T[:, None]
        values_TK = torch.where(takes_T1, file_values, values.reshape(-1, top_k))
        return values_TK.view_as(values), torch.where(takes_T1, file_ids, ids_TK).view_as(ids)


def agreement(routed: Sequence[Tensor], in_file: Sequence[Tensor]) -> float | None:
    """Returns the fraction of (token, layer) pairs whose sets of experts agree."""
    if not in_file or len(in_file) != len(routed):
        return None
    return float(_all_same(routed, in_file).double().mean())


def other_choices(routed: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Returns how many (token, layer) pairs have other sets of experts in two runs of a model."""
    return int((~_all_same(routed, others)).sum()) if routed else 0


def _all_same(routed: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    pairs = zip(routed, others, strict=True)
    return torch.cat([_same(ours, theirs) for ours, theirs in pairs])


def _same(ids: Tensor, others: Tensor) -> Tensor:
    """Returns of each token whether both are the same set, ``[T]``."""
    ours, theirs = (value.reshape(-1, ids.shape[-1]).sort(dim=-1)[0] for value in (ids, others))
    return (ours == theirs).all(dim=-1)
