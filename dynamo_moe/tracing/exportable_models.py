"""What a model's code may do that a trace does not allow, and that changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dynamo_moe.private import tracer
from dynamo_moe.process_state import ProcessState, replaced
from dynamo_moe.tracing.recurrences import exportable_recurrences


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


def _of_symbolic_size(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets ``one_hot`` have a symbolic number of classes, which its operator makes a number."""

    @wraps(original)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if has_torch_function((tensor,)):  # As PyTorch's function, it is a call that modes see.
            result: Tensor = handle_torch_function(one_hot, (tensor,), tensor, num_classes)
            return result
        if tracer.has_static_value(num_classes):
            return original(tensor, num_classes)
        classes = torch.arange(num_classes, device=tensor.device)
        return (tensor.unsqueeze(-1) == classes).to(torch.int64)

    return one_hot


@contextmanager
def _attributes_may_be_set() -> Iterator[None]:
    """Silences PyTorch's advice on tensors that a forward sets as attributes: they are restored."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
        yield


exportable_models = ProcessState(
    exportable_recurrences,
    _attributes_may_be_set,
    partial(replaced, nn.functional, "one_hot", _of_symbolic_size),
    *(
        partial(replaced, nn.Module, name, partial(_casting, getattr(torch, name)))
        for name in ("bfloat16", "double", "float", "half")
    ),
)
"""The context in which a model's code runs while it is traced."""
