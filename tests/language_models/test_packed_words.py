"""Checkpoints of GPTQ, AWQ and AutoRound: the same codes, in words of another order."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from safetensors.torch import load_file, save_file
from torch import Tensor

import dynamo_moe
from custom_ops.packed_weights import ENCODINGS
from dynamo_moe.weights.checkpoints import load_checkpoint
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import packed_weight
from dynamo_moe.weights.quantized_checkpoints import with_decoded
from packed_checkpoints import (
    arguments,
    decompressed,
    language_model,
    set_quantization,
    token_ids,
)

GROUP, ROWS, COLUMNS = 32, 48, 128
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "desc_act": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int",
    "bits": 4, "group_size": GROUP, "sym": False, "extra_config": {"lm_head": {"bits": 16}},
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs eight codes of the last axis to a word, one after the other."""
    *lead, last = codes.shape
    eights = codes.reshape(*lead, last // 8, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:-1], np.uint32)
    for place, column in enumerate(order):
        packed |= eights[..., column] << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32).copy())


def parts(
    seed: int, rows: int = ROWS, columns: int = COLUMNS, group: int = GROUP
) -> dict[str, np.ndarray]:
    """Returns codes ``[N, K]``, zero points and scales ``[N, K / G]``, and what they stand for."""
    random = np.random.default_rng(seed)
    groups = (rows, columns // group)
    codes, zeros = random.integers(0, 16, (rows, columns)), random.integers(1, 16, groups)
    scales = (random.random(groups) * 0.02 + 0.01).astype(np.float16)
    weight = (codes - zeros.repeat(group, 1)) * scales.astype(np.float64).repeat(group, 1)
    return {"codes": codes, "zeros": zeros, "scales": scales, "weight": weight}


def stored_gptq(part: dict[str, np.ndarray], *, less: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": words(part["codes"]).t().contiguous(),
        "qzeros": words(part["zeros"].T - less),
        "scales": torch.from_numpy(part["scales"]).t().contiguous(),
        "g_idx": torch.arange(part["scales"].shape[1])
        .repeat_interleave(part["codes"].shape[1] // part["scales"].shape[1])
        .int(),
    }


def stored_awq(part: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {
        "qweight": words(part["codes"].T, AWQ_ORDER),
        "qzeros": words(part["zeros"].T, AWQ_ORDER),
        "scales": torch.from_numpy(part["scales"]).t().contiguous(),
    }


def opened(stored: dict[str, Tensor], config: dict[str, Any]) -> Any:
    lazy = {f"a.{name}": LazyTensor.of_memory(tensor) for name, tensor in stored.items()}
    (result,) = with_decoded(lazy, config, torch.float32).values()
    return result


def packed_of(weight: Tensor) -> Any:
    return packed_weight(weight.unsqueeze(0))


@pytest.mark.parametrize(
    ("config", "less"),
    [
        (GPTQ, 1),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, 0),
        (AUTO_ROUND, 1),
        (AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"}, 0),
        # Columns in the order of their activations, all of one group.
        (GPTQ | {"desc_act": True, "group_size": -1}, 1),
    ],
)
def test_gptq(config: dict[str, Any], less: int) -> None:
    part = parts(0, group=COLUMNS if config["group_size"] < 0 else GROUP)
    weight = opened(stored_gptq(part, less=less), config)
    assert torch.equal(weight.read(), torch.from_numpy(part["weight"]).float())
    kind, packed, order = packed_of(weight)
    bytes_NB = packed.values.read()[0].view(torch.uint8).numpy()
    assert (kind, order) == ("int4", None)
    assert np.array_equal(bytes_NB & 15, part["codes"][:, ::2])
    assert np.array_equal(bytes_NB >> 4, part["codes"][:, 1::2])
    assert np.array_equal(packed.zero_points.read()[0].numpy(), part["zeros"])
    assert np.array_equal(packed.scales.read()[0].numpy(), part["scales"])


def stored_by_activation(part: dict[str, np.ndarray], seed: int) -> dict[str, Tensor]:
    """Returns a matrix whose columns, but not its groups, are in another order, as GPTQ stores it.

    Column i is column ``permutation(K)[i]`` of what the part stands for.
    """
    order = np.random.default_rng(seed).permutation(part["codes"].shape[1])
    stored = stored_gptq(part)
    stored["qweight"] = words(part["codes"][:, order]).t().contiguous()
    stored["g_idx"] = stored["g_idx"][torch.from_numpy(order)]
    return stored


def test_gptq_with_columns_by_activation() -> None:
    """Its codes stay, in the order of their groups."""
    part = parts(1)
    weight = opened(stored_by_activation(part, seed=2), GPTQ | {"desc_act": True})
    order = np.random.default_rng(2).permutation(COLUMNS)
    assert torch.equal(weight.read(), torch.from_numpy(part["weight"][:, order]).float())
    check_order(part, packed_of(weight), weight)


def check_order(part: dict[str, np.ndarray], found: Any, weight: Any) -> None:
    """Checks that packed columns are a matrix's, in the order that is said."""
    packed = found.packed.each(LazyTensor.read)
    assert (found.order.shape, found.order.dtype) == ((1, COLUMNS), torch.int64)
    matrix = ENCODINGS[found.encoding].decode(*packed, dtype=torch.float32)[0]
    assert torch.equal(matrix, weight.read()[:, found.order.read()[0]])
    assert torch.equal(packed.scales[0], torch.from_numpy(part["scales"]))


def test_gptq_of_8_bits_with_columns_by_activation() -> None:
    part = parts(1)
    stored, order = stored_8_bits(part), np.random.default_rng(3).permutation(COLUMNS)
    stored["qweight"] = stored_8_bits(part | {"codes": part["codes"][:, order]})["qweight"]
    stored["g_idx"] = torch.from_numpy(order // GROUP).int()
    weight = opened(stored, GPTQ | {"bits": 8, "sym": True, "desc_act": True})
    scales = part["scales"].astype(np.float64).repeat(GROUP, 1)
    expected = ((part["codes"] - 8) * scales)[:, order]
    assert torch.equal(weight.read(), torch.from_numpy(expected).float())
    check_order(part, packed_of(weight), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_with_columns_by_activation(bits: int) -> None:
    part, order = parts(1), np.random.default_rng(4).permutation(COLUMNS)
    codes = part["codes"][:, order]
    stored = {
        "weight_packed": words(codes)
        if bits == 4
        else stored_8_bits(part | {"codes": codes})["qweight"].t().contiguous(),
        "weight_scale": torch.from_numpy(part["scales"]),
        "weight_g_idx": torch.from_numpy(order // GROUP).int(),
    }
    scheme = {"weights": {"num_bits": bits, "type": "int"}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    weight = opened(stored, config | {"config_groups": {"a": scheme}})
    scales = part["scales"].astype(np.float64).repeat(GROUP, 1)
    expected = ((part["codes"] - 8) * scales)[:, order]
    assert torch.equal(weight.read(), torch.from_numpy(expected).float())
    check_order(part, packed_of(weight), weight)


def test_groups_of_unequal_size_are_found_as_they_are_read() -> None:
    stored = stored_gptq(parts(1))
    stored["g_idx"][0] = 1
    weight = opened(stored, GPTQ | {"desc_act": True})
    with pytest.raises(ValueError, match=r"a\.g_idx must name each of 4 groups 32 times"):
        weight.read()


def stored_8_bits(part: dict[str, np.ndarray]) -> dict[str, Tensor]:
    packed = np.ascontiguousarray(part["codes"] + 120, np.uint8).view(np.int32)
    groups, rows = part["scales"].T.shape
    return {
        "qweight": torch.from_numpy(packed).t().contiguous(),
        "qzeros": torch.full((groups, rows // 4), 0x7F7F7F7F, dtype=torch.int32),
        "scales": torch.from_numpy(part["scales"]).t().contiguous(),
    }


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"sym": True, "dynamic": {"-:lm_head": {}, "+:b": {"bits": 8, "group_size": 64}}},
        AUTO_ROUND
        | {"sym": True, "extra_config": {"b": {"bits": 8, "group_size": 64, "act_bits": None}}},
    ],
    ids=["GPTQModel", "AutoRound"],
)
def test_layers_have_bits_of_their_own(config: dict[str, Any]) -> None:
    narrow, wide = parts(7), parts(8, group=64)
    narrow["zeros"][:] = 8
    stored = {f"a.{name}": tensor for name, tensor in stored_gptq(narrow).items()}
    stored |= {f"b.{name}": tensor for name, tensor in stored_8_bits(wide).items()}
    lazy = {name: LazyTensor.of_memory(tensor) for name, tensor in stored.items()}
    tensors: Any = with_decoded(lazy, config, torch.float32)
    assert {name: packed_of(weight)[0] for name, weight in tensors.items()} == {
        "a.weight": "int4",
        "b.weight": "int8",
    }
    for name, part, group in (("a", narrow, GROUP), ("b", wide, 64)):
        expected = (part["codes"] - 8) * part["scales"].astype(np.float64).repeat(group, 1)
        assert torch.equal(tensors[f"{name}.weight"].read(), torch.from_numpy(expected).float())
    del config["dynamic" if "dynamic" in config else "extra_config"]
    with pytest.raises(
        ValueError, match=r"b\.qweight, .* is not packed in 4 bits with groups of 32"
    ):
        with_decoded(lazy, config, torch.float32)


def test_autoround_by_awq_s_words() -> None:
    part = parts(9)
    config = AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}
    weight = opened(stored_awq(part), config)
    assert torch.equal(weight.read(), torch.from_numpy(part["weight"]).float())


def test_awq_is_what_compressed_tensors_makes_of_it() -> None:
    part = parts(3)
    stored = stored_awq(part)
    weight = opened(stored, AWQ)
    assert torch.equal(weight.read(), torch.from_numpy(part["weight"]).float())
    judge = AutoAWQConverter(group_size=GROUP)
    made = judge.process({f"a.{name}": tensor for name, tensor in stored.items()})
    args = arguments(symmetric=False, group=GROUP)
    local = {name.removeprefix("a."): tensor for name, tensor in made.items()}
    assert torch.equal(weight.read().half(), decompressed(local, args).half())
    packed = packed_of(weight).packed
    assert torch.equal(packed.values.read()[0], local["weight_packed"].view(torch.int8))


def checkpoint(folder: Path, config: dict[str, Any], *, alike: bool = True) -> Path:
    """Saves a model whose experts have any codes.

    By activation, gate and up have one order of columns only if they are alike.
    """
    stored: dict[str, Tensor] = {}
    language_model("qwen3_moe").save_pretrained(folder)
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        if ".experts." in name:
            prefix = name.removesuffix("weight")
            part = parts(seed, *tensor.shape)
            if config["desc_act"]:
                inputs = name.replace("up_proj", "gate_proj") if alike else name
                kept = stored_by_activation(part, zlib.crc32(inputs.encode()))
            else:
                kept = stored_awq(part) if config is AWQ else stored_gptq(part)
            stored |= {prefix + kind: value for kind, value in kept.items()}
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, config)
    return folder


BY_ACTIVATION = GPTQ | {"desc_act": True}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPTQ, id="gptq", marks=pytest.mark.every),
        pytest.param(AWQ, id="awq"),
        pytest.param(BY_ACTIVATION, id="by activation"),
    ],
)
@pytest.mark.first(1)
def test_a_model(config: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", config)
    model = dynamo_moe.open_checkpoint(folder, dtype=torch.float32)
    report = dynamo_moe.convert(model)
    order = ", with columns in the order of their groups" * (config is BY_ACTIVATION)
    assert all(r.notes == (f"its experts stay packed (int4){order}",) for r in report.replaced)
    whole = load_checkpoint(folder, dtype=torch.float32)
    for target in ("plugin", "onnxruntime"):
        path = tmp_path / f"{target}.onnx"
        exported = dynamo_moe.export(
            model,
            (token_ids(2, 7),),
            path,
            dynamic_shapes={"input_ids": {0: "batch", 1: "length"}},
            target=target,
        )
        of_experts = config is BY_ACTIVATION  # Whose router is in front.
        operator = "DroplessMoEExpertsPacked" if of_experts else "DroplessMoEPacked"
        assert exported.operators == {operator: 2}
        ids = token_ids(3, 16)
        (result,) = ort.InferenceSession(path).run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            expected = whole(ids).logits
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-4, atol=1e-4)


def test_experts_whose_gate_and_up_have_two_orders_are_decoded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", BY_ACTIVATION, alike=False)
    report = dynamo_moe.convert(dynamo_moe.open_checkpoint(folder, dtype=torch.float32))
    notes = {note for replaced in report.replaced for note in replaced.notes}
    assert notes == {"its experts are decoded: not all of them are packed, or not alike"}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GPTQ | {"bits": 3}, {}, "gptq with bits=3 is not taken: load the model dequantised"),
        (AWQ | {"version": "gemv"}, {}, "awq with version='gemv' is not taken"),
        (GPTQ, {"scales": None}, r"a\.qweight has no a\.scales"),
        (GPTQ, {"qweight": None, "scales": None}, r"a\.qzeros has no a\.qweight"),
        (GPTQ | {"desc_act": True}, {"g_idx": None}, r"a\.qweight has no a\.g_idx"),
        (GPTQ | {"desc_act": True}, {"g_idx": torch.zeros(9)}, r"a\.g_idx, \[9\], must be \[128\]"),
        (GPTQ, {"qzeros": torch.zeros(4, 5).int()}, r"zero points \[4, 5\] is not packed"),
        (GPTQ | {"group_size": 64}, {}, "in 4 bits with groups of 64"),
        (AWQ | {"group_size": -1}, {}, "in 4 bits with groups of -1"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, {}, "auto-round with data_type='mx_fp' is not taken"),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, {}, "'auto_round:fp8' is not taken"),
        (AWQ, {"qweight": torch.zeros(128, 7).int()}, r"a\.qweight, \[128, 7\], with scales"),
    ],
)
def test_what_is_refused(
    config: dict[str, Any], change: dict[str, Tensor | None], message: str
) -> None:
    stored = (stored_awq if config["quant_method"] == "awq" else stored_gptq)(parts(4))
    changed = {k: change.get(k, v) for k, v in stored.items() if change.get(k, v) is not None}
    with pytest.raises(ValueError, match=message):
        opened(changed, config)


def test_columns_in_another_order_are_found_as_they_are_read() -> None:
    stored = stored_gptq(parts(5))
    stored["g_idx"] = stored["g_idx"].flip(0)
    weight = opened(stored, GPTQ)
    with pytest.raises(ValueError, match=r"a\.g_idx has columns in another order"):
        weight.read()


def test_a_zero_point_that_is_no_code() -> None:
    part = parts(6)
    part["zeros"][3, 1] = 16
    weight = opened(stored_gptq(part), GPTQ)
    with pytest.raises(ValueError, match=r"a\.qzeros has a zero point of 16"):
        weight.read()
