"""Results of operators on tensors without values, found once for each form of their arguments.

With symbolic sizes PyTorch takes half of a trace to find the shapes, strides and dtypes of results,
and the blocks of a model ask for the same again. Its own cache takes longer to look them up.
:func:`remembered` takes what PyTorch calls, and returns what takes its place;
``dynamo_moe.tracing.shortcuts`` puts it there for the time of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_moe.private.pytorch import FakeTensor, OpOverload, schema_of, storage_key

try:
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import proxy_tensor
except ImportError:  # As tracer.missing() says; then nothing is replaced.
    fake_tensor = proxy_tensor = None  # type: ignore[assignment]

# What an operator gives depends on more than the form of its arguments, or is no new tensor.
_OTHERWISE = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
        torch.Tag.nondeterministic_seeded,
    }
)
_PLAIN = frozenset(
    {
        *(bool, complex, float, int, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)


def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns PyTorch's computation of a result without values, done once for equal arguments.

    Equal are sizes of one expression, as long as nothing new is found out about sizes; and where
    one size stands twice among the arguments, one does so again. A size of the result that is one
    of the arguments' sizes becomes theirs, each time: a trace knows sizes by what has them.
    """
    results: dict[Hashable, _Result] = {}

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _form(mode, func, args, kwargs)
        if form is None:
            return original(mode, func, types, args, kwargs)
        known = results.get(form.key)
        if known is not None:
            return known.again(mode, form)
        knowledge = _knowledge(mode.shape_env)
        result = original(mode, func, types, args, kwargs)
        described = _described(result, form)
        if described is not None and knowledge == _knowledge(mode.shape_env):
            results[form.key] = described
        return result

    return dispatch


class _Form(NamedTuple):
    """The arguments of operators, as far as a result without values depends on them."""

    key: Hashable
    sizes: list[Any]  # the symbolic ones, each once
    tensors: list[FakeTensor]

    def index_of(self, size: Any) -> int | None:
        """Returns which of the arguments' symbolic sizes a size is; None if it is a new one."""
        if type(size) is not torch.SymInt:
            return None
        same = (index for index, known in enumerate(self.sizes) if known.node is size.node)
        return next(same, None)


@dataclass
class _Result:
    """A result, by what the next of its kind is made of."""

    dtype: torch.dtype
    device: torch.device
    rank: int
    sizes: list[tuple[Any, int | None]]  # shape, strides, offset; each with its place in a form's
    is_view: bool  # of the one tensor that is given
    is_dense: bool | None = None  # whether its strides are those of a new tensor

    def again(self, mode: Any, form: _Form) -> FakeTensor:
        """Returns such a result for arguments of the same form."""
        form_sizes = form.sizes
        sizes = [size if index is None else form_sizes[index] for size, index in self.sizes]
        shape, strides = sizes[: self.rank], sizes[self.rank : -1]
        with fake_tensor.in_kernel_invocation_manager(mode):
            if self.is_view:
                tensor = torch.as_strided(form.tensors[0], shape, strides, sizes[-1])
            else:
                tensor = self._new(shape, strides)
        return FakeTensor(mode, tensor, self.device)

    def _new(self, shape: Sequence[Any], strides: Sequence[Any]) -> Tensor:
        if self.is_dense is not False:
            # Unlike one with given strides, it is known to be contiguous. Otherwise a trace would
            # see how that is found out.
            tensor = torch.empty(shape, dtype=self.dtype, device="meta")
            if self.is_dense is None:
                self.is_dense = [*map(_expression, tensor.stride())] == [*map(_expression, strides)]
            if self.is_dense:
                return tensor
        return torch.empty_strided(shape, strides, dtype=self.dtype, device="meta")


def _knowledge(environment: Any) -> Hashable:
    """Returns a key that changes when anything new is found out about symbolic sizes."""
    return environment._version_counter, len(environment.guards)


def _expression(size: Any) -> Any:
    return size.node.expr if type(size) is torch.SymInt else size


