"""Routers that are code of their own: capacities, thresholds, centroids, conditions.

Legend: B batch, L length, S tokens, D model width, H hidden width, E experts, K top_k, C capacity.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks

# --- torchscale: GShard's gates with a share of the batch as capacity ---


def one_hot(indices: Tensor, num_classes: int) -> Tensor:
    """By a scatter, which takes a capacity that is a symbolic size."""
    zeros = torch.zeros((*indices.shape, num_classes), dtype=indices.dtype)
    return zeros.scatter_(indices.ndim, indices.unsqueeze(-1), 1)


def combine(gates_S: Tensor, mask_SE: Tensor, locations_SE: Tensor, capacity: int) -> Tensor:
    place_S = torch.sum(locations_SE * mask_SE, dim=1)
    gates_SE = gates_S.unsqueeze(-1) * mask_SE.to(gates_S.dtype)
    place_SC = one_hot(place_S, capacity).to(gates_S.dtype)
    return torch.bmm(gates_SE.unsqueeze(-1), place_SC.unsqueeze(1))


class TorchscaleGate(nn.Module):
    """``[S, E, C]``; a quarter of the tokens is an expert's capacity in evaluation."""

    def __init__(self, model_dim: int, num_experts: int, choices: int) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.choices, self.moe_eval_capacity_token_fraction = choices, 0.25

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_SE = self.wg(input).float()
        gates_SE = F.softmax(logits_SE, dim=1)
        tokens, experts = gates_SE.shape
        capacity = math.ceil(self.moe_eval_capacity_token_fraction * tokens)
        mask1 = one_hot(torch.argmax(gates_SE, dim=1), experts)
        locations1 = torch.cumsum(mask1, dim=0) - 1
        gates1_S = (gates_SE * mask1).sum(dim=1)
        loss = torch.mean(gates_SE.mean(dim=0) * mask1.float().mean(dim=0)) * experts * experts
        if self.choices == 1:
            mask1 = mask1 * torch.lt(locations1, capacity)
            weights_SEC = combine(gates1_S, mask1, locations1, capacity)
            return loss, weights_SEC, weights_SEC.bool()
        without_first = logits_SE.masked_fill(mask1.bool(), -math.inf)
        mask2 = one_hot(torch.argmax(without_first, dim=1), experts)
        locations2 = torch.cumsum(mask2, dim=0) - 1 + torch.sum(mask1, dim=0, keepdim=True)
        mask1 = mask1 * torch.lt(locations1, capacity)
        mask2 = mask2 * torch.lt(locations2, capacity)
        gates1_S, gates2_S = ((gates_SE * mask).sum(dim=1) for mask in (mask1, mask2))
        total_S = torch.clamp(gates1_S + gates2_S, min=torch.finfo(gates1_S.dtype).eps)
        gates1_S /= total_S
        gates2_S /= total_S
        weights_SEC = combine(gates1_S, mask1, locations1, capacity)
        weights_SEC = weights_SEC + combine(gates2_S, mask2, locations2, capacity)
        return loss, weights_SEC, weights_SEC.bool()


class FeedForwardNetwork(nn.Module):
    def __init__(self, embed_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x.reshape(-1, x.size(-1))).float()).type_as(x))


class TorchscaleMOELayer(nn.Module):
    def __init__(self, embed_dim: int, ffn_dim: int, num_experts: int, choices: int) -> None:
        super().__init__()
        self.gate = TorchscaleGate(embed_dim, num_experts, choices)
        self.experts = nn.ModuleList(
            FeedForwardNetwork(embed_dim, ffn_dim) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_SD = x.reshape(-1, x.size(-1))
        loss, weights_SEC, mask_SEC = self.gate(x_SD)
        rows_ECD = torch.einsum("sec,sm->ecm", mask_SEC.to(x.dtype), x_SD)
        results = [expert(rows) for expert, rows in zip(self.experts, rows_ECD)]
        y_SD = weights_SEC.flatten(1).mm(torch.stack(results).flatten(0, 1))
        return y_SD.reshape(x.shape), loss


# --- Moirai-MoE: the farthest of the cluster centres, which the model holds for all layers ---


class GatedLinearUnitFeedForward(nn.Module):
    def __init__(self, in_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_dim, hidden_dim), nn.Linear(hidden_dim, in_dim)
        self.fc_gate = nn.Linear(in_dim, hidden_dim)
        self.dropout1, self.dropout2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor, centroid: Tensor | None = None) -> Tensor:
        return self.dropout2(self.fc2(self.dropout1(F.silu(self.fc_gate(x)) * self.fc1(x))))


