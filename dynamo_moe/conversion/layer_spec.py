"""A record that computes an MoE layer, and the layer converted by it.

:class:`LayerSpec` is the record: routing, experts, shared experts, and the values that the
forward returns. :func:`install` makes a module compute by it.

Legend: T tokens, D model width, E experts, K choices.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from custom_ops.tangents import has_tangents
from dynamo_moe import local_experts, packed_experts, pytree
from dynamo_moe.conversion.expert_weights import CachedWeights, ExpertsSpec
from dynamo_moe.conversion.other_arguments import OtherTensor, is_plain
from dynamo_moe.conversion.own_routing import OwnRouting
from dynamo_moe.conversion.probed_routing import ProbedRouting
from dynamo_moe.conversion.routing import GateRouting, Routed, SubmoduleCall, TopKRouting
from dynamo_moe.modules import ConvertedModule

Routing = TopKRouting | GateRouting | OwnRouting | ProbedRouting


@dataclass(frozen=True)
class LayerSpec:
    """An MoE layer as a record that computes it.

    Attributes:
        arguments: The names of its forward's arguments, the tokens first, each with its default:
            a plain value, or an ellipsis where there is none.
        routing: How experts and their weights are chosen.
        experts: The experts' options and weights.
        shared: Experts that every token visits.
        returned: The forward's result: a :class:`ReturnValue`, or tuples, lists and mappings
            of them.
        result_attributes: Attributes that the forward sets on the result tensor, such as a loss.
        channels_first: Whether it takes and returns images ``[B, D, ...]``.
        bias: A parameter ``[D]`` that is added to the result, or None.
        dimensions: The numbers of token dimensions for which this was compared with the module.
        others: What its forward is called with beside tokens and defaults: names of arguments, each
            with a plain value or an :class:`OtherTensor`.
        keyword_only: The names of arguments that have no position.
        attributes: Attributes that the forward sets on the module, such as how many tokens each
            expert gets.
    """

    arguments: tuple[tuple[str, Any], ...]
    routing: Routing
    experts: ExpertsSpec
    shared: tuple[SharedExpert, ...]
    returned: Any
    result_attributes: tuple[tuple[str, ReturnValue], ...] = ()
    channels_first: bool = False
    bias: str | None = None
    dimensions: tuple[int, ...] = ()
    others: tuple[tuple[str, Any], ...] = ()
    keyword_only: tuple[str, ...] = ()
    attributes: tuple[tuple[str, ReturnValue], ...] = ()

    def __call__(
        self,
        module: nn.Module,
        x: Tensor,
        others: Mapping[str, Any] | None = None,
        cache: CachedWeights | None = None,
    ) -> Any:
        """Returns the result of the module's forward for tokens ``[..., D]``, or an image.

        Args:
            module: The module.
            x: The tokens.
            others: What else its forward gets, by name.
            cache: Where its experts' weights are kept from call to call.
        """
        x = x.movedim(1, -1) if self.channels_first else x
        experts, routing = self.experts, self.routing
        weights = (
            functools.partial(experts.weights, module)
            if cache is None
            else functools.partial(cache.get, experts, module)
        )
        options = experts.options.keywords()
        values = self.return_values()
        builtin = None if any(value.is_routing for value in values) else routing.builtin()
        routed = None
        if builtin is not None:
            linear, router = builtin
            router_weight, router_bias = linear.parameters(module)
            keywords = {"router_bias": router_bias, **router.keywords(), **options}
            y = packed_experts.dropless(module, weights, x, router_weight, **keywords)
        else:
            routed = routing(module, x, others)
            ids, choices = (
                # A reshape that changes nothing would hide where the layer's routing comes from.
                value if x.ndim == 2 else value.reshape(*x.shape[:-1], value.shape[-1])
                for value in (routed.ids, routed.weights)
            )
            tokens = x if routed.tokens is None else routed.tokens
            y = packed_experts.experts(module, weights, tokens, ids, choices, **options)
            if routed.rest is not None:
                y = y + routed.rest.view_as(y)
        for shared in self.shared:
            y = y + shared(module, x).view_as(x)
        if self.bias is not None:
            y = y + attrgetter(self.bias)(module)
        for name, value in self.result_attributes:
            setattr(y, name, value.compute(y, routed))
        for name, value in self.attributes:
            setattr(module, name, value.compute(y, routed))

        def compute(value: ReturnValue) -> Any:
            computed = value.compute(y, routed)
            is_image = self.channels_first and value.kind == "result"
            return computed.movedim(-1, 1) if is_image else computed

        return pytree.tree_map_only(ReturnValue, compute, self.returned)

    def call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """Returns a call's tokens and its other arguments; None if it is unlike those compared."""
        names = [name for name, _ in self.arguments if name not in self.keyword_only]
        if len(args) > len(names):
            return None
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        x = arguments.pop(self.arguments[0][0], None)
        defaults, known = dict(self.arguments), dict(self.others)
        others = {
            name: value
            for name, value in arguments.items()
            if name in known or not _is_alike(value, defaults.get(name, ...))
        }
        if others.keys() != known.keys() or not all(
            _is_alike(value, known[name]) for name, value in others.items()
        ):
            return None
        return (x, others) if isinstance(x, Tensor) and x.ndim in self.dimensions else None

    def still_runs(self, path: str) -> bool:
        """Whether a submodule is known to run, or is part of one that is."""
        shared = [call for expert in self.shared for call in (expert.call, expert.gate)]
        return any(
            isinstance(call, SubmoduleCall) and f"{path}.".startswith(f"{call.path}.")
            for call in (*self.routing.calls(), *shared)
        )

    def return_values(self) -> list[ReturnValue]:
        """Returns all values that the forward returns, or sets on its result or the module."""
        return [
            *pytree.tree_leaves(self.returned),
            *(value for _, value in (*self.result_attributes, *self.attributes)),
        ]


