"""Modules that :func:`dynamo_moe.convert` puts in the place of a model's own MoE modules."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

import custom_ops

__all__ = ["ConvertedModule", "DroplessMoE"]


class ConvertedModule(nn.Module, ABC):
    """A module that :func:`convert` puts in the place of a model's own."""

    @abstractmethod
    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the experts' parameters by attribute; the router's are not among them."""


class DroplessMoE(ConvertedModule):
    """A softmax-routed MoE layer on ``torch.ops.moe.dropless``, with (in, out) weights.

    Legend: D model width, H hidden width, E experts.

    It keeps the parameters, their names and their layout, so state dicts and optimizers of the
    original model still fit.

    Args:
        router: ``nn.Linear(D, E, bias=False)``.
        w1: ``[E, D, H]``.
        b1: ``[E, H]`` or None.
        w2: ``[E, H, D]``.
        b2: ``[E, D]`` or None.
        top_k: Experts per token.
        activation: One of :data:`custom_ops.options.ACTIVATIONS`.
    """

    def __init__(
        self,
        router: nn.Linear,
        w1: nn.Parameter,
        b1: nn.Parameter | None,
        w2: nn.Parameter,
        b2: nn.Parameter | None,
        top_k: int,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.router = router
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2
        self.top_k = top_k
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., D]`` in x's dtype for tokens ``[..., D]``."""
        return custom_ops.dropless(
            x, self.router.weight, self.w1.mT, self.b1, self.w2.mT, self.b2, self.top_k,
            activation=self.activation,
        )  # fmt: skip

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns ``w1``, ``b1``, ``w2`` and ``b2``, as far as there are any."""
        parameters = {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {name: value for name, value in parameters.items() if value is not None}

    def extra_repr(self) -> str:
        """Sizes and options, for ``print(model)``."""
        experts, width, hidden = self.w1.shape
        return (
            f"experts={experts}, top_k={self.top_k}, width={width}, hidden={hidden}, "
            f"activation={self.activation!r}, experts_dtype={self.w1.dtype}"
        )
