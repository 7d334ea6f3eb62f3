"""What the kernels must know of an MoE layer before they are compiled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from custom_ops.dtypes import IDS, KERNEL_FLOATS
from custom_ops.options import SIZES, ExpertOptions, RouterOptions

MAX_EXPERTS = 1024
MAX_TOP_K = 32
#: The model width and the hidden width are multiples of this.
SIZE_MULTIPLE = 8


class NoKernelsError(ValueError):
    """A layer has a size that there are no kernels for."""


@dataclass(frozen=True)
class Layer:
    """One layer: sizes, dtypes, options. Two layers that are equal share their kernels.

    Attributes:
        experts: E, in ``1..1024``.
        width: D, a multiple of 8.
        hidden: H, a multiple of 8.
        top_k: K, in ``1..min(E, 32)``; without a router E does not bound it.
        tokens_dtype: Dtype of x and y: float32, float16 or bfloat16.
        experts_dtype: Dtype of w1, b1, w2 and b2: the same choice.
        options: What an expert computes.
        router: The router's options, or None where routing comes from outside (``moe::experts``).
        routing_dtype: Dtype of ``router_weight``; without a router, of ``expert_ids``.
        weights_dtype: Dtype of ``router_bias``, None if there is none; without a router, of
            ``expert_weights``.
        b1: Whether the first product has a bias.
        b2: Whether the second product has a bias.
        tf32: Whether products of float32 experts may round their inputs to TF32.
        w1_transposed: Whether w1 lies in memory as (in, out), ``[E, D, F]``, not ``[E, F, D]``.
        w2_transposed: Whether w2 lies in memory as (in, out), ``[E, H, D]``, not ``[E, D, H]``.
        selection_dtype: Dtype of ``selection_bias``, None if there is none.
        resident_experts: R, in ``1..E``: how many experts' w1 and w2 are on the device at a time,
            while all are in host memory that the device reads; None where all are on the device.

    Raises:
        NoKernelsError: If there are no kernels for a size.
        ValueError: If ``top_k`` is not the router's, or it or ``resident_experts`` exceeds E.
        TypeError: If a dtype has no kernels.
    """

    experts: int
    width: int
    hidden: int
    top_k: int
    tokens_dtype: torch.dtype
    experts_dtype: torch.dtype
    options: ExpertOptions = field(default_factory=ExpertOptions)
    router: RouterOptions | None = None
    routing_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype | None = torch.float32
    b1: bool = False
    b2: bool = False
    tf32: bool = False
    w1_transposed: bool = False
    w2_transposed: bool = False
    selection_dtype: torch.dtype | None = None
    resident_experts: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("experts", MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise NoKernelsError(f"the kernels need {name} in 1..{most}, got {value}")
        widths = {"D, the model width,": self.width, "H, the hidden width,": self.hidden}
        for name, value in widths.items():
            if value < SIZE_MULTIPLE or value % SIZE_MULTIPLE:
                raise NoKernelsError(
                    f"the kernels need {name} to be a multiple of {SIZE_MULTIPLE}, got {value}"
                )
        if self.resident_experts is not None and not 1 <= self.resident_experts <= self.experts:
            raise ValueError(
                f"resident_experts must be in 1..{self.experts}, the number of experts; "
                f"got {self.resident_experts}"
            )
        self._check_dtype("tokens_dtype", KERNEL_FLOATS)
        self._check_dtype("experts_dtype", KERNEL_FLOATS)
        if self.router is None:
            self._check_dtype("routing_dtype", IDS)
            self._check_dtype("weights_dtype", KERNEL_FLOATS)
            self._check_dtype("selection_dtype", (None,))
            return
        if self.router.top_k != self.top_k:
            raise ValueError(f"top_k must be the router's ({self.router.top_k}), got {self.top_k}")
        for condition, message in self.router.rules(self.experts):
            if not condition:
                raise ValueError(message)
        self._check_dtype("routing_dtype", KERNEL_FLOATS)
        self._check_dtype("weights_dtype", (*KERNEL_FLOATS, None))
        self._check_dtype("selection_dtype", (*KERNEL_FLOATS, None))

    def _check_dtype(self, name: str, allowed: tuple[torch.dtype | None, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(f"the kernels need {name} to be one of {names}; got {value}")

    @property
    def rows(self) -> int:
        """F, the rows of one expert's w1: H, or 2H when gated."""
        return self.options.rows_per_hidden * self.hidden

    @property
    def expert_places(self) -> int:
        """The places of a program that scores all experts: powers of two, and of them for groups.

        Each group of experts begins at a multiple of its places.
        """
        groups = self.router.n_group if self.router else 1
        return power_of_2(groups) * power_of_2(self.experts // groups)

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the symbols E, K, D and H."""
        return {size.symbol: getattr(self, size.name) for size in SIZES}

    def canonical(self) -> Layer:
        """Returns the layer with everything that has no effect at its default.

        So layers that compute the same share their kernels. TF32 matters to float32 experts alone.
        """
        return replace(
            self,
            options=self.options.canonical(),
            router=None if self.router is None else self.router.canonical(),
            tf32=self.tf32 and self.experts_dtype == torch.float32,
        )


def power_of_2(size: int) -> int:
    """Returns the least power of two that is no less than a positive size."""
    return 1 << (size - 1).bit_length()
