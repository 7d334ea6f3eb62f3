"""What the processes of a group tell each other while each verifies the file of its rank.

All that they do together is one kind of step, in which each says a value or why it has failed. So
a process that fails, wherever that is, ends the others in the step that they are in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from dynamo_moe.private.pytorch import TorchDispatchMode


class RankError(ValueError):
    """A rank of those that verify together has failed: all raise this, with its reason."""


class Exchange:
    """Steps of the processes of a group, all of which take them in the same order.

    Args:
        group: The group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, value: Any = None, failure: str = "") -> list[Any]:
        """Returns what the processes say, in order.

        Args:
            value: What this one says.
            failure: Why it cannot.

        Raises:
            RankError: If one of them has failed.
        """
        said: list[Any] = [None] * self._group.size()
        dist.all_gather_object(said, (value, failure), group=self._group)
        for rank, (_, reason) in enumerate(said):
            if reason:
                raise RankError(f"rank {rank} of {len(said)}: {reason}")
        return [value for value, _ in said]

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Takes the last step at the end, and where anything fails inside, says so in its place.

        Raises:
            RankError: If this process fails inside, or another one does.
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self(failure=str(error) or type(error).__name__)  # Which raises.
        self()

    def sums(self) -> TorchDispatchMode:
        """Returns a mode in which a model's sums over the group are steps, too."""
        return _Sums(self, self._group.group_name)


class _Sums(TorchDispatchMode):
    def __init__(self, exchange: Exchange, group: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # It has no annotations.
        self._exchange, self._group = exchange, group

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.moe.sum_over_ranks.default and self._group in args:
            return reduce(torch.add, self._exchange(args[0]))
        return func(*args, **kwargs or {})
