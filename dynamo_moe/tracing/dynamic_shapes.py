"""Which dimensions of the example stay symbolic, and an example that lets them.

torch.export treats a dimension of size 0 or 1 as a constant, so examples of batch 1 are repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

from dynamo_moe import pytree
from dynamo_moe.tracing.arguments import bind_arguments, parts_of, spread_keywords

BATCH = "batch"

DynamicShapes: TypeAlias = (
    Mapping[str, Any] | Sequence[Any] | str | ShapesCollection | AdditionalInputs | None
)
"""``dynamic_shapes`` as a user gives them."""

Labels: TypeAlias = Mapping[int, Any]
"""A tensor's symbolic dimensions, each with its name, its ``Dim``, or a hint (``Dim.DYNAMIC``)."""

_Hint: Any = type(Dim.DYNAMIC)  # It has no public name.
_DIMENSIONS = "a mapping from dimension to name, or a sequence with one entry for each dimension"
_LABELS = (
    "a name, a torch.export.Dim, Dim.DYNAMIC or Dim.AUTO; or None, Dim.STATIC or the example's "
    "size where it is static"
)


class DynamicExample(NamedTuple):
    """An example whose symbolic dimensions have a size of at least 2.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        shapes: ``dynamic_shapes`` for ``torch.export``, by argument; None: all static.
        labels: Per tensor, in the order of the arguments: its symbolic dimensions.
        requested: Per argument of the model's forward, the labels of its tensors that were asked
            for: without those that dimensions have by default.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: dict[str, Any] | None
    labels: list[Labels]
    requested: Mapping[str, list[Labels]] = {}


class _Entry(NamedTuple):
    """A tensor of the example, where it is, and what was asked for its dimensions.

    A dimension that was asked to be static has the label None.
    """

    path: str
    tensor: Tensor
    labels: dict[int, Any]


def resolve(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], requested: DynamicShapes
) -> DynamicExample:
    """Returns the example to trace, with its symbolic dimensions.

    Args:
        model: Its forward's signature names the arguments.
        args: Positional example arguments.
        kwargs: Keyword example arguments.
        requested: ``dynamic_shapes`` of :func:`dynamo_moe.export`.

    Raises:
        ValueError: If ``requested`` names an unknown argument or dimension, has another structure
            than the example, gives a dimension what is no label, or one that its size contradicts.
        TypeError: If the example does not fit the model's forward.
    """
    arguments = bind_arguments(model, args, kwargs)
    if isinstance(requested, (ShapesCollection, AdditionalInputs)):
        collected: Any = requested
        requested = tuple(collected.dynamic_shapes(model, args, kwargs).values())
    if isinstance(requested, Mapping) and not arguments.keys() >= requested.keys():
        # PyTorch's spelling has those of **kwargs inside.
        requested = spread_keywords(model, requested)
    specs = _by_argument(requested, arguments)
    args, kwargs = _distinct((args, kwargs))
    if specs is None:
        return DynamicExample(args, kwargs, None, [])
    arguments = bind_arguments(model, args, kwargs)
    asked = {name: [*_entries(name, value, specs[name])] for name, value in arguments.items()}
    entries = [entry for of_argument in asked.values() for entry in of_argument]
    _check_dims(entries)

    # In an example of a larger batch, a first dimension of 1 only broadcasts.
    batched = any(entry.tensor.ndim and entry.tensor.shape[0] > 1 for entry in entries)
    adding = isinstance(requested, (str, Mapping))
    by_tensor: dict[int, Labels] = {}
    for name, of_argument in asked.items():
        # What is asked for a tensor in a container is all that it has.
        with_batch = adding and (isinstance(arguments[name], Tensor) or not specs[name])
        for entry in of_argument:
            by_tensor[id(entry.tensor)] = _symbolic(entry, with_batch=with_batch, batched=batched)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    labels = [by_tensor.get(id(leaf), {}) for leaf in leaves]
    grown = iter(_grown(leaves, labels))
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(grown), (args, kwargs))
    return DynamicExample(
        args=args,
        kwargs=kwargs,
        shapes=_for_torch(model, args, kwargs, labels),
        labels=labels,
        requested={name: [entry.labels for entry in asked[name]] for name in asked},
    )


def name_of(label: Any) -> str | None:
    """Returns the name of a dimension with a label; None if it has none, as with a hint."""
    if label is None or isinstance(label, _Hint):
        return None
    return label if isinstance(label, str) else str(label.__name__)


def range_of(label: Any) -> tuple[int | None, int | None]:
    """Returns the least and the greatest size that a label admits; None where nothing is said."""
    if not isinstance(label, (Dim, _Hint)):
        return None, None
    # PyTorch has an infinity of its own.
    return label.min, label.max if isinstance(label.max, int) else None


def name_dimensions(model: ir.Model, labels: Sequence[Labels]) -> None:
    """Gives the graph's symbolic dimensions their names, in place of the tracer's symbols."""
    names: dict[str, str] = {}
    for value, dimensions in zip(model.graph.inputs, labels, strict=False):
        for dimension, label in dimensions.items():
            symbol = value.shape[dimension] if value.shape is not None else None
            name = name_of(label)
            if name is None or not isinstance(symbol, ir.SymbolicDim):
                continue
            expression = str(symbol.value)
            if _is_derived(label):  # Such as 2*s77, whose name is 2*batch.
                expression, *_ = re.findall(r"[^\W\d]\w*", expression)
                name = label.root.__name__
            names.setdefault(expression, name)

    def named(dimension: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dimension, int) or dimension.value is None:
            return dimension
        # A dimension can be an expression of symbols, such as 2*s77.
        return ir.SymbolicDim(re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dimension.value))

    outputs = (output for node in model.graph for output in node.outputs)
    for value in (*model.graph.inputs, *outputs):
        if value.shape is not None:
            value.shape = ir.Shape([named(dimension) for dimension in value.shape])


def _distinct(example: Any) -> Any:
    """Returns the example with copies of tensors that it holds twice: they trace as one input."""
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    return pytree.tree_map(separate, example)


# --- What is asked for each tensor ---


def _by_argument(requested: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the request for each argument, ``{}`` for none; None if all are static."""
    if requested is None:
        return None
    if requested == BATCH:
        requested = {}
    known = ", ".join(arguments)
    if isinstance(requested, Mapping):
        unknown = [name for name in requested if name not in arguments]
        if unknown:
            raise ValueError(
                f"dynamic_shapes names {unknown[0]!r}; the example's arguments: {known}"
            )
        return {name: requested.get(name, {}) for name in arguments}
    if not isinstance(requested, (list, tuple)):
        raise ValueError(
            "dynamic_shapes must be 'batch', a mapping or a sequence of arguments, "
            f"a ShapesCollection, AdditionalInputs or None; got {requested!r}"
        )
    if not requested:
        return None
    if len(requested) != len(arguments):
        raise ValueError(
            f"dynamic_shapes is a sequence of {len(requested)}; it must have one entry for each of "
            f"the example's {len(arguments)} arguments: {known}"
        )
    return dict(zip(arguments, requested, strict=True))


