"""The native library's operators in ONNX Runtime, against the bodies' float64 oracle.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.convenience import convert_attributes

from body_layers import (
    BIASED,
    CONFIGS,
    DOUBLE,
    DTYPES,
    EXPERTS,
    GATED,
    GPT_OSS,
    IN_OUT,
    LLAMA4,
    NORMED,
    PLAIN,
    Layer,
    changed,
    check,
    run,
    to_model,
)
from custom_ops.options import GATINGS, POINTWISE, SCORINGS
from dynamo_moe.moe_nodes.bodies import BodyConfig, body
from trt_plugin.native import library_path

TOKENS = (0, 1, 2, 33, 200)
"""At 33 some experts have more than a few rows, at 200 more than the columns of one product."""


def layer_of(config: BodyConfig, **sizes: Any) -> Layer:
    """A layer whose numbers of groups are those of its options."""
    grouped = config.router is not None and config.router.group_scoring != "none"
    groups = {} if grouped else {"n_group": 1, "topk_group": 1}
    return Layer(config, **groups, **sizes)


def without_bodies(model: ir.Model) -> ir.Model:
    """The model of which only the library can compute the layers."""
    model.functions.clear()
    for node in model.graph:
        if node.domain.startswith("moe"):
            node.domain = "moe"
    return model


def to_session(model: ir.Model, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def session_of(layer: Layer, threads: int = 1, rank: int = 2) -> ort.InferenceSession:
    return to_session(without_bodies(to_model([layer], body, rank=rank)), threads)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.overload)
def test_every_option_at_every_number_of_tokens(config: BodyConfig) -> None:
    layer = layer_of(config)
    session = session_of(layer)
    for tokens in TOKENS:
        check(layer, session, layer.arguments(tokens))


@pytest.mark.parametrize("name", [*POINTWISE, *GATINGS])
@pytest.mark.parametrize("gating", ["plain", "gated", "interleaved"])
def test_every_activation_in_every_form(name: str, gating: str) -> None:
    if gating == "plain" and name in GATINGS:
        pytest.skip("it is a gating")
    config = changed(
        BIASED, activation=name, gated=gating != "plain", interleaved=gating == "interleaved"
    )
    layer = layer_of(config, hidden=19)
    session = session_of(layer)
    for tokens in TOKENS:
        check(layer, session, layer.arguments(tokens))


@pytest.mark.parametrize("name", [*POINTWISE, *GATINGS])
def test_activations_of_small_and_large_numbers(name: str) -> None:
    # One expert whose first product is the token itself, or the token as gates and as ups.
    gated = name in GATINGS
    layer = layer_of(
        changed(EXPERTS, activation=name, gated=gated), experts=1, top_k=1, width=8, hidden=8
    )
    layer.parameters["w1"][0] = np.concatenate([np.eye(8)] * (1 + gated))
    layer.parameters["w2"][0] = np.eye(8)
    session = session_of(layer)
    for size in (1e-6, 1e-3, 30.0, 1e4):
        arguments = layer.arguments(9)
        arguments["x"] *= size
        arguments["expert_ids"][:] = 0
        with np.errstate(over="ignore"):  # Of the oracle's exp.
            check(layer, session, arguments)


@pytest.mark.parametrize("config", IN_OUT, ids=lambda config: config.overload)
def test_weights_that_lie_as_in_out(config: BodyConfig) -> None:
    layer = layer_of(config)
    session = session_of(layer)
    for tokens in TOKENS:
        check(layer, session, layer.arguments(tokens))


@pytest.mark.parametrize("config", [BIASED, LLAMA4, GPT_OSS, NORMED], ids=lambda c: c.overload)
@pytest.mark.parametrize(
    "dtypes",
    [dtypes for dtypes in DTYPES if DOUBLE not in dtypes],
    ids=lambda dtypes: "_".join(dtype.short_name() for dtype in dtypes),
)
def test_every_dtype(
    config: BodyConfig, dtypes: tuple[ir.DataType, ir.DataType, ir.DataType]
) -> None:
    x, w, router = dtypes
    layer = layer_of(changed(config, tokens_dtype=x, experts_dtype=w, router_dtype=router))
    session = session_of(layer)
    for tokens in (0, 1, 17, 200):
        check(layer, session, layer.arguments(tokens))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_lower_expert(scoring: str) -> None:
    layer = layer_of(changed(BIASED, scoring=scoring), top_k=3)
    layer.parameters["router_weight"][:] = 0
    layer.parameters["router_bias"][:] = [0, 1, 0, 1, 1, 1]
    check(layer, session_of(layer), layer.arguments(9))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_selection_bias_beyond_all_scores(scoring: str) -> None:
    # The best score is then of an expert that is chosen last.
    layer = layer_of(changed(BIASED, has_selection_bias=True, scoring=scoring), top_k=3)
    layer.parameters["selection_bias"][:] = [-1e3, -1e3, 3e3, 2e3, 1e3, -np.inf]
    layer.parameters["router_bias"][:] = [0, 0, -90, -90, 90, 0]
    check(layer, session_of(layer), layer.arguments(9))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("config", [BIASED, GPT_OSS], ids=lambda c: c.overload)
def test_one_expert_takes_all(config: BodyConfig, threads: int) -> None:
    layer = layer_of(config, experts=1, top_k=1, width=24, hidden=40)
    session = session_of(layer, threads)
    for tokens in (1, 5, 1100):
        check(layer, session, layer.arguments(tokens))


def test_more_tokens_than_results_are_kept_of() -> None:
    # 2^25 numbers are, and 1024 tokens at least.
    layer = layer_of(changed(GATED, router=False), top_k=2, width=2**14, hidden=8)
    arguments = layer.arguments(1030)
    check(layer, session_of(layer), arguments)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
def test_matrices_that_are_multiplied_in_parts(dtype: ir.DataType) -> None:
    # 2^20 numbers at a time for more than 64 rows of an expert, 2^18 where they are copied.
    config = changed(BIASED, tokens_dtype=dtype, experts_dtype=dtype, router_dtype=dtype)
    layer = layer_of(config, experts=2, top_k=1, width=512, hidden=2100)
    session = session_of(layer)
    for tokens in (40, 200):
        check(layer, session, layer.arguments(tokens))


def test_leading_dimensions() -> None:
    layer = layer_of(EXPERTS)
    session = session_of(layer, rank=4)
    for lead in ((2, 3, 4), (1, 1, 1), (2, 0, 3)):
        check(layer, session, layer.arguments(*lead))


def test_no_slot_has_an_expert() -> None:
    layer = layer_of(changed(EXPERTS, residual=True))
    arguments = layer.arguments(5)
    arguments["expert_ids"][:] = -1
    check(layer, session_of(layer), arguments)


def test_a_nan_stays_in_its_token() -> None:
    for config in (BIASED, changed(PLAIN, scoring="sigmoid"), NORMED):
        layer = layer_of(config)
        session = session_of(layer)
        arguments = layer.arguments(33)
        (wanted,) = run(session, arguments)
        arguments["x"][4, 2] = np.nan
        (found,) = run(session, arguments)
        assert np.isnan(found[4]).all()
        others = np.arange(33) != 4
        # Its expert's other tokens may be summed in another order.
        np.testing.assert_allclose(found[others], wanted[others], atol=1e-5)


def test_the_same_bits_beside_other_sessions() -> None:
    calls = []
    for config in (BIASED, GPT_OSS):
        layer = layer_of(config, width=64, hidden=96)
        arguments = layer.arguments(300)
        for number in (1, 2, 3):
            session = session_of(layer, number)
            check(layer, session, arguments)
            calls += 3 * [(session, arguments, run(session, arguments)[0])]

    def same(call: tuple[ort.InferenceSession, dict[str, np.ndarray], np.ndarray]) -> None:
        session, arguments, wanted = call
        for _ in range(5):
            np.testing.assert_array_equal(run(session, arguments)[0], wanted)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(same, calls))


def test_the_shape_of_the_result_is_known() -> None:
    model = without_bodies(to_model([layer_of(PLAIN)], body))
    for node in model.graph:
        if node.domain == "moe":
            node.outputs[0].shape = None
    (output,) = model.graph.outputs
    output.shape = None
    (found,) = to_session(model).get_outputs()
    assert found.shape[-1] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "attribute num_experts must be in 1..2147483647, got 0"),
        ({"top_k": 7}, "attribute top_k must be at most num_experts, 6, got 7"),
        ({"activation": "swish"}, "attribute activation must be one of gelu, .*; got 'swish'"),
        ({"gated": 2}, "attribute gated must be in 0..1, got 2"),
        ({"interleaved": 1}, "attribute interleaved needs attribute gated"),
        ({"activation": "clamped_silu"}, "activation clamped_silu needs attribute gated"),
        (
            {"activation": "softcapped_silu", "gated": 1, "activation_alpha": -4.0},
            r"attribute activation_alpha must be in 2\*\*-126..2\*\*126 with .*, got -4",
        ),
        ({"norm_eps": 0.0}, "attribute norm_eps must be positive and a normal number.*, got 0"),
        ({"n_group": 4, "group_scoring": "max"}, "attribute n_group must divide"),
    ],
    ids=str,
)
def test_wrong_attributes(change: dict[str, object], message: str) -> None:
    model = without_bodies(to_model([layer_of(PLAIN)], body))
    (node,) = (node for node in model.graph if node.domain == "moe")
    for attribute in convert_attributes(change):
        node.attributes[attribute.name] = attribute
    with pytest.raises(Exception, match=f"DroplessMoE '.*': {message}"):
        to_session(model)


def test_a_missing_attribute() -> None:
    model = without_bodies(to_model([layer_of(PLAIN)], body))
    (node,) = (node for node in model.graph if node.domain == "moe")
    del node.attributes["hidden_features"]
    with pytest.raises(Exception, match="attribute hidden_features is missing"):
        to_session(model)


@pytest.mark.parametrize(
    "dtypes", [d for d in DTYPES if DOUBLE in d], ids=lambda d: "_".join(t.short_name() for t in d)
)
def test_float64_is_refused(dtypes: tuple[ir.DataType, ir.DataType, ir.DataType]) -> None:
    x, w, router = dtypes
    layer = layer_of(changed(PLAIN, tokens_dtype=x, experts_dtype=w, router_dtype=router))
    message = "must be float32, float16 or bfloat16 in the library's operator, got ONNX's type 11"
    with pytest.raises(Exception, match=message):
        session_of(layer)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("w1", (6, 8, 12), "w1 must have shape [6, 12, 8], got [6, 8, 12]"),
        ("w2", (6, 8, 11), "w2 must have shape [6, 8, 12], got [6, 8, 11]"),
        ("b1", (6, 8), "b1 must have shape [6, 12], got [6, 8]"),
        ("router_weight", (6, 9), "router_weight must have shape [6, 8], got [6, 9]"),
        ("router_bias", (5,), "router_bias must have shape [6], got [5]"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str) -> None:
    layer = layer_of(BIASED)
    layer.parameters[name] = np.zeros(shape, np.float32)
    with pytest.raises(Exception, match=re.escape(message)):
        run(session_of(layer), layer.arguments(3))


@pytest.mark.parametrize("expert", [6, -2, 2**31])
def test_ids_of_no_expert(expert: int) -> None:
    layer = layer_of(EXPERTS)
    session = session_of(layer)
    arguments = layer.arguments(3)
    arguments["expert_ids"][1, 0] = expert
    message = re.escape(f"expert_ids must be in -1..5, got {expert} for token 1")
    with pytest.raises(Exception, match=message):
        run(session, arguments)
    check(layer, session, layer.arguments(3))  # The session goes on.
