"""Finding where a module has its experts, and what they compute, by shapes and by numbers.

Legend: D model width, H hidden width, F = H, or 2H when gated, E experts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from custom_ops.activations import activate
from custom_ops.options import CLAMPED, POINTWISE, ExpertOptions
from dynamo_moe.conversion.observing import random_weights, undisturbed, with_tensors
from dynamo_moe.conversion.stacks import Experts, Stack
from dynamo_moe.private import has_forward_hooks

__all__ = ["ListOfExperts", "StacksOfExperts", "experts_of_list", "experts_of_stacks", "holders"]

# gpt-oss's, which its reference has in the code; and what others call theirs.
_CLAMP_NUMBERS = {ExpertOptions.alpha, ExpertOptions.limit}
_CLAMP_WORDS = ("limit", "clamp", "alpha")
# Of a stack [E, 1, n].
_BIAS = re.compile(r".*bias.*|b\d*")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# RMS of what enters the activation, for each of an expert's tokens: clamps show with large ones.
_SIZES = (0.3, 2.0, 2.0, 10.0, 40.0)
# Relative to the RMS of an expert's result: another activation differs by 1e-2 and more.
_TOLERANCE = 1e-4

_Shape = tuple[int, int]


@dataclass(frozen=True)
class ListOfExperts:
    """Experts that are modules of their own, in a list.

    Attributes:
        path: The list, in the model.
        experts: Their number.
    """

    path: str
    experts: int


@dataclass(frozen=True)
class StacksOfExperts:
    """Experts whose weights are stacked.

    Attributes:
        path: The innermost module that holds the stacks, in the model.
        names: The stacks, in that module: one parameter each, or a list of one for each expert.
        experts: E.
    """

    path: str
    names: tuple[tuple[str, ...], ...]
    experts: int


@dataclass(frozen=True)
class _Form:
    """Which matrix is which, and how they are stored.

    Attributes:
        first: The one or two matrices of the first product, by place.
        second: That of the second, by place.
        transposed: Whether those of the first, and that of the second, are stored (in, out).
        hidden: H.
        width: D.
        gated: Whether F is 2H.
    """

    first: tuple[int, ...]
    second: int
    transposed: tuple[bool, bool]
    hidden: int
    width: int
    gated: bool


def holders(model: nn.Module) -> Iterator[ListOfExperts | StacksOfExperts]:
    """Yields where a model holds what may be experts, by shapes alone."""
    within: set[nn.Module] = set()
    named: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in within:
            continue
        if _may_be_experts(path, module):
            within.update(module.modules())
            yield ListOfExperts(path, len(list(module.children())))
            if "expert" in path.rpartition(".")[2].lower():
                named.update(module.modules())
    yield from _stacks(model, named)


def _may_be_experts(path: str, module: nn.Module) -> bool:
    children = list(module.children())
    named = "expert" in path.rpartition(".")[2].lower()
    if len(children) < 2 or not isinstance(module, _LISTS):
        return False
    if named:
        return True
    if isinstance(module, nn.Sequential) or len({type(child) for child in children}) > 1:
        return False
    if any(isinstance(part, (nn.ModuleList, nn.ModuleDict)) for part in children[0].modules()):
        return False  # Blocks of a model, which may have experts in them.
    dimensions = [len(_without_ones(p)) for p in children[0].parameters()]
    return dimensions.count(2) in (2, 3) and set(dimensions) <= {1, 2}


def _stacks(model: nn.Module, within: set[nn.Module]) -> Iterator[StacksOfExperts]:
    """Yields the modules with two or more parameters ``[E, a, b]``, the innermost ones."""
    found: list[str] = []
    modules = list(model.named_modules())
    for path, module in reversed(modules):
        prefix = f"{path}." if path else ""
        if any(f"{inner}.".startswith(prefix) for inner in found):
            continue
        if within & {*module.modules()}:
            continue
        for names, experts in _stacked_names(module):
            found.append(path)
            yield StacksOfExperts(path, names, experts)


def _stacked_names(module: nn.Module) -> Iterator[tuple[tuple[tuple[str, ...], ...], int]]:
    parameters = dict(module.named_parameters())
    by_experts: dict[int, list[tuple[str, ...]]] = {}
    for name, parameter in parameters.items():
        if parameter.ndim == 3 and not _BIAS.fullmatch(name.rpartition(".")[2]):
            by_experts.setdefault(parameter.shape[0], []).append((name,))
    for name, child in module.named_children():
        held = dict(child.named_parameters()) if isinstance(child, nn.ParameterList) else {}
        shapes = {p.shape for p in held.values()}
        if len(held) > 1 and len(shapes) == 1 and len(next(iter(shapes))) == 2:
            by_experts.setdefault(len(held), []).append(tuple(f"{name}.{key}" for key in held))
    for experts, stacks in by_experts.items():
        if len(stacks) in (2, 3):
            yield tuple(stacks), experts
    # Stacked along the rows of one matrix. A number among the attributes says how many there are.
    direct = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
    sizes = {tuple(p.shape) for p in direct.values()}
    counts = sorted({v for v in vars(module).values() if type(v) is int and v > 1}, reverse=True)
    if len(direct) in (2, 3) and len(sizes) <= 2:
        for experts in counts:
            if all(p.shape[0] % experts == 0 and p.shape[0] > experts for p in direct.values()):
                yield tuple((name,) for name in direct), experts


def experts_of_list(module: nn.Module, path: str) -> list[Experts]:
    """Returns what a list of experts may compute: one guess, where an expert can be called alone.

    Args:
        module: What the paths of the result begin at.
        path: The list, in it.

    Raises:
        ValueError: If they are none that the operators compute; with the reason.
    """
    children = dict(module.get_submodule(path).named_children())
    first = next(iter(children.values()))
    names = dict(first.named_parameters())
    if any("parametrizations" in name for name in names):
        raise ValueError(
            "an expert's weights are parametrized: make them parameters first, with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    _check_alike(children, names)
    shapes = {name: _without_ones(p) for name, p in names.items()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(matrices) not in (2, 3) or any(len(shape) not in (1, 2) for shape in shapes.values()):
        hint = ": merge their adapters first" if any("lora" in n.lower() for n in names) else ""
        raise ValueError(
            f"an expert's parameters ({', '.join(names)}) are not two or three matrices and their "
            f"biases{hint}"
        )
    weights = random_weights(first, [*names, *dict(first.named_buffers())])
    vectors = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
    options = _options(module, first)
    guesses: list[Experts] = []
    failed = False
    for form in _forms([shapes[name] for name in matrices]):
        biases = _biases(form, matrices, vectors)
        if biases is None:
            continue
        given = _Given(matrices, biases, form, weights)
        x_TD = _tokens(given.w1)
        expected = _run(first, weights, x_TD)
        failed = failed or isinstance(expected, Exception)
        for option, up_first in options.of(form):
            guess = Experts(
                tuple(_stack(path, children, matrices[p], form.transposed[0]) for p in form.first),
                tuple(_stack(path, children, name) for name in biases[0]),
                _stack(path, children, matrices[form.second], form.transposed[1]),
                None if biases[1] is None else _stack(path, children, biases[1]),
                option,
                up_first,
            )
            if isinstance(expected, Exception):
                guesses.append(guess)
            elif _agree(given.result(x_TD, option, up_first=up_first), expected):
                _check_all(children, weights, x_TD, expected)
                return [guess]
    if not failed:
        raise ValueError("an expert computes nothing that torch.ops.moe computes")
    return guesses


@dataclass(frozen=True)
class _Given:
    """One expert's weights, in a form."""

    matrices: Sequence[str]
    biases: tuple[list[str], str | None]
    form: _Form
    weights: dict[str, Tensor]

    @property
    def w1(self) -> Tensor:
        """``[F, D]``."""
        parts = [self._matrix(place, self.form.transposed[0]) for place in self.form.first]
        return torch.cat(parts)

    def result(self, x_TD: Tensor, options: ExpertOptions, *, up_first: bool) -> Tensor:
        """Returns what the expert computes ``[T, D]``, if it computes so."""
        rows_TF = x_TD @ self.w1.mT
        if self.biases[0]:
            rows_TF = rows_TF + torch.cat([self.weights[n].reshape(-1) for n in self.biases[0]])
        if up_first:
            rows_TF = torch.cat(rows_TF.chunk(2, dim=-1)[::-1], dim=-1)
        y_TD = (
            activate(rows_TF, options) @ self._matrix(self.form.second, self.form.transposed[1]).mT
        )
        bias = self.biases[1]
        return y_TD if bias is None else y_TD + self.weights[bias].reshape(-1)

    def _matrix(self, place: int, transposed: bool) -> Tensor:
        weight = self.weights[self.matrices[place]]
        weight = weight.reshape(-1, weight.shape[-1])
        return weight.mT if transposed else weight