def _is_alike(value: Any, known: Any) -> bool:
    """Whether an argument is the same plain value, or a tensor of as many dimensions."""
    if isinstance(known, OtherTensor):
        return isinstance(value, Tensor) and value.ndim == known.dimensions
    return is_plain(value) and type(value) is type(known) and bool(value == known)


# --- Shared experts, and the forward's results ---


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token visits.

    Attributes:
        call: From ``[..., D]`` to ``[..., D]``.
        gate: From ``[..., D]`` to ``[..., 1]``, whose sigmoid scales the result, or None.
    """

    call: SubmoduleCall
    gate: SubmoduleCall | None = None

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns ``[T, D]``."""
        y_TD = _rows(self.call, module, x)
        return y_TD if self.gate is None else y_TD * _rows(self.gate, module, x).sigmoid()


def _rows(call: SubmoduleCall, module: nn.Module, x: Tensor) -> Tensor:
    (output,) = call.outputs(module, x)
    return output.reshape(-1, output.shape[-1])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ReturnValue:
    """How one of the values that a forward returns comes about.

    Attributes:
        kind: ``result``; ``constant``: ``value``; ``zero``: a loss that only training needs;
            ``gate_output``: the gate's output number ``value``; ``ids`` and ``weights``: the
            routing; ``counts``: how many tokens each expert gets, ``value`` being E and the dtype;
            ``own``: as the layer's own forward returns it, being its number ``value``.
        value: See ``kind``.
        keeps_shape: Whether it has the tokens' leading dimensions, instead of T.
        squeezed: Whether the last dimension is missing. With ``keeps_shape`` that takes K = 1;
            without, all values are in one dimension, ``[T*K]`` for the routing.
    """

    kind: Literal["result", "constant", "zero", "gate_output", "ids", "weights", "counts", "own"]
    value: Any = None
    keeps_shape: bool = False
    squeezed: bool = False

    @property
    def is_routing(self) -> bool:
        """Whether computing it takes the routing."""
        return self.kind not in ("result", "constant", "zero")

    def compute(self, y: Tensor, routed: Routed | None) -> Any:
        """Returns the value, from the result ``[..., D]`` and, if it takes that, the routing."""
        match self.kind:
            case "result":
                return y if self.keeps_shape else y.reshape(-1, y.shape[-1])
            case "constant":
                return self.value
            case "zero":
                return y.new_zeros(())
        if routed is None:
            raise ValueError(f"{self.kind} is part of the routing, which is not known")
        if self.kind == "own":
            return routed.gate_outputs[self.value]
        if self.kind == "counts":
            num_experts, dtype = self.value
            return tokens_per_expert(routed.ids, num_experts).to(dtype)
        value = (
            routed.gate_outputs[self.value]
            if self.kind == "gate_output"
            else getattr(routed, self.kind)
        )
        if self.squeezed:
            return value.reshape(y.shape[:-1] if self.keeps_shape else (-1,))
        # Of no numbers, PyTorch could not tell how many rows -1 is.
        rows = value.shape[:1] if value.ndim == 2 else (-1,)
        return value.reshape(*(y.shape[:-1] if self.keeps_shape else rows), value.shape[-1])


def tokens_per_expert(ids: Tensor, num_experts: int) -> Tensor:
    """Returns how many tokens each expert gets ``[E]``; an id of -1 means no expert."""
    chosen = ids.flatten()
    ones = (chosen >= 0).to(chosen.dtype)
    return ones.new_zeros(num_experts).index_add(0, chosen.clamp_min(0), ones)


# --- The converted layer ---


