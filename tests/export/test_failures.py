"""Models that cannot be exported: the one-line error and the likely cause that it names.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import dynamo_moe
from dynamo_moe.conversion import ADAPTER_PAGE, ConvertedModule, unconverted
from small_models import OpLayer, mlp_model, op_model

PAGE = "docs/how-to/add_an_adapter.md"
X = torch.randn(2, 5, 16)


class OnTheHost(nn.Module):
    """A gate and a list of experts in a loop that reads the ids, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            y[ids == expert] = self.experts[expert](x[ids == expert])
        return y * weights[..., None]


class Casting(nn.Module):
    """Casts a part of itself in forward."""

    def __init__(self, cast: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.cast = cast
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.cast(self.linear)
        return self.linear(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.embedding(ids) * mask[..., None]


class LowRank(nn.Module):
    """LoRA's addition to a stack of experts ``[E, H, D]``."""

    def __init__(self, weight_EHD: Tensor) -> None:
        super().__init__()
        experts, hidden, width = weight_EHD.shape
        self.down = nn.Parameter(torch.randn(experts, 2, width))
        self.up = nn.Parameter(torch.randn(experts, hidden, 2))

    def forward(self, weight_EHD: Tensor) -> Tensor:
        return weight_EHD + self.up @ self.down


class LowRankLinear(nn.Module):
    """A linear layer as peft wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def failure(model: nn.Module, tmp_path: Path, *args: Tensor) -> str:
    """The first line of the error, which the command line shows."""
    with pytest.raises(dynamo_moe.ExportError) as caught:
        dynamo_moe.export(model.eval(), args or X, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    return str(caught.value).splitlines()[0]


def test_unconverted_modules_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(*(OnTheHost() for _ in range(5)))
    message = failure(model, tmp_path)
    assert "decides by the values of a tensor at " in message
    assert "(`for expert in ids.unique().tolist():`)" in message
    names = "'0' (OnTheHost), '1' (OnTheHost), '2' (OnTheHost) and 2 more"
    assert f"5 MoE modules are not converted, which is often why: {names}; " in message
    assert message.endswith(f"dynamo_moe.convert(model) converts them or says why not ({PAGE}).")


def test_unconverted_modules_are_named_in_training(tmp_path: Path) -> None:
    model, path = OnTheHost(), tmp_path / "m.onnx"
    with pytest.raises(dynamo_moe.ExportError, match="1 MoE module is not converted, which is"):
        dynamo_moe.export_training(model, F.mse_loss, X, X, path)
    assert not list(tmp_path.iterdir())


class Tower(nn.Module):
    def forward(self, x: Tensor, grid_thw: Tensor) -> Tensor:
        return x * 2 if grid_thw.prod(-1).max() > 4 else x


def test_a_vision_tower_is_exported_with_its_model(tmp_path: Path) -> None:
    message = failure(Tower(), tmp_path, torch.randn(10, 4), torch.tensor([[1, 2, 3], [1, 2, 2]]))
    assert "decides by the values of a tensor at " in message
    assert "export_language_model(model, folder, task='image-text-to-text')" in message


def test_unconverted_modules_are_named_where_translation_fails(tmp_path: Path) -> None:
    class Eigenvalues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beside = OnTheHost()

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvals(x @ x.mT).real

    message = failure(Eigenvalues(), tmp_path)
    assert message.startswith("operator aten.linalg_eig has no translation")
    assert "1 MoE module is not converted" in message


def test_converted_modules_are_not_named(tmp_path: Path) -> None:
    model = nn.Sequential(Casting(nn.Module.half), mlp_model())
    assert "2 MoE modules are not converted" in failure(model, tmp_path)
    dynamo_moe.convert(model)
    assert "MoE" not in failure(model, tmp_path)


def test_a_module_on_the_operators_is_no_unconverted_one(tmp_path: Path) -> None:
    layer = OpLayer()
    layer.top_k = 2  # Together with stacked weights, this looks like experts.
    model = op_model(layer)
    [left] = unconverted.unconverted_modules(model)
    assert left.module == "0.mlp"
    report = dynamo_moe.export(model, X, tmp_path / "m.onnx")
    assert report.layers == ("0.mlp",)
    assert not report.notes


def test_what_a_converted_module_holds_is_converted() -> None:
    class Replacement(ConvertedModule):
        def __init__(self) -> None:
            super().__init__()
            self.original = OnTheHost()

        def experts_parameters(self) -> dict[str, nn.Parameter]:
            return {}

    model = nn.Sequential(Replacement(), OnTheHost())
    assert [left.module for left in unconverted.unconverted_modules(model)] == ["1"]


def to_bfloat16(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("cast", "line"),
    [
        *((cast, "self.cast(self.linear)") for cast in (nn.Module.half, nn.Module.double)),
        (to_bfloat16, "return module.to(torch.bfloat16)"),
        (nn.Module.cuda, "self.cast(self.linear)"),
    ],
)
def test_a_cast_of_a_module_in_forward(
    tmp_path: Path, cast: Callable[[nn.Module], object], line: str
) -> None:
    if cast is nn.Module.cuda and torch.cuda.is_available():
        pytest.skip("moves it")
    model = Casting(cast)
    message = failure(model, tmp_path)
    assert message.startswith("the model casts or moves a module in its forward at ")
    assert re.search(rf"test_failures\.py:\d+ \(`{re.escape(line)}`\)", message)
    assert "F.linear(x, self.proj.weight.float())" in message
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (torch.zeros(2, 5), torch.zeros(2, 5)),
            "to have one of the following scalar types",
        ),
        ((torch.zeros(2, 5).long(), torch.zeros(2, 6)), r"size of tensor a \(5\) must match"),
    ],
)
def test_an_example_that_the_model_does_not_take(
    tmp_path: Path, args: tuple[Tensor, Tensor], message: str
) -> None:
    ids, mask = (f"{list(arg.shape)} {str(arg.dtype)[6:]}" for arg in args)
    line = r"\S*test_failures\.py:\d+ \(`return self\.embedding\(ids\) \* mask.*`\)"
    error = failure(TwoInputs(), tmp_path, *args)
    example = re.escape(f"the model itself fails on the example (ids {ids}, mask {mask}), at ")
    assert re.match(f"{example}{line}: .*{message}", error), error


class ConvolvesEach(nn.Module):
    """Each picture has a kernel of its own: the batch is a number of groups."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.flatten(0, 1)[None], x.new_ones(x.shape[0], 3, 1, 1), groups=x.shape[0])


def test_a_size_that_onnx_has_as_a_constant(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, 4, 4)
    message = failure(ConvolvesEach(), tmp_path, x)
    assert message.startswith("operator aten.conv2d.default has a size that should be symbolic")
    report = dynamo_moe.export(ConvolvesEach(), x, tmp_path / "m.onnx", dynamic_shapes=None)
    assert dynamo_moe.verify(report.path, ConvolvesEach()).passed


@dataclass
class Returned:
    y: Tensor


class ReturnsAnObject(nn.Module):
    def forward(self, x: Tensor) -> Returned:
        return Returned(x + 1)


def test_an_object_is_returned_once_pytorch_knows_its_class(tmp_path: Path) -> None:
    message = failure(ReturnsAnObject(), tmp_path, torch.zeros(2, 3))
    assert "returns an object of the class test_failures.Returned" in message
    assert "torch.export.register_dataclass" in message
    torch.export.register_dataclass(Returned)
    report = dynamo_moe.export(ReturnsAnObject(), torch.zeros(2, 3), tmp_path / "m.onnx")
    assert dynamo_moe.verify(report.path, ReturnsAnObject()).passed


def test_an_example_of_another_dtype_than_the_weights(tmp_path: Path) -> None:
    """A trace does not ask for equal dtypes; onnx's check of the graph does."""
    example = re.escape("the model itself fails on the example (input [2, 16] float64)")
    with pytest.raises(dynamo_moe.ExportError, match=f"{example}.*must have the same dtype"):
        dynamo_moe.export(
            nn.Sequential(nn.Linear(16, 16)), torch.zeros(2, 16).double(), tmp_path / "m.onnx"
        )


@pytest.mark.parametrize("dynamic_shapes", ["batch", None])
def test_too_few_arguments(tmp_path: Path, dynamic_shapes: str | None) -> None:
    message = (
        r"does not fit TwoInputs.forward\(ids.*, mask.*\): missing a required argument: 'mask'"
    )
    with pytest.raises(TypeError, match=message):
        dynamo_moe.export(
            TwoInputs(), torch.zeros(2, 5).long(), tmp_path / "m.onnx",
            dynamic_shapes=dynamic_shapes,
        )  # fmt: skip


def raises(x: Tensor) -> Tensor:
    raise ValueError("not today")


def decides(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("fails", "line"),
    [(raises, 'raise ValueError("not today")'), (decides, "return x if x.sum() > 0 else -x")],
)
def test_a_model_that_does_not_fail_by_its_example_is_not_run(
    tmp_path: Path, fails: Callable[[Tensor], Tensor], line: str
) -> None:
    runs = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(type(x))
            return fails(x)

    place = rf" at \S*test_failures\.py:\d+ \(`{re.escape(line)}`\)"
    assert re.search(place, failure(Counting(), tmp_path))
    assert Tensor not in runs


def test_a_model_without_values(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = mlp_model()
    model[0].norm = nn.LayerNorm(16)
    message = r"'0\.mlp\.\w+' is on the meta device, without values \(12 of 14 weights\): load them"
    for x in (X, X.to("meta")):
        with pytest.raises(ValueError, match=message):
            dynamo_moe.export(model, x, tmp_path / "m.onnx")


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("linear") / "m.onnx"
    dynamo_moe.export(nn.Linear(16, 16), X, path)
    return path


@pytest.mark.parametrize(
    "trace",
    [
        lambda model: torch.export.export(model, (X,)),
        lambda model: torch.export.export(model, (X,)).module(),
        lambda model: torch.jit.trace(model, X),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_no_model(
    tmp_path: Path, linear: Path, trace: Callable[[nn.Module], object]
) -> None:
    traced = trace(nn.Linear(16, 16))
    message = f"model must be the torch.nn.Module itself, not the {type(traced).__name__} that"
    with pytest.raises(TypeError, match=message):
        dynamo_moe.export(traced, X, tmp_path / "m.onnx")
    with pytest.raises(TypeError, match=message):
        dynamo_moe.export_language_model(traced, tmp_path / "m.onnx")
    with pytest.raises(TypeError, match=message):
        dynamo_moe.verify(linear, traced)


def test_a_function_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        dynamo_moe.export(lambda x: x, X, tmp_path / "m.onnx")


def test_weights_that_are_not_merged_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(Casting(nn.Module.half), mlp_model(layers=1), OnTheHost())
    mlp, experts = model[1][0].mlp, model[2].experts
    parametrize.register_parametrization(mlp, "w1", LowRank(mlp.w1))
    experts[2] = LowRankLinear(experts[2])
    message = failure(model, tmp_path)
    named = "Each forward computes some weights anew, as LoRA does: '1.0.mlp.w1', '2.experts.2'; "
    assert f"{named}merge them first, in peft by model.merge_and_unload()" in message
    # peft marks its layers like this. A removed parametrization leaves no trace.
    experts[2].merged = True
    parametrize.remove_parametrizations(mlp, "w1")
    assert "merge" not in failure(model, tmp_path)


def test_advice_after_a_conversion() -> None:
    model = mlp_model()
    report = dynamo_moe.convert(model)
    assert report.advice is None
    plain = nn.Sequential(nn.Linear(4, 4))
    advice = dynamo_moe.convert(plain).advice
    assert advice is not None
    assert advice.startswith("Nothing to convert: no module looks like a router with experts")
    assert advice.endswith(f"{PAGE}.")
    left = nn.Sequential(OnTheHost())
    advice = dynamo_moe.convert(left).advice
    assert advice == (
        "Modules that are left become many nodes, or fail to export: "
        f"{PAGE} says how to convert them."
    )


def test_advice_about_experts_that_are_not_merged() -> None:
    model = mlp_model(layers=1)
    parametrize.register_parametrization(model[0].mlp, "w1", LowRank(model[0].mlp.w1))
    advice = unconverted.merge_hint(model)
    assert "as LoRA does: '0.mlp.w1'; merge them first" in advice


def test_the_page_is_there() -> None:
    assert (Path(__file__).parents[2] / ADAPTER_PAGE).is_file()


class Counting(nn.Module):
    """Counts its calls in many ways, and then computes."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.calls = 0
        self.sizes: list[int] = []
        self.cache: dict[int, int] = {}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.cache[self.calls] = x.shape[0]
        self.count.add_(1)
        return self.compute(x)


def _multiplies(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)


def _decides(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 4 else x.repeat(1, int(x.shape[0] > 9) + 1, 1) + 1


@pytest.mark.parametrize("compute", [_multiplies, _decides])
def test_a_refused_model_is_left_as_it_was(
    tmp_path: Path, compute: Callable[[Tensor], Tensor]
) -> None:
    model = Counting(compute)
    with pytest.raises(dynamo_moe.ExportError):
        dynamo_moe.export(model, X, tmp_path / "m.onnx")
    assert (model.calls, model.sizes, model.cache, float(model.count)) == (0, [], {}, 0.0)
    assert type(model.calls) is int


def test_what_fails_at_first_is_not_said_where_it_is_exported_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(int((x > 0).sum()), 2)

    dynamo_moe.export(Counted(), torch.randn(5), tmp_path / "m.onnx")
    assert capsys.readouterr() == ("", "")
