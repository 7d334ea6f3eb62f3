"""``verify``: wrong files that few inputs show, and right ones that look wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import custom_ops
import dynamo_moe
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification import rounding
from dynamo_moe.verification.errors import worst_errors
from dynamo_moe.verification.routing import ChoicesOfFile
from small_models import OpLayer

LENGTH = {1: "length"}


class Attention(nn.Module):
    """Attention of tokens to those that a mask leaves, or to all."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.masked = masked
        self.words = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        scores = x @ x.mT
        if self.masked:
            scores = self.hidden(scores, mask)
        return (scores + 0 * mask.float().clamp(-1, 1).sum()).softmax(dim=-1) @ x

    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None] == 0, -1e9)


class Hiding(Attention):
    """True hides a token, as in PyTorch's ``key_padding_mask``."""

    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None], -torch.inf)


class Adding(Attention):
    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + mask[:, None]


IDS = torch.zeros(2, 5, dtype=torch.int64)
MASKS: dict[str, tuple[type[Attention], Tensor]] = {
    "integers": (Attention, torch.ones(2, 5, dtype=torch.int64)),
    "booleans": (Attention, torch.ones(2, 5, dtype=torch.bool)),
    "booleans that hide": (Hiding, torch.zeros(2, 5, dtype=torch.bool)),
    "floats": (Adding, torch.zeros(2, 5)),
    "floats, some hidden": (Adding, torch.tensor([[0, 0, 0, 0, -1e9]] * 2)),
}


def exported(model: nn.Module, example: tuple[Any, ...], path: Path, **shapes: Any) -> Path:
    dynamo_moe.export(model.eval(), example, path, dynamic_shapes=shapes or {"x": LENGTH})
    return path


@pytest.mark.parametrize("name", MASKS)
def test_masks(tmp_path: Path, name: str) -> None:
    kind, mask = MASKS[name]
    torch.manual_seed(0)
    model = kind()
    path = exported(model, (IDS, mask), tmp_path / "right.onnx", ids=LENGTH, mask=LENGTH)
    assert dynamo_moe.verify(path, model).passed
    other = kind(masked=False)
    other.load_state_dict(model.state_dict())
    path = exported(other, (IDS, mask), tmp_path / "wrong.onnx", ids=LENGTH, mask=LENGTH)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model)


def test_a_square_mask(tmp_path: Path) -> None:
    class Causal(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask)

    class Ignoring(Causal):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask.sum(dim=-2, keepdim=True) > -1)

    shapes = {"x": LENGTH, "mask": {1: "length", 2: "length"}}
    example = torch.randn(2, 5, 8), torch.ones(2, 5, 5, dtype=torch.bool)
    dynamo_moe.verify(exported(Causal(), example, tmp_path / "right.onnx", **shapes), Causal())
    path = exported(Ignoring(), example, tmp_path / "wrong.onnx", **shapes)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, Causal())


