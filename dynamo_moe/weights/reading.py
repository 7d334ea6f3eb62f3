"""``read_weights``: the weights of a model that was opened without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe.weights.lazy_tensors import LazyTensor


@torch.no_grad()
def read_weights(model: nn.Module, device: torch.device | str = "cpu") -> int:
    """Reads what a model that :func:`open_checkpoint` opened has on disk; then it can be run.

    A model that is sharded reads its rank's weights alone, one that is quantised packs them on the
    way. They go to the device a few rows at a time, so that only what the model keeps takes memory.
    Tensors that are in memory already stay where they are.

    Args:
        model: The model, in place.
        device: Where its weights go.

    Returns:
        The bytes of what was read.

    Raises:
        OSError: If a file of the checkpoint is gone, or shorter than it was. Weights before are
            read; call it again once the file is there.
    """
    made: dict[int, tuple[LazyTensor, Any]] = {}

    def in_memory(lazy: LazyTensor) -> Any:
        if id(lazy) not in made:
            tensor: Any = _read(lazy, torch.device(device))
            if isinstance(lazy, nn.Parameter):
                tensor = nn.Parameter(tensor, lazy.requires_grad)
            made[id(lazy)] = lazy, tensor
        return made[id(lazy)][1]

    for module in model.modules():
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in [*named(recurse=False, remove_duplicate=False)]:
                if isinstance(tensor, LazyTensor):
                    setattr(module, name, in_memory(tensor))
    return sum(tensor.nbytes for _, tensor in made.values())


def _read(lazy: LazyTensor, device: torch.device) -> Tensor:
    whole = torch.empty(lazy.shape, dtype=lazy.dtype, device=device)
    first = 0
    for rows in lazy.chunks():
        if not lazy.ndim:
            return whole.copy_(rows)
        whole[first : first + len(rows)] = rows
        first += len(rows)
    return whole
