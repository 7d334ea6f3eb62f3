"""What a layer's experts compute: every way to combine their matrices is tried, on random numbers.

An expert that is a module is called by itself, which settles it. Stacked weights cannot be called:
each way that fits their shapes is a candidate, to be tried with the whole layer.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.options import ExpertOptions
from dynamo_moe.conversion.activation import possible_activations, possible_gatings
from dynamo_moe.conversion.expert_weights import ExpertsSpec, ExpertWeights, ParameterStack
from dynamo_moe.conversion.locate_layers import ExpertList, ExpertStacks, without_leading_ones
from dynamo_moe.conversion.observation import (
    preserving_state,
    random_weights,
    using_tensors,
)
from dynamo_moe.private import has_forward_hooks

__all__ = ["identify_experts"]

# gpt-oss's numbers, which stand in its reference's code; other models have attributes of such
# names.
_CLAMP_NUMBERS = {ExpertOptions.alpha, ExpertOptions.limit}
_CLAMP_WORDS = ("limit", "clamp", "alpha")
# RMS of what enters the activation, for each of an expert's tokens: clamps show with large ones.
_SIZES = (0.3, 2.0, 2.0, 10.0, 40.0)
# Relative to the RMS of an expert's result: another activation differs by 1e-2 and more.
_TOLERANCE = 1e-4


def identify_experts(module: nn.Module, experts: ExpertList | ExpertStacks) -> list[ExpertsSpec]:
    """Returns what a layer's experts may compute: one candidate, where an expert can be called.

    Args:
        module: The layer.
        experts: Its experts, by their path in it.

    Raises:
        ValueError: If they are none that the operators compute; with the reason.
    """
    if isinstance(experts, ExpertList):
        return _identify_list(module, experts.path)
    candidates = list(_identify_stacks(module, experts))
    if not candidates:
        names = ", ".join(names[0] for names in experts.names)
        raise ValueError(
            f"its stacks of {experts.num_experts} experts ({names}) are not the two or three "
            "matrices of an MLP"
        )
    return candidates


# --- Experts that are modules ---


def _identify_list(module: nn.Module, path: str) -> list[ExpertsSpec]:
    children = dict(module.get_submodule(path).named_children())
    first = next(iter(children.values()))
    parameters = dict(first.named_parameters())
    shapes = _check_parameters(parameters)
    _check_same_structure(children, parameters)
    weights = random_weights(first, [*parameters, *dict(first.named_buffers())])
    prefix = f"{path}." if path else ""

    def of_all(stack: ParameterStack) -> ParameterStack:
        names = tuple(f"{prefix}{key}.{stack.names[0]}" for key in children)
        return replace(stack, names=names, num_experts=len(children))

    runs: dict[Any, tuple[Tensor, Any]] = {}
    candidates: list[ExpertsSpec] = []
    for expert in _candidates(
        {name: shape for name, shape in shapes.items() if len(shape) == 2},
        {name: shape[0] for name, shape in shapes.items() if len(shape) == 1},
        _clamp_numbers(module, first),
        lambda name: ParameterStack((name,), 1),
    ):
        with using_tensors(first, weights):
            given = expert.weights(first)
        layout = expert.first, expert.second
        if layout not in runs:
            x_TD = _tokens(given.w1)
            runs[layout] = x_TD, _run(first, weights, x_TD)
        x_TD, expected = runs[layout]
        candidate = replace(
            expert,
            first=tuple(map(of_all, expert.first)),
            first_bias=tuple(map(of_all, expert.first_bias)),
            second=of_all(expert.second),
            second_bias=None if expert.second_bias is None else of_all(expert.second_bias),
        )
        if isinstance(expected, Exception):
            candidates.append(candidate)
        elif _agree(_compute(given, expert.options, x_TD), expected):
            _check_same_function(children, weights, x_TD, expected)
            return [candidate]
    if not candidates:
        raise ValueError("an expert computes nothing that torch.ops.moe computes")
    return candidates


def _check_parameters(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the parameters' shapes.

    Raises:
        ValueError: If they are not two or three matrices and vectors.
    """
    if any("parametrizations" in name for name in parameters):
        raise ValueError(
            "an expert's weights are parametrized: make them parameters first, with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    shapes = {name: without_leading_ones(p) for name, p in parameters.items()}
    dimensions = [len(shape) for shape in shapes.values()]
    if dimensions.count(2) not in (2, 3) or not set(dimensions) <= {1, 2}:
        is_lora = any("lora" in name.lower() for name in parameters)
        raise ValueError(
            f"an expert's parameters ({', '.join(parameters)}) are not two or three matrices and "
            f"their biases{': merge their adapters first' if is_lora else ''}"
        )
    return shapes


def _check_same_structure(
    children: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]
) -> None:
    shapes = {name: p.shape for name, p in parameters.items()}
    for key, child in children.items():
        if {name: p.shape for name, p in child.named_parameters()} != shapes:
            raise ValueError(f"expert {key} has other parameters than the first")
        if any(map(has_forward_hooks, child.modules())):
            raise ValueError(f"expert {key} has forward hooks, which would not run")


