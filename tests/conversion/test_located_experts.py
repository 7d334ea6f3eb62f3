"""Where experts are found: lists of their parts, and what only looks like experts."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion import convertible_modules
from dynamo_moe.modules import ConvertedModule

WIDTH, HIDDEN, COUNT = 16, 24, 6


def linears(inputs: int, outputs: int, bias: bool = False) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=bias) for _ in range(COUNT)]


class Parts(nn.Module):
    """An expert's linear layers are in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.add_lists()

    def add_lists(self) -> None:
        self.fc1 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc2 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc3 = nn.ModuleList(linears(HIDDEN, WIDTH))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        return self.fc3[index](F.silu(self.fc1[index](x_TD)) * self.fc2[index](x_TD))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, WIDTH)
        weights_TK, ids_TK = self.gate(x_TD).softmax(dim=-1).topk(2, dim=-1)
        y_TD = torch.zeros_like(x_TD)
        for index in range(COUNT):
            weights_T1 = (weights_TK * (ids_TK == index)).sum(dim=-1, keepdim=True)
            y_TD = y_TD + self.expert(index, x_TD) * weights_T1
        return y_TD.view(x.shape)


class TwoLists(Parts):
    def add_lists(self) -> None:
        self.experts_in = nn.ModuleList(linears(WIDTH, HIDDEN, bias=True))
        self.experts_out = nn.ModuleList(linears(HIDDEN, WIDTH, bias=True))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        return self.experts_out[index](F.gelu(self.experts_in[index](x_TD)))


class Dictionaries(Parts):
    """Gate and up are one matrix; members have an activation."""

    def add_lists(self) -> None:
        names = [f"e{index}" for index in range(COUNT)]
        inner = [nn.Sequential(layer, nn.Identity()) for layer in linears(WIDTH, 2 * HIDDEN)]
        self.inner = nn.ModuleDict(dict(zip(names, inner, strict=True)))
        self.outer = nn.ModuleDict(dict(zip(names, linears(HIDDEN, WIDTH), strict=True)))

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        gate, up = self.inner[f"e{index}"](x_TD).chunk(2, dim=-1)
        return self.outer[f"e{index}"](F.silu(gate) * up)


class ParameterLists(Parts):
    def add_lists(self) -> None:
        inner, outer = linears(WIDTH, HIDDEN, bias=True), linears(HIDDEN, WIDTH, bias=True)
        self.w1, self.b1, self.w2, self.b2 = (
            nn.ParameterList(getattr(layer, name) for layer in layers)
            for layers in (inner, outer)
            for name in ("weight", "bias")
        )

    def expert(self, index: int, x_TD: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x_TD, self.w1[index], self.b1[index]))
        return F.linear(hidden, self.w2[index], self.b2[index])


@pytest.mark.parametrize("kind", [Parts, TwoLists, Dictionaries, ParameterLists])
def test_lists_of_the_experts_parts(kind: type[Parts]) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(kind()).eval()
    model = copy.deepcopy(original)
    report = dynamo_moe.convert(model)
    assert [replaced.module for replaced in report.replaced] == ["0"]
    assert not report.unrecognised
    assert isinstance(model[0], ConvertedModule)
    assert model.state_dict().keys() == original.state_dict().keys()
    x = torch.randn(3, 5, WIDTH)
    torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5)


def test_parts_in_lists_are_held_once() -> None:
    layer = TwoLists().eval()
    dynamo_moe.convert(layer)
    with torch.no_grad():
        layer(torch.randn(3, WIDTH))
    kept = layer._dynamo_moe_weights._weights
    assert layer.experts_in[1].weight.data_ptr() == kept.w1[1].data_ptr()
    assert layer.experts_out[3].bias.data_ptr() == kept.b2[3].data_ptr()


# --- Gates that are no single matrix of the tokens' width ---


