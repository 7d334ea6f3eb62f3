"""``shard``: the experts of a converted model over the ranks of a process group.

Legend: E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from custom_ops.expert_weights import ExpertWeights
from custom_ops.ranks import ALONE
from dynamo_moe import local_experts, packed_experts, tensor_parallel
from dynamo_moe.conversion.layer_spec import ConvertedLayer
from dynamo_moe.conversion.packing import (
    converted_layers,
    experts_parameters,
    experts_weights,
    shared_weights,
)
from dynamo_moe.json_values import json_values
from dynamo_moe.local_experts import EqualCounts, LocalExperts, PlainExperts
from dynamo_moe.modules import ConvertedModule
from dynamo_moe.packed_experts import PackedExperts
from dynamo_moe.tensor_parallel import Split
from dynamo_moe.weights.lazy_tensors import LazyTensor

if TYPE_CHECKING:
    from rich.text import Text

Plan = Literal["experts", "experts+heads"]

Tokens = Literal["all", "split"]


@dataclass(frozen=True)
class ShardedLayer:
    """A layer of which a rank has some experts.

    Attributes:
        name: Its path in the model.
        first: The number of the rank's first expert.
        count: How many experts the rank has, which follow one another.
        total: All of the layer's experts.
        bytes: Those of the rank's experts.
    """

    name: str
    first: int
    count: int
    total: int
    bytes: int


@dataclass(frozen=True)
class ShardReport:
    """The result of :func:`shard`.

    Attributes:
        rank: The rank, in ``0..ranks-1``.
        ranks: The size of the group.
        layers: The layers, each with the rank's share.
        split: The paths of other modules of which it has a share, by the plan.
    """

    rank: int
    ranks: int
    layers: tuple[ShardedLayer, ...]
    split: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        return json_values(self)

    def __str__(self) -> str:
        counts = sorted({(layer.count, layer.total) for layer in self.layers})
        shares = ", ".join(f"{count} of {total}" for count, total in counts)
        size = sum(layer.bytes for layer in self.layers)
        others = f", and its share of {len(self.split)} other modules" if self.split else ""
        return (
            f"rank {self.rank} of {self.ranks} has {shares} experts of {len(self.layers)} layers: "
            f"{size:,} bytes{others}"
        )

    def __rich__(self) -> Text:
        """Returns the lines for the terminal."""
        from rich.text import Text

        return Text(str(self))


def shard(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    plan: Plan = "experts",
    tokens: Tokens = "all",
) -> ShardReport:
    """Leaves a converted model the experts of this process's rank, in place.

    Every rank calls it on the same model, and then the model with the same tokens. Routers stay
    whole on all ranks, and by default all else but the experts. Each rank routes all tokens,
    computes those of its own experts, and one all-reduce for each layer sums what the ranks have;
    no token moves. The results are those of the whole model within the order of the sum, which in
    half precision rounds each rank's part; gradients are the whole model's, those of replicated
    parameters the same on every rank.

    The rank's weights are parameters of a module ``local_experts`` within the layer; the others are
    released. So load a state dict of the whole model before.

    Args:
        model: The model, after :func:`convert`; plain, quantised, or opened by
            :func:`open_checkpoint`, of which :func:`read_weights` then reads the rank's experts
            alone.
        group: The process group, or a mesh of one dimension; None: the default group. E need not be
            a multiple of its size: the first ranks have one expert more.
        plan: ``experts``: experts are split, all else is replicated. ``experts+heads``: attention
            is split by heads too, and shared experts and dense layers by columns, as far as
            ``model.tp_plan`` of transformers says so; a cache then holds the rank's heads alone.
        tokens: ``all``: all ranks have the same. ``split``: each rank calls the model with tokens
            of its own, such as its share of a batch, as many as every other rank. Each layer
            gathers the tokens of all ranks, and each gets the sum of its own, so that all else is
            computed once. Gradients are then, on each rank, those of its own loss for what is
            replicated, and those of the sum of all ranks' losses for its experts. With plan
            ``experts`` alone.

    Returns:
        The rank's share.

    Raises:
        ValueError: If there is no layer, a layer is sharded already, experts' weights are shared
            with another layer, offloaded or not known, this process is not in the group, or the
            plan is unknown; with ``experts+heads``, if the model has no plan for it, or one with a
            style that is not known here, or ranks cannot share heads evenly. The model is as it was
            then.
        RuntimeError: If ``torch.distributed`` is not initialized.
    """
    check_plan(plan)
    if tokens not in get_args(Tokens):
        raise ValueError(f"tokens must be one of {', '.join(get_args(Tokens))}; got {tokens!r}")
    if tokens == "split" and plan != "experts":
        raise ValueError(f"plan {plan!r} needs all tokens on every rank: tokens must be 'all'")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: start the processes with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    members = _process_group(group)
    rank = dist.get_rank(members)
    if rank < 0:
        raise ValueError("this process is not in the group")
    place = _Place(rank, members.size(), members.group_name)
    counts = EqualCounts(place.ranks, place.group) if tokens == "split" else None
    splits = _splits(model, place, plan)
    # Of the reports alone: the others hold what is released.
    layers = tuple(layer.report() for layer in _replaced(model, place, counts, copies=True))
    for split in splits:
        split.install(True)
    return ShardReport(*place[:2], layers, tuple(split.path for split in splits))


def check_plan(plan: str) -> None:
    """Checks that there is such a plan.

    Raises:
        ValueError: If there is none.
    """
    if plan not in get_args(Plan):
        raise ValueError(f"plan must be one of {', '.join(get_args(Plan))}; got {plan!r}")


@contextmanager
def sharded(
    model: nn.Module, rank: int, ranks: int, plan: Plan = "experts"
) -> Iterator[ShardReport]:
    """Gives a converted model the experts of a rank until the context ends, without the others.

    There is no process group: the layers' results are the rank's parts of the sums.

    Args:
        model: The model, after :func:`convert`.
        rank: The rank, in ``0..ranks-1``.
        ranks: How many there are, at least 1.
        plan: As for :func:`shard`.

    Raises:
        ValueError: As :func:`shard`, or if ``rank`` is out of range.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    check_plan(plan)
    place = _Place(rank, ranks, ALONE)
    splits = _splits(model, place, plan)
    layers: list[ShardedLayer] = []
    with ExitStack() as stack:
        for replaced in _replaced(model, place, None, copies=False):
            stack.callback(replaced.undo)
            layers.append(replaced.report())
        for split in splits:
            stack.callback(split.install(False))
        yield ShardReport(rank, ranks, tuple(layers), tuple(split.path for split in splits))


