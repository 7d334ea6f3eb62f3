"""Which dimensions of the example stay symbolic, and an example that lets them.

torch.export treats a dimension of size 0 or 1 as a constant, so examples of batch 1 are repeated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
from torch import Tensor, nn
from torch.export import Dim

from dynamo_moe import pytree
from dynamo_moe.tracing.values import changed

BATCH = "batch"


class DynamicExample(NamedTuple):
    """An example whose symbolic dimensions have a size of at least 2.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        shapes: ``dynamic_shapes`` for ``torch.export``, by argument; None: all static.
        labels: Per tensor, in the order of the arguments: dimension to its name.
        requested: The names that were asked for, by argument, as :func:`resolve` takes them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: dict[str, Any] | None
    labels: list[Mapping[int, Any]]
    requested: Mapping[str, Any] = {}


def resolve(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    requested: Mapping[str, Any] | str | None,
) -> DynamicExample:
    """Returns the example to trace, with its symbolic dimensions.

    Args:
        model: Its forward's signature names the arguments.
        args: Positional example arguments.
        kwargs: Keyword example arguments.
        requested: ``"batch"``: dimension 0 of every tensor; a mapping from argument to
            ``{dimension: name}`` adds to that, and ``{0: None}`` takes the batch away; None: all
            static, here and for an argument. A name is a string or a ``torch.export.Dim``.

    Raises:
        ValueError: If ``requested`` names an unknown argument or dimension, or has anything else
            than a name.
        TypeError: If the example does not fit the model's forward.
    """
    args, kwargs = _distinct((args, kwargs))
    arguments = _bound(model, args, kwargs)
    if requested is None:
        return DynamicExample(args, kwargs, None, [])
    if requested == BATCH:
        requested = {}
    if not isinstance(requested, Mapping):
        raise ValueError(f"dynamic_shapes must be 'batch', a mapping or None; got {requested!r}")
    unknown = sorted(set(requested) - set(arguments))
    if unknown:
        known = ", ".join(arguments)
        raise ValueError(f"dynamic_shapes names {unknown[0]!r}; the example's arguments: {known}")

    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # In an example of a larger batch, a first dimension of 1 only broadcasts.
    batched = any(leaf.ndim and leaf.shape[0] > 1 for leaf in leaves)
    shapes = {
        name: _dimensions(name, value, requested.get(name, {}), batched)
        for name, value in arguments.items()
    }
    found = {id(leaf): dimensions for leaf, dimensions in _tensors(arguments, shapes)}
    labels = [found.get(id(leaf), {}) for leaf in leaves]
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda leaf: _grow(leaf, found.get(id(leaf), {})), (args, kwargs)
    )
    dynamic = pytree.tree_map_only(str, lambda label: Dim.DYNAMIC, shapes)
    return DynamicExample(args, kwargs, dynamic, labels, requested)


@contextlib.contextmanager
def sizes_of_one_name(model: nn.Module, example: DynamicExample) -> Iterator[None]:
    """Lets a trace know before the model runs which sizes are equal: those given one name.

    It would find out on the way, where the model combines them, and could use nothing that it had
    found for either size before. Sizes that differ in the example are left alone, and so is
    ``batch`` where nobody asked for it: the first dimension of a mask may be no batch.
    """
    original = model.forward
    own = [*_named_sizes(model, example.args, example.kwargs, example.requested)]
    if len(set(own)) == len(own):
        yield
        return

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first: dict[Any, Any] = {}
        sizes = _named_sizes(model, args, kwargs, example.requested)
        for named, (_, size) in zip(own, sizes, strict=True):
            # The comparison is a condition of the trace, which replaces one by the other.
            bool(first.setdefault(named, size) == size)
        return original(*args, **kwargs)

    with changed(model, "forward", forward):
        yield