class StacksBehindLayers(nn.Module):
    """A gate of several layers, beside stacks of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, COUNT))
        self.w1 = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        dense = torch.zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights)
        hidden = F.relu(torch.einsum("...d,edh->...eh", x, self.w1))
        return torch.einsum("...eh,ehd,...e->...d", hidden, self.w2, dense)


class Groups(StacksBehindLayers):
    """Stacks of two groups of three experts, which a product over both counts as six."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(self.w1.detach().unflatten(0, (2, 3)))
        self.w2 = nn.Parameter(self.w2.detach().unflatten(0, (2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        dense = torch.zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights).unflatten(-1, (2, 3))
        hidden = F.relu(torch.einsum("...d,gedh->...geh", x, self.w1))
        return torch.einsum("...geh,gehd,...ge->...d", hidden, self.w2, dense)


class RouterInRows(nn.Module):
    """Its router ``[E, D]`` stands beside the stacks, where biases of the experts could be."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN) / 4)
        self.values = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 5)
        self.selector = nn.Parameter(torch.randn(COUNT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = F.linear(x, self.selector).sigmoid().topk(2, dim=-1)
        dense = torch.zeros(*x.shape[:-1], COUNT).scatter(-1, ids, weights)
        hidden = F.relu(torch.einsum("...d,edh->...eh", x, self.keys))
        return torch.einsum("...eh,ehd,...e->...d", hidden, self.values, dense)


@pytest.mark.parametrize("kind", [StacksBehindLayers, Groups, RouterInRows])
def test_stacks_beside_other_gates(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(kind()).eval()
    model = copy.deepcopy(original)
    assert [replaced.module for replaced in dynamo_moe.convert(model).replaced] == ["0"]
    x = torch.randn(3, 5, WIDTH)
    torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5)


# --- Layers that are left, and named ---


class TwoSets(nn.Module):
    """Two sets of experts, of which a gate chooses together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * COUNT)
        self.experts_a, self.experts_b = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
                for _ in range(COUNT)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        results = [expert(x) for expert in (*self.experts_a, *self.experts_b)]
        return (torch.stack(results, dim=-1) * self.gate(x)[..., None, :]).sum(dim=-1)


class LookedUp(nn.Module):
    """Experts of one hidden number, in tables; its router says how many there are too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 36
        self.down, self.up = nn.Embedding(36, WIDTH), nn.Embedding(36, WIDTH)
        self.router = nn.Linear(WIDTH, 36)
        self.router.num_experts = 36

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).topk(2, dim=-1)
        hidden = torch.einsum("...d,...kd->...k", x, self.down(ids)).relu()
        return torch.einsum("...k,...kd->...d", hidden * weights, self.up(ids))


class Loras(nn.Module):
    """A layer and products of low rank, of which a router chooses."""

    def __init__(self, ranks: tuple[int, ...] = (4,) * COUNT) -> None:
        super().__init__()
        self.num_experts = len(ranks)
        self.base, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, len(ranks))
        self.lora_A = nn.ModuleList(nn.Linear(WIDTH, rank, bias=False) for rank in ranks)
        self.lora_B = nn.ModuleList(nn.Linear(rank, WIDTH, bias=False) for rank in ranks)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        pairs = zip(self.lora_A, self.lora_B, strict=True)
        results = torch.stack([outer(inner(x)) for inner, outer in pairs], dim=-1)
        return self.base(x) + (results * weights[..., None, :]).sum(dim=-1)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (TwoSets(), "'experts_a' is one of several sets of experts in it; 'experts_b' is one of"),
        (LookedUp(), r"its 36 experts \(num_experts\) are neither modules in a list nor two"),
        (Loras((4, 4, 8)), "a mixture of LoRAs"),
    ],
)
def test_layers_that_are_left_are_named(layer: nn.Module, reason: str) -> None:
    report = dynamo_moe.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).eval())
    assert report.replaced == ()
    (left,) = report.unrecognised
    assert left.module == "1"
    assert re.match(reason, left.reason)


# --- Dense models, of which nothing is said ---


class Blocks(nn.Module):
    """A dense model whose layers are in lists, as many as its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.ModuleList(linears(WIDTH, HIDDEN))
        self.fc2 = nn.ModuleList(linears(HIDDEN, WIDTH))
        self.head = nn.Linear(WIDTH, COUNT)

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.fc1, self.fc2, strict=True):
            x = x + outer(F.gelu(inner(x)))
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.mT)).mT)


