"""Checkpoints in the further forms of compressed-tensors, ModelOpt and GPTQ, with their judges."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import dynamo_moe
from custom_ops.packed_weights import ENCODINGS
from dynamo_moe.weights.checkpoints import open_tensors
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import packed_weight
from dynamo_moe.weights.quantized_checkpoints import with_decoded
from dynamo_moe.weights.rounding import rounded
from moe_architectures import ARCHITECTURES
from packed_checkpoints import check_file, language_model, set_quantization, token_ids

Stored = dict[str, Tensor]
GROUP = 32


def arguments(bits: int, kind: str, group: int | None) -> QuantizationArgs:
    """Returns compressed-tensors' description of weights in groups, or in rows."""
    strategy = "channel" if group is None else "tensor_group" if kind == "nvfp4" else "group"
    return QuantizationArgs(
        num_bits=bits,
        type="int" if kind == "int" else "float",
        symmetric=True,
        strategy=strategy,
        group_size=group,
        scale_dtype={"nvfp4": torch.float8_e4m3fn, "int": None}.get(kind, torch.uint8),
    )


def compressor(form: str) -> Any:
    return BaseCompressor.get_value_from_registry(form)


def compressed(weight: Tensor, form: str, args: QuantizationArgs) -> Stored:
    """Returns what compressed-tensors stores for a matrix, and needs to restore it."""
    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    local = {"weight": weight}
    global_scale = None
    if form == "nvfp4-pack-quantized":
        global_scale = generate_gparam(weight.amin(), weight.amax())
        local["weight_global_scale"] = global_scale
    scales, _ = calculate_qparams(low, high, args, global_scale)
    local["weight_scale"] = scales.float()
    return compressor(form).compress(local, QuantizationScheme(targets=["Linear"], weights=args))


def decompressed(stored: Stored, form: str, args: QuantizationArgs) -> Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return compressor(form).decompress(dict(stored), scheme)["weight"].float()


@dataclass(frozen=True)
class Form:
    """A way to store a checkpoint's matrices.

    Attributes:
        encoding: What becomes of it.
        config: Its ``quantization_config``.
        store: From a matrix to its tensors.
        judge: From these to the matrix.
        rtol: How far the judge's numbers may be off.
    """

    encoding: str
    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    judge: Callable[[Stored], Tensor]
    # A quotient of two scales is rounded, or a product with a reciprocal.
    rtol: float = 3e-7


def of_compressed_tensors(form: str, encoding: str, args: QuantizationArgs) -> Form:
    groups = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return Form(
        encoding,
        config,
        partial(compressed, form=form, args=args),
        partial(decompressed, form=form, args=args),
        # Of this one compressed-tensors computes in bfloat16.
        rtol=2**-7 if encoding == "nvfp4" else Form.rtol,
    )


def modelopt_nvfp4(weight: Tensor) -> Stored:
    made = compressed(weight, "nvfp4-pack-quantized", arguments(4, "nvfp4", 16))
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": 1 / made["weight_global_scale"].reshape(()),
        "input_scale": torch.tensor(0.5),
    }


def modelopt_nvfp4_decoded(stored: Stored) -> Tensor:
    codes = stored["weight"].int()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    values = numbers[pairs & 7] * torch.where(pairs > 7, -1.0, 1.0)
    scales = stored["weight_scale"].float() * stored["weight_scale_2"]
    return values * scales.repeat_interleave(16, dim=1)


def modelopt_fp8(weight: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.5),
    }


def deepseek_v4(weight: Tensor) -> Stored:
    made = compressed(weight, "mxfp4-pack-quantized", arguments(4, "mxfp4", 32))
    return {
        "weight": made["weight_packed"].view(torch.int8),
        "scale": made["weight_scale"].view(torch.float8_e8m0fnu),
    }


def deepseek_v4_decoded(stored: Stored) -> Tensor:
    """As transformers does it."""
    to_plain = Fp8Dequantize(None)
    return to_plain._dequantize_one(stored["weight"], stored["scale"], torch.float32)


def deepseek_v4_dense(weight: Tensor) -> Stored:
    """E4M3 numbers, whose blocks have powers of two."""
    scale = torch.exp2((weight.abs().max() / 448).log2().ceil()).reshape(1, 1)
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "scale": scale.to(torch.float8_e8m0fnu),
    }


def gptq(weight: Tensor) -> Stored:
    """8 bits in groups, in words of four codes that are 128 more than the integers."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(dim=-1) / 127
    codes = (groups / scales[..., None]).round().flatten(-2).to(torch.int8).numpy()
    packed = (codes.view(np.uint8) ^ 128).view(np.int32)
    return {
        "qweight": torch.from_numpy(packed).t().contiguous(),
        "qzeros": torch.full((scales.shape[1], weight.shape[0] // 4), 0x7F7F7F7F).int(),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def gptq_decoded(stored: Stored) -> Tensor:
    codes = stored["qweight"].t().contiguous().numpy().view(np.uint8).astype(np.float32) - 128
    return torch.from_numpy(codes) * stored["scales"].t().repeat_interleave(GROUP, dim=1)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

FORMS = {
    "int8 words": of_compressed_tensors("pack-quantized", "int8", arguments(8, "int", GROUP)),
    "int8 groups": of_compressed_tensors("int-quantized", "int8", arguments(8, "int", GROUP)),
    "int8 rows": of_compressed_tensors("naive-quantized", "int8", arguments(8, "int", None)),
    "nvfp4": of_compressed_tensors("nvfp4-pack-quantized", "nvfp4", arguments(4, "nvfp4", 16)),
    "mxfp4": of_compressed_tensors("mxfp4-pack-quantized", "mxfp4", arguments(4, "mxfp4", 32)),
    "mxfp8": of_compressed_tensors("mxfp8-quantized", "fp8", arguments(8, "mxfp8", 32)),
    "ModelOpt nvfp4": Form(
        "nvfp4",
        MODELOPT,
        modelopt_nvfp4,
        modelopt_nvfp4_decoded,
    ),
    "ModelOpt fp8": Form(
        "fp8",
        MODELOPT | {"quant_algo": "FP8"},
        modelopt_fp8,
        lambda stored: stored["weight"].float() * stored["weight_scale"],
    ),
    "DeepSeek-V4 fp4": Form("mxfp4", BLOCKS, deepseek_v4, deepseek_v4_decoded),
    "DeepSeek-V4 fp8": Form("fp8", BLOCKS, deepseek_v4_dense, deepseek_v4_decoded),
    "GPTQ int8": Form(
        "int8",
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
        gptq,
        gptq_decoded,
    ),
}


BY_ROWS, INT8_WORDS = FORMS["int8 rows"].config, FORMS["int8 words"].config


def random_matrix(rows: int = 48, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.02


def opened(stored: Stored, config: dict[str, Any]) -> LazyTensor:
    lazy = {f"a.{name}": LazyTensor.of_memory(tensor) for name, tensor in stored.items()}
    tensors = with_decoded(lazy, config, torch.float32)
    assert list(tensors) == ["a.weight"]
    weight = tensors["a.weight"]
    assert isinstance(weight, LazyTensor)
    return weight


def packed_of(weight: LazyTensor) -> Any:
    """Returns its format, and the packed tensors."""
    return packed_weight(weight.unsqueeze(0))


@pytest.mark.parametrize("name", FORMS)
def test_a_matrix(name: str) -> None:
    """It is decoded as its library does it, and its bytes are the checkpoint's."""
    form, matrix = FORMS[name], random_matrix()
    stored = form.store(matrix)
    weight = opened(stored, form.config)
    torch.testing.assert_close(weight.read(), form.judge(stored), rtol=form.rtol, atol=0)
    assert (weight.read() - matrix).abs().max() < 0.2 * matrix.abs().max()
    kind, packed, _ = packed_of(weight)
    assert kind == form.encoding
    if kind in ("nvfp4", "mxfp4"):
        values = stored.get("weight_packed", stored.get("weight"))
        assert torch.equal(packed.values.read()[0], values.view(torch.int8))
        scales = stored.get("weight_scale", stored.get("scale"))
        assert torch.equal(packed.scales.read()[0], scales.view(torch.int8))


# One of each encoding; test_a_matrix has all.
FEW = ("nvfp4", "mxfp8", "ModelOpt fp8", "DeepSeek-V4 fp4", "int8 words")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(
            pytest.param("qwen3_moe", name, marks=() if name in FEW else pytest.mark.every)
            for name in FORMS
        ),
        pytest.param("deepseek_v3", "nvfp4", marks=pytest.mark.every),
    ],
)
@pytest.mark.first(3)
def test_a_model(family: str, name: str, tmp_path: Path) -> None:
    form, folder, path = FORMS[name], tmp_path / "model", tmp_path / "model.onnx"
    language_model(family).save_pretrained(folder)
    stored: Stored = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in key or key.endswith("o_proj.weight"):
            prefix = key.removesuffix("weight")
            stored |= {prefix + k: t.contiguous() for k, t in form.store(tensor.float()).items()}
        else:
            stored[key] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, form.config)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    notes = (f"its experts stay packed ({form.encoding})",)
    assert [replacement.notes for replacement in report.replaced] == [notes] * 2
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    exported = dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=shapes)
    assert exported.operators == {"DroplessMoEPacked": 2}
    check_file(path, folder)
    assert dynamo_moe.inspect(path).moe_layers[0].precision == form.encoding


