"""Equal blocks are traced once for all of them: what is shared, and that files do not tell.

Files are those of a model traced block by block, but for what the optimiser would make of the
values of weights, which it is not shown.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import dynamo_moe
import transformer_models as models
from block_stacks import WIDTH, Block, SecondAsWell, Stack, stack
from cached_models import example, made
from dynamo_moe.cli import app
from dynamo_moe.models import DroplessMoEMlp
from shared_exports import Compared, Make, opened_twice
from transformer_models import LENGTH

pytest_plugins = ("shared_exports",)

WITH_PAST = "text-generation-with-past"
LOG = logging.getLogger(__name__)


def of_kinds(*kinds: type[nn.Module], model: type[nn.Module] = Stack) -> Make:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return model(*(kind(number) for number, kind in enumerate(kinds))).eval()

    return make


class Tanh(Block):
    def compute(self, y: Tensor) -> Tensor:
        return torch.tanh(y)


class Residual(nn.Module):
    """A residual MoE layer."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.inner = DroplessMoEMlp(WIDTH, 16, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class Named(Block):
    """Blocks whose numbers and names differ, and are not read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = "block"
        self.drop_rate = number / 10

    def compute(self, y: Tensor) -> Tensor:
        LOG.debug("block %d of %s", self.number, y.shape)
        if self.drop_rate and self.training:
            y = F.dropout(y, self.drop_rate)
        return super().compute(y)


class Sequence(nn.Sequential):
    """A sequence of blocks, as it is."""


class WithInput(Stack):
    def forward(self, x: Tensor) -> Any:
        y = x
        for block in self.blocks:
            y = block(y + x)
        return self.head(y)


class UsesMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) if mask is None else super().forward(x) * mask


class Masks(Stack):
    def forward(self, x: Tensor) -> Any:
        mask = (x > 0).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


class AllStates(Stack):
    def forward(self, x: Tensor) -> Any:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.head(x), *states


STACKS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "four": (of_kinds(*[Block] * 4), ("4 of Block: 3 traced",)),
    "seven": (of_kinds(*[Block] * 7), ("7 of Block: 3 traced",)),
    "three": (of_kinds(*[Block] * 3), ()),
    "sequence": (of_kinds(*[Block] * 5, model=nn.Sequential), ("5 of Block: 3 traced",)),
    "two kinds": (of_kinds(*[Block, Tanh] * 4), ("8 of Block, Tanh: 6 traced",)),
    "six in turn": (
        of_kinds(*[*[Block] * 5, Tanh] * 4),
        ("24 of Block, Tanh: 18 traced",),
    ),
    "other first": (of_kinds(Tanh, *[Block] * 5), ("5 of Block: 3 traced",)),
    "two runs": (
        of_kinds(*[Block] * 5, *[Tanh] * 4),
        ("5 of Block: 3 traced", "4 of Tanh: 3 traced"),
    ),
    "numbers, names, a logger": (of_kinds(*[Named] * 5), ("5 of Named: 3 traced",)),
    "mask": (of_kinds(*[UsesMask] * 5, model=Masks), ("5 of UsesMask: 3 traced",)),
    "a result is used": (of_kinds(*[Block] * 6, model=SecondAsWell), ("6 of Block: 3 traced",)),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(compared: Compared, name: str) -> None:
    make, blocks = STACKS[name]
    assert compared(make) == blocks


@pytest.mark.parametrize(
    "options", [{"dynamic_shapes": None}, {"opset": 18}, {"opset": 20, "external_data": True}]
)
def test_options(compared: Compared, options: dict[str, Any]) -> None:
    assert compared(of_kinds(*[Block] * 5), **options) == ("5 of Block: 3 traced",)


def test_half_precision(compared: Compared) -> None:
    make = of_kinds(*[Block] * 5)
    x = torch.zeros(2, WIDTH, dtype=torch.float16)
    assert compared(lambda: make().half(), x) == ("5 of Block: 3 traced",)


def test_sequences_in_sequences(compared: Compared) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(*(Block() for _ in range(5))),
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(*(Sequence(*(Block() for _ in range(2))) for _ in range(5))),
        ).eval()

    assert compared(make) == ("5 of Block: 3 traced", "5 of Sequence: 3 traced")


@pytest.mark.parametrize(
    "options",
    [
        {"target": "plugin"}, {"target": "plugin", "body": "unrolled"}, {"target": "dense"},
        {"target": "onnxruntime"},
    ],
)  # fmt: skip
def test_moe_layers(compared: Compared, options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        model = of_kinds(*[Residual] * 5, model=nn.Sequential)()
        dynamo_moe.convert(model)
        return model

    assert compared(make, **options) == ("5 of Residual: 3 traced",)


def test_caches(compared: Compared) -> None:
    assert compared(made, example(), dynamic_shapes=None) == ("5 of Block: 3 traced",)


def test_file_computes_what_the_model_does(tmp_path: Path) -> None:
    model = stack(blocks=7)
    dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    dynamo_moe.verify(tmp_path / "model.onnx", model)


class Scaled(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def compute(self, y: Tensor) -> Tensor:
        return y * (1.0 + self.weight.float()) * self.scale


@pytest.mark.parametrize("name", ["weight", "scale", "linear.bias", "norm.weight", "norm.bias"])
def test_values_of_weights_do_not_decide(tmp_path: Path, name: str) -> None:
    """Of zeros or ones in the blocks that are traced, an optimiser would make less."""
    model: Any = stack(Scaled)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            for tensor in block.parameters():
                tensor.add_(torch.randn_like(tensor))
            if number < 3:
                block.get_parameter(name).fill_(float(name == "scale"))
    report = dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    assert report.blocks == ("6 of Scaled: 3 traced",)
    dynamo_moe.verify(tmp_path / "model.onnx", model)


def test_blocks_with_a_loop(tmp_path: Path) -> None:
    model = of_kinds(*[Normalises] * 5)()
    report = dynamo_moe.export(model, torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    assert report.blocks == ("5 of Normalises: 3 traced",)
    assert report.nodes["Loop"] == 5
    dynamo_moe.verify(tmp_path / "model.onnx", model)
    example = torch.zeros(2, WIDTH)
    functions = dynamo_moe.export(model, example, report.path, layers_as_functions=True)
    assert functions.nodes == report.nodes  # A function would not have the loops' constants.
    dynamo_moe.verify(report.path, model)


# --- Why blocks are not shared ---


class Twice(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class ReadsNumber(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y * self.number


class Changes(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class ReadsSize(Block):
    def compute(self, y: Tensor) -> Tensor:
        return y + (y > 0).nonzero().shape[0]


class ByTable(Block):
    """Its table has no more rows than the example."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.table = nn.Parameter(torch.randn(2, WIDTH))

    def compute(self, y: Tensor) -> Tensor:
        return y + self.table[: y.shape[0]]


