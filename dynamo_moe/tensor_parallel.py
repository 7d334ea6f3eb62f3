"""Attention by heads and dense layers by columns, as transformers' tensor-parallel plans say.

A plan maps paths of a model's modules and parameters, with ``*`` for a layer's number, to styles. A
layer that gives columns, ``colwise``, takes what all ranks have, and what it gives stays on its
rank, until a layer that takes rows, ``rowwise``, multiplies it, and the products are summed. What a
plan gathers at once, such as logits, and what it does not name stay whole on every rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import custom_ops
from custom_ops.ranks import ALONE, copy_to_ranks, sum_gradient_over_ranks
from dynamo_moe.weights.lazy_tensors import LazyTensor

_COLUMNS = ("colwise", "packed_colwise")
#: Styles of which a rank computes a share.
_SPLIT = (*_COLUMNS, "rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
#: Styles that take and give what all ranks have: computed whole, the numbers are the same.
_WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "local_params",
    "replicate",
    "rowwise_rep",
    "rowwise_split_input",
)
#: The style of a layer's experts, which are split among the ranks already.
_EXPERTS = "moe_tp_experts"
#: Norms of a rank's heads, with what they norm: the plans of Qwen3-VL-MoE and Qwen3-Omni-MoE do not
#: name them.
_FORGOTTEN = {"q_norm": "q_proj", "k_norm": "k_proj"}


class ColumnLinear(nn.Module):
    """A linear layer that gives a rank's share of the columns.

    Args:
        weight: ``[O / ranks, I]``.
        bias: ``[O / ranks]`` or None.
        group: The name of the group; empty: no other rank is there.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: str) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """From tokens that all ranks have to a rank's columns."""
        return functional.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer that takes a rank's share of the rows, and gives the sum over ranks.

    Args:
        weight: ``[O, I / ranks]``.
        bias: ``[O]`` or None, which all ranks have and add once.
        ranks: The size of the group.
        group: Its name; empty: no other rank is there, and the result is the rank's part.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: int, group: str
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks, self.group = weight, bias, ranks, group
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """From a rank's columns of the layer before to what all ranks have."""
        y = functional.linear(x, self.weight)
        if self.ranks > 1:
            y = custom_ops.sum_over_ranks(y, self.ranks, self.group)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Split:
    """A module or parameter of which a rank has a share.

    Attributes:
        path: Its path in the model.
        install: Puts the share in its place, in memory of its own if asked; returns what undoes it.
    """

    path: str
    install: Callable[[bool], Callable[[], None]]


def splits(model: nn.Module, rank: int, ranks: int, group: str) -> list[Split]:
    """Returns what a model's plan splits, but for its experts, and changes nothing.

    Args:
        model: A model of transformers, with a ``tp_plan``.
        rank: The rank, in ``0..ranks-1``.
        ranks: The size of the group.
        group: Its name; empty: no other rank is there.

    Raises:
        ValueError: If there is no plan, it has an unknown style, or ranks cannot share heads or
            columns evenly.
    """
    place = _Place(rank, ranks, group)
    styles = _styles(model)
    columns = [path for path, style in styles.items() if style in _COLUMNS]
    if not columns:
        raise ValueError(
            f"the tensor-parallel plan of {type(model).__name__} splits neither attention nor "
            f"dense layers (model.tp_plan is {getattr(model, 'tp_plan', None)}): set it, or choose "
            "plan 'experts'"
        )
    # What a layer of rows multiplies is whole where nothing before it in its module is split.
    rows = {
        path: path.removesuffix(path.rpartition(".")[2])
        for path, style in styles.items()
        if style == "rowwise"
    }
    for path, owner in rows.items():
        if not any(column.startswith(owner) for column in columns):
            del styles[path]
    for path in columns:
        if not path.startswith(tuple(rows.values())):
            raise ValueError(
                f"the tensor-parallel plan of {type(model).__name__} splits {path!r}, and has no "
                "layer of style 'rowwise' behind it"
            )
    _check_heads(model, columns, ranks)
    parts = dict(_parts(model))
    owners = _owners(model)
    for path in styles:
        tensors = (id(each) for each in (parts[path], getattr(parts[path], "weight", None)))
        if any(len(owners[tensor]) > 1 for tensor in tensors):
            raise ValueError(f"{path!r} cannot be split: other modules have it too")
    return [_split(model, path, parts[path], style, place) for path, style in styles.items()]


def _styles(model: nn.Module) -> dict[str, str]:
    """Returns the style of each module and parameter that the model's plan splits."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    experts = tuple(f"{key}." for key, style in plan.items() if style == _EXPERTS)
    styles: dict[str, str] = {}
    for path, _ in _parts(model):
        key = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        before, _, name = key.rpartition(".")
        style = plan.get(key)
        if plan.get(f"{before}.{_FORGOTTEN.get(name)}") == "colwise":
            style = style or "replicated_with_grad_allreduce"
        if style is None or key.startswith(experts):
            continue
        if style not in (*_SPLIT, *_WHOLE, _EXPERTS):
            raise ValueError(
                f"the tensor-parallel plan of {type(model).__name__} has the style {style!r} for "
                f"{path!r}; known ones are {', '.join((*_SPLIT, *_WHOLE, _EXPERTS))}"
            )
        if style in _SPLIT:
            styles[path] = style
    return styles


@dataclass(frozen=True)
class _Place:
    """A rank in a group."""

    rank: int
    ranks: int
    group: str

    def share(self, whole: Tensor | None, axis: int, *, copies: bool, stacks: int = 1) -> Any:
        """Returns the rank's share of a parameter, which may be a stack of several."""
        if whole is None:
            return None
        size = whole.shape[axis] // stacks
        each = size // self.ranks
        pieces = [
            whole.detach().narrow(axis, number * size + self.rank * each, each)
            for number in range(stacks)
        ]
        part = pieces[0] if stacks == 1 else torch.cat(pieces, axis)
        if not isinstance(part, LazyTensor):
            # Of a view of columns no file could be written as it is.
            is_view = stacks == 1 and part.is_contiguous()
            part = part.clone() if copies and is_view else part.contiguous()
        return nn.Parameter(part, whole.requires_grad)


