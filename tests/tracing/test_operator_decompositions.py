"""Our own decompositions: with symbolic sizes, and if the program is traced again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_moe
from traced_programs import Call, check_numbers, run

pytest_plugins = ("traced_programs",)

Function = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def circular(x: Tensor) -> Tensor:
    return F.pad(x, (2, 1, 0, 3), mode="circular")


def cropped(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.pad(x, (-1, 2, 0, 0), mode="replicate"), F.pad(x, (2, -1, -2, 1), mode="reflect")


def adaptive(x: Tensor) -> tuple[Tensor, ...]:
    values, indices = F.adaptive_max_pool2d(x, (3, 2), return_indices=True)
    volume = F.adaptive_avg_pool3d(x.unsqueeze(0), (2, 3, 2))
    averages = F.adaptive_avg_pool2d(x, (3, 1)), F.adaptive_avg_pool1d(x[0], 2)
    return values, indices, volume, F.adaptive_max_pool1d(x[0], 3), *averages


def divided(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = F.avg_pool2d(x, 3, 2, 1, divisor_override=5)
    return whole, F.avg_pool2d(x, (2, 3), ceil_mode=True, divisor_override=2)


def antialiased(x: Tensor) -> Tensor:
    return F.interpolate(x, (5, 4), mode="bilinear", antialias=True, align_corners=True)


def attention(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.permute(0, 2, 3, 1)
    rows = x[0, 0]
    causal = F.scaled_dot_product_attention(x[0], x[0], x[0], is_causal=True)
    masked = F.scaled_dot_product_attention(rows, rows, rows, rows[:, :1] > 0)
    return causal, masked, F.scaled_dot_product_attention(x[None], x[None], x[None])


def batch_statistics(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def searched(x: Tensor) -> tuple[Tensor, ...]:
    sorted_rows = x[0].sort(-1).values
    bounds = sorted_rows[0, 0]
    return (
        torch.searchsorted(sorted_rows, x[1]),
        torch.searchsorted(bounds, x, right=True),
        torch.bucketize(x, bounds, out_int32=True),
        torch.searchsorted(bounds, 0.5),
    )


def bags(x: Tensor) -> tuple[Tensor, ...]:
    table = torch.arange(12.0).reshape(4, 3).cos()
    ids = (x[0, 0].abs() * 3).long() % 4
    offsets = torch.tensor([0, 0, 2, 5, 5])
    return (
        F.embedding_bag(ids, table, mode="mean"),
        F.embedding_bag(ids, table, mode="max", padding_idx=1),
        F.embedding_bag(ids[:, 0], table, offsets[:3], mode="sum"),
        F.embedding_bag(ids.flatten(), table, offsets, mode="max", include_last_offset=True),
        F.embedding_bag(ids, table, mode="sum", per_sample_weights=x[0, 0], padding_idx=-1),
    )


def selected(x: Tensor) -> tuple[Tensor, ...]:
    return x.masked_select(x > 0), x.masked_select(x[0] > 0), x.amax()


def flattened(x: Tensor) -> Tensor:
    return x.flatten() * 2


def stably_sorted(x: Tensor) -> tuple[Tensor, ...]:
    ties = x.round()
    return (
        *ties.sort(dim=-1, descending=True, stable=True),
        *ties.sort(dim=1, stable=True),
        ties[0].argsort(dim=-1, stable=True),
    )


def medians(x: Tensor) -> tuple[Tensor, ...]:
    """Beside NaN, and in bfloat16, which TopK does not have."""
    values, places = x.masked_fill(x > 1, torch.nan).median(1)
    narrow = x.bfloat16().sort(dim=-1).values
    kth = x.kthvalue(2, 1, keepdim=True)
    holed = values.nan_to_num(9.0), places
    return *x.median(-1), *holed, (x * 4).long().median(), *kth, narrow.float()


def products(x: Tensor) -> Tensor:
    return x.cumprod(-1) + x.cumprod(1)


def distances(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.cdist(x[0], x[1], p) for p in (0.0, 1.0, 2.0, 3.0, float("inf")))


def of_mixed_dtypes(x: Tensor) -> tuple[Tensor, ...]:
    counts = (x > 0).sum(0)
    outer = torch.einsum("i,j->ij", torch.arange(4), x[0, 0, 0])
    quotients = torch.divide(x, counts + 1)
    return quotients, torch.subtract(x, counts), torch.greater(x, counts), outer


def numbers_first(x: Tensor) -> tuple[Tensor, ...]:
    """A number before a tensor, or a real one beside integers."""
    mask = (x > 0).long()
    quotients = 5 // (mask + 2), 5.5 // (mask + 1), mask // 0.3
    return 1.0 - mask, 1 - mask, torch.rsub(mask, 2.5, alpha=3), *quotients


def sizes_beside_integers(x: Tensor) -> tuple[Tensor, ...]:
    height, width = x.shape[2:]
    places = torch.arange(height * width) - 9
    natural = (places + 10) % 5 + 1
    bits = places & height, places | width, places ^ height, height & places, width | places
    shifts = natural << height, (natural * 100) >> width, natural.bitwise_left_shift(width)
    powers = natural**height, height**natural, (natural / 4) ** height, width ** (natural / 4)
    remainders = places % height, width % (natural - 7), x % width, places % (height / 2 - width)
    return *bits, *shifts, *powers, *remainders


def sums_of_booleans(x: Tensor) -> Tensor:
    return (x > 1) + (x < 0)


def sums_in_half_precision(x: Tensor) -> tuple[Tensor, ...]:
    """ONNX Runtime scatters no sums in half precision."""
    rows = x[0, :, :2].round().half()
    zeros, one = rows.new_zeros(rows.shape), torch.ones(2, dtype=torch.int64)
    results = (
        zeros.index_add(1, one, rows),
        zeros.index_put((one, one), rows[:2, 0], accumulate=True),
        zeros.scatter_add(1, torch.ones_like(zeros, dtype=torch.int64), rows),
        zeros.bfloat16().scatter_reduce(1, (rows > 0).long(), rows.bfloat16(), "sum"),
    )
    return tuple(result.float() for result in results)


def small_numbers(x: Tensor) -> tuple[Tensor, ...]:
    """Of which nothing would be left beside 1."""
    edges = torch.tensor([0.0, -0.0, -1.0, torch.inf, 100.0, 0.5, -0.5]) + x[:, :, :1, :1] * 0
    tiny = x * 1e-6
    exponentials = (tiny.expm1() * 1e6, (x * 3).expm1(), (100 * edges - 0.1).expm1())
    return tiny.log1p() * 1e6, (x * 3).abs().log1p(), edges.log1p(), *exponentials


def large_exponents(x: Tensor) -> tuple[Tensor, ...]:
    """Whose exponentials are infinite, or vanish."""
    wide = x * 300
    infinite = torch.where(x.abs() > 1, x * torch.inf, wide)
    one = infinite[0, 0, 0, 0] * 0 + 2
    sums = wide.logcumsumexp(1), (x * 3).logcumsumexp(-1), one.nan_to_num(1.0).logcumsumexp(0)
    pairs = torch.logaddexp(wide, wide.flip(1)), torch.logaddexp(infinite, infinite)
    return F.logsigmoid(wide), F.logsigmoid(x), *sums, *pairs


def in_half_precision(x: Tensor) -> tuple[Tensor, ...]:
    """What PyTorch rounds once, and squares beyond the numbers of float16."""
    return (
        F.batch_norm((x * 1000).half(), None, None, training=True),
        (x * 0.0001).half().log1p(),
        (x * 0.0001).bfloat16().expm1(),
        (x.abs() + 9).half().log2(),
        (x.abs() + 9).bfloat16().log10(),
        torch.linalg.vector_norm((x * 100).half(), 3, -1),
        x.half().sinc(),
    )


def narrow_indices(x: Tensor) -> tuple[Tensor, ...]:
    two = torch.tensor([0, 2], dtype=torch.int32)
    changed = x * 2
    changed[:, two] = 3
    return x[:, two], x[two.long() // 2, two], changed, x.index_put((two[:1],), x[:1] * 0)


def chunks(x: Tensor) -> tuple[Tensor, ...]:
    """Of sizes that do not divide; where there are fewer chunks, the model fails."""
    one, two, three = x.chunk(3, -1)
    (whole,) = x.chunk(1, 2)
    return *x.chunk(2, 1), one, two * 2, three, whole


def sections(x: Tensor) -> tuple[Tensor, ...]:
    return *x.tensor_split(3, -1), *torch.tensor_split(x, 2, 1), *x.tensor_split(11, 2)


def diagonals(x: Tensor) -> tuple[Tensor, ...]:
    batched = (x.diagonal(offset, -2, -1) for offset in (-2, 0, 1))
    return *batched, x.diagonal(0, 3, 1), x[0].diagonal()


def without_nan(*results: Tensor) -> tuple[Tensor, ...]:
    """Shows where NaN is, which equals nothing."""
    return tuple(result.masked_fill(result.isnan(), 99) for result in results)


def modes(x: Tensor) -> tuple[Tensor, ...]:
    """Where numbers tie, and where there are none; PyTorch's sort puts a NaN anywhere."""
    ties = x.round()
    no_number = (x[:, :1] * torch.nan).mode(-1, keepdim=True)
    masks = (x > 0).mode(1)
    return *ties.mode(-1), *ties.int().mode(2, True), *masks, *without_nan(*no_number)


