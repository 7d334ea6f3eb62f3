"""The order of equal scores, which PyTorch leaves open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamo_moe.private.pytorch import TorchDispatchMode


class TiesByIndex(TorchDispatchMode):
    """Ranks equal scores by index, as ONNX does, where PyTorch's order is any.

    Attributes:
        found: Whether that made a difference.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # It has no annotations.
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _RANKINGS or not args[0].ndim:
            return result
        scores, k, dim, descending = _RANKINGS[func](*args)
        values, indices = scores.sort(dim=dim, descending=descending, stable=True)
        ranked = values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
        self.found |= not torch.equal(ranked[1], result[1])
        for tensor, rank in zip(result, ranked, strict=True):
            tensor.copy_(rank)  # Of PyTorch's strides, which a ``view`` of the model may need.
        return result


def _top(
    scores: Tensor, k: int, dim: int = -1, largest: bool = True, _: bool = True
) -> tuple[Tensor, int, int, bool]:
    return scores, k, dim, largest


def _all(scores: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, int, int, bool]:
    return scores, scores.shape[dim], dim, descending


# From the arguments of operators whose order of equal scores is any: scores, k, axis, descending.
_RANKINGS: dict[Any, Callable[..., tuple[Tensor, int, int, bool]]] = {
    torch.ops.aten.topk.default: _top,
    torch.ops.aten.sort.default: _all,
}
