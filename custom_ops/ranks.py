"""``torch.ops.moe.sum_over_ranks``: the sum of what the ranks of a group have computed.

The experts of a layer that is sharded are those of a rank alone, so each rank has a part of every
token's sum. The collective is PyTorch's own functional all-reduce, which waits for no host and can
be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from custom_ops._library import LIBRARY, group_of_name

LIBRARY.define(
    "sum_over_ranks(Tensor y, int ranks, str group='') -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)

#: The name of no group: a rank is alone, as while its file is written, and its part is the result.
ALONE = ""


def sum_over_ranks(y: Tensor, ranks: int, group: str = ALONE) -> Tensor:
    """Sums a tensor over the ranks of a process group.

    Args:
        y: A rank's part, of any shape, which all ranks have; a dtype that the group's backend sums.
        ranks: The size of the group, at least 1.
        group: The group's name, ``ProcessGroup.group_name``; or :data:`ALONE`.

    Returns:
        The sum, the same on every rank, in y's shape and dtype. Its gradient is that of every part.

    Raises:
        ValueError: If ``ranks`` is below 1.
        RuntimeError: If this process has no group of this name and size, as where a program of
            ``torch.export`` is loaded elsewhere; or a rank fails or does not answer in the group's
            time limit.

    Example:
        >>> import torch
        >>> sum_over_ranks(torch.ones(2), 4, ALONE)
        tensor([1., 1.])
    """
    result: Tensor = torch.ops.moe.sum_over_ranks(y, ranks, group)
    return result


def copy_to_ranks(x: Tensor, group: str) -> Tensor:
    """Returns a tensor that all ranks have; its gradient is the sum of theirs.

    Each rank computes a part from it, so each has a part of its gradient. Without gradients it is
    the tensor itself.
    """
    if group == ALONE or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copied: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


def gather_from_ranks(x: Tensor, ranks: int, group: str) -> Tensor:
    """Returns the tensors of all ranks, one after the other along the first axis.

    Args:
        x: ``[T, ...]``, contiguous, of one shape on all ranks.
        ranks: The size of the group.
        group: Its name.

    Returns:
        ``[ranks * T, ...]``. Its gradient is, on each rank, the sum of what all have for its part.
    """
    gathered: Tensor = _GatherFromRanks.apply(x, ranks, group)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sum_over_ranks(y: Tensor, ranks: int, group: str) -> Tensor:
    """Returns the rank's part of the sum over ranks: the inverse of :func:`gather_from_ranks`.

    Args:
        y: ``[ranks * T, ...]``, contiguous, of one shape on all ranks.
        ranks: The size of the group.
        group: Its name.

    Returns:
        ``[T, ...]``.
    """
    scattered: Tensor = _ScatterSumOverRanks.apply(y, ranks, group)  # type: ignore[no-untyped-call]
    return scattered


def sum_gradient_over_ranks(parameter: Tensor, group: str) -> RemovableHandle:
    """Lets a parameter that all ranks have get the sum of their gradients.

    Each rank computes a part from it alone, so no rank has more than a part of its gradient.

    Returns:
        What takes it back.
    """
    handle: RemovableHandle = parameter.register_hook(
        lambda gradient: _all_reduced(gradient.contiguous(), group)
    )
    return handle


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradients[0].contiguous(), ctx.group), None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.place = ranks, group
        return _gathered(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0].contiguous(), *ctx.place), None, None


class _ScatterSumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: int, group: str) -> Tensor:
        ctx.place = ranks, group
        return _scattered(y, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0].contiguous(), *ctx.place), None, None


@torch.library.register_fake("moe::sum_over_ranks", lib=LIBRARY)
def _sum_over_ranks_fake(y: Tensor, ranks: int, group: str = ALONE) -> Tensor:
    _check(ranks)
    return y.new_empty(y.shape)


@torch.library.impl(LIBRARY, "sum_over_ranks", "CompositeExplicitAutograd")
def _sum_over_ranks_forward(y: Tensor, ranks: int, group: str = ALONE) -> Tensor:
    _check(ranks)
    part = y.contiguous()
    if group == ALONE:
        return part.clone()
    check_group(group, ranks)
    return _all_reduced(part, group)


def check_group(name: str, ranks: int) -> None:
    """Checks that a name is still that of the group: a number that PyTorch gives again.

    Raises:
        RuntimeError: If there is no such group, or one of another size.
    """
    if group_of_name is None:
        return
    try:
        size = group_of_name(name).size()
    except RuntimeError:
        size = None
    if size != ranks:
        found = "no group of this name" if size is None else f"one of {size}"
        raise RuntimeError(
            f"the model is for {ranks} ranks in the process group {name!r}, and this process has "
            f"{found}: a process that loads a program makes the groups that it was exported with"
        )


def _all_reduced(part: Tensor, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(part, "sum", group))
    return result


def _gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    gathered: Tensor = collectives.all_gather_into_tensor(x, ranks, group)
    result: Tensor = collectives.wait_tensor(gathered)
    return result


def _scattered(y: Tensor, ranks: int, group: str) -> Tensor:
    collectives = torch.ops._c10d_functional
    scattered: Tensor = collectives.reduce_scatter_tensor(y, "sum", ranks, group)
    result: Tensor = collectives.wait_tensor(scattered)
    return result


def _check(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Nothing is kept for the backward pass."""


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return dy, None, None


torch.library.register_autograd(
    "moe::sum_over_ranks", _backward, setup_context=_setup_context, lib=LIBRARY
)