def _described(result: Any, form: _Form) -> _Result | None:
    """Returns a recipe for results of this form; None if there is none."""
    if type(result) is not FakeTensor or not _is_plain(result) or result.requires_grad:
        return None
    first, *others = form.tensors
    memory = storage_key(result)
    is_view = any(storage_key(tensor) == memory for tensor in form.tensors)
    if is_view:
        # Strides do not express what view_as_real does.
        if others or result is first or result.dtype != first.dtype:
            return None
    elif result.storage_offset() != 0:
        return None
    numbers = (*result.shape, *result.stride(), result.storage_offset())
    if not _symbols(numbers) <= _symbols(form.sizes):  # It is read from data.
        return None
    sizes = [(number, form.index_of(number)) for number in numbers]
    return _Result(result.dtype, result.fake_device, result.ndim, sizes, is_view)


def _form(mode: Any, operator: Any, args: Any, kwargs: Any) -> _Form | None:
    """Returns the form of an operator's arguments; None if more than that decides its result."""
    # PyTorch 2.11 does not count what it finds out. Of sizes that are traced, too, each operation
    # must be seen.
    found_out = getattr(mode.shape_env, "_replacements_version_counter", None)
    if (
        found_out is None
        or not _is_suitable(operator)
        or mode.propagate_real_tensors
        or proxy_tensor.get_proxy_mode() is not None
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    ):
        return None
    reader = _Reader(mode)
    if not (reader.reads(args) and reader.reads(kwargs) and reader.tensors):
        return None
    state = (mode, found_out, _knowledge(mode.shape_env))
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return _Form((operator, *state, *modes, *reader.parts), reader.sizes, reader.tensors)


@functools.cache
def _is_suitable(operator: Any) -> bool:
    """Whether an operator of PyTorch's own makes one tensor of what it is given, and no more."""
    if not isinstance(operator, OpOverload) or operator.namespace not in {"aten", "prims"}:
        return False
    schema = schema_of(operator)
    return (
        not schema.is_mutable
        and [str(result.type) for result in schema.returns] == ["Tensor"]
        and _OTHERWISE.isdisjoint(operator.tags)
        and not schema.name.startswith("aten::lift")
    )


class _Reader:
    """Reads arguments into a flat sequence, which is equal for those of the same form alone."""

    def __init__(self, mode: Any) -> None:
        self.parts: list[Any] = []
        self.sizes: list[Any] = []
        self.tensors: list[FakeTensor] = []
        self._mode = mode
        self._indices: dict[int, int] = {}

    def reads(self, value: Any) -> bool:
        """Reads a value; False if it may say more than its form does."""
        kind = type(value)
        if kind is FakeTensor:
            return self._reads_tensor(value)
        if kind in _PLAIN:
            self.parts += (kind, value)
        elif kind is torch.SymInt:
            self._read_sizes((value,))
        elif isinstance(value, (list, tuple)):
            self.parts += (list, len(value))
            return all(map(self.reads, value))
        elif isinstance(value, dict):
            self.parts += (dict, *value)
            return all(map(self.reads, value.values()))
        else:
            return False
        return True

    def _reads_tensor(self, tensor: FakeTensor) -> bool:
        if tensor.fake_mode is not self._mode or not _is_plain(tensor):
            return False
        self.tensors.append(tensor)
        shape = tensor.shape
        self.parts += (FakeTensor, tensor.dtype, tensor.fake_device, tensor.requires_grad)
        self.parts.append(len(shape))
        self._read_sizes((*shape, *tensor.stride(), tensor.storage_offset()))
        return True

    def _read_sizes(self, sizes: Iterable[Any]) -> None:
        for size in sizes:
            if type(size) is torch.SymInt:
                node = size.node
                index = self._indices.setdefault(id(node), len(self.sizes))
                if index == len(self.sizes):
                    self.sizes.append(size)
                self.parts.append((index, node.expr))
            else:
                self.parts.append(size)


def _symbols(sizes: Iterable[Any]) -> set[Any]:
    symbolic = (size for size in sizes if type(size) is torch.SymInt)
    return {symbol for size in symbolic for symbol in size.node.expr.free_symbols}


def _is_plain(tensor: FakeTensor) -> bool:
    return (
        tensor.constant is None
        and tensor.real_tensor is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