def _entries(path: str, value: Any, spec: Any) -> Iterator[_Entry]:
    """Yields the tensors of an argument, with what a part of ``dynamic_shapes`` says of them."""
    parts = parts_of(value)
    if isinstance(value, Tensor):
        yield _Entry(path, value, _asked(path, value, spec))
    elif parts is not None:
        specs = _of_parts(path, value, parts, spec)
        for key, part in parts.items():
            yield from _entries(f"{path}[{key}]", part, specs[key])
    elif spec != {} and not _is_static(spec):
        raise ValueError(
            f"dynamic_shapes gives {spec!r} for '{path}', which is {value!r} and no tensor: the "
            "file has it as a constant; it must be None"
        )


def _of_parts(path: str, value: Any, parts: Mapping[Any, Any], spec: Any) -> Mapping[Any, Any]:
    """Returns the request for each part of a container."""
    if spec is None or spec == {}:
        return dict.fromkeys(parts, spec)
    if isinstance(value, Mapping) and isinstance(spec, Mapping) and spec.keys() == parts.keys():
        return spec
    # PyTorch takes the mappings of other packages, such as a model's output, apart in order.
    in_order = type(value) is not dict and isinstance(spec, (list, tuple))
    if in_order and len(spec) == len(parts):
        return dict(zip(parts, spec, strict=True))
    what = f"keys {', '.join(map(repr, parts))}" if isinstance(value, Mapping) else len(parts)
    raise ValueError(
        f"dynamic_shapes gives {spec!r} for '{path}', which is a {type(value).__name__} of {what}; "
        f"it must have the structure of the example, with {_DIMENSIONS}, for each tensor"
    )


