"""``quantize``: experts of converted models, rounded to a packed format."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from custom_ops import reference
from custom_ops.packed_weights import ENCODINGS
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.weights.rounding import rounded
from listed_experts import COUNT, HIDDEN, WIDTH, Listed, tokens
from packed_checkpoints import (
    FAMILIES,
    arguments,
    compressed,
    language_model,
    parameters_of,
    token_ids,
)

INT4 = ENCODINGS["int4"]


def listed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Listed(**options), nn.Linear(WIDTH, WIDTH)).eval()
    assert len(dynamo_moe.convert(model).replaced) == 1
    return model


def decoded(experts: PackedExperts, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    scales, zero_points = (getattr(experts, f"{name}{s}") for s in ("_scales", "_zero_points"))
    return reference.unpacked("int4", getattr(experts, name), scales, zero_points).to(dtype)


# --- Rounding ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
def test_codes_are_those_of_compressed_tensors(symmetric: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[:3] = weight[:3].abs()
    weight[3] = -weight[3].abs()
    args = arguments(symmetric=symmetric)
    stored = compressed(weight, args)
    ours = rounded(weight, INT4, (1, 32), zero_points=not symmetric)
    assert torch.equal(ours.scales, stored["weight_scale"])
    if not symmetric:
        _, zero_points = parameters_of(weight, args)
        assert (ours.zero_points - (zero_points + 8)).abs().max() <= int(dtype != torch.float32)
    codes, theirs = (
        torch.stack([b & 15, b >> 4])
        for b in (ours.values.view(torch.uint8), stored["weight_packed"].view(torch.uint8))
    )
    # compressed-tensors divides in the weights' dtype, which may round to the next code.
    differing = (codes.int() - theirs.int()).abs()
    assert differing.max() <= int(dtype != torch.float32)
    assert (differing != 0).float().mean() < 0.05


@pytest.mark.parametrize("zero_points", [False, True])
def test_a_group_of_zeros_stays_zero(zero_points: bool) -> None:
    packed = rounded(torch.zeros(2, 64), INT4, (1, 32), zero_points=zero_points)
    assert torch.equal(reference.unpacked("int4", *packed), torch.zeros(2, 64).double())


@pytest.mark.parametrize("zero_points", [False, True])
def test_no_value_is_further_off_than_half_a_step(zero_points: bool) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)) + 0.5 * zero_points
    packed = rounded(weight, INT4, (1, 16), zero_points=zero_points)
    steps = packed.scales.repeat_interleave(16, dim=-1)
    error = (reference.unpacked("int4", *packed) - weight).abs()
    assert (error <= steps * (1.001 if zero_points else 0.5001)).all()


def test_mxfp4_is_the_specification_s() -> None:
    """The exponent of a group's greatest, less 2; elements as ml_dtypes rounds them."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)) * 3
    weight[0, :32] = 0
    weight[1, :32] = torch.tensor([4.0, 6.0, 7.9, 5.0, 3.5, 2.5, 1.75, 1.25]).repeat(4)
    packed = rounded(weight, ENCODINGS["mxfp4"], (1, 32))
    groups = weight.double().unflatten(-1, (-1, 32)).numpy()
    greatest = np.abs(groups).max(-1)
    exponents = np.where(greatest > 0, np.floor(np.log2(np.maximum(greatest, 1e-300))) - 2, -127)
    assert np.array_equal(packed.scales.view(torch.uint8).numpy(), exponents + 127)
    steps = np.clip(groups / 2.0 ** exponents[..., None], -6, 6)
    expected = steps.astype(ml_dtypes.float4_e2m1fn).astype(float) * 2.0 ** exponents[..., None]
    restored = reference.unpacked("mxfp4", packed.values, packed.scales)
    assert np.array_equal(restored.numpy(), expected.reshape(16, 64))


@pytest.mark.parametrize("sizes", [(128, 256), (200, 144), (32, 64)], ids=str)
def test_fp8_has_a_scale_for_each_block(sizes: tuple[int, int]) -> None:
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(5))
    weight[:32, :64] = 0
    packed = rounded(weight, ENCODINGS["fp8"], (128, 128))
    for row in range(packed.scales.shape[0]):
        for column in range(packed.scales.shape[1]):
            inside = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            greatest = weight[inside].abs().max()
            scale = packed.scales[row, column]
            torch.testing.assert_close(scale, greatest / 448 if greatest else torch.tensor(1.0))
            codes = (weight[inside] / scale).to(torch.float8_e4m3fn)
            assert torch.equal(
                packed.values[inside].view(torch.float8_e4m3fn).float(), codes.float()
            )