def medians_beside_nan(x: Tensor) -> tuple[Tensor, ...]:
    holed = x.masked_fill(x > 0.5, torch.nan)
    results = (
        *holed.nanmedian(-1),
        *holed.nanmedian(1, keepdim=True),
        holed.nanmedian(),
        (holed / 0).abs().nanmedian(2).values,
        (x[0] * torch.nan).nanmedian(),
    )
    return *without_nan(*results), *(x * 4).round().long().unique().nanmedian(0)


def covariances(x: Tensor) -> tuple[Tensor, ...]:
    rows, whole = x[0, 0], (x[0, 0] * 4).long()
    counts, weights = whole[0].abs() + 1, x[0, 1, 0].abs()
    return (
        rows.cov(),
        rows[0].cov(correction=0),
        whole.cov(fweights=counts),
        rows.cov(aweights=weights),
        rows.cov(correction=2, fweights=counts, aweights=weights),
        rows.corrcoef(),
    )


def distances_of_pairs(x: Tensor) -> tuple[Tensor, ...]:
    return *(F.pdist(x[0, 0], p) for p in (0.0, 1.0, 2.0, 3.0, torch.inf)), F.pdist(x[0, 0, :1])


def special_functions(x: Tensor) -> tuple[Tensor, ...]:
    """At their edges, and beyond them."""
    near_one = 1 - x.abs() * 1e-6
    edges = torch.tensor([0.0, -1.0, 1.0, 2.0, torch.nan, -0.9, 90.0, 1000.0]) + 0 * x[..., :1]
    wide = torch.special.i0(x * 20) / (x * 20).abs().exp()
    whole = (x > 0).long().erfinv(), (x * 3).long().i0()
    at_edges = without_nan(edges.erfinv(), edges.i0())
    return x.tanh().erfinv(), near_one.erfinv(), x.i0(), wide, *at_edges, *whole


