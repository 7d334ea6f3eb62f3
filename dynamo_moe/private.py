"""Private names of PyTorch that several subpackages need, and what stands in for each of them.

Names that only capture and translation need are in ``dynamo_moe.tracing.private``, those of
registered operators in ``dynamo_moe.operators.private``, nested containers in
``dynamo_moe.pytree``. No other module of this package uses a private name of PyTorch; a test
checks that, and docs/explanation/architecture.md lists these modules with those of other packages.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "ShapeEnv",
    "TorchDispatchMode",
    "change_count",
    "compiled_module",
    "enable_python_dispatcher",
    "has_forward_hooks",
    "hooks_removed",
    "schema_of",
    "shallow_copy",
    "storage_key",
    "tensors_replaced",
    "without_values",
    "wrapper_subclass",
]

# --- Operators ---

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
else:  # The classes of operators, by way of public objects.
    OpOverload = type(torch.ops.aten.add.Tensor)
    OpOverloadPacket = type(torch.ops.aten.add)
    OperatorBase = OpOverload.__bases__[0]
    HigherOrderOperator = type(torch.ops.higher_order.cond).__bases__[0]


def schema_of(operator: OpOverload) -> Any:
    """Returns an operator's schema: its arguments and results, their types and aliases.

    Raises:
        RuntimeError: If this PyTorch does not tell; there is no public way.
    """
    try:
        return operator._schema
    except AttributeError:
        raise _missing("OpOverload._schema") from None


# --- Tensors without values, and modes ---

try:  # What the tracer and shape inference compute with.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
except ImportError:
    FakeTensorMode = None  # type: ignore[assignment, misc]

    class FakeTensor(Tensor):  # type: ignore[no-redef]
        """Stands for the class that this PyTorch has elsewhere: no tensor is one."""


try:  # Symbolic sizes, and the dispatcher that computes with them.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
except ImportError:
    ShapeEnv = None  # type: ignore[assignment, misc]
    enable_python_dispatcher = None  # type: ignore[assignment, misc]

try:  # Sees the operators that run, after autograd and autocast.
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode(contextlib.nullcontext):  # type: ignore[no-redef, type-arg]
        """Stands for the class that this PyTorch has elsewhere: it sees no operator."""


def without_values() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operators compute shapes and dtypes alone.

    Without PyTorch's fake tensors they compute values as well, which only takes longer.
    """
    if FakeTensorMode is None:
        return contextlib.nullcontext()
    return FakeTensorMode(allow_non_fake_inputs=True)


# --- Tensors ---

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def wrapper_subclass(cls: type[_Wrapper], like: Tensor) -> _Wrapper:
    """Returns a tensor on the CPU without memory, of a class that handles its operators itself.

    Args:
        cls: The class.
        like: Has its shape, strides and dtype.

    Raises:
        RuntimeError: If this PyTorch cannot make one; there is no public way.
    """
    make = getattr(Tensor, "_make_wrapper_subclass", None)
    if make is None:
        raise _missing("torch.Tensor._make_wrapper_subclass")
    wrapper: _Wrapper = make(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
    )
    return wrapper


def change_count(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 where PyTorch does not count."""
    return 0 if tensor.is_inference() else getattr(tensor, "_version", 0)


def storage_key(tensor: Tensor) -> int:
    """Returns what is equal for tensors that share their memory, fake ones too."""
    storage = tensor.untyped_storage()
    key: int = storage._cdata if hasattr(storage, "_cdata") else storage.data_ptr()
    return key


# --- Modules ---
# nn.Module has no public way to ask for hooks, or to write a parameter without checks. A module
# that lacks these attributes has none of what they hold.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks that run before or after its forward."""
    return any(getattr(module, name, None) for name in _HOOKS)


@contextlib.contextmanager
def hooks_removed(module: nn.Module) -> Iterator[None]:
    """Lets a module and its submodules run without their hooks."""
    held = [
        (part, name, vars(part)[name])
        for part in module.modules()
        for name in _HOOKS
        if name in vars(part)
    ]
    for part, name, _ in held:
        setattr(part, name, OrderedDict())
    try:
        yield
    finally:
        for part, name, hooks in held:
            setattr(part, name, hooks)


@contextlib.contextmanager
def tensors_replaced(module: nn.Module, replacement: Callable[[str, Any], Any]) -> Iterator[None]:
    """Lets a module compute with other parameters and buffers.

    Args:
        module: The module.
        replacement: From a tensor's path, and the tensor or None, to what takes its place.

    Raises:
        RuntimeError: If this PyTorch keeps them elsewhere.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, part in module.named_modules():
            for held in _own_tensors(part):
                for name, tensor in held.items():
                    other = replacement(f"{path}.{name}" if path else name, tensor)
                    if other is not tensor:
                        held[name] = other
                        replaced.append((held, name, tensor))
        yield
    finally:
        for held, name, tensor in replaced:
            held[name] = tensor


def _own_tensors(module: nn.Module) -> tuple[dict[str, Any], ...]:
    try:
        return module._parameters, module._buffers
    except AttributeError:
        raise _missing("torch.nn.Module._parameters") from None


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a module of the same parameters, in which submodules can be replaced.

    Raises:
        RuntimeError: If this PyTorch keeps submodules elsewhere.
    """
    if not hasattr(module, "_modules"):
        raise _missing("torch.nn.Module._modules")
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else shallow_copy(child)
        for name, child in module._modules.items()
    }
    return twin


def compiled_module(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` has wrapped; None for any other model."""
    return dict(model.named_children()).get("_orig_mod")


def _missing(name: str) -> RuntimeError:
    return RuntimeError(
        f"PyTorch {torch.__version__} has no {name}, which dynamo_moe cannot do without: install "
        "a version of PyTorch that the README names"
    )
