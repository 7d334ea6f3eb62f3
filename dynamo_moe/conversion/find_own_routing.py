"""Finds the weights of a layer's experts among the values that its own code computes.

A layer's result is a sum of its experts' results, with one unknown weight each, so the weights can
be solved for. Then they are looked for among all values that its forward computes ahead of its
experts: alone, or as one of the forms of ``own_routing``.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynamo_moe import pytree
from dynamo_moe.conversion.own_routing import (
    AllComputed,
    Form,
    Kind,
    OwnRouting,
    Value,
    dense_weights,
    is_integer,
    kind_of,
    name_of,
    tensors_of,
)

# How far weights that are solved for may be from computed ones, relative to the largest weight.
_TOLERANCE = 1e-3
# Experts for each dimension of a token, above which a sum of them could be anything.
_MOST_EXPERTS = 0.5


# --- All values ---


def values_ahead_of_experts(
    run: Callable[[Tensor], Any], x: Tensor, experts: Sequence[Tensor]
) -> tuple[dict[Value, Tensor], int]:
    """Returns all values that a forward computes before it uses an expert's weights.

    Args:
        run: The forward.
        x: Its tokens.
        experts: The weights; to take a view of one is not to use it.

    Returns:
        The values in the order of their computation, without those that are views of others; and
        how many of them come before any is made a number of Python's, which few traces follow.
    """
    recorded = _UntilExperts({_memory(weight) for weight in experts})
    with torch.no_grad(), contextlib.suppress(AllComputed), recorded:
        run(x)
    first = recorded.first_number
    return recorded.values, len(recorded.values) if first is None else first


class _UntilExperts(TorchFunctionMode):
    """Records the values of a forward, and leaves it where it uses an expert's memory.

    Attributes:
        values: The values.
        first_number: How many there are before one is made a number, if one is.
    """

    def __init__(self, experts: set[int]) -> None:
        super().__init__()
        self.values: dict[Value, Tensor] = {}
        self.first_number: int | None = None
        self._experts = experts
        self._calls: Counter[tuple[str, Kind]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = name_of(func), tensors_of(result)
        if name == "__int__" and self.first_number is None:
            self.first_number = len(self.values)
        if not tensors:
            return result
        arguments = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        used = {_memory(argument) for argument in arguments} & self._experts
        if used and not {_memory(tensor) for tensor in tensors} <= used:
            raise AllComputed
        kind = kind_of(tensors)
        for output, tensor in enumerate(tensors):
            if not used and not _is_view(name, tensor, arguments):
                value = Value(name, kind, self._calls[name, kind], output)
                self.values[value] = tensor.clone()
        self._calls[name, kind] += 1
        return result


def _is_view(function: str, tensor: Tensor, arguments: Sequence[Tensor]) -> bool:
    """Whether a call only gives another shape to all numbers of an argument."""
    is_method = function.startswith("__")
    in_place = function.startswith("__i") if is_method else function.endswith("_")
    return not in_place and any(
        argument.numel() == tensor.numel() and _memory(argument) == _memory(tensor)
        for argument in arguments
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def values_of_tokens(
    run: Callable[[], Any], tokens: int, width: int
) -> tuple[Any, dict[Value, Tensor]]:
    """Returns what a forward returns, and the floating values ``[..., D]`` of as many tokens."""
    recorded = _UntilExperts(set())
    with torch.no_grad(), recorded:
        result = run()
    found = {
        value: tensor
        for value, tensor in recorded.values.items()
        if tensor.is_floating_point()
        and tensor.shape[-1:] == (width,)
        and tensor.numel() == tokens * width
    }
    return result, found


# --- The weights among them ---


def solve_weights(y_TED: Tensor, expected_TD: Tensor) -> Tensor | None:
    """Returns the weights ``[T, E]`` of the experts' results that sum up to a result, in float64.

    None if no weights do, or if too many would: those of more experts than half of D.
    """
    _, experts, width = y_TED.shape
    if experts > width * _MOST_EXPERTS:
        return None
    columns_TDE, expected_TD1 = y_TED.double().mT, expected_TD.double()[..., None]
    weights_TE1 = torch.linalg.lstsq(columns_TDE, expected_TD1).solution
    error = (columns_TDE @ weights_TE1 - expected_TD1).norm()
    return weights_TE1.squeeze(-1) if error <= _TOLERANCE * expected_TD1.norm() else None


def are_constant(weights_TE: Tensor) -> bool:
    """Whether all tokens have the same weights, as of adapters of which one is on: no choice."""
    tolerance = _TOLERANCE * float(weights_TE.abs().max())
    return bool(((weights_TE - weights_TE[:1]).abs() <= tolerance).all())


def find_routings(
    values: Mapping[Value, Tensor], weights_TE: Tensor, *, channels_first: bool
) -> Iterator[OwnRouting]:
    """Yields routings whose weights these are: one of each form, number of values and K.

    Of several values that are the same, the last one is taken, which has everything in it that may
    drop a token.
    """
    tokens, count = weights_TE.shape
    tolerance = _TOLERANCE * float(weights_TE.abs().max())
    weights_TE = weights_TE.masked_fill(weights_TE.abs() <= tolerance, 0)
    latest = {value: values[value] for value in reversed([*values])}
    # The most choices that any of these tokens has may be all that one can have.
    most = int((weights_TE != 0).sum(dim=1).max())
    known: set[tuple[Form, int, int]] = set()
    for form, choices in itertools.product(get_args(Form), (most, count)):
        for names in _candidates(form, latest, weights_TE):
            tensors = [latest[name] for name in names]
            ids = sum(tensor.numel() for tensor in tensors if is_integer(tensor))
            top_k = ids // tokens if form == "choices" else choices
            if (form, len(names), top_k) in known:
                continue
            nulls = form == "choices" and any(is_integer(t) and t.max() >= count for t in tensors)
            routing = OwnRouting(
                form, names, (), count, top_k, channels_first, null_experts=bool(nulls)
            )
            errors_TE = dense_weights(*routing.choices(tensors, tokens), count) - weights_TE
            if bool((errors_TE.abs() <= tolerance).all()):
                known.add((form, len(names), top_k))
                yield routing


def _candidates(
    form: Form, values: Mapping[Value, Tensor], weights_TE: Tensor
) -> Iterator[tuple[Value, ...]]:
    """Yields the values whose dtypes and numbers are those of a form."""
    tokens, count = weights_TE.shape

    def floating(size: int) -> list[Value]:
        return [v for v, t in values.items() if t.numel() == size and t.is_floating_point()]

    match form:
        case "choices":
            sizes = range(tokens, tokens * count + 1, tokens)
            ids = [v for v, t in values.items() if t.numel() in sizes and _are_ids(t)]
            for value in ids:
                yield from ((value, weights) for weights in floating(values[value].numel()))
                yield (value,)
            ids = [value for value in ids if _are_ids(values[value], count)]
            weights = floating(tokens)
            masks = [v for v, t in values.items() if t.numel() == tokens and t.dtype == torch.bool]
            for columns in ([(weight,) for weight in weights], itertools.product(weights, masks)):
                yield from _by_columns(ids, list(columns), values, weights_TE)
        case "experts":
            yield from ((weights,) for weights in floating(tokens * count))
        case "masked":
            masks = [value for value, tensor in values.items() if tensor.numel() == tokens * count]
            yield from itertools.product(masks, floating(tokens))
        case "slots":
            for value, tensor in values.items():
                if tensor.shape[-2:-1] == (count,) and tensor[..., 0].numel() == tokens * count:
                    yield (value,)
        case "tokens":
            for value, tensor in values.items():
                if tensor.ndim == 2 and len(tensor) == count and _are_ids(tensor, tokens):
                    alike = floating(tensor.numel())
                    shapes = (tensor.shape, (tensor.numel(),))
                    weights = [v for v in alike if values[v].shape in shapes]
                    yield from ((value, weight) for weight in weights)


def _by_columns(
    ids: Sequence[Value],
    columns: Sequence[tuple[Value, ...]],
    values: Mapping[Value, Tensor],
    weights_TE: Tensor,
) -> Iterator[tuple[Value, ...]]:
    """Yields ids ``[T, K]``, or K ids ``[T]``, with K of the columns: a weight, or one and a mask.

    A choice at a time, as there are too many combinations.
    """
    tokens, tolerance = len(weights_TE), _TOLERANCE * float(weights_TE.abs().max())

    def column_of(ids_T: Tensor, remaining_TE: Tensor) -> tuple[Value, ...]:
        """Returns the column that has these experts' weights; empty if none has."""
        wanted_T = remaining_TE.gather(1, ids_T[:, None].long()).squeeze(1)
        factors = [[values[name].reshape(-1).double() for name in column] for column in columns]
        for column, tensors in zip(columns, factors, strict=True):
            weights_T = functools.reduce(torch.mul, tensors)
            if torch.allclose(weights_T, wanted_T, rtol=0, atol=tolerance):
                return column
        return ()

    for value in ids:
        ids_TK = values[value].reshape(tokens, -1)
        found = [column_of(ids_T, weights_TE) for ids_T in ids_TK.unbind(dim=1)]
        if all(found):
            yield (value, *itertools.chain(*found))
    remaining_TE = weights_TE.clone()
    chosen: list[Value] = []
    for value in ids:
        if values[value].numel() == tokens:
            ids_T = values[value].reshape(-1)
            column = column_of(ids_T, remaining_TE)
            if column and remaining_TE.gather(1, ids_T[:, None].long()).any():
                chosen += (value, *column)
                remaining_TE.scatter_(1, ids_T[:, None].long(), 0)
    if chosen:
        yield tuple(chosen)


def _are_ids(tensor: Tensor, count: float = math.inf) -> bool:
    """Whether a tensor may be numbers from 0 to ``count - 1``."""
    if not is_integer(tensor) or not tensor.numel():
        return False
    return int(tensor.min()) >= 0 and int(tensor.max()) < count
