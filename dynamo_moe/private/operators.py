"""Private names of PyTorch about operators: how they are registered, and their fake kernels."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dynamo_moe.private.pytorch import (
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    enable_python_dispatcher,
    schema_of,
)

try:  # The fake kernels that are registered.
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton
except ImportError:
    OPDEFS = None  # type: ignore[assignment]

try:  # Symbolic sizes without a tracer.
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
except ImportError:
    ConstantSource = None  # type: ignore[assignment, misc]

_COUNT = itertools.count()


def overload_of(torch_op: Any) -> Any:
    """Returns the operator that ``torch.library.custom_op`` has made; anything else as it is.

    Where this PyTorch does not tell, ``register_op`` asks for the operator itself.
    """
    return getattr(torch_op, "_opoverload", torch_op)


def has_fake_kernel(torch_op: OpOverload) -> bool:
    """Whether an operator has a fake kernel.

    Where this PyTorch does not tell, it is taken for granted: a trace without one fails, and says
    so.
    """
    if OPDEFS is None:
        return True
    name = schema_of(torch_op).name
    kernels = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    try:
        definition = OPDEFS.get(name)
        if definition is not None:
            return definition._abstract_fn is not None
        return (
            any(torch._C._dispatch_has_kernel_for_dispatch_key(torch_op.name(), k) for k in kernels)
            or singleton.find(name).fake_impl.kernel is not None
        )
    except AttributeError:
        return True


def parsed_schema(text: str) -> Any:
    """Returns a schema with its arguments and results, from ``ns::name(Tensor x) -> Tensor``.

    Raises:
        RuntimeError: If the text is no schema.
    """
    parse = getattr(torch._C, "parse_schema", None)
    if parse is not None:
        return parse(text)
    # The public way: an operator of this schema, which goes with its library.
    library = torch.library.Library("dynamo_moe_schemas", "FRAGMENT")
    name = library.define(f"schema_{next(_COUNT)}{text[text.index('(') :]}")
    return schema_of(getattr(torch.ops.dynamo_moe_schemas, name).default)


class SymbolicSizes:
    """Symbols for sizes, and the decisions that a fake kernel takes by them.

    Attributes:
        symbols: The symbolic sizes by name.
    """

    def __init__(self, values: Mapping[str, int]) -> None:
        """Makes symbols of these names, which have these sizes for now.

        Raises:
            NotImplementedError: If this PyTorch has its symbolic sizes elsewhere; then nothing is
                known of results' shapes.
        """
        if None in (ShapeEnv, FakeTensorMode, ConstantSource):
            raise NotImplementedError("symbolic sizes without a tracer")
        self._environment: Any = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.symbols: dict[str, Any] = {}
        for number, (name, value) in enumerate(values.items()):
            source = ConstantSource(f"size_{number}")
            symbol = self._environment.create_symbol(
                value,
                source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=None,
                do_not_specialize_zero_one=True,
            )
            self.symbols[name] = self._environment.create_symintnode(
                symbol, hint=value, source=source
            )

    @contextlib.contextmanager
    def fake_tensors(self) -> Iterator[None]:
        """Lets operators compute shapes and dtypes alone."""
        with FakeTensorMode(shape_env=self._environment), enable_python_dispatcher():
            yield

    def decisions(self) -> list[Any]:
        """Returns the conditions on symbols that were found true, so far."""
        return [guard.expr for guard in self._environment.guards]
