"""Adapter for MLPs with stacked (in, out) expert weights: ``router``, ``w1``, ``w2``, ``top_k``.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from dynamo_moe.conversion._comparing import random_tokens
from dynamo_moe.conversion._registry import register_adapter
from dynamo_moe.modules import ConvertedModule, DroplessMoE

__all__ = ["DroplessMlpAdapter"]


class DroplessMlpAdapter:
    """Softmax over all experts, top-k, divided by the sum; exact GELU; weights (in, out)."""

    name = "dropless-mlp"

    def recognise(self, module: nn.Module) -> str | None:
        """Returns None for ``router`` Linear(D, E), w1 [E, D, H], b1, w2 [E, H, D], b2, top_k."""
        router, w1, w2 = (getattr(module, name, None) for name in ("router", "w1", "w2"))
        # A subclass can compute more than its weight says, such as a low-rank adaptation.
        if type(router) is not nn.Linear or router.bias is not None:
            return "no router nn.Linear(D, E, bias=False)"
        if not isinstance(w1, nn.Parameter) or w1.ndim != 3:
            return "no parameter w1 [E, D, H]"
        experts, width, hidden = w1.shape
        if router.weight.shape != (experts, width):
            return f"router.weight is not [E, D] = [{experts}, {width}]"
        if not isinstance(w2, nn.Parameter) or w2.shape != (experts, hidden, width):
            return f"w2 is not [E, H, D] = [{experts}, {hidden}, {width}]"
        for name, form, shape in (("b1", "H", hidden), ("b2", "D", width)):
            bias = getattr(module, name, None)
            if bias is not None and tuple(bias.shape) != (experts, shape):
                return f"{name} is not [E, {form}] = [{experts}, {shape}]"
        top_k = getattr(module, "top_k", None)
        if not isinstance(top_k, int) or not 1 <= top_k <= experts:
            return f"top_k is not in 1..{experts}"
        return None

    def convert(self, module: nn.Module) -> ConvertedModule:
        """Returns the layer on ``torch.ops.moe.dropless``, holding the same parameters."""
        return DroplessMoE(
            cast(nn.Linear, module.router),
            cast(nn.Parameter, module.w1),
            cast("nn.Parameter | None", getattr(module, "b1", None)),
            cast(nn.Parameter, module.w2),
            cast("nn.Parameter | None", getattr(module, "b2", None)),
            cast(int, module.top_k),
        )

    def example_tokens(self, module: nn.Module) -> Tensor:
        """Returns 8 tokens ``[8, D]`` large enough to tell activations apart."""
        w1 = cast(Tensor, module.w1)
        return random_tokens(8, w1.shape[1], w1)


register_adapter(DroplessMlpAdapter())
