"""Random layers and tokens, for whatever launches the kernels."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from custom_ops import ACTIVATIONS, SCORINGS
from custom_ops.options import GATINGS, GROUP_SCORINGS, PRE_NORMS
from moe_cases import OPS, Case, make_case

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

bounded = settings(derandomize=True, deadline=None, max_examples=20, database=None)


@st.composite
def groups(draw: st.DrawFn, experts: int, top_k: int) -> dict[str, Any]:
    """The options of groups that a token with so many experts can choose from."""
    scoring = draw(st.sampled_from(GROUP_SCORINGS))
    least = 2 if scoring == "top2_sum" else 1
    divisors = [n for n in range(1, experts // least + 1) if experts % n == 0]
    if scoring == "none" or not divisors:
        return {}
    n_group = draw(st.sampled_from(divisors))
    fewest = -(-top_k // (experts // n_group))
    topk_group = draw(st.integers(fewest, n_group))
    return {"group_scoring": scoring, "n_group": n_group, "topk_group": topk_group}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in GATINGS or draw(st.booleans())
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
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(experts, 8)))
    if op == "dropless":
        options |= draw(groups(experts, top_k)) | {
            "scoring": draw(st.sampled_from(SCORINGS)),
            "renormalize": draw(st.booleans()),
            "routed_scaling": draw(st.sampled_from([1.0, 2.5])),
        }
    return make_case(
        op,
        (draw(st.integers(0, 50)),),
        width=8 * draw(st.integers(1, 20)),
        hidden=8 * draw(st.integers(1, 10)),
        experts=experts,
        top_k=top_k,
        dtype=draw(st.sampled_from(FLOATS)),
        x_dtype=draw(st.sampled_from(FLOATS)),
        biases=draw(st.booleans()),
        selection_bias=op == "dropless" and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )
