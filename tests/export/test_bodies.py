"""The function bodies in ONNX Runtime against a float64 oracle.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from body_layers import (
    BFLOAT16,
    BIASED,
    CONFIGS,
    DOUBLE,
    DTYPES,
    EXPERTS,
    EXPERTS_OF_A_LAYER,
    FLOAT,
    GATED,
    GPT_OSS,
    HALF,
    IN_OUT,
    LLAMA4,
    NORMED,
    PLAIN,
    Build,
    Layer,
    assert_agrees,
    beside_a_node,
    changed,
    check,
    every_body,
    oracle,
    rounded,
    run,
    to_model,
    to_session,
    unrolled,
    visiting,
)
from custom_ops.options import GATINGS, GROUP_SCORINGS, POINTWISE, SCORINGS
from dynamo_moe.moe_nodes.bodies import BodyConfig, body, dense_body, unrolled_body
from dynamo_moe.moe_nodes.bodies.gathered import MOST_WEIGHTS, WEIGHTS_PER_VISIT
from dynamo_moe.moe_nodes.bodies.of_node import config_of
from moe_cases import once_if_pointwise

every_config = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=config.overload, marks=once_if_pointwise(config.options.activation))
        for config in CONFIGS
    ],
)

# --- What the bodies compute ---


@every_body
@every_config
def test_every_option_at_every_number_of_tokens(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build))
    for tokens in (0, 1, 2, 33):
        check(layer, session, layer.arguments(tokens))


@pytest.mark.pairwise
@every_body
@pytest.mark.parametrize("group_scoring", GROUP_SCORINGS[1:])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_pruned_experts_are_chosen_in_their_groups(
    build: Build, scoring: str, group_scoring: str
) -> None:
    config = changed(BIASED, has_selection_bias=True, scoring=scoring, group_scoring=group_scoring)
    layer = Layer(config, top_k=3)  # Of two groups of two.
    layer.parameters["selection_bias"][1::2] = -np.inf
    session = to_session(to_model([layer], build))
    for tokens in (0, 1, 33):
        check(layer, session, layer.arguments(tokens))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_choice_of_all_groups_has_the_body_without_groups(scoring: str) -> None:
    config = changed(PLAIN, scoring=scoring, group_scoring="max")
    model = to_model([Layer(config, n_group=3, topk_group=3)], body)
    (node,) = (node for node in model.graph if node.op_type == config.op_type)
    assert config_of(node).overload == changed(config, group_scoring="none").overload


@pytest.mark.pairwise
@beside_a_node
@pytest.mark.parametrize("config", IN_OUT, ids=lambda config: config.overload)
def test_weights_that_lie_as_in_out(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    session = to_session(to_model([layer], build))
    # At 33 tokens an expert has more rows than w2 has columns: the Loop.
    for tokens in (0, 1, 2, 33):
        check(layer, session, layer.arguments(tokens))


@pytest.mark.pairwise
@every_body
@pytest.mark.parametrize(
    "config", [BIASED, changed(GATED, activation="gelu"), LLAMA4, GPT_OSS, NORMED]
)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "_".join(t.short_name() for t in d))
def test_every_dtype(
    build: Build, config: BodyConfig, dtypes: tuple[ir.DataType, ir.DataType, ir.DataType]
) -> None:
    x, w, router = dtypes
    layer = Layer(changed(config, tokens_dtype=x, experts_dtype=w, router_dtype=router))
    session = to_session(to_model([layer], build))
    for tokens in (0, 17):
        check(layer, session, layer.arguments(tokens))


@every_body
@pytest.mark.parametrize(
    "activation",
    [
        "gelu",
        "gelu_tanh",
        *(pytest.param(name, marks=once_if_pointwise(name)) for name in POINTWISE[5:]),
        pytest.param("softcapped_silu", marks=pytest.mark.once("softcapped_silu")),
    ],
)
def test_both_widths_from_small_to_large(build: Build, activation: str) -> None:
    """With opset 18 too, which has no Gelu."""
    config = changed(PLAIN, activation=activation, gated=activation in GATINGS)
    layer = Layer(config)
    check(layer, to_session(to_model([layer], build, opset=18)), layer.arguments(9))
    layer = Layer(changed(config, tokens_dtype=DOUBLE, experts_dtype=DOUBLE))
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


@pytest.mark.pairwise
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
    layer = Layer(changed(BIASED, scoring="sigmoid"), top_k=3)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = (0, 1, 0, 1, 0, 0)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_sigmoid_scores_that_are_all_one_still_choose(build: Build) -> None:
    layer = Layer(changed(BIASED, scoring="sigmoid", renormalize=False), top_k=2)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = (40, 50, 41, 50, 60, 40)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_small_sigmoid_scores_keep_their_ratio(build: Build) -> None:
    """Divided by their sum they are weights like others; ONNX Runtime's Sigmoid gives 0 here."""
    layer = Layer(changed(BIASED, scoring="sigmoid"), top_k=3)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = (-14, -15, -16, -20, -21, -20.5)
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))
    layer.parameters["router_bias"][:3] = -30
    check(layer, to_session(to_model([layer], build)), layer.arguments(11))


@every_body
def test_a_token_without_experts_is_its_residual(build: Build) -> None:
    layer = Layer(changed(EXPERTS, residual=True, pre_norm="rms"))
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
@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS, LLAMA4])
def test_no_expert_is_not_the_last_one(build: Build, config: BodyConfig) -> None:
    """Which -1 would choose where it is an index."""
    layer = Layer(config)
    arguments = layer.arguments(5)
    arguments["expert_ids"][:] = [[-1, -1], [-1, 2], [2, -1], [3, 4], [0, 0]]
    expected = oracle(layer, arguments)
    for parameter in layer.parameters.values():
        parameter[-1] = np.nan
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    assert_agrees(actual, expected, FLOAT)


@every_body
@pytest.mark.parametrize(
    "config", [*CONFIGS[:5], GATED, changed(GATED, activation="clamped_swiglu"), NORMED]
)
def test_nan_stays_in_its_row(build: Build, config: BodyConfig) -> None:
    layer = Layer(config)
    arguments = layer.arguments(7)
    arguments["x"][2, 5] = np.nan
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    assert np.isnan(actual).all(1).tolist() == [row == 2 for row in range(7)]


def test_hidden_rows_are_rounded_to_the_experts_dtype() -> None:
    # A runtime that dropped the pair of casts would be closer to the unrounded oracle.
    layer = Layer(changed(PLAIN, experts_dtype=BFLOAT16), width=32, hidden=64)
    arguments = layer.arguments(64)
    for build in (body, visiting, unrolled, dense_body):
        (actual,) = run(to_session(to_model([layer], build)), arguments)
        rounding = np.abs(actual - oracle(layer, arguments)).mean()
        without = np.abs(actual - oracle(layer, arguments, round_hidden=False)).mean()
        assert rounding < without / 10