def install(module: nn.Module, spec: LayerSpec) -> None:
    """Makes a module compute by a record, in place.

    The module keeps its class as a base, its attributes, submodules, parameters and methods; only
    its forward in evaluation mode changes.

    Raises:
        ValueError: If Python cannot change the class of an object of this one.
    """
    original: Any = type(module)
    try:
        module.__class__ = _converted_class(original)
    except TypeError as error:
        raise ValueError(
            "Python cannot change its class in place: let nn.Module be the first base of "
            f"{original.__name__}, or of the class that it derives from"
        ) from error
    module._dynamo_moe_spec = spec  # type: ignore[assignment]
    module._dynamo_moe_weights = CachedWeights()  # type: ignore[assignment]


def share_weights(modules: Iterable[nn.Module]) -> None:
    """Lets converted layers that have the same experts keep the same weights of them."""
    kept: dict[Any, CachedWeights] = {}
    for module in modules:
        if isinstance(module, ConvertedLayer):
            key = module._dynamo_moe_spec.experts.memory(module)
            module._dynamo_moe_weights = kept.setdefault(key, module._dynamo_moe_weights)


class ConvertedLayer(ConvertedModule):
    """The base that a converted layer's class has ahead of the layer's original class."""

    _dynamo_moe_original: type[nn.Module]
    _dynamo_moe_spec: LayerSpec
    _dynamo_moe_weights: CachedWeights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the arguments of the original's forward, and returns the same.

        In training, for calls unlike those compared and for forward-mode derivatives, the
        original's forward computes.
        """
        call = None if self.training else self._dynamo_moe_spec.call(args, kwargs)
        if call is not None and has_tangents(call[0], *itertools.islice(self.parameters(), 1)):
            return self.own_forward(*args, **kwargs)
        if call is not None:
            return self._dynamo_moe_spec(self, *call, self._dynamo_moe_weights)
        is_sharded = local_experts.of(self) is not None
        if is_sharded or packed_experts.of(self) is not None:
            raise NotImplementedError(
                f"the experts of {self._dynamo_moe_original.__name__} are "
                f"{'sharded' if is_sharded else 'packed'}: it computes in evaluation mode alone, "
                "for calls like those that it was compared with"
            )
        if not self.training:
            warnings.warn(
                f"{self._dynamo_moe_original.__name__} is called with other arguments, or tokens "
                "of other dimensions, than it was compared with: its own forward computes",
                stacklevel=2,
            )
        return self.own_forward(*args, **kwargs)

    def own_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original's forward."""
        return super().forward(*args, **kwargs)

    @property
    def runs_own_code(self) -> bool:
        """Whether its routing is the original's code."""
        return isinstance(self._dynamo_moe_spec.routing, (OwnRouting, ProbedRouting))

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the experts' parameters by their path."""
        names = dict.fromkeys(self._dynamo_moe_spec.experts.parameter_names())
        return {name: self.get_parameter(name) for name in names}

    def experts_weights(self) -> ExpertWeights:
        """Returns the experts' weights as the operators take them; they may be copies."""
        return self._dynamo_moe_spec.experts.weights(self)

    def experts_options(self) -> ExpertOptions:
        """Returns the experts' options."""
        return self._dynamo_moe_spec.experts.options

    def forget_weights(self) -> None:
        """Releases what calls have kept."""
        self._dynamo_moe_weights = CachedWeights()

    def kept_weights(self) -> tuple[Tensor, Tensor]:
        """Returns w1 ``[E, F, D]`` and w2 ``[E, D, H]``, which calls without gradients use."""
        with torch.no_grad():
            weights = self._dynamo_moe_weights.get(self._dynamo_moe_spec.experts, self)
        return weights.w1, weights.w2

    def keep_weights(self, w1: Tensor, w2: Tensor) -> None:
        """Makes calls use these weights, offloaded, which lie in the parameters' memory."""
        self._dynamo_moe_weights.keep(self._dynamo_moe_spec.experts, self, w1, w2)

    def extra_repr(self) -> str:
        """The record in words, for ``print(model)``."""
        experts = self._dynamo_moe_spec.experts
        computed = f"experts={experts.num_experts}, {experts.options.activation}"
        return ", ".join(filter(None, [super().extra_repr(), computed]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class is made at run time; pickle would not find it.
        state = super().__reduce_ex__(protocol)[2]
        return _restored, (self._dynamo_moe_original,), state


@functools.cache
def _converted_class(original: Any) -> type[ConvertedLayer]:
    @functools.wraps(original.forward)  # A file's inputs are named after its arguments.
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return ConvertedLayer.forward(module, *args, **kwargs)

    known = {
        "__module__": original.__module__,
        "_dynamo_moe_original": original,
        "forward": forward,
    }
    return type(f"Converted{original.__name__}", (ConvertedLayer, original), known)


def _restored(original: Any) -> nn.Module:
    made = _converted_class(original)
    return made.__new__(made)
