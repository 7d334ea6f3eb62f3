"""Random layers and tokens, for whatever launches the kernels."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from custom_ops import ACTIVATIONS, SCORINGS
from custom_ops.options import CLAMPED, PRE_NORMS
from moe_cases import OPS, Case, make_case

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

bounded = settings(derandomize=True, deadline=None, max_examples=40, database=None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in CLAMPED or draw(st.booleans())
    op = draw(st.sampled_from(OPS))
    options = {
        "activation": activation,
        "gated": gated,
        "interleaved": gated and draw(st.booleans()),
        "weight_on_input": draw(st.booleans()),
        "limit": draw(st.sampled_from([0.5, 7.0])),
        "pre_norm": draw(st.sampled_from(PRE_NORMS)),
        "norm_eps": draw(st.sampled_from([1e-6, 0.5])),
        "residual": draw(st.booleans()),
    }
    if op == "dropless":
        options |= {
            "scoring": draw(st.sampled_from(SCORINGS)),
            "renormalize": draw(st.booleans()),
            "routed_scaling": draw(st.sampled_from([1.0, 2.5])),
        }
    experts = draw(st.integers(1, 40))
    return make_case(
        op,
        (draw(st.integers(0, 50)),),
        width=8 * draw(st.integers(1, 20)),
        hidden=8 * draw(st.integers(1, 10)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        dtype=draw(st.sampled_from(FLOATS)),
        x_dtype=draw(st.sampled_from(FLOATS)),
        biases=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )
