"""Adapters for two layers of transformers' models: Llama 4's and that of Switch Transformers.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.conversion.activation import identify_activation
from dynamo_moe.conversion.observation import random_tokens
from dynamo_moe.conversion.registry import register_adapter
from dynamo_moe.modules import ConvertedModule, InputScaledMoE, TopOneMoE
from dynamo_moe.private.pytorch import has_attribute

_NO_CAPACITY = 2**31


class Llama4Adapter:
    """Sigmoid of the top-k logits on the experts' input, gated experts, weights (in, out)."""

    name = "llama4"

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None for a ``router``, ``experts`` of stacked weights and a ``shared_expert``."""
        if not has_attribute(module, "shared_expert"):  # As most modules.
            return "no shared_expert"
        if not isinstance(getattr(module, "shared_expert", None), nn.Module):
            return "no module shared_expert"
        router, experts = (getattr(module, name, None) for name in ("router", "experts"))
        if not isinstance(router, nn.Linear) or router.bias is not None:
            return "no router nn.Linear(D, E, bias=False)"
        w1, w2 = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
        if not isinstance(w1, nn.Parameter) or not isinstance(w2, nn.Parameter):
            return "no parameters experts.gate_up_proj and experts.down_proj"
        count, width = router.weight.shape
        if w1.ndim != 3 or w1.shape[:2] != (count, width):
            return f"experts.gate_up_proj is not [E, D, 2H] = [{count}, {width}, ...]"
        if w2.shape != (count, w1.shape[2] // 2, width):
            return f"experts.down_proj is not [E, H, D] = [{count}, {w1.shape[2] // 2}, {width}]"
        if not callable(getattr(experts, "act_fn", None)):
            return "no experts.act_fn"
        return None

    def convert(self, module: Any) -> ConvertedModule:
        """Returns the layer on ``torch.ops.moe.experts``, holding the same modules."""
        options = identify_activation(module.experts.act_fn)
        return InputScaledMoE(
            module.router, module.experts, module.shared_expert, module.top_k, options.activation
        )

    def example_tokens(self, module: Any) -> Tensor:
        """Returns 8 tokens ``[8, D]``."""
        weight = module.router.weight
        return random_tokens(8, weight.shape[1], like=weight)


class SwitchAdapter:
    """Softmax in float32, top-1 with a capacity, experts ``wo(act(wi(x)))`` without biases.

    A token beyond an expert's capacity gets zeros, as in the original. With a capacity of 2**31 or
    more no token is dropped, and the graph does not count them.
    """

    name = "switch"

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None for ``router.classifier`` and ``experts`` of ``wi``, ``wo``, ``act``."""
        if not has_attribute(module, "router"):  # As most modules.
            return "no router"
        router: Any = getattr(module, "router", None)
        if not isinstance(getattr(router, "classifier", None), nn.Linear):
            return "no router.classifier nn.Linear(D, E)"
        experts = getattr(module, "experts", None)
        if not hasattr(router, "expert_capacity"):
            return "no router.expert_capacity"
        if not isinstance(experts, nn.ModuleDict) or len(experts) != router.classifier.out_features:
            return f"experts is not an nn.ModuleDict of {router.classifier.out_features}"
        for expert in experts.values():
            linears = (getattr(expert, "wi", None), getattr(expert, "wo", None))
            if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
                return "an expert is not wi and wo, nn.Linear without bias"
        return None

    def convert(self, module: Any) -> ConvertedModule:
        """Returns the layer on ``torch.ops.moe.experts``, its experts' weights stacked."""
        experts = list(module.experts.values())
        options = identify_activation(experts[0].act)

        def stacked(name: str) -> nn.Parameter:
            weights = [getattr(expert, name).weight for expert in experts]
            together = torch.stack([weight.detach() for weight in weights])
            return nn.Parameter(together, weights[0].requires_grad)

        router = module.router
        capacity = router.expert_capacity if router.expert_capacity < _NO_CAPACITY else None
        return TopOneMoE(
            router.classifier, stacked("wi"), stacked("wo"), capacity, options.activation
        )

    def example_tokens(self, module: Any) -> Tensor:
        """Returns 8 sequences of 6 tokens ``[8, 6, D]``."""
        weight = module.router.classifier.weight
        return random_tokens(8, 6, weight.shape[1], like=weight)


register_adapter(Llama4Adapter())
register_adapter(SwitchAdapter())
