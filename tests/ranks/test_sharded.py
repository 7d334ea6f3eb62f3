"""``sharded``: the parts of all ranks sum to the whole layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe import sharding
from dynamo_moe.conversion.infmoe import InfMoELayer
from dynamo_moe.conversion.packing import converted_layers
from dynamo_moe.local_experts import LocalExperts
from dynamo_moe.modules import DroplessMoE, TopOneMoE
from dynamo_moe.sharding import share_of
from listed_experts import Listed
from moe_architectures import ARCHITECTURES, example_inputs
from small_models import OwnRouter, mlp_model, op_model

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "llama4", "deepseek_v3")


def converted(model: Any) -> Any:
    report = dynamo_moe.convert(model)
    assert report.replaced
    return model.eval()


def check_parts(model: nn.Module, run: Any, ranks: int) -> None:
    """Compare each layer's result with the sum of its parts, the layer's inputs being the same."""
    seen: dict[str, tuple[Any, Any]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            seen.setdefault(path, (args, result))

        return hook

    handles = [
        layer.register_forward_hook(keep(path)) for path, layer in converted_layers(model).items()
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    assert seen
    for path, (args, whole) in seen.items():
        layer = model.get_submodule(path)
        parts = []
        for rank in range(ranks):
            with torch.no_grad(), dynamo_moe.sharded(layer, rank, ranks):
                parts.append(layer(*args))
        total = sum(part[0] if isinstance(part, tuple) else part for part in parts)
        expected = whole[0] if isinstance(whole, tuple) else whole
        repeated = 0
        if ranks > 1:
            # Shared experts, residuals and the like are in each part.
            repeated = (ranks - 1) * beside_experts(layer, args)
        torch.testing.assert_close(total - repeated, expected, rtol=1e-4, atol=1e-5)


def beside_experts(layer: nn.Module, args: Any) -> Tensor | int:
    """Return what a layer adds to its experts' sum: its result where these give zeros."""
    with torch.no_grad(), dynamo_moe.sharded(layer, 0, 1):
        [local] = [module for module in layer.modules() if isinstance(module, LocalExperts)]
        local.local_ids.fill_(-1)
        result = layer(*args)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.every) for n in (2, 4))])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, ranks: int) -> None:
    model = converted(ARCHITECTURES[family].build())
    inputs = example_inputs(ARCHITECTURES[family], 2, 5)
    check_parts(model, lambda: model(**inputs), ranks)


@pytest.mark.parametrize("ranks", [1, 4, 7])  # More than there are experts.
def test_uneven_shares(ranks: int) -> None:
    model = converted(mlp_model())
    check_parts(model, lambda: model(torch.randn(9, 16)), ranks)


@pytest.mark.parametrize("weight_format", ["int4", "fp8", "mxfp4", "nvfp4", "int8"])
def test_packed_experts(weight_format: str) -> None:
    model = converted(mlp_model(width=32, hidden=32))
    dynamo_moe.quantize(model, weight_format)
    check_parts(model, lambda: model(torch.randn(9, 32)), 4)


def test_a_rank_packs_its_own_experts_as_those_of_the_whole_model() -> None:
    """Scales from elsewhere are asked for by the experts' numbers in the whole layer."""
    model = converted(mlp_model(width=32, hidden=32))
    whole = copy.deepcopy(model)
    asked: list[set[int]] = []

    def scales(path: str, expert: int, matrix: Tensor) -> Tensor:
        asked[-1].add(expert)
        return (1 + expert) * matrix.abs().unflatten(-1, (-1, 32)).amax(-1) / 7.5

    asked.append(set())
    dynamo_moe.quantize(whole, "int4", scales=scales)
    x = torch.randn(9, 32)
    for rank in range(4):
        with dynamo_moe.sharded(whole, rank, 4):
            expected = whole(x)
        asked.append(set())
        with dynamo_moe.sharded(model, rank, 4):
            dynamo_moe.quantize(model, "int4", scales=scales)
            assert torch.equal(model(x), expected)
    assert asked == [{*range(6)}, {0, 1}, {2, 3}, {4}, {5}]


def test_one_expert_for_each_token() -> None:
    torch.manual_seed(0)
    w1, w2 = nn.Parameter(torch.randn(5, 6, 8)), nn.Parameter(torch.randn(5, 8, 6))
    model = nn.Sequential(TopOneMoE(nn.Linear(8, 5), w1, w2, 2, "relu")).eval()
    check_parts(model, lambda: model(torch.randn(2, 7, 8)), 3)


