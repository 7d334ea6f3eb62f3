"""``dynamo_moe.load_infmoe`` against an unfolded implementation of InfMoE's formulas."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import dynamo_moe
from engine_checks import checked_engine
from infmoe_reference import infmoe_layer, random_weights
from moe_cases import assert_matches
from small_models import T5Encoder

VARIANTS = ("default", "cpm_2", "base_layer")
TARGETS = ("plugin", "dense")
NORM = np.random.default_rng(7).uniform(0.1, 3.0, 16).astype("f4")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def options_of(variant: str) -> dict[str, Any]:
    return {"variant": variant} | ({"layernorm_weight": NORM} if variant == "cpm_2" else {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], np.ndarray]:
    weights, centroids = random_weights()
    path = tmp_path_factory.mktemp("infmoe") / "experts.npz"
    np.savez(path, **weights)
    return path, weights, centroids


def tokens(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=generator) * scale


@each_variant
@pytest.mark.parametrize("shape", [(1, 16), (200, 16), (3, 7, 16), (0, 16)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_it_computes_infmoe_s_layer(saved, variant: str, shape: tuple[int, ...], scale: float):
    path, weights, centroids = saved
    options = options_of(variant)
    layer = dynamo_moe.load_infmoe(path, centroids, **options)
    x = tokens(*shape, scale=scale)
    expected = infmoe_layer(x.numpy(), weights, centroids, **options)
    assert_matches(layer(x), torch.from_numpy(expected), {torch.float32})


@each_variant
def test_the_norm_is_per_expert_and_the_variants_differ(saved, variant: str):
    path, weights, centroids = saved
    x = tokens(200, 16)
    results = [infmoe_layer(x.numpy(), weights, centroids, **options_of(v)) for v in VARIANTS]
    others = [v for v in VARIANTS if v != variant]
    layer = dynamo_moe.load_infmoe(path, centroids, **options_of(variant))
    for other in others:
        assert np.abs(layer(x).detach().numpy() - results[VARIANTS.index(other)]).max() > 0.1
    experts = np.argmax(x.numpy() @ centroids, axis=1)
    assert len(set(experts)) == 4  # Every expert is tested.


def test_scores_beyond_where_the_sigmoid_is_one(saved):
    path, weights, centroids = saved
    x = tokens(100, 16, scale=100.0)
    scores = x.numpy() @ centroids
    assert (np.sort(scores, axis=1)[:, -2] > 20).mean() > 0.5
    layer = dynamo_moe.load_infmoe(path, centroids, variant="base_layer")
    expected = infmoe_layer(x.numpy(), weights, centroids, "base_layer")
    assert_matches(layer(x), torch.from_numpy(expected), {torch.float32})


def test_the_layer_is_one_node_s_worth(saved):
    path, _, centroids = saved
    layer = dynamo_moe.load_infmoe(path, centroids, variant="base_layer")
    exported = torch.export.export(layer, (tokens(3, 16),))
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.moe.dropless.default]
    assert "experts=4, width=16, hidden=24, mixes=True" in repr(layer)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_every_float_is_taken(tmp_path: Path, dtype: str):
    weights, centroids = random_weights(dtype=dtype)
    np.savez(tmp_path / "w.npz", **weights)
    layer = dynamo_moe.load_infmoe(tmp_path / "w.npz", centroids)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    norm, wi = (weights[f"2/{name}"].astype("f8") for name in ("layer_norm_weight", "wi_1_weight"))
    folded = layer.w1[2, 24:].detach().numpy()
    # Rounded once, from the product of the file's arrays.
    np.testing.assert_array_equal(folded, (wi * norm).astype("f4"))
    expected = infmoe_layer(tokens(9, 16).numpy(), weights, centroids)
    assert_matches(layer(tokens(9, 16)), torch.from_numpy(expected), {torch.float32})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_experts_of_another_dtype(saved, dtype: torch.dtype):
    path, weights, centroids = saved
    layer = dynamo_moe.load_infmoe(path, centroids, experts_dtype=dtype)
    assert layer.w1.dtype == layer.w2.dtype == dtype
    assert layer.router_weight.dtype == torch.float32
    x = tokens(40, 16)
    expected = infmoe_layer(x.numpy(), weights, centroids)
    assert_matches(layer(x), torch.from_numpy(expected), {torch.float32, dtype})


def test_convert_casts_a_loaded_layer(saved):
    path, _, centroids = saved
    model = nn.Sequential(dynamo_moe.load_infmoe(path, centroids))
    dynamo_moe.convert(model, experts_dtype=torch.bfloat16)
    assert model[0].w1.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["array", "tensor", "npy", "bfloat16", "float64", "view"])
def test_centroids_come_in_any_form(saved, tmp_path: Path, form: str):
    path, _, centroids = saved
    exact = torch.from_numpy(centroids).bfloat16().float()  # In whatever form they are passed.
    np.save(tmp_path / "centroids.npy", exact.numpy())
    forms = {
        "array": exact.numpy(),
        "tensor": nn.Parameter(exact),
        "npy": tmp_path / "centroids.npy",
        "bfloat16": exact.bfloat16(),
        "float64": exact.double(),
        "view": np.ascontiguousarray(exact.numpy().T).T,
    }
    layer = dynamo_moe.load_infmoe(str(path), forms[form])
    assert torch.equal(layer.router_weight, exact.T)
    assert layer.router_weight.is_contiguous()


def test_the_caller_s_array_is_not_shared(saved):
    path, _, centroids = saved
    mine = centroids.copy()
    layer = dynamo_moe.load_infmoe(path, mine)
    mine[:] = 0
    assert layer.router_weight.abs().sum() > 0


@each_variant
def test_identity_returns_the_tokens(variant: str):
    layer = dynamo_moe.load_infmoe(
        "not read.npz", np.zeros((16, 4)), sublayer="Identity", **options_of(variant)
    )
    x = tokens(5, 16)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("target", TARGETS)
@each_variant
def test_it_exports_and_verifies(saved, tmp_path: Path, variant: str, target: str):
    path, weights, centroids = saved
    layer = dynamo_moe.load_infmoe(path, centroids, **options_of(variant)).eval()
    report = dynamo_moe.export(
        layer, tokens(1, 5, 16), tmp_path / "layer.onnx", target=target,
        dynamic_shapes={"x": {1: "length"}},
    )  # fmt: skip
    cases = [(tokens(*shape, 16),) for shape in ((1, 1), (3, 9), (2, 64))]
    verified = dynamo_moe.verify(report.path, layer, cases)
    assert all(case.routing_agreement == 1.0 for case in verified.cases)
    session = onnxruntime.InferenceSession(str(report.path))
    x = tokens(2, 33, 16)
    (y,) = session.run(None, {"x": x.numpy()})
    expected = infmoe_layer(x.numpy(), weights, centroids, **options_of(variant))
    assert_matches(torch.from_numpy(y), torch.from_numpy(expected), {torch.float32})


def test_onnxruntime_s_own_operator_has_no_gated_gelu(saved, tmp_path: Path):
    layer = dynamo_moe.load_infmoe(saved[0], saved[2]).eval()
    with pytest.raises(ValueError, match="no form of a gated expert with activation 'gelu_tanh'"):
        dynamo_moe.export(layer, tokens(5, 16), tmp_path / "m.onnx", target="onnxruntime")


def test_no_more_than_one_expert_is_held_twice(tmp_path: Path):
    weights, centroids = random_weights(experts=16, width=64, hidden=128)
    np.savez(tmp_path / "w.npz", **weights)
    everything = sum(array.nbytes for array in weights.values())
    tracemalloc.start()
    layer = dynamo_moe.load_infmoe(tmp_path / "w.npz", centroids)
    _, peak = tracemalloc.get_traced_memory()  # NumPy's memory, not PyTorch's.
    tracemalloc.stop()
    assert layer.w1.nbytes + layer.w2.nbytes > 0.99 * everything
    assert peak < everything / 6


# --- A whole network ---


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Three blocks, each with an MoE layer of a different variant."""
    folder, layers = tmp_path_factory.mktemp("encoder"), []
    for number, variant in enumerate(VARIANTS):
        weights, centroids = random_weights(experts=4 + number, seed=number)
        np.savez(folder / f"{number}.npz", **weights)
        layers.append(
            dynamo_moe.load_infmoe(folder / f"{number}.npz", centroids, **options_of(variant))
        )
    torch.manual_seed(0)
    return T5Encoder(vocabulary=50, width=16, heads=4, feed_forwards=layers).eval()