def test_nvfp4_uses_the_whole_range_of_its_scales() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(6)) * 1e-3
    packed = rounded(weight, ENCODINGS["nvfp4"], (1, 16))
    assert packed.scales.view(torch.float8_e4m3fn).float().max() == 448
    assert torch.equal(packed.global_scales, packed.global_scales[:1].expand(32, 1))
    restored = reference.unpacked("nvfp4", *packed)
    assert (restored - weight).abs().max() <= weight.abs().max() / 6 * 1.07
    zero = rounded(torch.zeros(32, 64), ENCODINGS["nvfp4"], (1, 16))
    assert torch.equal(reference.unpacked("nvfp4", *zero), torch.zeros(32, 64).double())


# --- Models ---


@pytest.mark.parametrize("weight_format", [name for name in ENCODINGS if name != "int4"])
def test_each_format(weight_format: str, tmp_path: Path) -> None:
    model = listed()
    plain, x, path = copy.deepcopy(model), tokens(3, 5), tmp_path / "model.onnx"
    report = dynamo_moe.quantize(model, weight_format)
    bits = {"int8": 8, "fp8": 8}.get(weight_format, 4)
    (layer,) = report.layers
    assert bits / 32 <= layer.bytes_after / layer.bytes_before < (bits + 3) / 32
    with torch.no_grad():
        loss = (model(x) - plain(x)).square().mean() / plain(x).square().mean()
    assert 1e-9 < loss < (2e-3 if bits == 8 else 2e-2)
    exported = dynamo_moe.export(model, (x,), path)
    assert exported.operators == {"DroplessMoEPacked": 1}
    assert dynamo_moe.verify(path, model).passed


