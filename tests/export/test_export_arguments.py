"""``dynamo_moe.export``: the arguments that it takes, what it refuses, and what it notes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.optim.swa_utils import AveragedModel

import dynamo_moe
from export_forms import mixed_model
from small_models import OpLayer, mlp_model, op_model

pytest_plugins = ("export_forms",)


def test_unconverted_model(tmp_path: Path) -> None:
    message = r"^2 MoE modules are not converted.*'0\.mlp' \(DroplessMoEMlp\), '1\.mlp' .*convert\("
    with pytest.warns(UserWarning, match=message) as warned:
        report = dynamo_moe.export(mlp_model(), torch.randn(2, 16), tmp_path / "m.onnx")
    assert report.notes == (str(warned[0].message),)
    assert not report.layers
    assert sum(report.nodes.values()) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"target": "tflite"},
            "target must be one of plugin, dense, onnxruntime, tensorrt_moe; got 'tflite'",
        ),
        ({"body": "scan"}, "body must be one of loop, unrolled; got 'scan'"),
        (
            {"body": "unrolled", "target": "dense"},
            "body 'unrolled' needs target 'plugin': with 'dense' nodes have no body",
        ),
        ({"opset": 17}, r"opset must be in 18\.\..*, got 17"),
        ({"opset": 99}, r"opset must be in 18\.\..*, got 99"),
        ({"dynamic_shapes": "tokens"}, "dynamic_shapes must be 'batch', a mapping or a sequence"),
        ({"dynamic_shapes": {"y": {0: "n"}}}, "dynamic_shapes names 'y'; the example's arguments"),
        ({"dynamic_shapes": {"input": {2: "n"}}}, "names dimension 2 of 'input', whose example"),
        ({"dynamic_shapes": {"input": {"0": "n"}}}, "names dimension '0' of 'input', whose exampl"),
        ({"dynamic_shapes": {"input": "n"}}, "a tensor's is a mapping from dimension to name"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx", **arguments)
    assert not list(tmp_path.iterdir())


class _Nested(nn.Module):
    def forward(self, given: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        x, rest = given
        return x + rest["y"]


def _nested_example() -> tuple[tuple[Tensor, dict[str, Tensor]]]:
    return ((torch.randn(2, 3), {"y": torch.randn(2, 3)}),)


def test_dimensions_of_nested_tensors(tmp_path: Path) -> None:
    shapes = {"given": ({0: Dim("rows")}, {"y": ["rows", None]})}
    path = tmp_path / "m.onnx"
    dynamo_moe.export(_Nested(), _nested_example(), path, dynamic_shapes=shapes)
    inputs = [each.type.tensor_type.shape.dim for each in onnx.load(path).graph.input]
    assert [[dim.dim_param or dim.dim_value for dim in each] for each in inputs] == 2 * [
        ["rows", 3]
    ]


def test_argument_without_symbolic_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(_Nested(), _nested_example(), path, dynamic_shapes={"given": None})
    inputs = [each.type.tensor_type.shape.dim for each in onnx.load(path).graph.input]
    assert [[dim.dim_value for dim in each] for each in inputs] == 2 * [[2, 3]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (({0: "n"},), "it must have the structure of the example"),
        (({0: "n"}, {"x": {0: "n"}}), "it must have the structure of the example"),
        (
            ({0: "n"}, {"y": {2: "n"}}),
            r"names dimension 2 of 'given\[1\]\[y\]', whose example has 2",
        ),
        (
            ({0: "n"}, {"y": {0: 7}}),
            r"gives dimension 0 of 'given\[1\]\[y\]' the size 7; its example",
        ),
    ],
)
def test_bad_dimensions_of_nested_tensors(tmp_path: Path, entry: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(
            _Nested(), _nested_example(), tmp_path / "m.onnx", dynamic_shapes={"given": entry}
        )


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write m\.onnx into"):
        dynamo_moe.export(mlp_model(), torch.randn(2, 16), tmp_path / "nowhere" / "m.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu2"}, "no form of an expert with activation 'relu2'"),
        ({"activation": "gelu", "gated": True}, "no form of a gated expert with activation 'gelu'"),
        (
            {"activation": "softcapped_silu", "gated": True},
            "no form of a gated expert with activation 'softcapped_silu'",
        ),
        ({"weight_on_input": True}, "cannot weight the experts' inputs"),
    ],
)
def test_onnxruntime_target_refuses_what_it_cannot_express(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(
            op_model(OpLayer(**options)), torch.randn(2, 16), tmp_path / "m.onnx",
            target="onnxruntime",
        )  # fmt: skip


def test_static_shapes(tmp_path: Path) -> None:
    model = mlp_model()
    dynamo_moe.convert(model)
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(1, 16), path, dynamic_shapes=None)
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape
    assert [dim.dim_value for dim in shape.dim] == [1, 16]


def test_modes_are_restored(tmp_path: Path) -> None:
    model = mlp_model().train()
    dynamo_moe.convert(model)
    model[1].norm.eval()
    modes = [module.training for module in model.modules()]
    dynamo_moe.export(model, torch.randn(2, 16), tmp_path / "m.onnx")
    dynamo_moe.verify(tmp_path / "m.onnx", model)
    assert [module.training for module in model.modules()] == modes


class ManyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = OpLayer()

    def forward(self, x, mask=None, flag=False, scale=1.0, extra=None, *rest, key=None, **more):
        y = self.layer(x) * scale
        terms = [*rest, *more.values(), *(value for value in (mask, key) if value is not None)]
        if isinstance(extra, dict):
            terms += [extra["a"], *extra["b"]]
        for term in terms:
            y = y + term
        return {"y": -y if flag else y, "first": y[:, 0]}


TERM = torch.randn(1, 3, 16)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((None,), {}),
        ((), {"flag": True, "scale": 0.5}),
        ((TERM,), {"key": TERM.clone()}),
        ((), {"extra": {"a": TERM, "b": [TERM.clone(), TERM.clone()]}}),
        ((None, False, 1.0, None, TERM, TERM.clone()), {}),
        ((), {"more": TERM}),
    ],
)
def test_any_arguments(
    tmp_path: Path, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    model, path = ManyArguments().eval(), tmp_path / "m.onnx"
    dynamo_moe.export(model, (torch.randn(1, 3, 16), *arguments), path, kwargs=keywords)
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [len(v.type.tensor_type.shape.dim) for v in proto.graph.output] == [3, 2]


class Collects(nn.Module):
    """Takes any arguments, by place and by name."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return torch.cat([x, *others]) + named["shift"]


