"""Models with code of their own on the Hugging Face hub or in a repository.

Legend: T tokens, D model width, E experts, K top_k, C capacity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import (
    DIM,
    EXPERTS,
    HIDDEN,
    TOP_K,
    Case,
    Model,
    first,
    flat,
    in_blocks,
    options,
)
from public_moe.transformers4 import GateUpDownMLP, MixtralBlockSparseTop2MLP


class GrokMLP(nn.Module):
    def __init__(self, hidden_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.linear_v = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.linear_1 = nn.Linear(ffn_dim, hidden_dim, bias=False)
        self.linear = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(self.act_fn(self.linear(x)) * self.linear_v(x))


class GrokMoeBlock(nn.Module):
    """Every expert on every row; a one-hot product selects the right one, as in the original."""

    def __init__(self, hidden_dim: int, ffn_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = nn.ModuleList(GrokMLP(hidden_dim, ffn_dim) for _ in range(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        router_logits = self.gate(x_TD)
        scores_TE = F.softmax(router_logits, dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(scores_TE, self.top_k, dim=-1)
        rows = x_TD.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, width)
        chosen = F.one_hot(ids_TK.reshape(-1), self.num_experts).to(x_TD.dtype)
        results = torch.stack([expert(rows) for expert in self.experts], dim=1)
        picked = torch.einsum("ne,ned->nd", chosen, results).view(-1, self.top_k, width)
        out = (weights_TK.unsqueeze(-1).to(picked.dtype) * picked).sum(dim=1)
        return out.reshape(batch, length, width), router_logits


class ArcticMoE(nn.Module):
    """Returns its loss; the parent adds a dense MLP beside it."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.hidden_dim, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.is_moe_layer, self.use_deepspeed_implementation = True, False
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width)
        scores_TE = F.softmax(self.gate(x_TD), dim=1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(scores_TE, self.top_k, dim=-1)
        if self.top_k > 1:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        weights_TK = weights_TK.to(x_TD.dtype)
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(ids_TK, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, token = torch.where(mask_EKT[index])
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            rows = x_TD[None, tokens].reshape(-1, width)
            result = self.experts[index](rows) * weights_TK[tokens, slots, None]
            out_TD.index_add_(0, token, result.to(x_TD.dtype))
        share = mask_EKT.float().sum(dim=1).mean(dim=-1)
        loss = (share * scores_TE.mean(dim=0)).sum() * self.num_experts
        return out_TD.reshape(batch, length, width), loss


class HunYuanTopKGate(nn.Module):
    """The first release's gate: ``[T, E, C]`` with room for every token, so none is dropped."""

    def __init__(self, hidden_size: int, num_experts: int, moe_topk: int) -> None:
        super().__init__()
        self.moe_topk, self.drop_tokens, self.min_capacity = moe_topk, False, 8
        self.wg = nn.Linear(hidden_size, num_experts, bias=False, dtype=torch.float32)

    def forward(self, hidden_states: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        scores = F.softmax(self.wg(x_TD).float(), dim=1)
        capacity, experts = self.moe_topk * scores.shape[0], int(scores.shape[1])
        ids = torch.topk(scores, self.moe_topk)[1]
        mask = F.one_hot(ids, experts)
        share = torch.mean(mask.max(dim=-2)[0].float(), dim=-2)
        l_aux = experts**2 * torch.mean(share * torch.mean(scores.float(), dim=-2))
        total = torch.matmul(mask.float(), scores.unsqueeze(-1)).sum(dim=1)
        weights = scores / torch.clamp(total, min=torch.finfo(scores.dtype).eps)
        # First choices have priority over second ones.
        mask = F.one_hot(torch.transpose(ids, 0, 1).reshape(-1), experts).to(torch.int32)
        counts = torch.sum(mask, dim=0).detach()
        place = torch.cumsum(mask, dim=0) * mask - 1
        place = torch.transpose(place.reshape((self.moe_topk, -1, experts)), 0, 1)
        place = torch.max(place, dim=1)[0]
        valid = torch.logical_and(place >= 0, place < capacity)
        place = torch.masked_fill(place, ~valid, 0).to(torch.int64)
        dispatch = F.one_hot(place, capacity).to(torch.bool)
        dispatch = torch.masked_fill(dispatch, ~valid.unsqueeze(-1).expand(-1, -1, capacity), 0)
        combine = torch.einsum("...te,...tec->...tec", weights, dispatch.float())
        rate = torch.sum(dispatch) / (x_TD.shape[0] * self.moe_topk)
        return [l_aux, rate], combine, dispatch, counts


class HunYuanMoE(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, moe_topk: int
    ) -> None:
        super().__init__()
        self.config = options(use_mixed_mlp_moe=True)
        self.moe_topk, self.num_experts = moe_topk, num_experts
        self.shared_mlp = GateUpDownMLP(hidden_size, intermediate_size)
        self.gate = HunYuanTopKGate(hidden_size, num_experts, moe_topk)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, intermediate_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        shared = self.shared_mlp(hidden_states)
        _l_moe, combine, dispatch, _counts = self.gate(hidden_states)
        x_TD = hidden_states.reshape(-1, width)
        rows = torch.einsum("sec,sm->ecm", dispatch.type_as(hidden_states), x_TD)
        parts = rows.chunk(self.num_experts, dim=0)
        results = [expert(part) for part, expert in zip(parts, self.experts)]
        stacked = torch.cat(results, dim=0)
        out = torch.einsum("sec,ecm->sm", combine.type_as(hidden_states), stacked)
        return shared + out.reshape(batch, length, width)


class MiniMindMoE(nn.Module):
    """Selects weights with a mask of ids; has a loss of zero in evaluation, as an attribute."""

    def __init__(
        self, hidden_size: int, moe_intermediate_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.config = options(
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
            router_aux_loss_coef=5e-4,
        )
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            GateUpDownMLP(hidden_size, moe_intermediate_size) for _ in range(num_experts)
        )
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x_TD = x.view(-1, shape[-1])
        scores = F.softmax(self.gate(x_TD), dim=-1)
        weights, ids = torch.topk(scores, k=self.config.num_experts_per_tok, dim=-1, sorted=False)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            mask = ids == index
            if mask.any():
                tokens = mask.any(dim=-1).nonzero().flatten()
                result = expert(x_TD[tokens]) * weights[mask].view(-1, 1)
                out_TD.index_add_(0, tokens, result.to(out_TD.dtype))
        if self.training:
            load = F.one_hot(ids, self.config.num_experts).float().mean(0)
            loss = (load * scores.mean(0)).sum() * self.config.num_experts
            self.aux_loss = loss * self.config.router_aux_loss_coef
        else:
            self.aux_loss = scores.new_zeros(1).squeeze()
        return out_TD.view(shape)


class MiniMindBlockCall:
    """Calls it like the model, which afterwards sums up ``aux_loss`` over its layers."""

    def __call__(self, moe: nn.Module, x: Tensor) -> Tensor:
        result = moe(x)
        return result + 0 * moe.aux_loss


class SlicedMLP(nn.Module):
    """Computes its products slice by slice, as in tensor-parallel pre-training."""

    def __init__(self, hidden_size: int, intermediate_size: int, pretraining_tp: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()
        self.pretraining_tp = pretraining_tp

    def forward(self, x: Tensor) -> Tensor:
        size = self.intermediate_size // self.pretraining_tp
        gates = self.gate_proj.weight.split(size, dim=0)
        ups = self.up_proj.weight.split(size, dim=0)
        downs = self.down_proj.weight.split(size, dim=1)
        gate = torch.cat([F.linear(x, weight) for weight in gates], dim=-1)
        up = torch.cat([F.linear(x, weight) for weight in ups], dim=-1)
        parts = (self.act_fn(gate) * up).split(size, dim=-1)
        return sum(F.linear(part, weight) for part, weight in zip(parts, downs))


class DiTGate(nn.Module):
    def __init__(self, embed_dim: int, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.top_k, self.n_routed_experts = num_experts_per_tok, num_experts
        self.scoring_func, self.alpha, self.seq_aux = "softmax", 0.01, False
        self.norm_topk_prob, self.gating_dim = False, embed_dim
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x_TD = hidden_states.view(-1, hidden_states.shape[-1])
        scores = F.linear(x_TD, self.weight, None).softmax(dim=-1)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        return ids, weights, None


class DiTSparseMoeBlock(nn.Module):
    def __init__(
        self, embed_dim: int, hidden: int, num_experts: int, num_experts_per_tok: int
    ) -> None:
        super().__init__()
        self.num_experts_per_tok = num_experts_per_tok
        self.experts = nn.ModuleList(SlicedMLP(embed_dim, hidden, 2) for _ in range(num_experts))
        self.gate = DiTGate(embed_dim, num_experts, num_experts_per_tok)
        self.n_shared_experts = 2
        self.shared_experts = SlicedMLP(embed_dim, embed_dim * 2, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, shape = hidden_states, hidden_states.shape
        ids, weights, _aux_loss = self.gate(hidden_states)
        x_TD = hidden_states.view(-1, shape[-1])
        y = self.moe_infer(x_TD, ids.view(-1), weights.view(-1, 1)).view(*shape)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, flat_ids: Tensor, flat_weights: Tensor) -> Tensor:
        cache = torch.zeros_like(x)
        order = flat_ids.argsort()
        ends = flat_ids.bincount().cpu().numpy().cumsum(0)
        tokens = order // self.num_experts_per_tok
        for index, end in enumerate(ends):
            begin = 0 if index == 0 else ends[index - 1]
            if begin == end:
                continue
            chosen = tokens[begin:end]
            result = self.experts[index](x[chosen])
            result.mul_(flat_weights[order[begin:end]])
            cache = cache.to(result.dtype)
            positions = chosen.view(-1, 1).repeat(1, x.shape[-1])
            cache.scatter_reduce_(0, positions, result, reduce="sum")
        return cache


class OpenMoeMLP(nn.Module):
    """Three input products: the first one's halves gate each other, and both gate the second."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size * 2, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.gate_proj(x).chunk(2, dim=-1)
        return self.down_proj(value * (gate * torch.sigmoid(gate)) * self.up_proj(x))


class OpenMoeLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate_weight = nn.Parameter(torch.empty(num_experts, dim))
        self.experts = nn.ModuleList(OpenMoeMLP(dim, hidden) for _ in range(num_experts))

    def forward(self, inputs: Tensor) -> Tensor:
        scores = F.softmax(F.linear(inputs, self.gate_weight), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        out = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            result = expert(inputs[token]) * weights[token, slot, None]
            out.index_add_(0, token, result)
        return out


class GptOssMLPBlock(nn.Module):
    """OpenAI's own block: norm, router, experts and the residual sum in one module."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = num_experts, TOP_K
        self.swiglu_limit = 7.0
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.gate = nn.Linear(hidden_size, num_experts)
        self.mlp1_weight = nn.Parameter(
            torch.empty(num_experts, intermediate_size * 2, hidden_size)
        )
        self.mlp1_bias = nn.Parameter(torch.empty(num_experts, intermediate_size * 2))
        self.mlp2_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.mlp2_bias = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(x)
        best, ids = torch.topk(self.gate(t), k=self.experts_per_token, dim=-1, sorted=True)
        weights = F.softmax(best, dim=1)
        t = torch.einsum("beck,bk->bec", self.mlp1_weight[ids, ...], t) + self.mlp1_bias[ids]
        gate, up = t[..., ::2], t[..., 1::2]
        gate = gate.clamp(min=None, max=self.swiglu_limit)
        up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        t = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        t = torch.einsum("beck,bek->bec", self.mlp2_weight[ids, ...], t) + self.mlp2_bias[ids]
        return x + torch.einsum("bec,be->bc", t, weights)


CASES = [
    Case(
        name="grok-1",
        origin="xai-org/grok-1 model.py, and its port on the Hugging Face hub",
        make=lambda: Model(lambda: GrokMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K), "moe_block", first),
        moe_paths=in_blocks("moe_block"),
        notes="gated tanh GELU; every expert on every row",
    ),
    Case(
        name="arctic",
        origin="Snowflake/snowflake-arctic-base modeling_arctic.py",
        make=lambda: Model(
            lambda: ArcticMoE(DIM, HIDDEN, EXPERTS, TOP_K), "block_sparse_moe", first
        ),
        moe_paths=in_blocks("block_sparse_moe"),
        notes="returns (result, loss), the loss in evaluation too",
    ),
    Case(
        name="hunyuan-large",
        origin="Tencent/Tencent-Hunyuan-Large models/modeling_hunyuan.py",
        make=lambda: Model(lambda: HunYuanMoE(DIM, HIDDEN, EXPERTS, TOP_K)),
        moe_paths=in_blocks("mlp"),
        notes="dispatch and combine by [T, E, C] without drops; a shared MLP inside",
    ),
    Case(
        name="minimind",
        origin="jingyaogong/minimind model/model_minimind.py",
        make=lambda: Model(
            lambda: MiniMindMoE(DIM, HIDDEN, EXPERTS, TOP_K), call=MiniMindBlockCall()
        ),
        moe_paths=in_blocks("mlp"),
        notes="the parent reads aux_loss, a zero tensor in evaluation",
    ),
    Case(
        name="dit-moe",
        origin="feizc/DiT-MoE models.py",
        make=lambda: Model(lambda: DiTSparseMoeBlock(DIM, HIDDEN, EXPERTS, TOP_K), "moe"),
        moe_paths=in_blocks("moe"),
        notes="experts compute slice by slice",
    ),
    Case(
        name="openmoe",
        origin="hpcaitech/ColossalAI examples/language/openmoe/model/modeling_openmoe.py",
        make=lambda: Model(lambda: OpenMoeLayer(DIM, HIDDEN, EXPERTS, TOP_K), "mlp", flat),
        moe_paths=in_blocks("mlp"),
        convertible=False,
        reason="its experts have three products before the last: no form of the operator",
    ),
    Case(
        name="gpt-oss-reference",
        origin="openai/gpt-oss gpt_oss/torch/model.py",
        make=lambda: Model(lambda: GptOssMLPBlock(DIM, HIDDEN, EXPERTS), "mlp", flat),
        moe_paths=in_blocks("mlp"),
        notes="norm and residual inside; weights gathered per token; interleaved, clamped",
    ),
]
