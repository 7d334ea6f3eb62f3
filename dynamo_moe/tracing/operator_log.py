"""What a model computes, as a log: each operator that runs, with where its tensors come from.

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
from dynamo_moe.private import OpOverload, TorchDispatchMode, schema_of

_aten = torch.ops.aten
META = torch.device("meta")
"""Where tensors have no values."""

# What gives the values that it is given, in memory of another layout or none. A trace, whose tensors
# may have other layouts than those of the meta device, has more of them or fewer.
_SAME_VALUES = frozenset(
    getattr(_aten, name).default
    for name in ("alias", "clone", "detach", "detach_", "lift", "lift_fresh", "lift_fresh_copy")
)
# What the shape of the result says all about.
_RESHAPING = frozenset(
    getattr(_aten, name).default
    for name in ("_reshape_alias", "_unsafe_view", "expand", "reshape", "view")
)
_VIEWS = {**dict.fromkeys(_RESHAPING, "reshape"), _aten.slice.Tensor: "slice"}
# Where a tensor is made says nothing about its values.
_DEVICE_OPTIONS = frozenset({"device", "pin_memory"})


class Record(NamedTuple):
    """One operator that ran.

    Attributes:
        form: The number of the operator with its plain arguments and its tensors' shapes and dtypes.
        uses: The tensors among its arguments, as numbers of values.
        results: The number of the first value that it returned.
        writes: The values that own the memory which it changed in place.
    """

    form: int
    uses: tuple[int, ...]
    results: int
    writes: tuple[int, ...] = ()


class Forms:
    """Numbers of the forms of operators, and what is known of these; logs share them.

    Attributes:
        numbers: By form, its number.
        layouts: By number and the strides of tensors, the layouts of results.
        aliases: By operator, what its schema says about memory.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.layouts: dict[Any, Any] = {}
        self.aliases: dict[OpOverload, _Aliases] = {}


class _Aliases(NamedTuple):
    """What an operator's schema says about memory, as positions of arguments.

    Attributes:
        written: The arguments that it changes in place.
        viewed: The argument that its results are views of; None if they have memory of their own.
        makes_tensors: Whether it takes a device and no tensor.
    """

    written: tuple[int | str, ...]
    viewed: int | str | None
    makes_tensors: bool


class OperatorLog(TorchDispatchMode):
    """Logs the operators that run in its context.

    Values are numbers: results from 0 on, in order; what was there before, such as a parameter, an
    input or a constant, from -1 on downwards.

    Attributes:
        records: What ran.
        origins: By number (-1 is the first), what a value is that no operator of the log returned.
        values: How many results there are.
    """

    def __init__(self, forms: Forms, most_records: int | None = None) -> None:
        """Begins a log.

        Args:
            forms: What logs that are compared have in common.
            most_records: How many operators may run; None: any number.
        """
        super().__init__()
        self.records: list[Record] = []
        self.origins: list[Any] = []
        self.values = 0
        self._forms, self._most_records = forms, most_records
        self._by_origin: dict[Any, int] = {}
        self._numbers: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        # An id names an object only while it lives.
        self._alive: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Asking Dynamo not to compile takes a third of an operator's time.

    def add_origin(self, tensor: Tensor, origin: Any) -> None:
        """Gives a tensor a name that is equal in the logs that are compared."""
        self._numbers[id(tensor)] = self._number_of(origin)
        self._alive.append(tensor)

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
        kwargs = dict(kwargs or {})
        aliases = self._forms.aliases.get(operator)
        if aliases is None:
            aliases = self._forms.aliases[operator] = _aliases(operator)
        if aliases.makes_tensors:
            kwargs["device"] = META
        uses: list[Tensor] = []
        options = [
            (name, self._description(value, uses))
            for name, value in sorted(kwargs.items())
            if name not in _DEVICE_OPTIONS and value is not None
        ]
        key = operator, *[self._description(value, uses) for value in args], *options
        form = self._form(key)
        numbers = tuple(map(self.number, uses))
        writes = tuple(self._owner(args, kwargs, which) for which in aliases.written)
        result = self._run(operator, args, kwargs, form, uses, reused=not aliases.written)
        if operator in _VIEWS:
            # Where a slice ends, and which size of a shape is -1, can be said in several ways.
            arguments = () if operator in _RESHAPING else (args[1:3], args[4:])
            form = self._form((_VIEWS[operator], *key[1:2], arguments, result.shape))
        if _gives_the_same(operator, uses, result):
            self._numbers[id(result)] = numbers[0]
            self._alive.append(result)
            return result
        self.records.append(Record(form, numbers, self.values, writes))
        if self._most_records is not None and len(self.records) > self._most_records:
            raise RuntimeError(f"more than {self._most_records} operators run")
        owner = None if aliases.viewed is None else self._owner(args, kwargs, aliases.viewed)
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                if owner is not None:
                    self._owners[self.values] = owner
                elif (earlier := self._numbers.get(id(tensor))) is not None:
                    self._owners[self.values] = self._owners.get(earlier, earlier)
                self._numbers[id(tensor)] = self.values
                self._alive.append(tensor)
                self.values += 1
        return result

    def _form(self, key: Any) -> int:
        return self._forms.numbers.setdefault(key, len(self._forms.numbers))

    def _description(self, value: Any, uses: list[Tensor]) -> Any:
        """Returns what is equal for arguments of one form; collects the tensors among them."""
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
        real = sum(tensor.device is not META and not tensor.is_meta for tensor in tensors)
        if real == len(tensors) > 0:
            return operator(*args, **kwargs)  # Of constants alone.
        key = form, *[tensor.stride() for tensor in tensors]
        if reused and (layouts := self._forms.layouts.get(key)) is not None:
            return _made(layouts)
        if real:
            args, kwargs = pytree.tree_map_only(Tensor, without_values, (args, kwargs))
        result = operator(*args, **kwargs)
        if reused:
            self._forms.layouts[key] = _layouts(result)
        return result

    def _owner(self, args: Sequence[Any], kwargs: Mapping[str, Any], which: int | str) -> int:
        """Returns the value that owns the memory of an argument."""
        argument = args[which] if isinstance(which, int) else kwargs[which]
        tensors = [leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor)]
        number = self.number(tensors[0]) if tensors else 0
        return self._owners.get(number, number)


def _gives_the_same(operator: Any, uses: Sequence[Tensor], result: Any) -> bool:
    """Whether an operator gives the values that it is given; a slice may take all of them."""
    if operator in _SAME_VALUES:
        return True
    return operator in _VIEWS and result.shape == uses[0].shape


def _aliases(operator: OpOverload) -> _Aliases:
    arguments = schema_of(operator).arguments
    returns = schema_of(operator).returns
    positions = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
    ]
    marked = [
        (position, argument.alias_info)
        for position, argument in zip(positions, arguments, strict=True)
        if argument.alias_info is not None
    ]
    written = tuple(position for position, info in marked if info.is_write)
    returned = {name for one in returns if one.alias_info for name in one.alias_info.before_set}
    viewed = [
        position
        for position, info in marked
        if not info.is_write and not returned.isdisjoint(info.before_set)
    ]
    names = {argument.name for argument in arguments}
    takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return _Aliases(written, next(iter(viewed), None), "device" in names and not takes_tensors)


def _constant(tensor: Tensor) -> Any:
    """Returns what is equal for constants of equal values."""
    layout = "constant", tensor.dtype, tensor.shape, tensor.stride()
    if tensor.is_meta:
        return *layout, id(tensor)
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return *layout, hashlib.sha256(numbers).digest()


def without_values(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape, strides and dtype on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META
    )


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
