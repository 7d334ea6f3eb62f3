"""Where a model may have MoE layers, by the shapes and names of its modules and weights alone.

Experts are a list of modules of the same structure, stacks of weights, or two or three lists of
linear layers, of which each expert has one of each. The layer is a module around them that also has
something which may choose among them.

Legend: D model width, H hidden width, E experts.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor, nn

from dynamo_moe.modules import ConvertedModule
from dynamo_moe.private.pytorch import own_parts

# From a list of experts up to the layer: the experts may be in a module of their own, and that in
# another.
_LEVELS = 3
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A bias may be stored as [E, 1, n], of as many dimensions as a stack of matrices.
_BIAS = re.compile(r".*bias.*|b\d*")
# Of stacks of matrices: experts, or groups of experts.
_STACK_DIMENSIONS = frozenset({3, 4})
# Their weights have as many dimensions as stacks.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
# Theirs have matrices along the rows: of heads, or of several gates.
_JOINED = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class LocatedExperts:
    """Experts that are modules, in a list, or whose weights are stacked.

    Attributes:
        path: The path of the list, or of the innermost module that holds the stacks.
        num_experts: E.
        stacks: The stacks' parameters, by their path in that module: a single one each, or one for
            each expert, as in lists of linear layers. Empty for a list of experts.
    """

    path: str
    num_experts: int
    stacks: tuple[tuple[str, ...], ...] = ()

    @property
    def are_stacked(self) -> bool:
        """Whether a parameter holds a matrix of every expert."""
        return any(len(names) == 1 for names in self.stacks)

    def holds(self, parameter: str) -> bool:
        """Whether a parameter is an expert's, by its path."""
        inner = parameter.removeprefix(f"{self.path}." if self.path else "")
        if self.stacks:
            return any(inner in names for names in self.stacks)
        return inner != parameter


@dataclass(frozen=True)
class LayerCandidate:
    """A candidate for an MoE layer.

    Attributes:
        path: The innermost module around the experts that may choose among them.
        paths: The modules that may be the layer, the innermost first. Empty if it has several sets
            of experts.
        experts: The experts, by their path in the model.
        is_gated: Whether it has a matrix that may choose among them.
    """

    path: str
    paths: tuple[str, ...]
    experts: LocatedExperts
    is_gated: bool = False

    def is_named(self, model: nn.Module) -> bool:
        """Whether a name says that these are experts, or that there are so many."""
        names = [self.experts.path.rpartition(".")[2]]
        if self.experts.stacks:
            names.append(type(model.get_submodule(self.experts.path)).__name__)
            names += [names_of_stack[0] for names_of_stack in self.experts.stacks]
        counts = numbers_of_experts(model.get_submodule(self.path)).values()
        named = any("expert" in name.lower() for name in names)
        return named or self.experts.num_experts in counts

    def looks_like_moe(self, model: nn.Module) -> bool:
        """Whether it is likely to be one.

        Lists of linear layers may also be a model's layers, one matrix a token or positions, as in
        DINOv2, and matrices of one number factors of channels, as in SwiftFormer.
        """
        is_typical = self.experts.are_stacked or not self.experts.stacks
        if self.experts.stacks:
            holder = model.get_submodule(self.experts.path)
            sizes = [
                holder.get_parameter(name).shape[-2:].numel()
                for names in self.experts.stacks
                for name in names
            ]
            is_typical &= self.experts.num_experts > 1 and max(sizes) > 1
        return self.is_named(model) or (self.is_gated and is_typical)


