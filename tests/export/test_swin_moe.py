"""The Swin-MoE classifier, its MoE layer, and the demo's training."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_moe.demo.digits import Split, expert_usage, load_digits_split, train
from dynamo_moe.models import (
    DroplessMoEMlp,
    SwinMoE,
    SwinMoEConfig,
    swin_moe_cifar,
    swin_moe_digits,
    swin_moe_tiny,
)
from dynamo_moe.models.swin_moe import WindowAttention

# Swin-T's grids, windows and stages with an eighth of its channels.
NARROW_TINY = SwinMoEConfig(embed_dim=12, mlp_ratio=1, num_classes=7, num_experts=4)


def _moe_layers(model: nn.Module) -> dict[str, DroplessMoEMlp]:
    return {n: m for n, m in model.named_modules() if isinstance(m, DroplessMoEMlp)}


def _images(model: SwinMoE, batch: int) -> Tensor:
    size = model.config.image_size
    return torch.randn(batch, model.config.in_channels, size, size)


@pytest.mark.parametrize("make", [swin_moe_digits, swin_moe_cifar, lambda: SwinMoE(NARROW_TINY)])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_have_a_row_per_image(make: Callable[[], SwinMoE], batch: int) -> None:
    model = make().eval()
    images = _images(model, batch)
    logits = model(images)
    assert logits.shape == (batch, model.config.num_classes)
    torch.testing.assert_close(logits[-1:], model(images[-1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (swin_moe_digits, ["stages.0.block1.mlp", "stages.1.block1.mlp"]),
        (swin_moe_cifar, [f"stages.{name}.mlp" for name in ("1.block1", "2.block1", "2.block3")]),
        (
            swin_moe_tiny,
            [f"stages.{n}.mlp" for n in ("2.block1", "2.block3", "2.block5", "3.block1")],
        ),
    ],
)
def test_moe_layers_of_the_named_models(make: Callable[[], SwinMoE], names: list[str]) -> None:
    with torch.device("meta"):
        model = make()
    layers = _moe_layers(model)
    assert list(layers) == names
    for layer in layers.values():
        experts, dim, hidden = layer.w1.shape
        assert (experts, layer.top_k, hidden) == (8, 2, model.config.mlp_ratio * dim)
        assert layer.router.weight.shape == (experts, dim)
        assert layer.w2.shape == (experts, hidden, dim)
        assert (layer.b1.shape, layer.b2.shape) == ((experts, hidden), (experts, dim))


def test_weights_are_all_that_is_saved() -> None:
    model = swin_moe_digits()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = swin_moe_digits()
    loss = F.cross_entropy(model(_images(model, 16)), torch.arange(16) % 10)
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"num_experts": -1}, "num_experts must be at least 1, got -1"),
        ({"depths": ()}, r"depths must hold .* got \(\)"),
        ({"depths": (2, 0, 2, 2)}, r"depths must hold .* got \(2, 0, 2, 2\)"),
        ({"num_heads": (3, 6)}, r"num_heads must hold .* each of the 4 stages, got \(3, 6\)"),
        ({"num_heads": (3, 6, 12, 7)}, "divide the 768 channels of stage 3, got 7"),
        ({"patch_size": 3}, "patch_size must divide image_size 224, got 3"),
        ({"top_k": 9}, "top_k must be at most num_experts 8, got 9"),
        ({"moe_stages": (4,)}, "moe_stages must name stages of at least 2 blocks, got 4"),
        ({"depths": (2, 2, 6, 1)}, "moe_stages must name stages of at least 2 blocks, got 3"),
        ({"window_size": 8}, "window_size must divide the 28x28 grid of stage 1, got 8"),
        ({"image_size": 56, "window_size": 1}, "grid of stage 1 must be even .* got 7x7"),
    ],
)
def test_config_rejects(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwinMoEConfig(**change)  # type: ignore[arg-type]


def test_images_of_another_size_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"must be \[B, 1, 8, 8\], got \[2, 1, 16, 16\]"):
        swin_moe_digits()(torch.zeros(2, 1, 16, 16))


def _attention_by_pairs(layer: WindowAttention, x_BLC: Tensor, grid: int, window: int) -> Tensor:
    """Attention over all pairs of tokens of the same window, without roll or mask.

    The windows' edges are at `shift + k * window`, and at the grid's end.
    """
    shift = window // 2 if layer.mask_G1NN is not None else 0
    row, column = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    row, column = row.flatten(), column.flatten()
    row_window = (row - shift).div(window, rounding_mode="floor")
    column_window = (column - shift).div(window, rounding_mode="floor")
    together_LL = (row_window[:, None] == row_window) & (column_window[:, None] == column_window)

    span = 2 * window - 1
    table = layer.position_bias.reshape(-1, span, span)
    row_offset = (row[:, None] - row).clamp(1 - window, window - 1) + window - 1
    column_offset = (column[:, None] - column).clamp(1 - window, window - 1) + window - 1
    bias_ALL = table[:, row_offset, column_offset]

    q, k, v = (
        t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for t in layer.qkv(x_BLC).chunk(3, dim=-1)
    )
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias_ALL
    weights = scores.masked_fill(~together_LL, -torch.inf).softmax(dim=-1)
    return layer.proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("grid", "window", "shift"),
    [(4, 4, 0), (8, 4, 0), (8, 4, 2), (14, 7, 3), (6, 2, 1), (9, 3, 1)],
)
def test_window_attention_equals_attention_by_pairs(grid: int, window: int, shift: int) -> None:
    torch.manual_seed(0)
    layer = WindowAttention(12, grid, window, shift, num_heads=3).double()
    nn.init.normal_(layer.position_bias)
    x_BLC = torch.randn(2, grid * grid, 12, dtype=torch.float64)
    expected = _attention_by_pairs(layer, x_BLC, grid, window)
    torch.testing.assert_close(layer(x_BLC), expected, rtol=1e-12, atol=1e-12)


def _moe_dense(layer: DroplessMoEMlp, x_TD: Tensor) -> Tensor:
    """Every expert on every token in float64; experts that were not chosen have weight 0."""
    x_TD = x_TD.double()
    p_TE = (x_TD @ layer.router.weight.double().T).softmax(dim=-1)
    kept_TE = torch.zeros_like(p_TE).scatter(1, p_TE.topk(layer.top_k).indices, 1.0) * p_TE
    weights_TE = kept_TE / kept_TE.sum(dim=-1, keepdim=True)
    h_ETH = F.gelu(x_TD @ layer.w1.double() + layer.b1.double().unsqueeze(1))
    y_ETD = h_ETH @ layer.w2.double() + layer.b2.double().unsqueeze(1)
    return torch.einsum("te,etd->td", weights_TE, y_ETD)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (4, 2), (6, 6)])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_moe_equals_dense_float64(experts: int, top_k: int, tokens: int) -> None:
    torch.manual_seed(0)
    layer = DroplessMoEMlp(16, 24, experts, top_k)
    x_TD = torch.randn(tokens, 16)
    expected = _moe_dense(layer, x_TD)
    torch.testing.assert_close(layer(x_TD).double(), expected, rtol=1e-5, atol=1e-6)


def test_moe_with_every_token_on_one_expert() -> None:
    torch.manual_seed(0)
    layer = DroplessMoEMlp(16, 24, num_experts=4, top_k=1)
    x_TD = torch.rand(10, 16)
    nn.init.zeros_(layer.router.weight)
    with torch.no_grad():
        layer.router.weight[2] = 5.0
    assert layer.expert_usage(x_TD).tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(layer(x_TD).double(), _moe_dense(layer, x_TD), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.load_balancing_loss(x_TD), torch.tensor(4.0))


def test_load_balancing_loss_spreads_the_tokens() -> None:
    torch.manual_seed(0)
    layer = DroplessMoEMlp(16, 24, num_experts=4, top_k=2)
    nn.init.normal_(layer.router.weight)
    x_TD = torch.randn(512, 16) + 1
    before = layer.load_balancing_loss(x_TD)
    optimizer = torch.optim.SGD([layer.router.weight], lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        torch.autograd.backward(layer.load_balancing_loss(x_TD))
        optimizer.step()
    after = layer.load_balancing_loss(x_TD)
    assert before > 1.1
    assert after < 1.01
    assert layer.expert_usage(x_TD).sum().item() == pytest.approx(1)
    assert layer.expert_usage(x_TD).min() > 0.2


@pytest.fixture(scope="module")
def dense_model() -> SwinMoE:
    """The kinds of blocks in the CIFAR model, with an MLP instead of each MoE layer."""
    torch.manual_seed(0)
    model = SwinMoE(
        SwinMoEConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            window_size=4,
            moe_stages=(0, 1),
        )
    )
    for name, layer in _moe_layers(model).items():
        dim, hidden = layer.w1.shape[1:]
        mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        model.set_submodule(name, mlp)
    return model.eval()


@pytest.mark.each_value
@pytest.mark.parametrize("example_batch", [1, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_batch(dense_model: SwinMoE, example_batch: int, strict: bool) -> None:
    # torch.export treats a size of 1 as constant, unless it is oblivious of example sizes.
    config: Any = torch.fx.experimental._config
    oblivious = config.patch(backed_size_oblivious=True) if example_batch == 1 else nullcontext()
    with oblivious:
        program = torch.export.export(
            dense_model,
            (_images(dense_model, example_batch),),
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            strict=strict,
        )
    (value,) = (node.meta["val"] for node in program.graph.nodes if node.name == "images")
    assert isinstance(value.shape[0], torch.SymInt)
    assert value.shape[1:] == (3, 32, 32)
    for batch in (1, 2, 5):
        images = _images(dense_model, batch)
        torch.testing.assert_close(program.module()(images), dense_model(images))


@pytest.fixture(scope="module")
def split() -> Split:
    return load_digits_split(0)


def test_split_is_stratified_and_seeded(split: Split) -> None:
    assert split.train_images.shape == (1437, 1, 8, 8)
    assert split.test_images.shape == (360, 1, 8, 8)
    assert split.train_images.dtype == torch.float32
    assert [split.train_images.min().item(), split.train_images.max().item()] == [-1, 1]
    assert set(split.test_labels.bincount().tolist()) <= {35, 36, 37}
    assert load_digits_split(0).test_images.equal(split.test_images)
    assert not load_digits_split(1).test_images.equal(split.test_images)


@pytest.mark.slow
@pytest.mark.every
def test_short_training_learns_and_uses_every_expert(split: Split) -> None:
    torch.manual_seed(0)
    model = swin_moe_digits()
    result = train(model, split, epochs=5, seed=0, quiet=True)
    assert result.test_accuracy > 0.6
    assert len(result.losses) == 5
    assert result.seconds > 0
    assert list(result.expert_usage) == list(_moe_layers(model))
    for usage in result.expert_usage.values():
        assert len(usage) == 8
        assert sum(usage) == pytest.approx(1)
        assert min(usage) > 0
    assert not model.training
    # No tensor from the training is left in the model, so a converter can copy it.
    copied = copy.deepcopy(model)
    assert expert_usage(copied, split.test_images) == result.expert_usage


def test_training_is_a_function_of_the_seed(split: Split) -> None:
    few = Split(
        split.train_images[:200], split.train_labels[:200], split.test_images, split.test_labels
    )

    def weights(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = swin_moe_digits()
        threads = torch.get_num_threads()
        train(model, few, epochs=1, seed=seed, quiet=True)
        assert torch.get_num_threads() == threads
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert weights(0).equal(weights(0))
    assert not weights(0).equal(weights(1))


def test_training_rejects_no_epochs(split: Split) -> None:
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        train(swin_moe_digits(), split, epochs=0, quiet=True)