class MoEFeedForward(nn.Module):
    def __init__(self, num_experts: int, top_k: int, in_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_token = num_experts, top_k
        self.experts = nn.ModuleList(
            GatedLinearUnitFeedForward(in_dim, hidden_dim) for _ in range(num_experts)
        )

    def forward(self, x: Tensor, centroid: Tensor | None = None) -> Tensor:
        x_SD = x.view(-1, x.shape[-1])
        distances = torch.cdist(x, centroid.type_as(x).unsqueeze(0).repeat(x.shape[0], 1, 1))
        best_SK, ids_SK = torch.topk(distances.view(-1, self.num_experts), TOP_K)
        weights_SK = F.softmax(best_SK, dim=1, dtype=torch.float).type_as(x)
        results = torch.zeros_like(x_SD)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(ids_SK == index)
            results[rows] += weights_SK[rows, slots, None] * expert(x_SD[rows])
        return results.view_as(x)


class WithCentroids(nn.Module):
    """A model whose layers get the centres of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoEFeedForward(EXPERTS, TOP_K, DIM, HIDDEN) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        centres = torch.randn(2, EXPERTS, DIM, generator=torch.Generator().manual_seed(5))
        self.register_buffer("cluster_centroid", centres)

    def forward(self, x: Tensor) -> Tensor:
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + layer(norm(x), centroid=self.cluster_centroid[index])
        return x


# --- MoDE: the router sees the noise level beside the tokens ---


class RouterCond(nn.Module):
    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, width = top_k, 2 * dim
        self.router = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, num_experts)
        )

    def forward(self, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cond = cond.expand(-1, x.size(1), -1)
        scores = self.router(torch.cat([x, cond], dim=-1)).softmax(dim=-1)
        ids = scores.topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
        weights = torch.zeros_like(scores).scatter_(-1, ids, scores.gather(-1, ids))
        return mask, ids, weights / weights.sum(dim=-1, keepdim=True)


class NoiseMoE(nn.Module):
    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.router = RouterCond(dim, num_experts, top_k)
        self.experts = nn.ModuleDict(
            {
                f"expert_{index}": nn.Sequential(
                    nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim)
                )
                for index in range(num_experts)
            }
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        mask, _, weights = self.router(x, c)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.values()):
            rows = mask[:, :, index].bool()
            out[rows] += weights[:, :, index][rows].unsqueeze(-1) * expert(x[rows])
        return out


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Linear(1, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.layers = nn.ModuleList(NoiseMoE(DIM, HIDDEN, EXPERTS, TOP_K) for _ in range(2))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        condition = self.noise(sigma.log()[:, None, None])
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x), condition)
        return x


def in_dictionary(moe: nn.Module) -> list[list[Tensor]]:
    return [list(expert.parameters()) for expert in moe.experts.values()]


def noisy(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, DIM, generator=generator)
    return x, 0.1 + 4 * torch.rand(batch, generator=generator)


# --- Dynamic_MoE: as many experts as it takes to a probability of top_p ---


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SwitchMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_p: float
    ) -> None:
        super().__init__()
        self.top_p_threshold = top_p
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            LlamaMLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores = F.softmax(self.router(hidden_states), dim=2)
        scores, ids = torch.sort(scores, descending=True)
        beyond = torch.cumsum(scores, dim=-1) > self.top_p_threshold
        last = F.one_hot(beyond.long().argmax(dim=-1), num_classes=beyond.size(-1)).bool()
        beyond = beyond & ~last
        ids = torch.where(beyond, -1, ids).view(-1, ids.size(2))
        scores = torch.where(beyond, 0.0, scores).view(-1, scores.size(2))
        x_SD = hidden_states.view(-1, hidden_states.size(2))
        out = torch.zeros_like(x_SD)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(ids == index)
            results = expert(x_SD[rows.unsqueeze(1), :]).squeeze(1)
            out[rows] += torch.mul(results, scores[rows, slots].unsqueeze(1))
        return out.view(hidden_states.shape)


# --- CuMo: the layer is the block, with its norm and its sum ---


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class CLIPMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.activation_fn = QuickGELU()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class CLIPEncoderMoELayer(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int, num_selected: int) -> None:
        super().__init__()
        self.num_selected = num_selected
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(CLIPMLP(width, hidden) for _ in range(num_experts))
        self.layer_norm2 = nn.LayerNorm(width)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        residual, x = hidden_states, self.layer_norm2(hidden_states)
        logits = self.gate(x)
        loss = torch.logsumexp(logits, dim=-1).square().mean()
        weights, ids = torch.topk(logits.softmax(dim=-1), self.num_selected)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        results = torch.zeros_like(x)
        for sample in range(x.shape[0]):
            for index, expert in enumerate(self.experts):
                rows, slots = torch.where(ids[sample] == index)
                results[sample][rows] += weights[sample][rows, slots, None] * expert(
                    x[sample][rows]
                )
        return residual + results, loss


CASES = [
    *(
        Case(
            name=f"torchscale-top{choices}",
            origin="microsoft/torchscale torchscale/component/xmoe/routing.py, moe_layer.py "
            f"(top {choices})",
            make=lambda choices=choices: Model(
                lambda: TorchscaleMOELayer(DIM, HIDDEN, EXPERTS, choices), "moe_layer", first
            ),
            moe_paths=in_blocks("moe_layer"),
            exact=True,
            notes="a capacity of a quarter of the tokens",
        )
        for choices in (1, 2)
    ),
    Case(
        name="moirai-moe",
        origin="SalesforceAIResearch/uni2ts src/uni2ts/module/ffn.py",
        make=WithCentroids,
        moe_paths=("layers.0", "layers.1"),
        notes="its parent passes the centres of the experts",
    ),
    Case(
        name="mode-noise-and-tokens",
        origin="intuitive-robots/MoDE_Diffusion_Policy mode/models/networks/modedit.py",
        make=Denoiser,
        moe_paths=("layers.0", "layers.1"),
        args=noisy,
        expert_slices=in_dictionary,
        dynamic={"x": {0: "batch", 1: "length"}, "sigma": {0: "batch"}},
        notes="its parent passes the noise level of each sample",
    ),
    Case(
        name="dynamic-moe-top-p",
        origin="ZhenweiAn/Dynamic_MoE modeling/modeling_moe.py",
        make=lambda: Model(lambda: SwitchMLP(DIM, HIDDEN, EXPERTS, top_p=0.6)),
        moe_paths=in_blocks("mlp"),
        notes="a token has as many experts as it takes to a probability",
    ),
    Case(
        name="cumo-clip",
        origin="SHI-Labs/CuMo cumo/model/multimodal_encoder/clip_smoe.py",
        make=lambda: Model(lambda: CLIPEncoderMoELayer(DIM, HIDDEN, EXPERTS, TOP_K), call=first),
        moe_paths=in_blocks("mlp"),
        notes="a norm ahead of the experts and a sum after them in one module",
    ),
]