def _asked(path: str, tensor: Tensor, spec: Any) -> dict[int, Any]:
    """Returns the request for each of a tensor's dimensions, None for those that stay static."""
    if spec is None:
        return dict.fromkeys(range(tensor.ndim))
    if not isinstance(spec, (Mapping, list, tuple)):
        raise ValueError(
            f"dynamic_shapes gives {spec!r} for '{path}'; a tensor's is {_DIMENSIONS}, or None"
        )
    if not isinstance(spec, Mapping):
        if len(spec) != tensor.ndim:
            raise ValueError(
                f"dynamic_shapes gives {spec!r} for '{path}', a sequence of {len(spec)}; its "
                f"example has {tensor.ndim} dimensions, and each needs an entry"
            )
        spec = dict(enumerate(spec))
    for dimension in spec:
        if type(dimension) is not int or not 0 <= dimension < tensor.ndim:
            raise ValueError(
                f"dynamic_shapes names dimension {dimension!r} of '{path}', whose example has "
                f"{tensor.ndim} dimensions"
            )
    return {dimension: _label(path, tensor, dimension, spec[dimension]) for dimension in spec}


def _is_static(label: Any) -> bool:
    return label is None or (isinstance(label, _Hint) and label.type is Dim.STATIC.type)


def _label(path: str, tensor: Tensor, dimension: int, label: Any) -> Any:
    """Returns a dimension's label; None if it is static."""
    if type(label) is int:
        if label != tensor.shape[dimension]:
            raise ValueError(
                f"dynamic_shapes gives dimension {dimension} of '{path}' the size {label}; its "
                f"example has size {tensor.shape[dimension]}"
            )
        return None
    if _is_static(label):
        return None
    if isinstance(label, (Dim, _Hint)) or (isinstance(label, str) and label):
        return label
    raise ValueError(
        f"dynamic_shapes gives dimension {dimension} of '{path}' {label!r}; it must be {_LABELS}"
    )


def _check_dims(entries: Iterable[_Entry]) -> None:
    """Raises ValueError if the example's sizes, or two Dims of one name, contradict a Dim."""
    first: dict[str, tuple[Any, int, str]] = {}
    derived: list[tuple[Any, int, str]] = []
    for path, tensor, labels in entries:
        for dimension, label in labels.items():
            if not isinstance(label, Dim):
                continue
            size, where = tensor.shape[dimension], f"dimension {dimension} of '{path}'"
            said = f"dynamic_shapes gives {label!r} to {where}, whose example has size {size}"
            same, known, elsewhere = first.setdefault(label.__name__, (label, size, where))
            if size != known:
                raise ValueError(f"{said}, and to {elsewhere}, which has size {known}")
            if _is_derived(label):
                derived.append((label, size, said))
                continue
            if range_of(label) != range_of(same):
                raise ValueError(
                    f"{said}, and {same!r} to {elsewhere}: dimensions of one name have one range"
                )
            least, greatest = range_of(label)
            grown = _grown_size(size, label)
            if grown < (least or 0) or (greatest is not None and grown > greatest):
                raise ValueError(f"{said}: it must be in the range, and at least 2")
    for label, size, said in derived:
        _check_derived(label, size, said, first.get(label.root.__name__))