def _check_same_function(
    children: Mapping[str, nn.Module], weights: dict[str, Tensor], x_TD: Tensor, expected: Tensor
) -> None:
    """Raises ValueError unless all experts compute the same from the same weights."""
    for key, child in children.items():
        if not _agree(_run(child, weights, x_TD), expected):
            raise ValueError(f"expert {key} computes something else than the first")


def _tokens(w1_EFD: Tensor) -> Tensor:
    """Returns tokens ``[T, D]`` that tell activations apart."""
    width = w1_EFD.shape[-1]
    random_TD = torch.randn(len(_SIZES), width, generator=torch.Generator().manual_seed(1))
    size = float(w1_EFD.float().square().mean().sqrt()) * math.sqrt(width)
    sizes_T1 = torch.tensor(_SIZES)[:, None]
    return (random_TD * (sizes_T1 / max(size, 1e-6))).to(w1_EFD.device, w1_EFD.dtype)


def _run(expert: nn.Module, weights: dict[str, Tensor], x_TD: Tensor) -> Any:
    """Returns what an expert returns, or the exception that it raises."""
    try:
        with preserving_state(expert), torch.no_grad(), using_tensors(expert, weights):
            return expert(x_TD)
    except Exception as failure:  # It is the user's: anything can come out of it.
        return failure


def _compute(weights: ExpertWeights, options: ExpertOptions, x_TD: Tensor) -> Tensor:
    """Returns what a single expert computes, ``[T, D]``."""
    ids_T1 = torch.zeros(len(x_TD), 1, dtype=torch.long, device=x_TD.device)
    ones_T1 = x_TD.new_ones(len(x_TD), 1)
    with torch.no_grad():
        return custom_ops.experts(x_TD, ids_T1, ones_T1, *weights, **asdict(options))


