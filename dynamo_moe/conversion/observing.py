"""Running a module that nobody knows: with other weights, without traces, and looking on.

Legend: D model width.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynamo_moe import pytree
from dynamo_moe.conversion.routing import Call, Named
from dynamo_moe.private import hooks_removed, own_tensors
from dynamo_moe.process_state import exclusive

__all__ = [
    "Observation",
    "Observed",
    "as_tokens",
    "in_full_precision",
    "observe",
    "on_any_device",
    "random_weights",
    "undisturbed",
    "with_tensors",
]

_HALF = (torch.float16, torch.bfloat16)
_AUTOCAST = ("cpu", "cuda")

# A few numbers that stay the same when a module's small parameters are drawn anew.
_SHARE_OF_VALUE = 0.3


@dataclass(frozen=True)
class Observed:
    """A call of a submodule that got the tokens.

    Attributes:
        call: How it is called.
        leaves: What it returned, flattened.
    """

    call: Call
    leaves: list[Any]


@dataclass
class Observation:
    """What one run of a module showed.

    Attributes:
        result: What it returned.
        calls: Calls of submodules with all of its tokens, in order.
        choices: The numbers of choices that top-k was asked for, in order.
        changed: Attributes that it set on itself, by submodule.
        rounds: Whether it casts numbers to half precision.
        counted: Buffers that it changed.
    """

    result: Any = None
    calls: list[Observed] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: bool = False
    counted: list[str] = field(default_factory=list)


def observe(
    module: nn.Module,
    run: Callable[[Tensor], Any],
    x: Tensor,
    unseen: Collection[nn.Module],
) -> Observation:
    """Runs a module on tokens ``[..., D]``, and leaves it as it was.

    Args:
        module: The module.
        run: Its forward.
        x: The tokens.
        unseen: Submodules whose calls are not of interest.

    Raises:
        Exception: Whatever the module raises.
    """
    seen = Observation()
    x_TD = x.reshape(-1, x.shape[-1])

    def watch(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        shape: list[torch.Size] = []

        def described(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in names:
                return Named(names[id(value)])
            if _is_same(value, x_TD):
                shape.append(value.shape)
                return Named("")
            raise LookupError

        try:
            call_args = tuple(map(described, args))
            call_kwargs = tuple((name, described(value)) for name, value in kwargs.items())
        except LookupError:
            return
        if len(shape) == 1 and shape[0] in (x.shape, x_TD.shape):
            flat = shape[0] == x_TD.shape
            call = Call(path, call_args, call_kwargs, flat)
            seen.calls.append(Observed(call, pytree.tree_leaves(output)))

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: watch(path, args, kwargs, output)

    hidden = {part for each in unseen for part in each.modules()}
    with contextlib.ExitStack() as stack:
        changed = stack.enter_context(undisturbed(module))
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        stack.enter_context(torch.no_grad())
        rounding = stack.enter_context(in_full_precision())
        stack.enter_context(_CountsChoices(seen.choices))
        for path, part in module.named_modules():
            if path and part not in hidden:
                handle = part.register_forward_hook(hook(path), with_kwargs=True)
                stack.callback(handle.remove)
        seen.result = run(x)
        seen.rounds = rounding.seen
        seen.counted = [
            name for name, b in module.named_buffers() if not torch.equal(b, before[name])
        ]
    seen.changed = {path: values for path, values in changed.items() if values}
    return seen


def on_any_device(module: nn.Module) -> Callable[..., Any]:
    """Returns a module's forward, for a module too that refuses tensors which are not on CUDA.

    On a second try, tensors say that they are. What the module computes is what the operators
    compute that it calls.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return module(*args, **kwargs)
        except Exception:
            if any(p.is_cuda for p in module.parameters()):
                raise
            try:
                with _SaysCuda():
                    return module(*args, **kwargs)
            except Exception:  # noqa: S110  The first one is the module's own.
                pass
            raise

    return run


