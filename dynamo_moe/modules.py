"""Modules that :func:`dynamo_moe.convert` puts in the place of a model's own MoE modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from dynamo_moe import local_experts, packed_experts


class ConvertedModule(nn.Module, ABC):
    """A module that :func:`convert` puts in the place of a model's own."""

    @property
    def runs_own_code(self) -> bool:
        """Whether it runs a part of the original's forward."""
        return False

    def own_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the model's own module, where that is still there."""
        return self.forward(*args, **kwargs)

    @abstractmethod
    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the experts' parameters by their path; the router's are not among them.

        It isn't asked where the experts are packed.
        """

    def experts_weights(self) -> ExpertWeights:
        """Returns the experts' weights as the operators take them, where they are not packed.

        Raises:
            NotImplementedError: If the class has none that can be packed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no experts_weights to be packed")

    def experts_options(self) -> ExpertOptions | None:
        """Returns the experts' options; None: experts whose columns have an order are decoded."""
        return None


class ParameterCache:
    """A base of what a module keeps from call to call, all of which its parameters say."""


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
        return packed_experts.dropless(
            self, self.experts_weights, x, self.router.weight, top_k=self.top_k,
            activation=self.activation,
        )  # fmt: skip

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns those of ``w1``, ``b1``, ``w2`` and ``b2`` that exist."""
        parameters = {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {name: value for name, value in parameters.items() if value is not None}

    def experts_weights(self) -> ExpertWeights:
        """Returns views of the weights."""
        return ExpertWeights(self.w1.mT, self.b1, self.w2.mT, self.b2)

    def extra_repr(self) -> str:
        """Sizes and options, for ``print(model)``."""
        options = f"top_k={self.top_k}, activation={self.activation!r}"
        if packed_experts.of(self) is not None or local_experts.of(self) is not None:
            return options
        experts, width, hidden = self.w1.shape
        return (
            f"experts={experts}, width={width}, hidden={hidden}, {options}, "
            f"experts_dtype={self.w1.dtype}"
        )


class InputScaledMoE(ConvertedModule):
    """Llama 4's layer: sigmoid scores scale the experts' inputs; a shared expert sees every token.

    Legend: T tokens, D model width, H hidden width, E experts.

    It has the original's modules under their names.

    Args:
        router: ``nn.Linear(D, E, bias=False)``, or a subclass; only its weight is used.
        experts: Has ``gate_up_proj`` ``[E, D, 2H]`` and ``down_proj`` ``[E, H, D]``.
        shared_expert: A module from ``[T, D]`` to ``[T, D]``.
        top_k: Experts per token.
        activation: One of :data:`custom_ops.options.ACTIVATIONS`.
    """

    def __init__(
        self,
        router: nn.Linear,
        experts: nn.Module,
        shared_expert: nn.Module,
        top_k: int,
        activation: str,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared_expert = router, experts, shared_expert
        self.top_k = top_k
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``[T, D]`` and the router's logits ``[T, E]`` for tokens ``[..., D]``."""
        x_TD = x.reshape(-1, x.shape[-1])
        logits_TE = nn.functional.linear(x_TD, self.router.weight)
        values_TK, ids_TK = logits_TE.topk(self.top_k, dim=-1)
        weights_TK = values_TK.float().sigmoid().to(values_TK.dtype)
        y_TD = packed_experts.experts(
            self, self.experts_weights, x_TD, ids_TK, weights_TK,
            activation=self.activation, gated=True, weight_on_input=True,
        )  # fmt: skip
        return self.shared_expert(x_TD) + y_TD, logits_TE

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns ``experts.gate_up_proj`` and ``experts.down_proj``."""
        return {f"experts.{name}": value for name, value in self.experts.named_parameters()}

    def experts_weights(self) -> ExpertWeights:
        """Returns views of the weights."""
        w1: Any = self.experts.gate_up_proj
        w2: Any = self.experts.down_proj
        return ExpertWeights(w1.mT, None, w2.mT, None)


class TopOneMoE(ConvertedModule):
    """Switch Transformer's layer: one expert per token, weighted by its probability.

    Legend: B batch, L length, D model width, H hidden width, E experts.

    Args:
        router: ``nn.Linear(D, E)``, computed in float32.
        w1: ``[E, H, D]``.
        w2: ``[E, D, H]``.
        capacity: How many tokens of a sequence an expert takes, the first ones; the others get
            zeros. None: all.
        activation: One of :data:`custom_ops.options.ACTIVATIONS`.
    """

    def __init__(
        self,
        router: nn.Linear,
        w1: nn.Parameter,
        w2: nn.Parameter,
        capacity: int | None,
        activation: str,
    ) -> None:
        super().__init__()
        self.router = router
        self.w1, self.w2 = w1, w2
        self.capacity = capacity
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[B, L, D]`` for tokens ``[B, L, D]``."""
        bias = None if self.router.bias is None else self.router.bias.float()
        logits_BLE = nn.functional.linear(x.float(), self.router.weight.float(), bias)
        weights_BL1, ids_BL1 = logits_BLE.softmax(dim=-1).to(x.dtype).max(dim=-1, keepdim=True)
        if self.capacity is not None:
            chosen_BLE = nn.functional.one_hot(ids_BL1.squeeze(-1), logits_BLE.shape[-1])
            turn_BL1 = chosen_BLE.cumsum(dim=-2).gather(-1, ids_BL1)
            ids_BL1 = ids_BL1.where(turn_BL1 <= self.capacity, -1)
        return packed_experts.experts(
            self, self.experts_weights, x, ids_BL1, weights_BL1, activation=self.activation
        )

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns ``w1`` and ``w2``."""
        return {"w1": self.w1, "w2": self.w2}

    def experts_weights(self) -> ExpertWeights:
        """Returns the weights."""
        return ExpertWeights(self.w1, None, self.w2, None)
