"""Forward-mode derivatives, which the operators do not have, and PyTorch would take for zeros."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def has_tangents(*tensors: Tensor) -> bool:
    """Whether PyTorch takes forward-mode derivatives of tensors, as in ``torch.func.jvp``."""
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def check_no_tangents(*tensors: Tensor) -> None:
    """Checks that no forward-mode derivatives are taken.

    Raises:
        NotImplementedError: If forward-mode derivatives are taken.
    """
    if has_tangents(*tensors):
        raise NotImplementedError(
            "the operators of torch.ops.moe have no forward-mode derivatives, as torch.func.jvp "
            "takes them: use backward(), or the model's own code"
        )
