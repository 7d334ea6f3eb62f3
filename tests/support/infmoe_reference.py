"""InfMoE's layer in NumPy, token by token with nothing folded, as a reference for loading.

It follows the formulas in InfMoE's README and the way its plugin uses a score.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]


def random_weights(
    experts: int = 4, width: int = 16, hidden: int = 24, seed: int = 0, dtype: str = "f4"
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays like those in the npz file, and centroids ``[D, E]``."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for n in range(experts):
        arrays[f"{n}/layer_norm_weight"] = rng.uniform(0.2, 2.0, width)
        for name in ("wi_0_weight", "wi_1_weight"):
            arrays[f"{n}/{name}"] = rng.standard_normal((hidden, width)) * width**-0.5
        arrays[f"{n}/wo_weight"] = rng.standard_normal((width, hidden)) * hidden**-0.5
    centroids = rng.standard_normal((width, experts))
    return {name: array.astype(dtype) for name, array in arrays.items()}, centroids.astype("f4")


def infmoe_layer(
    x: np.ndarray,
    weights: Weights,
    centroids: np.ndarray,
    variant: str = "default",
    layernorm_weight: np.ndarray | None = None,
) -> np.ndarray:
    """The layer's result for tokens ``[..., D]``, in float64."""
    width = x.shape[-1]
    tokens = [_token(token, weights, centroids, variant, layernorm_weight) for token in
              x.reshape(-1, width).astype(np.float64)]  # fmt: skip
    return np.array(tokens).reshape(x.shape)


def _token(
    x: np.ndarray,
    weights: Weights,
    centroids: np.ndarray,
    variant: str,
    layernorm_weight: np.ndarray | None,
) -> np.ndarray:
    scored = _norm(x, layernorm_weight) if variant == "cpm_2" else x
    scores = scored @ centroids.astype(np.float64)
    expert = int(np.argmax(scores))
    result = _t5_feed_forward(x, weights, expert)
    if variant != "base_layer":
        return result
    a = 1 / (1 + math.exp(-scores[expert]))
    return a * result + (1 - a) * x


def _t5_feed_forward(x: np.ndarray, weights: Weights, expert: int) -> np.ndarray:
    wi_0, wi_1, wo = (
        weights[f"{expert}/{name}_weight"].astype(np.float64) for name in ("wi_0", "wi_1", "wo")
    )
    normed = _norm(x, weights[f"{expert}/layer_norm_weight"])
    return x + wo @ (_gelu(wi_0 @ normed) * (wi_1 @ normed))


def _norm(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    assert weight is not None
    return weight.astype(np.float64) * x / np.sqrt(np.mean(x**2) + 1e-6)


def _gelu(z: np.ndarray) -> np.ndarray:
    return z * 0.5 * (1 + np.tanh(z * (0.035677408136300125 * z * z + 0.7978845608028654)))
