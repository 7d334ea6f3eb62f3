"""Checkpoints whose attention and MLPs are packed: the file keeps them so, in standard ONNX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dynamo_moe
from custom_ops.packed_weights import ENCODINGS, WHOLE
from dynamo_moe.weights.checkpoints import load_checkpoint
from dynamo_moe.weights.rounding import rounded
from packed_checkpoints import (
    GROUP,
    arguments,
    compressed,
    language_model,
    session_of,
    set_quantization,
    token_ids,
)
from tensorrt_builds import build, parse

LAYERS = 5
Stored = dict[str, Tensor]
Store = Callable[[Tensor], Stored]


def by_rounding(encoding: str, block: tuple[int, int], scale: str) -> Store:
    """Returns what stores a matrix as 8 bits, with scales beside."""
    dtype = torch.float8_e4m3fn if encoding == "fp8" else torch.int8

    def stored(matrix: Tensor) -> Stored:
        values, scales, *_ = rounded(matrix, ENCODINGS[encoding], block)
        return {"weight": values.view(dtype), scale: scales}

    return stored


def words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Packs eight codes of the last axis to a word."""
    eights = codes.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def of_4_bits(matrix: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes ``[K, N]``, scales and zero points ``[K / G, N]``."""
    values, scales, zeros, _ = rounded(
        matrix, ENCODINGS["int4"], (1, GROUP), zero_points=zero_points
    )
    pairs = values.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    zeros = torch.full(scales.shape, 8, dtype=torch.int8) if zeros is None else zeros
    return codes.t(), scales.t().contiguous(), zeros.t()


def float4(encoding: str) -> Store:
    """Returns what stores a matrix as compressed-tensors does E2M1 numbers."""

    def stored(matrix: Tensor) -> Stored:
        known = ENCODINGS[encoding]
        values, scales, _, factors = rounded(matrix, known, known.block or (1, 1))
        parts = {"weight_packed": values.view(torch.uint8), "weight_scale": scales}
        if factors is None:
            return parts | {"weight_scale": scales.view(torch.uint8)}
        return parts | {
            "weight_scale": scales.view(torch.float8_e4m3fn),
            "weight_global_scale": 1 / factors[:1, 0],
        }

    return stored


def gptq(matrix: Tensor) -> Stored:
    return gptq_in_order(matrix, torch.arange(matrix.shape[1]))


def gptq_by_activation(matrix: Tensor) -> Stored:
    """Groups columns by their size."""
    return gptq_in_order(matrix, matrix.abs().amax(dim=0).argsort())


def gptq_in_order(matrix: Tensor, order: Tensor) -> Stored:
    codes, scales, zeros = of_4_bits(matrix[:, order], zero_points=False)
    place = order.argsort()
    return {
        "qweight": words(codes[place].t()).t().contiguous(),
        "qzeros": words(zeros - 1),
        "scales": scales,
        "g_idx": (place // GROUP).int(),
    }


def awq(matrix: Tensor) -> Stored:
    codes, scales, zeros = of_4_bits(matrix, zero_points=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes, order), "qzeros": words(zeros, order), "scales": scales}


def of_compressed_tensors(form: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form}


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
INT4 = of_compressed_tensors("pack-quantized")
INT8, FP8 = of_compressed_tensors("int-quantized"), of_compressed_tensors("float-quantized")
FORMS: dict[str, tuple[dict[str, Any], Store, str]] = {
    "int4": (INT4, lambda w: compressed(w, arguments()), "INT4"),
    "int4 rows": (INT4, lambda w: compressed(w, arguments(group=w.shape[1])), "INT4"),
    "int4 zero points": (INT4, lambda w: compressed(w, arguments(symmetric=False)), "INT4"),
    "GPTQ": (GPTQ, gptq, "INT4"),
    "GPTQ by activation": (GPTQ | {"desc_act": True}, gptq_by_activation, "INT4"),
    "AWQ": (AWQ, awq, "INT4"),
    "int8 rows": (INT8, by_rounding("int8", (1, WHOLE), "weight_scale"), "INT8"),
    "int8 groups": (INT8, by_rounding("int8", (1, 32), "weight_scale"), "INT8"),
    "int8 groups of 8": (INT8, by_rounding("int8", (1, 8), "weight_scale"), "INT8"),
    "fp8 rows": (FP8, by_rounding("fp8", (1, WHOLE), "weight_scale"), "FLOAT8E4M3FN"),
    "fp8 one scale": (FP8, by_rounding("fp8", (WHOLE, WHOLE), "weight_scale"), "FLOAT8E4M3FN"),
    "mxfp4": (of_compressed_tensors("mxfp4-pack-quantized"), float4("mxfp4"), "INT8"),
    "nvfp4": (of_compressed_tensors("nvfp4-pack-quantized"), float4("nvfp4"), "INT8"),
    "fp8 blocks": (FP8_BLOCKS, by_rounding("fp8", (128, 128), "weight_scale_inv"), "FLOAT8E4M3FN"),
}
# One of each encoding, and of each kind of scales.
FEW = ("int4 zero points", "AWQ", "int8 rows", "fp8 blocks", "mxfp4", "nvfp4")


def packed_name(name: str) -> bool:
    return name.endswith("_proj.weight")


def checkpoint(
    folder: Path,
    form: str,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    chosen: Callable[[str], bool] = packed_name,
    **sizes: Any,
) -> Path:
    """Saves a model whose weights of a name are packed."""
    config, store, _ = FORMS[form]
    sizes = {"num_hidden_layers": LAYERS, **sizes}
    language_model(family, **sizes).to(dtype).save_pretrained(folder)
    stored: Stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if chosen(name):
            prefix = name.removesuffix("weight")
            stored |= {prefix + kind: part.contiguous() for kind, part in store(tensor).items()}
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, config)
    return folder


def exported(folder: Path, dtype: torch.dtype | None = torch.float32, **options: Any) -> Any:
    """Exports a checkpoint beside it, and returns the report."""
    model = dynamo_moe.open_checkpoint(folder, dtype=dtype)
    path = folder.with_suffix(".onnx")
    options = {"task": "text-generation", **options}
    return dynamo_moe.export_language_model(model, path, **options)


def types_of(path: Path) -> Counter[str]:
    """Returns how many matrices of the blocks a file has, by their types."""
    initializers = onnx.load(path).graph.initializer
    kinds = (t.data_type for t in initializers if packed_name(t.name))
    return Counter(map(onnx.TensorProto.DataType.Name, kinds))


@pytest.mark.parametrize(
    ("form", "layers"),
    [
        *(pytest.param(x, 1, marks=() if x in FEW else pytest.mark.every) for x in FORMS),
        pytest.param("int4", LAYERS, marks=pytest.mark.every),
        ("GPTQ by activation", LAYERS),
    ],
)
@pytest.mark.first(6)
def test_the_file_computes_what_the_decoded_model_does(
    form: str, layers: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": layers}
    folder = checkpoint(tmp_path / "model", form, **sizes)
    report = exported(folder)
    assert types_of(report.path) == {FORMS[form][2]: 7 * layers}
    assert report.nodes["DequantizeLinear"] == 7 * layers
    assert not any("traced one by one" in each for each in report.blocks)
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


def test_packed_projections_are_not_joined(tmp_path: Path) -> None:
    """ONNX Runtime's target joins queries, keys and values only where they are plain."""
    folder = checkpoint(tmp_path / "model", "int4", num_hidden_layers=1)
    report = exported(folder, target="onnxruntime")
    assert report.nodes["com.microsoft::MatMulNBits"] == 7
    assert "Split" not in report.nodes
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


@pytest.mark.parametrize(
    "form",
    [
        "int4 zero points",
        "fp8 blocks",
        "nvfp4",
        *(pytest.param(x, marks=pytest.mark.every) for x in ("int4", "int8 groups", "mxfp4")),
    ],
)
@pytest.mark.parametrize("stored_as", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.each_value
def test_every_number_is_the_decoded_one(
    form: str, stored_as: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """DequantizeLinear and the casts around it, by their definition, give the decoded bits."""
    folder = checkpoint(
        tmp_path / "model", form, dtype=stored_as, num_hidden_layers=1, intermediate_size=192
    )
    report = exported(folder, dtype)
    decoded = dict(load_checkpoint(folder, dtype=dtype).named_parameters())
    read = dequantized(onnx.load(report.path))
    assert len(read) == 7
    for name, matrix in read.items():
        assert torch.equal(matrix, decoded[name].t()), name


def dequantized(file: onnx.ModelProto) -> dict[str, Tensor]:
    """Returns what the nodes before products compute of packed weights, by the weights' names."""
    known = {t.name: as_torch(t) for t in file.graph.initializer}
    source = {name: name for name in known}
    result: dict[str, Tensor] = {}
    for node in file.graph.node:
        if not all(name in known for name in node.input):
            continue
        attributes = {a.name: a.i for a in node.attribute}
        x, *others = (known[name] for name in node.input)
        if node.op_type == "Cast":
            value = x.to(onnx_dtype(attributes["to"]))
        elif node.op_type == "Gather":
            value = x.index_select(attributes["axis"], others[0].int())
        elif node.op_type == "DequantizeLinear":
            repeats = attributes.get("block_size", 1)
            scales, *zeros = (t.repeat_interleave(repeats, 0) for t in others)
            offset = zeros[0].float() if zeros else torch.zeros(())
            value = ((x.float() - offset) * scales.float()).to(scales.dtype)
        else:
            continue
        known[node.output[0]], source[node.output[0]] = value, source[node.input[0]]
        if packed_name(source[node.input[0]]):
            result[source[node.input[0]]] = value
    return result


def as_torch(tensor: onnx.TensorProto) -> Tensor:
    array = onnx.numpy_helper.to_array(tensor)
    return torch.from_numpy(np.array(array, np.float32)).to(onnx_dtype(tensor.data_type))


def onnx_dtype(kind: int) -> torch.dtype:
    if kind == onnx.TensorProto.FLOAT16:
        return torch.float16
    return torch.bfloat16 if kind == onnx.TensorProto.BFLOAT16 else torch.float32


def test_blocks_that_are_not_packed_alike_are_traced_one_by_one(tmp_path: Path) -> None:
    """Their weights would otherwise be made as those of the third block."""

    def chosen(name: str) -> bool:
        return packed_name(name) and ".layers.4.mlp." not in name

    folder = checkpoint(tmp_path / "model", "int4", chosen=chosen)
    report = exported(folder)
    assert types_of(report.path) == {"INT4": 7 * LAYERS - 3, "FLOAT": 3}
    assert "not packed alike" in report.blocks[0]
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


def test_a_weight_that_something_else_uses_is_decoded(tmp_path: Path) -> None:
    """The embedding's, which the head shares."""

    def chosen(name: str) -> bool:
        return name == "model.embed_tokens.weight"

    sizes = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    folder = checkpoint(tmp_path / "model", "int4", chosen=chosen, **sizes)
    report = exported(folder)
    assert "DequantizeLinear" not in report.nodes
    why = "are decoded: other operators than products use them"
    assert any(why in note and "lm_head.weight" in note for note in report.notes)
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


def test_the_opset_is_raised_only_where_it_is_needed(tmp_path: Path) -> None:
    opsets = {}
    for form in ("int8 rows", "int8 groups"):
        report = exported(checkpoint(tmp_path / form, form, num_hidden_layers=1))
        opsets[form] = onnx.load(report.path).opset_import[0].version
    assert opsets == {"int8 rows": 20, "int8 groups": 21}


def test_gptq_that_is_not_symmetric_is_refused_where_it_says_so(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "GPTQ", num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("qzeros"))
    stored[name][0, 0] += 1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="qzeros has zero points that are not 8, and sym is set"):
        exported(folder)


def test_nothing_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "model", "int4")

    def decoded(*_: Any) -> Tensor:
        raise AssertionError("a weight is decoded")

    monkeypatch.setattr("dynamo_moe.weights.packed_tensors._Unpacking.__call__", decoded)
    exported(folder)


def test_all_of_a_mixture_is_packed(tmp_path: Path) -> None:
    """Experts in their nodes, attention beside them: the checkpoint's bytes and its tokens."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    folder = checkpoint(tmp_path / "model", "int4", "qwen3_moe", torch.float16, **sizes)
    model = dynamo_moe.open_checkpoint(folder)
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export_language_model(model, path, task="text-generation")
    assert report.operators == {"DroplessMoEPacked": 2}
    assert types_of(path) == {"INT4": 2 * 4}
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert abs(report.parameters_bytes - size) < 0.02 * size
    whole, ids = load_checkpoint(folder), token_ids(3, 32)
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids)}
    (logits,) = session_of(path).run(None, feeds)
    with torch.no_grad():
        expected = whole(ids).logits
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1).numpy())


def test_linked_files_hold_what_is_plain(tmp_path: Path) -> None:
    """Packed matrices lie otherwise in the checkpoint, and are written."""
    folder = checkpoint(tmp_path / "model", "int4")
    report = exported(folder, None, link_weights=True)
    assert types_of(report.path) == {"INT4": 7 * LAYERS}
    assert dynamo_moe.verify(report.path, load_checkpoint(folder)).passed


def test_weights_beside_the_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "int4 zero points", num_hidden_layers=1)
    report = exported(folder, external_data=True)
    assert [path.suffix for path in report.files] == [".onnx", ".data"]
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"layers_as_functions": True}, {"repeated_blocks": "off"}])
@pytest.mark.parametrize("form", ["int4", "int8 groups", "int8 rows"])
@pytest.mark.first(1)
def test_onnxruntime_multiplies_packed_weights(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", form, family="qwen3")
    report = exported(folder, **options)
    session_of(report.path, tmp_path / "optimized.onnx")
    nodes = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert nodes["MatMulNBits"] == 7 * LAYERS
    assert not nodes["DequantizeLinear"]


# --- ONNX Runtime's own operator ---

_NOT_MULTIPLIED = {"fp8 rows", "fp8 one scale", "fp8 blocks", "int8 groups of 8"}


@pytest.mark.parametrize(
    ("form", "layers"),
    [
        *(
            pytest.param(x, 1, marks=() if x in FEW else pytest.mark.every)
            for x in sorted(FORMS.keys() - _NOT_MULTIPLIED)
        ),
        pytest.param("int4", LAYERS, marks=pytest.mark.every),
    ],
)
def test_matmul_nbits_computes_what_the_decoded_model_does(
    form: str, layers: int, tmp_path: Path
) -> None:
    """With ONNX Runtime's own options: the node says that tokens keep their precision."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": layers}
    folder = checkpoint(tmp_path / "model", form, **sizes)
    report = exported(folder, target="onnxruntime", task="text-generation")
    assert report.nodes["com.microsoft::MatMulNBits"] == 7 * layers
    assert "DequantizeLinear" not in report.nodes
    assert f"{7 * layers} weights of products stay packed, for MatMulNBits" in report.notes
    whole, ids = load_checkpoint(folder, dtype=torch.float32), token_ids(3, 32)
    session = ort.InferenceSession(report.path)
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids)}
    (logits,) = session.run(None, feeds)
    with torch.no_grad():
        expected = whole(ids).logits
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["int4", "int4 zero points", "int8 groups", "AWQ"])
def test_matmul_nbits_of_float16(form: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", form, dtype=torch.float16, num_hidden_layers=1)
    report = exported(folder, torch.float16, target="onnxruntime")
    assert report.nodes["com.microsoft::MatMulNBits"] == 7
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float16)).passed