class Windows(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.window = number**2


class Normalises(Block):
    """Its repeated divisions become a loop, whose graph has what they add."""

    def compute(self, y: Tensor) -> Tensor:
        for _ in range(6):
            y = y / (y.sum(-1, keepdim=True) + self.least())
        return y

    def least(self) -> Tensor | float:
        return 1e-6


class NormalisesByWeight(Normalises):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.weight = nn.Parameter(torch.rand(1) + WIDTH)

    def least(self) -> Tensor:
        return self.weight


ALONE = "5 of {}: traced one by one: {}"
REASONS: list[tuple[Make, str]] = [
    (of_kinds(*[ReadsNumber] * 5), ALONE.format("ReadsNumber", "they run different operators")),
    (of_kinds(*[Block] * 5, model=Twice), ALONE.format("Block", "they are not called once each")),
    (of_kinds(*[Changes] * 5), ALONE.format("Changes", "they change what they are given")),
    (
        of_kinds(*[Block] * 5, model=WithInput),
        ALONE.format("Block", "they run different operators"),
    ),
    (
        of_kinds(*[Block] * 5, model=AllStates),
        "traced one by one: the trace has other results than the model",
    ),
    (of_kinds(*[Windows] * 5), ALONE.format("Windows", "they differ in window")),
    (of_kinds(*[ReadsSize] * 5), "traced one by one: the model cannot run without values: "),
    (
        of_kinds(*[NormalisesByWeight] * 5),
        "traced one by one: blocks.2/Div/Loop has a graph that uses its block's own values",
    ),
    (of_kinds(*[ByTable] * 5), "traced one by one: the model runs at no larger sizes: "),
]


@pytest.mark.parametrize(("make", "reason"), REASONS)
def test_reasons(tmp_path: Path, make: Make, reason: str) -> None:
    report = dynamo_moe.export(make(), torch.zeros(2, WIDTH), tmp_path / "model.onnx")
    assert len(report.blocks) == 1
    assert report.blocks[0].startswith(reason)


def test_off(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    report = dynamo_moe.export(stack(), torch.zeros(2, WIDTH), path, repeated_blocks="off")
    assert report.blocks == ()
    with pytest.raises(ValueError, match="repeated_blocks must be 'auto' or 'off', got 'on'"):
        dynamo_moe.export(stack(), torch.zeros(2, WIDTH), path, repeated_blocks="on")  # type: ignore[arg-type]


# --- Architectures ---


def one_of_many(*values: object) -> Any:
    """Returns a case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.every)


def converted(make: Callable[[], models.Made]) -> nn.Module:
    torch.manual_seed(0)
    model = make()[0].eval()
    dynamo_moe.convert(model)
    return model


def _exports(make: Callable[[], models.Made]) -> dict[str, Any]:
    inputs = make()[1]
    shapes = dict.fromkeys((name for name in inputs if name != "pixel_values"), LENGTH)
    return {"kwargs": inputs, "dynamic_shapes": shapes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (models.t5, ["4 of T5Block: 3 traced"] * 2),
        (models.vit, ["5 of ViTLayer: 3 traced"]),
        one_of_many(models.deepseek_v3, ["5 of DeepseekV3DecoderLayer: 3 traced"]),
        one_of_many(models.llama, ["5 of LlamaDecoderLayer: 3 traced"]),
        one_of_many(models.mixtral, ["5 of MixtralDecoderLayer: 3 traced"]),
        one_of_many(models.qwen3_moe, ["5 of Qwen3MoeDecoderLayer: 3 traced"]),
        one_of_many(models.bert, ["5 of BertLayer: 3 traced"]),
    ],
)
def test_architectures(
    compared: Compared, make: Callable[[], models.Made], blocks: list[str]
) -> None:
    found = compared(functools.partial(converted, make), (), **_exports(make))
    assert [*found] == blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        one_of_many(models.gemma2, "8 of Gemma2DecoderLayer: 6 traced"),
        (models.swin, "8 of SwinLayer: 6 traced"),
    ],
)
def test_architectures_that_compute_with_weights_alone(
    tmp_path: Path, make: Callable[[], models.Made], blocks: str
) -> None:
    """Traced whole, such nodes are folded; shared they stay, since values of weights are hidden."""
    model = converted(make)
    report = dynamo_moe.export(model, (), tmp_path / "model.onnx", **_exports(make))
    assert report.blocks == (blocks,)
    dynamo_moe.verify(tmp_path / "model.onnx", model)


@pytest.mark.slow
@pytest.mark.parametrize("link", [one_of_many(False), True])
def test_checkpoints(tmp_path: Path, compared: Compared, link: bool) -> None:
    torch.manual_seed(0)
    model, inputs = models.mixtral()
    found = compared(opened_twice(model, tmp_path), (), kwargs=inputs, link_weights=link)
    assert found == ("5 of MixtralDecoderLayer: 3 traced",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        models.mixtral,
        *map(one_of_many, (models.llama, models.qwen2, models.stablelm, models.qwen3_moe)),
    ],
)
def test_language_models_with_a_cache(
    compared: Compared, tmp_path: Path, make: Callable[[], models.Made]
) -> None:
    [blocks] = compared(functools.partial(converted, make), task=WITH_PAST)
    assert blocks.endswith("Layer: 3 traced")
    dynamo_moe.verify(tmp_path / "auto" / "model.onnx", converted(make))


class NormedBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class ResultsOfAll(Stack):
    """Returns what each block returns."""

    def forward(self, x: Tensor) -> Any:
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(x)
        return x, *results


def test_a_sum_that_the_next_block_norms(compared: Compared, tmp_path: Path) -> None:
    """The head uses the last block's sum, which no norm follows."""
    make = of_kinds(*[NormedBlock] * 6)
    found = compared(make, torch.randn(2, 3, WIDTH), target="onnxruntime")
    assert found == ("6 of NormedBlock: 3 traced",)
    path = tmp_path / "auto" / "model.onnx"
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("SkipSimplifiedLayerNormalization") == 5
    assert dynamo_moe.verify(path, make()).passed


@pytest.mark.parametrize("model", [SecondAsWell, ResultsOfAll])
def test_a_sum_that_is_used_twice_after_its_block(
    compared: Compared, tmp_path: Path, model: type[nn.Module]
) -> None:
    """What the next block sums and norms is a part of that block then."""
    make = of_kinds(*[NormedBlock] * 6, model=model)
    [blocks] = compared(make, torch.randn(2, 3, WIDTH), target="onnxruntime")
    assert blocks.startswith("traced one by one")
    assert dynamo_moe.verify(tmp_path / "auto" / "model.onnx", make()).passed


def olmo2() -> models.Made:
    """Its blocks end with a norm and a sum; one norm follows the last."""
    return models.language_model("Olmo2", num_hidden_layers=6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [olmo2, *map(one_of_many, (models.llama, models.mixtral))])
@pytest.mark.every
def test_sums_and_norms_of_language_models(
    compared: Compared, tmp_path: Path, make: Callable[[], models.Made]
) -> None:
    options = {"task": WITH_PAST, "target": "onnxruntime"}
    [blocks] = compared(functools.partial(converted, make), **options)
    assert blocks.endswith("Layer: 3 traced")
    assert dynamo_moe.verify(tmp_path / "auto" / "model.onnx", converted(make)).passed


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.gemma2, one_of_many(models.gpt_oss)])
@pytest.mark.every
def test_language_models_that_compute_with_weights_alone(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    model: Any = converted(make)
    report = dynamo_moe.export_language_model(model, tmp_path / "model.onnx", task=WITH_PAST)
    [blocks] = report.blocks
    assert blocks.endswith("Layer: 6 traced")
    dynamo_moe.verify(tmp_path / "model.onnx", model)


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    folder, path = tmp_path / "checkpoint", tmp_path / "model.onnx"
    models.llama()[0].save_pretrained(folder)  # type: ignore[operator]
    result = CliRunner().invoke(app, ["export", "--hf", str(folder), str(path)])
    assert result.exit_code == 0, result.output
    assert "5 of LlamaDecoderLayer: 3 traced" in result.output
    outputs = onnx.load(path, load_external_data=False).graph.output
    assert outputs[-1].name == "present.4.value"


@pytest.mark.slow
@pytest.mark.every
def test_functions_of_language_models(tmp_path: Path) -> None:
    model: Any = converted(models.gemma2)
    path = tmp_path / "model.onnx"
    dynamo_moe.export_language_model(model, path, layers_as_functions=True)
    graph = onnx.load(path)
    [function] = (one for one in graph.functions if one.domain == "dynamo_moe.blocks")
    given = [name for name in function.input if name.startswith("past")]
    assert given == [f"past_key_values.{name}" for name in ("key", "value", "key_2", "value_2")]
    assert [*function.output] == ["output", *(f"output_{number}" for number in range(2, 6))]
    calls = [node for node in graph.graph.node if node.domain == "dynamo_moe.blocks"]
    assert [node.output[1] for node in calls] == [f"present.{n}.key" for n in range(0, 8, 2)]
    dynamo_moe.verify(path, model)
