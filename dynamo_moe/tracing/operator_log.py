"""A log of a model's computation: each operator that runs, with where its tensors come from.

The model's own code runs on tensors of the meta device, which have no values, so that weights need
not exist. An operator has computed the result's shape once for each form of its arguments; a
further block of a model costs little more than its Python code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.private.pytorch import OpOverload, TorchDispatchMode, schema_of

_aten = torch.ops.aten
META = torch.device("meta")
"""Where tensors have no values."""

# What gives the values that it is given. A trace has more of them, or fewer: its tensors may have
# other strides than those of the meta device.
_SAME_VALUES = frozenset(
    getattr(_aten, name).default
    for name in ("alias", "clone", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy")
)
# What the shape of the result says all about.
_RESHAPING = frozenset(
    getattr(_aten, name).default
    for name in ("_reshape_alias", "_unsafe_view", "expand", "reshape", "view")
)
# What code has just made of numbers is nobody else's, though its schema says a view.
_FRESH = frozenset({_aten.lift.default, _aten.lift_fresh.default})
_RESHAPE, _SLICE = "reshape", "slice"
# Where a tensor is made says nothing about its values.
_DEVICE_OPTIONS = frozenset({"device", "pin_memory"})


class Record(NamedTuple):
    """One operator that ran.

    Attributes:
        form: The number of the operator, its plain arguments, and its tensors' shapes and dtypes.
        uses: The tensors among its arguments, as numbers of values.
        results: The number of the first value that it returned.
        writes: The memory that it changed in place, by number.
    """

    form: int
    uses: tuple[int, ...]
    results: int
    writes: tuple[int, ...] = ()


class _Traits(NamedTuple):
    """Facts about an operator that are known before it runs.

    Attributes:
        number: One of its own; operators take long to hash.
        written: The arguments, by position or name, that it changes in place.
        viewed: The argument that its results are views of; None if they have memory of their own.
        makes_tensors: Whether it takes a device and no tensor.
        same_values: Whether it gives the values that it is given.
        view: For what its result's shape says nearly all about, a name; else empty.
    """

    number: int
    written: tuple[int | str, ...]
    viewed: int | None
    makes_tensors: bool
    same_values: bool
    view: str


class Forms:
    """Numbers of the forms of operators, and what is known of these; logs share them."""

    def __init__(self) -> None:
        self._traits: dict[OpOverload, _Traits] = {}
        self._numbers: dict[Any, int] = {}
        self.layouts: dict[Any, Any] = {}
        """By form, and strides and offset of its tensors, the layouts of its results."""

    def traits(self, operator: OpOverload) -> _Traits:
        """Returns the facts about an operator."""
        traits = self._traits.get(operator)
        if traits is None:
            traits = self._traits[operator] = _traits(operator, len(self._traits))
        return traits

    def number(self, form: Any) -> int:
        """Returns the number of a form."""
        return self._numbers.setdefault(form, len(self._numbers))


class OperatorLog(TorchDispatchMode):
    """Logs the operators that run in its context.

    Values are numbers: results from 0 on, in order; what was there before, such as a parameter, an
    input or a constant, from -1 on downwards. Where memory is changed in place, the result and each
    further tensor of that memory are new values; copies that were made before are not.

    Attributes:
        records: What ran.
        origins: By number (-1 is the first), what a value is that no operator of the log returned.
        values: How many results there are.
        memories: How many operators' results have memory of their own: it is numbered from 0 on,
            that of a value which was there before by the value.
    """

    def __init__(self, forms: Forms, most_records: int | None = None) -> None:
        """Begins a log.

        Args:
            forms: What logs that are compared have in common.
            most_records: How many operators may run; None: any number.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.origins: list[Any] = []
        self.values = self.memories = 0
        self._forms, self._most_records = forms, most_records
        self._by_origin: dict[Any, int] = {}
        self._numbers: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        # By memory, the ids of its tensors.
        self._sharing: dict[int, list[int]] = {}
        # Whether any tensor of the log may have values, as constants have.
        self._has_values = False
        # An id names an object only while it lives.
        self._alive: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Asking Dynamo not to compile takes a third of an operator's time.

    def add_origin(self, tensor: Tensor, origin: Any) -> None:
        """Gives a tensor a name that is equal in the logs that are compared."""
        self._numbers[id(tensor)] = number = self._number_of(origin)
        self._set_memory(tensor, number)
        self._alive.append(tensor)
        self._has_values |= not tensor.is_meta

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor; one that no operator returned is a constant."""
        number = self._numbers.get(id(tensor))
        if number is None:
            self.add_origin(tensor, _constant(tensor))
            number = self._numbers[id(tensor)]
        return number

    def number_of(self, origin: Any) -> int | None:
        """Returns the number of an origin; None if nothing has it."""
        return self._by_origin.get(origin)

    def _number_of(self, origin: Any) -> int:
        number = self._by_origin.get(origin)
        if number is None:
            self.origins.append(origin)
            number = self._by_origin[origin] = -len(self.origins)
        return number

    def __torch_dispatch__(
        self, operator: Any, _: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        traits = self._forms.traits(operator)
        kwargs = dict(kwargs) if kwargs else {}
        if traits.makes_tensors:
            kwargs["device"] = META
        uses: list[Tensor] = []
        key = traits.number, *[self._description(value, uses) for value in args]
        for name in sorted(kwargs) if kwargs else ():
            if name not in _DEVICE_OPTIONS and kwargs[name] is not None:
                key = *key, name, self._description(kwargs[name], uses)
        form = self._forms.number(key)
        numbers = tuple(map(self.number, uses))
        written = self._written(traits, args, kwargs, uses) if traits.written else []
        writes = tuple([self._memory[id(tensor)] for tensor in written])
        before = [*zip(writes, map(self.number, written), strict=True)]
        result = self._run(operator, args, kwargs, form, uses, reused=not writes)
        if traits.view:
            cut = _cut(args) if traits.view == _SLICE else ()
            form = self._forms.number((traits.view, *key[1:2], cut, result.shape))
        viewed = None if traits.viewed is None else _tensors(args[traits.viewed])[0]
        if traits.same_values or (traits.view and result.shape == uses[0].shape):
            if viewed is None and not writes:
                self._memory.pop(id(result), None)  # Of a constant, which it may be itself.
            self._add_tensor(result, numbers[0], viewed)
            return result
        self.records.append(Record(form, numbers, self.values, writes))
        if self._most_records is not None and len(self.records) > self._most_records:
            raise RuntimeError(f"more than {self._most_records} operators run")
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add_tensor(tensor, self.values, viewed)
                self.values += 1
        if written:
            now = [self._numbers[id(tensor)] for tensor in written]
            self._renumber(dict(zip(before, now, strict=True)), self.records[-1].results)
        return result

    def _add_tensor(self, tensor: Tensor, number: int, viewed: Tensor | None) -> None:
        """Adds a result: a view of a tensor, or one that was changed in place, or a new one."""
        if viewed is not None:
            self._set_memory(tensor, self._memory[id(viewed)])
        elif id(tensor) not in self._memory:
            self._set_memory(tensor, self.memories)
            self.memories += 1
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def _renumber(self, changed: Mapping[tuple[int, int], int], first: int) -> None:
        """Gives all tensors of memory that was changed in place new numbers.

        Args:
            changed: By the memory and the former number of the tensors that an operator changed,
                their present numbers.
            first: The first value that it returned: those from there on are new.
        """
        for memory in dict.fromkeys(memory for memory, _ in changed):
            former = {
                tensor: self._numbers[tensor]
                for tensor in self._sharing[memory]
                if self._memory.get(tensor) == memory and self._numbers[tensor] < first
            }
            new: dict[int, int] = {}
            for number in sorted({*former.values()}):
                new[number] = changed.get((memory, number), number)
                if new[number] < first:
                    new[number] = self.values
                    self.values += 1
            self._numbers.update({tensor: new[number] for tensor, number in former.items()})

    def _set_memory(self, tensor: Tensor, memory: int) -> None:
        self._memory[id(tensor)] = memory
        self._sharing.setdefault(memory, []).append(id(tensor))

    def _description(self, value: Any, uses: list[Tensor]) -> Any:
        """Returns a key, equal for arguments of one form; collects the tensors among them."""
        if isinstance(value, Tensor):
            uses.append(value)
            return value.shape, value.dtype
        kind = type(value)
        if kind is list or kind is tuple:
            return tuple([self._description(part, uses) for part in value])
        # 0.0 is equal to -0.0, and 1 to True.
        return repr(value) if kind is float else (kind, value)

    def _run(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        form: int,
        tensors: Sequence[Tensor],
        *,
        reused: bool,
    ) -> Any:
        """Runs an operator; where its form has run before, makes results of the same layouts."""
        real = self._has_values and sum(not tensor.is_meta for tensor in tensors)
        if real and real == len(tensors):
            return operator(*args, **kwargs)  # Of constants alone.
        key = form, *[(tensor.stride(), tensor.storage_offset()) for tensor in tensors]
        if reused and (layouts := self._forms.layouts.get(key)) is not None:
            return _made(layouts)
        if real:
            args, kwargs = pytree.tree_map_only(Tensor, like_on_meta, (args, kwargs))
        if "device" in kwargs:  # A model may name the one that it is on.
            kwargs = {**kwargs, "device": META}
        result = operator(*args, **kwargs)
        if reused and not any(tensor.storage_offset() for tensor in _tensors(result)):
            self._forms.layouts[key] = _layouts(result)
        return result

    def _written(
        self, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any], uses: list[Tensor]
    ) -> list[Tensor]:
        """Returns the tensors that an operator changes in place.

        Raises:
            RuntimeError: If it would change the values of a constant that others read, or make
                values of one that has none.
        """
        written = _tensors(
            [args[at] if isinstance(at, int) else kwargs[at] for at in traits.written]
        )
        mixed = any(tensor.is_meta for tensor in uses)
        for tensor in written:
            if not tensor.is_meta and (mixed or self._memory[id(tensor)] < 0):
                raise RuntimeError("a constant is changed in place")
        return written


def _cut(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what of a slice's arguments its result's shape does not say."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dimension, start, _, step = tuple(args[1:]) + defaults[len(args) - 1 :]
    return dimension, start or 0, step


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _traits(operator: OpOverload, number: int) -> _Traits:
    schema = schema_of(operator)
    marked = {
        argument.name if argument.kwarg_only else position: argument.alias_info
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    }
    # A list of results, as ``split`` has, is marked and does not say of which argument it is.
    returned = [info.before_set for one in schema.returns if (info := one.alias_info) is not None]
    viewed = [
        argument
        for argument, info in marked.items()
        if not info.is_write
        and any(not names or not names.isdisjoint(info.before_set) for names in returned)
    ]
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    takes_device = any(argument.name == "device" for argument in schema.arguments)
    return _Traits(
        number,
        tuple(argument for argument, info in marked.items() if info.is_write),
        viewed[0] if viewed and operator not in _FRESH else None,
        takes_device and not takes_tensors,
        operator in _SAME_VALUES,
        _SLICE if operator is _aten.slice.Tensor else _RESHAPE if operator in _RESHAPING else "",
    )


def _constant(tensor: Tensor) -> Any:
    """Returns a key, equal for constants of equal values."""
    layout = "constant", tensor.dtype, tensor.shape, tensor.stride()
    if tensor.is_meta:
        return *layout, id(tensor)
    numbers: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return *layout, hashlib.sha256(numbers).digest()


def like_on_meta(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape, strides and dtype on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _layouts(result: Any) -> Any:
    """Returns the layouts of an operator's results, nested as they are."""
    if isinstance(result, Tensor):
        return result.shape, result.stride(), result.dtype
    if isinstance(result, (list, tuple)):
        return [_layouts(part) for part in result]
    return None


def _made(layouts: Any) -> Any:
    if layouts is None:
        return None
    if isinstance(layouts, list):
        return [_made(part) for part in layouts]
    shape, strides, dtype = layouts
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)
