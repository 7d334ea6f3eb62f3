"""Tiny seeded models of every transformers architecture with expert layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_VOCABULARY = 64

# Set in every config that has the field.
COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    # Multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # Linear attention
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Sparse attention: everything is selected, because a selection could have ties.
    "index_topk": 128,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "use_cache": False,
    # Special tokens
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Groups of two experts, half of which are excluded.
_GROUPED = {"num_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
# Latent attention has as many key heads as query heads.
_LATENT = {"num_key_value_heads": 4}
# Rotary positions of three kinds: time, height and width.
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_DENSE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}

# Values that a state space model needs for its initialisation.
_KEPT = ("A_log", "dt_bias", "D")


@dataclass(frozen=True)
class Architecture:
    """A transformers class and the config that makes it tiny."""

    name: str
    """The model's folder in transformers."""
    model: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the config, in addition to the common ones."""
    inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    """Selects the forward's inputs from the usual ones."""
    code: str | None = None
    """The folder of its class, if another model's."""

    def build(self, **overrides: Any) -> PreTrainedModel:
        """Return the model with random weights; ``overrides`` go to the config.

        ``attn_implementation`` is the one that transformers prefers unless overridden.
        """
        attention = overrides.pop("attn_implementation", None)
        config = self.make_config(**overrides)
        torch.manual_seed(0)
        module = _module("modeling", self.code or self.name)
        model = module[self.model]._from_config(
            config,
            attn_implementation=attention,
            experts_implementation="eager",
            dtype=torch.float32,
        )
        _randomise(model)
        return model.eval()

    def make_config(self, **overrides: Any) -> PreTrainedConfig:
        """Return the config of the tiny model."""
        config_class = _module("configuration", self.name)[self.config]
        known = {item.name for item in fields(config_class)}
        common = {name: value for name, value in COMMON.items() if name in known}
        return config_class(**common | deepcopy(dict(self.options)) | overrides)


def _module(kind: str, folder: str) -> dict[str, Any]:
    return vars(import_module(f"transformers.models.{folder}.{kind}_{folder}"))


