"""What stands in for private names of PyTorch that have moved."""

from __future__ import annotations

import importlib.util
import operator
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from custom_ops import _checks
from dynamo_moe import private, pytree
from dynamo_moe.private import exporter, operators, pytorch, tracer
from dynamo_moe.private.operators import has_fake_kernel, parsed_schema
from dynamo_moe.weights.lazy_tensors import LazyTensor
from small_models import OpLayer, op_model

ROOT = Path(__file__).parents[2]

Pair = namedtuple("Pair", "left right")


def test_everything_works_by_public_names(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "without_private_names.py"
    paths = os.pathsep.join([str(ROOT), str(script.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr
    refused = result.stdout.splitlines()
    for module in ("_subclasses.fake_tensor", "_dispatch.python", "utils._pytree", "_library"):
        assert any(module in name for name in refused), refused


def test_the_report_names_an_unknown_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = op_model(OpLayer()), torch.randn(3, 16)
    path = tmp_path / "m.onnx"
    assert not any("exporter" in note for note in dynamo_moe.export(model, example, path).notes)
    monkeypatch.setattr(tracer, "KNOWN_VERSIONS", ((2, 0), (2, 1)))
    notes = dynamo_moe.export(model, example, path).notes
    [note] = [note for note in notes if "its own exporter alone" in note]
    assert note == (
        f"PyTorch {torch.__version__} is traced and translated by its own exporter alone, which "
        "takes several times as long: it is not one of the versions 2.0 to 2.1"
    )
    assert dynamo_moe.verify(path, model).passed


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.10.2", False),
        ("2.11.0", True),
        ("2.12.1+cu130", True),
        ("2.15.1", True),
        ("2.16.0a0+git", False),
        ("3.0.0", False),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert (tracer.missing() is None) == known


def test_another_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tracer._changed.cache_clear()
    monkeypatch.setattr(ShapeEnv, "_log_guard", lambda self, guard: None)
    try:
        assert "_log_guard takes self, guard" in str(tracer.missing())
        monkeypatch.delattr(ShapeEnv, "_log_guard")
        tracer._changed.cache_clear()
        assert "'_log_guard'" in str(tracer.missing())
    finally:
        tracer._changed.cache_clear()


def imported_anew(module: ModuleType) -> Any:
    spec: Any = importlib.util.spec_from_file_location("imported_anew", module.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew


# Configurations hide their attributes in ways of its own.
@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((tracer, name) for name in tracer._USED if "_config." not in name),
        *((exporter, name) for name in exporter.USED),
    ],
)
def test_an_attribute_that_moved_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    owner, _, attribute = name.rpartition(".")
    held: Any = operator.attrgetter(owner)(module)
    for each in getattr(held, "__mro__", [held]):
        if attribute in vars(each):
            monkeypatch.delattr(each, attribute)
    monkeypatch.setattr(private, "exporter", imported_anew(exporter))
    assert f"'{attribute}'" in str(imported_anew(tracer).missing())


def test_an_export_without_the_interpreter_of_promotions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch itself still has it.
    names = {**vars(exporter.type_promotion)}
    del names["_TypePromotionInterpreter"]
    monkeypatch.setattr(exporter, "type_promotion", SimpleNamespace(**names))
    tracer._changed.cache_clear()
    try:
        model, path = op_model(OpLayer()), tmp_path / "m.onnx"
        [note] = dynamo_moe.export(model, torch.randn(3, 16), path).notes
        assert "its own exporter alone" in note
        assert "'_TypePromotionInterpreter'" in note
        assert dynamo_moe.verify(path, model).passed
    finally:
        tracer._changed.cache_clear()


def test_the_report_names_a_step_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(module: Any) -> None:
        raise AttributeError("no such attribute\nand more")

    monkeypatch.setattr(exporter, "promote_dtypes", failing)
    model, path = op_model(OpLayer()), tmp_path / "m.onnx"
    [note] = dynamo_moe.export(model, torch.randn(3, 16), path).notes
    assert note == (
        "torch.onnx.export traced the whole program again to translate it, which takes several "
        "times as long: AttributeError: no such attribute"
    )
    assert dynamo_moe.verify(path, model).passed


def test_the_report_names_what_needs_a_second_trace(tmp_path: Path) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            with torch.autocast("cpu", enabled=False):
                z = y.view(-1)
            y.add_(1)
            return z

    [note] = dynamo_moe.export(Changes(), torch.randn(3, 16), tmp_path / "m.onnx").notes
    assert re.fullmatch(
        r"torch.onnx.export traced .* as long: .* may share memory that is changed", note
    )


def test_lazy_weights_need_a_version_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "Tensor", object)
    with pytest.raises(RuntimeError) as raised:
        LazyTensor.of_memory(torch.ones(2))
    assert f"PyTorch {torch.__version__} has no torch.Tensor._make_wrapper_subclass" in str(
        raised.value
    )


@pytest.mark.parametrize(
    "tree", [1, [], [1, (2, {"a": 3})], {"a": [1], "b": None}, Pair(1, [2]), (Pair(1, 2),)]
)
def test_own_containers_are_as_those_of_pytorch(tree: Any) -> None:
    leaves, structure = pytree.PYTHON_ONLY["tree_flatten"](tree)
    assert leaves == pytree.tree_leaves(tree) == pytree.PYTHON_ONLY["tree_leaves"](tree)
    assert pytree.PYTHON_ONLY["tree_unflatten"](leaves, structure) == tree
    assert type(pytree.PYTHON_ONLY["tree_unflatten"](leaves, structure)) is type(tree)
    for name, args in (("tree_map", (str,)), ("tree_map_only", (int, str))):
        assert pytree.PYTHON_ONLY[name](*args, tree) == getattr(pytree, name)(*args, tree)


def test_structures_are_compared() -> None:
    flatten = pytree.PYTHON_ONLY["tree_flatten"]
    assert flatten([1, (2, 3)])[1] == flatten([4, (5, 6)])[1]
    assert flatten([1, (2, 3)])[1] != flatten([1, [2, 3]])[1]
    assert flatten({"a": 1})[1] != flatten({"b": 1})[1]


def test_a_schema_is_parsed_without_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "private_names::op(Tensor x, int[] sizes, float scale=0.5) -> (Tensor, Tensor)"
    expected = parsed_schema(text)
    monkeypatch.delattr(torch._C, "parse_schema")
    found = parsed_schema(text)
    for argument, same in zip(found.arguments, expected.arguments, strict=True):
        assert (argument.name, argument.default_value) == (same.name, same.default_value)
        assert str(argument.real_type) == str(same.real_type)
    assert [str(r.type) for r in found.returns] == [str(r.type) for r in expected.returns]
    with pytest.raises(RuntimeError):
        parsed_schema("private_names::op(Tensor) nonsense")


def test_symbols_of_data_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[x > 0], x * 2

    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Chosen(), (torch.randn(4, 3),), dynamic_shapes=dynamic)
    *_, output = program.graph.nodes
    chosen, doubled = (node.meta["val"] for node in output.args[0])
    expected = [tracer.free_unbacked_symbols(value) for value in (chosen, doubled)]
    monkeypatch.setattr(tracer, "_absent", "moved")
    assert [tracer.free_unbacked_symbols(value) for value in (chosen, doubled)] == expected
    assert [len(symbols) for symbols in expected] == [1, 0]


def test_without_documented_checks_the_errors_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_checks, "_CHECKS", {ValueError: None, TypeError: None})
    with pytest.raises(ValueError, match="a rule"):
        _checks._check_value(False, lambda: "a rule")
    with pytest.raises(TypeError, match="a rule"):
        _checks._check_type(False, lambda: "a rule")
    _checks._check_value(True, lambda: "a rule")


def test_a_fake_kernel_is_taken_for_granted_where_nothing_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = torch.library.Library("private_names", "FRAGMENT")
    library.define("without_fake(Tensor x) -> Tensor")
    without = torch.ops.private_names.without_fake.default
    assert not has_fake_kernel(without)
    with monkeypatch.context() as moved:
        moved.setattr("dynamo_moe.private.operators.OPDEFS", None)
        assert has_fake_kernel(without)
    with monkeypatch.context() as moved:  # Its definition has no _abstract_fn.
        moved.setattr("dynamo_moe.private.operators.OPDEFS", {without._schema.name: object()})
        assert has_fake_kernel(without)
    for owner, name in (
        (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
        (type(operators.singleton), "find"),
    ):
        with monkeypatch.context() as moved:
            moved.delattr(owner, name)
            assert has_fake_kernel(without)
    assert not has_fake_kernel(without)
