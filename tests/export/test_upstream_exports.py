"""The runner of exporters' own tests: of tests of ours, and of checkouts of their projects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamo_moe
import upstream_exports

SUPPORT = Path(__file__).parents[1] / "support"
# Those whose file cannot be compared: they draw random numbers.
RANDOM = {"test_enable_gqa_in_attention_23_with_dropout"}

TESTS = """
import torch
from torch.onnx._internal.exporter import _testing

class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1.0, lambda x: x - 42.0, [x])

class Drawn(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

class Decides(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def test_right():
    program = torch.onnx.export(Branch(), (torch.ones(2),), dynamo=True)
    _testing.assert_onnx_program(program)
    _testing.assert_onnx_program(program, args=(-torch.ones(2),))

def test_wrong():
    torch.onnx.export(Drawn(), (torch.ones(2),), dynamo=True)

def test_refused():
    torch.onnx.export(Decides(), (torch.ones(2),), dynamo=True)
"""


def outcomes(
    tests: Path, report: Path, *options: str, packages: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    command = (sys.executable, "-m", "pytest", "-p", "upstream_exports", "-p", "no:cacheprovider")
    command += ("-c", os.devnull, "--rootdir", str(tests.parent), "--report", str(report))
    search = [
        str(SUPPORT),
        *map(str, packages),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search))}
    environment |= {"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [*command, *options, str(tests)], env=environment, check=False, stdout=subprocess.DEVNULL
    )
    found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
    return found


@pytest.mark.every
def test_each_export_has_an_outcome(tmp_path: Path) -> None:
    tests = tmp_path / "test_models.py"
    tests.write_text(TESTS, encoding="utf-8")
    found = {each["test"]: each for each in outcomes(tests, tmp_path / "report.json")}
    assert {name: (each["upstream"], each["ours"]) for name, each in found.items()} == {
        "test_right": (True, "right"),
        "test_wrong": (True, "wrong"),
        "test_refused": (False, "refused"),
    }
    assert "differs from the model" in found["test_wrong"]["message"]


class Cancels(torch.nn.Module):
    """A product whose halves cancel out but for a thousandth."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        half = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
        self.weight = torch.nn.Parameter(torch.cat([half, half]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.factor


def test_rounding_is_told_from_a_wrong_file(tmp_path: Path) -> None:
    model, path = Cancels().eval(), tmp_path / "m.onnx"
    half = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    inputs = {"x": torch.cat([half, 1e-3 * half.flip(0) - half], dim=-1)}
    dynamo_moe.export(model, (), path, kwargs=inputs, dynamic_shapes=None)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model, [inputs])
    assert upstream_exports._rounds(path, model, inputs)
    model.factor = 1.1
    assert not upstream_exports._rounds(path, model, inputs)


TRANSFORMERS_TESTS = """
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers import MixtralForCausalLM
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}

def export(model, dynamic):
    ids = torch.arange(8).reshape(2, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return OnnxExporter().export(model.eval(), inputs, config=OnnxConfig(dynamic=dynamic))

def test_bert():
    export(BertModel(BertConfig(**SIZES)), dynamic=True)

def test_llama():
    export(LlamaForCausalLM(LlamaConfig(**SIZES)), dynamic=False)

def test_mixtral():
    export(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)), dynamic=False)
"""


@pytest.mark.every
def test_each_export_by_transformers_has_an_outcome(tmp_path: Path) -> None:
    pytest.importorskip("transformers.exporters.exporter_onnx")
    tests = tmp_path / "test_export.py"
    tests.write_text(TRANSFORMERS_TESTS, encoding="utf-8")
    found = outcomes(tests, tmp_path / "report.json")
    assert [(each["test"], each["upstream"], each["ours"]) for each in found] == [
        ("test_bert", True, "right"),
        ("test_llama", True, "right"),
        ("test_mixtral", True, "right"),
    ]
    assert [each["converted"] for each in found] == [0, 0, 1]


@pytest.mark.every
@pytest.mark.timeout(7200)
@pytest.mark.skipif("TRANSFORMERS_CHECKOUT" not in os.environ, reason="needs TRANSFORMERS_CHECKOUT")
@pytest.mark.parametrize("name", ["bert", "llama", "mixtral", "qwen3_moe", "t5", "vit"])
def test_no_file_of_transformers_own_models_is_wrong(tmp_path: Path, name: str) -> None:
    """The tests of its exporter are slow ones of each model's own tests.

    They run with the package of the checkout; what they import beside it is on ``PYTHONPATH``.
    """
    checkout = Path(os.environ["TRANSFORMERS_CHECKOUT"])
    tests = checkout / "tests" / "models" / name / f"test_modeling_{name}.py"
    options = "--noconftest", "-k", "test_onnx_export and not generate"
    packages = checkout / "src", checkout
    found = outcomes(tests, tmp_path / "report.json", *options, packages=packages)
    assert {each["test"] for each in found} == {
        "test_onnx_export_dynamic",
        "test_onnx_export_static",
    }
    assert not [each for each in found if each["ours"] in ("wrong", "unfinished")]


@pytest.mark.skipif("PYTORCH_CHECKOUT" not in os.environ, reason="needs PYTORCH_CHECKOUT")
def test_no_file_of_pytorchs_own_models_is_wrong(tmp_path: Path) -> None:
    folder = Path(os.environ["PYTORCH_CHECKOUT"]) / "test" / "onnx" / "exporter"
    found = outcomes(folder / "test_small_models_e2e.py", tmp_path / "report.json")
    assert len(found) > 30
    assert {each["test"] for each in found if each["ours"] == "wrong"} <= RANDOM
