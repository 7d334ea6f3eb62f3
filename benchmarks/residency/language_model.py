"""A small language model of bytes whose routers learn, to record where real text sends its tokens.

Legend: B sequences, L their length, T = B*L tokens, D model width, H hidden width, E experts,
K = top_k, V = 256 bytes.
"""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from benchmarks.common.layers import random_parameters
from custom_ops import RouterOptions
from custom_ops.routing import route

LENGTH = 256
_BATCH = 4
_WIDTH, _HEADS, _BLOCKS = 64, 4, 2
# Hidden rows that a token meets, in all of its experts together.
_ACTIVE_ROWS = 128
_BALANCE = 0.01


class RoutedMlp(nn.Module):
    """An MoE layer that keeps the choices of its last call."""

    def __init__(self, experts: int, router: RouterOptions) -> None:
        super().__init__()
        hidden = _ACTIVE_ROWS // router.top_k
        random = random_parameters(experts, _WIDTH, hidden, 2 * hidden, biases=False)
        self.router_weight = nn.Parameter(random["router_weight"])
        self.w1, self.w2 = nn.Parameter(random["w1"]), nn.Parameter(random["w2"] * hidden**-0.5)
        self.router = router
        self.ids_TK = torch.empty(0, router.top_k, dtype=torch.int64)
        self.imbalance = torch.zeros(())

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns rows of the same shape."""
        x_TD = x_BLD.flatten(0, 1)
        self.ids_TK, weights_TK = route(x_TD, self.router_weight, None, self.router)
        # The loss of Switch Transformers: 1 where every expert gets the same share.
        experts = len(self.router_weight)
        chosen_E = F.one_hot(self.ids_TK, experts).float().mean((0, 1))
        score_E = F.linear(x_TD, self.router_weight).softmax(-1).mean(0)
        self.imbalance = experts * (chosen_E * score_E).sum()
        y_TD: Tensor = torch.ops.moe.experts(
            *(x_TD, self.ids_TK, weights_TK, self.w1, None, self.w2, None),
            activation="silu",
            gated=True,
        )
        return y_TD.view_as(x_BLD)


class Block(nn.Module):
    """Causal attention, then experts, each added to its normalised input."""

    def __init__(self, experts: int, router: RouterOptions) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH) for _ in range(2))
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.mlp = RoutedMlp(experts, router)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns rows of the same shape."""
        qkv = self.qkv(self.norms[0](x_BLD)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BLD = x_BLD + self.out(mixed)
        y_BLD: Tensor = x_BLD + self.mlp(self.norms[1](x_BLD))
        return y_BLD


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, experts: int, router: RouterOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.positions = nn.Embedding(LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(Block(experts, router) for _ in range(_BLOCKS))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 256, bias=False)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    @property
    def layers(self) -> list[RoutedMlp]:
        """The MoE layers, the first one first."""
        return [module for module in self.modules() if isinstance(module, RoutedMlp)]

    def forward(self, bytes_BL: Tensor) -> Tensor:
        """Returns logits ``[B, L, V]``."""
        x_BLD = self.embedding(bytes_BL) + self.positions.weight[: bytes_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        logits: Tensor = self.head(self.norm(x_BLD))
        return logits


def train(model: ByteModel, text: bytes, *, steps: int, seconds: float) -> tuple[int, float]:
    """Trains on random windows of a text, until the steps are made or the seconds have passed.

    Returns:
        The steps, and the mean loss of the last twenty, in bits a byte.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    deadline, losses = time.monotonic() + seconds, list[float]()
    while len(losses) < steps and time.monotonic() < deadline:
        starts = torch.randint(len(data) - LENGTH, (_BATCH,), generator=generator)
        windows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        balance = sum(layer.imbalance for layer in model.layers)
        optimiser.zero_grad()
        (loss + _BALANCE * balance).backward()
        optimiser.step()
        losses.append(loss.item())
    last = losses[-20:]
    return len(losses), sum(last) / len(last) / math.log(2)


@torch.inference_mode()
def choices(model: ByteModel, text: bytes, tokens: int) -> tuple[Tensor, float]:
    """Returns the experts that the tokens of a text choose, and the loss in bits a byte.

    The text is read in windows of :data:`LENGTH`, each from its own beginning. The experts are
    uint8, ``[layers, tokens, K]``, best first.
    """
    data = torch.frombuffer(bytearray(text[: tokens + 1]), dtype=torch.uint8).long()
    logits = model(data[:-1].view(-1, LENGTH))
    loss = F.cross_entropy(logits.flatten(0, 1), data[1:])
    return torch.stack([layer.ids_TK for layer in model.layers]).to(
        torch.uint8
    ), loss.item() / math.log(2)