def test_the_fast_path_of_a_transformer_encoder(tmp_path: Path) -> None:
    """It gives zeros for padded positions, where a file has what the layers compute."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    model = Padded()
    example = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    path = exported(model, example, tmp_path / "m.onnx", x=LENGTH, padding=LENGTH)
    assert dynamo_moe.verify(path, model).passed
    assert torch.backends.mha.get_fastpath_enabled()


# --- Wrong files ---


class Right(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class WrongFromTheEighth(Right):
    def forward(self, x: Tensor) -> Tensor:
        keeps = torch.arange(x.shape[1]) < 8
        return super().forward(x) * keeps[:, None]


class WrongForLarge(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-30, 30)


class WrongForZeros(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x == 0).all(dim=-1, keepdim=True)


class WrongForSmall(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).where(x.abs().amax(dim=-1, keepdim=True) > 0.05, 0.0)


class Ids(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1) + 151_000


class IdsOffByOne(Ids):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Flags(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


class OfAnotherType(Flags):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bool()


class LargeColumns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., :4] * 1e5, self.others(x[..., 4:])), dim=-1)

    def others(self, x: Tensor) -> Tensor:
        return x


class SmallOnesNegated(LargeColumns):
    def others(self, x: Tensor) -> Tensor:
        return -x


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (Right, WrongFromTheEighth), (Right, WrongForLarge), (Right, WrongForZeros),
        (Right, WrongForSmall), (Ids, IdsOffByOne), (Flags, OfAnotherType),
        (LargeColumns, SmallOnesNegated),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, right: Any, wrong: Any) -> None:
    example = (torch.randn(2, 5, 16),)
    assert dynamo_moe.verify(exported(right(), example, tmp_path / "r.onnx"), right()).passed
    path = exported(wrong(), example, tmp_path / "w.onnx")
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, right())


def test_a_size_that_a_condition_names(tmp_path: Path) -> None:
    class Table(nn.Module):
        """A fixed program is right up to 300 tokens, which the export notes."""

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[1] <= 300 else x * 2.0

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                x
                * (2.0 * (torch.arange(x.shape[1]) < 300))[:, None]
                * (1 if x.shape[1] <= 300 else 1.0)
            )

    path = exported(Wrong(), (torch.randn(2, 5, 4),), tmp_path / "m.onnx")
    with pytest.raises(dynamo_moe.VerificationError, match=r"\(1, 301, 4\)"):
        dynamo_moe.verify(path, Table())


def test_a_batch_of_another_name_is_not_as_long_as_a_sequence(tmp_path: Path) -> None:
    class Limited(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[1] <= 300 else x * 2.0

    path = tmp_path / "m.onnx"
    shapes = {"x": {0: "rows", 1: "tokens"}}
    dynamo_moe.export(Limited(), (torch.randn(2, 5, 4),), path, dynamic_shapes=shapes)
    cases = dynamo_moe.verify(path, Limited()).cases
    assert [case.shapes["x"] for case in cases[-2:]] == [(301, 1, 4), (1, 301, 4)]


# --- Right files ---


def test_infinities_and_nan_that_are_equal(tmp_path: Path) -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x.relu()) + torch.log(x + 1)

    path = exported(Logarithm(), (torch.randn(2, 5, 16),), tmp_path / "m.onnx")
    assert dynamo_moe.verify(path, Logarithm()).passed


INFINITE = torch.tensor([1.0, torch.inf, torch.nan, 2.0])


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, 0.0])
def test_infinities_and_nan_that_differ(place: int, value: float) -> None:
    assert worst_errors("file", [INFINITE], [INFINITE]) == (0.0, 0.0)
    other = INFINITE.clone()
    other[place] = value
    if not np.array_equal(other.numpy(), INFINITE.numpy(), equal_nan=True):
        max_error, _ = worst_errors("file", [other], [INFINITE])
        assert not max_error < 0.1


class Router(OpLayer):
    """PyTorch takes other experts than the first for tokens of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        logits = nn.functional.linear(x, self.router_weight)
        weights, ids = logits.softmax(dim=-1).topk(2, dim=-1)
        return custom_ops.experts(x, ids, weights, self.w1, self.b1, self.w2, self.b2)


def test_ties_of_the_models_own_router(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Router(experts=16)
    x = torch.randn(2, 5, 16)
    assert model(torch.zeros(1, 16)).shape == (1, 16)
    report = dynamo_moe.verify(exported(model, (x,), tmp_path / "m.onnx"), model)
    tied = [case for case in report.cases if case.excepted == "ties"]
    assert tied
    assert all(case.other_choices for case in tied)
    assert f"ok but for ties ({tied[0].other_choices})" in str(report.__rich__().columns[-1]._cells)


class Viewing(Router):
    """Views its choices as one axis, as torchtitan does."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router_weight.T).softmax(dim=-1).topk(2, dim=-1)
        ids = ids.view(-1).view(ids.shape)
        return custom_ops.experts(x, ids, weights, self.w1, self.b1, self.w2, self.b2)


def test_ties_of_a_model_that_views_its_choices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Viewing(experts=16)
    report = dynamo_moe.verify(exported(model, (torch.randn(2, 5, 16),), tmp_path / "m"), model)
    assert any(case.excepted == "ties" for case in report.cases)


@torch.no_grad()
def test_choices_that_rounding_decides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Router(experts=6)
    model.router_weight[4] = model.router_weight[2]
    x = torch.randn(2, 5, 16)
    path = exported(model, (x,), tmp_path / "m.onnx")

    def changed(factor: float) -> Router:
        """Prefers expert 4 where it is chosen with a positive logit, as before expert 2."""
        other = copy.deepcopy(model)
        other.router_weight[4] *= factor
        return other

    (case,) = dynamo_moe.verify(path, changed(1 + 1e-6), [(x,)]).cases
    assert (case.excepted, case.routing_agreement) == ("close choices", 1.0)
    assert 0 < case.other_choices < 10
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, changed(1.01), [(x,)])


class Residual(nn.Module):
    """As deep as half precision needs for its roundings to exceed the tolerance."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32, dtype=dtype) for _ in range(48))
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=dtype) for _ in range(48))
        self.head = nn.Linear(32, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + 6 * layer(norm(x)).tanh()
        return self.head(x)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = Residual(torch.float16).eval()
    path = tmp_path_factory.mktemp("deep") / "m.onnx"
    return model, exported(model, (torch.randn(2, 5, 32).half(),), path)


def test_rounding_that_adds_up(deep: tuple[nn.Module, Path]) -> None:
    model, path = deep
    report = dynamo_moe.verify(path, model)
    rounded = [case for case in report.cases if case.excepted == "rounding"]
    assert rounded
    # ONNX Runtime computes in float32 on a CPU, which is what the errors are relative to.
    assert all(case.max_error < tolerance_for({torch.float16}).max for case in rounded)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float16}


