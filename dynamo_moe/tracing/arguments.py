"""The arguments of a model's forward by name, and the tensors in them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dynamo_moe import pytree


def keywords_parameter(signature: inspect.Signature) -> str | None:
    """Returns the name of a forward's ``**kwargs``, if it has them."""
    names = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return names[0] if names else None


def bind_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the example by argument of the model's forward, those of ``**kwargs`` by name."""
    signature = inspect.signature(model.forward)
    try:
        return spread_keywords(model, signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise TypeError(
            f"the example does not fit {type(model).__name__}.forward({takes}): {error}"
        ) from None


def constants_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, bool | int | float | str]:
    """Returns the numbers and texts of an example by argument, where they are not its default."""
    parameters = inspect.signature(model.forward).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {
        name: value
        for name, value in bind_arguments(model, args, kwargs).items()
        if type(value) in {bool, int, float, str} and value != defaults.get(name)
    }


def spread_keywords(model: nn.Module, by_argument: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping by argument with the entries of ``**kwargs`` beside the others."""
    collecting = keywords_parameter(inspect.signature(model.forward))
    spread = dict(by_argument)
    inner = spread.pop(collecting, None) if collecting is not None else None
    return {**spread, **(inner or {})}


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Returns the parts of a container by key or place; None if a value is none."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (list, tuple)):
        parts = pytree.tree_leaves(value, is_leaf=lambda part: part is not value)
        if len(parts) == 1 and parts[0] is value:
            return None
        value = parts
    return dict(enumerate(value))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of an argument, in the order of its parts."""
    if isinstance(value, Tensor):
        yield value
    else:
        for part in (parts_of(value) or {}).values():
            yield from tensors_of(part)
