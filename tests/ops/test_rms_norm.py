"""``torch.ops.moe.rms_norm``: in PyTorch, as a Triton kernel, and as an ONNX node.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxconverter_common.float16 import convert_float_to_float16
from torch import Tensor, nn

import custom_ops
import dynamo_moe
from custom_ops import reference
from dynamo_moe.tolerances import tolerance_for
from moe_cases import assert_matches

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FORMS: list[dict[str, bool]] = [
    {"weight_plus_one": plus_one, "round_before_weight": early}
    for plus_one, early in product((False, True), repeat=2)
]
SHAPES = ((1,), (5, 7), (2, 3, 16), (0, 8), (1, 1, 1), (3, 1000))

forms = pytest.mark.parametrize(
    "form", FORMS, ids=["plain", "rounded", "plus one", "plus one rounded"]
)


def inputs(*shape: int, x: torch.dtype, weight: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    scale = torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.5
    return tokens.to(x), scale.to(weight or x)


def oracle(x: Tensor, weight: Tensor, form: dict[str, bool], eps: float = 1e-6) -> Tensor:
    return reference.rms_norm(x, weight, eps, weight_plus_one=form["weight_plus_one"])


# In PyTorch


@pytest.mark.pairwise
@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype: torch.dtype, shape: tuple[int, ...], form: Any) -> None:
    x, weight = inputs(*shape, x=dtype)
    y = custom_ops.rms_norm(x, weight, **form)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_matches(y, oracle(x, weight, form), {dtype})
    assert torch.equal(y, custom_ops.rms_norm(x, weight, **form))


def test_x_that_is_not_contiguous() -> None:
    x, weight = inputs(6, 8, x=torch.float32)
    y = custom_ops.rms_norm(x.mT, weight[:6])
    assert y.is_contiguous()
    assert torch.equal(y, custom_ops.rms_norm(x.mT.contiguous(), weight[:6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_bits_of_transformers(model: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    x, weight = inputs(4, 9, 48, x=dtype)
    if model == "llama":
        norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(48, eps=1e-5)
        form = {"round_before_weight": True}
    else:
        norm = transformers.models.gemma.modeling_gemma.GemmaRMSNorm(48, eps=1e-5)
        form = {"weight_plus_one": True}
    norm.weight.data = weight
    assert torch.equal(custom_ops.rms_norm(x, weight, 1e-5, **form), norm(x))


def test_large_and_tiny_values() -> None:
    weight = torch.ones(4)
    assert torch.equal(custom_ops.rms_norm(torch.zeros(2, 4), weight), torch.zeros(2, 4))
    # The square of 300 is out of float16's range.
    large = torch.full((2, 4), 300.0, dtype=torch.float16)
    assert torch.equal(custom_ops.rms_norm(large, weight.half()), torch.ones(2, 4).half())
    nan = torch.ones(2, 4)
    nan[0, 1] = float("nan")
    y = custom_ops.rms_norm(nan, weight)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


@forms
def test_gradients(form: Any) -> None:
    x, weight = inputs(3, 5, x=torch.float64)
    arguments = (x.requires_grad_(), weight.requires_grad_())

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return custom_ops.rms_norm(x, weight, 0.1, **form)

    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("dtypes", [*product(FLOATS[:3], repeat=2)], ids=str)
def test_gradients_in_lower_precision(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight = inputs(4, 6, 32, x=dtypes[0], weight=dtypes[1])
    leaves = (x.requires_grad_(), weight.requires_grad_())
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    gradients = torch.autograd.grad(custom_ops.rms_norm(*leaves), leaves, dy)
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    expected = torch.autograd.grad(reference.rms_norm(exact[0], exact[1], 1e-6), exact, dy.double())
    for gradient, want, leaf in zip(gradients, expected, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_matches(gradient, want, set(dtypes))


def test_only_the_gradients_that_are_needed() -> None:
    x, weight = inputs(4, 8, x=torch.float32)
    custom_ops.rms_norm(x.requires_grad_(), weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@forms
@pytest.mark.parametrize("shape", [(3, 5), (0, 5)], ids=str)
def test_opcheck(shape: tuple[int, ...], form: Any) -> None:
    x, weight = inputs(*shape, x=torch.float32)
    arguments = (x.requires_grad_(), weight.requires_grad_(), 1e-5)
    torch.library.opcheck(torch.ops.moe.rms_norm.default, arguments, form)


def test_autocast_changes_nothing() -> None:
    x, weight = inputs(4, 8, x=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(custom_ops.rms_norm(x, weight), custom_ops.rms_norm(x, weight))
        inside = custom_ops.rms_norm(x, weight)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, custom_ops.rms_norm(x, weight))


def test_compiled_with_dynamic_shapes() -> None:
    compiled = torch.compile(custom_ops.rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 3, 1, 0):
        x, weight = inputs(tokens, 8, x=torch.float32)
        assert torch.equal(compiled(x, weight), custom_ops.rms_norm(x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "eps", "error", "message"),
    [
        (
            torch.ones(2, 4),
            torch.ones(5),
            0.1,
            ValueError,
            r"weight must be \[D\] = \[4\], got \[5\]",
        ),
        (torch.ones(2, 4), torch.ones(1, 4), 0.1, ValueError, r"weight must be .*got \[1, 4\]"),
        (torch.ones(()), torch.ones(1), 0.1, ValueError, "x must have at least 1 dimension"),
        (torch.ones(2, 0), torch.ones(0), 0.1, ValueError, "D must be at least 1"),
        (torch.ones(2, 4), torch.ones(4), -1.0, ValueError, "eps must be at least 0, got -1.0"),
        (torch.ones(2, 4).int(), torch.ones(4), 0.1, TypeError, "x must be one of float32"),
        (torch.ones(2, 4), torch.ones(4).long(), 0.1, TypeError, "weight must be one of float32"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_that_do_not_fit(device, x, weight, eps, error, message) -> None:
    with pytest.raises(error, match=message):
        custom_ops.rms_norm(x.to(device), weight.to(device), eps)


def test_devices_that_differ() -> None:
    with pytest.raises(ValueError, match="weight must be on x's device meta, got cpu"):
        custom_ops.rms_norm(torch.ones(2, 4, device="meta"), torch.ones(4))


# As a Triton kernel

KERNEL_SHAPES = ((1, 1), (3, 5), (17, 64), (2, 1000), (130, 16), (2, 8192), (2, 9001))


def run_kernel(x_TD: Tensor, weight_D: Tensor, eps: float, form: dict[str, bool]) -> Tensor:
    """Runs the kernel into memory between guard bands."""
    from custom_ops.kernels.launch import launch_kernel
    from custom_ops.kernels.rms_norm import rms_norm_spec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = rms_norm_spec(x_TD.shape[1], x_TD.dtype, weight_D.dtype, eps, **form)
    whole = torch.full((x_TD.numel() + 128,), 7.0, dtype=x_TD.dtype, device=device)
    y_TD = whole[64:-64].view(x_TD.shape)
    launch_kernel(spec, {"x": x_TD.to(device), "weight": weight_D.to(device), "y": y_TD})
    assert (whole[:64] == 7).all()
    assert (whole[-64:] == 7).all()
    return y_TD.cpu()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtypes", [*product(FLOATS[:3], repeat=2)], ids=str)
@pytest.mark.parametrize("form", FORMS[::3], ids=["plain", "plus one rounded"])
def test_kernel_of_every_dtype(form: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    pytest.importorskip("triton")
    x, weight = inputs(5, 70, x=dtypes[0], weight=dtypes[1])
    y = run_kernel(x, weight, 1e-6, form)
    assert_matches(y, oracle(x, weight, form), set(dtypes))
    assert torch.equal(y, run_kernel(x, weight, 1e-6, form))


@forms
@pytest.mark.parametrize("shape", KERNEL_SHAPES, ids=str)
def test_kernel_at_awkward_sizes(shape: tuple[int, int], form: Any) -> None:
    pytest.importorskip("triton")
    x, weight = inputs(*shape, x=torch.float32)
    assert_matches(run_kernel(x, weight, 0.5, form), oracle(x, weight, form, 0.5), {x.dtype})


def test_kernel_rounds_where_llama_does() -> None:
    pytest.importorskip("triton")
    x, weight = inputs(64, 48, x=torch.bfloat16)
    for form in FORMS[:2]:
        y = run_kernel(x, weight, 1e-6, form)
        expected = custom_ops.rms_norm(x, weight, **form)
        # If the sums differ in their last bits, rounding can go the other way.
        assert (y != expected).float().mean() < 0.01
    early, late = (custom_ops.rms_norm(x, weight, **form) for form in FORMS[:2])
    assert (early != late).float().mean() > 0.1


@pytest.mark.slow
def test_kernel_compiles_ahead_of_time() -> None:
    pytest.importorskip("triton")
    from custom_ops.kernels.architectures import architecture
    from custom_ops.kernels.rms_norm import rms_norm_spec
    from trt_plugin.compiling.tasks import task_for
    from trt_plugin.compiling.workers import compile_tasks

    tasks = [
        task_for(rms_norm_spec(width, dtype, dtype, 1e-6, **FORMS[-1]), architecture(name))
        for width, dtype in ((64, torch.float16), (9001, torch.float32))
        for name in ("sm_75", "sm_90")
    ]
    cubins = []
    compile_tasks(tasks, 1, lambda task, compiled: cubins.append(compiled.cubin))
    assert len(cubins) == len(tasks)
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu(shape: tuple[int, ...], form: Any) -> None:
    for dtype in FLOATS:
        x, weight = inputs(*shape, x=dtype)
        y = custom_ops.rms_norm(x.cuda(), weight.cuda(), **form)
        assert_matches(y.cpu(), oracle(x, weight, form), {dtype})


# As an ONNX node


class Norms(nn.Module):
    """Two normalisations of every form, each applied to the result of the previous one."""

    def __init__(self, width: int, dtype: torch.dtype, forms: list[dict[str, bool]]) -> None:
        super().__init__()
        self.forms = forms
        self.weights = nn.ParameterList(inputs(width, x=dtype)[1] for _ in forms)

    def forward(self, x: Tensor) -> Tensor:
        for form, weight in zip(self.forms, self.weights, strict=True):
            x = custom_ops.rms_norm(x, weight, 1e-5, **form)
        return x


def exported(
    path: Path, dtype: torch.dtype, forms: list[dict[str, bool]] = FORMS, **options: Any
) -> tuple[Norms, onnx.ModelProto]:
    model = Norms(16, dtype, forms).eval()
    x = torch.randn(2, 3, 16).to(dtype)
    dynamo_moe.export(model, x, path, dynamic_shapes={"x": {1: "tokens"}}, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return model, proto


def check(path: Path, model: Norms) -> None:
    dtype = model.weights[0].dtype
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1, 16), (3, 7, 16), (5, 2, 16))
    cases = [(torch.randn(shape, generator=generator).to(dtype),) for shape in shapes]
    # The weights may have been folded with their cast, so the file alone does not show it.
    dynamo_moe.verify(path, model, cases, tolerance=tolerance_for({dtype}))


@pytest.mark.each_value
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_node_with_a_body(tmp_path: Path, dtype: torch.dtype, opset: int) -> None:
    path = tmp_path / "m.onnx"
    model, proto = exported(path, dtype, opset=opset)
    assert [node.op_type for node in proto.graph.node] == ["RMSNorm"] * 4
    first = {a.name: onnx.helper.get_attribute_value(a) for a in proto.graph.node[0].attribute}
    assert first["epsilon"] == pytest.approx(1e-5)
    assert (first["weight_plus_one"], first["round_before_weight"]) == (0, 0)
    assert first["plugin_version"] == b"1"
    check(path, model)


@pytest.mark.pairwise
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("target", ["dense", "onnxruntime"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_standard_operators(tmp_path: Path, dtype: torch.dtype, target: str, opset: int) -> None:
    path = tmp_path / "m.onnx"
    model, proto = exported(path, dtype, target=target, opset=opset)
    assert not proto.functions
    assert {node.domain for node in proto.graph.node} == {""}
    ops = [node.op_type for node in proto.graph.node]
    # The standard's operator is exact only in float32: runtimes differ in where they round. In half
    # precision, forms that multiply before they round have it between casts.
    standard = opset >= 23 and dtype == torch.float32
    count = ops.count("RMSNormalization")
    assert count == 4 if standard else count == 0 or (dtype == torch.float16 and opset >= 23)
    assert ("ReduceMean" in ops) == (not standard)
    check(path, model)


def test_rounding_is_the_same_in_onnx_runtime(tmp_path: Path) -> None:
    for place, form in enumerate(FORMS):
        path = tmp_path / f"{place}.onnx"
        model, _ = exported(path, torch.float16, [form])
        x = torch.randn(50, 2, 16).half()
        (y,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
        with torch.no_grad():
            expected = model(x).numpy()
        assert np.mean(y != expected) < 0.01


def test_no_tokens(tmp_path: Path) -> None:
    for target in ("plugin", "dense"):
        path = tmp_path / f"{target}.onnx"
        exported(path, torch.float32, target=target, opset=23)
        session = onnxruntime.InferenceSession(path)
        (y,) = session.run(None, {"x": np.zeros((0, 3, 16), np.float32)})
        assert y.shape == (0, 3, 16)


def test_beside_an_moe_layer(tmp_path: Path) -> None:
    from dynamo_moe.models import DroplessMoEMlp

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16))
            self.mlp = DroplessMoEMlp(16, 8, num_experts=4, top_k=2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(custom_ops.rms_norm(x, self.weight))

    model = Block().eval()
    dynamo_moe.convert(model)
    report = dynamo_moe.export(model, torch.randn(5, 16), tmp_path / "m.onnx")
    assert report.nodes["moe::RMSNorm"] == report.nodes["moe::DroplessMoE"] == 1
    assert report.layers == ("mlp",)
    assert len(dynamo_moe.inspect(tmp_path / "m.onnx").moe_layers) == 1
    dynamo_moe.verify(tmp_path / "m.onnx", model)


def test_a_converter_to_half_precision(tmp_path: Path) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 2, 16))

        def forward(self, x: Tensor) -> Tensor:
            return custom_ops.rms_norm(x, self.weight)

    model, x = Norm(), torch.randn(5, 16)
    dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "norm.onnx")
    converted = convert_float_to_float16(onnx.load(tmp_path / "norm.onnx"))
    assert [node.op_type for node in converted.graph.node] == ["RMSNorm"]
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    (y,) = session.run(None, {"x": x.half().numpy()})
    with torch.no_grad():
        assert_matches(torch.from_numpy(y), model(x).double(), {torch.float16})
