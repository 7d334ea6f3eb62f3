"""Routing as a layer's own forward computes it: the forward runs until its weights are known.

No list of routers is complete: groups, masks, thresholds, temperatures, capacities. Where none of
the known ones is a layer's, its own code is: its forward runs, under a mode that sees each call of
PyTorch's functions, and is left as soon as it has computed the values that say which experts a
token has, and their weights. ``find_own_routing`` finds out which values these are.

Legend: T tokens, D model width, E experts, K choices, C slots of an expert.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynamo_moe.conversion.other_arguments import call_with
from dynamo_moe.conversion.routing import Routed
from dynamo_moe.model_lines import model_line
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import is_exporting, module_stack_kept
from dynamo_moe.tracing.sizes_in_tensors import SizesInTensors

Form = Literal["choices", "experts", "masked", "slots", "tokens"]
"""What a layer's values are:

- ``choices``: integer ids of experts, and floating weights of these and bool masks, or none, which
  are 1: each of the three one tensor ``[..., K]``, or K tensors ``[...]``;
- ``experts``: the weights of all experts, ``[..., E]``;
- ``masked``: a mask of all experts ``[..., E]``, and a weight ``[...]``;
- ``slots``: weights ``[..., E, C]``, of which each token has one slot of an expert at most;
- ``tokens``: for each expert, ids of tokens ``[E, C]`` and their weights ``[E, C]`` or ``[E*C]``.
"""


Kind: TypeAlias = tuple[tuple[torch.dtype, bool], ...]
"""Of each tensor that a call returns, its dtype and whether it is a scalar; all floating dtypes are
float32, as a layer may be cast."""


class Value(NamedTuple):
    """A tensor that a forward computes: a result of one of its calls of a function.

    Attributes:
        function: The function's name.
        kind: The dtypes of the call's results; scalars are apart, as only a trace may show them:
            ``torch.jit.script`` computes a capacity unseen where it runs.
        call: Which of its calls with results of the kind.
        output: Which tensor of the call's result.
    """

    function: str
    kind: Kind
    call: int
    output: int


@dataclass(frozen=True)
class OwnRouting:
    """The routing that a layer's own forward computes.

    Attributes:
        form: What the values are.
        values: The values.
        outputs: Values that the forward also returns.
        num_experts: E.
        top_k: K; of the weights of all experts, the most that are not zero for a token.
        channels_first: Whether the forward takes images ``[B, D, ...]``.
        scale: A number that the weights are multiplied by.
        null_experts: Whether ids of E and more mean no expert.
        tokens: What the experts take, if not the layer's tokens: a value that the forward computes.
        residual: Whether the layer's tokens are added to the experts' sum.
    """

    form: Form
    values: tuple[Value, ...]
    outputs: tuple[Value, ...]
    num_experts: int
    top_k: int
    channels_first: bool = False
    scale: float = 1.0
    null_experts: bool = False
    tokens: Value | None = None
    residual: bool = False

    def __call__(
        self, module: nn.Module, x: Tensor, others: Mapping[str, Any] | None = None
    ) -> Routed:
        """Returns the routing of tokens ``[..., D]``; an expert of weight 0 may have the id -1.

        Args:
            module: The layer.
            x: The tokens.
            others: What else its forward gets, by name.

        Raises:
            ValueError: If the forward ends before it has computed the values.
        """
        tokens = math.prod(x.shape[:-1])  # Size.numel() would be an int while traced.
        image = x.movedim(-1, 1) if self.channels_first else x
        tokens_of = () if self.tokens is None else (self.tokens,)
        wanted = list(dict.fromkeys((*self.values, *self.outputs, *tokens_of)))
        run = _values_of if is_exporting() else _values_by_running
        if torch.compiler.is_dynamo_compiling():
            computed = run(module, image, others or {}, wanted)
        else:
            with module_stack_kept():
                computed = run(module, image, others or {}, wanted)
        ids_TK, weights_TK = self.choices([computed[value] for value in self.values], tokens)
        if not weights_TK.is_floating_point():
            weights_TK = weights_TK.to(torch.promote_types(x.dtype, torch.float32))
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        outputs = [computed[value] for value in self.outputs]
        experts_tokens = None if self.tokens is None else computed[self.tokens].reshape(x.shape)
        return Routed(ids_TK, weights_TK, outputs, experts_tokens, x if self.residual else None)

    def choices(self, values: Sequence[Tensor], tokens: int) -> tuple[Tensor, Tensor]:
        """Returns ids and weights ``[T, K]``, not scaled, from the values."""
        first, *others = values
        match self.form:
            case "choices":
                ids_TK = self._columns([value for value in values if is_integer(value)])
                if self.null_experts:
                    ids_TK = ids_TK.masked_fill(ids_TK >= self.num_experts, -1)
                weights = [value for value in values if value.is_floating_point()]
                weights_TK = self._columns(weights) if weights else torch.ones_like(ids_TK)
                masks = [value for value in values if value.dtype == torch.bool]
                return ids_TK, weights_TK * self._columns(masks) if masks else weights_TK
            case "experts":
                dense_TE = first.reshape(-1, self.num_experts)
            case "masked":
                dense_TE = first.reshape(-1, self.num_experts) * others[0].reshape(-1, 1)
            case "slots":
                dense_TE = first.sum(dim=-1).reshape(-1, self.num_experts)
            case "tokens":
                zeros_ET = others[0].new_zeros(self.num_experts, tokens)
                dense_TE = zeros_ET.scatter_add(1, first, others[0].view_as(first)).mT
        return chosen_weights(dense_TE, self.top_k)

    def _columns(self, parts: list[Tensor]) -> Tensor:
        """Returns ``[T, K]``, which may come as K tensors."""
        if not parts:
            raise ValueError("the layer's own forward computes its routing otherwise each time")
        parts = [part.reshape(-1, self.top_k // len(parts)) for part in parts]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def calls(self) -> tuple[()]:
        """Returns nothing: which submodules run is up to the forward."""
        return ()

    def builtin(self) -> None:
        """Returns None: ``torch.ops.moe.dropless`` has no router that is Python code."""


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor may hold ids."""
    return tensor.dtype in (torch.int32, torch.int64)