def example_inputs(
    architecture: Architecture, batch: int, length: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return keyword arguments of the forward, with random tokens and nothing masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, _VOCABULARY, (batch, length), generator=generator)
    return architecture.inputs({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _with_decoder(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return inputs | {"decoder_input_ids": inputs["input_ids"].flip(1)}


def _embedded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    table = torch.randn(
        _VOCABULARY, COMMON["hidden_size"], generator=torch.Generator().manual_seed(0)
    )
    return {
        "inputs_embeds": table[inputs["input_ids"]],
        "attention_mask": inputs["attention_mask"],
    }


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Give every parameter and every zero buffer values that a trained model could have.

    Initial routers and biases are zero, and initial weights too small for a token to matter.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, generator=generator)

    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in _KEPT:
                continue
            if parameter.ndim > 1 and not name.endswith("bias"):
                # An embedding tied to the head gets the head's values, which come last.
                parameter.copy_(normal(parameter, _fan_in(module, parameter) ** -0.5))
            else:
                # Norm weights are near 1, or near 0 if the model adds 1; biases are near 0.
                parameter.add_(normal(parameter, 0.1))
        for name, buffer in module.named_buffers(recurse=False):
            if f"{prefix}.{name}" not in persistent:
                continue
            if name == "tid2eid":
                scores = torch.rand(len(buffer), module.num_experts, generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
            elif buffer.is_floating_point() and not buffer.any():
                # The bias that a router adds to its scores for the selection.
                buffer.copy_(normal(buffer, 0.05))


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    if isinstance(module, nn.Embedding):
        return 1
    if isinstance(module, nn.Conv1d):
        return math.prod(weight.shape[1:])
    transposed = getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
    return weight.shape[-2 if transposed else -1]


_TABLE = [
    Architecture("afmoe", "AfmoeForCausalLM", "AfmoeConfig", {"route_scale": 1.5}),
    Architecture(
        "aria", "AriaTextForCausalLM", "AriaTextConfig", {"moe_num_experts": 6, "moe_topk": 2}
    ),
    Architecture("axk1", "AXK1ForCausalLM", "AXK1Config", _GROUPED | _LATENT),
    Architecture("axk2", "AXK2ForCausalLM", "AXK2Config", _GROUPED | _LATENT),
    Architecture(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        _GROUPED | _LATENT | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    Architecture("beam", "BeamForCausalLM", "BeamConfig", _GROUPED | _DENSE_SPARSE),
    Architecture("cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeConfig", {"logit_scale": 1.0}),
    Architecture(
        "deepseek_ocr2",
        "DeepseekOcr2TextModel",
        "DeepseekOcr2TextConfig",
        _GROUPED | _DENSE_SPARSE | {"topk_method": "group_limited_greedy"},
    ),
    Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        _GROUPED | _LATENT | {"topk_method": "group_limited_greedy"},
    ),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", _GROUPED | _LATENT),
    Architecture("deepseek_v32", "DeepseekV32ForCausalLM", "DeepseekV32Config", _GROUPED | _LATENT),
    Architecture(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            "num_key_value_heads": 1,
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "partial_rotary_factor": 0.5,
            # Those of published models are 128 and 4.
            "compress_rates": {
                "heavily_compressed_attention": 16,
                "compressed_sparse_attention": 4,
            },
            "o_groups": 2,
            "o_lora_rank": 8,
        },
    ),
    Architecture(
        "diffusion_gemma",
        "DiffusionGemmaEncoderTextModel",
        "DiffusionGemmaTextConfig",
        {"top_k_experts": 2, "global_head_dim": 16},
    ),
    Architecture("dots1", "Dots1ForCausalLM", "Dots1Config", _GROUPED | {"n_shared_experts": 1}),
    Architecture(
        "dots3_note",
        "Dots3NoteForCausalLM",
        "Dots3NoteTextConfig",
        _GROUPED | _LATENT | {"shared_experts_intermediate_size": 40},
    ),
    Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2},
    ),
    # It also has experts for images, which text does not reach.
    Architecture(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        "Ernie4_5_VLMoeTextConfig",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
            "rope_parameters": THREE_AXES | {"mrope_section": [1, 1, 2]},
        },
    ),
    Architecture("exaone_moe", "ExaoneMoeForCausalLM", "ExaoneMoeConfig", _GROUPED),
    Architecture("flex_olmo", "FlexOlmoForCausalLM", "FlexOlmoConfig"),
    Architecture("flint", "FlintForCausalLM", "FlintConfig", {"mlp_only_layers": [0]}),
    Architecture(
        "gemma4",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": _VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    Architecture("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig", _GROUPED),
    Architecture(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        _GROUPED | _LATENT,
    ),
    Architecture(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        "Glm4vMoeTextConfig",
        _GROUPED | {"rope_parameters": THREE_AXES | {"partial_rotary_factor": 1.0}},
    ),
    Architecture(
        "glm5_next",
        "Glm5NextTextModel",
        "Glm5NextTextConfig",
        _GROUPED
        | _LATENT
        | _DENSE_SPARSE
        | {
            "layer_types": ["linear_attention", "indexed_attention"],
            "qk_rope_head_dim": 0,
            "index_kpool": 2,
        },
    ),
    Architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _GROUPED | _LATENT),
    Architecture("gpt_oss", "GptOssForCausalLM", "GptOssConfig"),
    Architecture("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig"),
    Architecture("granitemoe_swa", "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig"),
    Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 40,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    Architecture(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {"shared_intermediate_size": 40},
    ),
    Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {"moe_topk": 2}
    ),
    Architecture("hy_v3", "HYV3ForCausalLM", "HYV3Config"),
    Architecture("hy_v4", "HYV4ForCausalLM", "HYV4Config", _GROUPED | _LATENT),
    Architecture(
        "hy_v4_vl",
        "HYV4VLTextModel",
        "HYV4VLTextConfig",
        _GROUPED | _LATENT | {"rope_parameters": THREE_AXES},
    ),
    Architecture(
        "inkling",
        "InklingForCausalLM",
        "InklingTextConfig",
        {
            "layer_types": ["hybrid_sliding", "hybrid"],
            "logits_mup_width_multiplier": 1.0,
            "rel_extent": 16,
            "d_rel": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    Architecture(
        "inkling2",
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        {
            "layer_types": ["hybrid_sliding", "hybrid"],
            "unpadded_vocab_size": _VOCABULARY,
            "rel_extent": 16,
            "d_rel": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    # The two layers in the middle run three times.
    Architecture(
        "inkling2_loop",
        "Inkling2LoopForCausalLM",
        "Inkling2LoopTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_gate_rank": 8,
            "unpadded_vocab_size": _VOCABULARY,
            "rel_extent": 16,
            "d_rel": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    Architecture(
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    Architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        _LATENT | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    Architecture("kolibri1", "Kolibri1ForCausalLM", "Kolibri1Config"),
    Architecture("laguna", "LagunaForCausalLM", "LagunaConfig"),
    Architecture(
        "lara_mini",
        "LaraMiniForCausalLM",
        "LaraMiniConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        },
    ),
    Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention"],
        },
    ),
    Architecture(
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
    ),
    Architecture("mellum", "MellumForCausalLM", "MellumConfig"),
    Architecture("mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", _GROUPED),
    Architecture(
        "minimax",
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    ),
    Architecture("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config"),
    Architecture(
        "minimax_m3_vl",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 40,
            "intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_block_size": 16,
            "rotary_dim": 4,
        },
    ),
    Architecture("mistral4", "Mistral4ForCausalLM", "Mistral4Config", _GROUPED | _LATENT),
    Architecture(
        "mistral_large4",
        "MistralLarge4TextModel",
        "MistralLarge4TextConfig",
        _GROUPED | _LATENT,
    ),
    Architecture("mixtral", "MixtralForCausalLM", "MixtralConfig"),
    Architecture(
        "muse_spark",
        "MuseSparkTextModel",
        "MuseSparkTextConfig",
        {"moe_hidden_size": 24, "num_local_experts": 4},
    ),
    Architecture(
        "nemotron_h",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _GROUPED
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "moe_shared_expert_intermediate_size": 40,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "use_mamba_kernels": False,
        },
    ),
    Architecture("olmoe", "OlmoeForCausalLM", "OlmoeConfig"),
    Architecture(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterForTokenClassification",
        "OpenAIPrivacyFilterConfig",
    ),
    Architecture("phimoe", "PhimoeForCausalLM", "PhimoeConfig"),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
    Architecture(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"norm_topk_prob": True}),
    Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    Architecture(
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinkerTextModel",
        "Qwen3OmniMoeTextConfig",
        {"rope_parameters": THREE_AXES},
    ),
    Architecture(
        "qwen3_vl_moe",
        "Qwen3VLMoeTextModel",
        "Qwen3VLMoeTextConfig",
        {"rope_parameters": THREE_AXES},
    ),
    # Its sparse attention is a data-dependent loop over tokens and cannot be exported.
    Architecture(
        "qwen4_exp",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 128,
            "indexer_compress_ratio": 2,
        },
    ),
    Architecture(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        "SarvamMLAConfig",
        _LATENT,
        code="deepseek_v3",
    ),
    Architecture("sarvam_moe", "Glm4MoeForCausalLM", "SarvamMoEConfig", code="glm4_moe"),
    Architecture("solar_open", "SolarOpenForCausalLM", "SolarOpenConfig", _GROUPED),
    Architecture(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "dropout_rate": 0.0,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        inputs=_with_decoder,
    ),
    Architecture(
        "unlimited_ocr",
        "UnlimitedOcrTextModel",
        "UnlimitedOcrTextConfig",
        _GROUPED | _LATENT | _DENSE_SPARSE | {"topk_method": "group_limited_greedy"},
    ),
    Architecture(
        "zaya",
        "ZayaForCausalLM",
        "ZayaConfig",
        {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 24},
    ),
]

ARCHITECTURES: dict[str, Architecture] = {item.name: item for item in _TABLE} | {
    # Two kinds of experts in one folder.
    "qwen3_omni_moe_talker": Architecture(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerModel",
        "Qwen3OmniMoeTalkerTextConfig",
        {"rope_parameters": THREE_AXES, "shared_expert_intermediate_size": 40},
        inputs=_embedded,
    ),
}
