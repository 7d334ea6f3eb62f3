"""Norms, rotary embeddings and attention as one node each: what becomes one, and what does not.

Each model is exported to opset 23 for ONNX Runtime and compared with PyTorch; those that differ in
one point from what a node computes must keep their own nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dynamo_moe

B, S, H, G, D = 2, 5, 4, 2, 8
FUSED = {
    "RMSNormalization",
    "LayerNormalization",
    "RotaryEmbedding",
    "Attention",
    "GroupQueryAttention",
    "SkipSimplifiedLayerNormalization",
    "QuickGelu",
}
SKIP = "SkipSimplifiedLayerNormalization"


class Calls(nn.Module):
    """A function as a module, with a weight and a bias."""

    def __init__(self, function: Callable[..., Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            self.register_buffer(name, weight)
        self.names = list(weights)

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *(getattr(self, name) for name in self.names))


def fused(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    folder: Path,
    *,
    weights: tuple[Tensor, ...] = (),
    dynamic_shapes: Any = "batch",
    **options: Any,
) -> dict[str, int]:
    """Exports a function, checks the file's numbers, and counts the fused nodes."""
    torch.manual_seed(0)
    model = Calls(function, {f"w{number}": weight for number, weight in enumerate(weights)})
    options = {"target": "onnxruntime", **options}
    report = dynamo_moe.export(
        model, inputs, folder / "m.onnx", dynamic_shapes=dynamic_shapes, **options
    )
    checked = dynamo_moe.verify(report.path, model, inputs=[inputs])
    assert checked.passed, checked
    nodes = onnx.load(report.path).graph.node
    return dict(Counter(node.op_type for node in nodes if node.op_type in FUSED))


# --- Norms ---


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1 + weight.float())).type_as(x)


def divided_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5) * weight


def gemma4_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
    return (wide * weight.float()).type_as(x)


