"""The description of an MoE layer that kernels, nodes, bodies and records share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from custom_ops.dtypes import FLOATS, IDS, dtype_name
from custom_ops.options import SIZES, ExpertOptions, RouterOptions, WeightLayout
from custom_ops.weight_formats import StoredTensor, WeightFormat


@dataclass(frozen=True)
class LayerShape:
    """An MoE layer without its weights' values: sizes, dtypes, options.

    Attributes:
        experts: E.
        width: D, the model width.
        hidden: H, the hidden width.
        top_k: K, experts per token; the router's where there is one.
        tokens_dtype: Dtype of x and y.
        weight_format: How w1 and w2 are stored; with it come the dtypes of b1, b2 and the operands.
        options: The experts' options.
        router: The router's options, or None where routing comes from outside
            (``moe::experts``).
        routing_dtype: Dtype of ``router_weight``; without a router, of ``expert_ids``.
        weights_dtype: Dtype of ``router_bias``, None if there is none; without a router, of
            ``expert_weights``.
        selection_dtype: Dtype of ``selection_bias``, None if there is none.
        b1: Whether the first product has a bias.
        b2: Whether the second product has a bias.
        layout: How w1 and w2 lie in memory.

    Raises:
        ValueError: If ``top_k`` is not the router's, or there is a selection bias without a router.
        TypeError: If the operators do not take a dtype.
    """

    experts: int
    width: int
    hidden: int
    top_k: int
    tokens_dtype: torch.dtype
    weight_format: WeightFormat
    options: ExpertOptions = field(default_factory=ExpertOptions)
    router: RouterOptions | None = None
    routing_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype | None = torch.float32
    selection_dtype: torch.dtype | None = None
    b1: bool = False
    b2: bool = False
    layout: WeightLayout = field(default_factory=WeightLayout)

    def __post_init__(self) -> None:
        if self.router is not None and self.router.top_k != self.top_k:
            raise ValueError(f"top_k must be the router's ({self.router.top_k}), got {self.top_k}")
        if self.router is None and self.selection_dtype is not None:
            raise ValueError("selection_bias needs a router")
        weights = FLOATS if self.router is None else (*FLOATS, None)
        self._check_dtype("tokens_dtype", FLOATS)
        self._check_dtype("routing_dtype", IDS if self.router is None else FLOATS)
        self._check_dtype("weights_dtype", weights)
        self._check_dtype("selection_dtype", (*FLOATS, None))

    def _check_dtype(self, name: str, allowed: tuple[torch.dtype | None, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            names = ", ".join(map(dtype_name, allowed))
            raise TypeError(f"{name} must be one of {names}; got {dtype_name(value)}")

    @property
    def rows(self) -> int:
        """F, the rows of one expert's w1: H, or 2H when gated."""
        return self.options.rows_per_hidden * self.hidden

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the symbols E, K, D and H."""
        return {size.symbol: getattr(self, size.name) for size in SIZES}

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The (out, in) sizes of one expert's w1 and w2, by name."""
        return {"w1": (self.rows, self.width), "w2": (self.width, self.hidden)}

    @property
    def expert_bytes(self) -> dict[str, int]:
        """The bytes of one expert's w1 and w2, by name."""
        return {name: self.weight_format.expert_bytes(*m) for name, m in self.matrices.items()}

    @property
    def stored(self) -> dict[str, tuple[StoredTensor, tuple[int, int]]]:
        """The tensors that store w1 and w2, with one expert's sizes, by their names.

        Without zero points that have no effect.
        """
        weight_format = self.weight_format.canonical()
        return {
            weight + tensor.suffix: (tensor, weight_format.shape_of(tensor, *matrix))
            for weight, matrix in self.matrices.items()
            for tensor in weight_format.stored
        }

    def sizes_in_memory(self, tensor: str) -> tuple[int, ...]:
        """Returns the sizes of one of the tensors that store w1 and w2, as it lies."""
        _, (rows, columns) = self.stored[tensor]
        transposed = tensor in self.matrices and self.is_transposed(tensor)
        return (self.experts, *((columns, rows) if transposed else (rows, columns)))

    def is_transposed(self, weight: str) -> bool:
        """Whether ``w1`` or ``w2`` lies as (in, out)."""
        transposed: bool = getattr(self.layout, f"{weight}_transposed")
        return transposed

    def canonical(self) -> LayerShape:
        """Returns the shape with every option that has no effect at its default."""
        router = None if self.router is None else self.router.canonical()
        return replace(self, options=self.options.canonical(), router=router)