def test_global_scales_survive_half_precision() -> None:
    """They may be as small as float16 does not hold."""
    model, x = listed(), tokens(4)
    for parameter in model[0].experts.parameters():
        parameter.data *= 1e-3
    dynamo_moe.quantize(model, "nvfp4")
    scales = model[0].packed_experts.w1_global_scales.clone()
    with torch.no_grad():
        expected = model[0](x)
    model.half()
    assert torch.equal(model[0].packed_experts.w1_global_scales, scales)
    with torch.no_grad():
        torch.testing.assert_close(model[0](x.half()).float(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("weight_format", ["int8", "fp8"])
def test_scales_from_elsewhere_are_checked_as_they_are_stored(weight_format: str) -> None:
    model = listed().half()
    sizes = {"int8": lambda m: (m.shape[0], 1), "fp8": lambda m: (1, 1)}[weight_format]
    if weight_format == "int8":
        with pytest.raises(ValueError, match="must be positive and finite"):
            dynamo_moe.quantize(
                model, weight_format, scales=lambda *a: torch.full(sizes(a[2]), 1e-9)
            )
    dynamo_moe.quantize(model, weight_format, scales=lambda *a: torch.full(sizes(a[2]), 0.01))
    dtype = torch.float32 if weight_format == "fp8" else torch.float16
    assert model[0].packed_experts.w1_scales.dtype == dtype


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.randn(4, 64)
    weight[1, 3] = torch.nan
    for name, block in (("mxfp4", (1, 32)), ("nvfp4", (1, 16)), ("fp8", (128, 128))):
        packed = rounded(weight, ENCODINGS[name], block)
        assert not reference.unpacked(name, *packed)[1, 3].isfinite()


@pytest.mark.parametrize(
    ("weight_format", "options", "message"),
    [
        ("mxfp4", {"group": 32}, "mxfp4 has blocks of its own, got group=32"),
        ("int8", {"zero_points": True}, "int8 has no zero points"),
        ("nvfp4", {"scales": lambda *_: None}, "nvfp4 takes no scales from elsewhere"),
    ],
)
def test_options_that_a_format_does_not_have(
    weight_format: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.quantize(listed(), weight_format, **options)


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
def test_a_list_of_experts(bias: bool, zero_points: bool, tmp_path: Path) -> None:
    model = listed(bias=bias)
    plain, x = copy.deepcopy(model), tokens(3, 5)
    report = dynamo_moe.quantize(model, "int4", group=16, zero_points=zero_points)
    (layer,) = report.layers
    assert (layer.module, report.left) == ("0", ())
    assert layer.bytes_before == 4 * 2 * COUNT * WIDTH * HIDDEN
    groups = 2 * COUNT * WIDTH * HIDDEN // 16
    assert layer.bytes_after == COUNT * WIDTH * HIDDEN + groups * (5 if zero_points else 4)
    experts = model[0].packed_experts
    for number, expert in enumerate(plain[0].experts):
        expert[0].weight.data = decoded(experts, "w1")[number]
        expert[2].weight.data = decoded(experts, "w2")[number]
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    for target in ("plugin", "onnxruntime"):
        path = tmp_path / f"{target}.onnx"
        exported = dynamo_moe.export(model, (x,), path, target=target)
        assert exported.operators == {"DroplessMoEPacked": 1}
        assert exported.layers == ("0",)
        (result,) = ort.InferenceSession(path).run(None, {"input": tokens(8, 5).numpy()})
        with torch.no_grad():
            close = {"rtol": 0, "atol": 2e-3} if target == "onnxruntime" else {}  # Its GELU.
            torch.testing.assert_close(torch.from_numpy(result), model(tokens(8, 5)), **close)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(1)
def test_models_of_transformers(family: str, tmp_path: Path) -> None:
    model = language_model(family)
    dynamo_moe.convert(model)
    report = dynamo_moe.quantize(model)
    assert [layer.module for layer in report.layers] == [
        f"model.layers.{layer}.mlp.experts" for layer in range(2)
    ]
    path = tmp_path / "model.onnx"
    exported = dynamo_moe.export(
        model, (token_ids(2, 7),), path, dynamic_shapes={"input_ids": {0: "batch", 1: "length"}}
    )
    assert exported.operators == {"DroplessMoEPacked": 2}
    assert dynamo_moe.verify(path, model).passed
    summary = dynamo_moe.inspect(path)
    assert [layer.precision for layer in summary.moe_layers] == ["int4", "int4"]
    after = sum(layer.bytes_after for layer in report.layers)
    sizes = [(layer.num_experts or 0, layer.expert_bytes or 0) for layer in summary.moe_layers]
    in_file = sum(experts * size for experts, size in sizes)
    # A node with biases has zero points and global scales before them, one for each expert.
    filled = sum(2 * experts * (1 + 4) for experts, _ in sizes)
    assert in_file in (after, after + filled)


def test_the_loss_of_rounding_is_small() -> None:
    model = listed()
    x = tokens(64)
    with torch.no_grad():
        before = model(x)
        dynamo_moe.quantize(model, group=32)
        loss = (model(x) - before).norm() / before.norm()
    assert 0.001 < loss < 0.1


def test_lazy_weights_are_rounded_as_they_are_written(tmp_path: Path) -> None:
    language_model("qwen3_moe").save_pretrained(tmp_path / "model")
    files = []
    for make in (dynamo_moe.open_checkpoint, _loaded):
        model = make(tmp_path / "model")
        dynamo_moe.convert(model)
        dynamo_moe.quantize(model, zero_points=True)
        files.append(tmp_path / f"{make.__name__}.onnx")
        shapes = {"input_ids": {0: "batch", 1: "length"}}
        dynamo_moe.export(model, (token_ids(2, 7),), files[-1], dynamic_shapes=shapes)
    assert files[0].read_bytes() == files[1].read_bytes()


def _loaded(folder: Path) -> nn.Module:
    from dynamo_moe.weights.checkpoints import load_checkpoint

    return load_checkpoint(folder)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  It was made here.


@pytest.mark.parametrize("changed", [copy.deepcopy, pickled])
def test_copies_compute(changed: Callable[[nn.Module], nn.Module]) -> None:
    model = listed()
    dynamo_moe.quantize(model)
    assert torch.equal(changed(model)(tokens(3)), model(tokens(3)))


def test_a_state_dict_has_the_bytes() -> None:
    model = listed()
    dynamo_moe.quantize(model)
    other = listed()
    dynamo_moe.quantize(other)
    other[0].packed_experts.w1.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(3)), model(tokens(3)))
    assert model.state_dict()["0.packed_experts.w1"].dtype == torch.int8
    assert "0.experts.0.0.weight" not in model.state_dict()


def test_gradients_reach_tokens_and_router() -> None:
    model = listed()
    dynamo_moe.quantize(model)
    x = tokens(5).requires_grad_()
    model(x).square().sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert float(model[0].gate.weight.grad.abs().sum()) > 0


def test_scales_from_elsewhere() -> None:
    seen = []

    def scales(path: str, expert: int, matrix: Tensor) -> Tensor:
        seen.append((path, expert))
        return torch.full((matrix.shape[0], matrix.shape[1] // 32), 0.125)

    model = listed()
    dynamo_moe.quantize(model, scales=scales)
    assert seen == [(f"0.{name}", expert) for name in ("w1", "w2") for expert in range(COUNT)]
    assert (model[0].packed_experts.w2_scales == 0.125).all()


def test_calls_before_do_not_keep_the_weights() -> None:
    model = listed()
    with torch.no_grad():
        model(tokens(3))
    dynamo_moe.quantize(model)
    assert model[0]._dynamo_moe_weights._weights is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_cast_model_computes(dtype: torch.dtype) -> None:
    model, x = listed(), tokens(5)
    dynamo_moe.quantize(model)
    with torch.no_grad():
        expected = model(x)
        result = model.to(dtype)(x.to(dtype))
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=3e-2, atol=3e-2)


def test_scales_in_any_dtype() -> None:
    model = listed()
    dynamo_moe.quantize(
        model, scales=lambda path, expert, w: w.abs().unflatten(1, (-1, 32)).amax(2).double()
    )
    assert model[0].packed_experts.w1_scales.dtype == torch.float32
    model(tokens(3))


# --- What is refused ---


def test_weights_of_two_owners() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aside = Listed(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.aside(self.layer(x))

    model = Aside().eval()
    dynamo_moe.convert(model)
    model.aside = model.layer.experts[1]
    expected = model(tokens(3))
    with pytest.raises(
        ValueError, match=r"layer\.experts\.1\.0\.weight is also aside\.0\.weight: "
    ):
        dynamo_moe.quantize(model)
    assert torch.equal(model(tokens(3)), expected)


def test_packed_experts_are_not_trained(tmp_path: Path) -> None:
    model = listed()
    dynamo_moe.quantize(model)
    with pytest.raises(ValueError, match="the experts of '0' are packed: quantise a model once it"):
        dynamo_moe.export_training(
            model, nn.functional.mse_loss, tokens(3), tokens(3), tmp_path / "train.onnx"
        )


def test_in_training_it_says_so() -> None:
    model = listed()
    dynamo_moe.quantize(model)
    with pytest.raises(NotImplementedError, match="the experts of Listed are packed: it computes"):
        model.train()(tokens(3))


def test_twice_leaves_what_is_packed() -> None:
    model = listed()
    dynamo_moe.quantize(model)
    report = dynamo_moe.quantize(model)
    assert report.layers == ()
    assert report.left == ("0",)
    assert "0 was packed already" in str(report)


def test_errors_leave_the_model() -> None:
    model = listed()
    expected = model(tokens(3))
    for options, message in (
        (
            {"weight_format": "int3"},
            "weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'",
        ),
        ({"group": 24}, r"0\.w1 has rows of 64 values, which group=24 must divide"),
        ({"group": 64}, r"0\.w2 has rows of 32 values, which group=64 must divide"),
        ({"group": 0}, "group must be at least 1, got 0"),
        (
            {"scales": lambda *_: torch.ones(2, 2)},
            r"0\.w1, expert 0, must have the shape \[32, 2\]",
        ),
        ({"scales": lambda *_: torch.zeros(32, 2)}, r"scales of 0\.w1, expert 0, must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            dynamo_moe.quantize(model, **options)
    assert torch.equal(model(tokens(3)), expected)
    with pytest.raises(ValueError, match=r"has no layers on torch\.ops\.moe; convert it first"):
        dynamo_moe.quantize(nn.Linear(3, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    model = listed()
    with torch.no_grad():
        model[0].experts[2][2].weight[1, 1] = value
    with pytest.raises(ValueError, match=r"0\.w2, expert 2, has weights that are not finite"):
        dynamo_moe.quantize(model)
    assert not any("packed_experts" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("family", ["llama4_text", "switch_transformers"])
def test_modules_that_adapters_put_in(family: str) -> None:
    layer, tokens_of = _of_adapter(family)
    dynamo_moe.convert(layer)
    plain = copy.deepcopy(layer)
    report = dynamo_moe.quantize(layer, group=16)
    assert [each.module for each in report.layers] == ["0"]
    experts, (x,) = layer[0].packed_experts, tokens_of
    parameters = plain[0].experts_parameters().values()
    for parameter, name in zip(parameters, ("w1", "w2"), strict=True):
        weight = decoded(experts, name)
        parameter.data = weight if weight.shape == parameter.shape else weight.mT
    with torch.no_grad():
        results = [model(x)[0] for model in (layer, plain)]
    torch.testing.assert_close(*results)


def _of_adapter(family: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    torch.manual_seed(0)
    if family == "llama4_text":
        from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

        config = transformers.Llama4TextConfig(
            hidden_size=64, intermediate_size=48, num_local_experts=4, num_experts_per_tok=1
        )
        moe = Llama4TextMoe(config)
    else:
        from transformers.models.switch_transformers.modeling_switch_transformers import (
            SwitchTransformersSparseMLP,
        )

        config = transformers.SwitchTransformersConfig(d_model=64, d_ff=48, num_experts=4)
        moe = SwitchTransformersSparseMLP(config)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.1)
    return nn.Sequential(moe).eval(), (tokens(2, 5),)


def test_the_projects_own_layers(tmp_path: Path) -> None:
    from dynamo_moe.models import DroplessMoEMlp

    model = nn.Sequential(DroplessMoEMlp(64, 32, num_experts=4, top_k=2)).eval()
    dynamo_moe.convert(model)
    dynamo_moe.quantize(model)
    report = dynamo_moe.export(model, (tokens(3),), tmp_path / "model.onnx")
    assert report.operators == {"DroplessMoEPacked": 1}
    assert dynamo_moe.verify(tmp_path / "model.onnx", model).passed
    assert "weight_format='int4'" in repr(model)
