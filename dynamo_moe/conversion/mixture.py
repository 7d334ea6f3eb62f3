"""What a mixture of experts computes, as a record, and the module that computes it so.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

import custom_ops
from dynamo_moe import pytree
from dynamo_moe.conversion.routing import Call, Routed, Routing
from dynamo_moe.conversion.stacks import Experts, StackedWeights
from dynamo_moe.modules import ConvertedModule

__all__ = ["Mixture", "Output", "Shared", "adopt", "counts"]


@dataclass(frozen=True)
class Shared:
    """An expert of every token.

    Attributes:
        call: From ``[..., D]`` to ``[..., D]``.
        gate: From ``[..., D]`` to ``[..., 1]``, whose sigmoid scales the result, or None.
    """

    call: Call
    gate: Call | None = None

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns ``[T, D]``."""
        y_TD = self._rows(self.call, module, x)
        if self.gate is not None:
            y_TD = y_TD * self._rows(self.gate, module, x).sigmoid()
        return y_TD

    def _rows(self, call: Call, module: nn.Module, x: Tensor) -> Tensor:
        (result,) = call.leaves(module, x)
        return result.reshape(-1, result.shape[-1])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Output:
    """One of the values that the module's forward returns.

    Attributes:
        kind: ``result``; ``constant``: ``value``; ``zero``: a loss that only training needs;
            ``leaf``: the gate's result number ``value``; ``ids`` and ``weights``: the routing;
            ``counts``: how many tokens each expert gets, ``value`` being E and the dtype.
        value: See ``kind``.
        shaped: Whether it has the tokens' leading dimensions, instead of T.
        squeezed: Whether it lacks the last dimension, of one choice.
    """

    kind: Literal["result", "constant", "zero", "leaf", "ids", "weights", "counts"]
    value: Any = None
    shaped: bool = False
    squeezed: bool = False

    @property
    def is_routing(self) -> bool:
        """Whether the value is one of the routing's."""
        return self.kind not in ("result", "constant", "zero")

    def of(self, y: Tensor, routed: Routed | None) -> Any:
        """Returns the value, given the result ``[..., D]`` and, if it is of that, the routing."""
        match self.kind:
            case "result":
                return y if self.shaped else y.reshape(-1, y.shape[-1])
            case "constant":
                return self.value
            case "zero":
                return y.new_zeros(())
        if routed is None:
            raise ValueError(f"{self.kind} is a value of the routing, which is not known")
        if self.kind == "counts":
            experts, dtype = self.value
            return counts(routed.ids, experts).to(dtype)
        of_kind = {"ids": routed.ids, "weights": routed.weights}
        value = routed.leaves[self.value] if self.kind == "leaf" else of_kind[self.kind]
        leading = y.shape[:-1] if self.shaped else (-1,)
        return value.reshape(leading if self.squeezed else (*leading, value.shape[-1]))