def test_deepseek_v4_by_the_names_of_its_own_files(tmp_path: Path) -> None:
    """Beside quantised weights and their ``scale``, it has parameters of that name."""
    folder = tmp_path / "model"
    original = ARCHITECTURES["deepseek_v4"].build(moe_intermediate_size=32)
    original.save_pretrained(folder)
    stored: Stored = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        prefix = key.removesuffix("weight")
        if ".experts." in key:
            stored |= {prefix + k: t.contiguous() for k, t in deepseek_v4(tensor).items()}
        elif key.endswith(("wq_a.weight", "wo_b.weight")):
            stored |= {prefix + k: t for k, t in deepseek_v4_dense(tensor).items()}
        else:
            stored[key] = tensor
    assert {"model.hc_head.hc_scale", "model.layers.0.ffn.experts.0.w1.scale"} <= stored.keys()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, BLOCKS | {"expert_dtype": "fp4"})
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    expected = dict(original.named_parameters())
    for name, tensor in model.named_parameters():
        assert isinstance(tensor, LazyTensor)
        error = tensor.read() - (stored_as := expected.pop(name).detach())
        is_packed = ".experts." in name or name.endswith(("q_a_proj.weight", "o_b_proj.weight"))
        assert error.norm() <= (0.15 * stored_as.norm() if is_packed else 0), name
    assert not expected
    report = dynamo_moe.convert(model)
    notes = ("its experts stay packed (mxfp4)",)
    assert [replacement.notes for replacement in report.replaced] == [notes] * 2


def test_modelopt_s_own_file(tmp_path: Path) -> None:
    form, folder = FORMS["ModelOpt nvfp4"], tmp_path / "model"
    language_model("qwen3_moe").save_pretrained(folder)
    stored: Stored = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        prefix = key.removesuffix("weight")
        parts = form.store(tensor.float()) if ".experts." in key else {"weight": tensor}
        stored |= {prefix + name: part.contiguous() for name, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": said})
    )
    report = dynamo_moe.convert(dynamo_moe.open_checkpoint(folder))
    notes = ("its experts stay packed (nvfp4)",)
    assert [replacement.notes for replacement in report.replaced] == [notes] * 2


