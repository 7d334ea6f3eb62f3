"""``dynamo_moe.verify``: it passes what agrees and fails loudly on what does not."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.optim.swa_utils import AveragedModel

import custom_ops
import dynamo_moe
import onnx_files
from custom_ops import SCORINGS
from custom_ops.options import GROUP_SCORINGS
from dynamo_moe.files.index_ranges import index_limits
from dynamo_moe.files.inputs import random_inputs
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification import runtime
from small_models import OpLayer, OwnRouter, mlp_model, op_model


@pytest.fixture(scope="module")
def model_and_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = mlp_model()
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("verify") / "model.onnx"
    shapes = {"input": {1: "tokens"}}
    dynamo_moe.export(model, torch.randn(2, 5, 16), path, dynamic_shapes=shapes)
    return model, path


def altered(path: Path, folder: Path, name: str, factor: float) -> Path:
    """Returns a copy of the file with one weight scaled."""
    proto = onnx.load(path)
    (tensor,) = (t for t in proto.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor) * factor
    tensor.CopyFrom(numpy_helper.from_array(array.astype("float32"), name))
    onnx.save(proto, folder / "altered.onnx")
    return folder / "altered.onnx"


def test_default_cases_differ_from_the_example(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    report = dynamo_moe.verify(path, model)
    assert report.passed
    sizes = [(1, 4), (3, 7), (2, 1), (5, 12), (4, 19), (2, 40)]
    assert [case.shapes["input"] for case in report.cases] == [(*size, 16) for size in sizes]
    assert all(0 <= case.rms_error <= case.max_error < 2e-5 for case in report.cases)
    assert all(case.routing_agreement == 1.0 for case in report.cases)
    assert "ONNX Runtime" in report.runtime


def test_a_wrong_expert_fails(model_and_file: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "1.mlp.w2", 1.01)
    with pytest.raises(dynamo_moe.VerificationError, match="differs from the model") as raised:
        dynamo_moe.verify(wrong, model)
    report = raised.value.report
    assert not report.passed
    assert all(case.routing_agreement == 1.0 for case in report.cases)
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["passed"] is False


@pytest.mark.parametrize("target", ["plugin", "dense", "onnxruntime"])
def test_a_wrong_router_shows_in_the_routing(tmp_path: Path, target: str) -> None:
    model = mlp_model(layers=1)
    dynamo_moe.convert(model)
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target=target)
    wrong = altered(path, tmp_path, "0.mlp.router.weight", -1.0)
    with pytest.raises(dynamo_moe.VerificationError) as raised:
        dynamo_moe.verify(wrong, model, [(torch.randn(200, 16),)])
    # The top 2 of 6 became the bottom 2, which is never the same pair.
    assert raised.value.report.cases[0].routing_agreement == 0.0


def test_wrong_tokens_show_in_the_routing(
    model_and_file: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "0.mlp.w2", -3.0)
    with pytest.raises(dynamo_moe.VerificationError) as raised:
        dynamo_moe.verify(wrong, model, [(torch.randn(4, 64, 16),)])
    # Layer 0 gets the same tokens; its wrong result changes some of layer 1's routing.
    assert 0.5 < raised.value.report.cases[0].routing_agreement < 1.0


def test_no_case_verifies_nothing(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(ValueError, match="inputs holds no case"):
        dynamo_moe.verify(path, model, [])


def test_inputs_that_are_no_cases(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(TypeError, match=r"as in \[\(x,\)\]; got a case of type Tensor"):
        dynamo_moe.verify(path, model, (torch.randn(2, 5, 16),))


# --- Inputs drawn from the file ---


class Indexing(nn.Module):
    """Two tables of different sizes, indexed by ids that are shifted, moved and cast."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(3, 4), nn.Embedding(7, 4)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.words(ids) + self.places(places.long().unsqueeze(1).flatten(1) + 2)


