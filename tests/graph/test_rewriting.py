"""Rules that are tried on few nodes rewrite what they would rewrite if each were tried on all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnxscript import rewriter
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5EncoderModel

import dynamo_moe
from block_stacks import stack
from dynamo_moe.graph import passes


class Shapes(nn.Module):
    """Reshapes, slices, transposes and casts that cancel each other, or do not."""

    def forward(self, x: Tensor) -> Any:
        y = x.transpose(0, 1).transpose(0, 1).reshape(x.shape[0], -1).reshape(x.shape)
        z = x.to(torch.float64).to(torch.float32)[:, 1:][:, 1:].unsqueeze(0).squeeze(0)
        return y * 1 + 0, z.clamp(min=0).clamp(max=6), x.flatten(1).unsqueeze(1).expand(-1, 3, -1)


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model: nn.Module = MixtralForCausalLM(config)
    dynamo_moe.convert(model)
    return model


def t5() -> nn.Module:
    return T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=4, num_layers=2))


IDS = torch.arange(8).view(2, 4)
MODELS: dict[str, Any] = {
    "blocks": (stack, torch.zeros(2, 8)),
    "shapes": (Shapes, torch.zeros(2, 4, 4)),
    "Mixtral": (mixtral, IDS),
    "T5": (t5, IDS),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), torch.zeros(2, 4, 8)),
    "RNN": (lambda: nn.GRU(4, 4), torch.zeros(2, 3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.first(3)
def test_same_file_as_with_each_rule_on_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, example = MODELS[name]
    files: list[bytes] = []
    for rules in (passes._RULES, rewriter.RewriteRuleSet(passes._WANTED)):
        rules.remove_unused_nodes = False
        monkeypatch.setattr(passes, "_RULES", rules)
        torch.manual_seed(0)
        path = tmp_path / f"{len(files)}.onnx"
        dynamo_moe.export(make().eval(), example, path)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_rules_can_be_copied() -> None:
    assert copy.copy(passes._BY_ROOT).name == passes._BY_ROOT.name


def test_one_graph_at_a_time_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = []

    class Pass(rewriter.RewritePass):
        def call(self, model: ir.Model) -> Any:
            locked.append(passes._RULES_LOCK.locked())
            return super().call(model)

    monkeypatch.setattr(rewriter, "RewritePass", Pass)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.node("Relu", [x])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20}, name="graph")
    node.outputs[0].name = "y"
    passes.optimize(ir.Model(graph, ir_version=10))
    assert locked == [True]
    assert not passes._RULES_LOCK.locked()
