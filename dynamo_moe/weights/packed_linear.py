"""Linear layers whose weight is packed: it is decoded where PyTorch runs them.

Legend: N rows (out), K columns (in) of the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from custom_ops.packed_weights import ENCODINGS, PackedWeight
from custom_ops.weight_formats import GLOBAL_SCALES, STORED_SUFFIXES
from dynamo_moe.private.pytorch import own_parts
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.packed_tensors import decoded

_NAMES = tuple(f"packed_weight{suffix}" for suffix in STORED_SUFFIXES)


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed, made of a plain one by :func:`pack`.

    The weight has no gradients. While a model is exported, a lazy tensor that decodes is in its
    place, as in a quantised checkpoint's model.

    Attributes:
        weight_format: One of :data:`custom_ops.packed_weights.ENCODINGS`.
        weight_dtype: The dtype of the decoded weight, which casts of the model change.
        is_widened: Whether the weight, rounded to that dtype, is in float32.
    """

    weight_format: str
    weight_dtype: torch.dtype
    is_widened: bool = False

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # Of a plain layer, an attribute.
        """The weight ``[N, K]``, decoded at each call."""
        given: Tensor | None = own_parts(self)[0]["weight"]
        if given is not None:
            return given
        packed = self.packed()
        if isinstance(packed.values, LazyTensor):
            return self._lazy()
        encoding = ENCODINGS[self.weight_format]
        wide = torch.promote_types(self.weight_dtype, torch.float32)
        rounded = encoding.decode(*packed, dtype=wide).to(self.weight_dtype)
        return rounded.float() if self.is_widened else rounded

    def packed(self) -> PackedWeight:
        """Returns the tensors of the weight, of ``[N, K]``."""
        return PackedWeight(*(getattr(self, name) for name in _NAMES))

    @property
    def group(self) -> int | None:
        """The columns that share a scale, where the format leaves that open; None: a row."""
        count = self.packed().scales.shape[-1]
        if ENCODINGS[self.weight_format].block is not None or count == 1:
            return None
        return self.in_features // count

    @contextlib.contextmanager
    def exported(self) -> Iterator[None]:
        """Puts the lazy weight in the place of what stores it until the context ends.

        Raises:
            ValueError: If it is not on the CPU.
        """
        parameters, buffers, _ = own_parts(self)
        kept = {name: buffers[name] for name in _NAMES}
        parameters["weight"] = nn.Parameter(self._lazy(), requires_grad=False)
        buffers.update(dict.fromkeys(_NAMES))
        try:
            yield
        finally:
            buffers.update(kept)
            parameters["weight"] = None

    def extra_repr(self) -> str:
        """The sizes and the format, for ``print(model)``."""
        return f"{super().extra_repr()}, weight_format={self.weight_format!r}"

    def _lazy(self) -> LazyTensor:
        def lazy(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"packed linear layers are exported from the CPU, got one on {tensor.device}: "
                    "move the model there"
                )
            tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
            return tensor if isinstance(tensor, LazyTensor) else LazyTensor.of_memory(tensor)

        shape = self.out_features, self.in_features
        return decoded(self.weight_format, self.packed().each(lazy), shape, self.weight_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts, but for global scales, which half precision does not hold."""
        name = f"packed_weight{GLOBAL_SCALES}"
        scales = getattr(self, name)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # It has no annotations.
        if scales is not None:
            setattr(self, name, scales.to(getattr(self, name).device))
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self


def pack(layer: nn.Linear, weight_format: str, packed: PackedWeight) -> None:
    """Makes a layer one with a packed weight, and releases its own.

    Args:
        layer: A plain linear layer.
        weight_format: The format.
        packed: The tensors of its weight, of ``[N, K]``.
    """
    made: Any = layer
    made.weight_format, made.weight_dtype = weight_format, layer.weight.dtype
    layer.register_parameter("weight", None)
    for name, tensor in zip(_NAMES, packed, strict=True):
        # Of one factor for all rows, each row has its own.
        layer.register_buffer(name, None if tensor is None else tensor.contiguous())
    made.__class__ = PackedLinear


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Returns a model's linear layers with packed weights, by path."""
    modules = model.named_modules()
    return {path: module for path, module in modules if isinstance(module, PackedLinear)}