def test_a_residual_is_added_once() -> None:
    torch.manual_seed(0)
    router, w1, w2 = (nn.Parameter(torch.randn(*s)) for s in ((5, 8), (5, 12, 8), (5, 8, 6)))
    model = nn.Sequential(InfMoELayer(router, w1, w2, mixes=True)).eval()
    check_parts(model, lambda: model(torch.randn(7, 8)), 3)


def test_a_model_is_as_it_was() -> None:
    model = converted(mlp_model())
    x = torch.randn(5, 16)
    before, names = model(x), [*model.state_dict()]
    parameters = [*map(id, model.parameters())]
    with dynamo_moe.sharded(model, 1, 3) as report:
        assert [layer.count for layer in report.layers] == [2, 2]
        assert model.state_dict().keys() != {*names}
    assert [*model.state_dict()] == names
    assert [*map(id, model.parameters())] == parameters
    assert torch.equal(model(x), before)
    with pytest.raises(KeyError), dynamo_moe.sharded(model, 1, 3):
        raise KeyError
    assert torch.equal(model(x), before)


def test_shares_cover_all_experts() -> None:
    for total in range(1, 12):
        for ranks in range(1, 14):
            shares = [share_of(total, rank, ranks) for rank in range(ranks)]
            assert [expert for share in shares for expert in share] == [*range(total)]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_experts_in_other_layers_are_shared() -> None:
    model = converted(mlp_model())
    first, second = (block.mlp for block in model)
    for name, parameter in first.experts_parameters().items():
        owner, _, last = name.rpartition(".")
        second.get_submodule(owner).register_parameter(last, parameter)
    with pytest.raises(ValueError, match=r"'0\.mlp' cannot be sharded: .* is also 1\.mlp"):
        dynamo_moe.sharded(model, 0, 2).__enter__()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: dynamo_moe.sharded(model, 2, 2).__enter__(), r"rank must be in 0\.\.1"),
        (lambda model: dynamo_moe.sharded(mlp_model(), 0, 2).__enter__(), "no layers"),
        (lambda model: dynamo_moe.sharded(op_model(OwnRouter()), 0, 2).__enter__(), "OwnRouter"),
        (lambda model: dynamo_moe.shard(model, plan="heads"), "plan must be one of experts"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(converted(mlp_model()))


def test_a_model_that_cannot_be_sharded_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(mlp_model())
    weights = [*model[1].mlp.experts_parameters().values()]
    # Without a GPU there is no pinned memory.
    monkeypatch.setattr(
        sharding, "_is_offloaded", lambda weight: any(weight is each for each in weights)
    )
    before = model.state_dict()
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"'1\.mlp' are in pinned memory"):
            dynamo_moe.shard(model)
    finally:
        dist.destroy_process_group()
    assert model.state_dict().keys() == before.keys()


def test_what_needs_whole_layers() -> None:
    model = converted(mlp_model())
    with dynamo_moe.sharded(model, 0, 2):
        with pytest.raises(ValueError, match="sharded already: a model is sharded once"):
            dynamo_moe.sharded(model, 0, 2).__enter__()
        with pytest.raises(NotImplementedError, match="are sharded: it computes in evaluation"):
            model.train()(torch.randn(3, 16))
    model.eval()


def test_frozen_weights_stay_frozen() -> None:
    model = converted(mlp_model())
    for layer in converted_layers(model).values():
        layer.w1.requires_grad_(False)
    with dynamo_moe.sharded(model, 0, 2):
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not flags["0.mlp.local_experts.part.w1"]
    assert flags["0.mlp.local_experts.part.w2"]


def test_a_share_keeps_no_other_experts_in_memory() -> None:
    layer = converted(nn.Sequential(Listed()))
    with dynamo_moe.sharded(layer, 1, 3):
        [local] = [module for module in layer.modules() if isinstance(module, LocalExperts)]
        for parameter in local.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_layer_that_a_model_has_twice() -> None:
    block = mlp_model(layers=1)[0]
    model = converted(nn.Sequential(block, nn.ReLU(), block))
    x = torch.randn(5, 16)
    with dynamo_moe.sharded(model, 0, 1):
        result = model(x)
    torch.testing.assert_close(result, model(x))


def test_a_layer_without_values() -> None:
    model = converted(mlp_model())
    with dynamo_moe.sharded(model, 0, 2):
        assert model.to("meta")(torch.randn(3, 16, device="meta")).shape == (3, 16)


def test_what_a_layer_shows() -> None:
    torch.manual_seed(0)
    mlp = mlp_model(layers=1)[0].mlp
    layer = DroplessMoE(mlp.router, mlp.w1, None, mlp.w2, None, top_k=2)
    with dynamo_moe.sharded(layer, 1, 4):
        assert "experts 2 to 3 of 6, rank 1 of 4" in repr(layer)


def test_without_processes() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        dynamo_moe.shard(converted(mlp_model()))
