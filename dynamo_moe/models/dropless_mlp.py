"""A dropless Mixture-of-Experts MLP in plain PyTorch, as models have it before conversion.

Tensor names carry their axes::

    T tokens     D model width     H hidden width     E experts     K top_k
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DroplessMoEMlp(nn.Module):
    """An MLP per expert; each token goes through its `top_k` experts, and none is dropped.

    The router's probabilities are a softmax over all experts in float32; those of the chosen
    experts are divided by their sum. An expert is `gelu(x @ w1 + b1) @ w2 + b2`, with exact GELU.

    Args:
        dim: Width D of the tokens.
        hidden_dim: Hidden width H of one expert.
        num_experts: Number of experts E.
        top_k: Experts per token K.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every expert's weights as `nn.Linear` draws its own."""
        self.router.reset_parameters()
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer.

        Args:
            x: Tokens `[..., D]`.

        Returns:
            Tensor of x's shape and dtype.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        _, weights_TK, experts_TK = self._route(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for expert in range(self.w1.shape[0]):
            token, slot = torch.where(experts_TK == expert)
            hidden_H = F.gelu(x_TD[token] @ self.w1[expert] + self.b1[expert])
            y_D = hidden_H @ self.w2[expert] + self.b2[expert]
            weighted_D = y_D * weights_TK[token, slot].unsqueeze(-1)
            out_TD = out_TD.index_add(0, token, weighted_D.to(out_TD.dtype))
        return out_TD.reshape(x.shape)

    def expert_usage(self, x: Tensor) -> Tensor:
        """Fraction of the T x K choices that falls on each expert: `[E]`, float32, sum 1."""
        _, _, experts_TK = self._route(x.reshape(-1, x.shape[-1]))
        return self._fractions(experts_TK)

    def load_balancing_loss(self, x: Tensor) -> Tensor:
        """`E * sum(f_e * P_e)`: 1 where every expert gets the same share of the tokens.

        f is the fraction of the choices that falls on an expert, P its mean probability
        (Switch Transformers, arXiv 2101.03961, equation 4, here with top_k choices per token).

        Args:
            x: Tokens `[..., D]`, as `forward` gets them.

        Returns:
            A scalar, float32, differentiable in x and the router's weight.
        """
        probabilities_TE, _, experts_TK = self._route(x.reshape(-1, x.shape[-1]))
        fractions_E = self._fractions(experts_TK)
        return len(fractions_E) * (fractions_E * probabilities_TE.mean(dim=0)).sum()

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities `[T, E]`, and the chosen experts' weights and indices `[T, K]`."""
        logits_TE = F.linear(x_TD.float(), self.router.weight.float())
        probabilities_TE = logits_TE.softmax(dim=-1)
        weights_TK, experts_TK = probabilities_TE.topk(self.top_k, dim=-1)
        return probabilities_TE, weights_TK / weights_TK.sum(dim=-1, keepdim=True), experts_TK

    def _fractions(self, experts_TK: Tensor) -> Tensor:
        counts_E = torch.bincount(experts_TK.flatten(), minlength=self.w1.shape[0])
        return counts_E.float() / experts_TK.numel()