def cohere_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * (centred * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def norm_over_tokens(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * weight


def norm_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + weight


def norm_of_another(x: Tensor, weight: Tensor) -> Tensor:
    return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def norm_of_cubes(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm, gemma4_norm, divided_norm])
@pytest.mark.parametrize("sizes", [(B, S, 16), (S, 16), (B, S, H, 16)])
def test_norms(norm: Any, sizes: tuple[int, ...], tmp_path: Path) -> None:
    weight = torch.rand(16) + 0.5
    assert fused(norm, (torch.randn(sizes),), tmp_path, weights=(weight,)) == {
        "RMSNormalization": 1
    }


def test_layer_norms(tmp_path: Path) -> None:
    weight, x = torch.rand(16) + 0.5, torch.randn(B, S, 16)
    assert fused(cohere_norm, (x,), tmp_path, weights=(weight,)) == {"LayerNormalization": 1}


@pytest.mark.parametrize(("norm", "count"), [(llama_norm, 0), (gemma_norm, 1)])
def test_norms_in_half_precision(norm: Any, count: int, tmp_path: Path) -> None:
    """One that is rounded before it is multiplied would be rounded elsewhere."""
    weight, x = torch.rand(16).half() + 0.5, torch.randn(B, S, 16).half()
    found = fused(norm, (x,), tmp_path, weights=(weight,))
    assert found.get("RMSNormalization", 0) == count


def test_norms_in_float64_keep_their_nodes(tmp_path: Path) -> None:
    inputs = (torch.randn(B, S, 16).double(),)
    assert fused(divided_norm, inputs, tmp_path, weights=(torch.rand(16).double(),)) == {}


@pytest.mark.parametrize(
    "norm", [norm_over_tokens, norm_without_weight, norm_of_another, norm_of_cubes]
)
def test_what_is_no_norm(norm: Any, tmp_path: Path) -> None:
    assert fused(norm, (torch.randn(B, 16, 16),), tmp_path, weights=(torch.rand(16),)) == {}


def test_a_norm_by_a_weight_for_each_token_is_none(tmp_path: Path) -> None:
    weight = torch.rand(S, 16)
    assert fused(divided_norm, (torch.randn(B, S, 16),), tmp_path, weights=(weight,)) == {}


@pytest.mark.parametrize("options", [{"fuse": False}, {"opset": 22}, {"opset": 20}])
def test_nothing_is_fused_where_that_is_not_wanted(options: Any, tmp_path: Path) -> None:
    x, weight = torch.randn(B, S, 16), torch.rand(16)
    assert fused(llama_norm, (x,), tmp_path, weights=(weight,), **options) == {}


def test_targets_with_plugins_have_the_standards_norm_from_opset_23_on(tmp_path: Path) -> None:
    x, weight = torch.randn(B, S, 16), torch.rand(16)
    for target in ("plugin", "dense"):
        options = {"target": target, "opset": 23}
        assert fused(llama_norm, (x,), tmp_path, weights=(weight,), **options) == {
            "RMSNormalization": 1
        }


# --- Sums and their norms ---


def summed_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, llama_norm(total, weight)


def norm_of_a_sum_alone(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return gemma_norm(x + y, weight)


def sum_used_before(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    return total.cos().clone() + llama_norm(total, weight)


def two_norms_of_one_sum(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    return llama_norm(total, weight) + divided_norm(total, 2 * weight)


def a_chain(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    total = total + llama_norm(total, weight).sin()
    return total * llama_norm(total, weight)


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        (summed_norm, {SKIP: 1}),
        (norm_of_a_sum_alone, {SKIP: 1}),
        (two_norms_of_one_sum, {SKIP: 1, "RMSNormalization": 1}),
        (a_chain, {SKIP: 2}),
    ],
)
def test_a_sum_and_its_norm_are_one_node(
    model: Any, counts: dict[str, int], tmp_path: Path
) -> None:
    inputs = torch.randn(B, S, 16), torch.randn(B, S, 16)
    assert fused(model, inputs, tmp_path, weights=(torch.rand(16) + 0.5,)) == counts
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    assert "" not in {name for node in nodes for name in node.output[3:]}


def biased(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    total = x + (y.sin() + bias)
    return total * llama_norm(total, weight)


def biased_first(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return llama_norm((bias + x.sin()) + y, weight)


def bias_used_twice(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    term = y + bias
    return llama_norm(x + term, weight) * term


@pytest.mark.parametrize(
    ("model", "sizes", "inputs"),
    [
        (biased, 16, 4),
        (biased_first, 16, 4),
        (bias_used_twice, 16, 3),
        (biased, (S, 16), 3),
        (biased, 1, 3),
    ],
)
def test_a_bias_is_added_by_the_norm(model: Any, sizes: Any, inputs: int, tmp_path: Path) -> None:
    given = torch.randn(B, S, 16), torch.randn(B, S, 16)
    weights = torch.rand(16) + 0.5, torch.randn(sizes)
    assert fused(model, given, tmp_path, weights=weights) == {SKIP: 1}
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    assert [len(node.input) for node in nodes if node.op_type == SKIP] == [inputs]


class Biased(nn.Module):
    """A block that ends with a product's bias, and begins with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.first, self.second = (nn.Parameter(torch.rand(16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(llama_norm(x, self.first))
        return x + self.outer(llama_norm(x, self.second))


def test_a_block_keeps_its_own_bias(tmp_path: Path) -> None:
    """The next block's norm, of which the file has copies, takes none of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Biased() for _ in range(6))).eval()
    report = dynamo_moe.export(
        model, torch.randn(B, S, 16), tmp_path / "m.onnx", target="onnxruntime"
    )
    assert report.blocks == ("6 of Biased: 3 traced",)
    assert dynamo_moe.verify(report.path, model).passed
    nodes = onnx.load(report.path).graph.node
    taken = [len(node.input) for node in nodes if node.op_type == SKIP]
    assert taken == [4, 3] * 5 + [4]


def test_a_sum_that_is_used_before_its_norm_stays(tmp_path: Path) -> None:
    inputs = torch.randn(B, S, 16), torch.randn(B, S, 16)
    found = fused(sum_used_before, inputs, tmp_path, weights=(torch.rand(16),))
    assert found == {"RMSNormalization": 1}


@pytest.mark.parametrize(
    "sizes", [((B, S, 16), (S, 16)), ((B, S, 16), (16,)), ((S, 16), (S, 16)), ((B, S, H, 16),) * 2]
)
def test_sums_of_other_shapes_stay(sizes: Any, tmp_path: Path) -> None:
    """What is broadcast, and what has not three axes, ONNX Runtime's operator does not take."""
    x, y = map(torch.randn, sizes)
    found = fused(summed_norm, (x, y), tmp_path, weights=(torch.rand(16),), dynamic_shapes=None)
    assert found == {"RMSNormalization": 1}


def test_a_sum_in_half_precision_stays(tmp_path: Path) -> None:
    x, y = torch.randn(B, S, 16).half(), torch.randn(B, S, 16).half()
    weight = torch.rand(16).half() + 0.5
    assert fused(norm_of_a_sum_alone, (x, y), tmp_path, weights=(weight,)) == {
        "RMSNormalization": 1
    }


def test_other_targets_and_functions_keep_sums(tmp_path: Path) -> None:
    inputs, weight = (torch.randn(B, S, 16), torch.randn(B, S, 16)), torch.rand(16)
    for options in (
        {"target": "plugin", "opset": 23},
        {"target": "dense", "opset": 23},
        {"layers_as_functions": True},
    ):
        found = fused(summed_norm, inputs, tmp_path, weights=(weight,), **options)
        assert found == {"RMSNormalization": 1}


# --- SiLU ---


def gated_silu(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


def sigmoid_first(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * x + y


def sigmoid_of_another(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y)


def sigmoid_of_a_multiple(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x) + y


def sigmoid_that_is_a_result(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    return x * gate + y, gate


@pytest.mark.parametrize("model", [gated_silu, sigmoid_first])
def test_silu(model: Any, tmp_path: Path) -> None:
    x = torch.cat((torch.randn(B, 16), torch.tensor([[-200.0, 200.0] * 8])))
    assert fused(model, (x, torch.randn(B + 1, 16)), tmp_path) == {"QuickGelu": 1}


@pytest.mark.parametrize(
    "model", [sigmoid_of_another, sigmoid_of_a_multiple, sigmoid_that_is_a_result]
)
def test_what_is_no_silu(model: Any, tmp_path: Path) -> None:
    assert fused(model, (torch.randn(B, 16), torch.randn(B, 16)), tmp_path) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_silu_of_other_dtypes_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = torch.randn(B, 16).to(dtype), torch.randn(B, 16).to(dtype)
    assert fused(gated_silu, inputs, tmp_path) == {}


@pytest.mark.parametrize("options", [{"target": "plugin", "opset": 23}, {"fuse": False}])
def test_other_files_keep_silu(options: Any, tmp_path: Path) -> None:
    assert fused(gated_silu, (torch.randn(B, 16), torch.randn(B, 16)), tmp_path, **options) == {}


# --- Rotary embeddings ---


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def tables(positions: Tensor, frequencies: Tensor, *, twice: bool) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), -1) if twice else angles
    return angles.cos(), angles.sin()


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, D)).transpose(1, 2)


def llama_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = tables(positions, frequencies, twice=True)
    q = heads(x, H)
    return (q * cos.unsqueeze(1)) + (turned(q) * sin.unsqueeze(1))


def scaled_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = tables(positions, frequencies, twice=True)
    q = x.unflatten(-1, (H, D))
    return q * (cos * 1.25).unsqueeze(2) + turned(q) * (sin * 1.25).unsqueeze(2)


def gpt_oss_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(1) for table in tables(positions, frequencies, twice=False))
    first, second = heads(x, H).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def deepseek_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(1) for table in tables(positions, frequencies, twice=False))
    q = heads(x, H)
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def partial_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = tables(positions, frequencies[:2], twice=True)
    q = heads(x, H)
    rotated, passed = q[..., :4], q[..., 4:]
    rotated = rotated * cos.unsqueeze(1) + turned(rotated) * sin.unsqueeze(1)
    return torch.cat([rotated, passed], dim=-1)


@pytest.mark.parametrize(
    "rotary", [llama_rotary, scaled_rotary, gpt_oss_rotary, deepseek_rotary, partial_rotary]
)
def test_rotary_embeddings(rotary: Any, tmp_path: Path) -> None:
    inputs = torch.randn(B, S, H * D), torch.arange(S).expand(B, S).contiguous()
    frequencies = 0.1 ** torch.arange(D // 2)
    assert fused(rotary, inputs, tmp_path, weights=(frequencies,)) == {"RotaryEmbedding": 1}


def test_one_table_for_all_of_the_batch(tmp_path: Path) -> None:
    inputs = torch.randn(B, S, H * D), torch.arange(S)[None]
    shapes: Any = {"args": ({0: "batch"}, {})}
    found = fused(
        llama_rotary,
        inputs,
        tmp_path,
        weights=(0.1 ** torch.arange(D // 2),),
        dynamic_shapes=shapes,
    )
    assert found == {"RotaryEmbedding": 1}


def interleaved_rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(1) for table in tables(positions, frequencies, twice=False))
    q = heads(x, H)
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def halves_of_two_kinds(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, 2 * angles), -1).unsqueeze(1)
    q = heads(x, H)
    return q * angles.cos() + turned(q) * angles.sin()


def turned_the_other_way(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = tables(positions, frequencies, twice=True)
    q = heads(x, H)
    half = D // 2
    other = torch.cat((q[..., half:], -q[..., :half]), dim=-1)
    return q * cos.unsqueeze(1) + other * sin.unsqueeze(1)


def one_turn_for_all_tokens(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    cos, sin = tables(positions[:, :1], frequencies, twice=True)
    q = heads(x, H)
    return q * cos.unsqueeze(1) + turned(q) * sin.unsqueeze(1)


@pytest.mark.parametrize(
    "rotary",
    [interleaved_rotary, halves_of_two_kinds, turned_the_other_way, one_turn_for_all_tokens],
)
def test_what_is_another_rotation(rotary: Any, tmp_path: Path) -> None:
    inputs = torch.randn(B, S, H * D), torch.arange(S).expand(B, S).contiguous()
    frequencies = 0.1 ** torch.arange(D // 2)
    assert fused(rotary, inputs, tmp_path, weights=(frequencies,)) == {}


# --- Attention ---

Q, KV = torch.randn(B, S, H * D), torch.randn(B, S, G * D)
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def repeated(x: Tensor) -> Tensor:
    x = heads(x, G)
    batch, groups, length, width = x.shape
    x = x[:, :, None].expand(batch, groups, H // G, length, width)
    return x.reshape(batch, H, length, width)


def by_operator(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    y = functional.scaled_dot_product_attention(heads(q, H), repeated(k), repeated(v), mask)
    return merged(y)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = heads(q, H) @ repeated(k).transpose(2, 3) * D**-0.5
    weights = (scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
    return merged(weights @ repeated(v))


def divided(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = heads(q, H) @ repeated(k).transpose(-1, -2) / math.sqrt(D)
    return merged((mask + scores).softmax(-1) @ repeated(v))


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (heads(q, H) * 0.3) @ repeated(k).mT
    return merged((scores + mask).softmax(-1) @ repeated(v))


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = heads(q, H) @ repeated(k).mT * 0.4
    scores = torch.tanh(scores / 2.0) * 2.0
    return merged((scores + mask).softmax(-1) @ repeated(v))


BIASES = {
    "of all": torch.randn(B, H, S, S),
    "of all heads": torch.randn(B, 1, S, S),
    "of all sequences": torch.randn(1, H, S, S),
    "causal": torch.where(CAUSAL, 0.0, torch.finfo(torch.float32).min)[None, None].repeat(
        B, 1, 1, 1
    ),
    "of keys": torch.randn(B, 1, 1, S),
    "of a matrix": torch.randn(S, S),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=list(BIASES))
@pytest.mark.parametrize("attention", [by_operator, eager, divided, scaled_queries, capped])
def test_attention(attention: Any, bias: Tensor, tmp_path: Path) -> None:
    assert fused(attention, (Q, KV, KV + 1, bias), tmp_path, dynamic_shapes=None) == {
        "Attention": 1
    }


@pytest.mark.parametrize("sizes", [(B, 1, S, S), (B, 1, 1, S), (1, 1, S, S)], ids=str)
@pytest.mark.parametrize("target", ["onnxruntime", "plugin"])
def test_booleans_as_a_mask(sizes: tuple[int, ...], target: Any, tmp_path: Path) -> None:
    mask = torch.rand(sizes) > 0.4
    mask[..., 0] = True
    options = {"target": target, "opset": 23, "dynamic_shapes": None}
    expected = {"Attention": 1} if target == "onnxruntime" else {}
    assert fused(by_operator, (Q, KV, KV, mask), tmp_path, **options) == expected


def test_half_precision(tmp_path: Path) -> None:
    inputs = [x.half() for x in (Q, KV, KV, BIASES["causal"].clamp_min(-65504))]
    assert fused(eager, tuple(inputs), tmp_path) == {"Attention": 1}


def no_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q, H) @ repeated(k).mT * 0.2).softmax(-1)
    return merged(weights @ repeated(v))


def four_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.2).softmax(-1)
    return weights @ v


def test_no_mask(tmp_path: Path) -> None:
    assert fused(no_mask, (Q, KV, KV), tmp_path) == {"Attention": 1}


def test_heads_that_come_first(tmp_path: Path) -> None:
    q, kv = torch.randn(B, H, S, D), torch.randn(B, H, 7, D)
    assert fused(four_axes, (q, kv, kv), tmp_path) == {"Attention": 1}


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (heads(q, H) @ repeated(k).mT * 0.2).softmax(-1)
    return merged(weights @ repeated(v)), weights


def scaled_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q, H) @ repeated(k).mT * 0.2).softmax(-1)
    return merged((weights * 0.5) @ repeated(v))


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q, H) @ repeated(k).mT * 0.2).softmax(-2)
    return merged(weights @ repeated(v))


def capped_otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(heads(q, H) @ repeated(k).mT / 2.0) * 3.0
    return merged(scores.softmax(-1) @ repeated(v))


@pytest.mark.parametrize(
    "attention", [with_weights, scaled_weights, softmax_over_queries, capped_otherwise]
)
def test_what_is_another_attention(attention: Any, tmp_path: Path) -> None:
    assert fused(attention, (Q, KV, KV), tmp_path) == {}


# --- The cache ---


def cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(H // G, 1)

    keys, values = (torch.cat([p, heads(x, G)], 2) for p, x in zip(past, (k, v), strict=True))
    wide = keys[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    wider = values[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    weights = (heads(q, H) @ wide.mT * 0.2 + mask).softmax(-1)
    return merged(weights @ wider), keys, values


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    *past, sinks = rest
    keys, values = (torch.cat([p, heads(x, G)], 2) for p, x in zip(past, (k, v), strict=True))
    wide = keys[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    wider = values[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    scores = heads(q, H) @ wide.mT * 0.2 + mask
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[1], -1)], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return merged(scores.softmax(-1)[..., :-1] @ wider), keys, values


CACHE = torch.randn(1, G, 3, D), torch.randn(1, G, 3, D)
SHAPES: Any = {
    "args": (
        *({0: "batch", 1: "tokens"},) * 3,
        {0: "batch", 2: "tokens", 3: "all"},
        *({0: "batch", 2: "past"},) * 2,
    )
}


def test_the_cache_is_the_nodes_own(tmp_path: Path) -> None:
    mask = torch.randn(1, 1, S, S + 3)
    inputs = (Q[:1], KV[:1], KV[:1], mask, *CACHE)
    assert fused(cached, inputs, tmp_path, dynamic_shapes=SHAPES) == {"Attention": 1}
    model = onnx.load(tmp_path / "m.onnx")
    assert not any(node.op_type in {"Concat", "Expand", "Transpose"} for node in model.graph.node)


def test_sinks(tmp_path: Path) -> None:
    mask = torch.randn(1, 1, S, S + 3)
    inputs, sinks = (Q[:1], KV[:1], KV[:1], mask, *CACHE), torch.randn(H)
    found = fused(with_sinks, inputs, tmp_path, weights=(sinks,), dynamic_shapes=SHAPES)
    assert found == {"GroupQueryAttention": 1}


def test_keys_that_are_used_elsewhere_stay(tmp_path: Path) -> None:
    def function(*args: Tensor) -> tuple[Tensor, ...]:
        y, keys, values = cached(*args)
        return y, keys, values, keys.sum(2)

    inputs = (Q[:1], KV[:1], KV[:1], torch.randn(1, 1, S, S + 3), *CACHE)
    assert fused(function, inputs, tmp_path, dynamic_shapes=SHAPES) == {"Attention": 1}
    assert any(node.op_type == "Concat" for node in onnx.load(tmp_path / "m.onnx").graph.node)


# --- What does not fit the operators ---

Q4, K4, V4 = torch.randn(B, H, S, D), torch.randn(B, H, 7, D), torch.randn(B, H, 7, D)
LEAST = torch.finfo(torch.float32).min


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def in_two_dtypes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1).half() @ v.half()


def negative(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * -0.3 + mask).softmax(-1) @ v


def shifted_otherwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A softmax of scores less the greatest of each column: not the same."""
    scores = torch.cat([q @ k.mT * 0.3 + mask, torch.ones(1, H, 1, 1).expand(B, H, S, 1)], -1)
    return (scores - scores.amax(2, keepdim=True)).softmax(-1)[..., :-1] @ v


UNFIT = {
    "queries of all sequences": (plain, (Q4[:1], K4, V4, torch.randn(S, 7))),
    "keys of all sequences": (plain, (Q4, K4[:1], V4, torch.randn(S, 7))),
    "keys of all heads": (plain, (Q4, K4[:, :1], V4, torch.randn(S, 7))),
    "values of all heads": (plain, (Q4, K4, V4[:, :1], torch.randn(S, 7))),
    "values of three axes": (plain, (Q4, K4, V4[0], torch.randn(S, 7))),
    "values of two axes": (plain, (Q4, K4, V4[0, 0], torch.randn(S, 7))),
    "queries of three axes": (plain, (Q4[0], K4, V4, torch.randn(S, 7))),
    "a mask of more sequences": (plain, (Q4[:1], K4[:1], V4[:1], torch.randn(3, 1, S, 7))),
    "a mask of more heads": (plain, (Q4[:, :1], K4[:, :1], V4[:, :1], torch.randn(1, H, S, 7))),
    "a mask of more rows": (plain, (Q4[:, :, :1], K4, V4, torch.randn(1, 1, S, 7))),
    "a mask of rows": (plain, (Q4, K4, V4, torch.randn(B, 1, S, 1))),
    "a mask of heads": (plain, (Q4, K4, V4, torch.randn(1, H, 1, 1))),
    "a mask of one axis": (plain, (Q4, K4, V4, torch.randn(7))),
    "two dtypes": (in_two_dtypes, (Q4, K4, V4, torch.randn(S, 7))),
    "a negative scale": (negative, (Q4, K4, V4, torch.randn(S, 7))),
    "another shift": (shifted_otherwise, (Q4, K4, V4, torch.randn(S, 7))),
    "float64": (plain, tuple(x.double() for x in (Q4, K4, V4, torch.randn(S, 7)))),
}


@pytest.mark.parametrize(("attention", "inputs"), UNFIT.values(), ids=list(UNFIT))
def test_what_does_not_fit_keeps_its_nodes(
    attention: Any, inputs: tuple[Tensor, ...], tmp_path: Path
) -> None:
    assert fused(attention, inputs, tmp_path, dynamic_shapes=None) == {}


def least_number(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return plain(q, k, v, torch.where(seen, 0.0, LEAST))


def test_a_token_that_sees_no_key_sees_all_alike(tmp_path: Path) -> None:
    """As in PyTorch: less a number that large, all scores are the same."""
    seen = torch.rand(B, 1, S, 7) > 0.5
    seen[0, 0, 2] = False
    found = fused(least_number, (Q4, K4, V4, seen), tmp_path, dynamic_shapes=None)
    assert found == {"Attention": 1}


def test_keys_whose_axes_are_turned_at_once(tmp_path: Path) -> None:
    def by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.unflatten(-1, (H, D)).permute(0, 2, 3, 1)
        return merged((heads(q, H) @ keys * 0.3).softmax(-1) @ heads(v, H))

    kv = torch.randn(B, 7, H * D)
    assert fused(by_token, (Q, kv, kv + 1), tmp_path) == {"Attention": 1}


def rotary_in_double(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions[..., None].double() * frequencies
    angles = torch.cat((angles, angles), -1).unsqueeze(1)
    q = heads(x, H)
    return q * angles.cos() + turned(q) * angles.sin()


def test_rotary_embeddings_in_float64_keep_their_nodes(tmp_path: Path) -> None:
    inputs = torch.randn(B, S, H * D).double(), torch.arange(S).expand(B, S).contiguous()
    frequencies = (0.1 ** torch.arange(D // 2)).double()
    assert fused(rotary_in_double, inputs, tmp_path, weights=(frequencies,)) == {}


def of_itself(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    keys = torch.cat([past[0], heads(k, H)], 2)
    return merged((heads(q, H) @ keys.mT * 0.2 + mask).softmax(-1) @ keys), keys


def masked_by_keys(*args: Tensor) -> tuple[Tensor, ...]:
    q, k, v, mask, *past = args
    keys, values = (torch.cat([p, heads(x, H)], 2) for p, x in zip(past, (k, v), strict=True))
    mask = mask + torch.where(keys.abs().sum((1, 3)) > 4, 0.0, -1e4)[:, None, None]
    return merged((heads(q, H) @ keys.mT * 0.2 + mask).softmax(-1) @ values), keys, values


def not_returned(*args: Tensor) -> Tensor:
    return masked_by_nothing(*args)[0]


def masked_by_nothing(*args: Tensor) -> tuple[Tensor, ...]:
    q, k, v, mask, *past = args
    keys, values = (torch.cat([p, heads(x, H)], 2) for p, x in zip(past, (k, v), strict=True))
    return merged((heads(q, H) @ keys.mT * 0.2 + mask).softmax(-1) @ values), keys, values


@pytest.mark.parametrize("attention", [of_itself, masked_by_keys, not_returned])
def test_caches_that_attention_cannot_extend(attention: Any, tmp_path: Path) -> None:
    past = torch.randn(1, H, 3, D)
    kv = torch.randn(1, S, H * D)
    inputs = (Q[:1], kv, kv + 1, torch.randn(1, 1, S, S + 3), past, past + 1)
    assert fused(attention, inputs, tmp_path, dynamic_shapes=None) == {"Attention": 1}
    assert any(node.op_type == "Concat" for node in onnx.load(tmp_path / "m.onnx").graph.node)


def test_sinks_at_a_fixed_length(tmp_path: Path) -> None:
    inputs = (Q[:1], KV[:1], KV[:1], torch.randn(1, 1, S, S + 3), *CACHE)
    found = fused(with_sinks, inputs, tmp_path, weights=(torch.randn(H),), dynamic_shapes="batch")
    assert found == {"GroupQueryAttention": 1}


# --- Equal blocks ---


class Scaled(nn.Module):
    """A block whose attention and norm have factors that are weights of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(H * D, H * D, bias=False) for _ in range(3))
        self.scale, self.epsilon = (nn.Parameter(torch.tensor(0.3)) for _ in range(2))
        self.weight = nn.Parameter(torch.rand(H * D))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight
        q, k, v = (heads(linear(normed), H) for linear in (self.q, self.k, self.v))
        return x + merged((q @ k.mT * self.scale).softmax(-1) @ v)


def test_no_weight_of_a_block_decides_for_others(tmp_path: Path) -> None:
    """The blocks that are traced have equal factors, and a further one has not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(6))).eval()
    with torch.no_grad():
        model[-1].scale.fill_(2.5)
        model[-1].epsilon.fill_(9.0)
    report = dynamo_moe.export(model, Q, tmp_path / "m.onnx", target="onnxruntime")
    assert report.blocks == ("6 of Scaled: 3 traced",)
    assert dynamo_moe.verify(report.path, model).passed
