"""Running an unknown module in trials: with other weights, watched, and left as it was.

Legend: T tokens, D model width.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynamo_moe import pytree
from dynamo_moe.conversion.other_arguments import OtherArguments, call_with
from dynamo_moe.conversion.routing import SubmoduleCall, TensorArgument
from dynamo_moe.evaluation import one_thread
from dynamo_moe.private.pytorch import has_forward_hooks, hooks_removed, tensors_replaced
from dynamo_moe.process_state import exclusive
from dynamo_moe.weights.lazy_tensors import LazyTensor

_HALF = (torch.float16, torch.bfloat16)
# Methods that cast, and the dtype where it is not an argument.
_CASTS = {"to": None, "type": None, "half": torch.float16, "bfloat16": torch.bfloat16}
_AUTOCAST_DEVICES = ("cpu", "cuda")
_MISSING = object()
# The most numbers of a layer that trials run on one thread. Larger ones may gain from more threads
# on an idle machine, which has not been measured.
_MOST_ON_ONE_THREAD = 1 << 24
# By how much a module's small parameters, relative to their size, are changed at random.
_SHARE_OF_VALUE = 0.3


# --- Watching one run ---


@dataclass
class ObservedForward:
    """The record of one run of a module.

    Attributes:
        result: Its result.
        calls: Calls of submodules with all of its tokens, in order, each with its results,
            flattened.
        top_ks: Each k that top-k was called with, in order.
        attributes: Attributes that it set on itself, by submodule.
        casts_to_half: Whether it casts numbers to half precision.
        changed_buffers: Buffers that it changed.
    """

    result: Any = None
    calls: list[tuple[SubmoduleCall, list[Any]]] = field(default_factory=list)
    top_ks: list[int] = field(default_factory=list)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    casts_to_half: bool = False
    changed_buffers: list[str] = field(default_factory=list)


def observe_forward(
    module: nn.Module,
    run: Callable[[Tensor], Any],
    x: Tensor,
    unwatched: Collection[nn.Module],
) -> ObservedForward:
    """Runs a module's forward on tokens ``[..., D]``, and leaves the module as it was.

    Calls of submodules in those that are unwatched are not recorded.

    Raises:
        Exception: Whatever the module raises.
    """
    seen = ObservedForward()
    hidden = {part for submodule in unwatched for part in submodule.modules()}

    before = dict(module.named_buffers())

    def watch(path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = _call_with_tokens(module, path, args, kwargs, x)
        if call is not None:
            seen.calls.append((call, pytree.tree_leaves(output)))

    with contextlib.ExitStack() as stack:
        seen.attributes = stack.enter_context(preserving_state(module))
        stack.enter_context(torch.no_grad())
        precision = stack.enter_context(FullPrecision())
        stack.enter_context(_RecordTopK(seen.top_ks))
        for path, part in module.named_modules():
            if path and part not in hidden:
                handle = part.register_forward_hook(partial(watch, path), with_kwargs=True)
                stack.callback(handle.remove)
        seen.result = run(x)
        seen.casts_to_half = precision.has_cast
        seen.changed_buffers = [
            name
            for name, buffer in module.named_buffers()
            if name in before and not torch.equal(buffer, before[name])
        ]
    return seen


def _call_with_tokens(
    module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor
) -> SubmoduleCall | None:
    """Returns a call that got all tokens once, and no other tensor that the layer computes."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    x_TD = x.reshape(-1, x.shape[-1])
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    computed = [tensor for tensor in tensors if id(tensor) not in names]
    if len(computed) != 1 or not computed[0].is_floating_point():
        return None
    shape = computed[0].shape
    if shape not in (x.shape, x_TD.shape) or not torch.equal(
        computed[0].reshape(x_TD.shape).to(x_TD.dtype), x_TD
    ):
        return None

    def described(value: Any) -> Any:
        return TensorArgument(names.get(id(value), "")) if isinstance(value, Tensor) else value

    call_args = tuple(map(described, args))
    call_kwargs = tuple((name, described(value)) for name, value in kwargs.items())
    return SubmoduleCall(path, call_args, call_kwargs, flat=shape == x_TD.shape)


class _RecordTopK(TorchFunctionMode):
    """Records each k that top-k is called with, in order; a maximum is a top-1."""

    def __init__(self, top_ks: list[int]) -> None:
        super().__init__()
        self._top_ks = top_ks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        k = 1 if name in ("argmax", "max") else None
        if name == "topk":
            k = kwargs.get("k", args[1] if len(args) > 1 else None)
        if isinstance(k, int) and k not in self._top_ks:
            self._top_ks.append(k)
        return func(*args, **kwargs)


# --- Leaving the module as it was ---


