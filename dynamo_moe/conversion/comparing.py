"""Whether a module and what is to stand for it give the same numbers, on tokens of many shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.private import has_forward_hooks
from dynamo_moe.weights.lazy_tensors import LazyTensor

__all__ = [
    "check_comparable",
    "compare",
    "compare_shapes",
    "has_values",
    "random_tokens",
    "relative_error",
]

# Relative to the RMS of a token's result, both in at least float32: a different activation or
# routing differs by 1e-3 and more, another order of summation by 1e-6.
TOLERANCE = 1e-4

# Few tokens and many, for what counts them, such as a capacity; and every number of dimensions, for
# what looks at that.
_SHAPES = ((8,), (1,), (256,), (2, 16), (1, 1), (4, 64), (2, 3, 4), (2, 8, 16))
_ALIKE = ((64,), (2, 32))


def random_tokens(count: int, width: int, like: Tensor) -> Tensor:
    """Returns ``[count, width]``, the same every time, large enough to tell activations apart."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, width, generator=generator) * 2).to(like.device, like.dtype)


def has_values(module: nn.Module) -> bool:
    """Whether the module can be run: none of its parameters is on the meta device, or on disk."""
    return not any(p.is_meta or isinstance(p, LazyTensor) for p in module.parameters())


def check_comparable(module: nn.Module) -> None:
    """Raises ValueError if a module does more than its forward says."""
    if any(map(has_forward_hooks, module.modules())):
        raise ValueError("it has forward hooks, which its replacement would not run")


def compare_shapes(
    original: Callable[[Tensor], Any],
    candidate: Callable[[Tensor], Any],
    example: Tensor,
    kind: str,
    *,
    others: bool = False,
    longer: Collection[int] = (),
    scales: Collection[float] = (1.0,),
) -> tuple[int, ...]:
    """Runs both on tokens of all shapes that the original takes, without gradients.

    Args:
        original: From ``[..., D]`` to anything.
        candidate: What is to stand for it.
        example: Tokens ``[..., D]`` that the original takes.
        kind: What the candidate is, for messages.
        others: Whether the candidate may differ for tokens of another number of dimensions than
            the example's.
        longer: Numbers of tokens that equal ones must exceed, for what counts up to them.
        scales: Factors on tokens.

    Returns:
        The numbers of dimensions for which they give the same.

    Raises:
        ValueError: If they do not give the same numbers; with what speaks against it.
    """
    compare(original, candidate, [example], kind)
    same = {example.ndim: True}
    scaled = [example * scale for scale in scales if scale != 1.0]
    for x in (*scaled, *_cases(example, longer)):
        try:
            with torch.no_grad():
                expected = original(x)
        except Exception:  # noqa: S112  It takes no tokens of such a shape.
            continue
        try:
            compare(lambda _, known=expected: known, candidate, [x], kind)
            same.setdefault(x.ndim, True)
        except ValueError:
            if not others or x.ndim == example.ndim:
                raise
            same[x.ndim] = False
    return tuple(ndim for ndim, agrees in same.items() if agrees)


def compare(
    original: Callable[..., Any], candidate: Callable[..., Any], inputs: Sequence[Tensor], kind: str
) -> None:
    """Runs both, without gradients.

    Raises:
        ValueError: If they do not give the same numbers; with what speaks against it.
    """
    tokens = f"tokens {list(inputs[0].shape)}"
    try:
        with torch.no_grad():
            expected, result = original(*inputs), candidate(*inputs)
    except Exception as failure:  # The module is the user's: anything can come out of it.
        raise ValueError(
            f"it has the shape of {kind} but fails on {tokens}: {failure}"
        ) from failure
    expected, structure = pytree.tree_flatten(expected)
    result, replaced = pytree.tree_flatten(result)
    if structure != replaced or list(map(_shape, expected)) != list(map(_shape, result)):
        raise ValueError(f"it has the shape of {kind} but returns something else for {tokens}")
    for ours, theirs in zip(result, expected, strict=True):
        if not isinstance(theirs, Tensor) or not theirs.is_floating_point():
            if not _equal(ours, theirs):
                raise ValueError(
                    f"it has the shape of {kind} but returns something else for {tokens}"
                )
            continue
        if not theirs.ndim and not ours:  # A loss, which only training needs.
            continue
        if not theirs.isfinite().all():
            raise ValueError(f"it gives numbers that are not finite for {tokens}")
        error = relative_error(ours, theirs)
        if not error <= TOLERANCE:  # NaN too.
            raise ValueError(
                f"it has the shape of {kind} but computes something else: relative error "
                f"{error:.1e} on random {tokens}, above {TOLERANCE:.0e}"
            )


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Returns the largest error, relative to the RMS of its row of what is expected.

    A row far below all others' RMS counts as if it were a hundredth of that.
    """
    if not expected.numel():
        return 0.0
    squares = expected.double().square()
    rms = squares.mean().sqrt().clamp_min(1e-30)
    scale = squares.mean(dim=-1, keepdim=True).sqrt().clamp_min(rms / 100)
    return float(((expected.double() - result.double()).abs() / scale).max())


def _cases(example: Tensor, longer: Collection[int] = ()) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = example.shape[-1]
    for shape in _SHAPES:
        x = torch.randn(*shape, width, generator=generator) * 2
        yield x.to(example.device, example.dtype)
    beyond = [shape for count in longer for shape in ((count + 1,), (1, count + 1))]
    for shape in (*_ALIKE, *beyond):
        x = torch.randn(width, generator=generator) * 2
        yield x.to(example.device, example.dtype).expand(*shape, width).contiguous()


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and torch.equal(ours, theirs)
    plain = theirs is None or isinstance(theirs, (bool, int, float, str))
    return bool(ours == theirs) if plain else ours is theirs


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None
