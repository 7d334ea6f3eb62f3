"""Small models of transformers, with the inputs that they are exported with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

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
Made = tuple[nn.Module, dict[str, Any]]


def language_model(name: str, **options: Any) -> Made:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.arange(8).reshape(2, 4)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(**options: Any) -> Made:
    return language_model("Llama", num_hidden_layers=5, **options)


def qwen2() -> Made:
    return language_model("Qwen2", num_hidden_layers=5)


def stablelm() -> Made:
    """Its LayerNorms make named tuples of PyTorch's, each of a class of its own."""
    return language_model("StableLm", num_hidden_layers=5)


def mixtral() -> Made:
    return language_model("Mixtral", num_hidden_layers=5, num_local_experts=4)


def qwen3_moe() -> Made:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return language_model("Qwen3Moe", num_hidden_layers=7, mlp_only_layers=[0, 1], **experts)


def gemma2() -> Made:
    return language_model("Gemma2", num_hidden_layers=8, sliding_window=2)


def gpt_oss() -> Made:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return language_model("GptOss", num_hidden_layers=8, sliding_window=3, **experts)


def deepseek_v3() -> Made:
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


def t5() -> Made:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=5, vocab_size=64, use_cache=False
    )
    ids = torch.arange(8).reshape(2, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    return transformers.T5ForConditionalGeneration(config), inputs


def swin() -> Made:
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 8], num_heads=[1, 2], window_size=4
    )
    return transformers.SwinModel(config), {"pixel_values": torch.zeros(2, 3, 64, 64)}


def vit() -> Made:
    config = transformers.ViTConfig(
        image_size=32, patch_size=16, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_hidden_layers=5,
    )  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": torch.zeros(2, 3, 32, 32)}


def bert() -> Made:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=5,
        vocab_size=64,
    )  # fmt: skip
    ids = torch.arange(8).reshape(2, 4)
    return transformers.BertModel(config), {"input_ids": ids}