def test_matmul_nbits_with_scales_of_another_dtype(tmp_path: Path) -> None:
    """The operator has its tokens' and its scales' dtype in one."""
    folder = checkpoint(tmp_path / "model", "AWQ", dtype=torch.float16, num_hidden_layers=1)
    report = exported(folder, target="onnxruntime")
    assert report.nodes["com.microsoft::MatMulNBits"] == 7
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_matmul_nbits_does_not_take_is_dequantized(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tokens of bfloat16, or groups of 8."""
    form = "int8 groups" if dtype == torch.bfloat16 else "int8 groups of 8"
    folder = checkpoint(tmp_path / "model", form, dtype=dtype, num_hidden_layers=1)
    report = exported(folder, dtype, target="onnxruntime")
    assert report.nodes["DequantizeLinear"] == 7
    assert "com.microsoft::MatMulNBits" not in report.nodes


@pytest.mark.parametrize("options", [{"layers_as_functions": True}, {"repeated_blocks": "off"}])
@pytest.mark.first(1)
def test_matmul_nbits_in_files_of_other_forms(options: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "int4 zero points", family="qwen3")
    report = exported(folder, target="onnxruntime", **options)
    assert dynamo_moe.verify(report.path, load_checkpoint(folder, dtype=torch.float32)).passed


def test_the_checkpoint_s_codes_are_linked(tmp_path: Path) -> None:
    """They lie in the file as the operator takes them."""
    folder = checkpoint(tmp_path / "model", "int4", num_hidden_layers=1)
    report = exported(folder, None, target="onnxruntime", link_weights=True)
    file = onnx.load(report.path, load_external_data=False)
    kinds = {t.name: t for t in file.graph.initializer if packed_name(t.name)}
    assert len(kinds) == 7
    for tensor in kinds.values():
        location = next(e.value for e in tensor.external_data if e.key == "location")
        assert location == "model/model.safetensors"
    assert dynamo_moe.verify(report.path, load_checkpoint(folder)).passed


@pytest.mark.parametrize(
    ("form", "layers"),
    [
        ("int4", LAYERS),
        ("GPTQ", 1),
        *(pytest.param(x, 1, marks=pytest.mark.every) for x in ("AWQ", "fp8 blocks", "int8 rows")),
    ],
)
def test_the_file_has_the_checkpoint_s_bytes(form: str, layers: int, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers}
    folder = checkpoint(tmp_path / "model", form, dtype=torch.bfloat16, **wide)
    report = exported(folder, None)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    # GPTQ's has zero points, which are all the same.
    assert (0.95 if form == "GPTQ" else 0.98) * size < report.parameters_bytes < 1.02 * size


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    ["int4", "GPTQ by activation", "int8 rows", "int8 groups", "fp8 blocks", "mxfp4", "nvfp4"],
)
@pytest.mark.first(3)
def test_tensorrt_builds_engines(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 320}
    folder = checkpoint(tmp_path / "model", form, dtype=torch.float16, **sizes)
    report = exported(folder, dtype)
    built = build(report.path, "SM89", "SM120")
    assert built.built, built.reason()
    assert sum(kind == "DEQUANTIZE" for _, kind in built.layers) == 7


def test_tensorrt_takes_zero_points_decoded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "AWQ", num_hidden_layers=1)
    report = exported(folder)
    refused = parse(report.path)
    assert "Non-zero zero point is not supported" in refused.reason()
    assert any("zero points, which TensorRT refuses" in note for note in report.notes)
    report = exported(folder, opset=20)
    assert types_of(report.path) == {"FLOAT": 7}
    assert any("opset 20 has no DequantizeLinear of int4, but 21 has" in n for n in report.notes)
    assert build(report.path, "SM89").built