def test_ids_stay_below_the_rows_of_their_table(tmp_path: Path) -> None:
    model, path = Indexing(), tmp_path / "model.onnx"
    example = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int32)
    shapes = {"ids": {1: "length"}, "places": {1: "length"}}
    dynamo_moe.export(model, example, path, dynamic_shapes=shapes)
    assert index_limits(ir.load(path).graph) == {"ids": 3, "places": 5}
    assert dynamo_moe.verify(path, model).passed
    for name, limit in (("ids", 3), ("places", 5)):
        cases = random_inputs(ir.load(path))
        drawn = torch.cat([case.inputs[name].flatten() for case in cases])
        assert drawn.unique().tolist() == list(range(limit))


def test_expert_ids_that_enter_the_graph(tmp_path: Path) -> None:
    class Experts(OpLayer):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return custom_ops.experts(x, ids, weights, self.w1, self.b1, self.w2, self.b2)

    model, path = Experts(experts=3).eval(), tmp_path / "model.onnx"
    ids = torch.zeros(2, 2, dtype=torch.int32)
    dynamo_moe.export(model, (torch.randn(2, 16), ids, torch.rand(2, 2)), path)
    assert dynamo_moe.verify(path, model).passed


def test_integers_of_which_the_graph_tells_nothing(tmp_path: Path) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor, sizes: Tensor, mask: Tensor) -> Tensor:
            return x / (sizes - 4) + torch.log(mask.float())

    model, path = Picky(), tmp_path / "model.onnx"
    sizes = torch.tensor([[5, 9, 7]] * 2)
    mask = torch.tensor([[1, 1, 0]] * 2, dtype=torch.uint8)
    dynamo_moe.export(model, (torch.randn(2, 3), sizes, mask), path)
    drawn = [case.inputs for case in random_inputs(ir.load(path))]
    assert all(case["sizes"].min() >= 5 and case["sizes"].max() <= 9 for case in drawn)
    assert drawn[0]["mask"].all()
    assert all(case["mask"].any(dim=-1).all() for case in drawn)
    assert torch.cat([case["mask"].flatten() for case in drawn]).unique().tolist() == [0, 1]
    assert dynamo_moe.verify(path, model).passed


def test_ids_that_the_model_does_not_know(tmp_path: Path) -> None:
    class Refusing(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and ids.max() > 1:
                raise IndexError("no such id")
            return super().forward(ids)

    model, path = Refusing(9, 4), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.zeros(2, 3, dtype=torch.int64), path)
    with pytest.raises(ValueError, match=r"not take these inputs \(no such id\): pass"):
        dynamo_moe.verify(path, model)


def test_arguments_are_bound_by_name(tmp_path: Path) -> None:
    class Subtract(nn.Module):
        def forward(self, first: Tensor, *, second: Tensor) -> Tensor:
            return first - 2 * second

    model, path = Subtract(), tmp_path / "model.onnx"
    example = {"second": torch.randn(2, 3), "first": torch.randn(2, 3)}
    dynamo_moe.export(model, (), path, kwargs=example)
    assert dynamo_moe.verify(path, model).passed


def test_containers_are_made_of_the_inputs_named_after_them(tmp_path: Path) -> None:
    class Features(nn.Module):
        def forward(self, user: dict[str, Tensor], history: list[Tensor], bias: Tensor) -> Tensor:
            return user["age"] - 2 * user["rank"] + history[0] - 3 * history[1] + bias

    drawn = iter(torch.randn(5, 3))
    example = ({"age": next(drawn), "rank": next(drawn)}, [next(drawn), next(drawn)], next(drawn))
    model, path = Features(), tmp_path / "model.onnx"
    dynamo_moe.export(model, example, path)
    assert dynamo_moe.verify(path, model).passed
    names = [value.name for value in onnx.load(path).graph.input]
    by_name = dict(zip(names, torch.randn(5, 3), strict=True))
    assert dynamo_moe.verify(path, model, [by_name, example]).passed


