"""Adapter for Llama 4's MoE layer, whose routing weights scale the experts' inputs.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dynamo_moe.conversion.activation import identify_activation
from dynamo_moe.conversion.observation import random_tokens
from dynamo_moe.conversion.registry import register_adapter
from dynamo_moe.modules import ConvertedModule, InputScaledMoE

__all__ = ["Llama4Adapter"]


class Llama4Adapter:
    """Sigmoid of the top-k logits on the input, gated experts, weights (in, out)."""

    name = "llama4"

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None for a ``router``, ``experts`` of stacked weights and a ``shared_expert``."""
        router, experts = (getattr(module, name, None) for name in ("router", "experts"))
        if not isinstance(getattr(module, "shared_expert", None), nn.Module):
            return "no module shared_expert"
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


register_adapter(Llama4Adapter())
