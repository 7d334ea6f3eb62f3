"""The properties of an MoE layer that its kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from custom_ops.dtypes import IDS, KERNEL_FLOATS, dtype_name
from custom_ops.layer_shape import LayerShape
from custom_ops.options import WeightLayout
from custom_ops.packed_weights import ENCODINGS, WHOLE, divides
from custom_ops.weight_formats import FORMAT_NAMES, WeightFormat

MAX_EXPERTS = 1024
MAX_TOP_K = 32
#: The model width and the hidden width are multiples of this.
SIZE_MULTIPLE = 8


class NoKernelsError(ValueError):
    """A layer has a size that there are no kernels for."""


@dataclass(frozen=True)
class Layer:
    """A layer that there are kernels for. Two layers that are equal share their kernels.

    Attributes:
        shape: The layer. E is in ``1..1024``, K in ``1..32`` and with a router no more than E; D
            and H are multiples of 8. Tokens and the router's parameters are float32, float16 or
            bfloat16.
        tf32: Whether products of float32 experts may round their inputs to TF32.
        resident_experts: R, in ``1..E``: how many experts' w1 and w2 are on the device at a time,
            while all are in host memory that the device reads; None where all are on the device.

    Raises:
        NoKernelsError: If there are no kernels for a size.
        ValueError: If ``top_k`` or ``resident_experts`` exceeds E.
        TypeError: If a dtype or the format of the weights has no kernels.
    """

    shape: LayerShape
    tf32: bool = False
    resident_experts: int | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        for name, most in (("experts", MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if not 1 <= (value := getattr(shape, name)) <= most:
                raise NoKernelsError(f"the kernels need {name} in 1..{most}, got {value}")
        widths = {"D, the model width,": shape.width, "H, the hidden width,": shape.hidden}
        for name, value in widths.items():
            if value < SIZE_MULTIPLE or value % SIZE_MULTIPLE:
                raise NoKernelsError(
                    f"the kernels need {name} to be a multiple of {SIZE_MULTIPLE}, got {value}"
                )
        if self.resident_experts is not None and not 1 <= self.resident_experts <= shape.experts:
            raise ValueError(
                f"resident_experts must be in 1..{shape.experts}, the number of experts; "
                f"got {self.resident_experts}"
            )
        if shape.weight_format.encoding in ENCODINGS:
            self._check_packed()
        elif shape.weight_format.name not in FORMAT_NAMES:
            raise TypeError(
                f"the kernels need weight_format to be one of {', '.join(FORMAT_NAMES)}; "
                f"got {shape.weight_format}"
            )
        _check_dtype(shape, "tokens_dtype", KERNEL_FLOATS)
        if shape.router is None:
            _check_dtype(shape, "routing_dtype", IDS)
            _check_dtype(shape, "weights_dtype", KERNEL_FLOATS)
            _check_dtype(shape, "selection_dtype", (None,))
            return
        for condition, message in shape.router.rules(shape.experts):
            if not condition:
                raise ValueError(message)
        _check_dtype(shape, "routing_dtype", KERNEL_FLOATS)
        _check_dtype(shape, "weights_dtype", (*KERNEL_FLOATS, None))
        _check_dtype(shape, "selection_dtype", (*KERNEL_FLOATS, None))

    def _check_packed(self) -> None:
        shape, weight_format = self.shape, self.shape.weight_format
        _check_dtype(weight_format, "operand_dtype", KERNEL_FLOATS)
        if weight_format.operand_dtype != shape.tokens_dtype:
            raise TypeError(
                "the products of packed weights have the tokens' dtype, "
                f"{dtype_name(shape.tokens_dtype)}; got {dtype_name(weight_format.operand_dtype)}"
            )
        if shape.layout != WeightLayout():
            raise ValueError(f"packed weights lie as (out, in); got {shape.layout}")
        columns = weight_format.block[1]
        is_group = columns >= SIZE_MULTIPLE and columns == power_of_2(columns)
        if columns < max(shape.width, shape.hidden) and not is_group:
            raise NoKernelsError(
                f"the kernels need scales for a power of two of columns from {SIZE_MULTIPLE} on, "
                f"or for whole rows; got {columns}"
            )
        for name, (_, depth) in shape.matrices.items():
            if not divides(weight_format.block, depth):
                raise ValueError(
                    f"{columns} columns share a scale, which must divide the {depth} of {name}"
                )

    def check_plain(self, what: str) -> None:
        """Checks that the experts' weights are plain, for what takes no others.

        Raises:
            TypeError: If they are packed.
        """
        if not self.shape.weight_format.is_plain:
            raise TypeError(f"{what} have no packed weights; got {self.shape.weight_format}")

    @property
    def expert_places(self) -> int:
        """The places of a program that scores all experts: powers of two, and of them for groups.

        Each group of experts begins at a multiple of its places.
        """
        groups = self.shape.router.n_group if self.shape.router else 1
        return power_of_2(groups) * power_of_2(self.shape.experts // groups)

    def canonical(self) -> Layer:
        """Returns the layer with everything that has no effect at its default.

        So layers that compute the same share their kernels. TF32 matters to float32 products alone.
        """
        weight_format = self._canonical_format()
        has_tf32 = weight_format.operand_dtype == torch.float32
        shape = replace(self.shape.canonical(), weight_format=weight_format)
        return replace(self, shape=shape, tf32=self.tf32 and has_tf32)

    def _canonical_format(self) -> WeightFormat:
        weight_format = self.shape.weight_format.canonical()
        if weight_format.is_plain:
            return weight_format
        # A block as large as both matrices is as good as one that is larger.
        matrices = self.shape.matrices.values()
        block_rows, block_columns = (
            WHOLE if size >= max(sizes) else size
            for size, sizes in zip(weight_format.block, zip(*matrices, strict=True), strict=True)
        )
        return replace(weight_format, block=(block_rows, block_columns))


def _check_dtype(
    shape: LayerShape | WeightFormat, name: str, allowed: tuple[torch.dtype | None, ...]
) -> None:
    value = getattr(shape, name)
    if value not in allowed:
        names = ", ".join(map(dtype_name, allowed))
        raise TypeError(f"the kernels need {name} to be one of {names}; got {value}")


def power_of_2(size: int) -> int:
    """Returns the least power of two that is no less than a positive size."""
    return 1 << (size - 1).bit_length()
