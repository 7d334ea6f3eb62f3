"""Whether a module and its replacement give the same numbers, on tokens of many shapes.

Legend: T tokens, D model width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.conversion.observation import random_tokens
from dynamo_moe.conversion.other_arguments import is_plain
from dynamo_moe.ties import TiesByIndex

# Relative to the RMS of a token's result, both in at least float32: a different activation or
# routing differs by 1e-3 and more, another order of summation by 1e-6.
TOLERANCE = 1e-4
# Large tokens make large logits, whose last digits change the weights of close ones. An error may
# be so many times what changing the tokens' last digits does to the original, but below 1e-3.
_ROUNDINGS, _MOST_BY_ROUNDING = 10, 1e-3
# With tokens so many times as large, sigmoids are 1 and small probabilities 0.
_LARGE = 100.0

# Few tokens and many, for modules that count them, as for a capacity; and every number of
# dimensions, for modules that look at it.
_SHAPES = ((8,), (1,), (256,), (2, 16), (1, 1), (4, 64), (2, 3, 4), (2, 8, 16))
_EQUAL_TOKENS = ((64,), (2, 32))
# Many, in each number of dimensions, for layers like one that was compared on all of these.
_FEWER = ((128,), (2, 64), (2, 8, 8))


def compare_shapes(
    original: Callable[[Tensor], Any],
    candidate: Callable[[Tensor], Any],
    example: Tensor,
    kind: str,
    *,
    optional_dimensions: bool = False,
    thresholds: Collection[int] = (),
    scales: Collection[float] = (),
    extremes: Collection[float] = (),
    many: int = 0,
) -> tuple[int, ...]:
    """Compares both on tokens of every shape that the original takes, without gradients.

    Args:
        original: From ``[..., D]`` to anything.
        candidate: Its replacement.
        example: Tokens ``[..., D]`` that the original takes.
        kind: The candidate's kind, for messages.
        optional_dimensions: Whether the candidate may differ for tokens of another number of
            dimensions than the example's.
        thresholds: Numbers of tokens to exceed, by equal tokens, for modules that count up to them.
        scales: Factors on the example to try besides it.
        extremes: Factors so small or large that scores may be equal.
        many: A number of equal tokens to try in the example's number of dimensions; 0: none.

    Returns:
        The numbers of dimensions for which they give the same.

    Raises:
        ValueError: If they do not give the same numbers; with the difference.
    """
    compare(original, candidate, [example], kind)
    same = {example.ndim: True}
    _compare_zeros(original, candidate, example, kind)
    for scale in extremes:
        x, drawn = example * scale, f"{scale:g} times random"
        _compare_ties(original, candidate, x, kind, drawn)
    if many:
        x_D = random_tokens(example.shape[-1], like=example)
        x = x_D.expand(*[1] * (example.ndim - 2), many, -1).contiguous()
        compare(original, candidate, [x], kind, drawn="equal")
    for x in (*(example * scale for scale in scales), *_cases(example, thresholds)):
        try:
            with torch.no_grad():
                expected = original(x)
        except Exception:  # noqa: S112  It takes no tokens of such a shape.
            continue
        try:
            compare(lambda _, known=expected: known, candidate, [x], kind)
            same.setdefault(x.ndim, True)
        except ValueError:
            if not optional_dimensions or x.ndim == example.ndim:
                raise
            same[x.ndim] = False
    return tuple(ndim for ndim, agrees in same.items() if agrees)


def _compare_zeros(
    original: Callable[[Tensor], Any],
    candidate: Callable[[Tensor], Any],
    example: Tensor,
    kind: str,
) -> None:
    """Compares both on tokens of which every second is zero, as padding may be.

    All scores of such a token may be equal, so the two may choose other experts. Then only what is
    zero is compared, and the other tokens' results.

    Raises:
        ValueError: If they do not give the same numbers, or the original skips tokens of zeros.
    """
    x = example.clone()
    x.view(-1, x.shape[-1])[::2] = 0
    try:
        _compare_ties(original, candidate, x, kind, "random and zero")
    except ValueError:
        with torch.no_grad():
            expected, result = (
                [leaf for leaf in pytree.tree_leaves(run(x)) if _has_rows(leaf, x)]
                for run in (original, candidate)
            )
        for ours, theirs in zip(result, expected, strict=True):
            ours_TD, theirs_TD = (value.reshape(-1, x.shape[-1]) for value in (ours, theirs))
            if ours_TD[::2].any() and not theirs_TD[::2].any():
                raise ValueError("it skips tokens of zeros") from None
            error = relative_error(ours_TD[1::2], theirs_TD[1::2])
            if not error <= TOLERANCE:
                raise


def _has_rows(value: Any, x: Tensor) -> bool:
    return _is_floating(value) and value.numel() == x.numel()


def _compare_ties(
    original: Callable[[Tensor], Any],
    candidate: Callable[[Tensor], Any],
    x: Tensor,
    kind: str,
    drawn: str,
) -> None:
    """Compares both on tokens whose scores may be equal, unless the original has no result.

    Both take the first of them. Ids are not compared: where a softmax rounds to zero, logits still
    differ.

    Raises:
        ValueError: If they do not give the same numbers; with the difference.
    """
    try:
        with torch.no_grad(), TiesByIndex():
            expected = original(x)
    except Exception:  # The module is the user's: anything can come out of it.
        return
    numbers = [leaf for leaf in pytree.tree_leaves(expected) if _is_floating(leaf)]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        return
    with TiesByIndex():
        same = partial(
            compare, lambda _: expected, candidate, [x], kind, exactly=False, drawn=drawn
        )
        try:
            same()
        except ValueError:
            same(tolerance=_tolerance_for_rounding(original, x, numbers))


def _tolerance_for_rounding(
    original: Callable[[Tensor], Any], x: Tensor, numbers: Sequence[Tensor]
) -> float:
    last = torch.finfo(torch.float32).eps * (random_tokens(*x.shape, like=x).sign())
    with torch.no_grad():
        changed = filter(_is_floating, pytree.tree_leaves(original(x + x * last)))
    error = max(map(relative_error, changed, numbers), default=0.0)
    return max(TOLERANCE, min(_ROUNDINGS * error, _MOST_BY_ROUNDING))


def equal_scores(original: Callable[[Tensor], Any], example: Tensor) -> tuple[str, ...]:
    """Returns for what tokens a module finds equal scores, and ranks them otherwise than by index.

    Args:
        original: From ``[..., D]`` to anything.
        example: Tokens ``[..., D]`` that it takes.
    """
    tokens = {
        "random tokens": example,
        f"{_LARGE:g} times as large tokens": example * _LARGE,
        "tokens of zeros": torch.zeros_like(example),
    }
    found = []
    for drawn, x in tokens.items():
        with TiesByIndex() as ties, torch.no_grad(), contextlib.suppress(Exception):
            original(x)  # The module is the user's: anything can come out of it.
        found += [drawn] if ties.found else []
    return tuple(found)


def fewer_cases(example: Tensor, scales: Collection[float]) -> list[Tensor]:
    """Returns tokens to try a layer with that looks like one that was compared in all ways.

    They are many, half of them large and half of either equal, and a single one, also small: each
    of the scales and both numbers of tokens are among them, but not each scale with each number.

    Args:
        example: Tokens ``[..., D]`` that the layer takes.
        scales: Factors below and above 1 on such tokens.
    """
    *_, shape = (shape for shape in _FEWER if len(shape) == example.ndim - 1)
    width = example.shape[-1]
    x_TD = random_tokens(math.prod(shape), width, like=example)
    x_TD[::2] = x_TD[0].clone()
    one = [1] * len(shape)
    x_1D = x_TD[1].clone().view(*one, width)
    # Beside rows a hundred times as large, a row's error would count for less.
    x_TD.view(-1, 2, 2, width)[:, 1] *= max(1.0, *scales)
    return [x_TD.view(*shape, width), x_1D, x_1D * min(scales)]


def _cases(example: Tensor, thresholds: Collection[int]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = example.shape[-1]
    for shape in _SHAPES:
        yield random_tokens(*shape, width, like=example, generator=generator)
    beyond = [shape for count in thresholds for shape in ((count + 1,), (1, count + 1))]
    for shape in (*_EQUAL_TOKENS, *beyond):
        x_D = random_tokens(width, like=example, generator=generator)
        yield x_D.expand(*shape, width).contiguous()


def compare(
    original: Callable[..., Any],
    candidate: Callable[..., Any],
    inputs: Sequence[Tensor],
    kind: str,
    *,
    exactly: bool = True,
    drawn: str = "random",
    tolerance: float = TOLERANCE,
) -> None:
    """Runs both, without gradients; integers are equal, if ``exactly``.

    ``drawn`` says, for messages, what tokens these are.

    Raises:
        ValueError: If they do not give the same numbers; with the difference.
    """
    tokens = f"{drawn} tokens {list(inputs[0].shape)}"
    try:
        with torch.no_grad():
            expected, result = original(*inputs), candidate(*inputs)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        raise ValueError(
            f"it has the shape of {kind} but fails on {tokens}: {failure}"
        ) from failure
    expected, structure = pytree.tree_flatten(expected)
    result, replaced = pytree.tree_flatten(result)
    alike = _alike if exactly else _alike_but_for_ids
    if structure != replaced or not all(map(alike, result, expected)):
        raise ValueError(f"it has the shape of {kind} but returns something else for {tokens}")
    for ours, theirs in zip(result, expected, strict=True):
        if not _is_floating(theirs):
            continue
        if not theirs.ndim and not ours:  # A loss, which only training needs.
            continue
        error = relative_error(ours, theirs)
        if not error <= tolerance:  # NaN too.
            if not theirs.isfinite().all():
                raise ValueError(f"it gives numbers that are not finite for {tokens}")
            raise ValueError(
                f"it has the shape of {kind} but computes something else: relative error "
                f"{error:.1e} on {tokens}, above {tolerance:.0e}"
            )


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Returns the largest error, relative to the RMS of the expected row.

    A row far below the RMS of all rows counts as if it were a hundredth of that.
    """
    return relative_errors(result[None], expected)[0]


def relative_errors(results: Tensor, expected: Tensor) -> list[float]:
    """Returns :func:`relative_error` of each of several results."""
    if not expected.numel():
        return [0.0] * len(results)
    squares = expected.double().square()
    rms = squares.mean().sqrt().clamp_min(1e-30)
    scale = squares.mean(dim=-1, keepdim=True).sqrt().clamp_min(rms / 100)
    errors = (expected.double() - results.double()).abs() / scale
    return errors.flatten(1).amax(1).tolist()


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two values are the same; of floating tensors, the shapes."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape == theirs.shape and (_is_floating(theirs) or torch.equal(ours, theirs))
    return bool(ours == theirs) if is_plain(ours) and is_plain(theirs) else ours is theirs


def _alike_but_for_ids(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape == theirs.shape
    return _alike(ours, theirs)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
