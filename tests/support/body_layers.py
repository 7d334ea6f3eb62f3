"""Layers for the function bodies of nodes, what they must compute in float64, and models of them.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

from custom_ops.dtypes import FLOATS, IDS
from custom_ops.layer_shape import LayerShape
from custom_ops.options import (
    EXPERT_OPTIONS,
    GROUP_SCORINGS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    SCORINGS,
    RouterOptions,
)
from custom_ops.weight_formats import plain_format
from dynamo_moe.moe_nodes.bodies import BodyConfig, body, dense_body, dropless, unrolled_body
from dynamo_moe.moe_nodes.bodies.layer import function, routed
from dynamo_moe.moe_nodes.bodies.ops import Ops
from dynamo_moe.tolerances import tolerance_for

Arrays = Mapping[str, np.ndarray]

FLOAT, HALF, BFLOAT16, DOUBLE = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
)


def changed(config: BodyConfig, **changes: Any) -> BodyConfig:
    """A configuration with other options, inputs (``has_b1``) or dtypes.

    ``router_dtype`` is that of all router parameters, or of the weights where there is no router;
    ``router=False`` takes the router away.
    """
    shape = config.shape
    if not changes.pop("router", True):
        shape = replace(shape, router=None, routing_dtype=torch.int64, weights_dtype=torch.float32)
    options, router, layout, of_shape = {}, {}, {}, {}
    for name, given in changes.items():
        value = TORCH_DTYPES[given] if isinstance(given, ir.DataType) else given
        if name in {row.name for row in EXPERT_OPTIONS}:
            options[name] = value
        elif name in {row.name for row in ROUTER_OPTIONS}:
            router[name] = value
        elif name in {row.name for row in LAYOUT_OPTIONS}:
            layout[name] = value
        elif name == "experts_dtype":
            of_shape["weight_format"] = plain_format(value)
        elif name == "router_dtype":
            of_shape["weights_dtype"] = value
            if shape.router:
                of_shape["routing_dtype"] = value
                of_shape["weights_dtype"] = value if shape.weights_dtype else None
        elif name == "has_router_bias":
            of_shape["weights_dtype"] = shape.routing_dtype if value else None
        elif name == "has_selection_bias":
            of_shape["selection_dtype"] = torch.float32 if value else None
        else:
            of_shape[name.removeprefix("has_")] = value
    if router:
        of_shape["router"] = replace(config.router_options, **router)
    changed_shape = replace(
        shape,
        options=replace(shape.options, **options),
        layout=replace(shape.layout, **layout),
        **of_shape,
    )
    return replace(config, shape=changed_shape)


TORCH_DTYPES = {from_torch_dtype(dtype): dtype for dtype in (*FLOATS, *IDS, torch.int8)}
PLAIN = BodyConfig(
    LayerShape(
        experts=6,
        width=8,
        hidden=12,
        top_k=2,
        tokens_dtype=torch.float32,
        weight_format=plain_format(torch.float32),
        router=RouterOptions(2),
        routing_dtype=torch.float32,
        weights_dtype=None,
    )
)
BIASED = changed(PLAIN, has_router_bias=True, has_b1=True, has_b2=True)
GATED = changed(PLAIN, activation="silu", gated=True)
EXPERTS = changed(PLAIN, router=False)
GPT_OSS = changed(
    EXPERTS,
    activation="clamped_swiglu",
    gated=True,
    interleaved=True,
    has_b1=True,
    has_b2=True,
    routing_dtype=torch.int32,
)
LLAMA4 = changed(EXPERTS, activation="silu", gated=True, weight_on_input=True)
NORMED = changed(
    PLAIN, scoring="sigmoid", renormalize=False, activation="gelu_tanh", gated=True,
    pre_norm="rms", residual=True,
)  # fmt: skip
CONFIGS = [
    *(changed(PLAIN, activation=name) for name in ("gelu", "gelu_tanh", "silu", "relu", "relu2")),
    *(changed(GATED, activation=name) for name in ("gelu", "gelu_tanh", "silu", "relu", "relu2")),
    *(changed(PLAIN, activation=name) for name in ("quick_gelu", "mish", "elu", "identity")),
    *(changed(GATED, activation=name) for name in ("tanh", "hardswish", "leaky_relu")),
    *(changed(PLAIN, scoring=name) for name in ("softmax", "topk_softmax", "sigmoid")),
    *(changed(PLAIN, scoring=n, renormalize=False) for n in ("softmax", "topk_softmax", "sigmoid")),
    changed(GATED, interleaved=True),
    changed(GATED, activation="clamped_swiglu"),
    changed(GATED, activation="clamped_silu", interleaved=True),
    changed(GATED, activation="softcapped_silu"),
    BIASED,
    changed(BIASED, has_b2=False),
    changed(BIASED, has_b1=False, has_b2=False),
    changed(BIASED, weight_on_input=True),
    EXPERTS,
    changed(EXPERTS, has_b1=True),
    GPT_OSS,
    LLAMA4,
    NORMED,
    changed(BIASED, pre_norm="rms"),
    changed(EXPERTS, residual=True),
    changed(LLAMA4, pre_norm="rms", residual=True),
    *(changed(BIASED, has_selection_bias=True, scoring=name) for name in SCORINGS),
    *(
        changed(PLAIN, scoring=name, group_scoring=group)
        for name in SCORINGS
        for group in GROUP_SCORINGS[1:]
    ),
    changed(
        BIASED,
        has_selection_bias=True,
        scoring="sigmoid",
        group_scoring="top2_sum",
        selection_dtype=BFLOAT16,
    ),
    *(
        changed(PLAIN, tokens_dtype=dtype, scoring=name, **rounding)
        for name in SCORINGS
        for dtype, rounding in (
            (HALF, {"logits_dtype": "tokens"}),
            (BFLOAT16, {"logits_dtype": "tokens", "routing_weights_dtype": "tokens"}),
        )
    ),
]
IN_OUT = [
    changed(config, w1_transposed=w1, w2_transposed=w2)
    for config in (PLAIN, BIASED, GPT_OSS, LLAMA4)
    for w1, w2 in ((True, True), (True, False), (False, True))
]
"""Configurations whose weights lie as (in, out), for bodies beside a node."""
DTYPES = [
    (FLOAT, FLOAT, FLOAT),
    (HALF, HALF, HALF),
    (BFLOAT16, BFLOAT16, BFLOAT16),
    (FLOAT, HALF, FLOAT),
    (FLOAT, BFLOAT16, FLOAT),
    (BFLOAT16, BFLOAT16, FLOAT),
    (DOUBLE, DOUBLE, DOUBLE),
    (DOUBLE, FLOAT, FLOAT),
    (FLOAT, DOUBLE, FLOAT),
]
EXPERTS_OF_A_LAYER = 6
unrolled = functools.partial(unrolled_body, num_experts=EXPERTS_OF_A_LAYER)


def visiting(config: BodyConfig, opset: int, *, domain: str = "moe") -> ir.Function:
    """Forces the way ``body`` works for many slots, which layers as small as these seldom have."""

    def experts(op: Ops, config: BodyConfig, *values: Any) -> ir.Value:
        return op.Squeeze(dropless.one_by_one(op, config, *values), [1], out="y_TD")

    return function(config, opset, domain, routed(experts))


beside_a_node = pytest.mark.parametrize(
    "build", [body, visiting, unrolled], ids=["gathered", "visited", "unrolled"]
)
every_body = pytest.mark.parametrize(
    "build",
    [body, visiting, unrolled, dense_body],
    ids=["gathered", "visited", "unrolled", "dense"],
)
Build = Callable[..., ir.Function]


@dataclass(frozen=True)
class Layer:
    """Sizes and values of one layer; the floats are exact in float32."""

    config: BodyConfig
    top_k: int = 2
    experts: int = EXPERTS_OF_A_LAYER
    width: int = 8
    hidden: int = 12
    alpha: float = 1.25
    limit: float = 0.875
    scaling: float = 1.5
    norm_eps: float = 0.125
    n_group: int = 3
    topk_group: int = 2
    parameters: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, E, D, H = self.config, self.experts, self.width, self.hidden
        F = 2 * H if config.options.gated else H
        shapes = {
            "router_weight": (E, D),
            "router_bias": (E,),
            "w1": (E, F, D),
            "b1": (E, F),
            "w2": (E, D, H),
            "b2": (E, D),
            "selection_bias": (E,),
        }
        rng = np.random.default_rng(0)
        for name, shape in shapes.items():
            value = rng.standard_normal(shape) * shape[-1] ** -0.5
            dtype = config.routing_dtype if name.startswith("router") else config.operand_dtype
            dtype = config.selection_dtype if name == "selection_bias" else dtype
            if name in config.inputs:
                self.parameters[name] = value.astype(dtype.numpy())

    @property
    def stored(self) -> dict[str, np.ndarray]:
        """The parameters as the node takes them."""
        transposed = {
            "w1": self.config.shape.layout.w1_transposed,
            "w2": self.config.shape.layout.w2_transposed,
        }
        return {
            name: np.ascontiguousarray(value.swapaxes(1, 2)) if transposed.get(name) else value
            for name, value in self.parameters.items()
        }

    def arguments(self, *lead: int) -> dict[str, np.ndarray]:
        """Tokens of shape ``[*lead, D]`` and, without a router, their choices."""
        rng = np.random.default_rng(1)
        arguments = {"x": rng.standard_normal((*lead, self.width))}
        if not self.config.router:
            choices = (*lead, self.top_k)
            ids = rng.integers(-1, self.experts, choices)
            arguments["expert_ids"] = ids.astype(self.config.routing_dtype.numpy())
            arguments["expert_weights"] = rng.standard_normal(choices)
        return arguments


# --- The oracle ---


def oracle(
    layer: Layer, arguments: Arrays, *, round_hidden: bool = True, round_router: bool = True
) -> np.ndarray:
    """Each expert on its tokens, rounding where the operator does."""
    config, P = layer.config, {n: p.astype(np.float64) for n, p in layer.parameters.items()}
    x = rounded(arguments["x"], config.tokens_dtype)
    if config.router:
        logits = x @ P["router_weight"].T + P.get("router_bias", 0.0)
        if round_router and config.router_options.logits_dtype == "tokens":
            logits = rounded(logits, config.tokens_dtype)
        ids, weights = route(layer, logits, P.get("selection_bias"))
        if round_router and config.router_options.routing_weights_dtype == "tokens":
            weights = rounded(weights, config.tokens_dtype)
    else:
        ids = arguments["expert_ids"]
        weights = rounded(arguments["expert_weights"], config.weights_dtype)
    y = x.copy() if config.options.residual else np.zeros_like(x)
    scale = np.ones_like(x[..., :1])
    if config.options.pre_norm == "rms":
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + layer.norm_eps)
    for slot in range(layer.top_k):
        weight = weights[..., slot, None]
        x_in = rounded(x * weight if config.options.weight_on_input else x, config.operand_dtype)
        for expert in set(ids[..., slot].flat) - {-1}:
            rows = ids[..., slot] == expert
            z = scale[rows] * (x_in[rows] @ P["w1"][expert].T)
            z = z + P["b1"][expert] if "b1" in P else z
            h = activate(layer, z)
            h = rounded(h, config.operand_dtype) if round_hidden else h
            out = h @ P["w2"][expert].T + (P["b2"][expert] if "b2" in P else 0.0)
            y[rows] += out if config.options.weight_on_input else out * weight[rows]
    return rounded(y, config.tokens_dtype)


def route(
    layer: Layer, logits: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    scores = logits
    if layer.config.router_options.scoring == "softmax":
        scores = softmax(logits)
    elif layer.config.router_options.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    by_logits = (
        layer.config.router_options.group_scoring == "none"
        and layer.config.router_options.scoring == "sigmoid"
    )
    ranked = logits if by_logits and bias is None else scores
    ranked = ranked if bias is None else ranked + bias
    order = np.argsort(-ranked, axis=-1, kind="stable")
    if layer.config.router_options.group_scoring != "none":
        size = layer.experts // layer.n_group
        groups = ranked.reshape(*ranked.shape[:-1], layer.n_group, size)
        best = 2 if layer.config.router_options.group_scoring == "top2_sum" else 1
        of_groups = np.sort(groups, axis=-1)[..., -best:].sum(-1)
        rank = np.argsort(np.argsort(-of_groups, axis=-1, kind="stable"), axis=-1)
        outside = np.take_along_axis(rank, order // size, -1) >= layer.topk_group
        order = np.take_along_axis(order, np.argsort(outside, axis=-1, kind="stable"), -1)
    ids = order[..., : layer.top_k]
    weights = np.take_along_axis(scores, ids, -1)
    if layer.config.router_options.scoring == "topk_softmax":
        weights = softmax(weights)
    elif layer.config.router_options.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * layer.scaling


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def activate(layer: Layer, z: np.ndarray) -> np.ndarray:
    if not layer.config.options.gated:
        return pointwise(layer.config.options.activation, z)
    if layer.config.options.interleaved:
        gate, up = z[..., ::2], z[..., 1::2]
    else:
        gate, up = np.split(z, 2, axis=-1)
    if layer.config.options.activation == "clamped_silu":
        gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
        return gate / (1 + np.exp(-gate)) * up
    if layer.config.options.activation == "clamped_swiglu":
        gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
        return gate / (1 + np.exp(-layer.alpha * gate)) * (up + 1)
    if layer.config.options.activation == "softcapped_silu":
        capped = layer.alpha * np.tanh(gate / layer.alpha)
        return capped / (1 + np.exp(-gate)) * layer.limit * np.tanh(up / layer.limit)
    return pointwise(layer.config.options.activation, gate) * up


def pointwise(activation: str, z: np.ndarray) -> np.ndarray:
    if activation == "gelu":
        return 0.5 * z * (1 + torch.erf(torch.from_numpy(z / math.sqrt(2))).numpy())
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if activation == "silu":
        return z / (1 + np.exp(-z))
    if activation == "quick_gelu":
        return z / (1 + np.exp(-1.702 * z))
    if activation == "tanh":
        return np.tanh(z)
    if activation == "mish":
        return z * np.tanh(np.logaddexp(0, z))
    if activation == "hardswish":
        return z * np.clip(z / 6 + 0.5, 0, 1)
    if activation == "elu":
        return np.where(z > 0, z, np.expm1(np.minimum(z, 0)))
    if activation == "identity":
        return z
    if activation == "leaky_relu":
        return np.where(z > 0, z, 0.01 * z)
    return np.maximum(z, 0) ** (2 if activation == "relu2" else 1)


def rounded(value: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    return value.astype(dtype.numpy()).astype(np.float64)


# --- Models with a body ---


def to_model(layers: list[Layer], build: Build, opset: int = 20, rank: int = 2) -> ir.Model:
    """Layers on the same arguments; each result is an output; float64 inputs and outputs."""
    config = layers[0].config
    lead = [f"B{axis}" for axis in range(rank - 1)]
    x = ir.val("x", DOUBLE, [*lead, layers[0].width])
    inputs = [x]
    if not config.router:
        choices = [*lead, layers[0].top_k]
        inputs += [ir.val("expert_ids", config.routing_dtype, choices)]
        inputs += [ir.val("expert_weights", DOUBLE, choices)]
    nodes, outputs, initializers, functions = [], [], [], []

    def cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        nodes.append(
            ir.node("Cast", [value], {"to": dtype}, outputs=[ir.val(name, dtype, value.shape)])
        )
        return nodes[-1].outputs[0]

    for number, layer in enumerate(layers):
        config = layer.config
        domain = f"moe.{config.overload}" if number else "moe"
        values = {"x": cast(x, config.tokens_dtype, f"x_{number}")}
        if not config.router:
            values["expert_ids"] = inputs[1]
            values["expert_weights"] = cast(inputs[2], config.weights_dtype, f"weights_{number}")
        for name, array in layer.stored.items():
            tensor = ir.tensor(array, name=f"{number}.{name}")
            values[name] = ir.Value(
                name=tensor.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(array.shape),
                const_value=tensor,
            )
            initializers.append(values[name])
        node = ir.node(
            config.op_type,
            [values[name] for name in config.inputs],
            attributes(layer),
            domain=domain,
            name=f"layer_{number}",
            outputs=[ir.val(f"layer_{number}", config.tokens_dtype)],
        )
        nodes.append(node)
        outputs.append(cast(node.outputs[0], DOUBLE, f"y_{number}"))
        outputs[-1].shape = x.shape
        functions.append(build(config, opset, domain=domain))
    imports = {"": opset} | {function.domain: 1 for function in functions}
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=imports, name="model"
    )
    return ir.Model(graph, ir_version=10, functions=functions)


def _plain(value: str | bool | float) -> int | float | str:
    return int(value) if isinstance(value, bool) else value


def attributes(layer: Layer) -> dict[str, int | float | str]:
    config = layer.config
    values: dict[str, int | float | str] = {
        "top_k": layer.top_k,
        "num_experts": layer.experts,
        "in_features": layer.width,
        "hidden_features": layer.hidden,
        **{
            row.attribute: _plain(getattr(record, row.name))
            for record in filter(None, (config.options, config.router, config.shape.layout))
            for row in record.rows
        },
        "activation_alpha": layer.alpha,
        "activation_limit": layer.limit,
        "norm_eps": layer.norm_eps,
        "routed_scaling": layer.scaling,
        "n_group": layer.n_group,
        "topk_group": layer.topk_group,
        "plugin_version": "1",
        "plugin_namespace": "",
        "kernels": "",
    }
    return {name: values[name] for name in config.attributes}


def to_session(model: ir.Model, optimized: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        options.log_severity_level = 3  # It warns that the optimised file is only for this machine.
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def run(session: ort.InferenceSession, arguments: Arrays) -> list[np.ndarray]:
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {n: value for n, value in arguments.items() if n in names})


def assert_agrees(actual: np.ndarray, expected: np.ndarray, *dtypes: ir.DataType) -> None:
    assert actual.shape == expected.shape
    if not expected.size:
        return
    bound = tolerance_for({getattr(torch, str(dtype.numpy())) for dtype in dtypes})
    error = np.abs(actual - expected)
    assert error.max() <= bound.max * np.sqrt((expected**2).mean())


def check(layer: Layer, session: ort.InferenceSession, arguments: Arrays) -> None:
    config = layer.config
    (actual,) = run(session, arguments)
    assert_agrees(actual, oracle(layer, arguments), config.tokens_dtype, config.operand_dtype)
