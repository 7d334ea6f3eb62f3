"""Private names of PyTorch that several subpackages need: operators, tensors and modules.

Those that only capture and translation need are in ``tracer``, ``exporter`` and ``gradients``.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "CHILDREN_TABLE",
    "FakeTensor",
    "FakeTensorMode",
    "HOOK_TABLES",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorBase",
    "ShapeEnv",
    "TENSOR_TABLES",
    "TorchDispatchMode",
    "attributes_of",
    "change_count",
    "copy_around",
    "compiled_module",
    "enable_python_dispatcher",
    "has_attribute",
    "has_forward_hooks",
    "hooks_removed",
    "is_exporting",
    "module_stack_kept",
    "modules_by_path",
    "own_parts",
    "schema_of",
    "shallow_copy",
    "storage_key",
    "submodules_replaced",
    "takes_positions",
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
    return _required(operator, "_schema", "OpOverload._schema")


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

try:  # What traces the operators that run.
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
except ImportError:
    get_proxy_mode = None  # type: ignore[assignment]

try:  # Sees the operators that run, after autograd and autocast.
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode(contextlib.nullcontext):  # type: ignore[no-redef, type-arg]
        """Stands for the class that this PyTorch has elsewhere: it sees no operator."""

        def __enter__(self) -> Self:
            return self


def without_values(*, unknown_sizes: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operators compute shapes and dtypes alone.

    With ``unknown_sizes`` they may be those of results whose sizes values decide, which are then
    symbols. Without PyTorch's fake tensors they compute values as well, which only takes longer.
    """
    if FakeTensorMode is None:
        return contextlib.nullcontext()
    symbols: dict[str, Any] = {}
    if unknown_sizes and ShapeEnv is not None:
        symbols = {"shape_env": ShapeEnv(), "static_shapes": True}
    return FakeTensorMode(allow_non_fake_inputs=True, **symbols)


# --- Tensors ---

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def wrapper_subclass(cls: type[_Wrapper], like: Tensor) -> _Wrapper:
    """Returns a tensor on the CPU without memory, of a class that handles its operators itself.

    It has the shape, strides and dtype of ``like``.

    Raises:
        RuntimeError: If this PyTorch cannot make one; there is no public way.
    """
    make = _required(Tensor, "_make_wrapper_subclass", "torch.Tensor._make_wrapper_subclass")
    wrapper: _Wrapper = make(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
    )
    return wrapper


_modes_unasked: Callable[[], contextlib.AbstractContextManager[Any]]
_modes_unasked = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)
"""Returns a context that reads a tensor's shape and dtype at once.

Each of a trace's modes would see it, and pass it on.
"""


