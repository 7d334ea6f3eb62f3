"""Identifies a layer's experts: every way to combine their matrices is tried, on random numbers.

An expert that is a module is called by itself, which settles it. Stacked weights cannot be called:
each way that fits their shapes is a candidate, to be tried with the whole layer.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.expert_weights import ExpertWeights
from custom_ops.options import ExpertOptions
from dynamo_moe import pytree
from dynamo_moe.conversion.activation import (
    NO_NUMBERS,
    GatingNumbers,
    is_rare,
    numbers_named,
    possible_activations,
    softcaps_of,
)
from dynamo_moe.conversion.expert_weights import ExpertsSpec, ParameterStack
from dynamo_moe.conversion.locate_layers import (
    LocatedExperts,
    list_members,
    without_leading_ones,
)
from dynamo_moe.conversion.observation import preserving_state, random_weights, using_tensors
from dynamo_moe.private.pytorch import has_forward_hooks

# gpt-oss's numbers, which stand in its reference's code; other models have attributes of such
# names.
_CLAMP_NUMBERS = {ExpertOptions.alpha, ExpertOptions.limit}
# Why experts of low rank are none that the operators compute.
LORAS = (
    "a mixture of LoRAs that are not two lists of linear layers of one rank, from and to its "
    "tokens' width"
)
_CLAMP_WORDS = ("limit", "clamp", "alpha")
# RMS of the activation's input, for each of an expert's tokens: clamps show with large ones.
_SIZES = (0.3, 2.0, 2.0, 10.0, 40.0)
# Relative to the RMS of an expert's result: GELU's two forms differ by 2.5e-4, any other two
# activations by 1e-2 and more.
_TOLERANCE = 1e-4


def identify_experts(module: nn.Module, experts: LocatedExperts) -> list[ExpertsSpec]:
    """Returns the candidates for a layer's experts: one, where an expert can be called.

    Args:
        module: The layer.
        experts: Its experts, by their path in it.

    Raises:
        ValueError: If they are none that the operators compute; with the reason.
    """
    if not experts.stacks:
        return _identify_list(module, experts.path)
    candidates = _identify_stacks(module, experts)
    if not candidates:
        names = ", ".join(names[0] for names in experts.stacks)
        raise ValueError(
            f"its stacks of {experts.num_experts} experts ({names}) are not the two or three "
            "matrices of an MLP"
        )
    return candidates


def is_lora(name: str) -> bool:
    """Whether a name is that of a product of low rank."""
    return "lora" in name.lower()


# --- Experts that are modules ---


def _identify_list(module: nn.Module, path: str) -> list[ExpertsSpec]:
    children = _most_alike(list_members(module.get_submodule(path)))
    first = next(iter(children.values()))
    parameters = dict(first.named_parameters())
    stacks = _stacks_of_one(parameters)
    _check_same_structure(children, parameters)
    weights = random_weights(first)
    prefix = f"{path}." if path else ""

    def of_all(stack: ParameterStack) -> ParameterStack:
        names = tuple(f"{prefix}{key}.{stack.names[0]}" for key in children)
        return replace(stack, names=names, shape=(len(children), *stack.shape[1:]))

    runs: dict[Any, tuple[Tensor, Any]] = {}
    unknown: list[ExpertsSpec] = []
    for expert in _candidates(stacks, _gating_numbers(module, first)):
        with using_tensors(first, weights):
            expert_weights = expert.weights(first)
        layout = expert.w1, expert.w2
        if layout not in runs:
            x_TD = _tokens(expert_weights.w1)
            runs[layout] = x_TD, _run(first, weights, x_TD)
        x_TD, expected = runs[layout]
        operands = (expert.w1, expert.b1, expert.w2, expert.b2)
        w1, b1, w2, b2 = (tuple(map(of_all, operand)) for operand in operands)
        candidate = replace(expert, w1=w1, b1=b1, w2=w2, b2=b2)
        if isinstance(expected, Exception):
            unknown.append(candidate)
        elif _agree(_compute(expert_weights, expert.options, x_TD), expected):
            _check_same_function(children, weights, x_TD, expected)
            return [candidate]
    # An expert that takes more than tokens is tried with the whole layer.
    if not unknown or any(isinstance(result, Tensor) for _, result in runs.values()):
        is_product = any(map(is_lora, parameters))
        raise ValueError(
            LORAS if is_product else "an expert computes nothing that torch.ops.moe computes"
        )
    return unknown


def _most_alike(children: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """Returns the experts with the same parameters, if most of them have these, else all.

    The others, such as ones that give zeros or the token, stay what the layer's own code runs.
    """
    kinds: dict[Any, dict[str, nn.Module]] = {}
    for name, child in children.items():
        layout = tuple((path, tuple(p.shape)) for path, p in child.named_parameters())
        kinds.setdefault(layout, {})[name] = child
    largest = max(kinds.values(), key=len)
    return largest if 2 * len(largest) > len(children) else children


def _stacks_of_one(parameters: Mapping[str, Tensor]) -> list[ParameterStack]:
    """Returns the stacks of a single expert; raises ValueError unless it is an MLP's."""
    if any("parametrizations" in name for name in parameters):
        raise ValueError(
            "an expert's weights are parametrized: make them parameters first, with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    shapes = {name: without_leading_ones(p) for name, p in parameters.items()}
    dimensions = [len(shape) for shape in shapes.values()]
    if dimensions.count(2) not in (2, 3) or not set(dimensions) <= {1, 2}:
        has_adapters = any(map(is_lora, parameters))
        raise ValueError(
            f"an expert's parameters ({', '.join(parameters)}) are not two or three matrices and "
            f"their biases{': merge their adapters first' if has_adapters else ''}"
        )
    return [ParameterStack((name,), (1, *shape)) for name, shape in shapes.items()]


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
    """Returns an expert's result, the first of several, or the exception that it raises."""
    try:
        with preserving_state(expert), torch.no_grad(), using_tensors(expert, weights):
            return next(iter(pytree.tree_leaves(expert(x_TD))))
    except Exception as failure:  # It is the user's: anything can come out of it.
        return failure


def _compute(weights: ExpertWeights, options: ExpertOptions, x_TD: Tensor) -> Tensor:
    """Returns a single expert's result, ``[T, D]``."""
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


def _identify_stacks(module: nn.Module, experts: LocatedExperts) -> list[ExpertsSpec]:
    prefix = f"{experts.path}." if experts.path else ""
    count = experts.num_experts
    parameters = dict(module.named_parameters())
    stacks: list[ParameterStack] = []
    for names in experts.stacks:
        paths = tuple(prefix + name for name in names)
        # A shared parameter is in named_parameters() by one of its paths only.
        matrices: list[Tensor] = [module.get_parameter(path) for path in paths]
        columns = matrices[0].shape[-1]
        numbers = sum(parameter.numel() for parameter in matrices)
        shape = (count, numbers // (count * columns), columns)
        stacks.append(ParameterStack(paths, shape if matrices[0].ndim > 1 else (count, columns)))
    known = {stack.names[0] for stack in stacks}
    owners = {_owner(stack) for stack in stacks}
    for name, p in parameters.items():
        bias = ParameterStack((name,), (count, p.numel() // count))
        is_vector = p.ndim == 2 or (p.ndim == 3 and 1 in p.shape[1:])
        if is_vector and p.shape[0] == count and name not in known and _owner(bias) in owners:
            stacks.append(bias)
    of_gating = _gating_numbers(module, module.get_submodule(experts.path))
    candidates = _candidates(stacks, of_gating)
    used = {name for stack in stacks for name in stack.names}
    if any(p.ndim == 2 and count in p.shape for name, p in parameters.items() if name not in used):
        return candidates
    # Nothing else can be the router: it may have been taken for the experts' biases [E, D].
    for bias in stacks:
        if len(bias.shape) == 2:
            candidates += _candidates([stack for stack in stacks if stack is not bias], of_gating)
    return candidates


# --- Ways to combine matrices ---


def _candidates(stacks: Sequence[ParameterStack], numbers: GatingNumbers) -> list[ExpertsSpec]:
    """Returns the candidates for experts of these matrices and biases, rare activations last."""
    return sorted(_combinations(stacks, numbers), key=lambda experts: is_rare(experts.options))


def _combinations(
    stacks: Sequence[ParameterStack], numbers: GatingNumbers
) -> Iterator[ExpertsSpec]:
    """Yields every way to combine matrices and biases, with every activation."""
    matrices = [stack for stack in stacks if len(stack.shape) == 3]
    vectors = [stack for stack in stacks if len(stack.shape) == 2]
    # The last matrix is tried first as that of the second product.
    for second in reversed(matrices):
        others = [matrix for matrix in matrices if matrix is not second]
        for turned, second_turned in itertools.product((False, True), repeat=2):
            w2 = replace(second, transposed=second_turned)
            width, hidden = w2.sizes
            for permuted in itertools.permutations(others):
                w1 = tuple(replace(matrix, transposed=turned) for matrix in permuted)
                sizes = {matrix.sizes for matrix in w1}
                halves = len(w1) == 1 and sizes == {(2 * hidden, width)}  # Gate and up in one.
                biases = _biases(w1, w2, vectors)
                if biases is None or not (halves or sizes == {(hidden, width)}):
                    continue
                b1, b2 = biases
                gated = halves or len(w1) == 2
                for options, up_first in _activations(numbers, gated=gated, halves=halves):
                    yield ExpertsSpec(w1, b1, (w2,), b2, options, up_first)


def _biases(
    w1: Sequence[ParameterStack], w2: ParameterStack, vectors: Sequence[ParameterStack]
) -> tuple[tuple[ParameterStack, ...], tuple[ParameterStack, ...]] | None:
    """Returns the biases of the first product and of the second; None if one fits nowhere."""
    remaining = list(vectors)

    def take(matrix: ParameterStack) -> list[ParameterStack]:
        # That of the same module first: w1.weight and w1.bias.
        owner = _owner(matrix)
        alike = sorted(remaining, key=lambda vector: _owner(vector) != owner)
        for vector in alike:
            if vector.sizes == matrix.sizes[:1] and (not owner or _owner(vector) == owner):
                remaining.remove(vector)
                return [vector]
        return []

    b1 = tuple(itertools.chain.from_iterable(map(take, w1)))
    b2 = tuple(take(w2))
    return None if remaining or len(b1) not in (0, len(w1)) else (b1, b2)


def _owner(stack: ParameterStack) -> str:
    """Returns the module that has a stack; that of the first expert's, of a list of modules."""
    owner, _, name = stack.names[0].rpartition(".")
    return owner.rpartition(".")[0] if name.isdigit() else owner  # A list of parameters.


def _activations(
    numbers: GatingNumbers, *, gated: bool, halves: bool
) -> Iterator[tuple[ExpertOptions, bool]]:
    """Yields the options that experts may have, each with whether up rows come first."""
    orders = ((False, False), (False, True), (True, False)) if halves else ((False, False),)
    for interleaved, up_first in orders:
        of_order = NO_NUMBERS if up_first else numbers
        for options in possible_activations(gated=gated, interleaved=interleaved, numbers=of_order):
            yield options, up_first


def _gating_numbers(layer: nn.Module, experts: nn.Module) -> GatingNumbers:
    """Returns the numbers that the gating of a layer's experts may have."""
    parts = [layer, *layer.children(), experts, *experts.children()]
    clamps = sorted(numbers_named(parts, _CLAMP_WORDS) | _CLAMP_NUMBERS)
    return GatingNumbers(clamps, clamps, softcaps_of([*parts, *experts.modules()]))