def _named_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], requested: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the names that were asked for, each with its size in these arguments."""
    arguments = _bound(model, args, kwargs)
    named = {name: requested.get(name) for name in arguments}
    for tensor, dimensions in _tensors(arguments, named):
        for dimension, label in dimensions.items():
            if label is not None:
                yield _name(label), tensor.shape[dimension]


def name_dimensions(model: ir.Model, labels: Sequence[Mapping[int, Any]]) -> None:
    """Gives the graph's symbolic dimensions their labels, in place of the tracer's symbols."""
    names: dict[str, str] = {}
    for value, dimensions in zip(model.graph.inputs, labels, strict=False):
        for dimension, label in dimensions.items():
            symbol = value.shape[dimension] if value.shape is not None else None
            if label is not None and isinstance(symbol, ir.SymbolicDim):
                names.setdefault(str(symbol.value), _name(label))

    def named(dimension: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dimension, int) or dimension.value is None:
            return dimension
        # A dimension can be an expression of symbols, such as 2*s77.
        return ir.SymbolicDim(re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dimension.value))

    outputs = (output for node in model.graph for output in node.outputs)
    for value in (*model.graph.inputs, *outputs):
        if value.shape is not None:
            value.shape = ir.Shape([named(dimension) for dimension in value.shape])


def _name(label: Any) -> str:
    """Returns the name that a dimension was given, as a string or a ``torch.export.Dim``."""
    return str(getattr(label, "__name__", label))


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the example by argument of the model's forward."""
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise TypeError(
            f"the example does not fit {type(model).__name__}.forward({takes}): {error}"
        ) from None


def _distinct(example: Any) -> Any:
    """Returns the example with copies of tensors that it holds twice: they trace as one input."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    return pytree.tree_map(own, example)


def _dimensions(name: str, value: Any, requested: Any, batched: bool) -> Any:
    """Returns the argument's entry of ``dynamic_shapes``."""
    if requested is None:
        return pytree.tree_map(lambda _: None, value)
    if not isinstance(value, Tensor):
        entry = requested or pytree.tree_map(lambda leaf: _default(leaf, batched) or None, value)
        try:
            parts = list(_tensors(value, entry))
        except (LookupError, TypeError):
            raise ValueError(
                f"dynamic_shapes gives {entry!r} for {name!r}; it must have the structure of the "
                "example, with a mapping from dimension to name for each tensor"
            ) from None
        for tensor, dimensions in parts:
            _check(name, tensor, dimensions)
        return entry
    requested = _by_dimension(requested)
    _check(name, value, requested)
    dimensions = {**_default(value, batched), **requested}
    return {dimension: label for dimension, label in dimensions.items() if label} or None


def _by_dimension(requested: Any) -> Any:
    return dict(enumerate(requested)) if isinstance(requested, (list, tuple)) else requested


def _check(name: str, tensor: Tensor, requested: Any) -> None:
    if not isinstance(requested, Mapping):
        raise ValueError(
            f"dynamic_shapes gives {requested!r} for {name!r}; a tensor's is a mapping from "
            "dimension to name, or a sequence of names"
        )
    for dimension, label in requested.items():
        if not (isinstance(dimension, int) and 0 <= dimension < tensor.ndim):
            raise ValueError(
                f"dynamic_shapes names dimension {dimension!r} of {name!r}, whose example has "
                f"{tensor.ndim} dimensions"
            )
        if not (label is None or isinstance(label, (str, Dim))):
            raise ValueError(
                f"dynamic_shapes names dimension {dimension} of {name!r} {label!r}; it must be a "
                "string, a named torch.export.Dim, or None for a static dimension"
            )


def _default(leaf: Any, batched: bool) -> dict[int, str]:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or (batched and leaf.shape[0] == 1):
        return {}
    return {0: BATCH}


def _tensors(value: Any, shapes: Any) -> Iterator[tuple[Tensor, Mapping[int, Any]]]:
    """Yields the argument's tensors with their dynamic dimensions."""
    if isinstance(value, Tensor):
        yield value, _by_dimension(shapes or {})
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, shapes[key] if shapes else None)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _tensors(item, shapes[place] if shapes else None)


def _grow(tensor: Tensor, dimensions: Mapping[int, Any]) -> Tensor:
    for dimension in dimensions:
        size = tensor.shape[dimension]
        if size < 2:
            shape = list(tensor.shape)
            shape[dimension] = 2
            tensor = tensor.expand(shape).contiguous() if size else tensor.new_zeros(shape)
    return tensor
