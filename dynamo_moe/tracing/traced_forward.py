"""What a model's forward is while it is traced, so that a trace knows its sizes and its code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from dynamo_moe.private.pytorch import attributes_of
from dynamo_moe.tracing.arguments import bind_arguments, keywords_parameter, tensors_of
from dynamo_moe.tracing.dynamic_shapes import DynamicExample, Labels, name_of


@contextlib.contextmanager
def sizes_of_one_name(model: nn.Module, example: DynamicExample) -> Iterator[None]:
    """Lets a trace know before the model runs which sizes are equal: those given one name.

    It would find out on the way, where the model combines them, and could use nothing that it had
    found for either size before. Sizes that differ in the example are left alone, and so is
    ``batch`` where nobody asked for it: the first dimension of a mask may be no batch.
    """
    original = model.forward
    example_sizes = [*_named_sizes(model, example.args, example.kwargs, example.requested)]
    if len(set(example_sizes)) == len(example_sizes):
        yield
        return

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first: dict[Any, Any] = {}
        sizes = _named_sizes(model, args, kwargs, example.requested)
        for named, (_, size) in zip(example_sizes, sizes, strict=True):
            # The comparison is a condition of the trace, which replaces one by the other.
            bool(first.setdefault(named, size) == size)
        return original(*args, **kwargs)

    with _changed(model, "forward", forward):
        yield


def _named_sizes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    requested: Mapping[str, list[Labels]],
) -> Iterator[tuple[str, Any]]:
    """Yields the names that were asked for, each with its size in these arguments."""
    arguments = bind_arguments(model, args, kwargs)
    for argument, of_tensors in requested.items():
        for tensor, labels in zip(tensors_of(arguments[argument]), of_tensors, strict=True):
            for dimension, label in labels.items():
                name = name_of(label)
                if name is not None:
                    yield name, tensor.shape[dimension]


@contextlib.contextmanager
def keywords_named(model: nn.Module, example: DynamicExample) -> Iterator[None]:
    """Gives the keywords that a model's ``**kwargs`` collects parameters of their own.

    PyTorch 2.13 takes no dynamic shapes for them otherwise.
    """
    original = model.forward
    signature = inspect.signature(original)
    if keywords_parameter(signature) is None:
        yield
        return

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [name for name in example.kwargs if name not in {parameter.name for parameter in own}]
    collected = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = signature.replace(parameters=[*own, *collected])  # type: ignore[attr-defined]
    with _changed(model, "forward", forward):
        yield


@contextlib.contextmanager
def code_importable(model: nn.Module) -> Iterator[None]:
    """Lets Dynamo import the modules of a model's code, also of code that was run without one.

    As by ``runpy``, or by ``importlib`` without an entry in ``sys.modules``. It looks variables up
    in the module of that name.

    Raises:
        ImportError: If that is another one.
    """
    added: dict[str, ModuleType] = {}
    owners: dict[str, int] = {}
    try:
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            forward: Any = vars(kind).get("forward")
            variables = getattr(inspect.unwrap(forward), "__globals__", {})
            name = variables.get("__name__")
            if not isinstance(name, str):
                continue
            if name not in sys.modules:
                sys.modules[name] = added[name] = ModuleType(name)
                vars(added[name]).update(variables)
                owners[name] = id(variables)
            if owners.get(name, id(vars(sys.modules[name]))) != id(variables):
                raise ImportError(f"{kind.__qualname__} is not of the module {name} that is loaded")
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object an attribute of its own until the context ends."""
    absent = object()
    before = attributes_of(owner).get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
