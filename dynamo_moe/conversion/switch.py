"""Adapter for the MoE layer of Switch Transformers: top-1 routing with a capacity.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.conversion.activation import identify_activation
from dynamo_moe.conversion.observation import random_tokens
from dynamo_moe.conversion.registry import register_adapter
from dynamo_moe.modules import ConvertedModule, TopOneMoE

__all__ = ["SwitchAdapter"]

_NO_CAPACITY = 2**31


class SwitchAdapter:
    """Softmax in float32, top-1, experts ``wo(act(wi(x)))`` without biases.

    A token beyond an expert's capacity gets zeros, as in the original. With a capacity of 2**31 or
    more no token is dropped, and the graph does not count them.
    """

    name = "switch"

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None for ``router.classifier`` and ``experts`` of ``wi``, ``wo``, ``act``."""
        router: Any = getattr(module, "router", None)
        experts = getattr(module, "experts", None)
        if not isinstance(getattr(router, "classifier", None), nn.Linear):
            return "no router.classifier nn.Linear(D, E)"
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


register_adapter(SwitchAdapter())