def share_of(total: int, rank: int, ranks: int) -> range:
    """Returns the experts of a rank: consecutive ones, the first ranks one more where it is uneven.

    Example:
        >>> [share_of(10, rank, 4) for rank in range(4)]
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    size, more = divmod(total, ranks)
    first = rank * size + min(rank, more)
    return range(first, first + size + (rank < more))


class _Place(NamedTuple):
    """A rank in a group."""

    rank: int
    ranks: int
    group: str


class _Replaced(NamedTuple):
    """A layer's own experts and the share that took their place."""

    path: str
    layer: nn.Module
    share: LocalExperts
    parameters: dict[str, nn.Parameter]
    packed: PackedExperts | None

    def report(self) -> ShardedLayer:
        stored = [*self.share.part.parameters(), *self.share.part.buffers()]
        numbers, size = self.share.share, sum(tensor.nbytes for tensor in stored)
        return ShardedLayer(self.path, numbers.start, len(numbers), self.share.total, size)

    def install(self) -> None:
        if self.packed is not None:
            delattr(self.layer, packed_experts.NAME)
        own_code = isinstance(self.layer, ConvertedModule) and self.layer.runs_own_code
        self._set(
            {
                # Such code may ask for their dtype.
                name: nn.Parameter(parameter.new_empty(0), False) if own_code else None
                for name, parameter in self.parameters.items()
            }
        )
        self.layer.add_module(local_experts.NAME, self.share)

    def undo(self) -> None:
        delattr(self.layer, local_experts.NAME)
        self._set(self.parameters)
        if self.packed is not None:
            self.layer.add_module(packed_experts.NAME, self.packed)

    def _set(self, parameters: dict[str, Any]) -> None:
        for path, parameter in parameters.items():
            owner, _, name = path.rpartition(".")
            self.layer.get_submodule(owner).register_parameter(name, parameter)
        if isinstance(self.layer, ConvertedLayer):
            self.layer.forget_weights()