def chosen_weights(dense_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns ids and weights ``[T, K]`` of the experts with weights; others have the id -1."""
    if top_k < dense_TE.shape[1]:
        ids_TK = dense_TE.abs().topk(top_k, dim=-1).indices
    else:
        ids_TK = torch.arange(dense_TE.shape[1], device=dense_TE.device).expand_as(dense_TE)
    weights_TK = dense_TE.gather(-1, ids_TK)
    return ids_TK.masked_fill(weights_TK == 0, -1), weights_TK


def dense_weights(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
    """Returns the weight ``[T, E]`` of every expert, in float64; an id of -1 means no expert."""
    zeros_TE = weights_TK.new_zeros(len(ids_TK), num_experts, dtype=torch.float64)
    chosen_TK = weights_TK.double().masked_fill(ids_TK < 0, 0)
    return zeros_TE.scatter_add(1, ids_TK.long().clamp_min(0), chosen_TK)


# --- Running a forward until its weights are known ---


class AllComputed(BaseException):
    """Leaves a forward; a model's own ``except Exception`` does not keep it."""


class ValuesSeen(TorchFunctionMode):
    """Keeps some values that the code that it is around computes.

    Args:
        wanted: The values.
        leaves: Whether it leaves the code as soon as that has computed them.

    Attributes:
        computed: Those that it has computed.
    """

    def __init__(self, wanted: Sequence[Value], *, leaves: bool = False) -> None:
        super().__init__()
        self.computed: dict[Value, Tensor] = {}
        self._wanted, self._leaves = wanted, leaves
        self._calls = dict.fromkeys(((value.function, value.kind) for value in wanted), 0)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # torch.compile reads this too: it compares names, but cannot look one up.
        for function, kind in self._calls:
            if name_of(func) == function and kind_of(tensors := tensors_of(result)) == kind:
                number = self._calls[function, kind]
                for value in self._wanted:
                    if (value.function, value.kind, value.call) == (function, kind, number):
                        tensor = tensors[value.output]
                        # What runs after this may change it in place.
                        self.computed[value] = tensor if self._leaves else tensor.clone()
                self._calls[function, kind] += 1
        if self._leaves and len(self.computed) == len(self._wanted):
            raise AllComputed
        return result

    def values(self) -> dict[Value, Tensor]:
        """Returns the values.

        Raises:
            ValueError: If one was not computed.
        """
        missing = [value.function for value in self._wanted if value not in self.computed]
        if missing:
            raise ValueError(
                f"the layer's own forward did not compute its routing: it calls no {missing[0]}"
            )
        return self.computed


def name_of(function: Any) -> str:
    """Returns a function's name; that of a division, which code that is read calls otherwise."""
    name: str = getattr(function, "__name__", "")
    return "div" if name in ("truediv", "__truediv__") else name


def tensors_of(result: Any) -> list[Tensor]:
    """Returns the tensors that a call returns."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [tensor for tensor in results if isinstance(tensor, Tensor)]


def kind_of(tensors: Sequence[Tensor]) -> Kind:
    """Returns what tells a call's results from those of other calls of the function."""
    return tuple(
        [
            (torch.float32 if tensor.is_floating_point() else tensor.dtype, tensor.ndim == 0)
            for tensor in tensors
        ]
    )


def _values_of(
    module: nn.Module, x: Tensor, others: Mapping[str, Any], wanted: Sequence[Value]
) -> dict[Value, Tensor]:
    """Returns values that a layer's own forward computes for ``x``."""
    forward = module.own_forward if isinstance(module, ConvertedModule) else module.forward
    seen = ValuesSeen(wanted, leaves=True)
    with contextlib.suppress(AllComputed), seen:
        call_with(forward, x, others)
    return seen.values()


class _DecidesError(BaseException):
    """Leaves a forward at a decision; a model's own ``except Exception`` does not keep it."""


class _LeaveAtDecision(TorchFunctionMode):
    """Leaves the code that it is around where a tensor's value decides what runs.

    Args:
        functions: The names of the functions that give Python the value.
    """

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) in self._functions:
            raise _DecidesError
        return func(*args, **(kwargs or {}))


def line_that_decides(
    routing: Callable[..., Routed],
    module: nn.Module,
    x: Tensor,
    others: Mapping[str, Any],
    *,
    is_read: bool = True,
) -> str | None:
    """Returns the line where a forward decides by a tensor's values how it routes, if it does.

    No trace can follow that, unless the value is made of sizes alone. Nor can one that runs the
    code follow that a value becomes a number; for one that reads it (``is_read``), the number is a
    size.
    """
    functions = ("__bool__",) if is_read else ("__bool__", "__float__", "__int__")
    try:
        with torch.no_grad(), _LeaveAtDecision(functions), SizesInTensors():
            routing(module, x, others)
    except _DecidesError as decision:
        return model_line(decision) or "a line that is not the model's"
    return None


# Where torch.compile would read the forward, it runs: functions of PyTorch that are Python code are
# one call where they run, and several where they are read.
_values_by_running: Callable[..., dict[Value, Tensor]] = torch.compiler.disable(_values_of)
