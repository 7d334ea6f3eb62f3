"""Files of whole models are the same, byte for byte, with equal blocks shared and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import dynamo_moe
from shared_exports import opened_twice

pytest_plugins = ("shared_exports",)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "use_cache": False,
}
LENGTH = {0: "batch", 1: "length"}


def language_model(name: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.arange(8).reshape(2, 4)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    return language_model("Llama", num_hidden_layers=5, **options)


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    return language_model("Mixtral", num_hidden_layers=5, num_local_experts=4)


def qwen3_moe() -> tuple[nn.Module, dict[str, Any]]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return language_model("Qwen3Moe", num_hidden_layers=7, mlp_only_layers=[0, 1], **experts)


def gemma2() -> tuple[nn.Module, dict[str, Any]]:
    return language_model("Gemma2", num_hidden_layers=8, sliding_window=2)


def deepseek_v3() -> tuple[nn.Module, dict[str, Any]]:
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    return language_model("DeepseekV3", num_hidden_layers=6, **latent, **experts)


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=5, vocab_size=64, use_cache=False
    )
    ids = torch.arange(8).reshape(2, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    return transformers.T5ForConditionalGeneration(config), inputs


def swin() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 8], num_heads=[1, 2], window_size=4
    )
    return transformers.SwinModel(config), {"pixel_values": torch.zeros(2, 3, 64, 64)}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        image_size=32, patch_size=16, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_hidden_layers=5,
    )  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": torch.zeros(2, 3, 32, 32)}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=5,
        vocab_size=64,
    )  # fmt: skip
    ids = torch.arange(8).reshape(2, 4)
    return transformers.BertModel(config), {"input_ids": ids}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (llama, 1), (mixtral, 1), (qwen3_moe, 1), (deepseek_v3, 1), (t5, 2), (vit, 1), (bert, 1),
    ],
)  # fmt: skip
def test_architectures(compared: Callable[..., int], make: Callable[[], Any], count: int) -> None:
    def converted() -> nn.Module:
        torch.manual_seed(0)
        model = make()[0].eval()
        dynamo_moe.convert(model)
        return model

    inputs = make()[1]
    names = [name for name in inputs if name != "pixel_values"]
    shapes = dict.fromkeys(names, LENGTH)
    assert compared(converted, (), kwargs=inputs, dynamic_shapes=shapes) == count


@pytest.mark.slow
@pytest.mark.parametrize("make", [gemma2, swin])
def test_architectures_that_compute_with_weights_alone(
    shared: Callable[..., int], tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Traced whole, such nodes are folded; shared they stay, since values of weights are hidden."""
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    shapes = {name: LENGTH for name in inputs if name != "pixel_values"}
    assert shared(model, (), kwargs=inputs, dynamic_shapes=shapes) == 1
    dynamo_moe.verify(tmp_path / "model.onnx", model)


@pytest.mark.slow
def test_half_precision_and_dense_experts(compared: Callable[..., int]) -> None:
    def converted() -> nn.Module:
        torch.manual_seed(0)
        model = mixtral()[0].half().eval()
        dynamo_moe.convert(model)
        return model

    assert compared(converted, (), kwargs=mixtral()[1], target="dense") == 1


@pytest.mark.slow
@pytest.mark.parametrize("link", [False, True])
def test_checkpoints(tmp_path: Path, compared: Callable[..., int], link: bool) -> None:
    torch.manual_seed(0)
    model, inputs = mixtral()
    opened = opened_twice(model, tmp_path)
    assert compared(opened, (), kwargs=inputs, link_weights=link) == 1