def locate_layers(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], handled: Set[nn.Module]
) -> list[LayerCandidate]:
    """Returns the candidates for MoE layers.

    Args:
        model: The model.
        modules: Its modules by path, as :func:`modules_by_path` returns them.
        handled: Modules that are out of the question: converted already, or otherwise.
    """
    located = list(_locate_experts(modules))
    stacks_at = Counter(experts.path for experts in located)

    def is_free(path: str) -> bool:
        if sum(is_within(holder, path) for holder in stacks_at) > 1:
            return False
        module = model.get_submodule(path)
        is_converted = any(isinstance(part, ConvertedModule) for part in module.modules())
        return not is_converted and module not in handled

    layers: list[LayerCandidate] = []
    for experts in located:
        known = any(layer.experts.path == experts.path for layer in layers)
        if known or model.get_submodule(experts.path) in handled:
            continue
        paths = list(itertools.takewhile(is_free, _paths_upwards(experts)))
        routing = (path for path in paths if _may_route(model, path, experts))
        if (chosen := next(routing, None)) is not None:
            layers.append(LayerCandidate(chosen, tuple(paths), experts, is_gated=True))
        elif stacks_at[experts.path] == 1:
            path = next(_paths_upwards(experts), "")
            candidate = LayerCandidate(path, tuple(paths), experts)
            around = model.get_submodule(path.rpartition(".")[0] if paths else path)
            # Beside experts that are handled, these are ones that every token visits.
            if handled.isdisjoint(around.modules()) and (
                candidate.is_named(model) or (paths and _has_matrices_of_each(model, experts))
            ):
                layers.append(candidate)
    for experts in _shared_experts(modules, located):
        known_layers = {model.get_submodule(layer.path) for layer in layers}
        paths = []
        for path in itertools.takewhile(is_free, _paths_upwards(experts)):
            if not known_layers.isdisjoint(model.get_submodule(path).modules()):
                break
            paths.append(path)
        routing = (path for path in paths if _may_route(model, path, experts))
        if (chosen := next(routing, None)) is not None:
            layers.append(LayerCandidate(chosen, tuple(paths), experts, is_gated=True))
    return layers


def _shared_experts(
    modules: Sequence[tuple[str, nn.Module]], located: Sequence[LocatedExperts]
) -> Iterator[LocatedExperts]:
    """Yields experts that have been located, by the paths that they have in further layers."""
    first = {module: path for path, module in modules}
    others: dict[str, list[str]] = {}
    for path, module in modules:
        for name, child in own_parts(module)[2].items():
            place = f"{path}.{name}" if path else name
            if child is not None and first[child] != place:
                others.setdefault(first[child], []).append(place)
    for experts in located if others else ():
        for shared in _with_ancestors(experts.path):
            for place in others.get(shared, ()):
                yield replace(experts, path=place + experts.path[len(shared) :])


def is_numbered(name: str) -> bool:
    """Whether a name is that of a single expert, such as ``expert_1``."""
    return bool(re.fullmatch(r".*expert_?\d+", name.lower()))


def numbers_of_experts(module: nn.Module) -> dict[str, int]:
    """Returns the numbers among a module's attributes that are named after experts."""
    return {
        name: value
        for name, value in vars(module).items()
        if "expert" in name.lower() and type(value) is int and value > 1
    }


def _has_matrices_of_each(model: nn.Module, experts: LocatedExperts) -> bool:
    """Whether each of several experts has matrices of its own, and not rows of a common one."""
    holder = model.get_submodule(experts.path)
    return experts.num_experts > 1 and any(
        len(names) > 1 or holder.get_parameter(names[0]).ndim > 2 for names in experts.stacks
    )


def _paths_upwards(experts: LocatedExperts) -> Iterator[str]:
    path = experts.path
    if experts.stacks:
        yield path
    for _ in range(_LEVELS):
        if not path:
            return
        path = path.rpartition(".")[0]
        yield path


def is_within(path: str, ancestor: str) -> bool:
    """Whether a path is another, or in it."""
    return not ancestor or f"{path}.".startswith(f"{ancestor}.")


def _may_route(model: nn.Module, path: str, experts: LocatedExperts) -> bool:
    """Whether a module has a matrix beside its experts that may give E scores for D numbers."""
    holder = model.get_submodule(experts.path)
    stacked = [holder.get_parameter(name) for names in experts.stacks for name in names]
    weights = stacked or list(holder.parameters())
    inner = {id(weight) for weight in weights}
    sizes = {size for weight in weights for size in weight.shape[-2:]}
    # A dimension is not both: of the counts that stacked rows could have, one may be the width.
    return any(
        any(count == experts.num_experts and size in sizes for count, size in (shape, shape[::-1]))
        for name, parameter in model.get_submodule(path).named_parameters()
        if id(parameter) not in inner and "bias" not in name and len(shape := parameter.shape) == 2
    )