def export_encoder(encoder: nn.Module, folder: Path, target: str) -> dynamo_moe.ExportReport:
    return dynamo_moe.export(
        encoder, torch.zeros(2, 7, dtype=torch.int64), folder / "encoder.onnx", target=target,
        dynamic_shapes={"ids": {0: "batch", 1: "length"}},
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_whole_encoder_exports_in_one_piece(encoder, tmp_path: Path, target: str):
    generator = torch.Generator().manual_seed(0)

    def ids(batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, 50, (batch, length), generator=generator)

    report = export_encoder(encoder, tmp_path, target)
    cases = [(ids(*shape),) for shape in ((1, 1), (1, 40), (3, 13), (5, 2))]
    verified = dynamo_moe.verify(report.path, encoder, cases)
    assert all(case.routing_agreement == 1.0 for case in verified.cases)
    summary = dynamo_moe.inspect(report.path)
    assert summary.inputs[0].shape == ("batch", "length")
    if target == "plugin":
        assert [layer.name for layer in summary.moe_layers] == [
            f"blocks.{number}.feed_forward" for number in range(3)
        ]


@pytest.mark.parametrize("target", TARGETS)
def test_tensorrt_builds_a_whole_encoder(encoder, tmp_path: Path, target: str):
    engine = checked_engine(export_encoder(encoder, tmp_path, target).path)
    assert engine.built, engine.reason()


# --- Errors ---


def changed(saved: Any, tmp_path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {**saved[1], **changes}
    path = tmp_path / "w.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"2/wo_weight": None}, ValueError, "missing 2/wo_weight; centroids .* have 4 experts"),
        (
            {f"{n}/{w}_weight": None for n in (1, 3) for w in ("wi_0", "wi_1", "wo")},
            ValueError,
            "missing 1/wi_0_weight, .*, 3/wi_1_weight and 1 more; cent",
        ),
        (
            {"4/wo_weight": np.zeros(3)},
            ValueError,
            "of expert 4, but centroids .* only the experts 0..3",
        ),
        (
            {"7/wo_weight": np.zeros(3)},
            ValueError,
            "has weights of expert 7, but .* only the experts",
        ),
        ({"00/wo_weight": np.zeros(3)}, ValueError, "unknown arrays 00/wo_weight; a T5_FF layer"),
        ({"0/layer_norm_bias": np.zeros(16)}, ValueError, "unknown arrays 0/layer_norm_bias;"),
        (
            {"1/layer_norm_weight": np.zeros(15, "f4")},
            ValueError,
            r"1/layer_norm_weight must be \[D\] = \[16\], got \[15\]",
        ),
        (
            {"0/wi_0_weight": np.zeros((24, 12), "f4")},
            ValueError,
            r"0/wi_0_weight must be \[H, D\] = \[24, 16\], got \[24, 12\]",
        ),
        (
            {"0/wi_0_weight": np.zeros((0, 16), "f4")},
            ValueError,
            "H must be at least 1, got 0 rows of 0/wi_0_weight",
        ),
        (
            {"0/wi_0_weight": np.zeros((), "f4")},
            ValueError,
            r"0/wi_0_weight must be \[H, D\] = \[16\], got \[\]",
        ),
        (
            {"3/wi_1_weight": np.zeros((23, 16), "f4")},
            ValueError,
            r"3/wi_1_weight must be \[H, D\] = \[24, 16\], got \[23, 16\]",
        ),
        (
            {"2/wo_weight": np.zeros((24, 16), "f4")},
            ValueError,
            r"2/wo_weight must be \[D, H\] = \[16, 24\], got \[24, 16\]",
        ),
        (
            {"1/wi_1_weight": np.zeros((24, 16), "i4")},
            TypeError,
            "1/wi_1_weight must be float16, float32 or float64, got int32",
        ),
        (
            {"1/wi_1_weight": np.zeros((24, 16), "c8")},
            TypeError,
            "1/wi_1_weight must be float16, float32 or float64, got complex64",
        ),
        (
            {"1/wi_1_weight": np.array([[None]])},
            ValueError,
            "1/wi_1_weight is not a plain array; pickled objects can run any code",
        ),
        (
            {"1/wi_1_weight": np.full((24, 16), np.nan, "f4")},
            ValueError,
            "1/wi_1_weight times 1/layer_norm_weight must be finite in float32, .* 384 of its 384",
        ),
        (
            {"2/wo_weight": np.full((16, 24), 1e300)},
            ValueError,
            r"2/wo_weight must be finite in float32, whose greatest number is 3.4028e\+38",
        ),
    ],
)
def test_weights_that_do_not_fit(saved, tmp_path: Path, changes, error, message: str):
    with pytest.raises(error, match=message):
        dynamo_moe.load_infmoe(changed(saved, tmp_path, **changes), saved[2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sublayer": "GLU"}, ValueError, "sublayer must be one of T5_FF, Identity; got 'GLU'"),
        ({"variant": "cpm_3"}, ValueError, "variant must be one of default, .*; got 'cpm_3'"),
        ({"variant": "cpm_2"}, ValueError, "variant 'cpm_2' needs layernorm_weight"),
        ({"layernorm_weight": NORM}, ValueError, "variant 'default' takes no layernorm_weight"),
        ({"experts_dtype": torch.int8}, TypeError, "experts_dtype must be one of float32, .*int8"),
        (
            {"variant": "cpm_2", "layernorm_weight": NORM[:5]},
            ValueError,
            r"layernorm_weight must be \[D\] = \[16\] as centroids \[D, E\], got \[5\]",
        ),
        (
            {"variant": "cpm_2", "layernorm_weight": NORM.astype(int)},
            TypeError,
            "layernorm_weight must be float16, float32 or float64, got int64",
        ),
        ({"centroids": np.zeros(16, "f4")}, ValueError, r"centroids must be \[D, E\], got \[16\]"),
        (
            {"centroids": np.zeros((16, 0), "f4")},
            ValueError,
            r"centroids must be \[D, E\], got \[16, 0\]",
        ),
        ({"centroids": torch.zeros(16, 4).int()}, TypeError, "centroids must be float16, .*int32"),
        # [E, D] with 4 experts looks like 16 experts.
        (
            {"centroids": np.zeros((4, 16), "f4")},
            ValueError,
            r"missing 4/layer_norm_weight, .*; they look like \[E, D\]: pass the transpose",
        ),
        # Here no array is missing.
        ({"centroids": np.zeros((4, 2), "f4")}, ValueError, "of expert 2, 3.*pass the transpose"),
        ({"centroids": np.zeros((4, 4), "f4")}, ValueError, r"must be \[H, D\] = \[24, 4\], got"),
        (
            {"centroids": np.full((16, 4), 1e300)},
            ValueError,
            "^centroids must be finite in float32, .*; 64 of its 64 elements are not",
        ),
        (
            {"variant": "cpm_2", "layernorm_weight": NORM * np.inf},
            ValueError,
            "^centroids times layernorm_weight must be finite in float32",
        ),
        ({"centroids": "nowhere.npy"}, FileNotFoundError, "nowhere.npy: there is no such file"),
        ({"npz_path": "nowhere.npz"}, FileNotFoundError, "nowhere.npz: there is no such file"),
        ({"npz_path": __file__}, ValueError, "test_infmoe.py is not a file of numpy.savez"),
        ({"centroids": __file__}, ValueError, "centroids is not a plain array; pickled"),
    ],
)
def test_options_that_do_not_fit(saved, options: dict[str, Any], error, message: str):
    path, _, centroids = saved
    arguments = {"npz_path": path, "centroids": centroids} | options
    with pytest.raises(error, match=message):
        dynamo_moe.load_infmoe(**arguments)