def test_axes_have_sizes_of_their_own(tmp_path: Path) -> None:
    class Image(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.mean(dim=-1)

    model, path = Image(), tmp_path / "model.onnx"
    shapes = {"image": {1: "height", 2: "width"}}
    dynamo_moe.export(model, torch.randn(2, 3, 4), path, dynamic_shapes=shapes)
    report = dynamo_moe.verify(path, model)
    assert len(set(report.cases[0].shapes["image"])) == 3


def test_not_an_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ValueError, match=r"text\.onnx is not an ONNX model"):
        dynamo_moe.verify(tmp_path / "text.onnx", nn.Identity())


@pytest.mark.parametrize("target", ["plugin", "dense", "onnxruntime"])
def test_routing_of_both_operators(tmp_path: Path, target: str) -> None:
    torch.manual_seed(0)
    model = op_model(OpLayer(activation="silu"), OwnRouter(activation="silu"))
    path = tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path, target=target)
    report = dynamo_moe.verify(path, model, [(torch.randn(50, 16),)])
    assert report.cases[0].routing_agreement == 1.0


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("group_scoring", GROUP_SCORINGS[1:])
def test_routing_of_groups_with_pruned_experts(
    tmp_path: Path, group_scoring: str, scoring: str
) -> None:
    class Grouped(OpLayer):
        def __init__(self) -> None:
            super().__init__(scoring=scoring, group_scoring=group_scoring, n_group=3, topk_group=1)
            self.register_buffer("bias", torch.tensor([0.0, -torch.inf]).repeat(3))

        def forward(self, x: Tensor) -> Tensor:
            return custom_ops.dropless(
                x, self.router_weight, self.w1, self.b1, self.w2, self.b2, 2,
                selection_bias=self.bias, **self.options,
            )  # fmt: skip

    torch.manual_seed(0)
    model, path = Grouped().eval(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path)
    report = dynamo_moe.verify(path, model, [(torch.randn(50, 16),)])
    assert report.cases[0].routing_agreement == 1.0


def test_layers_that_share_the_graphs_input(tmp_path: Path) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = OpLayer(), OpLayer()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    model, path = Parallel().eval(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 16), path)
    assert dynamo_moe.verify(path, model).cases[0].routing_agreement == 1.0


@pytest.mark.skipif(
    not onnxruntime.__version__.startswith("1.31"), reason="ONNX Runtime 1.32 makes no such error"
)
def test_the_routings_nodes_hide_no_error_of_the_runtimes_moe(tmp_path: Path) -> None:
    """Where nothing reads the input of its MoE afterwards, ONNX Runtime 1.31 writes over it."""
    torch.manual_seed(0)
    model = op_model(*(OpLayer(activation="silu", scoring="sigmoid") for _ in range(2)))
    path, x = tmp_path / "model.onnx", torch.randn(50, 16)
    dynamo_moe.export(model, x, path, target="onnxruntime")
    proto = onnx.load(path)
    constants = {tensor.name for tensor in proto.graph.initializer}
    choices = [node for node in proto.graph.node if node.op_type == "Where"]
    for guard in [node for node in choices if node.input[0] in constants]:  # Never true.
        (scaled,) = (node for node in proto.graph.node if node.output[0] == guard.input[2])
        scaled.output[0] = guard.output[0]
        proto.graph.node.remove(guard)
    for value in proto.graph.value_info:  # It does so where it knows that the sizes are equal.
        rows, *rest = value.type.tensor_type.shape.dim or [None]
        if rest and not rows.WhichOneof("value"):
            rows.dim_param = "rows"
    onnx.save(proto, path)
    (result,) = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})
    expected = model(x).detach().numpy()
    with pytest.raises(dynamo_moe.VerificationError) as raised:
        dynamo_moe.verify(path, model, [(x,)])
    # Each number is one of the file as it is, relative to its row's or its column's RMS.
    squares = np.square(expected)
    scale = np.minimum(*(squares.mean(axis, keepdims=True) + 0 * squares for axis in (0, 1)))
    worst = (np.abs(result - expected) / np.sqrt(scale)).max()
    assert raised.value.report.cases[0].max_error == pytest.approx(worst, rel=1e-5)


