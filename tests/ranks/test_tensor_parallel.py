"""Plan ``experts+heads``: attention by heads and dense layers by columns, of one process."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any, NoReturn

import onnx
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe import tensor_parallel
from dynamo_moe.cli import app
from dynamo_moe.files.rank_files import files_of_ranks, record_of
from dynamo_moe.tensor_parallel import ColumnLinear, RowLinear, Split, splits
from moe_architectures import ARCHITECTURES, example_inputs
from small_models import mlp_model

HEADS = "experts+heads"


def converted(family: str, **config: Any) -> Any:
    model = ARCHITECTURES[family].build(**config)
    assert dynamo_moe.convert(model).replaced
    return model.eval()


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return converted("mixtral")


def parts(model: nn.Module) -> dict[str, str]:
    return {path: type(part).__name__ for path, part in model.named_modules()}


def test_a_model_is_as_it_was(mixtral: Any) -> None:
    inputs = example_inputs(ARCHITECTURES["mixtral"], 2, 5)
    before, modules = mixtral(**inputs).logits, parts(mixtral)
    weights = {name: id(parameter) for name, parameter in mixtral.named_parameters()}
    with dynamo_moe.sharded(mixtral, 1, 2, HEADS) as report:
        attention = mixtral.model.layers[0].self_attn
        assert isinstance(attention.q_proj, ColumnLinear)
        assert isinstance(attention.o_proj, RowLinear)
        assert (attention.k_proj.out_features, attention.o_proj.in_features) == (8, 16)
        assert len(report.split) == 2 * 4
        assert str(report).endswith("and its share of 8 other modules")
    assert parts(mixtral) == modules
    assert weights == {name: id(parameter) for name, parameter in mixtral.named_parameters()}
    assert torch.equal(mixtral(**inputs).logits, before)


def test_a_model_is_whole_after_a_failure(mixtral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(copies: bool) -> NoReturn:
        raise OSError("a weight cannot be read")

    def some(*arguments: Any) -> list[Split]:
        return [*splits(*arguments)[:2], Split("a third", failing)]

    before = parts(mixtral)
    monkeypatch.setattr(tensor_parallel, "splits", some)
    with pytest.raises(OSError, match="cannot be read"):
        dynamo_moe.sharded(mixtral, 0, 2, HEADS).__enter__()
    assert parts(mixtral) == before


def test_a_stack_of_gate_and_up_is_split_in_both() -> None:
    """As the plans of Phi and GLM have it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tp_plan = {"up": "packed_colwise", "down": "rowwise"}
            self.up, self.down = nn.Linear(3, 12), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.up(x).chunk(2, -1)
            result: torch.Tensor = self.down(gate.relu() * up)
            return result

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3)
    expected, results = model(x), []
    for rank in range(3):
        undo = [split.install(False) for split in splits(model, rank, 3, "")]
        results.append(model(x) - model.down.bias)
        for each in undo:
            each()
    torch.testing.assert_close(sum(results) + model.down.bias, expected)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("family", "config", "ranks", "message"),
    [
        ("gpt_oss", {}, 2, "plan of GptOssForCausalLM splits neither attention nor dense layers"),
        ("mixtral", {}, 3, "3 ranks cannot share the 4 heads .*q_proj' .num_attention_heads"),
        ("mixtral", {}, 4, "4 ranks cannot share the 2 heads of .*k_proj' .num_key_value_heads"),
        ("deepseek_v3", {"intermediate_size": 45}, 2, "gate_proj' has 45 outputs, which are no"),
    ],
)
def test_what_ranks_cannot_share(
    family: str, config: dict[str, Any], ranks: int, message: str
) -> None:
    model = converted(family, **config)
    before = parts(model)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.sharded(model, 0, ranks, HEADS).__enter__()
    assert parts(model) == before


def test_a_layer_with_heads_of_its_own(mixtral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtral.model.layers[1].self_attn, "head_dim", 16)
    with pytest.raises(ValueError, match=r"the 1 heads of 'model\.layers\.1\.self_attn\.k_proj'"):
        dynamo_moe.sharded(mixtral, 0, 2, HEADS).__enter__()