def squeezed(x: Tensor) -> tuple[Tensor, ...]:
    """Dimensions that are not 1 stay."""
    one = x[:, :1]
    return x.squeeze(1), x.squeeze(-1), one.squeeze((0, 1)), one[:1].squeeze((1, 3, 0))


FUNCTIONS = [
    chunks,
    sections,
    diagonals,
    modes,
    medians_beside_nan,
    covariances,
    distances_of_pairs,
    special_functions,
    numbers_first,
    sizes_beside_integers,
    squeezed,
    sums_of_booleans,
    sums_in_half_precision,
    small_numbers,
    large_exponents,
    narrow_indices,
    circular,
    cropped,
    adaptive,
    divided,
    antialiased,
    attention,
    batch_statistics,
    searched,
    bags,
    selected,
    flattened,
    stably_sorted,
    medians,
    products,
    distances,
    of_mixed_dtypes,
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.first(20)
def test_symbolic_sizes(tmp_path: Path, retraces, function: Function) -> None:
    torch.manual_seed(0)
    model, path = Call(function), tmp_path / "m.onnx"
    shapes = {"x": {2: "height", 3: "width"}}
    dynamo_moe.export(model, torch.randn(2, 3, 8, 9), path, dynamic_shapes=shapes)
    assert not retraces
    for sizes in ((2, 3, 8, 9), (3, 3, 7, 6), (4, 3, 12, 13)):
        check_numbers(path, model, torch.randn(sizes))


def test_half_precision(tmp_path: Path) -> None:
    """The file differs from PyTorch by a rounding, or two where a number is scaled."""
    torch.manual_seed(0)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.float() for y in in_half_precision(x))

    model, x = Call(function), torch.randn(2, 3, 8, 9)
    dynamo_moe.export(model, x, tmp_path / "m.onnx")
    results = run(tmp_path / "m.onnx", x)
    for result, expected in zip(results, in_half_precision(x), strict=True):
        rounding = torch.finfo(expected.dtype)
        torch.testing.assert_close(
            result, expected.float(), rtol=2 * rounding.eps, atol=rounding.smallest_normal
        )