@pytest.mark.parametrize("form", ["logits_dtype", "routing_weights_dtype"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_what_a_router_rounds_is_rounded(dtype: ir.DataType, form: str) -> None:
    # As above. One expert for each token shows its weight alone.
    config = changed(BIASED, tokens_dtype=dtype, renormalize=False, **{form: "tokens"})
    layer = Layer(config, top_k=1, width=32)
    arguments = layer.arguments(64)
    for build in (body, visiting, unrolled, dense_body):
        (actual,) = run(to_session(to_model([layer], build)), arguments)
        rounding = np.abs(actual - oracle(layer, arguments)).mean()
        without = np.abs(actual - oracle(layer, arguments, round_router=False)).mean()
        assert rounding < without / 10


@pytest.mark.parametrize("build", [body, visiting])
def test_same_bits_in_every_run(build: Build) -> None:
    layer = Layer(BIASED, experts=16, top_k=4)
    session = to_session(to_model([layer], build))
    (first,), (second,) = (run(session, layer.arguments(50)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@every_body
def test_an_idle_expert_counts_nothing(build: Build, value: float) -> None:
    layer = Layer(BIASED, top_k=1)
    layer.parameters["router_bias"][3] = 100
    arguments = layer.arguments(11)
    expected = oracle(layer, arguments)
    for name in ("w1", "b1", "w2", "b2"):
        layer.parameters[name][:3] = value
    (actual,) = run(to_session(to_model([layer], build)), arguments)
    assert_agrees(actual, expected, FLOAT)


# --- What the bodies cost ---


@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS], ids=["plain", "gated"])
@pytest.mark.parametrize(("experts", "width"), [(5, 8), (300, 64)])
def test_few_slots_are_gathered_and_more_are_visited(
    tmp_path: Path, config: BodyConfig, experts: int, width: int
) -> None:
    layer = Layer(config, top_k=1, experts=experts, width=width)
    weights = layer.width * layer.hidden * (3 if config.shape.options.gated else 2)
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
    config = changed(BIASED, w1_transposed=in_out, w2_transposed=in_out)
    layer = Layer(changed(config, experts_dtype=w_dtype))
    to_session(to_model([layer], body), tmp_path / "optimized.onnx")
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    kept = {t.name: onnx.numpy_helper.to_array(t).nbytes for t in graph.initializer}
    for name, array in layer.parameters.items():
        assert kept.pop(f"0.{name}") == array.nbytes
    assert max(kept.values()) < layer.parameters["w1"].nbytes / 2


# --- The files ---


@pytest.mark.pairwise
@every_body
@pytest.mark.parametrize("opset", [18, 20, 24])
@every_config
def test_checker_and_shape_inference(build: Build, config: BodyConfig, opset: int) -> None:
    proto = ir.to_proto(to_model([Layer(config)], build, opset, rank=3))
    onnx.checker.check_model(proto, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )
    (result,) = (value for value in inferred.graph.value_info if value.name == "layer_0")
    assert result.type.tensor_type.elem_type == config.tokens_dtype
    dims = result.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["B0", "B1", 8]


@pytest.mark.pairwise
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
    layers = [Layer(PLAIN), Layer(BIASED), Layer(changed(GATED, experts_dtype=BFLOAT16))]
    model = to_model(layers, body)
    assert len(model.functions) == 3
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    arguments = layers[0].arguments(13)
    for layer, actual in zip(layers, run(to_session(model), arguments), strict=True):
        assert_agrees(actual, oracle(layer, arguments), layer.config.operand_dtype)


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
        changed(config, tokens_dtype=x, experts_dtype=w)
        for config in (*CONFIGS, *IN_OUT)
        for x, w, _ in DTYPES
    }
    # renormalize changes nothing for topk_softmax.
    different = {
        changed(config, renormalize=True)
        if config.router and config.router.scoring == "topk_softmax"
        else config
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
        ({"activation": "swish"}, "activation must be one of .* got 'swish'"),
        ({"scoring": "max"}, "scoring must be one of .* got 'max'"),
        ({"experts_dtype": ir.DataType.INT8}, "weights must be one of"),
        ({"router": False, "routing_dtype": FLOAT}, "routing_dtype must be one of"),
        ({"activation": "clamped_swiglu"}, "'clamped_swiglu' is a gating: it needs gated=True"),
        ({"interleaved": True}, "interleaved=True orders gate and up rows: it needs gated=True"),
        ({"pre_norm": "layer"}, "pre_norm must be one of none, rms; got 'layer'"),
        ({"has_b1": True}, "b1 needs router_bias before it"),
        ({"router": False, "has_b2": True}, "b2 needs b1 before it"),
        ({"router": False, "has_selection_bias": True}, "selection_bias needs a router"),
        ({"has_selection_bias": True}, "selection_bias needs b2 before it"),
    ],
)
def test_contradictions_are_rejected(options: dict[str, object], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        changed(PLAIN, **options)


@every_body
def test_an_old_opset_is_rejected(build: Build) -> None:
    with pytest.raises(ValueError, match="needs opset 18 or later, got 17"):
        build(PLAIN, 17)
