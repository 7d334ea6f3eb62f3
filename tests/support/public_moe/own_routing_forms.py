"""Routers and experts in the form of their own repository: attention, sigmoid, lists of parts.

Legend: B batch, L length, T tokens, D model width, H hidden width, E experts, K top_k, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.fastmoe import _Expert
from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Case, Model, first, in_blocks


class MegatronMLP(nn.Module):
    """Multiplies its hidden values by the weight of the row; returns (result, bias)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)
        self.activation_func = F.silu

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None
    ) -> tuple[Tensor, None]:
        gate, up = torch.chunk(self.linear_fc1(hidden_states), 2, dim=-1)
        hidden = self.activation_func(gate) * up
        if per_token_scale is not None:
            dtype = hidden.dtype
            hidden = (hidden * per_token_scale.unsqueeze(-1)).to(dtype)
        return self.linear_fc2(hidden), None


class SequentialMLP(nn.Module):
    def __init__(self, num_local_experts: int, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.local_experts = nn.ModuleList(
            MegatronMLP(hidden_size, ffn_hidden_size) for _ in range(num_local_experts)
        )

    def forward(
        self, permuted_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist()
        parts = torch.split(permuted_hidden_states, counts)
        probs = torch.split(permuted_probs, counts)
        results = []
        for expert, rows, scales in zip(self.local_experts, parts, probs):
            result, _bias = expert(rows, scales)
            results.append(result)
        return torch.cat(results, dim=0), None


class TopKRouter(nn.Module):
    """Sigmoid scores, a bias for the selection, groups; returns maps ``[T, E]``."""

    def __init__(
        self, hidden_size: int, num_experts: int, topk: int, num_groups: int, group_topk: int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.topk, self.num_experts, self.score_function = topk, num_experts, "sigmoid"
        self.num_groups, self.group_topk, self.scaling_factor = num_groups, group_topk, 2.5

    def _group_limited(self, scores: Tensor) -> Tensor:
        count = scores.shape[0]
        grouped = scores.view(count, self.num_groups, -1)
        best = grouped.topk(self.topk // self.group_topk, dim=-1)[0].sum(dim=-1)
        chosen = torch.topk(best, k=self.group_topk, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best).scatter_(1, chosen, 1)
        size = self.num_experts // self.num_groups
        mask = mask.unsqueeze(-1).expand(count, self.num_groups, size).reshape(count, -1)
        masked = scores.masked_fill(~mask.bool(), float("-inf"))
        return torch.topk(masked, k=self.topk, dim=-1)[1]

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(input, self.weight).view(-1, self.num_experts)
        scores = torch.sigmoid(logits.float())
        ids = self._group_limited(scores + self.expert_bias.float())
        scores = torch.gather(scores, dim=1, index=ids)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        probs = (probs * self.scaling_factor).type_as(logits)
        routing_probs = torch.zeros_like(logits).scatter(1, ids, probs)
        routing_map = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
        return routing_probs, routing_map


class SharedExpertMLP(MegatronMLP):
    """Has a sigmoid gate of its own."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__(hidden_size, ffn_hidden_size)
        self.use_shared_expert_gate = True
        self.gate_weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None) -> Tensor:
        result, _bias = super().forward(hidden_states)
        return result * F.sigmoid(F.linear(hidden_states, self.gate_weight))


class MegatronMoELayer(nn.Module):
    """Megatron's names and layouts: ``[L, B, D]``; weights travel with the permuted rows."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, 4, num_groups=4, group_topk=2)
        self.experts = SequentialMLP(num_experts, hidden_size, ffn_hidden_size)
        self.shared_experts = SharedExpertMLP(hidden_size, ffn_hidden_size)
        self.topk = 4

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        probs, routing_map = self.router(hidden_states)
        shape = hidden_states.shape
        x_TD = hidden_states.view(-1, shape[-1])
        count = x_TD.shape[0]
        map_ET = routing_map.bool().T.contiguous()
        order = map_ET.reshape(-1).argsort(descending=True, stable=True)[: count * self.topk]
        tokens = order % count
        permuted_probs = probs.T.contiguous().reshape(-1)[order]
        rows, _bias = self.experts(
            x_TD.index_select(0, tokens), routing_map.sum(dim=0), permuted_probs
        )
        out = torch.zeros(x_TD.shape, dtype=rows.dtype, device=rows.device)
        out.scatter_add_(0, tokens.unsqueeze(1).expand(-1, shape[-1]), rows)
        return out.view(shape) + self.shared_experts(hidden_states), None


class ParallelAttentionRouter(nn.Module):
    """Yuan's: each expert's query attends to all experts' keys; values are the logits."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.hidden_size, self.projection_size = hidden_size, num_experts
        self.query = nn.Linear(hidden_size, num_experts, bias=False)
        self.key = nn.Linear(hidden_size, num_experts, bias=False)
        self.value = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            project(hidden_states) for project in (self.query, self.key, self.value)
        )
        batch, length, experts = query.shape
        query, key, value = (
            each.float().view(batch, length, experts, 1) for each in (query, key, value)
        )
        attention = F.softmax(torch.matmul(query, key.transpose(2, 3)), dim=-1)
        return torch.matmul(attention, value).view(batch * length, experts)


class YuanExpertMLP(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gated_linear_unit, self.ffn_hidden_size = True, ffn_hidden_size
        self.w1 = nn.Linear(hidden_size, ffn_hidden_size * 2, bias=False)
        self.act_fn = nn.SiLU()
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.chunk(self.w1(x), 2, dim=-1)
        return self.w2(self.act_fn(gate) * up)


class YuanMoeLayer(nn.Module):
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.norm_topk_prob = num_experts, top_k, True
        self.hidden_size = hidden_size
        self.gate = ParallelAttentionRouter(hidden_size, num_experts)
        self.experts = nn.ModuleList(
            YuanExpertMLP(hidden_size, ffn_hidden_size) for _ in range(num_experts)
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        logits = self.gate(hidden_states)
        x_TD = hidden_states.view(-1, width)
        weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x_TD.dtype)
        out = torch.zeros((batch * length, width), dtype=x_TD.dtype, device=x_TD.device)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, token = torch.where(mask[index])
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            rows = x_TD[None, tokens].reshape(-1, width)
            result = self.experts[index](rows) * weights[tokens, slots, None]
            out.index_add_(0, token, result.to(x_TD.dtype))
        return out.reshape(batch, length, width), logits


class AriaRouter(nn.Module):
    """Counts by a histogram of floats."""

    def __init__(self, hidden_size: int, num_experts: int, topk: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.num_experts, self.topk = num_experts, topk

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(input, self.weight).view(-1, self.num_experts)
        best, ids = torch.topk(logits, k=self.topk, dim=1)
        scores = torch.softmax(best, dim=-1, dtype=torch.float32).type_as(logits)
        counts = torch.histc(
            ids.flatten().float(), bins=self.num_experts, min=0, max=self.num_experts - 1
        )
        return scores, ids, counts


class GroupedGEMM(nn.Module):
    """Slices rows by cumulative counts, and writes the results into slices."""

    def __init__(self, in_features: int, out_features: int, groups: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(groups, in_features, out_features))

    def forward(self, input: Tensor, tokens_per_expert: Tensor) -> Tensor:
        out = torch.zeros(input.shape[0], self.out_features, dtype=input.dtype)
        ends = torch.cumsum(tokens_per_expert.cpu().long(), dim=0)
        ends = torch.cat((torch.zeros(1, dtype=torch.long), ends))
        for index in range(self.weight.shape[0]):
            start, end = ends[index], ends[index + 1]
            out[start:end] = torch.matmul(input[start:end], self.weight[index])
        return out


class AriaGroupedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.fc1 = GroupedGEMM(hidden_size, intermediate_size * 2, num_experts)
        self.fc2 = GroupedGEMM(intermediate_size, hidden_size, num_experts)

    def forward(self, permuted_tokens: Tensor, tokens_per_expert: Tensor) -> Tensor:
        gate, up = torch.chunk(self.fc1(permuted_tokens, tokens_per_expert), 2, dim=-1)
        return self.fc2(F.silu(gate) * up, tokens_per_expert)


class TokenDispatcher:
    """Is no module; keeps the permutation between its two methods."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.hidden_states_shape: torch.Size | None = None
        self.mapping: Tensor | None = None

    def token_permutation(self, hidden_states: Tensor, indices: Tensor) -> Tensor:
        self.hidden_states_shape = hidden_states.shape
        rows = hidden_states.view(-1, hidden_states.size(-1))
        self.mapping = torch.argsort(indices.flatten(), stable=True)
        return rows.index_select(0, self.mapping // self.topk)

    def token_unpermutation(self, permuted_tokens: Tensor, scores: Tensor) -> Tensor:
        rows = torch.zeros((scores.numel(), permuted_tokens.size(1)), dtype=permuted_tokens.dtype)
        rows.index_copy_(0, self.mapping, permuted_tokens)
        rows = rows.reshape(-1, self.topk, permuted_tokens.size(1)) * scores.unsqueeze(-1)
        return rows.sum(dim=1).type_as(permuted_tokens).view(self.hidden_states_shape)


class AriaSharedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class AriaMoELayer(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, topk: int
    ) -> None:
        super().__init__()
        self.router = AriaRouter(hidden_size, num_experts, topk)
        self.token_dispatcher = TokenDispatcher(topk)
        self.experts = AriaGroupedMLP(hidden_size, intermediate_size, num_experts)
        self.shared_experts = AriaSharedMLP(hidden_size, intermediate_size * 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores, ids, counts = self.router(hidden_states)
        rows = self.token_dispatcher.token_permutation(hidden_states, ids)
        rows = self.experts(rows, counts)
        out = self.token_dispatcher.token_unpermutation(rows, scores)
        out += self.shared_experts(hidden_states)
        return out


class SigmaMoE(nn.Module):
    """Sigmoid scores, not divided by their sum; keys and values; a loop over the choices.

    Returns (result, loss), also in evaluation.
    """

    def __init__(self, dmodel: int, n_experts: int, expert_size: int, n_heads: int) -> None:
        super().__init__()
        self.k_dim = self.k_vec_dim = self.v_dim = dmodel
        self.n_experts, self.expert_size, self.n_heads = n_experts, expert_size, n_heads
        self.selection_mode, self.activation_after_topk = "sigmoid", False
        self.activation, self.bias, self.o_bias = F.relu, None, None
        self.keys = nn.Parameter(torch.empty(n_experts, dmodel, expert_size))
        self.values = nn.Parameter(torch.empty(n_experts, expert_size, dmodel))
        self.expert_sel = nn.Parameter(torch.empty(n_experts, dmodel))

    def cvmm(self, x: Tensor, ids: Tensor, matrices: Tensor) -> Tensor:
        """In place of the kernel: each row through the matrix of its expert."""
        return torch.matmul(x.unsqueeze(-2), matrices[ids]).squeeze(-2)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        raw = F.linear(input, self.expert_sel, None)
        mean = F.log_softmax(raw.flatten(0, -2), dim=-1).logsumexp(-2)
        mean = mean - torch.log(torch.tensor(raw.shape[0] * raw.shape[1], dtype=raw.dtype))
        loss = (mean * mean.exp()).sum(-1).mean()
        values, ids = torch.sigmoid(raw).topk(self.n_heads, dim=-1, sorted=False)
        out = 0
        for head in range(self.n_heads):
            scores = self.activation(self.cvmm(input, ids[..., head], self.keys))
            scores = scores * values[..., head][..., None]
            out = out + self.cvmm(scores, ids[..., head], self.values)
        return out.view(*input.shape[:-1], self.v_dim), loss


class MoEFeedForward(nn.Module):
    """Three lists of linear layers; a loop over the experts that occur."""

    def __init__(self, emb_dim: int, hidden_dim: int, num_experts: int, per_token: int) -> None:
        super().__init__()
        self.num_experts_per_tok, self.num_experts, self.emb_dim = per_token, num_experts, emb_dim
        self.gate = nn.Linear(emb_dim, num_experts, bias=False)

        def layers(inputs: int, outputs: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for _ in range(num_experts))

        self.fc1, self.fc2 = layers(emb_dim, hidden_dim), layers(emb_dim, hidden_dim)
        self.fc3 = layers(hidden_dim, emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        best, ids = torch.topk(self.gate(x), self.num_experts_per_tok, dim=-1)
        probs = torch.softmax(best, dim=-1)
        batch, length, _ = x.shape
        flat = x.reshape(batch * length, -1)
        out = torch.zeros(batch * length, self.emb_dim, device=x.device, dtype=x.dtype)
        ids = ids.reshape(-1, self.num_experts_per_tok)
        probs = probs.reshape(-1, self.num_experts_per_tok)
        for each in torch.unique(ids):
            index = int(each.item())
            mask = ids == index
            if not mask.any():
                continue
            tokens = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
            if tokens.numel() == 0:
                continue
            rows = flat.index_select(0, tokens)
            hidden = F.silu(self.fc1[index](rows)) * self.fc2[index](rows)
            result = self.fc3[index](hidden)
            slots = mask[tokens].int().argmax(dim=-1, keepdim=True)
            chosen = torch.gather(probs.index_select(0, tokens), dim=-1, index=slots).squeeze(-1)
            out.index_add_(0, tokens, result * chosen.unsqueeze(-1))
        return out.reshape(batch, length, self.emb_dim)


class GPTMLP(nn.Module):
    def __init__(self, n_embd: int, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(n_embd, hidden), nn.Linear(hidden, n_embd)
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class ExpertChoiceMoE(nn.Module):
    """Experts choose tokens of the batch, at most as many as of the batch trained on."""

    def __init__(self, n_embd: int, hidden: int, num_experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.n_experts, self.capacity_factor = num_experts, capacity_factor
        self.experts = nn.ModuleList(GPTMLP(n_embd, hidden) for _ in range(num_experts))
        self.router = nn.Linear(n_embd, num_experts, bias=False)
        self.softmax_order, self.top_k = "softmax_topk", int(capacity_factor * 4 * 16 / num_experts)

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = inputs.view(-1, inputs.shape[-1])
        top_k = min(self.top_k, int(self.capacity_factor * rows.shape[0] / self.n_experts))
        logits = self.router(rows)
        scores = F.softmax(logits, dim=-1, dtype=torch.float32)
        weights, tokens = torch.topk(scores.T, top_k)
        results = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            results[tokens[index]] += weights[index, :, None] * expert(rows[tokens[index]])
        return results.view_as(inputs), {"router_logits": logits, "selected_experts": tokens}


class MLPMoE(nn.Module):
    """CuMo's projector: a loop over samples; returns the tokens and two losses."""

    def __init__(
        self, num_experts: int, num_selected: int, mm_channels: int, channels: int
    ) -> None:
        super().__init__()
        self.num_experts, self.num_selected = num_experts, num_selected
        self.mm_channels, self.channels = mm_channels, channels
        self.gate = nn.Linear(mm_channels, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(mm_channels, channels), nn.GELU(), nn.Linear(channels, channels)
            )
            for _ in range(num_experts)
        )

    def forward(self, x_img: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x_img)
        z_loss = torch.square(torch.logsumexp(logits, dim=-1)).mean()
        scores = F.softmax(logits, dim=-1, dtype=torch.float).to(x_img.dtype)
        weights, ids = torch.topk(scores, self.num_selected)
        hits = F.one_hot(ids.permute(2, 0, 1), self.num_experts).float()[0]
        loss = (scores.mean(dim=-2) * hits.mean(dim=-2)).mean() * float(self.num_experts**2)
        weights = weights / torch.sum(weights, dim=-1, keepdim=True).to(x_img.dtype)
        results = torch.zeros((x_img.shape[0], x_img.shape[1], self.channels))
        for sample in range(x_img.shape[0]):
            for index, expert in enumerate(self.experts):
                token, slot = torch.where(ids[sample] == index)
                rows = expert(x_img[sample][token])
                results[sample][token] += weights[sample][token, slot, None] * rows
        return results, loss, z_loss


class HyperRouterGate(nn.Module):
    """A network computes the gate's matrix from an embedding, in every call.

    The first call removes the gate's own parameters; the modules here are as after that.
    """

    def __init__(self, d_model: int, num_expert: int, top_k: int, hyper_size: int) -> None:
        super().__init__()
        self.tot_expert, self.top_k, self.d_model = num_expert, top_k, d_model
        self.embedding = nn.Parameter(torch.empty(1, d_model))
        self.hypernet = nn.Sequential(
            nn.Linear(d_model, hyper_size),
            nn.ReLU(),
            nn.Linear(hyper_size, d_model * num_expert + num_expert),
        )
        self.gate = nn.Linear(d_model, num_expert)
        del self.gate.weight, self.gate.bias
        self.gate.weight = self.gate.bias = torch.empty(0)

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        self.hypernet_outputs = self.hypernet(self.embedding)[0]
        weights = self.hypernet_outputs.reshape([self.tot_expert, -1])
        del self.gate.weight
        self.gate.weight = weights[:, :-1]
        del self.gate.bias
        self.gate.bias = weights[:, -1]
        gate = self.gate(inp)
        best, ids = torch.topk(gate, k=self.top_k, dim=-1, largest=True, sorted=False)
        return ids, F.softmax(best.view(-1, self.top_k), dim=-1)


class HyperRouterMoE(nn.Module):
    """FastMoE's layer around that gate."""

    def __init__(self, d_model: int, d_hidden: int, num_expert: int, top_k: int) -> None:
        super().__init__()
        self.num_expert, self.d_model, self.top_k = num_expert, d_model, top_k
        self.gate = HyperRouterGate(d_model, num_expert, top_k, hyper_size=16)
        self.experts = _Expert(num_expert, d_model, d_hidden, nn.ReLU())

    def forward(self, inp: Tensor) -> Tensor:
        shape = inp.shape
        inp = inp.reshape(-1, self.d_model)
        ids, scores = self.gate(inp)
        order = torch.sort(ids.reshape(-1))[1]
        counts = torch.bincount(ids.reshape(-1), minlength=self.num_expert).cpu()
        rows = self.experts(inp.index_select(0, order // self.top_k), counts)
        out = torch.zeros_like(rows).index_copy_(0, order, rows)
        out = out.view(-1, self.top_k, self.d_model)
        return torch.bmm(scores.view(-1, 1, self.top_k), out).reshape(shape)


def three_lists(moe: nn.Module) -> list[list[Tensor]]:
    lists = (moe.fc1, moe.fc2, moe.fc3)
    return [[each[index].weight for each in lists] for index in range(moe.num_experts)]


def local(moe: nn.Module) -> list[list[Tensor]]:
    return [list(expert.parameters()) for expert in moe.experts.local_experts]


def stacked(moe: nn.Module) -> list[list[Tensor]]:
    stacks = [*moe.experts.parameters()]
    return [[stack[index] for stack in stacks] for index in range(len(stacks[0]))]


def length_first(moe: nn.Module, x: Tensor) -> Tensor:
    result, _bias = moe(x.transpose(0, 1).contiguous())
    return result.transpose(0, 1)


CASES = [
    Case(
        name="megatron-sequential",
        origin="NVIDIA/Megatron-LM megatron/core/transformer/moe/moe_utils.py, experts.py",
        make=lambda: Model(lambda: MegatronMoELayer(DIM, HIDDEN, 8), "mlp", length_first),
        moe_paths=in_blocks("mlp"),
        num_experts=8,
        expert_slices=local,
        notes="sigmoid, bias, groups; a map [T, E]; weights multiply the experts' hidden values",
    ),
    Case(
        name="yuan-attention-router",
        origin="IEIT-Yuan/Yuan2.0-M32 3rd_party/AutoGPTQ/auto_gptq/modeling/yuan_moe_hf_model.py",
        make=lambda: Model(lambda: YuanMoeLayer(DIM, HIDDEN, EXPERTS, TOP_K), "mlp", first),
        moe_paths=in_blocks("mlp"),
        notes="logits from an attention among experts; indexes by lists",
    ),
    Case(
        name="aria",
        origin="rhymes-ai/Aria aria/model/moe_lm.py",
        make=lambda: Model(lambda: AriaMoELayer(DIM, HIDDEN, EXPERTS, TOP_K)),
        moe_paths=in_blocks("mlp"),
        expert_slices=stacked,
        notes="a dispatcher that is no module; a histogram; writes into slices; shared experts",
    ),
    Case(
        name="sigma-moe",
        origin="RobertCsordas/moe paper/moe_layer_simple/moe_layer_simple.py",
        make=lambda: Model(lambda: SigmaMoE(DIM, EXPERTS, HIDDEN, TOP_K), "pkm", first),
        moe_paths=in_blocks("pkm"),
        notes="keys, values, heads; sigmoid scores that do not sum up to 1",
    ),
    Case(
        name="rasbt-qwen3-moe",
        origin="rasbt/LLMs-from-scratch pkg/llms_from_scratch/qwen3.py",
        make=lambda: Model(lambda: MoEFeedForward(DIM, HIDDEN, EXPERTS, TOP_K), "ff"),
        moe_paths=in_blocks("ff"),
        expert_slices=three_lists,
        notes="three lists of linear layers; a loop over the experts that occur",
    ),
    Case(
        name="nanogpt-expert-choice",
        origin="swiss-ai/MoE moe.py",
        make=lambda: Model(lambda: ExpertChoiceMoE(DIM, HIDDEN, EXPERTS, 2.0), "mlp", first),
        moe_paths=in_blocks("mlp"),
        exact=True,
        notes="experts choose tokens, which it returns in a dictionary with the logits",
    ),
    Case(
        name="cumo-projector",
        origin="SHI-Labs/CuMo cumo/model/multimodal_projector/builder.py",
        make=lambda: Model(lambda: MLPMoE(EXPERTS, TOP_K, DIM, DIM), "mm_projector", first),
        moe_paths=in_blocks("mm_projector"),
        notes="a loop over the samples of a batch; two losses, in evaluation too",
    ),
    Case(
        name="hyper-router",
        origin="giangdip2410/HyperRouter custom_gate.py",
        make=lambda: Model(lambda: HyperRouterMoE(DIM, HIDDEN, EXPERTS, TOP_K), "mlp"),
        moe_paths=in_blocks("mlp"),
        expert_slices=stacked,
        notes="replaces the matrix of its gate in every call by one that a network computes",
    ),
]