def test_a_tolerance_of_ones_own_has_no_exception(deep: tuple[nn.Module, Path]) -> None:
    model, path = deep
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model, tolerance=tolerance_for({torch.float16}))


@pytest.mark.parametrize("number", [0, 24, 47])
def test_a_wrong_weight_is_no_rounding(
    deep: tuple[nn.Module, Path], tmp_path: Path, number: int
) -> None:
    model, path = deep
    proto = onnx.load(path)
    (bias,) = (t for t in proto.graph.initializer if t.name == f"layers.{number}.bias")
    values = numpy_helper.to_array(bias)
    bias.CopyFrom(numpy_helper.from_array(np.roll(values, 1), bias.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(tmp_path / "wrong.onnx", model)


@pytest.mark.parametrize(
    ("of_model", "expected"),
    [
        ((0.004, 0.001), Tolerance(max=0.01, rms=0.002)),
        ((0.03, 0.004), Tolerance(max=0.06, rms=0.008)),
        ((0.11, 0.004), None),
        ((0.03, 0.021), None),
        ((math.inf, math.inf), None),
        ((math.nan, math.nan), None),
    ],
)
def test_what_rounding_allows(of_model: tuple[float, float], expected: Tolerance | None) -> None:
    assert rounding.allowed(of_model, tolerance_for({torch.float16})) == expected


def test_a_model_that_asks_for_half_precision_has_no_exception(tmp_path: Path) -> None:
    class Casting(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.half())

    torch.manual_seed(0)
    model = Casting(torch.float16).eval()
    path = exported(model, (torch.randn(2, 5, 32).half(),), tmp_path / "m.onnx")
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model)


def test_close_choices_are_taken_from_the_layer_that_has_them() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.3001, 0.1], [0.4, 0.3, 0.2, 0.1]])
    file_ids = [torch.tensor([[0, 1], [3, 1]]), torch.tensor([[0, 1], [0, 1]])]
    with ChoicesOfFile(file_ids, 1e-3) as choices:
        scores[:, :1].topk(1)
        scores.topk(3)
        values, ids = scores.topk(2)
        again = scores.topk(2)[1]
    # The first layer's second token is not close.
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert values.tolist() == [
        [0.5, scores[0, 1].item()],
        [scores[1, 0].item(), scores[1, 1].item()],
    ]
    assert choices.taken == 1
    assert again.tolist() == [[0, 2], [0, 1]]


def test_groups_of_experts_on_sequences(tmp_path: Path) -> None:
    model = OpLayer(experts=8, n_group=4, topk_group=2, group_scoring="max")
    path = exported(model, (torch.randn(2, 5, 16),), tmp_path / "m.onnx")
    report = dynamo_moe.verify(path, model)
    # Scores of zero, which large logits have, are equal or not by how a softmax rounds.
    assert [case.routing_agreement for case in report.cases[:3]] == [1.0] * 3


def test_inputs_that_the_model_refuses(tmp_path: Path) -> None:
    class Limited(nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.most = most

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting() and x.shape[1] > self.most:
                raise ValueError(f"more than {self.most} tokens")
            return x * 2

    path = exported(Limited(9), (torch.randn(2, 5, 4),), tmp_path / "m.onnx")
    report = dynamo_moe.verify(path, Limited(9))
    assert (len(report.cases), report.left_out) == (3, 3)
    assert "3 more cases were drawn" in str(report.__rich__().caption)
    # Of those and of sizes such as pictures have, the first that it refuses.
    with pytest.raises(ValueError, match=r"inputs=\[\{'x': <float32 \[1, 4, 4\]>\}\]"):
        dynamo_moe.verify(path, Limited(2))


class OnlyEven(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., ::2, ::2] + x[..., 1::2, 1::2]


class Squeezing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=-1).squeeze()[:, 1]


@pytest.mark.parametrize(
    ("model", "shape", "axes", "sizes"),
    [
        (OnlyEven(), (2, 3, 8, 6), {0: "b", 2: "h", 3: "w"}, [(2, 3, 224, 448), (3, 3, 448, 224)]),
        (Squeezing(), (2, 3, 4), {}, [(2, 3, 4), (3, 3, 4)]),
    ],
    ids=["pictures of even sizes", "a squeezed batch"],
)
def test_models_that_refuse_some_sizes_are_verified_on_others(
    tmp_path: Path, model: nn.Module, shape: Any, axes: Any, sizes: Any
) -> None:
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, (torch.randn(shape),), path, dynamic_shapes={"x": axes})
    report = dynamo_moe.verify(path, model)
    assert [case.shapes["x"] for case in report.cases] == sizes
    assert report.left_out == 1
