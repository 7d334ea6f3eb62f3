"""Small quantised checkpoints, and whether a file computes what one of them stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dynamo_moe.weights.checkpoints import load_checkpoint

GROUP = 32
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "use_cache": False,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4},
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
    },
}  # fmt: skip


def language_model(family: str, **sizes: Any) -> nn.Module:
    """Returns a small model of a family, with weights that are always the same."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def token_ids(*shape: int) -> Tensor:
    """Returns ids that are always the same."""
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments(*, symmetric: bool = True, group: int = GROUP) -> QuantizationArgs:
    """Returns compressed-tensors' description of 4 bits in groups."""
    return QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group
    )


def parameters_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Returns compressed-tensors' scales and zero points of a matrix ``[N, K]``."""
    groups = weight.float().unflatten(-1, (-1, args.group_size))
    scales, zero_points = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), args)
    return scales.to(weight.dtype), zero_points.round().to(torch.int8)


def compressed(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """Returns what compressed-tensors stores for a matrix."""
    scales, zero_points = parameters_of(weight, args)
    local = {"weight": weight, "weight_scale": scales}
    if not args.symmetric:
        local["weight_zero_point"] = zero_points
    return _compressor().compress(local, _scheme(args))


def decompressed(stored: dict[str, Tensor], args: QuantizationArgs) -> Tensor:
    """Returns the matrix that compressed-tensors makes of what it stored."""
    return _compressor().decompress(stored, _scheme(args))["weight"]


def _compressor() -> Any:
    return BaseCompressor.get_value_from_registry("pack-quantized")


def _scheme(args: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=args)


def save_packed(
    model: nn.Module, folder: Path, args: QuantizationArgs, packed: Callable[[str], bool]
) -> Path:
    """Saves a model of transformers; compressed-tensors packs the weights that are chosen."""
    model.save_pretrained(folder)
    add_packed(folder, args, packed)
    groups = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }
    set_quantization(folder, config)
    return folder


def add_packed(folder: Path, args: QuantizationArgs, packed: Callable[[str], bool]) -> None:
    """Makes compressed-tensors pack the weights of a checkpoint that are chosen."""
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if packed(name):
            prefix = name.removesuffix(".weight")
            parts = compressed(tensor, args).items()
            stored |= {f"{prefix}.{kind}": part.contiguous() for kind, part in parts}
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Says in a checkpoint's configuration how its weights are quantised."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def session_of(path: Path, optimized: Path | None = None) -> ort.InferenceSession:
    """Returns a file in ONNX Runtime, whose products of packed weights leave tokens as they are."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(path, options)


def check_file(path: Path, folder: Path) -> None:
    """Compares a file's logits with those of the checkpoint's decoded model, in float32."""
    whole = load_checkpoint(folder, dtype=torch.float32)
    session = session_of(path)
    for shape in ((1, 1), (3, 32)):
        ids = token_ids(*shape)
        (result,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            expected = whole(ids).logits
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-4, atol=1e-5)
        assert np.array_equal(result.argmax(-1), expected.argmax(-1).numpy())