def as_tokens(run: Callable[..., Any], *, channels_first: bool) -> Callable[[Tensor], Any]:
    """Returns the same from tokens ``[..., D]`` to such, of what takes and returns images."""
    if not channels_first:
        return run

    def from_tokens(x: Tensor) -> Any:
        image = x.movedim(-1, 1)

        def to_tokens(value: Tensor) -> Tensor:
            return value.movedim(1, -1) if value.shape == image.shape else value

        return pytree.tree_map_only(Tensor, to_tokens, run(image))

    return from_tokens


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """Restores a module's attributes, buffers and PyTorch's random state in the end.

    Meanwhile its hooks do not run: they are the user's, and not meant for trials.

    Yields:
        Attributes that were set meanwhile, by submodule; filled in the end.
    """
    changed: dict[str, dict[str, Any]] = {}
    devices = {p.device for p in module.parameters() if p.is_cuda}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with (
        exclusive(),  # PyTorch's random state is the process's.
        torch.random.fork_rng(devices),
        hooks_removed(module),
        with_tensors(module, buffers),
    ):
        parts = [(path, part, dict(vars(part))) for path, part in module.named_modules()]
        containers = [
            (value, copy.copy(value))
            for _, _, held in parts
            for name, value in held.items()
            if type(value) in (list, dict, set) and not name.startswith("_")
        ]
        try:
            yield changed
        finally:
            for path, part, before in parts:
                after = vars(part)
                changed[path] = {
                    name: value
                    for name, value in after.items()
                    if name not in before or value is not before[name]
                }
                after.clear()
                after.update(before)
            for value, earlier in containers:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(earlier)


@contextlib.contextmanager
def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Lets a module compute with other parameters and buffers, by path."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, part in module.named_modules():
            for kind in own_tensors(part):
                for name in kind:
                    tensor = tensors.get(f"{path}.{name}" if path else name)
                    if tensor is not None:
                        replaced.append((kind, name, kind[name]))
                        kind[name] = tensor
        yield
    finally:
        for kind, name, original in replaced:
            kind[name] = original


def random_weights(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Draws parameters and buffers anew, so that none is zero, nor one, by chance of its start.

    Matrices keep the size of what goes through them; others, such as a temperature or a bias, stay
    near what they are.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in names or not tensor.is_floating_point():
            continue
        random = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim >= 2 and min(tensor.shape) > 1:
            values = random / math.sqrt(tensor.shape[-1])
        else:
            known = torch.zeros(tensor.shape) if tensor.is_meta else tensor.detach().cpu().float()
            size = known.square().mean().sqrt().clamp_min(1.0) if known.numel() else 1.0
            values = known + random * _SHARE_OF_VALUE * size
        device = "cpu" if tensor.is_meta else tensor.device
        drawn[name] = values.to(device, tensor.dtype)
    return drawn


class _CountsChoices(TorchFunctionMode):
    """Notes the k of every top-k."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        k: Any = None
        if name == "topk":
            k = kwargs.get("k", args[1] if len(args) > 1 else None)
        elif name in ("argmax", "max"):
            k = 1
        if isinstance(k, int) and k not in self._choices:
            self._choices.append(k)
        return result


class in_full_precision(TorchFunctionMode):  # noqa: N801  It is used as a context.
    """Leaves out casts to half precision, in autocast regions too: formulas differ by less.

    Attributes:
        seen: Whether there were any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = {"bfloat16": torch.bfloat16, "half": torch.float16}
        name = getattr(func, "__name__", "")
        asked = [*args[1:], *kwargs.values(), named.get(name)]
        casts = name in ("to", "type", *named) and any(
            each in _HALF for each in asked if _is_dtype(each)
        )
        autocasts = any(torch.is_autocast_enabled(device) for device in _AUTOCAST)
        if casts and args[0].is_floating_point() and args[0].dtype not in _HALF:
            self.seen = True
            return args[0]
        if not autocasts:
            return func(*args, **kwargs)
        self.seen = self.seen or any(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) in _HALF
            for device in _AUTOCAST
        )
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return func(*args, **kwargs)


class _SaysCuda(TorchFunctionMode):
    """Lets tensors on the CPU say that they are on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _is_same(value: Tensor, x_TD: Tensor) -> bool:
    return (
        value.is_floating_point()
        and value.ndim >= 2
        and value.shape[-1] == x_TD.shape[-1]
        and value.numel() == x_TD.numel()
        and bool(torch.equal(value.reshape(x_TD.shape).to(x_TD.dtype), x_TD))
    )