def _check_derived(dim: Any, size: int, said: str, root: tuple[Any, int, str] | None) -> None:
    """Raises ValueError if a size is not what a Dim computes from another dimension's."""
    if root is not None and dim.fn(root[1]) != size:
        raise ValueError(f"{said}; with the size of {root[2]} it is {dim.fn(root[1])}")
    start, step = dim.fn(0), dim.fn(1) - dim.fn(0)  # PyTorch's are linear.
    if (size - start) % step:
        raise ValueError(f"{said}, for which {dim.root.__name__} is no integer")


def _is_derived(label: Any) -> bool:
    """Whether a label is a ``Dim`` that is computed from another one, such as ``2 * batch``."""
    return isinstance(label, Dim) and hasattr(label, "root")


# --- The example ---


def _symbolic(entry: _Entry, *, with_batch: bool, batched: bool) -> Labels:
    """Returns a tensor's symbolic dimensions, the batch among them if it is added to the others."""
    tensor = entry.tensor
    default = {} if tensor.ndim == 0 or (batched and tensor.shape[0] == 1) else {0: BATCH}
    labels = {**(default if with_batch else {}), **entry.labels}
    return {
        dimension: label
        for dimension, label in labels.items()
        if label is not None
        # With Dim.AUTO a size of 1 is symbolic where it is no doubt a batch.
        and (tensor.shape[dimension] > 1 or dimension in default or not _is_auto(label))
    }


def _is_auto(label: Any) -> bool:
    return isinstance(label, _Hint) and label.type is Dim.AUTO.type


def _grown_size(size: int, label: Any) -> int:
    """Returns the size with which a dimension of the example is symbolic in a trace."""
    return size if size > 1 or _is_derived(label) else max(2, range_of(label)[0] or 0)


def _grown(tensors: Sequence[Tensor], labels: Sequence[Labels]) -> Iterator[Tensor]:
    """Yields an example's tensors, repeated so that their symbolic dimensions are above 1."""
    both = [*zip(tensors, labels, strict=True)]
    grown = {
        name_of(label): _grown_size(tensor.shape[dimension], label)
        for tensor, of_tensor in both
        for dimension, label in of_tensor.items()
        if isinstance(label, Dim) and tensor.shape[dimension] < 2
    }
    for tensor, of_tensor in both:
        repeated = tensor
        for dimension, label in of_tensor.items():
            size = _grown_size(tensor.shape[dimension], label)
            if _is_derived(label) and label.root.__name__ in grown:
                size = int(label.fn(grown[label.root.__name__]))
            repeated = _repeated(repeated, dimension, size)
        yield repeated


def _repeated(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Returns a tensor of another size in one dimension, which repeats what is there."""
    old = tensor.shape[dimension]
    shape = [*tensor.shape[:dimension], size, *tensor.shape[dimension + 1 :]]
    if old == size:
        return tensor
    if old == 0:
        return tensor.new_zeros(shape)
    if old == 1:
        return tensor.expand(shape).contiguous()
    return tensor.index_select(dimension, torch.arange(size, device=tensor.device) % old)


def _for_torch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], labels: Sequence[Labels]
) -> dict[str, Any]:
    """Returns ``dynamic_shapes`` as ``torch.export`` takes them; it has no names without a Dim."""
    shapes = ShapesCollection()
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    for tensor, of_tensor in zip(tensors, labels, strict=True):
        if of_tensor:
            shapes[tensor] = {
                dimension: Dim.DYNAMIC if isinstance(label, str) else label
                for dimension, label in of_tensor.items()
            }
    return spread_keywords(model, shapes.dynamic_shapes(model, args, kwargs))