def _split(model: nn.Module, path: str, part: Any, style: str, place: _Place) -> Split:
    if style == "replicated_with_grad_allreduce":
        return Split(path, lambda copies: _sum_gradients(part, place.group))
    if style == "mla_kv_a_proj":
        config: Any = model.config
        return Split(
            path, partial(_copy_positions, part, config.get_text_config().qk_rope_head_dim, place)
        )
    if isinstance(part, nn.Parameter):
        if style != "colwise" or part.ndim != 1:
            raise ValueError(
                f"{path!r}, a parameter of {part.ndim} dimensions, cannot be split {style}"
            )
        _check_size(path, "values", len(part), place.ranks)
        return _replacing(model, path, lambda copies: place.share(part, 0, copies=copies))
    if type(part) is not nn.Linear:
        raise ValueError(f"{path!r} cannot be split {style}: it is no nn.Linear, but {type(part)}")
    if style == "rowwise":
        _check_size(path, "inputs", part.in_features, place.ranks)

        def rows(copies: bool) -> RowLinear:
            weight = place.share(part.weight, 1, copies=copies)
            return RowLinear(weight, part.bias, place.ranks, place.group)

        return _replacing(model, path, rows)
    stacks = 2 if style == "packed_colwise" else 1
    _check_size(path, "outputs", part.out_features, place.ranks * stacks)

    def columns(copies: bool) -> ColumnLinear:
        weight, bias = (
            place.share(each, 0, copies=copies, stacks=stacks) for each in (part.weight, part.bias)
        )
        return ColumnLinear(weight, bias, place.group)

    return _replacing(model, path, columns)


def _replacing(model: nn.Module, path: str, make: Callable[[bool], Any]) -> Split:
    owner, name = model.get_submodule(_before(path)), path.rpartition(".")[2]

    def install(copies: bool) -> Callable[[], None]:
        whole = getattr(owner, name)
        setattr(owner, name, make(copies))
        return lambda: setattr(owner, name, whole)

    return Split(path, install)


def _sum_gradients(module: nn.Module, group: str) -> Callable[[], None]:
    """Lets the gradients of parameters, of which each rank has those of its heads, be whole."""
    handles = [
        sum_gradient_over_ranks(parameter, group)
        for parameter in module.parameters()
        if group != ALONE and parameter.requires_grad
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _copy_positions(module: nn.Module, size: int, place: _Place, _: bool) -> Callable[[], None]:
    """Lets the last columns, which all heads take as they are, have the gradients of all ranks.

    The others go on through a layer that gives columns, which sums theirs.
    """

    def copied(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        first, last = y.split([y.shape[-1] - size, size], dim=-1)
        return torch.cat([first, copy_to_ranks(last, place.group)], dim=-1)

    if place.group == ALONE:
        return lambda: None
    return module.register_forward_hook(copied).remove


# --- The model ---


def _before(path: str) -> str:
    return path.rpartition(".")[0]


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_modules()
    yield from model.named_parameters()


def _owners(model: nn.Module) -> Mapping[int, set[tuple[int, str]]]:
    """Returns who has each module and parameter, and by which names."""
    owners: defaultdict[int, set[tuple[int, str]]] = defaultdict(set)
    for module in model.modules():
        named = (
            *module.named_children(),
            *module.named_parameters(recurse=False, remove_duplicate=False),
        )
        for name, part in named:
            owners[id(part)].add((id(module), name))
    return owners


def _check_size(path: str, what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(f"{path!r} has {size} {what}, which are no multiple of {ranks}")


def _check_heads(model: nn.Module, columns: list[str], ranks: int) -> None:
    """Checks that whole heads fall to each rank."""
    config: Any = getattr(model, "config", None)
    attention = [path for path in columns if "att" in _before(path)]
    keys = [path for path in attention if path.endswith(".k_proj")]
    counts = [("num_attention_heads", attention[:1]), ("num_key_value_heads", keys[:1])]
    known = [
        (path, getattr(config.get_text_config(), name, None), f" ({name})")
        for name, paths in counts
        for path in paths
    ]
    for path in keys:
        owner: Any = model.get_submodule(_before(path))
        size = getattr(owner, "head_dim", None)
        if isinstance(size, int):
            known.append((path, owner.k_proj.out_features // size, ""))
    for path, count, name in known:
        if isinstance(count, int) and count % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share the {count} heads of {path!r}{name} evenly; plan "
                "'experts' leaves attention whole"
            )
