"""The function bodies in ONNX Runtime against a float64 oracle.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from custom_ops.options import GROUP_SCORINGS, SCORINGS
from dynamo_moe.moe_nodes.bodies import BodyConfig, body, dense_body, dropless, unrolled_body
from dynamo_moe.moe_nodes.bodies.gathered import MOST_WEIGHTS, WEIGHTS_PER_VISIT
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
PLAIN = BodyConfig()
BIASED = BodyConfig(has_router_bias=True, has_b1=True, has_b2=True)
GATED = BodyConfig(activation="silu", gated=True)
EXPERTS = BodyConfig(router=False)
GPT_OSS = BodyConfig(
    router=False,
    activation="clamped_swiglu",
    gated=True,
    interleaved=True,
    has_b1=True,
    has_b2=True,
    ids_dtype=ir.DataType.INT32,
)
LLAMA4 = BodyConfig(router=False, activation="silu", gated=True, weight_on_input=True)
NORMED = BodyConfig(
    scoring="sigmoid", renormalize=False, activation="gelu_tanh", gated=True,
    pre_norm="rms", residual=True,
)  # fmt: skip
CONFIGS = [
    *(replace(PLAIN, activation=name) for name in ("gelu", "gelu_tanh", "silu", "relu", "relu2")),
    *(replace(GATED, activation=name) for name in ("gelu", "gelu_tanh", "silu", "relu", "relu2")),
    *(replace(PLAIN, scoring=name) for name in ("softmax", "topk_softmax", "sigmoid")),
    *(replace(PLAIN, scoring=n, renormalize=False) for n in ("softmax", "topk_softmax", "sigmoid")),
    replace(GATED, interleaved=True),
    replace(GATED, activation="clamped_swiglu"),
    replace(GATED, activation="clamped_silu", interleaved=True),
    BIASED,
    replace(BIASED, has_b2=False),
    replace(BIASED, has_b1=False, has_b2=False),
    replace(BIASED, weight_on_input=True),
    EXPERTS,
    replace(EXPERTS, has_b1=True),
    GPT_OSS,
    LLAMA4,
    NORMED,
    replace(BIASED, pre_norm="rms"),
    replace(EXPERTS, residual=True),
    replace(LLAMA4, pre_norm="rms", residual=True),
    *(replace(BIASED, has_selection_bias=True, scoring=name) for name in SCORINGS),
    *(
        replace(PLAIN, scoring=name, group_scoring=group)
        for name in SCORINGS
        for group in GROUP_SCORINGS[1:]
    ),
    replace(
        BIASED,
        has_selection_bias=True,
        scoring="sigmoid",
        group_scoring="top2_sum",
        selection_dtype=BFLOAT16,
    ),
]
IN_OUT = [
    replace(config, w1_transposed=w1, w2_transposed=w2)
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
        F = 2 * H if config.gated else H
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
            dtype = config.router_dtype if name.startswith("router") else config.w_dtype
            dtype = config.selection_dtype if name == "selection_bias" else dtype
            if name in config.inputs:
                self.parameters[name] = value.astype(dtype.numpy())

    @property
    def stored(self) -> dict[str, np.ndarray]:
        """The parameters as the node takes them."""
        transposed = {"w1": self.config.w1_transposed, "w2": self.config.w2_transposed}
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
            arguments["expert_ids"] = ids.astype(self.config.ids_dtype.numpy())
            arguments["expert_weights"] = rng.standard_normal(choices)
        return arguments


# --- The oracle ---


def oracle(layer: Layer, arguments: Arrays, *, round_hidden: bool = True) -> np.ndarray:
    """Every expert on every token, rounding where the operator does."""
    config, P = layer.config, {n: p.astype(np.float64) for n, p in layer.parameters.items()}
    x = rounded(arguments["x"], config.x_dtype)
    if config.router:
        logits = x @ P["router_weight"].T + P.get("router_bias", 0.0)
        ids, weights = route(layer, logits, P.get("selection_bias"))
    else:
        ids = arguments["expert_ids"]
        weights = rounded(arguments["expert_weights"], config.router_dtype)
    y = x.copy() if config.residual else np.zeros_like(x)
    scale = 1.0
    if config.pre_norm == "rms":
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + layer.norm_eps)
    for slot in range(layer.top_k):
        weight = weights[..., slot, None]
        x_in = rounded(x * weight if config.weight_on_input else x, config.w_dtype)
        for expert in range(layer.experts):
            z = scale * (x_in @ P["w1"][expert].T) + (P["b1"][expert] if "b1" in P else 0.0)
            h = activate(layer, z)
            h = rounded(h, config.w_dtype) if round_hidden else h
            out = h @ P["w2"][expert].T + (P["b2"][expert] if "b2" in P else 0.0)
            out = out if config.weight_on_input else out * weight
            y += np.where(ids[..., slot, None] == expert, out, 0.0)
    return rounded(y, config.x_dtype)


def route(
    layer: Layer, logits: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    scores = logits
    if layer.config.scoring == "softmax":
        scores = softmax(logits)
    elif layer.config.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    by_logits = layer.config.group_scoring == "none" and layer.config.scoring == "sigmoid"
    ranked = logits if by_logits and bias is None else scores
    ranked = ranked if bias is None else ranked + bias
    if layer.config.group_scoring != "none":
        size = layer.experts // layer.n_group
        groups = ranked.reshape(*ranked.shape[:-1], layer.n_group, size)
        best = 2 if layer.config.group_scoring == "top2_sum" else 1
        of_groups = np.sort(groups, axis=-1)[..., -best:].sum(-1)
        rank = np.argsort(np.argsort(-of_groups, axis=-1, kind="stable"), axis=-1)
        inside = rank[..., None] < layer.topk_group
        ranked = np.where(inside, groups, -np.inf).reshape(ranked.shape)
    ids = np.argsort(-ranked, axis=-1, kind="stable")[..., : layer.top_k]
    weights = np.take_along_axis(scores, ids, -1)
    if layer.config.scoring == "topk_softmax":
        weights = softmax(weights)
    elif layer.config.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * layer.scaling


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def activate(layer: Layer, z: np.ndarray) -> np.ndarray:
    if not layer.config.gated:
        return pointwise(layer.config.activation, z)
    if layer.config.interleaved:
        gate, up = z[..., ::2], z[..., 1::2]
    else:
        gate, up = np.split(z, 2, axis=-1)
    if layer.config.activation == "clamped_silu":
        gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
        return gate / (1 + np.exp(-gate)) * up
    if layer.config.activation == "clamped_swiglu":
        gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
        return gate / (1 + np.exp(-layer.alpha * gate)) * (up + 1)
    return pointwise(layer.config.activation, gate) * up


def pointwise(activation: str, z: np.ndarray) -> np.ndarray:
    if activation == "gelu":
        return 0.5 * z * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2)))
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if activation == "silu":
        return z / (1 + np.exp(-z))
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
        inputs += [ir.val("expert_ids", config.ids_dtype, choices)]
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
        values = {"x": cast(x, config.x_dtype, f"x_{number}")}
        if not config.router:
            values["expert_ids"] = inputs[1]
            values["expert_weights"] = cast(inputs[2], config.router_dtype, f"weights_{number}")
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
            outputs=[ir.val(f"layer_{number}", config.x_dtype)],
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
        **{row.attribute: _plain(getattr(config, row.name)) for row in config.rows},
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
    assert_agrees(actual, oracle(layer, arguments), config.x_dtype, config.w_dtype)


# --- What the bodies compute ---


@every_body
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.overload)
def test_every_option_at_every_number_of_tokens(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build))
    for tokens in (0, 1, 2, 33):
        check(layer, session, layer.arguments(tokens))


@beside_a_node
@pytest.mark.parametrize("config", IN_OUT, ids=lambda config: config.overload)
def test_weights_that_lie_as_in_out(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build))
    # At 33 tokens an expert has more rows than w2 has columns: the Loop.
    for tokens in (0, 1, 2, 33):
        check(layer, session, layer.arguments(tokens))


@every_body
@pytest.mark.parametrize(
    "config", [BIASED, replace(GATED, activation="gelu"), LLAMA4, GPT_OSS, NORMED]
)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "_".join(t.short_name() for t in d))
def test_every_dtype(
    build: Build, config: BodyConfig, dtypes: tuple[ir.DataType, ir.DataType, ir.DataType]
) -> None:
    x, w, router = dtypes
    layer = Layer(replace(config, x_dtype=x, w_dtype=w, router_dtype=router))
    session = to_session(to_model([layer], build))
    for tokens in (0, 17):
        check(layer, session, layer.arguments(tokens))


@every_body
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_without_the_operator_and_in_double(build: Build, activation: str) -> None:
    config = replace(PLAIN, activation=activation)
    layer = Layer(config)
    check(layer, to_session(to_model([layer], build, opset=18)), layer.arguments(9))
    layer = Layer(replace(config, x_dtype=DOUBLE, w_dtype=DOUBLE))
    arguments = layer.arguments(64)
    arguments["x"] *= np.logspace(-6, 2, 64)[:, None]  # From erf's linear part to erf = 1.
    check(layer, to_session(to_model([layer], build)), arguments)


@every_body
@pytest.mark.parametrize("config", [PLAIN, GPT_OSS])
def test_leading_dimensions(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build, rank=4))
    for lead in ((2, 3, 4), (1, 1, 1), (2, 0, 3), (2, 3, 0)):
        check(layer, session, layer.arguments(*lead))


@every_body
@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_top_k_up_to_all_experts(build: Build, top_k: int) -> None:
    layer = Layer(BIASED, top_k=top_k)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_all_tokens_on_one_expert(build: Build) -> None:
    layer = Layer(BIASED, top_k=1)
    layer.parameters["router_bias"][3] = 100
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@pytest.mark.parametrize(
    "build", [body, visiting, functools.partial(unrolled_body, num_experts=1), dense_body]
)
@pytest.mark.parametrize("config", [BIASED, GPT_OSS, LLAMA4])
def test_one_expert(build: Build, config: BodyConfig) -> None:
    layer = Layer(config, experts=1, top_k=1)
    session = to_session(to_model([layer], build))
    for tokens in (0, 1, 7):
        check(layer, session, layer.arguments(tokens))


@every_body
@pytest.mark.parametrize("hidden", [1, 12])  # Copying an expert's weights is cheap, or expensive.
@pytest.mark.parametrize(
    "rows", [(9, 9, 9, 9, 9), (40, 2, 0, 3, 1), (30, 0, 29, 28, 1), (0, 0, 50, 0, 0), (0,) * 5]
)
@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS, LLAMA4], ids=["plain", "gpt_oss", "llama4"])
def test_even_and_uneven_rows(
    build: Build, config: BodyConfig, rows: tuple[int, ...], hidden: int
) -> None:
    layer = Layer(config, top_k=1, hidden=hidden)
    ids = np.repeat(np.arange(-1, 5), (3, *rows))  # Three tokens without an expert.
    arguments = layer.arguments(ids.size)
    arguments["expert_ids"][:, 0] = np.random.default_rng(2).permutation(ids)
    check(layer, to_session(to_model([layer], build)), arguments)


@every_body
def test_ties_go_to_the_lower_expert(build: Build) -> None:
    layer = Layer(replace(BIASED, scoring="sigmoid"), top_k=3)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = (0, 1, 0, 1, 0, 0)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_sigmoid_scores_that_are_all_one_still_choose(build: Build) -> None:
    layer = Layer(replace(BIASED, scoring="sigmoid", renormalize=False), top_k=2)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = (40, 50, 41, 50, 60, 40)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_a_token_without_experts_is_its_residual(build: Build) -> None:
    layer = Layer(replace(EXPERTS, residual=True, pre_norm="rms"))
    arguments = layer.arguments(5)
    arguments["expert_ids"][:] = -1
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    np.testing.assert_array_equal(actual, rounded(arguments["x"], FLOAT))


@every_body
@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS, LLAMA4])
def test_no_expert_and_one_expert_twice(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build))
    arguments = layer.arguments(5)
    arguments["expert_ids"][:] = [[-1, -1], [-1, 2], [2, -1], [4, 4], [0, 0]]
    arguments["expert_weights"][:2, 0] = np.nan
    expected = oracle(layer, arguments)
    (actual,) = run(session, arguments)
    assert not actual[0].any()
    assert_agrees(actual, expected, FLOAT)
    arguments["expert_ids"][:] = -1
    (actual,) = run(session, arguments)
    assert not actual.any()


@every_body
@pytest.mark.parametrize(
    "config", [*CONFIGS[:5], GATED, replace(GATED, activation="clamped_swiglu"), NORMED]
)
def test_nan_stays_in_its_row(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    arguments = layer.arguments(7)
    arguments["x"][2, 5] = np.nan
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    assert np.isnan(actual).all(1).tolist() == [row == 2 for row in range(7)]


def test_hidden_rows_are_rounded_to_the_experts_dtype() -> None:
    # A runtime that dropped the pair of casts would be closer to the unrounded oracle.
    layer = Layer(replace(PLAIN, w_dtype=BFLOAT16), width=32, hidden=64)
    arguments = layer.arguments(64)
    for build in (body, visiting, unrolled, dense_body):
        (actual,) = run(to_session(to_model([layer], build)), arguments)
        rounding = np.abs(actual - oracle(layer, arguments)).mean()
        without = np.abs(actual - oracle(layer, arguments, round_hidden=False)).mean()
        assert rounding < without / 10


@pytest.mark.parametrize("build", [body, visiting])
def test_same_bits_in_every_run(build: Build) -> None:
    layer = Layer(BIASED, experts=16, top_k=4)
    session = to_session(to_model([layer], build))
    (first,), (second,) = (run(session, layer.arguments(50)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# --- What the bodies cost ---


@pytest.mark.parametrize("build", [body, visiting, unrolled])
def test_an_idle_expert_is_not_computed(build: Build) -> None:
    layer = Layer(BIASED, top_k=1)
    layer.parameters["router_bias"][3] = 100
    arguments = layer.arguments(11)
    expected = oracle(layer, arguments)
    for name in ("w1", "b1", "w2", "b2"):
        layer.parameters[name][:3] = np.nan
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    assert_agrees(actual, expected, FLOAT)


@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS], ids=["plain", "gated"])
@pytest.mark.parametrize(("experts", "width"), [(5, 8), (300, 64)])
def test_few_slots_are_gathered_and_more_are_visited(
    tmp_path: Path, config: BodyConfig, experts: int, width: int
) -> None:
    layer = Layer(config, top_k=1, experts=experts, width=width)
    weights = layer.width * layer.hidden * (3 if config.gated else 2)
    most = min(layer.experts * WEIGHTS_PER_VISIT, MOST_WEIGHTS) // weights
    for tokens, visits in ((most, False), (most + 1, True)):
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")
        model = ir.to_proto(to_model([layer], body)).SerializeToString()
        session = ort.InferenceSession(model, options)
        check(layer, session, layer.arguments(tokens))
        events = json.loads(Path(session.end_profiling()).read_text())
        ran = {event.get("args", {}).get("op_name") for event in events}
        assert bool(ran & {"Scan", "Loop"}) == visits


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("w_dtype", [FLOAT, HALF])
def test_onnx_runtime_keeps_the_parameters_as_they_are(
    tmp_path: Path, w_dtype: ir.DataType, in_out: bool
) -> None:
    config = replace(BIASED, w1_transposed=in_out, w2_transposed=in_out)
    layer = Layer(replace(config, w_dtype=w_dtype))
    to_session(to_model([layer], body), tmp_path / "optimized.onnx")
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    kept = {t.name: onnx.numpy_helper.to_array(t).nbytes for t in graph.initializer}
    for name, array in layer.parameters.items():
        assert kept.pop(f"0.{name}") == array.nbytes
    assert max(kept.values()) < layer.parameters["w1"].nbytes / 2


# --- The files ---


@every_body
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.overload)
def test_checker_and_shape_inference(build: Build, config: BodyConfig, opset: int) -> None:
    proto = ir.to_proto(to_model([Layer(config)], build, opset, rank=3))
    onnx.checker.check_model(proto, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )
    (result,) = (value for value in inferred.graph.value_info if value.name == "layer_0")
    assert result.type.tensor_type.elem_type == config.x_dtype
    dims = result.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["B0", "B1", 8]


@every_body
@pytest.mark.parametrize("opset", [18, 20, 22, 23, 24])
@pytest.mark.parametrize("config", [BIASED, GPT_OSS])
def test_opsets_in_onnx_runtime(build: Build, config: BodyConfig, opset: int) -> None:
    layer = Layer(config)
    check(layer, to_session(to_model([layer], build, opset)), layer.arguments(9))


@every_body
@pytest.mark.parametrize("config", [BIASED, GPT_OSS, LLAMA4, NORMED])
def test_the_reference_evaluator_agrees(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    arguments = layer.arguments(6)
    # Opset 18, because the evaluator has Gelu only for values of known types.
    evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(to_model([layer], build, 18)))
    (actual,) = evaluator.run(None, dict(arguments))
    assert_agrees(actual, oracle(layer, arguments), FLOAT)


@pytest.mark.parametrize(
    ("build", "experts"), [(body, 9), (unrolled, EXPERTS_OF_A_LAYER), (dense_body, 9)]
)
def test_one_body_serves_layers_of_different_sizes(build: Build, experts: int) -> None:
    layers = [Layer(BIASED), Layer(BIASED, experts=experts, hidden=3, top_k=4, scaling=0.5)]
    model = to_model(layers, build)
    first, second = (node for node in model.graph if node.domain.startswith("moe"))
    del model.functions[(second.domain, second.op_type, "")]
    second.domain = first.domain
    assert len(model.functions) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    arguments = layers[0].arguments(13)
    results = run(to_session(model), arguments)
    for layer, actual in zip(layers, results, strict=True):
        assert_agrees(actual, oracle(layer, arguments), FLOAT)


def test_several_configurations_in_one_file() -> None:
    layers = [Layer(PLAIN), Layer(BIASED), Layer(replace(GATED, w_dtype=BFLOAT16))]
    model = to_model(layers, body)
    assert len(model.functions) == 3
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    arguments = layers[0].arguments(13)
    for layer, actual in zip(layers, run(to_session(model), arguments), strict=True):
        assert_agrees(actual, oracle(layer, arguments), layer.config.w_dtype)


@every_body
def test_a_function_declares_what_a_node_passes(build: Build) -> None:
    for config in CONFIGS:
        function = build(config, 20)
        assert tuple(value.name for value in function.inputs) == config.inputs
        assert tuple(function.attributes) == config.attributes
        assert function.opset_imports == {"": 20}


# --- Configurations ---


def test_overloads_are_names_of_different_bodies() -> None:
    configs = {
        replace(config, x_dtype=x, w_dtype=w)
        for config in (*CONFIGS, *IN_OUT)
        for x, w, _ in DTYPES
    }
    # renormalize changes nothing for topk_softmax.
    different = {
        replace(config, renormalize=config.renormalize or config.scoring == "topk_softmax")
        for config in configs
    }
    assert len({config.overload for config in configs}) == len(different)
    assert all(config.overload.isidentifier() for config in configs)


def test_trailing_inputs_are_omitted() -> None:
    assert PLAIN.inputs == ("x", "router_weight", "w1", "w2")
    assert BIASED.inputs == (*PLAIN.inputs, "router_bias", "b1", "b2")
    assert EXPERTS.inputs == ("x", "expert_ids", "expert_weights", "w1", "w2")
    assert GPT_OSS.inputs == (*EXPERTS.inputs, "b1", "b2")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "elu"}, "activation must be one of .* got 'elu'"),
        ({"scoring": "max"}, "scoring must be one of .* got 'max'"),
        ({"w_dtype": ir.DataType.INT8}, "w_dtype must be one of"),
        ({"ids_dtype": FLOAT}, "ids_dtype must be one of"),
        ({"activation": "clamped_swiglu"}, "'clamped_swiglu' is a gating: it needs gated=True"),
        ({"interleaved": True}, "interleaved=True orders gate and up rows: it needs gated=True"),
        ({"pre_norm": "layer"}, "pre_norm must be one of none, rms; got 'layer'"),
        ({"has_b1": True}, "b1 needs router_bias before it"),
        ({"router": False, "has_b2": True}, "b2 needs b1 before it"),
        ({"router": False, "has_router_bias": True}, "router_bias needs a router"),
        ({"has_selection_bias": True}, "selection_bias needs a router, and b2 before it"),
    ],
)
def test_contradictions_are_rejected(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BodyConfig(**options)  # type: ignore[arg-type]


@every_body
def test_an_old_opset_is_rejected(build: Build) -> None:
    with pytest.raises(ValueError, match="needs opset 18 or later, got 17"):
        build(PLAIN, 17)
