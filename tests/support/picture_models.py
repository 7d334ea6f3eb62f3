"""Tiny seeded models of transformers that see pictures."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    DeepseekV3Config,
    Exaone4Config,
    GemmaConfig,
    Idefics3VisionConfig,
    LlamaConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from moe_architectures import ARCHITECTURES, COMMON, THREE_AXES

PICTURE = 60
"""The token that stands for a part of a picture."""

_TOKENS = {
    "image_token_id": PICTURE,
    "image_token_index": PICTURE,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}
# Set in every vision config that has the field.
_VISION: dict[str, Any] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_attention_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "image_size": 16,
}


def _only_in(version: str, reason: str) -> str:
    """Returns a reason that a version of transformers alone has."""
    return reason if transformers.__version__ == version else ""


@dataclass(frozen=True)
class PictureModel:
    """A transformers class and the config that makes it tiny."""

    name: str
    """The model's folder in transformers."""
    model: str
    config: str
    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configs, in addition to the common ones."""
    vision_class: Any = None
    text_class: Any = None
    """The configs' classes, where the model takes several."""
    is_dense: bool = False
    """Whether it has no experts."""
    refused: str = ""
    """Why it cannot be exported."""

    def build(self) -> PreTrainedModel:
        """Returns the model with random weights."""
        config_class = self._of("configuration", self.config)
        known = {item.name for item in fields(config_class)}
        ids = {name: token for name, token in _TOKENS.items() if name in known}
        config = config_class(
            text_config=self._text(), vision_config=self._vision(), **ids | dict(self.options)
        )
        torch.manual_seed(0)
        model: PreTrainedModel = self._of("modeling", self.model)(config).eval()
        generator = torch.Generator().manual_seed(0)
        of_embeddings = 1 / float(getattr(model.get_input_embeddings(), "embed_scale", 1))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Pictures' features are about as large as tokens' embeddings.
                scale = of_embeddings if "embed_tokens" in name else 0.2
                torch.nn.init.normal_(parameter, 0, scale, generator=generator)
        head: Any = model.get_output_embeddings()
        with torch.no_grad():
            head.weight[PICTURE] = 0  # No model writes this one.
        model.generation_config.eos_token_id = None
        return model

    def _vision(self) -> PreTrainedConfig:
        config_class = self.vision_class or self._own_class("vision_config")
        return _small(config_class, _VISION, self.vision)

    def _text(self) -> PreTrainedConfig:
        if self.name in ARCHITECTURES:
            return ARCHITECTURES[self.name].make_config(**deepcopy(dict(self.text)))
        return _small(self.text_class or self._own_class("text_config"), COMMON, self.text)

    def _own_class(self, part: str) -> Any:
        return self._of("configuration", self.config).sub_configs[part]

    def _of(self, kind: str, name: str) -> Any:
        return getattr(import_module(f"transformers.models.{self.name}.{kind}_{self.name}"), name)


def _small(
    config_class: Any, common: Mapping[str, Any], options: Mapping[str, Any]
) -> PreTrainedConfig:
    known = {item.name for item in fields(config_class)}
    taken = {name: value for name, value in common.items() if name in known}
    config: PreTrainedConfig = config_class(**taken | deepcopy(dict(options)))
    return config


_AXES = {"rope_parameters": THREE_AXES}
_DEEP = {"deepstack_visual_indexes": [0, 1]}

_AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 32,
    "downsample_hidden_size": 8,
}
_PROJECTED = {
    "intermediate_size": 128,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}

PICTURE_MODELS = {
    model.name: model
    for model in (
        PictureModel(
            "aria",
            "AriaForConditionalGeneration",
            "AriaConfig",
            vision_class=Idefics3VisionConfig,
            options={"projector_patch_to_query_dict": {16: 4}},
        ),
        PictureModel(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            text={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            options={"mm_tokens_per_image": 4, "tie_word_embeddings": False},
            vision_class=SiglipVisionConfig,
            is_dense=True,
        ),
        PictureModel(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            "Gemma4Config",
            {"head_dim": 8, "num_key_value_heads": 4, "pooling_kernel_size": 2},
            {
                "hidden_size_per_layer_input": 0,
                "pad_token_id": 0,
                "use_bidirectional_attention": "vision",
                "sliding_window": 8,
            },
            {"audio_token_id": 61, "tie_word_embeddings": False},
        ),
        PictureModel("glm4v_moe", "Glm4vMoeForConditionalGeneration", "Glm4vMoeConfig"),
        PictureModel(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            "Kimi_K25Config",
            {"pos_emb_height": 8, "pos_emb_width": 8},
            {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
            {"projection_hidden_size": 32, "tie_word_embeddings": False},
            text_class=DeepseekV3Config,
        ),
        PictureModel(
            "llava",
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            vision_class=CLIPVisionConfig,
            text_class=LlamaConfig,
            is_dense=True,
        ),
        PictureModel(
            "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig"
        ),
        PictureModel(
            "exaone4_5",
            "Exaone4_5_ForConditionalGeneration",
            "Exaone4_5_Config",
            {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
            text_class=Exaone4Config,
            is_dense=True,
        ),
        PictureModel(
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen2_5OmniThinkerConfig",
            {"window_size": 16, "fullatt_block_indexes": [1]},
            _AXES,
            {"vision_start_token_id": 62, "audio_config": _AUDIO},
            is_dense=True,
        ),
        PictureModel(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2_5_VLConfig",
            {"window_size": 16, "fullatt_block_indexes": [1]},
            _AXES,
            is_dense=True,
        ),
        PictureModel(
            "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", text=_AXES
        ),
        PictureModel(
            "qwen3_omni_moe",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3OmniMoeThinkerConfig",
            _DEEP,
            options={"vision_start_token_id": 62, "audio_config": _AUDIO},
        ),
        PictureModel(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLConfig",
            _DEEP,
            _AXES,
            is_dense=True,
        ),
        PictureModel(
            "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", _DEEP
        ),
        PictureModel(
            "ernie4_5_vl_moe",
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Ernie4_5_VLMoeConfig",
            refused=r"decides by the values of a tensor at .*ernie4_5_vl_moe",
        ),
        PictureModel(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            text_class=GemmaConfig,
            vision_class=SiglipVisionConfig,
            options={"projection_dim": 32},
            refused="the tokens of a picture see one another in PaliGemmaForConditionalGeneration",
        ),
        PictureModel(
            "glm5_next",
            "Glm5NextForConditionalGeneration",
            "Glm5NextConfig",
            refused=r"cannot take the model at .*glm5_next.*nonzero",
        ),
        # Its own forward fails in transformers 5.24.0, with text too.
        PictureModel(
            "llama4",
            "Llama4ForConditionalGeneration",
            "Llama4Config",
            _PROJECTED,
            refused=_only_in("5.24.0", "object has no attribute 'image_outputs'"),
        ),
        PictureModel(
            "mistral_large4",
            "MistralLarge4ForConditionalGeneration",
            "MistralLarge4Config",
            vision_class=PixtralVisionConfig,
            refused="takes image_sizes with its pictures",
        ),
    )
}
"""By name; those at the end are refused."""
