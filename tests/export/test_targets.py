"""Targets are records: what is listed, what their files say, and that nothing asks for a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.moe_nodes.targets import names, registry
from dynamo_moe.moe_nodes.targets.dense import DENSE
from dynamo_moe.moe_nodes.targets.plugin import PLUGIN
from dynamo_moe.moe_nodes.targets.registry import TARGETS, target_of
from dynamo_moe.operators.foreign import FOREIGN_OPERATORS, TRT_MOE, foreign_operator, is_foreign
from packed_cases import packed_case
from small_models import OpLayer, Residual

ROOT = Path(__file__).parents[2]
FOLDER = Path(registry.__file__).parent
NOT_TARGETS = {"__init__", "names", "record", "registry"}


class Packed(nn.Module):
    """A layer with packed weights."""

    def __init__(self) -> None:
        super().__init__()
        case = packed_case("dropless", width=16, group=16, activation="silu", gated=True)
        self.call, self.tensors = case.overload, nn.ParameterDict()
        for name, value in case.arguments.items():
            if isinstance(value, Tensor) and name != "x":
                self.tensors[name] = nn.Parameter(value, requires_grad=False)
        self.options = {**case.options, "top_k": 2}

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, **dict(self.tensors.items()), **self.options)


def gated_model(*, packed: bool = False) -> nn.Module:
    """Every target has a form of its layers, but for packed ones."""
    layers = (OpLayer(activation="silu", gated=True) for _ in range(2))
    model = nn.Sequential(*(Residual(16, layer) for layer in layers))
    return (model.append(Packed()) if packed else model).eval()


def test_the_public_names_are_those_of_the_records() -> None:
    assert get_args(names.TargetName) == tuple(TARGETS)
    assert {module.stem for module in FOLDER.glob("*.py")} - NOT_TARGETS == set(TARGETS)
    assert names.DEFAULT_TARGET in TARGETS
    assert set(names.BODIES) == {*PLUGIN.bodies}
    assert next(iter(PLUGIN.bodies)) == names.DEFAULT_BODY


def test_each_foreign_operator_belongs_to_one_target() -> None:
    for operator in FOREIGN_OPERATORS:
        assert sum(operator in target.foreign for target in TARGETS.values()) == 1
        assert operator in target_of(operator).foreign
        assert foreign_operator(operator.domain, operator.op_type) is operator


def test_whose_operator_a_node_is() -> None:
    assert foreign_operator("any", "TRT_MoE") is TRT_MOE  # Its parser ignores the domain.
    assert foreign_operator("any", "MoE") is None
    assert is_foreign("com.microsoft.nchwc", "Conv")
    assert not is_foreign("", "Conv")


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_record_says_of_its_files(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    model = gated_model(packed=target.takes_packed_weights)
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(model, torch.randn(2, 16), path, target=name)
    assert report.body == next(iter(target.bodies))
    assert any("DroplessMoE" in operator for operator in report.nodes) == target.keeps_nodes
    wanted = {f"{operator.domain}::{operator.op_type}" for operator in target.foreign}
    foreign = {operator for operator in report.nodes if "::" in operator}
    assert wanted <= foreign
    assert target.keeps_nodes or foreign <= wanted
    own = [note for note in report.notes if "stay packed" not in note]  # What any target says.
    assert bool(own) == bool(target.note)
    if target.runs_in_onnxruntime:
        assert dynamo_moe.verify(path, model).passed
    else:
        with pytest.raises(ValueError, match="ONNX Runtime cannot run"):
            dynamo_moe.verify(path, model)


def test_a_record_of_your_own_needs_nothing_else(tmp_path: Path, monkeypatch) -> None:
    """The guide's promise: what the list holds, an export takes."""
    mine = replace(DENSE, name="mine", keeps_nodes=True, note="for my runtime alone")
    monkeypatch.setattr(registry, "TARGETS", {**TARGETS, "mine": mine})
    report = dynamo_moe.export(
        gated_model(), torch.randn(2, 16), tmp_path / "mine.onnx", target="mine"
    )
    assert report.target == "mine"
    assert report.notes == ("for my runtime alone",)
    assert report.nodes["moe::DroplessMoE"] == 2


def test_a_target_with_a_choice_names_the_bodies_that_it_has() -> None:
    assert registry.targets_with_body("loop") == tuple(TARGETS)
    assert registry.targets_with_body("unrolled") == ("plugin",)
    assert registry.targets_with_body("none such") == ()


def compared_names(source: str) -> Iterator[str]:
    """Yields the names of targets that a module's code compares something with."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
            case ast.MatchValue():
                operands = [node.value]
            case _:
                continue
        for operand in operands:
            for item in getattr(operand, "elts", [operand]):
                if isinstance(item, ast.Constant) and str(item.value) in TARGETS:
                    yield str(item.value)


def test_no_code_compares_with_a_targets_name() -> None:
    sample = "target == 'dense' or target in ('plugin', 'x')\nmatch t:\n case 'onnxruntime': ...\n"
    assert sorted(compared_names(sample)) == ["dense", "onnxruntime", "plugin"]
    for package in ("custom_ops", "dynamo_moe", "trt_plugin"):
        for module in (ROOT / package).rglob("*.py"):
            found = list(compared_names(module.read_text()))
            assert not found, f"{module.relative_to(ROOT)} compares with {found}"