@contextlib.contextmanager
def preserving_state(module: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """Restores a module's attributes and buffers, and PyTorch's random state, at the end.

    Meanwhile its hooks do not run: they are the user's, and not meant for trials.

    Yields:
        The attributes that were set meanwhile, by submodule; filled at the end.
    """
    attributes: dict[str, dict[str, Any]] = {}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = {p.device for p in module.parameters() if p.is_cuda}
    with (
        exclusive(),  # PyTorch's random state is the process's.
        torch.random.fork_rng(devices),
        hooks_removed(module),
        using_tensors(module, buffers),
    ):
        parts = [(path, part, dict(vars(part))) for path, part in module.named_modules()]
        containers = [
            (value, copy.copy(value))
            for _, _, before in parts
            for value in before.values()
            if type(value) in (list, dict, set)
        ]
        try:
            yield attributes
        finally:
            for path, part, before in parts:
                changed = {
                    name: value
                    for name, value in vars(part).items()
                    if value is not before.get(name, _MISSING)
                }
                if changed:
                    attributes[path] = changed
                vars(part).clear()
                vars(part).update(before)
            for value, earlier in containers:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(earlier)


@contextlib.contextmanager
def keeping_parameters(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Restores parameters that change meanwhile, as X-MoE's router scales its own in each forward.

    Yields:
        The names of those that changed; filled at the end.
    """
    changed: list[str] = []
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield changed
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                if not torch.equal(parameter, before[name]):
                    changed.append(name)
                    parameter.copy_(before[name])


def check_no_hooks(module: nn.Module) -> None:
    """Raises ValueError if a module or one of its submodules has forward hooks."""
    if any(map(has_forward_hooks, module.modules())):
        raise ValueError("it has forward hooks, which its replacement would not run")


# --- Other weights and tokens ---


def using_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Lets a module compute with other parameters and buffers, given by path."""
    return tensors_replaced(module, tensors.get)


def few_threads(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Runs a small module's operators on one thread.

    They are too short for two to gain much, and where another process has a core, each operator
    waits for the thread there.
    """
    small = sum(parameter.numel() for parameter in module.parameters()) <= _MOST_ON_ONE_THREAD
    return one_thread() if small else contextlib.nullcontext()


def in_float32(module: nn.Module) -> nn.Module:
    """Returns a module, or a copy in float32 where it has weights in half precision.

    In half precision, near-ties of the router fall differently, whatever is computed.
    """
    if all(parameter.dtype.itemsize >= 4 for parameter in module.parameters()):
        return module
    return copy.deepcopy(module).float()


def has_values(module: nn.Module) -> bool:
    """Whether all parameters are in memory, neither on the meta device nor left on disk."""
    return not any(p.is_meta or isinstance(p, LazyTensor) for p in module.parameters())


def random_tokens(*shape: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns random tokens of a shape, large enough to tell activations apart.

    Args:
        *shape: Their shape.
        like: A tensor of their dtype, on their device; for the meta device, they are on the CPU.
        generator: Where they are drawn from; None: one that gives the same every time.
    """
    x = torch.randn(*shape, generator=generator or torch.Generator().manual_seed(0)) * 2
    return x.to("cpu" if like.is_meta else like.device, like.dtype)


def random_weights(module: nn.Module, kept: Collection[str] = ()) -> dict[str, Tensor]:
    """Draws parameters and buffers anew, except those that are kept.

    An initial value of 0 or 1 hides what it is used for.
    Matrices keep the size of what passes through them; anything else, such as a temperature or a
    bias, stays near its value.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in kept or not tensor.is_floating_point():
            continue
        random = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim >= 2 and min(tensor.shape) > 1:
            values = random / math.sqrt(tensor.shape[-1])
        else:
            known = torch.zeros(tensor.shape) if tensor.is_meta else tensor.detach().cpu().float()
            size = known.square().mean().sqrt().clamp_min(1.0) if known.numel() else 1.0
            values = known + random * _SHARE_OF_VALUE * size
        drawn[name] = values.to("cpu" if tensor.is_meta else tensor.device, tensor.dtype)
    return drawn


# --- Other ways to run it ---


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Lets code draw the same random numbers on the CPU each time."""
    with exclusive(), torch.random.fork_rng(()):
        torch.default_generator.manual_seed(0)
        yield


class FullPrecision(TorchFunctionMode):
    """Leaves out casts to half precision, which differ by more than formulas do; autocast too.

    Attributes:
        has_cast: Whether there were any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_cast = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _CASTS:
            dtypes = [*args[1:], *kwargs.values(), _CASTS[name]]
            casts = any(dtype in _HALF for dtype in dtypes if isinstance(dtype, torch.dtype))
            if casts and args[0].is_floating_point() and args[0].dtype not in _HALF:
                self.has_cast = True
                return args[0]
        devices = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        if not devices:
            return func(*args, **kwargs)
        self.has_cast |= any(torch.get_autocast_dtype(device) in _HALF for device in devices)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return func(*args, **kwargs)


def on_any_device(module: nn.Module) -> Callable[..., Any]:
    """Returns a module's forward, which also runs on the CPU if the module insists on CUDA.

    It takes tokens, and other arguments by name. At a second try, tensors claim to be on CUDA. What
    is computed is what the operators that the module calls compute.
    """

    def run(x: Tensor, others: Mapping[str, Any] = MappingProxyType({})) -> Any:
        try:
            return call_with(module, x, others)
        except Exception:
            if not any(p.is_cuda for p in module.parameters()):
                with contextlib.suppress(Exception), _ClaimCuda():
                    return call_with(module, x, others)
            raise

    return run


class _ClaimCuda(TorchFunctionMode):
    """Lets tensors on the CPU claim to be on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


def on_tokens(
    run: Callable[[Tensor, Mapping[str, Any]], Any],
    others: OtherArguments,
    *,
    channels_first: bool,
) -> Callable[[Tensor], Any]:
    """Returns a forward from and to tokens ``[..., D]``, made of one that may take images.

    It gets the other arguments in the sizes of the tokens.
    """

    def from_tokens(x: Tensor) -> Any:
        if not channels_first:
            return run(x, others.of_size(x))
        image = x.movedim(-1, 1)

        def to_tokens(value: Tensor) -> Tensor:
            return value.movedim(1, -1) if value.shape == image.shape else value

        return pytree.tree_map_only(Tensor, to_tokens, run(image, others.of_size(x)))

    return from_tokens