def test_centroids_in_an_archive(saved):
    with pytest.raises(ValueError, match=r"one array of .*, not an archive"):
        dynamo_moe.load_infmoe(saved[0], saved[0])


def test_a_damaged_file(saved, tmp_path: Path):
    content = bytearray(saved[0].read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    (tmp_path / "w.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"w.npz: ./wi_._weight cannot be read: .*CRC"):
        dynamo_moe.load_infmoe(tmp_path / "w.npz", saved[2])


def test_a_damaged_directory(saved, tmp_path: Path):
    content = saved[0].read_bytes().replace(b"PK\x01\x02", b"XXXX", 1)
    (tmp_path / "w.npz").write_bytes(content)
    for arguments in ((tmp_path / "w.npz", saved[2]), (saved[0], tmp_path / "w.npz")):
        with pytest.raises(ValueError, match=r"w\.npz.*(not a file of|cannot be read).*Bad magic"):
            dynamo_moe.load_infmoe(*arguments)


def test_something_ahead_of_the_archive(saved, tmp_path: Path):
    (tmp_path / "w.npz").write_bytes(b"#!/bin/sh\n" + saved[0].read_bytes())
    with pytest.raises(ValueError, match=r"w\.npz is not a file of numpy\.savez$"):
        dynamo_moe.load_infmoe(tmp_path / "w.npz", saved[2])


def test_weights_beyond_the_experts_dtype(tmp_path: Path):
    weights, centroids = random_weights()
    weights["1/wo_weight"][3, 5] = 1e5
    np.savez(tmp_path / "w.npz", **weights)
    dynamo_moe.load_infmoe(tmp_path / "w.npz", centroids, experts_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"1/wo_weight must be finite in float16, .* 65504; 1 of"):
        dynamo_moe.load_infmoe(tmp_path / "w.npz", centroids, experts_dtype=torch.float16)
