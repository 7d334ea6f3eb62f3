"""The layers and token counts that are measured on a GPU.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.layer import Layer

__all__ = ["LLM_TOKENS", "SHAPES", "SWIN_BATCHES", "Shape", "chosen", "parameters"]

LLM_TOKENS = (1, 16, 128, 1024, 4096, 16384)
SWIN_BATCHES = (1, 8, 32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """One layer, and how many tokens it is measured with.

    Attributes:
        name: By which the command line knows it.
        title: What it is.
        width: D.
        hidden: H.
        experts: E.
        top_k: K.
        options: What an expert computes.
        router: How tokens choose experts.
        biases: Whether router and experts have biases.
        counts: Tokens, or images where ``per_image`` is not 1.
        per_image: Tokens of an image.
    """

    name: str
    title: str
    width: int
    hidden: int
    experts: int
    top_k: int
    options: ExpertOptions
    router: RouterOptions
    biases: bool = False
    counts: tuple[int, ...] = LLM_TOKENS
    per_image: int = 1

    @property
    def is_vision(self) -> bool:
        """Whether its counts are images."""
        return self.per_image > 1

    @property
    def rows(self) -> int:
        """F."""
        return self.options.rows_per_hidden * self.hidden

    def layer(self, dtype: torch.dtype, *, router: bool = True) -> Layer:
        """The layer in one dtype; without a router its ids are int64 and its weights float32."""
        bias = dtype if self.biases else None
        return Layer(
            experts=self.experts,
            width=self.width,
            hidden=self.hidden,
            top_k=self.top_k,
            tokens_dtype=dtype,
            experts_dtype=dtype,
            options=self.options,
            router=self.router if router else None,
            routing_dtype=dtype if router else torch.int64,
            weights_dtype=bias if router else torch.float32,
            b1=self.biases,
            b2=self.biases,
        )

    def to_json(self) -> dict[str, object]:
        """Its sizes and options."""
        return asdict(self)


_SILU = ExpertOptions("silu", gated=True)


def _swin(stage: int, width: int, per_image: int) -> Shape:
    return Shape(
        f"swin{stage}", f"Swin stage {stage}, {per_image} tokens an image",
        width, 4 * width, 8, 2, ExpertOptions("gelu"), RouterOptions(2),
        biases=True, counts=SWIN_BATCHES, per_image=per_image,
    )  # fmt: skip


# Sizes and options of the models' published configurations; Swin's of Swin-T with 224x224 images.
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("mixtral", "Mixtral-8x7B", 4096, 14336, 8, 2, _SILU, RouterOptions(2)),
        Shape("qwen3", "Qwen3-30B-A3B", 2048, 768, 128, 8, _SILU, RouterOptions(8)),
        Shape(
            "deepseek", "DeepSeek-V3", 7168, 2048, 256, 8, _SILU,
            RouterOptions(8, "sigmoid", routed_scaling=2.5),
        ),
        Shape(
            "gpt-oss", "gpt-oss-20b", 2880, 2880, 32, 4,
            ExpertOptions("clamped_swiglu", gated=True, interleaved=True),
            RouterOptions(4, "topk_softmax"), biases=True,
        ),
        _swin(1, 96, 3136),
        _swin(2, 192, 784),
        _swin(3, 384, 196),
        _swin(4, 768, 49),
        # Too small to measure: it runs the harness where there is no GPU.
        Shape("tiny", "Harness test", 32, 48, 4, 2, _SILU, RouterOptions(2), counts=(1, 5)),
    )
}  # fmt: skip


def chosen(names: str) -> tuple[Shape, ...]:
    """Returns the shapes of a list such as ``qwen3,swin``; ``""`` is all but ``tiny``.

    Raises:
        ValueError: If a name is not the beginning of any shape's.
    """
    found: dict[str, Shape] = {}
    for name in names.split(",") if names else [n for n in SHAPES if n != "tiny"]:
        matching = {known: shape for known, shape in SHAPES.items() if known.startswith(name)}
        if not name or not matching:
            raise ValueError(f"shapes must be among {', '.join(SHAPES)}; got {name!r}")
        found |= matching
    return tuple(found.values())


def parameters(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Tensor | None]:
    """Random parameters, scaled so that logits, hidden rows and results are near 1."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=dtype, device=device)
        return values.mul_(fan_in**-0.5)

    E, D, H, F = shape.experts, shape.width, shape.hidden, shape.rows
    return {
        "router_weight": normal(E, D, fan_in=D),
        "router_bias": normal(E).mul_(0.1) if shape.biases else None,
        "w1": normal(E, F, D, fan_in=D),
        "b1": normal(E, F) if shape.biases else None,
        "w2": normal(E, D, H, fan_in=H),
        "b2": normal(E, D) if shape.biases else None,
    }
