"""``convert`` on the structures of public repositories: which it converts; all stay correct."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dynamo_moe
from dynamo_moe.conversion.observation import FullPrecision
from dynamo_moe.modules import ConvertedModule
from public_moe import CASES, dbrx
from public_moe.surroundings import Case, ClaimsCuda

_LORAS = "a mixture of LoRAs"
# Why convert leaves a structure; it converts all others.
LEFT = {
    "openmoe": "an expert computes nothing that torch.ops.moe computes",
    "davidmrau-softmax-experts": "an expert computes nothing that torch.ops.moe computes",
    "st-moe": "an expert computes nothing that torch.ops.moe computes",
    "soft-moe": "calls no gate with 6 scores",
    "mmoe": "not a weighted sum",
    "vision-convolutions": "not two or three matrices",
    "torchscale-subln": "an expert computes nothing",
    "peer": "neither modules in a list nor two or three stacks of as many matrices",
    "longcat-flash-stacked": "neither modules in a list nor two or three stacks of as many",
    "mixlora": _LORAS,
    "mergoo-linear": "not two or three matrices",
    "mergoo-lora": _LORAS,
    "loramoe": _LORAS,
    "one-gate-mixture": "an expert computes nothing",
    "progressive-layers": "one of several sets of experts",
    "moe-adapters": "an expert computes nothing",
    "base-layer": "an expert computes nothing",
    "left-activations": "expert 1 computes something else than the first",
    "left-last-differs": "expert 5 computes something else than the first",
    "left-widths": "expert 1 has other parameters than the first",
    "left-scales": "expert 1 computes something else than the first",
    "left-deep": "an expert computes nothing",
    "left-normed": "an expert computes nothing",
}
# The MoE module itself returns a custom object; the module around it returns a tensor. One routes
# what its router, beside it, gives it, and is the layer by itself. Where only
# the experts and the router have numbers of experts, these are named.
PATHS = {
    "llama-moe": ("layers.0.mlp", "layers.1.mlp"),
    "megablocks-moe-capacity": ("layers.0.ffn.experts", "layers.1.ffn.experts"),
    "longcat-flash-stacked": tuple(
        f"layers.{layer}.mlp.{part}" for layer in range(2) for part in ("experts", "router")
    ),
}
# Further forms of a structure whose first one is always tried; each takes seconds to recognise.
FURTHER = {
    "dbrx-norm-2",
    "deepspeed-top1-residual",
    "deepspeed-top2-keep-all",
    "hunyuan-large",
    "lucidrains-hierarchical",
    "lucidrains-top2-random",
    "lucidrains-top2-threshold",
    "megablocks-dmoe-glu",
    "torchscale-top1",
    "torchscale-top2-keeps-all",
    "transformers4-gpt-oss",
}
# What no other one shows: experts of which one is unlike the first.
ALONE = {"left-last-differs"}
# Batch, length and seed.
SIZES = ((2, 5, 0), (3, 7, 1), (1, 1, 2), (4, 16, 3))


def results(case: Case, model: nn.Module, *, original: bool) -> list[list[Tensor]]:
    found = []
    for sizes in SIZES:
        torch.manual_seed(0)
        # One computes its experts in bfloat16; once converted, it does not.
        with (
            torch.no_grad(),
            FullPrecision(),
            ClaimsCuda() if case.cuda_only and original else nullcontext(),
        ):
            try:
                leaves = pytree.tree_leaves(model(*case.args(*sizes)))
            except RuntimeError:
                assert case.name == "left-switch-3d", "a length below the number of experts"
                leaves = []
        found.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return found


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.filterwarnings("ignore:.*its own forward computes")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.every] * (case.name in FURTHER))
        for case in sorted(CASES, key=lambda case: case.name not in ALONE)
    ],
)
@pytest.mark.first(90)
def test_public_structure(case: Case) -> None:
    assert case.convertible == (case.name not in LEFT)
    model = case.build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = results(case, model, original=True)
    report = dynamo_moe.convert(model, case.args(*SIZES[0]))
    if case.name in LEFT:
        assert report.replaced == ()
        reasons = " ".join(left.reason for left in report.unrecognised)
        assert re.search(LEFT[case.name], reasons)
        paths = PATHS.get(case.name, case.moe_paths)
        assert {left.module for left in report.unrecognised} == {*paths}
    else:
        paths = PATHS.get(case.name, case.moe_paths)
        assert [each.module for each in report.replaced] == sorted(paths)
        assert all(each.compared for each in report.replaced)
        assert report.unrecognised == ()
        modules = [model.get_submodule(path) for path in paths]
        assert all(isinstance(module, ConvertedModule) for module in modules)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())
    losses = any("loss" in note for each in report.replaced for note in each.notes)
    for theirs, ours in zip(expected, results(case, model, original=False), strict=True):
        for reference, result in zip(theirs, ours, strict=True):
            if losses and not reference.ndim:
                continue  # Zero after the conversion, as the report says.
            scale = reference.double().square().mean().sqrt().clamp_min(1e-30)
            error = (result.double() - reference.double()).abs().max() / scale
            assert error <= 1e-4


def test_the_width_is_not_taken_for_the_number_of_experts() -> None:
    """As in DBRX's own sizes, the width also divides the rows of all experts' matrices."""
    torch.manual_seed(0)
    layer = dbrx.DbrxFFN(hidden_size=32, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert not dynamo_moe.convert(layer).unrecognised
    assert isinstance(layer, ConvertedModule)
