"""The layers that are measured on a GPU, their parameters, and where their tokens go.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.layers import random_parameters
from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import WeightLayout
from custom_ops.weight_formats import plain_format

#: A layer's tensors by name; one without biases has no ``router_bias``, ``b1`` and ``b2``, and most
#: have no ``selection_bias``.
Parameters = Mapping[str, Tensor]
#: Expert ids and weights, ``[T, K]`` each.
Routing = tuple[Tensor, Tensor]

LLM_TOKENS = (1, 16, 128, 1024, 4096, 16384)
SWIN_BATCHES = (1, 8, 32, 64, 128)
ROUTINGS = ("uniform", "zipf", "one")


@dataclass(frozen=True)
class Shape:
    """One layer, and how many tokens it is measured with."""

    name: str  # on the command line
    title: str
    width: int
    hidden: int
    experts: int
    top_k: int
    options: ExpertOptions
    router: RouterOptions
    biases: bool = False  # of router and experts
    selection_bias: bool = False  # float32
    transposed: bool = False  # whether both weights lie as (in, out)
    counts: tuple[int, ...] = LLM_TOKENS  # tokens, or images where `per_image` is not 1
    per_image: int = 1  # tokens of an image

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
            LayerShape(
                experts=self.experts,
                width=self.width,
                hidden=self.hidden,
                top_k=self.top_k,
                tokens_dtype=dtype,
                weight_format=plain_format(dtype),
                options=self.options,
                router=self.router if router else None,
                routing_dtype=dtype if router else torch.int64,
                weights_dtype=bias if router else torch.float32,
                b1=self.biases,
                b2=self.biases,
                selection_dtype=torch.float32 if router and self.selection_bias else None,
                layout=WeightLayout(w1_transposed=self.transposed, w2_transposed=self.transposed),
            )
        )


_SILU = ExpertOptions("silu", gated=True)


def _swin(stage: int, width: int, per_image: int) -> Shape:
    return Shape(
        f"swin{stage}", f"Swin stage {stage}, {per_image} tokens an image",
        width, 4 * width, 8, 2, ExpertOptions("gelu"), RouterOptions(2),
        biases=True, counts=SWIN_BATCHES, per_image=per_image,
    )  # fmt: skip


# Sizes, options and layouts are from the models' published configurations and from transformers;
# Swin is Swin-T at 224x224.
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("mixtral", "Mixtral-8x7B", 4096, 14336, 8, 2, _SILU, RouterOptions(2)),
        Shape("qwen3", "Qwen3-30B-A3B", 2048, 768, 128, 8, _SILU, RouterOptions(8)),
        Shape(
            "deepseek", "DeepSeek-V3", 7168, 2048, 256, 8, _SILU,
            RouterOptions(
                8, "sigmoid", routed_scaling=2.5,
                group_scoring="top2_sum", n_group=8, topk_group=4,
            ),
            selection_bias=True,
        ),
        Shape(
            "gpt-oss", "gpt-oss-20b", 2880, 2880, 32, 4,
            ExpertOptions("clamped_swiglu", gated=True, interleaved=True),
            RouterOptions(4, "topk_softmax"), biases=True, transposed=True,
        ),
        _swin(1, 96, 3136),
        _swin(2, 192, 784),
        _swin(3, 384, 196),
        _swin(4, 768, 49),
        # Too small to measure: it runs the harness where there is no GPU.
        Shape("tiny", "Harness test", 32, 48, 4, 2, _SILU, RouterOptions(2), counts=(1, 5)),
    )
}  # fmt: skip


def matching(names: str) -> tuple[Shape, ...]:
    """Returns the shapes of a list such as ``qwen3,swin``; ``""`` is all but ``tiny``.

    Raises:
        ValueError: If a name is not the beginning of any shape's.
    """
    found: dict[str, Shape] = {}
    for name in names.split(",") if names else [n for n in SHAPES if n != "tiny"]:
        same = {known: shape for known, shape in SHAPES.items() if known.startswith(name)}
        if not name or not same:
            raise ValueError(f"shapes must be among {', '.join(SHAPES)}; got {name!r}")
        found |= same
    return tuple(found.values())


def parameters_of(shape: Shape, dtype: torch.dtype, device: str) -> Parameters:
    """Returns random parameters of a layer, which lie as it has them."""
    sizes = shape.experts, shape.width, shape.hidden, shape.rows
    found = random_parameters(*sizes, biases=shape.biases, dtype=dtype, device=device)
    if shape.transposed:
        found |= {name: found[name].mT.contiguous().mT for name in ("w1", "w2")}
    if shape.selection_bias:
        generator = torch.Generator(device).manual_seed(3)
        bias = torch.randn(shape.experts, generator=generator, device=device)
        found["selection_bias"] = bias.mul_(0.1)
    return found


def random_tokens(parameters: Parameters, tokens: int) -> Tensor:
    """Returns tokens ``[T, D]`` for a layer, of its dtype and on its device."""
    like = parameters["w1"]
    generator = torch.Generator(like.device).manual_seed(2)
    size = (tokens, like.shape[2])
    return torch.randn(size, generator=generator, dtype=like.dtype, device=like.device)


def call_tensors(parameters: Parameters, tokens: int) -> dict[str, Tensor]:
    """Returns the tensors of a plan's launch, with ``y`` for its result."""
    x_TD = random_tokens(parameters, tokens)
    return {**parameters, "x": x_TD, "y": torch.empty_like(x_TD)}


def random_routing(
    kind: str, tokens: int, experts: int, top_k: int, device: torch.device | str = "cpu"
) -> Routing:
    """Returns expert ids ``[T, K]`` int64 and weights ``[T, K]`` float32 that sum to 1.

    With ``uniform`` the K experts of a token differ, and all are as likely. With ``zipf`` they
    differ and are drawn one after another with probabilities in proportion to 1, 1/2, 1/3, ...,
    where the order of the experts is random. With ``one`` every slot of every token is expert 0's.

    Raises:
        ValueError: If the kind is unknown.
    """
    if kind not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}; got {kind!r}")
    generator = torch.Generator().manual_seed(1)
    rank = torch.arange(1, experts + 1, dtype=torch.float32)
    log_share = -rank.log() if kind == "zipf" else torch.zeros(experts)
    log_share = log_share[torch.randperm(experts, generator=generator)]
    # The K largest of log p + Gumbel noise are a draw without replacement.
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
    ids = (log_share + noise).topk(top_k, dim=-1).indices
    if kind == "one":
        ids = torch.zeros_like(ids)
    weights = torch.randn(tokens, top_k, generator=generator).softmax(-1)
    return ids.to(device), weights.to(device)