@dataclass(frozen=True)
class Mixture:
    """What a module computes: routing, experts, what all tokens get, and what it returns.

    Attributes:
        arguments: What its forward takes: names, each with the plain value that it has by default.
            The first are the tokens.
        outputs: What it returns: an :class:`Output`, or tuples, lists and mappings of such.
        marks: Attributes of the result tensor itself, such as a loss.
        channels_first: Whether it takes images ``[B, D, ...]``, and returns such.
        bias: A parameter ``[D]`` that is added to the result, or None.
        dimensions: Numbers of dimensions of the tokens for which this is known.
    """

    arguments: tuple[tuple[str, Any], ...]
    routing: Routing
    experts: Experts
    shared: tuple[Shared, ...]
    outputs: Any
    marks: tuple[tuple[str, Output], ...] = ()
    channels_first: bool = False
    bias: str | None = None
    dimensions: tuple[int, ...] = ()

    def __call__(self, module: nn.Module, x: Tensor, stacked: StackedWeights | None = None) -> Any:
        """Returns what the module's forward returns for tokens ``[..., D]``, or an image."""
        x = x.movedim(1, -1) if self.channels_first else x
        experts, routing = self.experts, self.routing
        weights = experts.weights(module) if stacked is None else stacked.of(experts, module)
        options = asdict(experts.options)
        plain = routing.plain() if self._returns_no_routing() else None
        if plain is not None:
            product, router = plain
            router_weight, router_bias = product.parameters(module)
            y = custom_ops.dropless(
                x, router_weight, *weights, router.top_k, router_bias,
                scoring=router.scoring, renormalize=router.renormalize,
                routed_scaling=router.routed_scaling, **options,
            )  # fmt: skip
            routed = None
        else:
            routed = routing(module, x)
            ids, choices = (
                # A reshape that changes nothing would hide where the layer's routing comes from.
                value if x.ndim == 2 else value.reshape(*x.shape[:-1], value.shape[-1])
                for value in (routed.ids, routed.weights)
            )
            y = custom_ops.experts(x, ids, choices, *weights, **options)
        for shared in self.shared:
            y = y + shared(module, x).view_as(x)
        if self.bias is not None:
            y = y + attrgetter(self.bias)(module)
        for name, output in self.marks:
            setattr(y, name, output.of(y, routed))
        return pytree.tree_map_only(
            Output, lambda output: self._value(output, y, routed), self.outputs
        )

    def tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns the tokens of a call; None if this is not known to be what the call computes."""
        names = [name for name, _ in self.arguments]
        if len(args) > len(names):
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x = given.pop(names[0], None)
        defaults = dict(self.arguments)
        if not all(name in defaults and _is_same(v, defaults[name]) for name, v in given.items()):
            return None
        return x if isinstance(x, Tensor) and x.ndim in self.dimensions else None

    def calls(self) -> Iterator[Call]:
        """Yields the calls of submodules that it makes."""
        if isinstance(self.routing.source, Call):
            yield self.routing.source
        for shared in self.shared:
            yield shared.call
            if shared.gate is not None:
                yield shared.gate

    def _value(self, output: Output, y: Tensor, routed: Routed | None) -> Any:
        value = output.of(y, routed)
        return value.movedim(-1, 1) if self.channels_first and output.kind == "result" else value

    def _returns_no_routing(self) -> bool:
        outputs = (*pytree.tree_leaves(self.outputs), *(output for _, output in self.marks))
        return not any(output.is_routing for output in outputs)


def counts(ids: Tensor, experts: int) -> Tensor:
    """Returns how many tokens each expert gets ``[E]``; an id of -1 is none."""
    chosen = ids.flatten()
    ones = (chosen >= 0).to(chosen.dtype)
    return ones.new_zeros(experts).index_add(0, chosen.clamp_min(0), ones)


def _is_same(value: Any, default: Any) -> bool:
    """Whether a value is a plain one, and that of the default."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain and type(value) is type(default) and value == default


class _Converted(ConvertedModule):
    """What a converted module's class has ahead of the class it had."""

    _mixture: Mixture
    _stacked: StackedWeights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the arguments of the original's forward, and returns what that returns.

        In training, and for calls that were not compared, that is what computes.
        """
        x = None if self.training else self._mixture.tokens(args, kwargs)
        if x is not None:
            return self._mixture(self, x, self._stacked)
        if not self.training:
            warnings.warn(
                f"{_original(type(self)).__name__} is called with other arguments, or tokens of "
                "other dimensions, than it was compared with: its own forward computes",
                stacklevel=2,
            )
        return super().forward(*args, **kwargs)

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the experts' parameters by their path."""
        names = dict.fromkeys(self._mixture.experts.names())
        return {name: self.get_parameter(name) for name in names}

    def extra_repr(self) -> str:
        """What is computed, for ``print(model)``."""
        options = self._mixture.experts.options
        computed = f"experts={self._mixture.experts.second.experts}, {options.activation}"
        return ", ".join(filter(None, [super().extra_repr(), computed]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class is made at run time; pickle would not find it.
        state = super().__reduce_ex__(protocol)[2]
        return _restored, (_original(type(self)),), state


def adopt(module: nn.Module, mixture: Mixture) -> None:
    """Makes a module compute what the record says, in place.

    It keeps its class as a base, its attributes, submodules, parameters and methods; only its
    forward in evaluation mode is another.
    """
    module._mixture, module._stacked = mixture, StackedWeights()  # type: ignore[assignment]
    original: Any = type(module)
    module.__class__ = _converted(original)


@functools.cache
def _converted(original: Any) -> type[_Converted]:
    made = types.new_class(f"Converted{original.__name__}", (_Converted, original))
    made.__module__ = original.__module__
    return made


def _original(converted: type[nn.Module]) -> type[nn.Module]:
    return converted.__bases__[1] if issubclass(converted, _Converted) else converted


def _restored(original: Any) -> nn.Module:
    made = _converted(original)
    return made.__new__(made)
