"""What a model's code may do that a trace does not allow, and that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from dynamo_moe.process_state import ProcessState, replaced
from dynamo_moe.tracing.state_space import exportable_scans


def _casting(
    dtype: torch.dtype, original: Callable[[nn.Module], nn.Module]
) -> Callable[[nn.Module], nn.Module]:
    """Lets a forward cast a module to the dtype that it has, as ``self.router.float()`` does.

    Such a cast would assign the parameters anew, which a trace does not allow.
    """

    def cast(module: nn.Module) -> nn.Module:
        tensors = (*module.parameters(), *module.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return module if dtypes <= {dtype} else original(module)

    return cast


exportable_models = ProcessState(
    exportable_scans,
    *(
        partial(replaced, nn.Module, name, partial(_casting, getattr(torch, name)))
        for name in ("bfloat16", "double", "float", "half")
    ),
)
"""The context in which a model's code runs while it is traced."""