def test_nan_fails(model_and_file: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = model_and_file
    wrong = altered(path, tmp_path, "1.norm.bias", float("nan"))
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(wrong, model)


def test_nan_of_any_output_fails(tmp_path: Path) -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x @ self.scale

    model, path = TwoOutputs(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 3), path)
    dynamo_moe.verify(path, model)
    with pytest.raises(dynamo_moe.VerificationError, match="max error nan"):
        dynamo_moe.verify(altered(path, tmp_path, "scale", float("nan")), model)


def test_keyword_cases(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    report = dynamo_moe.verify(path, model, [{"input": torch.randn(9, 2, 16)}])
    assert report.cases[0].shapes == {"input": (9, 2, 16)}


def test_inputs_of_several_kinds(tmp_path: Path) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 16)
            self.layer = OpLayer()

        def forward(self, ids: Tensor, scale: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(self.embedding(ids) * mask[..., None])
            return hidden, hidden.mean(dim=1) * scale

    model, path = Embedding().eval(), tmp_path / "model.onnx"
    example = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(16), torch.ones(2, 5).bool())
    dynamo_moe.export(
        model, example[:2], path, kwargs={"mask": example[2]},
        dynamic_shapes={"ids": {1: "length"}, "mask": {1: "length"}, "scale": {0: None}},
    )  # fmt: skip
    report = dynamo_moe.verify(path, model)
    assert [case.shapes["ids"] for case in report.cases][:3] == [(1, 4), (3, 7), (2, 1)]
    with pytest.raises(ValueError, match=r"one tensor per input of the file \(ids, scale, mask\)"):
        dynamo_moe.verify(path, model, [example[:2]])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing\.onnx"):
        dynamo_moe.verify(tmp_path / "nothing.onnx", nn.Identity())


def test_tolerance_of_the_lowest_precision() -> None:
    assert tolerance_for({torch.float32, torch.float16}) == tolerance_for({torch.float16})
    assert tolerance_for({torch.float64}).max < tolerance_for({torch.float32}).max
    assert tolerance_for({torch.float32}, approximate_gelu=True).max == 1e-2


def test_tolerance_is_that_of_weights_and_not_of_small_constants(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shift", torch.rand(8).half())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.shift.expand(len(x), 8)

    model, path = Shifted().eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 8), path)
    assert "shift" in {tensor.name for tensor in onnx.load(path).graph.initializer}
    assert dynamo_moe.verify(path, model).tolerance == tolerance_for({torch.float32})