def _splits(model: nn.Module, place: _Place, plan: Plan) -> list[Split]:
    """Returns what a plan splits beside the experts, and changes nothing."""
    if plan == "experts":
        return []
    local_experts.need_whole(converted_layers(model), "a model is sharded once")
    return tensor_parallel.splits(model, *place)


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"a mesh must have one dimension, got {group.ndim}: name one of them")
        return group.get_group()
    members = dist.group.WORLD if group is None else group
    if members is None:
        raise RuntimeError("torch.distributed has no default group: name one")
    return members


@torch.no_grad()
def _replaced(
    model: nn.Module, place: _Place, counts: EqualCounts | None, *, copies: bool
) -> Iterator[_Replaced]:
    """Gives each layer its share, and yields it; with ``copies`` it has memory of its own."""
    layers = converted_layers(model)
    if not layers:
        raise ValueError("the model has no layers on torch.ops.moe; convert it first")
    local_experts.need_whole(layers, "a model is sharded once")
    for path, reason in shared_weights(model, layers).items():
        raise ValueError(f"the experts of {path!r} cannot be sharded: {reason}")
    for path, layer in layers.items():
        own = type(layer).experts_weights if isinstance(layer, ConvertedModule) else None
        if own is ConvertedModule.experts_weights:  # An adapter of somebody else's.
            raise ValueError(
                f"the experts of {path!r} cannot be sharded: {type(layer).__name__} has no "
                "experts_weights"
            )
        packed = packed_experts.of(layer)
        stored = experts_parameters(layer).values() if packed is None else packed.buffers()
        if any(map(_is_offloaded, stored)):
            raise ValueError(
                f"the experts of {path!r} are in pinned memory, as offload leaves them: offload a "
                "model once it is sharded"
            )
    for path, layer in layers.items():
        replaced = _share(path, layer, place, counts, copies=copies)
        replaced.install()
        yield replaced


def _is_offloaded(tensor: Tensor) -> bool:
    return not isinstance(tensor, LazyTensor) and tensor.device.type == "cpu" and tensor.is_pinned()


def _share(
    path: str, layer: nn.Module, place: _Place, counts: EqualCounts | None, *, copies: bool
) -> _Replaced:
    packed = packed_experts.of(layer)
    parameters = experts_parameters(layer)
    if packed is None:
        with torch.enable_grad():
            weights: Any = experts_weights(layer)
        total = weights.w1.shape[0]
    else:
        weights = packed.packed_weights()
        total = weights[0].values.shape[0]
    share = share_of(total, place.rank, place.ranks)
    stored = share or range(1)
    memory = {
        parameter.untyped_storage().data_ptr()
        for parameter in parameters.values()
        if not isinstance(parameter, LazyTensor)
    }

    def local(tensor: Any) -> Any:
        if tensor is None:
            return None
        part = tensor.detach()[stored.start : stored.stop]
        if isinstance(part, LazyTensor):
            return part
        # A stack that was made for it holds all experts.
        is_made = packed is None and part.untyped_storage().data_ptr() not in memory
        return part.clone() if copies or is_made else part

    part: PlainExperts | PackedExperts
    if packed is None:
        part = PlainExperts(ExpertWeights(*map(local, weights)))
        for name, weight in weights._asdict().items():
            if weight is not None:
                part.get_parameter(name).requires_grad_(weight.requires_grad)
    else:
        w1, w2 = (weight.each(local) for weight in weights)
        biases = local(packed.b1), local(packed.b2)
        order = local(packed.w1_order)
        part = PackedExperts(packed.weight_format, w1, biases[0], w2, biases[1], order)
    local_experts_of_rank = LocalExperts(part, share, total, *place, counts)
    return _Replaced(path, layer, local_experts_of_rank, parameters, packed)