def after_a_change(function: Function) -> Call:
    """Returns a model that PyTorch's own steps decompose."""

    def changing(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        y = x * 2
        with torch.autocast("cpu", enabled=False):
            z = y.view(x.shape)
        y.add_(1)
        return function(z)

    return Call(changing)


@pytest.mark.parametrize("function", [circular, divided, attention, selected, of_mixed_dtypes])
def test_by_pytorchs_own_steps(tmp_path: Path, retraces, function: Function) -> None:
    torch.manual_seed(0)
    model, path = after_a_change(function), tmp_path / "m.onnx"
    dynamo_moe.export(model, torch.randn(2, 3, 8, 9), path, dynamic_shapes=None)
    assert len(retraces) == 1
    check_numbers(path, model, torch.rand(2, 3, 8, 9))


@pytest.mark.parametrize(
    "function",
    [
        chunks,
        sections,
        *(pytest.param(x, marks=pytest.mark.every) for x in (covariances, distances_of_pairs)),
    ],
)
@pytest.mark.first(1)
def test_symbolic_sizes_by_pytorchs_own_steps(tmp_path: Path, retraces, function: Function) -> None:
    torch.manual_seed(0)
    model, path = after_a_change(function), tmp_path / "m.onnx"
    shapes = {"x": {2: "height", 3: "width"}}
    dynamo_moe.export(model, torch.randn(2, 3, 8, 9), path, dynamic_shapes=shapes)
    assert len(retraces) == 1
    for sizes in ((2, 3, 8, 9), (2, 3, 7, 6), (2, 3, 12, 13)):
        check_numbers(path, model, torch.rand(sizes))


def test_as_many_chunks_as_there_are(tmp_path: Path) -> None:
    """Of 4 numbers there are two chunks where three are asked for, so a file has a range."""
    model, path, x = Call(lambda x: tuple(x.chunk(3, 1))), tmp_path / "m.onnx", torch.randn(2, 6)
    with pytest.raises(dynamo_moe.ExportError, match=r"chunk.* is wrong where x.shape\[1\] is 4"):
        dynamo_moe.export(model, x, path, dynamic_shapes={"x": {1: "width"}})
    width = torch.export.Dim("width", min=5)
    dynamo_moe.export(model, x, path, dynamic_shapes={"x": {1: width}})
    for size in (5, 6, 7, 8, 16):
        check_numbers(path, model, torch.randn(2, size))
    with pytest.raises(dynamo_moe.ExportError, match=r"wrong where x.shape\[1\] is"):
        dynamo_moe.export(model, x[:, :4], path, dynamic_shapes={"x": {1: "width"}})


@pytest.mark.parametrize(
    ("function", "operator"), [(torch.erfinv, "erf_inv"), (torch.special.i0, "bessel_i0")]
)
def test_special_functions_in_float64_are_refused(
    tmp_path: Path, function: Function, operator: str
) -> None:
    """What stands for them has the precision of float32."""
    with pytest.raises(dynamo_moe.ExportError, match=f"operator prims.{operator} has no"):
        dynamo_moe.export(
            Call(lambda x: function(x.double())), torch.randn(2, 6), tmp_path / "m.onnx"
        )


def smaller(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True)


def test_antialiasing_by_a_factor(tmp_path: Path) -> None:
    """PyTorch 2.13 itself computes something else if the width is 1, so it cannot be symbolic."""
    model = Call(smaller)
    dynamo_moe.export(model, torch.randn(2, 3, 8, 9), tmp_path / "m.onnx")
    check_numbers(tmp_path / "m.onnx", model, torch.randn(4, 3, 8, 9))
    with pytest.raises(dynamo_moe.ExportError, match=r"wrong where x.shape\[3\] is 3"):
        dynamo_moe.export(
            model, torch.randn(2, 3, 8, 9), tmp_path / "n.onnx", dynamic_shapes={"x": {3: "width"}}
        )