class Heads(nn.Module):
    """Stacks of the heads' matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(4, WIDTH, 4)) for _ in range(3)
        )
        self.bias, self.out = nn.Parameter(torch.randn(4, 9)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            torch.einsum("...ld,hdk->...hlk", x, each)
            for each in (self.query, self.key, self.value)
        )
        attended = torch.softmax(query @ key.mT, dim=-1) @ value
        return self.out(attended.transpose(-2, -3).flatten(-2))


class Neighbours(nn.Module):
    """Two lists of square layers, and a matrix with as many rows as there are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(linears(WIDTH, WIDTH))
        self.others = nn.ModuleList(linears(WIDTH, WIDTH))
        self.kinds = nn.Parameter(torch.randn(COUNT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for own, others in zip(self.own, self.others, strict=True):
            x = torch.relu(own(x) + others(x.mean(dim=-2, keepdim=True)))
        return x


class Adapters(nn.Module):
    """A layer with two adapters, of which one is on, as peft has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH)
        self.lora_A = nn.ModuleDict({name: nn.Linear(WIDTH, 4) for name in ("one", "other")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, WIDTH) for name in ("one", "other")})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["one"](self.lora_A["one"](x))


@pytest.mark.parametrize("counted", [False, True])
def test_numbered_attributes_are_named(counted: bool) -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, COUNT)
            self.num_experts = COUNT if counted else 0
            for number in range(COUNT):
                first, second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
                self.add_module(f"expert_{number}", nn.Sequential(first, nn.ReLU(), second))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(dim=-1).unbind(dim=-1)
            parts = [self.get_submodule(f"expert_{n}")(x) for n in range(COUNT)]
            return sum(
                part * weight[..., None] for part, weight in zip(parts, weights, strict=True)
            )

    (left,) = dynamo_moe.convert(nn.Sequential(Numbered())).unrecognised
    assert left.module == "0"
    assert left.reason == (
        "its 6 experts are attributes from 'expert_0' on: put them into a ModuleList"
    )


class Pooler(nn.Module):
    """As many queries as heads attend to tokens of another width, as CoCa's pooler in open_clip."""

    def __init__(self) -> None:
        super().__init__()
        self.query, size = nn.Parameter(torch.randn(4, WIDTH)), 2 * WIDTH
        self.attention = nn.MultiheadAttention(WIDTH, 4, kdim=size, vdim=size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([x, x.sin()], dim=-1)
        query = self.query.expand(len(x), -1, -1)
        return self.attention(query, tokens, tokens, need_weights=False)[0]


@pytest.mark.parametrize("kind", [Blocks, Convolutions, Heads, Neighbours, Adapters, Pooler])
def test_dense_models_are_not_suspected(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind()).eval()
    assert convertible_modules(model) == []
    report = dynamo_moe.convert(model, (torch.randn(2, 5, WIDTH),))
    assert (report.replaced, report.unrecognised) == ((), ())


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {
    "whisper": {
        "vocab_size": 99, "num_mel_bins": 32, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    },
    "wav2vec2": {
        **SMALL, "intermediate_size": 64, "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 3), "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    "vit": {**SMALL, "intermediate_size": 64, "image_size": 32, "patch_size": 8},
    "dinov2": {**SMALL, "image_size": 32, "patch_size": 8},
    "rwkv": {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3},
    "xlnet": {"vocab_size": 99, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
    "llama": {**SMALL, "vocab_size": 99, "num_key_value_heads": 2, "intermediate_size": 64},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 8, 8], "image_size": 32},
    "convnext": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", DENSE)
def test_dense_transformers_are_not_suspected(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **DENSE[kind])
    model = transformers.AutoModel.from_config(config).eval()
    assert convertible_modules(model) == []
    report = dynamo_moe.convert(model)
    assert (report.replaced, report.unrecognised) == ((), ())