_ROWS = {0: "batch"}


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": _ROWS, "others": (_ROWS,), "shift": {0: "twice"}},
        {"x": _ROWS, "others": (_ROWS,), "named": {"shift": {0: "twice"}}},
    ],
    ids=["by name", "as in torch.export"],
)
def test_arguments_that_are_collected(tmp_path: Path, shapes: dict[str, object]) -> None:
    x, path = torch.randn(3, 4), tmp_path / "m.onnx"
    report = dynamo_moe.export(
        Collects(), (x, x + 1), path, kwargs={"shift": torch.randn(6, 1)}, dynamic_shapes=shapes
    )
    assert report.notes == ()
    inputs = {value.name: value.type.tensor_type.shape for value in onnx.load(path).graph.input}
    assert [*inputs] == ["x", "others_0", "shift"]
    assert inputs["others_0"].dim[0].dim_param == "batch"
    cases = [(torch.randn(n, 4), torch.randn(n, 4), torch.randn(2 * n, 1)) for n in (1, 5)]
    names = ("x", "others_0", "shift")
    inputs_by_name = [dict(zip(names, case, strict=True)) for case in cases]
    assert dynamo_moe.verify(path, Collects(), inputs_by_name).passed


@pytest.mark.parametrize("wrap", [torch.compile, AveragedModel], ids=["compile", "average"])
def test_a_wrapped_model_is_exported_as_what_it_wraps(tmp_path: Path, wrap) -> None:
    path, other = tmp_path / "m.onnx", tmp_path / "wrapped.onnx"
    model = op_model(OpLayer())
    options = {"dynamic_shapes": {"input": {0: "rows"}}}
    dynamo_moe.export(model, torch.randn(2, 16), path, **options)
    dynamo_moe.export(wrap(model), torch.randn(2, 16), other, **options)
    assert path.read_bytes() == other.read_bytes()