@pytest.mark.parametrize("sizes", [(), (300,), (3, 1, 2, 1)])
def test_modelopt_s_scales_of_fp8(sizes: tuple[int, ...]) -> None:
    """One, one of each row, or one of each block of 128 x 128."""
    weight = random_matrix(300, 256)
    scales = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) + 0.5
    stored = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scales}
    by_row = scales.expand(300) if scales.ndim < 2 else scales[:, 0].repeat_interleave(128, 0)[:300]
    columns = by_row.reshape(300, -1)
    expected = stored["weight"].float() * columns.repeat_interleave(256 // columns.shape[1], 1)
    algorithm = {0: "FP8", 1: "FP8_PER_CHANNEL_PER_TOKEN", 4: "fp8_pb_wo"}[len(sizes)]
    found = opened(stored, MODELOPT | {"quant_algo": algorithm})
    torch.testing.assert_close(found.read(), expected, rtol=2e-7, atol=0)
    assert packed_of(found)[0] == "fp8"


@pytest.mark.every
def test_modelopt_s_mixed_precision(tmp_path: Path) -> None:
    """As NVIDIA's Nemotron 3 have it: experts in NVFP4, other matrices in FP8 or not at all."""
    folder, path = tmp_path / "model", tmp_path / "model.onnx"
    ARCHITECTURES["nemotron_h"].build(moe_intermediate_size=32).save_pretrained(folder)
    stored: Stored = {}
    layers: dict[str, dict[str, Any]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        if ".experts." in key:
            parts, layers[layer] = modelopt_nvfp4(tensor), {"quant_algo": "W4A16_NVFP4"}
        elif key.endswith(("_proj.weight", "lm_head.weight")):
            parts, layers[layer] = modelopt_fp8(tensor), {"quant_algo": "FP8"}
        else:
            stored[key] = tensor
            continue
        stored |= {f"{layer}.{name}": part.contiguous() for name, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    mixed = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    set_quantization(folder, mixed)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    assert [each.notes for each in report.replaced] == [("its experts stay packed (nvfp4)",)]
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    exported = dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=shapes)
    assert exported.operators == {"DroplessMoEPacked": 1}
    check_file(path, folder)
    layers["lm_head"]["quant_algo"] = "W4A8_AWQ"
    set_quantization(folder, mixed | {"quantized_layers": {"quantized_layers": layers}})
    with pytest.raises(ValueError, match="quant_algo 'W4A8_AWQ' of lm_head is not taken; FP8"):
        dynamo_moe.open_checkpoint(folder)


MIXED = {
    "experts": of_compressed_tensors("pack-quantized", "int4", arguments(4, "int", GROUP)),
    "q_proj": FORMS["nvfp4"],
    "k_proj": FORMS["mxfp4"],
    "v_proj": FORMS["int8 groups"],
    "o_proj": FORMS["mxfp8"],
}


def test_compressed_tensors_mixed_precision(tmp_path: Path) -> None:
    """Each group of layers has a format of its own."""
    folder, path = tmp_path / "model", tmp_path / "model.onnx"
    language_model("qwen3_moe").save_pretrained(folder)
    judged: Stored = {}
    stored: Stored = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        part = next((part for part in MIXED if f".{part}." in key), None)
        parts = {"weight": tensor} if part is None else MIXED[part].store(tensor.float())
        judged[key] = tensor if part is None else MIXED[part].judge(parts)
        prefix = key.removesuffix("weight")
        stored |= {prefix + name: each.contiguous() for name, each in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    groups = {
        part: form.config["config_groups"]["group_0"]
        | {"targets": [f"re:.*{part}.*"], "format": form.config["format"]}
        for part, form in MIXED.items()
    }
    mixed = FORMS["nvfp4"].config | {"format": "mixed-precision", "config_groups": groups}
    set_quantization(folder, mixed)
    tensors = with_decoded(open_tensors(folder), mixed, torch.float32)
    for name, expected in judged.items():
        found: Any = tensors[name]
        torch.testing.assert_close(found.read(), expected.float(), rtol=2**-7, atol=0)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    notes = ("its experts stay packed (int4)",)
    assert [replacement.notes for replacement in report.replaced] == [notes] * 2
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=shapes)
    check_file(path, folder)
    groups["q_proj"]["format"] = "marlin-24"
    set_quantization(folder, mixed)
    with pytest.raises(ValueError, match="format 'marlin-24' is not taken"):
        dynamo_moe.open_checkpoint(folder)


# --- ModelOpt's stacks of experts ---


def fused_nvfp4(name: str, weight: Tensor, *, of_each: bool = False) -> Stored:
    """Returns what ModelOpt stores for ``[E, K, N]``: along K pairs, and groups of 16."""
    turned = weight.transpose(1, 2)
    greatest = turned.abs().amax(dim=(1, 2), keepdim=True) if of_each else turned.abs().max()
    factor = greatest / (6 * 448)
    groups = turned.unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(dim=-1) / (6 * factor)).to(torch.float8_e4m3fn)
    steps = groups / (scales.float() * factor).unsqueeze(-1)
    codes = torch.from_numpy(
        steps.flatten(-2).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    )
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return {
        name: pairs.transpose(1, 2).contiguous(),
        f"{name}_weight_scale": scales.transpose(1, 2).contiguous(),
        f"{name}_weight_scale_2": factor.reshape(-1) if of_each else factor,
        f"{name}_input_scale": torch.tensor(0.5),
    }


def fused_nvfp4_decoded(stored: Stored, name: str) -> Tensor:
    codes = stored[name].transpose(1, 2)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    numbers = pairs.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    factors = stored[f"{name}_weight_scale_2"].reshape(-1, 1, 1)
    scales = stored[f"{name}_weight_scale"].transpose(1, 2).float() * factors
    return (torch.from_numpy(numbers) * scales.repeat_interleave(16, dim=-1)).transpose(1, 2)


def fused_fp8(name: str, weight: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    return {
        name: (weight / scale).to(torch.float8_e4m3fn),
        f"{name}_weight_scale": scale,
        f"{name}_input_scale": torch.tensor(0.5),
    }


def fused_fp8_decoded(stored: Stored, name: str) -> Tensor:
    return stored[name].float() * stored[f"{name}_weight_scale"]


FUSED: dict[str, tuple[str, dict[str, Any], Callable[..., Stored], Callable[..., Tensor]]] = {
    "one factor": ("nvfp4", MODELOPT, fused_nvfp4, fused_nvfp4_decoded),
    "a factor of each": (
        *("nvfp4", MODELOPT | {"quant_algo": "W4A16_NVFP4"}),
        *(partial(fused_nvfp4, of_each=True), fused_nvfp4_decoded),
    ),
    "fp8": ("fp8", MODELOPT | {"quant_algo": "FP8"}, fused_fp8, fused_fp8_decoded),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_stack_of_experts(name: str) -> None:
    encoding, config, store, judge = FUSED[name]
    weight = torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[1] *= 3
    stored = store("experts.down_proj", weight)
    lazy = {key: LazyTensor.of_memory(tensor) for key, tensor in stored.items()}
    tensors = with_decoded(lazy, config, torch.float32)
    assert list(tensors) == ["experts.down_proj"]
    found: Any = tensors["experts.down_proj"]
    expected = judge(stored, "experts.down_proj")
    torch.testing.assert_close(found.read(), expected, rtol=2e-7, atol=0)
    assert (found.read() - weight).abs().max() < 0.2 * weight.abs().max()
    packed: Any = packed_weight(found.transpose(1, 2))
    assert packed[0] == encoding
    its = stored["experts.down_proj"].view(torch.int8)
    assert torch.equal(packed[1].values.read(), its.transpose(1, 2))


@pytest.mark.each_value
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
@pytest.mark.first(1)
def test_a_model_of_stacks(family: str, name: str, tmp_path: Path) -> None:
    """Matrices beside them are stored as ever."""
    encoding, config, store, _ = FUSED[name]
    folder, path = tmp_path / "model", tmp_path / "model.onnx"
    dense = FORMS["ModelOpt fp8" if encoding == "fp8" else "ModelOpt nvfp4"]
    sizes = {"num_local_experts": 4, "intermediate_size_mlp": 64, "moe_layers": [0, 1]}
    language_model(family, **sizes if family == "llama4_text" else {}).save_pretrained(folder)
    stored: Stored = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        prefix = key.removesuffix("weight")
        if key.endswith((".gate_up_proj", ".down_proj")):
            stored |= store(key, tensor)
        elif key.endswith("o_proj.weight"):
            stored |= {prefix + k: t.contiguous() for k, t in dense.store(tensor.float()).items()}
        else:
            stored[key] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, config)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    notes = (f"its experts stay packed ({encoding})",)
    assert [replacement.notes for replacement in report.replaced] == [notes] * 2
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    exported = dynamo_moe.export(model, (token_ids(2, 7),), path, dynamic_shapes=shapes)
    assert sum(exported.operators.values()) == 2
    assert all(operator.endswith("Packed") for operator in exported.operators)
    check_file(path, folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("one factor", {"_weight_scale_2": None}, "w has no w_weight_scale_2"),
        ("one factor", {"_weight_scale_2": torch.ones(2)}, r"\[2\], must be one, or one of each"),
        ("one factor", {"_weight_scale": torch.ones(3, 4, 48)}, "of torch.float32 is not nvfp4"),
        ("one factor", {"_weight_scale": torch.ones(4, 48)}, "is not nvfp4 of all experts"),
        ("fp8", {"_weight_scale": torch.ones(3, 48)}, "must be float8_e4m3fn of all experts with"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    _, config, store, _ = FUSED[name]
    stored = store("w", torch.ones(3, 64, 48))
    stored |= {f"w{suffix}": tensor for suffix, tensor in change.items()}
    given = {key: tensor for key, tensor in stored.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        with_decoded({k: LazyTensor.of_memory(t) for k, t in given.items()}, config, None)


REFUSED: list[tuple[str, Stored, dict[str, Any], str]] = [
    ("nvfp4", {"weight_global_scale": torch.ones(2)}, {}, r"a scale \[2\] for all of it"),
    ("nvfp4", {"weight_scale": torch.ones(48, 8)}, {}, "of torch.float32 is not nvfp4"),
    ("mxfp4", {"weight_scale": torch.ones(48, 2).to(torch.uint8)}, {}, "is not mxfp4"),
    ("int8 groups", {"weight_scale": torch.ones(48, 5)}, {}, r"must be \[48, G\], where G divides"),
    ("int8 words", {"weight_scale": torch.ones(48, 5)}, {}, "is not packed in 8 bits"),
    ("int8 rows", {"weight_zero_point": torch.ones(48, 1)}, {}, "8 bits have no zero points"),
    ("ModelOpt nvfp4", {"pre_quant_scale": torch.ones(128)}, {}, "a.pre_quant_scale: scales of a"),
    ("ModelOpt nvfp4", {}, {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not taken"),
    ("nvfp4", {}, {"format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized' is not"),
    ("GPTQ int8", {}, {"bits": 3}, "gptq with bits=3 is not taken"),
]


@pytest.mark.parametrize(("name", "change", "config", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    name: str, change: Stored, config: dict[str, Any], message: str
) -> None:
    form = FORMS[name]
    with pytest.raises(ValueError, match=message):
        opened(form.store(random_matrix()) | change, form.config | config)


@pytest.mark.parametrize(
    ("stored", "config"),
    [
        ({"weight": torch.ones(4, 8, 8).to(torch.int8)}, FORMS["int8 groups"].config),
        ({"gate_up_proj": torch.ones(4, 8, 8).to(torch.uint8)}, FORMS["ModelOpt nvfp4"].config),
        ({"gate_up_proj": torch.ones(8).to(torch.float8_e4m3fn)}, FORMS["ModelOpt fp8"].config),
        ({"weight": torch.ones(()).to(torch.int8), "weight_scale": torch.ones(())}, BY_ROWS),
        ({"weight_packed": torch.ones(8).int(), "weight_scale": torch.ones(())}, INT8_WORDS),
    ],
)
def test_what_no_reader_takes_is_refused(stored: Stored, config: dict[str, Any]) -> None:
    """It is never taken for the numbers that its codes are."""
    lazy = {f"a.{name}": LazyTensor.of_memory(tensor) for name, tensor in stored.items()}
    with pytest.raises(ValueError, match=r"a\.(gate_up_proj|weight)"):
        with_decoded(lazy, config, torch.float32)


def test_codes_of_which_nothing_is_said_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    language_model("qwen3_moe").save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"says nothing of a quantisation: .*o_proj\.weight"):
        dynamo_moe.open_checkpoint(folder)


def test_other_weights_are_decoded_in_the_checkpoint_s_dtype(tmp_path: Path) -> None:
    form, folder = FORMS["int8 rows"], tmp_path / "model"
    language_model("qwen3_moe").half().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    parts = form.store(stored["model.layers.0.self_attn.o_proj.weight"].float())
    stored |= {f"model.layers.0.self_attn.o_proj.{name}": part for name, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, form.config)
    weight = dynamo_moe.open_checkpoint(folder).model.layers[0].self_attn.o_proj.weight
    assert torch.equal(weight.read(), form.judge(parts).half())


@pytest.mark.parametrize("name", ["nvfp4", "ModelOpt nvfp4", "int8 words"])
def test_a_missing_tensor_is_named(name: str) -> None:
    stored = FORMS[name].store(random_matrix())
    del stored["weight_scale"]
    with pytest.raises(ValueError, match=r"has no a\.weight_scale|weight_scale_2 has no"):
        opened(stored, FORMS[name].config)


def test_zero_points_of_eight_bits_are_refused_when_they_are_read() -> None:
    stored = FORMS["GPTQ int8"].store(random_matrix())
    stored["qzeros"][0, 0] = 0
    with pytest.raises(ValueError, match=r"a\.qzeros has zero points that are not 128"):
        opened(stored, FORMS["GPTQ int8"].config).read()


@pytest.mark.parametrize("name", ["int8 groups", "int8 rows", "nvfp4"])
def test_rounding_is_that_of_the_library(name: str) -> None:
    """Of the same matrix, ``quantize`` makes the same codes and scales."""
    form, matrix = FORMS[name], random_matrix()
    stored, encoding = form.store(matrix), ENCODINGS[form.encoding]
    kept = opened(stored, form.config)
    group = {"int8 groups": GROUP, "int8 rows": 128}.get(name)
    ours = rounded(matrix, encoding, encoding.block or (1, group))
    theirs = packed_of(kept).packed
    for part, other in zip(ours, theirs, strict=True):
        if part is not None and part.dtype == torch.float32:
            torch.testing.assert_close(part, other.read()[0])
    restored = encoding.decode(*ours, dtype=torch.float32)
    ratio = (restored - matrix).square().mean() / (kept.read() - matrix).square().mean()
    assert 0.95 < ratio < 1.05