LAYERS = "model.layers.*"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {f"{LAYERS}.mlp": "all_reduce"},
            "MixtralForCausalLM has the style 'all_reduce' for 'model.layers.0.mlp'; known ones",
        ),
        (
            {f"{LAYERS}.self_attn.o_proj": "replicate"},
            r"splits 'model\.layers\.0\.self_attn\.q_proj', and has no layer of style 'rowwise'",
        ),
        ({f"{LAYERS}.self_attn": "rowwise"}, "it is no nn.Linear, but .*MixtralAttention"),
        ({f"{LAYERS}.mlp.gate.weight": "colwise"}, "'model.layers.0.mlp.gate.weight', and has no"),
        ({f"{LAYERS}.self_attn.k_proj.weight": "colwise"}, "a parameter of 2 dimensions, cannot"),
    ],
)
def test_plans_that_make_no_sense(
    mixtral: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(mixtral, "_tp_plan", {**mixtral.tp_plan, **change})
    with pytest.raises(ValueError, match=message):
        dynamo_moe.sharded(mixtral, 0, 2, HEADS).__enter__()


def test_weights_that_are_tied_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("mixtral")
    first, second = (layer.self_attn for layer in model.model.layers)
    monkeypatch.setattr(second.q_proj, "weight", first.q_proj.weight)
    with pytest.raises(ValueError, match="q_proj' cannot be split: other modules have it too"):
        dynamo_moe.sharded(model, 0, 2, HEADS).__enter__()


def test_layers_that_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("mixtral")
    first, second = (layer.self_attn for layer in model.model.layers)
    monkeypatch.setattr(second, "q_proj", first.q_proj)
    with pytest.raises(ValueError, match="q_proj' cannot be split: other modules have it too"):
        dynamo_moe.sharded(model, 0, 2, HEADS).__enter__()
    monkeypatch.undo()
    dynamo_moe.quantize(model, None, linear="int8")
    with pytest.raises(ValueError, match=r"q_proj' cannot be split colwise: it is no nn\.Linear"):
        dynamo_moe.sharded(model, 0, 2, HEADS).__enter__()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What makes a family's model and the first of its files, once."""

    @functools.cache
    def make(family: str) -> tuple[Any, Path]:
        model = converted(family)
        path = tmp_path_factory.mktemp(family) / "m.onnx"
        return model, dynamo_moe.export_language_model(model, path, ranks=2, plan=HEADS).path

    return make


def copied(exported: Any, folder: Path) -> tuple[Any, Path]:
    """Return the model, and the first of the copies of its files."""
    model, path = exported("mixtral")
    for file in path.parent.iterdir():
        shutil.copy(file, folder)
    return model, folder / path.name


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe_swa")


@pytest.mark.parametrize(
    "family",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.every) for name in FAMILIES[1:])],
)
def test_files(exported: Any, family: str) -> None:
    """Each rank's file has its own heads, of its cache too, and all of them are the model."""
    model, path = exported(family)
    assert dynamo_moe.verify(path, model).passed
    files = files_of_ranks(path)
    record = record_of(files[0][1])
    assert record is not None
    caches = [name for name in record.split if name.startswith("past_key_values.")]
    # What latent attention keeps is of all heads.
    assert len(caches) == (0 if family.startswith("deepseek") else 4)
    assert set(record.split.values()) <= {1}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(dynamo_moe.inspect(path))
    assert ("and its share of 8 inputs and outputs" in shown.get()) == bool(caches)
    whole = {name: list(weight.shape) for name, weight in model.named_parameters()}
    for _, proto in files:
        rows = "shared_experts.down_proj.weight" if family == "deepseek_v3" else "o_proj.weight"
        shapes = {t.name: [*t.dims] for t in proto.graph.initializer if t.name.endswith(rows)}
        assert shapes
        for name, (inputs, outputs) in shapes.items():  # As the file multiplies them.
            assert whole[name] == [outputs, 2 * inputs]


@pytest.mark.every
def test_a_rank_that_computes_something_else(exported: Any, tmp_path: Path) -> None:
    """Its keys are in its own cache alone."""
    model, path = copied(exported, tmp_path)
    proto = onnx.load(tmp_path / "m.rank1.onnx")
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = next(each for each in proto.graph.initializer if each.name == name)
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(-values, name))
    onnx.save(proto, tmp_path / "m.rank1.onnx")
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model)


def test_files_with_other_shares(exported: Any, tmp_path: Path) -> None:
    model, path = copied(exported, tmp_path)
    proto = onnx.load(tmp_path / "m.rank1.onnx")
    entry = next(each for each in proto.metadata_props if each.key == "dynamo_moe.rank")
    entry.value = entry.value.replace('"present.0.key": 1', '"present.0.key": 3')
    onnx.save(proto, tmp_path / "m.rank1.onnx")
    with pytest.raises(ValueError, match=r"m\.rank1\.onnx has a share of .*'present\.0\.key': 3"):
        dynamo_moe.verify(path, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": HEADS}, "plan 'experts.heads' is one of files for several devices: it needs"),
        (
            {"plan": "heads", "ranks": 2},
            r"plan must be one of experts, experts\+heads; got 'heads'",
        ),
        ({"split_axes": {"x": 0}, "ranks": 2}, r"split_axes needs plan 'experts\+heads', and the"),
        (
            {"plan": HEADS, "ranks": 2, "split_axes": {"x": 0}, "input_names": ["x"]},
            "and the names of inputs and outputs",
        ),
        (
            {"plan": HEADS, "ranks": 2, "split_axes": {"z": 0}, "input_names": ["x"]}
            | {"output_names": ["y"]},
            r"split_axes has \['z'\], which no input or output is called",
        ),
        ({"plan": HEADS, "ranks": 2}, r"plan of Sequential splits .*tp_plan is None"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = mlp_model(layers=1)
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=message):
        dynamo_moe.export(model, torch.randn(3, 16), tmp_path / "m.onnx", **options)
    assert [*tmp_path.iterdir()] == []


def test_command_line(tmp_path: Path) -> None:
    out = str(tmp_path / "m.onnx")
    for arguments, error in (
        (("export", "m.py", out, "--plan", HEADS), "--plan experts+heads needs --ranks"),
        (("verify", out, "m.py", "--ranks"), "--ranks needs torchrun, which starts a process"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, error in result.stderr) == (2, True), result.stderr
