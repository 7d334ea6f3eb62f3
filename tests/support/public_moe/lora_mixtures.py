"""Mixtures of LoRAs around a frozen layer, and mixtures of single linear layers.

Legend: B batch, L length, T tokens, D model width, E experts, K top_k, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import DIM, EXPERTS, HIDDEN, TOP_K, Block, Case, Model, in_blocks

RANK, ALPHA = 4, 8


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LoraLinear(nn.Module):
    """Adds a low-rank product to a residual that its caller computed."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer_ = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base_layer.out_features, bias=False)
        nn.init.normal_(self.lora_A.weight, std=0.3)
        nn.init.normal_(self.lora_B.weight, std=0.3)
        self.dropout_, self.scaling_ = nn.Dropout(0.05), ALPHA / RANK

    def lora_forward(self, residual: Tensor, hidden_states: Tensor) -> Tensor:
        result = self.lora_B(self.lora_A(self.dropout_(hidden_states))) * self.scaling_
        return residual + result.to(residual.dtype)


class MixLoraSparseMoe(nn.Module):
    """Keeps its experts in a plain dictionary, so that they are not in its parameters."""

    def __init__(self, base_layer: nn.Module, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.dtype_, self.gate_ = torch.float32, torch.randn(num_experts, DIM) * 0.3
        self.base_layer_, self.act_fn_ = base_layer, nn.SiLU()
        self.experts_: dict[str, LoraLinear] = {}
        self.num_experts_, self.topk_, self.jitter_noise_ = num_experts, top_k, 0.0
        for name in ("gate_proj", "up_proj", "down_proj"):
            for index in range(num_experts):
                lora = LoraLinear(getattr(base_layer, name)).eval()
                self.experts_[f"experts.{index}.{name}"] = lora

    def _llama_forward(self, mask: Tensor, x_TD: Tensor) -> list[Tensor]:
        gate, up = self.base_layer_.gate_proj(x_TD), self.base_layer_.up_proj(x_TD)
        results = []
        for index in range(self.num_experts_):
            _, token = torch.where(mask[index])
            loras = [
                self.experts_[f"experts.{index}.{name}"]
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
            rows = x_TD[None, token].reshape(-1, x_TD.shape[-1])
            gates = loras[0].lora_forward(gate[None, token].reshape(-1, gate.shape[-1]), rows)
            ups = loras[1].lora_forward(up[None, token].reshape(-1, up.shape[-1]), rows)
            hidden = self.act_fn_(gates) * ups
            results.append(loras[2].lora_forward(self.base_layer_.down_proj(hidden), hidden))
        return results

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        x_TD = hidden_states.view(-1, width).to(self.dtype_)
        logits = F.linear(x_TD, self.gate_.to(x_TD))
        weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=self.dtype_), self.topk_, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        out = torch.zeros((batch * length, width), dtype=self.dtype_, device=x_TD.device)
        mask = F.one_hot(ids, num_classes=self.num_experts_).permute(2, 1, 0)
        results = self._llama_forward(mask, x_TD)
        for index in range(self.num_experts_):
            slot, token = torch.where(mask[index])
            out.index_add_(0, token, results[index] * weights[token, slot, None])
        return out.reshape(batch, length, width).to(hidden_states.dtype)


def mixlora() -> LlamaMLP:
    """Replaces the forward of an MLP's instance, as the adapter is injected."""
    mlp = LlamaMLP(DIM, HIDDEN)
    mlp.mixlora_moes = {"default": MixLoraSparseMoe(mlp, EXPERTS, TOP_K)}
    mlp.forward = mlp.mixlora_moes["default"].forward
    return mlp


class LinearMoE(nn.Linear):
    """MoLA's linear layer: its own matrix plus the LoRAs that a router chooses.

    ``real`` of its adapters exist, as in AdaMoE: the router also chooses among others, which
    compute nothing.
    """

    def __init__(
        self, in_features: int, out_features: int, number_experts: int, top_k: int, real: int
    ) -> None:
        super().__init__(in_features, out_features)
        self.weight.requires_grad = False
        self.number_experts, self.top_k, self.real = number_experts, top_k, real
        self.fan_in_fan_out, self.active_adapter = False, "default"
        self.scaling = {"default": ALPHA / RANK}
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.05)})
        self.router = nn.ModuleDict({"router": nn.Linear(in_features, number_experts, bias=False)})
        names = [f"default_{index}" for index in range(real)]
        self.lora_A = nn.ModuleDict({n: nn.Linear(in_features, RANK, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(RANK, out_features, bias=False) for n in names})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = F.linear(x, self.weight, bias=self.bias)
        batch, length, width = x.shape
        x = x.view(-1, width)
        logits = self.router["router"](x)
        scores = F.softmax(logits, dim=1, dtype=torch.float)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        if self.real < self.number_experts:
            exist = (ids >= 0) & (ids <= self.real - 1)
            chosen = weights * exist.float()
            total = chosen.sum(dim=-1, keepdim=True)
            total[total == 0] = 1
            weights = chosen / total + weights * (~exist).float()
        else:
            weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        mask = F.one_hot(ids, num_classes=self.number_experts).permute(2, 1, 0)
        out = torch.zeros((batch * length, self.out_features), dtype=x.dtype, device=x.device)
        for index in range(self.real):
            name = f"{self.active_adapter}_{index}"
            slot, token = torch.where(mask[index])
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            rows = self.lora_dropout[self.active_adapter](x[None, tokens].reshape(-1, width))
            rows = self.lora_B[name](self.lora_A[name](rows)) * self.scaling[self.active_adapter]
            out.index_add_(0, token, rows * weights[tokens, slots, None])
        result += out.reshape(batch, length, self.out_features)
        return result, logits


class MoeLayer(nn.Module):
    """mergoo's: every expert is one linear layer; indexes samples and positions."""

    def __init__(
        self, in_features: int, out_features: int, num_experts: int, num_experts_per_tok: int
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(in_features, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Linear(in_features, out_features) for _ in range(num_experts)
        )
        self.num_experts_per_tok = num_experts_per_tok
        self.in_features, self.out_features = in_features, out_features

    def forward(self, inputs: Tensor) -> Tensor:
        weights, ids = torch.topk(self.gate(inputs), self.num_experts_per_tok)
        weights = F.softmax(weights, dim=2, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros((inputs.shape[0], inputs.shape[1], self.out_features))
        for index, expert in enumerate(self.experts):
            sample, position, slot = torch.where(ids == index)
            rows = expert(inputs[sample, position])
            results[sample, position] += rows * weights[sample, position, slot].unsqueeze(-1)
        return results


class LoRAMoeLayer(nn.Module):
    """mergoo's LoRAs, with a rank and a scale of their own each."""

    def __init__(
        self, in_features: int, out_features: int, ranks: list[int], num_experts_per_tok: int
    ) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = len(ranks), num_experts_per_tok
        self.lora_dropout = nn.ModuleDict({})
        self.lora_A, self.lora_B = nn.ModuleDict({}), nn.ModuleDict({})
        self.base_layer = nn.Linear(in_features, out_features)
        self.gate = nn.Linear(in_features, self.num_experts, bias=False)
        self.active_adapters: list[str] = []
        self.scaling: dict[str, float] = {}
        for index, rank in enumerate(ranks):
            name = str(index)
            self.lora_dropout[name] = nn.Identity()
            self.lora_A[name] = nn.Linear(in_features, rank, bias=False)
            self.lora_B[name] = nn.Linear(rank, out_features, bias=False)
            self.scaling[name] = ALPHA / rank
            self.active_adapters.append(name)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.gate(x), self.num_experts_per_tok)
        weights = F.softmax(weights, dim=2, dtype=torch.float).to(x.dtype)
        result = self.base_layer(x)
        for index, name in enumerate(self.active_adapters):
            sample, position, slot = torch.where(ids == index)
            rows = self.lora_dropout[name](x[sample, position])
            rows = self.lora_B[name](self.lora_A[name](rows)) * self.scaling[name]
            result[sample, position] += rows * weights[sample, position, slot].unsqueeze(-1)
        return result


class LoraMoe(nn.Module):
    """LoRAMoE: all LoRAs, weighted by a softmax, on top of a residual that the caller computed."""

    def __init__(self, in_features: int, out_features: int, num_experts: int) -> None:
        super().__init__()
        self.base_layer_ = nn.Linear(in_features, out_features, bias=False)
        self.gate_ = nn.Linear(in_features, num_experts, bias=False)
        self.experts_, self.router_logits_ = num_experts, None
        self.loras_ = nn.ModuleList(LoraLinear(self.base_layer_) for _ in range(num_experts))

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = self.base_layer_(hidden_states)
        logits = self.gate_(hidden_states.to(torch.float32))
        self.router_logits_ = logits.reshape(-1, self.experts_)
        weights = F.softmax(logits, dim=-1, dtype=torch.float32)
        for index in range(self.experts_):
            result = self.loras_[index].lora_forward(torch.zeros_like(residual), hidden_states)
            residual = residual + torch.unsqueeze(weights[:, :, index], -1) * result
        return residual


class XLoraLinear(nn.Module):
    """Scales its input for every adapter; the model sets the scales before."""

    def __init__(self, in_features: int, out_features: int, adapters: int, number: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(in_features, out_features)
        names = [f"adapter_{index}" for index in range(adapters)]
        self.lora_A = nn.ModuleDict({n: nn.Linear(in_features, RANK, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(RANK, out_features, bias=False) for n in names})
        self.active_adapters, self.layer_number, self.top_k_lora = names, number, TOP_K

    def forward(self, x: Tensor, xlora_scalings: Tensor) -> Tensor:
        result = self.base_layer(x)
        scalings = xlora_scalings[:, :, self.layer_number, :]
        _, ids = torch.topk(scalings, k=self.top_k_lora, dim=-1)
        mask = torch.zeros_like(scalings, dtype=torch.bool)
        mask.scatter_(-1, ids, True)
        scalings = scalings * mask.to(scalings.dtype)
        for index, name in enumerate(self.active_adapters):
            scaled = x * scalings[:, :, index].unsqueeze(-1)
            result += self.lora_B[name](self.lora_A[name](scaled)) * (ALPHA / RANK)
        return result


class XLoraModel(nn.Module):
    """Runs twice: without adapters, to classify each position, then with their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Block(XLoraLinear(DIM, DIM, EXPERTS, number), "proj", self.call) for number in range(2)
        )
        self.classifier = nn.Linear(DIM, 2 * EXPERTS)
        self.head = nn.Linear(DIM, 5)
        self._scalings: Tensor | None = None

    def call(self, moe: nn.Module, x: Tensor) -> Tensor:
        return moe.base_layer(x) if self._scalings is None else moe(x, self._scalings)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        self._scalings = None
        logits = self.classifier(self.run(x))
        logits = logits.reshape(x.shape[0], x.shape[1], 2, EXPERTS)
        self._scalings = logits.softmax(dim=-1)
        result = self.head(self.run(x))
        self._scalings = None
        return result


def in_dictionary(moe: nn.Module) -> list[list[Tensor]]:
    loras = moe.mixlora_moes["default"].experts_
    names = ("gate_proj", "up_proj", "down_proj")
    return [
        [
            tensor
            for name in names
            for part in (loras[f"experts.{index}.{name}"],)
            for tensor in (part.lora_A.weight, part.lora_B.weight)
        ]
        for index in range(EXPERTS)
    ]


def by_name(moe: nn.Module) -> list[list[Tensor]]:
    return [[moe.lora_A[name].weight, moe.lora_B[name].weight] for name in moe.lora_A]


def pairs(moe: nn.Module) -> list[list[Tensor]]:
    return [[lora.lora_A.weight, lora.lora_B.weight] for lora in moe.loras_]


def pair(moe: nn.Module, x: Tensor) -> Tensor:
    result, _logits = moe(x)
    return result


MERGOO = "Leeroo-AI/mergoo mergoo/compose_layers.py"

CASES = [
    Case(
        name="mixlora",
        origin="TUDB-Labs/MixLoRA mixlora/model.py",
        make=lambda: Model(mixlora),
        moe_paths=in_blocks("mlp"),
        expert_slices=in_dictionary,
        convertible=False,
        reason="its experts are LoRAs of one MLP; another module's forward is set on the instance",
    ),
    Case(
        name="mola",
        origin="GCYZSL/MoLA src/mola_lora_hacked.py",
        make=lambda: Model(lambda: LinearMoE(DIM, DIM, EXPERTS, TOP_K, EXPERTS), "proj", pair),
        moe_paths=in_blocks("proj"),
        expert_slices=by_name,
        notes="a linear layer and LoRAs without an activation",
    ),
    Case(
        name="adamoe-lora",
        origin="CengZihao/AdaMoE exp_1/src/mola_lora_hacked.py",
        make=lambda: Model(lambda: LinearMoE(DIM, DIM, EXPERTS, 3, EXPERTS - 2), "proj", pair),
        moe_paths=in_blocks("proj"),
        num_experts=EXPERTS - 2,
        expert_slices=by_name,
        notes="a linear layer and LoRAs, two of which do not exist",
    ),
    Case(
        name="mergoo-linear",
        origin=MERGOO,
        make=lambda: Model(lambda: MoeLayer(DIM, DIM, EXPERTS, TOP_K), "proj"),
        moe_paths=in_blocks("proj"),
        convertible=False,
        reason="its experts are single linear layers",
    ),
    Case(
        name="mergoo-lora",
        origin=MERGOO,
        make=lambda: Model(lambda: LoRAMoeLayer(DIM, DIM, [4, 4, 8, 4, 8, 4], TOP_K), "proj"),
        moe_paths=in_blocks("proj"),
        expert_slices=by_name,
        convertible=False,
        reason="a linear layer and LoRAs of different ranks",
    ),
    Case(
        name="loramoe",
        origin="TUDB-Labs/MoE-PEFT moe_peft/adapters/loramoe/model.py",
        make=lambda: Model(lambda: LoraMoe(DIM, DIM, EXPERTS), "proj"),
        moe_paths=in_blocks("proj"),
        expert_slices=pairs,
        convertible=False,
        reason="a linear layer and all LoRAs, without an activation",
    ),
    Case(
        name="xlora",
        origin="EricLBuehler/xlora src/xlora/xlora_insertion.py",
        make=XLoraModel,
        moe_paths=in_blocks("proj"),
        expert_slices=by_name,
        notes="a second tensor: the scales of all layers and adapters",
    ),
]
