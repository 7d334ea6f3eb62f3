"""The sparsely gated mixture of 2017 in PyTorch, copied by many projects.

Legend: B rows, D model width, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions.normal import Normal

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, in_blocks


class SparseDispatcher:
    """Distributes rows to experts by gates ``[B, E]`` with zeros, and combines the results."""

    def __init__(self, num_experts: int, gates: Tensor) -> None:
        self._gates, self._num_experts = gates, num_experts
        in_order, order = torch.nonzero(gates).sort(0)
        _, self._expert_index = in_order.split(1, dim=1)
        self._batch_index = torch.nonzero(gates)[order[:, 1], 0]
        self._part_sizes = (gates > 0).sum(0).tolist()
        own = gates[self._batch_index.flatten()]
        self._nonzero_gates = torch.gather(own, 1, self._expert_index)

    def dispatch(self, inp: Tensor) -> tuple[Tensor, ...]:
        return torch.split(inp[self._batch_index].squeeze(1), self._part_sizes, dim=0)

    def combine(self, expert_out: list[Tensor]) -> Tensor:
        stitched = torch.cat(expert_out, 0).mul(self._nonzero_gates)
        zeros = torch.zeros(
            self._gates.size(0), expert_out[-1].size(1), requires_grad=True, device=stitched.device
        )
        return zeros.index_add(0, self._batch_index, stitched.float())


class MLP(nn.Module):
    """The original ends in a softmax, which most copies omit."""

    def __init__(self, input_size: int, output_size: int, hidden_size: int, soft: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)
        self.relu = nn.ReLU()
        self.soft = nn.Softmax(1) if soft else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.soft(self.fc2(self.relu(self.fc1(x))))


class MoE(nn.Module):
    """Returns a loss in evaluation too; with a single row, the loss differs."""

    def __init__(
        self, input_size: int, num_experts: int, hidden_size: int, k: int, soft: bool
    ) -> None:
        super().__init__()
        self.noisy_gating, self.num_experts, self.k = True, num_experts, k
        self.input_size = self.output_size = input_size
        self.hidden_size = hidden_size
        self.experts = nn.ModuleList(
            MLP(input_size, input_size, hidden_size, soft) for _ in range(num_experts)
        )
        self.w_gate = nn.Parameter(torch.zeros(input_size, num_experts))
        self.w_noise = nn.Parameter(torch.zeros(input_size, num_experts))
        self.softplus, self.softmax = nn.Softplus(), nn.Softmax(1)
        self.register_buffer("mean", torch.tensor([0.0]))
        self.register_buffer("std", torch.tensor([1.0]))

    def cv_squared(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return torch.tensor([0], device=x.device, dtype=x.dtype)
        return x.float().var() / (x.float().mean() ** 2 + 1e-10)

    def noisy_top_k_gating(self, x: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        clean = x @ self.w_gate
        logits = clean
        if self.noisy_gating and train:
            spread = self.softplus(x @ self.w_noise) + 1e-2
            logits = clean + torch.randn_like(clean) * spread
        scores = self.softmax(logits)
        # One more choice, which the load needs in training.
        best, ids = scores.topk(min(self.k + 1, self.num_experts), dim=1)
        weights = best[:, : self.k]
        weights = weights / (weights.sum(1, keepdim=True) + 1e-6)
        gates = torch.zeros_like(scores, requires_grad=True).scatter(1, ids[:, : self.k], weights)
        if self.noisy_gating and train:
            normal = Normal(self.mean, self.std)
            load = normal.cdf((clean - best[:, self.k :]) / spread).sum(0)
        else:
            load = (gates > 0).sum(0)
        return gates, load

    def forward(self, x: Tensor, loss_coef: float = 1e-2) -> tuple[Tensor, Tensor]:
        gates, load = self.noisy_top_k_gating(x, self.training)
        loss = self.cv_squared(gates.sum(0)) + self.cv_squared(load)
        loss *= loss_coef
        dispatcher = SparseDispatcher(self.num_experts, gates)
        rows = dispatcher.dispatch(x)
        results = [self.experts[i](rows[i]) for i in range(self.num_experts)]
        return dispatcher.combine(results), loss


def call(moe: nn.Module, x: Tensor) -> Tensor:
    y, _loss = moe(x.reshape(-1, x.shape[-1]))
    return y.reshape(x.shape)


class WithLoss(nn.Module):
    """A model of rows ``[B, D]`` that returns the layer's result and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(DIM, EXPERTS, HIDDEN, TOP_K, soft=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, aux_loss = self.moe(self.norm(x))
        return x + y, aux_loss


def rows(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch * length, DIM, generator=generator),)


ORIGIN = "davidmrau/mixture-of-experts moe.py"

CASES = [
    Case(
        name="davidmrau",
        origin=ORIGIN,
        make=lambda: Model(lambda: MoE(DIM, EXPERTS, HIDDEN, TOP_K, soft=False), "moe", call),
        moe_paths=in_blocks("moe"),
        notes="gates [B, E] with zeros; returns (y, loss), the loss not used",
    ),
    Case(
        name="davidmrau-loss-returned",
        origin=ORIGIN,
        make=WithLoss,
        moe_paths=("moe",),
        args=rows,
        dynamic={"x": {0: "rows"}},
        notes="the loss is a result of the model: it must stay what it was",
    ),
    Case(
        name="davidmrau-softmax-experts",
        origin=ORIGIN,
        make=lambda: Model(lambda: MoE(DIM, EXPERTS, HIDDEN, TOP_K, soft=True), "moe", call),
        moe_paths=in_blocks("moe"),
        convertible=False,
        reason="its experts end in a softmax, as the original's",
    ),
]
