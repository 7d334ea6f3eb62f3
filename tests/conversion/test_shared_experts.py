"""Layers that have a list of experts in common, each with a gate of its own."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from listed_experts import COUNT, WIDTH, Listed, tokens


class Blocks(nn.Module):
    """As WideNet (https://arxiv.org/abs/2107.11817): experts are shared across layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Listed() for _ in range(3))
        for block in self.blocks:
            block.experts = self.blocks[0].experts

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_every_layer_is_a_node_and_their_weights_are_in_the_file_once(tmp_path: Path) -> None:
    model = Blocks().eval()
    original, x = copy.deepcopy(model), tokens(7)
    report = dynamo_moe.convert(model)
    assert [replaced.module for replaced in report.replaced] == [f"blocks.{n}" for n in range(3)]
    assert not report.unrecognised
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), original(x))
            for changed in (model, original):
                changed.blocks[1].experts[0][0].weight.mul_(1.5)
    path = tmp_path / "model.onnx"
    assert dynamo_moe.export(model, x, path).operators == {"DroplessMoE": 3}
    assert dynamo_moe.verify(path, original).passed
    stacks = [len(tensor.dims) for tensor in onnx.load(path).graph.initializer]
    assert stacks.count(3) == 2


def test_what_layers_keep_of_their_experts_they_keep_together() -> None:
    model = Blocks().eval().requires_grad_(False)
    dynamo_moe.convert(model)
    for kept in (model, copy.deepcopy(model)):
        assert len({id(block._dynamo_moe_weights) for block in kept.blocks}) == 1


def test_another_dtype() -> None:
    model = Blocks().eval()
    expected, x = model(tokens(3)), tokens(3)
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)


def test_a_layer_in_two_places_is_one() -> None:
    model = nn.Sequential(Listed(), nn.ReLU())
    model.append(model[0])
    report = dynamo_moe.convert(model.eval())
    assert [replaced.module for replaced in report.replaced] == ["0"]
    assert not report.unrecognised


def test_experts_by_two_names_are_one_layer() -> None:
    layer = Listed()
    layer.alias = layer.experts
    report = dynamo_moe.convert(nn.Sequential(layer).eval())
    assert [replaced.module for replaced in report.replaced] == ["0"]
    assert not report.unrecognised


class Around(nn.Module):
    """Has the experts before the layer that computes by them."""

    def __init__(self) -> None:
        super().__init__()
        layer = Listed()
        self.experts, self.layer = layer.experts, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_layer_in_a_converted_module_is_left() -> None:
    model = Around().eval()
    expected = model(tokens(3))
    assert [replaced.module for replaced in dynamo_moe.convert(model).replaced] == [""]
    torch.testing.assert_close(model(tokens(3)), expected)


def test_experts_that_a_model_lists_too_are_one_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Listed()
            self.experts = self.layer.experts
            self.gate = nn.Linear(WIDTH, COUNT, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.gate(x).sum()

    report = dynamo_moe.convert(Model().eval())
    assert [replaced.module for replaced in report.replaced] == ["layer"]


def test_shared_weights_are_not_packed() -> None:
    model = Blocks().eval()
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match=r"blocks\.0.* is also blocks\.1.*cannot be packed"):
        dynamo_moe.quantize(model)