def _stack(path: str, children: Collection[str], name: str, transposed: bool = False) -> Stack:
    prefix = f"{path}." if path else ""
    return Stack(tuple(f"{prefix}{key}.{name}" for key in children), len(children), transposed)


def _without_ones(parameter: Tensor) -> tuple[int, ...]:
    """Returns a parameter's sizes, without leading ones: some libraries have experts of experts."""
    shape = tuple(parameter.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def experts_of_stacks(module: nn.Module, prefix: str, held: StacksOfExperts) -> Iterator[Experts]:
    """Yields what stacks of experts may compute, by their shapes.

    Args:
        module: What the paths of the result begin at.
        prefix: The module that holds the stacks, in it, with a dot; or empty.
        held: The stacks.
    """
    stacks = [tuple(prefix + name for name in names) for names in held.names]
    names = [stack[0] for stack in stacks]
    parameters = dict(module.named_parameters())
    experts = held.experts
    shapes = []
    for stack in stacks:
        parameter = parameters[stack[0]]
        rows, columns = parameter.shape[-2:]
        under = parameter.ndim == 2 and len(stack) == 1  # All experts' rows under one another.
        shapes.append((rows // experts if under else rows, columns))
    owners = {name.rpartition(".")[0] for name in names}
    vectors = {
        name: p.numel() // experts
        for name, p in parameters.items()
        if name not in names
        and name.rpartition(".")[0] in owners
        and p.shape[0] == experts
        and (p.ndim == 2 or (p.ndim == 3 and 1 in p.shape[1:]))
    }
    options = _options(module, module.get_submodule(prefix.rstrip(".")))
    for form in _forms(shapes):
        biases = _biases(form, names, vectors)
        if biases is None:
            continue
        for option, up_first in options.of(form):
            yield Experts(
                tuple(Stack(stacks[p], experts, form.transposed[0]) for p in form.first),
                tuple(Stack((name,), experts) for name in biases[0]),
                Stack(stacks[form.second], experts, form.transposed[1]),
                None if biases[1] is None else Stack((biases[1],), experts),
                option,
                up_first,
            )


@dataclass(frozen=True)
class _Options:
    """The activations to try, in order, and the numbers that a clamp may have."""

    plain: tuple[str, ...]
    numbers: tuple[float, ...]

    def of(self, form: _Form) -> Iterator[tuple[ExpertOptions, bool]]:
        """Yields options for a form, each with whether up rows come first."""
        if not form.gated:
            for activation in self.plain:
                yield ExpertOptions(activation), False
            return
        fused = len(form.first) == 1
        for activation in self.plain:
            yield ExpertOptions(activation, gated=True), False
            if fused:
                yield ExpertOptions(activation, gated=True), True
                yield ExpertOptions(activation, gated=True, interleaved=True), False
        for activation, limit in itertools.product(CLAMPED, self.numbers):
            alphas = [n for n in self.numbers if n != limit] if activation == CLAMPED[0] else [1.0]
            for alpha, interleaved in itertools.product(
                alphas, (False, True) if fused else (False,)
            ):
                yield (
                    ExpertOptions(
                        activation, gated=True, interleaved=interleaved, alpha=alpha, limit=limit
                    ),
                    False,
                )


def _options(*modules: nn.Module) -> _Options:
    parts = [part for module in modules for part in (module, *module.children())]
    named = [(name, value) for part in parts for name, value in vars(part).items()]
    numbers = {
        float(value)
        for name, value in named
        if type(value) in (int, float) and value > 0 and any(word in name for word in _CLAMP_WORDS)
    }
    return _Options(POINTWISE, tuple(sorted(numbers | _CLAMP_NUMBERS)))


def _forms(shapes: Sequence[Any]) -> Iterator[_Form]:
    """Yields which matrix may be which: the last one first as that of the second product."""
    places = range(len(shapes))
    for second in reversed(places):
        others = [place for place in places if place != second]
        for transposed in itertools.product((False, True), repeat=2):
            orders = itertools.permutations(others) if len(others) == 2 else [tuple(others)]
            for first in orders:
                form = _form(shapes, tuple(first), second, transposed)
                if form is not None:
                    yield form


def _form(
    shapes: Sequence[_Shape], first: tuple[int, ...], second: int, transposed: tuple[bool, ...]
) -> _Form | None:
    def turned(shape: _Shape, is_transposed: bool) -> _Shape:
        return (shape[1], shape[0]) if is_transposed else shape

    (width, hidden) = turned(shapes[second], transposed[1])
    ups = {turned(shapes[place], transposed[0]) for place in first}
    if len(first) == 2:
        gated, fits = True, ups == {(hidden, width)}
    else:
        gated = ups == {(2 * hidden, width)}
        fits = gated or ups == {(hidden, width)}
    return (
        _Form(first, second, (transposed[0], transposed[1]), hidden, width, gated) if fits else None
    )


def _biases(
    form: _Form, matrices: Sequence[str], vectors: dict[str, int]
) -> tuple[list[str], str | None] | None:
    """Returns the biases of the first product and of the second; None if one has no place."""
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

    rows = 2 * form.hidden if form.gated and len(form.first) == 1 else form.hidden
    first = [take(matrices[place], rows) for place in form.first]
    second = take(matrices[form.second], form.width)
    named = [name for name in first if name is not None]
    if remaining or len(named) not in (0, len(first)):
        return None
    return named, second


def _check_alike(children: dict[str, nn.Module], names: Mapping[str, Tensor]) -> None:
    shapes = {name: p.shape for name, p in names.items()}
    for key, child in children.items():
        if {name: p.shape for name, p in child.named_parameters()} != shapes:
            raise ValueError(f"expert {key} has other parameters than the first")
        if any(map(has_forward_hooks, child.modules())):
            raise ValueError(f"expert {key} has forward hooks, which would not run")


def _check_all(
    children: dict[str, nn.Module], weights: dict[str, Tensor], x_TD: Tensor, expected: Tensor
) -> None:
    """Raises ValueError unless all experts compute the same from the same weights."""
    for key, child in children.items():
        if not _agree(_run(child, weights, x_TD), expected):
            raise ValueError(f"expert {key} computes something else than the first")


def _run(expert: nn.Module, weights: dict[str, Tensor], x_TD: Tensor) -> Any:
    try:
        with undisturbed(expert), torch.no_grad(), with_tensors(expert, weights):
            return expert(x_TD)
    except Exception as failure:  # It is the user's: anything can come out of it.
        return failure


def _agree(result: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != result.shape:
        return False
    scale_T1 = expected.double().square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
    errors_TD = (result.double() - expected.double()).abs() / scale_T1
    return bool(errors_TD.max() <= _TOLERANCE)


def _tokens(w1: Tensor) -> Tensor:
    """Returns tokens ``[T, D]`` with which activations differ."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(len(_SIZES), w1.shape[1], generator=generator)
    size = float(w1.float().square().mean().sqrt()) * math.sqrt(w1.shape[1])
    sizes_T1 = torch.tensor(_SIZES)[:, None]
    return (random * (sizes_T1 / max(size, 1e-6))).to(w1.device, w1.dtype)