def _agree(result: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != result.shape:
        return False
    scale_T1 = expected.double().square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
    errors_TD = (result.double() - expected.double()).abs() / scale_T1
    return bool(errors_TD.max() <= _TOLERANCE)


# --- Experts that are stacks ---


def _identify_stacks(module: nn.Module, experts: ExpertStacks) -> Iterator[ExpertsSpec]:
    prefix = f"{experts.path}." if experts.path else ""
    stacks = {prefix + names[0]: tuple(prefix + name for name in names) for names in experts.names}
    count = experts.num_experts
    parameters = dict(module.named_parameters())
    owners = {name.rpartition(".")[0] for name in stacks}
    biases = {
        name: p.numel() // count
        for name, p in parameters.items()
        if name not in stacks
        and name.rpartition(".")[0] in owners
        and p.shape[0] == count
        and (p.ndim == 2 or (p.ndim == 3 and 1 in p.shape[1:]))
    }
    return _candidates(
        {name: ParameterStack(names, count).shape(module) for name, names in stacks.items()},
        biases,
        _clamp_numbers(module, module.get_submodule(experts.path)),
        lambda name: ParameterStack(stacks.get(name, (name,)), count),
    )


# --- Ways to combine matrices ---


def _candidates(
    matrices: Mapping[str, tuple[int, ...]],
    vectors: Mapping[str, int],
    numbers: Sequence[float],
    stack: Callable[[str], ParameterStack],
) -> Iterator[ExpertsSpec]:
    """Yields what experts may compute, by the shapes of one expert's matrices and vectors."""
    for layout in _layouts(matrices):
        biases = _biases(layout, vectors)
        if biases is None:
            continue
        first_bias, second_bias = biases
        for options, up_first in _activations(layout, numbers):
            yield ExpertsSpec(
                tuple(replace(stack(n), transposed=layout.first_transposed) for n in layout.first),
                tuple(map(stack, first_bias)),
                replace(stack(layout.second), transposed=layout.second_transposed),
                None if second_bias is None else stack(second_bias),
                options,
                up_first,
            )


@dataclass(frozen=True)
class _Layout:
    """Which matrix is which, and how they are stored.

    Attributes:
        first: The one or two matrices of the first product.
        second: The matrix of the second product.
        first_transposed: Whether those of the first are stored (in, out).
        second_transposed: Whether that of the second is.
        hidden: H.
        width: D.
        gated: Whether F is 2H.
    """

    first: tuple[str, ...]
    second: str
    first_transposed: bool
    second_transposed: bool
    hidden: int
    width: int
    gated: bool


def _layouts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Layout]:
    """Yields the layouts that fit; the last matrix is tried first as that of the second product."""
    for second in reversed(list(shapes)):
        others = [name for name in shapes if name != second]
        for first_turned, second_turned in itertools.product((False, True), repeat=2):
            width, hidden = _turned(shapes[second], second_turned)
            for first in itertools.permutations(others):
                firsts = {_turned(shapes[name], first_turned) for name in first}
                gated = len(first) == 2 or firsts == {(2 * hidden, width)}
                if firsts == {(hidden, width)} or (len(first) == 1 and gated):
                    yield _Layout(first, second, first_turned, second_turned, hidden, width, gated)


def _turned(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return shape[::-1] if transposed else shape


def _biases(layout: _Layout, vectors: Mapping[str, int]) -> tuple[list[str], str | None] | None:
    """Returns the biases of the first product and of the second; None if one fits nowhere."""
    remaining = dict(vectors)

    def take(matrix: str, size: int) -> str | None:
        # That of the same module first: w1.weight and w1.bias.
        owner = matrix.rpartition(".")[0]
        alike = sorted(remaining, key=lambda name: name.rpartition(".")[0] != owner)
        name = next((name for name in alike if remaining[name] == size), None)
        if name is not None and (owner == name.rpartition(".")[0] or "." not in matrix):
            del remaining[name]
            return name
        return None

    rows = 2 * layout.hidden if layout.gated and len(layout.first) == 1 else layout.hidden
    first = [take(matrix, rows) for matrix in layout.first]
    second = take(layout.second, layout.width)
    named = [name for name in first if name is not None]
    if remaining or len(named) not in (0, len(first)):
        return None
    return named, second


def _activations(layout: _Layout, numbers: Sequence[float]) -> Iterator[tuple[ExpertOptions, bool]]:
    """Yields the options that a layout may have, each with whether up rows come first."""
    if not layout.gated:
        yield from ((options, False) for options in possible_activations())
        return
    orders = ((False, False), (False, True), (True, False))
    for interleaved, up_first in orders if len(layout.first) == 1 else orders[:1]:
        gatings = possible_gatings(
            interleaved=interleaved, limits=() if up_first else numbers, alphas=numbers
        )
        yield from ((options, up_first) for options in gatings)


def _clamp_numbers(*modules: nn.Module) -> list[float]:
    """Returns the numbers that a clamp or the slope of a sigmoid may have."""
    parts = [part for module in modules for part in (module, *module.children())]
    named = {
        float(value)
        for part in parts
        for name, value in vars(part).items()
        if type(value) in (int, float) and value > 0 and any(word in name for word in _CLAMP_WORDS)
    }
    return sorted(named | _CLAMP_NUMBERS)