def _locate_experts(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[LocatedExperts]:
    """Yields the candidates for experts of a model, whose modules these are."""
    within: set[nn.Module] = set()
    named: set[nn.Module] = set()
    for path, module in modules:
        for _, lists in _lists_of_parts(module):
            within.update(lists)
        if not isinstance(module, _LISTS) or module in within:
            continue
        name = path.rpartition(".")[2]
        is_named = "expert" in name.lower() and not is_numbered(name)
        if _may_be_expert_list(module, is_named=is_named):
            within.update(module.modules())
            yield LocatedExperts(path, len(list_members(module)))
            if is_named:
                named.update(module.modules())
    yield from _locate_stacks(modules, named)


def list_members(experts: nn.Module) -> dict[str, nn.Module]:
    """Returns the members of a list of experts by name; one module may be several of them."""
    _, _, children = own_parts(experts)
    return {name: child for name, child in children.items() if child is not None}


def _may_be_expert_list(module: nn.Module, *, is_named: bool) -> bool:
    children = list(module.children())
    if len(children) < 2:
        return False
    if is_named:
        return True
    if isinstance(module, nn.Sequential) or len({type(child) for child in children}) > 1:
        return False
    if any(isinstance(part, (nn.ModuleList, nn.ModuleDict)) for part in children[0].modules()):
        return False  # Blocks of a model, which may have experts in them.
    dimensions = [len(without_leading_ones(p)) for p in children[0].parameters()]
    return dimensions.count(2) in (2, 3) and set(dimensions) <= {1, 2}


def without_leading_ones(parameter: Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape, without the ones of libraries that stack experts of experts."""
    shape = tuple(parameter.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _locate_stacks(
    modules: Sequence[tuple[str, nn.Module]], excluded: set[nn.Module]
) -> Iterator[LocatedExperts]:
    """Yields the modules with two or three stacks of matrices, the innermost ones."""
    around: set[str] = set()
    parts = [own_parts(module) for _, module in modules]
    dimensions = [
        [p.ndim for p in parameters.values() if p is not None and not _is_kernel(module)]
        for (_, module), (parameters, _, _) in zip(modules, parts, strict=True)
    ]
    holding = {
        module
        for (_, module), ndims in zip(modules, dimensions, strict=True)
        if not _STACK_DIMENSIONS.isdisjoint(ndims)
    }
    holders = _with_those_around(holding, modules)
    for (path, module), ndims, (_, _, children) in zip(
        reversed(modules), reversed(dimensions), reversed(parts), strict=True
    ):
        lists = any(isinstance(child, (nn.ParameterList, *_LISTS)) for child in children.values())
        if module not in holders and ndims.count(2) < 2 and not lists:
            continue  # As most modules.
        if path in around or (excluded and not excluded.isdisjoint(module.modules())):
            continue
        for num_experts, stacks in _stacks_in(module, holds_stacks=module in holders):
            around.update(_with_ancestors(path))
            yield LocatedExperts(path, num_experts, stacks)


def _with_those_around(
    inner: set[nn.Module], modules: Sequence[tuple[str, nn.Module]]
) -> set[nn.Module]:
    """Returns modules and, of a model's, those that have one of them in them."""
    around = {*inner}
    before = -1
    while len(around) > before:  # Again: a module in several places is listed at the first.
        before = len(around)
        for _, module in reversed(modules):
            if not around.isdisjoint(own_parts(module)[2].values()):
                around.add(module)
    return around


def _is_kernel(module: nn.Module) -> bool:
    """Whether a module's weights of more than two dimensions are a convolution's."""
    return isinstance(module, _CONVOLUTIONS)


def _with_ancestors(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _stacks_in(
    module: nn.Module, *, holds_stacks: bool
) -> Iterator[tuple[int, tuple[tuple[str, ...], ...]]]:
    """Yields how many experts stacks that belong together are of, and the names of these."""
    by_experts: dict[tuple[int, str], list[tuple[str, ...]]] = {}
    for name, parameter in module.named_parameters() if holds_stacks else ():
        owner, _, last = name.rpartition(".")
        if parameter.ndim not in _STACK_DIMENSIONS or _BIAS.fullmatch(last):
            continue
        if not _is_kernel(module.get_submodule(owner)):
            key = parameter.shape[:-2].numel(), _member_of_list(module, owner)
            by_experts.setdefault(key, []).append((name,))
    biases: dict[tuple[int, str], list[tuple[str, ...]]] = {}
    for name, child in module.named_children():
        listed = dict(child.named_parameters()) if isinstance(child, nn.ParameterList) else {}
        shapes = {p.shape for p in listed.values()}
        if len(listed) > 1 and len(shapes) == 1 and (ndim := len(next(iter(shapes)))) in (1, 2):
            kind = by_experts if ndim == 2 else biases
            stack = tuple(f"{name}.{key}" for key in listed)
            kind.setdefault((len(listed), ""), []).append(stack)
    for (num_experts, _), stacks in by_experts.items():
        if len(stacks) in (2, 3):
            yield num_experts, (*stacks, *biases.get((num_experts, ""), ()))
    for parts, _ in _lists_of_parts(module):
        yield len(parts[0]), parts
    # Stacked along the rows of one matrix; a number among the attributes says how many there are.
    direct = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
    if isinstance(module, _JOINED):
        return
    sizes = {tuple(p.shape) for p in direct.values()}
    if len(direct) in (2, 3) and len(sizes) <= 2:
        counts = {v for v in vars(module).values() if type(v) is int and v > 1}
        for count in sorted(counts, reverse=True):
            if all(p.shape[0] % count == 0 and p.shape[0] > count for p in direct.values()):
                yield count, tuple((name,) for name in direct)


def _member_of_list(module: nn.Module, path: str) -> str:
    """Returns the innermost block of a list that a path in a module is in, or an empty string."""
    blocks = (
        ancestor
        for ancestor in _with_ancestors(path)
        if isinstance(module.get_submodule(ancestor.rpartition(".")[0]), nn.ModuleList)
    )
    return next(blocks, "")


def _lists_of_parts(
    module: nn.Module,
) -> Iterator[tuple[tuple[tuple[str, ...], ...], list[nn.Module]]]:
    """Yields lists of linear layers whose members are experts' parts: their stacks, and the lists.

    An expert has one layer of each list.
    """
    by_experts: dict[int, dict[str, nn.Module]] = {}
    for name, child in own_parts(module)[2].items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and _linear_layers(child):
            by_experts.setdefault(len(child), {})[name] = child
    for lists in by_experts.values():
        parts = {name: _linear_layers(child) for name, child in lists.items()}
        matrices = [size for shapes in parts.values() for size in shapes.values() if len(size) == 2]
        if len(lists) in (2, 3) and _may_be_mlp(matrices):
            stacks = [
                tuple(f"{name}.{key}.{parameter}" for key in list_members(lists[name]))
                for name, shapes in parts.items()
                for parameter in shapes
            ]
            yield tuple(stacks), [*lists.values()]


def _linear_layers(listed: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of what each member of a list has, by name: a matrix, and maybe a bias.

    Empty if members have something else, or not all the same.
    """
    members = [
        {name: tuple(p.shape) for name, p in member.named_parameters()}
        for member in list_members(listed).values()
    ]
    if len(members) < 2 or any(member != members[0] for member in members):
        return {}
    is_linear = sorted(map(len, members[0].values())) in ([2], [1, 2])
    return members[0] if is_linear else {}


def _may_be_mlp(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether matrices (out, in) may be an MLP's: one gives D numbers, the others take these."""
    return any(
        all(
            size == width and hidden in (columns, 2 * columns)
            for other, (hidden, size) in enumerate(shapes)
            if other != second
        )
        for second, (width, columns) in enumerate(shapes)
    )
