"""What a mixture returns beside its result, and what it sets on itself: seen in one run of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.conversion.mixture import Mixture, Output, counts
from dynamo_moe.conversion.observing import Observation
from dynamo_moe.conversion.routing import Routed

__all__ = ["left_behind", "marks_of", "outputs_of"]


def outputs_of(
    leaves: list[Any], result: int, routed: Routed, x: Tensor, experts: int
) -> tuple[Output, ...]:
    """Returns how each value that a module returned comes about.

    Args:
        leaves: The values, flattened.
        result: Which of them is the result.
        routed: The routing.
        x: The tokens ``[..., D]``.
        experts: E.

    Raises:
        ValueError: If nobody knows of one.
    """
    return tuple(
        Output("result", shaped=leaf.ndim == x.ndim)
        if place == result
        else _output(leaf, routed, x, experts)
        for place, leaf in enumerate(leaves)
    )


def marks_of(
    result: Tensor, routed: Routed, x: Tensor, experts: int
) -> tuple[tuple[str, Output], ...]:
    """Returns how each attribute of the result tensor itself comes about."""
    return tuple((name, _output(value, routed, x, experts)) for name, value in vars(result).items())


def _output(value: Any, routed: Routed, x: Tensor, experts: int) -> Output:
    """Returns how a value that the module returns comes about.

    Raises:
        ValueError: If nobody knows.
    """
    if not isinstance(value, Tensor):
        return Output("constant", value)
    if value.ndim == 0 and value.is_floating_point():
        return Output("zero")
    sources: list[tuple[Any, int | None, Any]] = [
        ("leaf", place, leaf) for place, leaf in enumerate(routed.leaves)
    ]
    sources += [("ids", None, routed.ids), ("weights", None, routed.weights)]
    counts_E = counts(routed.ids, experts)
    if value.shape == counts_E.shape and torch.equal(value.long(), counts_E.long()):
        return Output("counts", (experts, value.dtype))
    for kind, place, source in sources:
        if (
            isinstance(source, Tensor)
            and source.numel() == value.numel()
            and (source.shape[-1:] == value.shape[-1:] or source.shape[-1] == 1)
            and torch.allclose(
                source.reshape(value.shape).double(), value.double(), rtol=1e-5, atol=1e-7
            )
        ):
            squeezed = source.shape[-1:] != value.shape[-1:]
            leading = value.shape if squeezed else value.shape[:-1]
            return Output(kind, place, leading == x.shape[:-1], squeezed)
    raise ValueError(
        f"it returns a tensor {list(value.shape)} that is neither its result nor its routing"
    )


def left_behind(
    seen: Observation, mixture: Mixture
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Returns the attributes that its forward set, and what is said of those and of its losses."""
    notes = []
    notes += [f"{name} is no longer updated" for name in seen.counted]
    if seen.rounds:
        notes.append("it computes in half precision in between; now, in the dtype of its weights")
    outputs = (*pytree.tree_leaves(mixture.outputs), *(output for _, output in mixture.marks))
    if any(output.kind == "zero" for output in outputs):
        notes.append("the loss that it returns beside its result is 0")
    runs = [call.path for call in mixture.calls()]
    kept: dict[str, dict[str, Any]] = {}
    for path, values in seen.changed.items():
        if any(path == run or path.startswith(f"{run}.") for run in runs):
            continue
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim == 0:
                value = torch.zeros_like(value)  # noqa: PLW2901
                notes.append(f"{name} stays 0")
            elif not (value is None or isinstance(value, (bool, int, float, str))):
                value = None  # noqa: PLW2901
                notes.append(f"{name} is no longer set: it is None")
            elif value is not None:
                notes.append(f"{name} stays {value!r}")
            kept.setdefault(path, {})[name] = value
    return kept, tuple(notes)