def change_count(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; 0 where PyTorch does not count."""
    with _modes_unasked():
        try:
            return getattr(tensor, "_version", 0)
        except RuntimeError:  # A tensor made in inference mode.
            return 0


def storage_key(tensor: Tensor) -> int:
    """Returns a key that tensors share which share their memory, fake ones too."""
    with _modes_unasked():
        storage = tensor.untyped_storage()
    key: int = storage._cdata if hasattr(storage, "_cdata") else storage.data_ptr()
    return key


# --- Modules ---
# nn.Module has no public way to ask for hooks, or to write a parameter without checks. A module
# that lacks these attributes has none of what they hold.

TENSOR_TABLES = ("_parameters", "_buffers")
"""The attributes in which a module holds its own parameters and buffers by name."""

CHILDREN_TABLE = "_modules"
"""The attribute in which it holds its submodules."""

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
"""The attributes in which it holds what runs after its forward, and before it."""


# How attributes of most modules are found.
_WAYS = nn.Module.__getattr__, nn.Module.__getattribute__


def has_attribute(module: nn.Module, name: str) -> bool:
    """The answer of ``hasattr``; a module itself takes three times as long to say no."""
    kind = type(module)
    ways = kind.__getattr__, kind.__getattribute__
    if ways != _WAYS or hasattr(kind, name):
        return hasattr(module, name)
    parameters, buffers, children = own_parts(module)
    return name in vars(module) or name in parameters or name in buffers or name in children


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks that run before or after its forward."""
    return any(getattr(module, name, None) for name in HOOK_TABLES)


def takes_positions(module: nn.Module) -> bool:
    """Whether a module has hooks, all of which get its arguments by position alone."""
    names = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return has_forward_hooks(module) and not any(getattr(module, name, None) for name in names)


@contextlib.contextmanager
def hooks_removed(module: nn.Module) -> Iterator[None]:
    """Lets a module and its submodules run without their hooks."""
    with contextlib.ExitStack() as restored:
        for _, part in modules_by_path(module):
            for name in HOOK_TABLES:
                if name in vars(part):
                    restored.callback(setattr, part, name, vars(part)[name])
                    setattr(part, name, OrderedDict())
        yield


@contextlib.contextmanager
def tensors_replaced(module: nn.Module, replacement: Callable[[str, Any], Any]) -> Iterator[None]:
    """Lets a module compute with other parameters and buffers.

    Args:
        module: The module.
        replacement: From a tensor's path, and the tensor or None, to what takes its place.

    Raises:
        RuntimeError: If this PyTorch keeps them elsewhere.
    """
    with contextlib.ExitStack() as restored:
        for path, part in modules_by_path(module):
            for table in own_parts(part)[:2]:
                for name, tensor in table.items():
                    other = replacement(f"{path}.{name}" if path else name, tensor)
                    if other is not tensor:
                        restored.callback(table.__setitem__, name, tensor)
                        table[name] = other
        yield


@contextlib.contextmanager
def submodules_replaced(
    modules: Sequence[nn.Module], tables: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Lets modules keep their submodules by name in other dictionaries, one for each.

    Raises:
        RuntimeError: If this PyTorch keeps them elsewhere.
    """
    replaced = [(attributes_of(module), own_parts(module)[2]) for module in modules]
    try:
        for (attributes, _), table in zip(replaced, tables, strict=True):
            attributes[CHILDREN_TABLE] = table
        yield
    finally:
        for attributes, table in replaced:
            attributes[CHILDREN_TABLE] = table


def own_parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns a module's own dictionaries of parameters, buffers and submodules.

    Raises:
        RuntimeError: If this PyTorch keeps them elsewhere.
    """
    try:
        return module._parameters, module._buffers, module._modules
    except AttributeError:
        raise _without("torch.nn.Module._parameters and _modules") from None


def modules_by_path(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns a module and all in it with their paths, in the order of ``named_modules``.

    That takes the longer the deeper a module is.

    Raises:
        RuntimeError: If this PyTorch keeps submodules elsewhere.
    """
    modules = [("", model)]
    _add_by_path(own_parts(model)[2], "", modules, {model})
    return modules


def _add_by_path(
    children: Mapping[str, nn.Module | None],
    prefix: str,
    modules: list[tuple[str, nn.Module]],
    seen: set[nn.Module],
) -> None:
    for name, child in children.items():
        if child is None or child in seen:
            continue
        seen.add(child)
        path = prefix + name
        modules.append((path, child))
        if inner := child._modules:  # Not by own_parts, since a model has many.
            _add_by_path(inner, f"{path}.", modules, seen)


@contextlib.contextmanager
def module_stack_kept() -> Iterator[None]:
    """Lets code leave several modules at once by an exception while it is traced.

    The tracer keeps a stack of the modules that it is in, and takes each off when its forward
    returns; an exception leaves them there.
    """
    proxies = get_proxy_mode() if get_proxy_mode is not None else None
    stack = getattr(getattr(proxies, "tracer", None), "module_stack", None)
    before = None if stack is None else stack.copy()
    yield
    if stack is not None and before is not None:
        stack.clear()
        stack.update(before)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object itself, past a ``__getattribute__`` of its class."""
    if issubclass(type(value), type):  # Unlike isinstance, it does not ask the object.
        return dict(vars(value))
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a module of the same parameters, in which submodules can be replaced.

    Raises:
        RuntimeError: If this PyTorch keeps submodules elsewhere.
    """
    children = _required(module, "_modules", "torch.nn.Module._modules")
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else shallow_copy(child) for name, child in children.items()
    }
    return twin


def copy_around(module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a module of the same parameters with others in the place of some in it, by path.

    The module itself stays as it is, for other threads too. Only those around them are copied.

    Raises:
        RuntimeError: If this PyTorch keeps submodules elsewhere.
    """
    if "" in others:
        return others[""]
    children: dict[str, Any] = dict(_required(module, "_modules", "torch.nn.Module._modules"))
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, other in others.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = other
    for name, within in inner.items():
        children[name] = copy_around(children[name], within)
    twin = copy.copy(module)
    twin._modules = children
    return twin


def is_exporting() -> bool:
    """Whether torch.export traces: the public function of PyTorch 2.11 says so of torch.compile.

    It is read where torch.compile reads code, too.
    """
    return bool(torch.compiler._is_exporting_flag)


def compiled_module(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` has wrapped; None for any other model."""
    return dict(model.named_children()).get("_orig_mod")


def _required(owner: Any, name: str, shown: str) -> Any:
    """Returns an attribute that nothing stands in for."""
    if not hasattr(owner, name):
        raise _without(shown)
    return getattr(owner, name)


def _without(shown: str) -> RuntimeError:
    return RuntimeError(
        f"PyTorch {torch.__version__} has no {shown}, which dynamo_moe cannot do without: "
        "install a version of PyTorch that the README names"
    )