def test_own_tolerance(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    with pytest.raises(dynamo_moe.VerificationError, match="tolerance 1e-12"):
        dynamo_moe.verify(path, model, tolerance=Tolerance(max=1e-12, rms=1e-12))


# --- Models in common wrappers ---


@pytest.mark.parametrize("wrap", [torch.compile, AveragedModel], ids=["compile", "average"])
def test_wrapped_models(tmp_path: Path, wrap) -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = OpLayer()

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    torch.manual_seed(0)
    model, path = TwoInputs().eval(), tmp_path / "model.onnx"
    example = {"x": torch.randn(2, 16), "scale": torch.rand(2, 16)}
    dynamo_moe.export(model, (), path, kwargs=example)
    report = dynamo_moe.verify(path, wrap(model))
    assert report.passed
    assert all(case.routing_agreement == 1 for case in report.cases)


def test_a_compiled_part(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    compiled = copy.deepcopy(model)
    for layer in compiled:
        layer.compile()
    assert dynamo_moe.verify(path, compiled).cases[0].routing_agreement == 1


def test_a_forward_that_writes_into_its_argument(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) + 1

    model, path, x = InPlace(), tmp_path / "model.onnx", torch.ones(2, 3)
    dynamo_moe.export(model, torch.randn(2, 3), path)
    assert dynamo_moe.verify(path, model, [(x,)]).passed
    assert x.eq(1).all()


# --- Against the model before conversion ---


def test_a_reference(tmp_path: Path) -> None:
    model, path = mlp_model(), tmp_path / "model.onnx"
    original = copy.deepcopy(model)
    dynamo_moe.convert(model)
    dynamo_moe.export(model, torch.randn(2, 16), path)
    report = dynamo_moe.verify(path, model, reference=original)
    assert all(case.routing_agreement == 1 and case.model_error < 2e-5 for case in report.cases)
    with torch.no_grad():
        original[1].mlp.w2 *= 1.01
    assert dynamo_moe.verify(path, model).passed
    with pytest.raises(dynamo_moe.VerificationError, match=r"from the reference: .* own error is"):
        dynamo_moe.verify(path, model, reference=original)


# --- bfloat16 ---


def bfloat16_file(path: Path) -> Path:
    """``y = float(x) + 1``, with bfloat16 input and output."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "one"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=onnx.TensorProto.BFLOAT16),
    ]
    x, y = (onnx_files.value(name, ["batch", 3], onnx.TensorProto.BFLOAT16) for name in "xy")
    one = numpy_helper.from_array(torch.ones(1).numpy(), "one")
    return onnx_files.save(onnx_files.model(nodes, [one], inputs=[x], outputs=[y]), path)


@pytest.mark.parametrize("isolated", [False, True])
def test_bfloat16_in_and_out(tmp_path: Path, isolated: bool) -> None:
    class AddOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.bfloat16
            return (x.float() + 1).bfloat16()

    path = bfloat16_file(tmp_path / "model.onnx")
    report = dynamo_moe.verify(path, AddOne(), isolated=isolated)
    assert [case.max_error for case in report.cases] == [0] * 6
    empty = dynamo_moe.verify(path, AddOne(), [(torch.zeros(0, 3).bfloat16(),)], isolated=isolated)
    assert empty.cases[0].shapes == {"x": (0, 3)}


def test_what_onnx_runtime_has_not_in_bfloat16_is_computed_in_float32(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(4, 3), nn.GELU()).bfloat16(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(2, 4).bfloat16(), path)
    report = dynamo_moe.verify(path, model, tolerance=tolerance_for({torch.float32}))
    assert report.missing == "Gemm"
    assert "in float32: ONNX Runtime has no Gemm of bfloat16" in str(report.__rich__().caption)
    assert report.to_dict()["missing"] == "Gemm"
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        model[0].bias += 0.25
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model)


@pytest.mark.parametrize("form", ["plugin", "unrolled", "dense", "onnxruntime", "library"])
def test_layers_in_bfloat16(tmp_path: Path, form: str) -> None:
    layers = OpLayer(activation="relu"), OpLayer(activation="silu", gated=True, biases=False)
    model = op_model(*layers).bfloat16()
    path = tmp_path / "model.onnx"
    options = {"unrolled": {"body": "unrolled"}, "library": {}}.get(form, {"target": form})
    shapes = {"input": {1: "tokens"}}
    example = torch.randn(2, 5, 16).bfloat16()
    dynamo_moe.export(
        model, example, path, dynamic_shapes=shapes, external_data=form == "plugin", **options
    )
    report = dynamo_moe.verify(path, model, library=form == "library")
    assert report.missing
    assert all(case.max_error < 1e-3 for case in report.cases)
    assert all(case.routing_agreement in (None, 1.0) for case in report.cases)


def test_bfloat16_between_casts(tmp_path: Path) -> None:
    """No input and no weight of the file has the dtype."""

    class Gram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.bfloat16() @ x.bfloat16().T).float()

    path = tmp_path / "model.onnx"
    dynamo_moe.export(Gram(), torch.randn(5, 4), path)
    report = dynamo_moe.verify(path, Gram())
    assert (report.passed, report.missing) == (True, "MatMul")


def test_branches_and_loops_in_bfloat16(tmp_path: Path) -> None:
    class Scanned(nn.Module):
        """A branch with a constant of its own, and a recurrence, which is a loop."""

        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                carry = carry * self.factor + row
                return carry, carry * 2

            x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 1.5, (x,))
            return scan(step, x.new_zeros(4), x)[1]

    model, path = Scanned().eval().bfloat16(), tmp_path / "model.onnx"
    dynamo_moe.export(model, torch.randn(5, 4).bfloat16(), path)
    report = dynamo_moe.verify(path, model)
    assert report.missing
    assert {node.op_type for node in onnx.load(path).graph.node} >= {"If", "Scan"}
    assert all(case.max_error < 1e-3 for case in report.cases)


# --- ONNX Runtime in a separate process ---


def test_a_runtime_that_dies_is_an_error(tmp_path: Path) -> None:
    path = onnx_files.crashing_file(tmp_path / "model.onnx")
    with pytest.raises(ChildProcessError, match=r"ONNX Runtime died of SIG[A-Z]+ while loading"):
        dynamo_moe.verify(path, nn.Identity(), isolated=True)
    # Without isolation, it would be this process.
    code = (
        "import sys; from dynamo_moe.verification.runtime import Runtime; "
        "Runtime().load(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True)
    assert done.returncode < 0


def test_isolated_is_the_same(model_and_file: tuple[nn.Module, Path]) -> None:
    model, path = model_and_file
    here, there = (dynamo_moe.verify(path, model, isolated=isolated) for isolated in (False, True))
    assert here == there


def test_a_refusal_of_the_isolated_runtime(model_and_file: tuple[nn.Module, Path]) -> None:
    _, path = model_and_file
    with pytest.raises(ValueError, match=r"cannot run .*model\.onnx on inputs of shapes .*3, 5"):
        dynamo_moe.verify(path, nn.Identity(), [(torch.randn(2, 3, 5),)], isolated=True)


def test_a_runtime_that_does_not_end(
    model_and_file: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    nodes = [helper.make_node("Loop", ["", "on", "x"], ["y"], body=endless())]
    x, y = (onnx_files.value(name, ["batch", 3]) for name in "xy")
    on = numpy_helper.from_array(torch.tensor(True).numpy(), "on")
    proto = onnx_files.model(nodes, [on], inputs=[x], outputs=[y])
    path = onnx_files.save(proto, tmp_path / "model.onnx")
    # Long enough for the process to start and to load the file, however busy the machine is.
    started = time.monotonic()
    dynamo_moe.verify(model_and_file[1], model_and_file[0], isolated=True)
    timeout = 5 + 5 * (time.monotonic() - started)
    with pytest.raises(TimeoutError, match=r"took more than \S+ s for running the file"):
        dynamo_moe.verify(path, nn.Identity(), isolated=True, timeout=timeout)
    with pytest.raises(ValueError, match="timeout needs isolated=True"):
        dynamo_moe.verify(path, nn.Identity(), timeout=3)


def endless() -> onnx.GraphProto:
    nodes = [
        helper.make_node("Identity", ["going"], ["go_on"]),
        helper.make_node("Identity", ["before"], ["after"]),
    ]
    inputs = [
        onnx_files.value("i", [], onnx.TensorProto.INT64),
        onnx_files.value("going", [], onnx.TensorProto.BOOL),
        onnx_files.value("before", None),
    ]
    outputs = [
        onnx_files.value("go_on", [], onnx.TensorProto.BOOL),
        onnx_files.value("after", None),
    ]
    return helper.make_graph(nodes, "endless", inputs, outputs)


def test_the_process_loads_no_pytorch() -> None:
    code = f"import runpy, sys; runpy.run_path({runtime.__file__!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)
    assert done.stdout.split() == [b"False"]


def test_complex_numbers_are_pairs_in_a_file(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            return torch.fft.fft(x) * factor

    model, path = Spectrum(), tmp_path / "model.onnx"
    inputs = torch.randn(2, 8), torch.randn(2, 8, dtype=torch.complex64)
    dynamo_moe.export(model, inputs, path, dynamic_shapes=None)
    assert dynamo_moe.verify(path, model, [inputs]).passed
    wrong = inputs[0], inputs[1].conj()
    broken = Spectrum()
    broken.forward = lambda x, factor: torch.fft.fft(x) * factor.conj()  # type: ignore[method-assign]
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, broken, [wrong])


def test_sizes_among_results_are_compared(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
            return x + 1, x.shape[0] * 2, x.shape[0] / 2

    path = tmp_path / "model.onnx"
    dynamo_moe.export(Sized(), torch.randn(2, 3), path)
    assert dynamo_moe.verify(path, Sized()).passed
    with_experts = nn.Sequential(OpLayer(), Sized()).eval()  # Whose routing is compared, too.
    dynamo_moe.export(with_experts, torch.randn(2, 16), tmp_path / "experts.onnx")
    assert dynamo_moe.verify(tmp_path / "experts.onnx", with_experts).passed
    other = Sized()
    other.forward = lambda x: (x + 1, 4, 1.0)  # type: ignore[method-assign]
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, other)


def test_half_precision_of_a_file_without_weights(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, key)

    inputs = torch.randn(2, 4, 16, 64).half(), torch.randn(2, 4, 16, 64).half()
    path = tmp_path / "model.onnx"
    dynamo_moe.export(Attention(), inputs, path, dynamic_shapes=None)
    assert dynamo_moe.verify(path, Attention(), [inputs]).passed


def test_hooks_get_the_arguments_by_position(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    report = dynamo_moe.export(model, torch.randn(2, 4), tmp_path / "m.onnx")
    assert dynamo_moe.verify(report.path, model).passed


def test_hooks_that_take_keywords_get_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"input": kwargs["input"] + 1}), with_kwargs=True
    )
    report = dynamo_moe.export(model, (), tmp_path / "m.onnx", kwargs={"input": torch.randn(2, 4)})
    assert dynamo_moe.verify(report.path, model).passed


def test_numbers_that_the_file_was_made_with(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 2.0, *, mode: str = "times") -> Tensor:
            return x * scale if mode == "times" else x / scale

    path, x = tmp_path / "m.onnx", torch.randn(2, 4)
    dynamo_moe.export(Scaled(), (x, 3.0), path, kwargs={"mode": "by"})
    assert dynamo_moe.verify(path, Scaled()).passed
    assert dynamo_moe.verify(path, Scaled(), [{"x": x}]).passed
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, Scaled(), [{"x": x, "scale": 2.0}])
    dynamo_moe.export(Scaled(), (x, 3.0), path, input_names=["renamed"])
    assert dynamo_moe.verify(path, Scaled()).passed
    dynamo_moe.export(Scaled(), x, path)
    assert "dynamo_moe.arguments" not in {e.key for e in onnx.load(path).metadata_props}


def test_numbers_among_collected_keywords(tmp_path: Path) -> None:
    class Collects(nn.Module):
        def forward(self, x: Tensor, **options: float) -> Tensor:
            return x * options.get("scale", 1.0)

    path = tmp_path / "m.onnx"
    dynamo_moe.export(Collects(), torch.randn(2, 4), path, kwargs={"scale": 3.0})
    assert dynamo_moe.verify(path, Collects()).passed


class Nested(nn.Module):
    def forward(self, tensors: dict[str, Any]) -> Tensor:
        return tensors["x"] + tensors["more"][0]


def test_containers_within_containers_are_given_as_the_model_takes_them(tmp_path: Path) -> None:
    path, args = tmp_path / "m.onnx", ({"x": torch.randn(2, 4), "more": [torch.randn(2, 4)]},)
    dynamo_moe.export(Nested(), args, path)
    with pytest.raises(ValueError, match="or in its place a tuple of the arguments"):
        dynamo_moe.verify(path, Nested())
    assert dynamo_moe.verify(path, Nested(), [args]).passed