def test_a_dimension_that_the_model_fixes(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + positions[:, None]

    example = (torch.randn(2, 5, 16), torch.randn(5))
    message = r"fixed by the model: static shape of 5 for dimension inputs\['positions'\]"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(Positions(), example, tmp_path / "m.onnx")
    dynamo_moe.export(
        Positions(), example, tmp_path / "m.onnx", dynamic_shapes={"positions": {0: None}}
    )


def test_an_operator_without_a_translation(tmp_path: Path) -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x @ x.mT).real

    message = "^operator aten.linalg_eig has no translation to ONNX, nor a decomposition"
    with pytest.raises(dynamo_moe.ExportError, match=message):
        dynamo_moe.export(Eigenvalues(), torch.randn(3, 4, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path, frozen: bool) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert gc.get_freeze_count()
            assert frozen or gc.get_threshold()[0] > usual[0]
            raise ValueError("not today")

    usual = gc.get_threshold()
    if frozen:
        gc.freeze()
    try:
        dynamo_moe.export(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")
        with pytest.raises(dynamo_moe.ExportError, match="not today"):
            dynamo_moe.export(Fails(), torch.randn(2, 4), tmp_path / "m.onnx")
        assert bool(gc.get_freeze_count()) == frozen
        assert gc.get_threshold() == usual
    finally:
        gc.unfreeze()


def test_an_operator_on_complex_tensors(tmp_path: Path) -> None:
    class Phases(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(torch.complex(x, x)).real

    with pytest.raises(dynamo_moe.ExportError, match="for complex tensors: ONNX has none"):
        dynamo_moe.export(Phases(), torch.randn(3, 4, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize("args", [[torch.randn(2, 16)], None])
def test_args_that_are_no_tuple(tmp_path: Path, args: object) -> None:
    with pytest.raises(TypeError, match="args must be a tuple or one tensor, got"):
        dynamo_moe.export(nn.Identity(), args, tmp_path / "m.onnx")


def test_destination_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        dynamo_moe.export(nn.Identity(), torch.randn(2, 16), tmp_path)


def test_destination_that_is_no_file(tmp_path: Path) -> None:
    """Renamed over it, the file would take the place of a device such as /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="pipe is no file, and would be replaced by one"):
        dynamo_moe.export(nn.Identity(), torch.randn(2, 16), pipe)
    assert pipe.is_fifo()


def test_destination_behind_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link.onnx", tmp_path / "there" / "model.onnx"
    file.parent.mkdir()
    link.symlink_to(file)
    report = dynamo_moe.export(nn.Linear(16, 64), torch.randn(2, 16), link, external_data=True)
    assert report.path == file
    assert {path.name for path in file.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert link.readlink() == file
    assert dynamo_moe.inspect(link)


def test_names_follow_the_arguments_whatever_their_order(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def forward(self, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return table[rows]

    example = {"table": torch.randn(7, 4), "rows": torch.tensor([0, 3, 2])}
    shapes = {"rows": {0: "queries"}, "table": {0: "entries"}}
    path = tmp_path / "m.onnx"
    dynamo_moe.export(Lookup(), (), path, kwargs=example, dynamic_shapes=shapes)
    inputs = {
        i.name: i.type.tensor_type.shape.dim[0].dim_param for i in onnx.load(path).graph.input
    }
    assert inputs == {"rows": "queries", "table": "entries"}


def test_notes(exported, tmp_path: Path) -> None:
    model, path = mlp_model(), tmp_path / "m.onnx"
    dynamo_moe.convert(model)
    assert not dynamo_moe.export(model, torch.randn(2, 16), path).notes
    (gelu,) = dynamo_moe.export(model, torch.randn(2, 16), path, target="onnxruntime").notes
    assert "computes GELU in its tanh form" in gelu
    (by_name,) = dynamo_moe.export(mixed_model(), torch.randn(2, 16), path).notes
    assert "TensorRT's parser finds functions by name alone" in by_name
