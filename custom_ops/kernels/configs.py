"""Which kernels run for how many tokens, and with which block shapes: pure functions and data.

:func:`default_ranges` is a heuristic that needs no GPU; a table in ``tuned/`` that was measured on
the architecture goes before it. Nothing is searched at run time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

from custom_ops.dtypes import SHORT_NAMES
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import MAX_TOKENS

_FEW_TOKENS = 16
# Reading an expert's weights again for a second slot costs up to this much more traffic before
# sorting the slots, which is one launch more, pays.
_FEW_REREADS = 1.15
# The hidden tile stays on chip up to this width. At D = 96, H = 384 the separate products move 2.6
# times the bytes; at D = 192 1.4 times, and the kernel's two accumulators spill.
_MLP_WIDTH = 128


# One program reads some 100 kB/us (estimated): it does so with a weight of the first size at any
# number of tokens, of the second where the experts take far longer anyway.
_ALONE_BYTES = 64 * 1024
_FUSED_BYTES = 1024 * 1024
# Vector products read the weight once per token, from L2; beyond this, tiles of 16 tokens win.
_VECTOR_BYTES = 16 * 1024 * 1024
_STAGE_BYTES = 24 * 1024
# 64-bit keys of a thread, above which registers spill.
_KEYS = 32


@dataclass(frozen=True)
class GemmConfig:
    """The tile of a grouped product.

    Attributes:
        block_m: Rows of one expert.
        block_n: Columns of the result; as many again for the up half when gated.
        block_k: Depth of one pipeline stage.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
        group_m: M tiles that take an N tile's weights one after another.
        tensor_maps: Whether the weights come through the tensor memory accelerator.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    tensor_maps: bool = False


@dataclass(frozen=True)
class FewConfig:
    """The block of the vector products for few tokens: rows of the weights by their columns."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True)
class MlpConfig:
    """The tile of the kernel that keeps the hidden rows on chip; ``block_n`` is hidden units."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class RangeConfig:
    """What runs up to a number of tokens.

    Attributes:
        last_tokens: Most tokens.
        path: ``few``: vector products without a sort; ``gemm``: two grouped products; ``mlp``:
            both in one kernel.
        up: Blocks of the first product, or of the whole expert (``mlp``).
        down: Blocks of the second product; None for ``mlp``.
    """

    last_tokens: int
    path: Literal["few", "gemm", "mlp"]
    up: FewConfig | GemmConfig | MlpConfig
    down: FewConfig | GemmConfig | None = None

    def __post_init__(self) -> None:
        if self.path == "gemm" and self.up.block_m != self.down.block_m:  # type: ignore[union-attr]
            raise ValueError(
                "both products share the tile table, so block_m must be the same; got "
                f"{self.up} and {self.down}"
            )


@dataclass(frozen=True)
class RouterConfig:
    """The path through the router and the tile of its logits.

    Attributes:
        path: ``fused``: one kernel; ``tiles``: logits by matrix products, then the selection;
            ``vectors``: logits by vector products, a token at a time, then the selection.
        block_t: Tokens.
        block_e: Experts; at least E where fused.
        block_d: Depth of one pipeline stage.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
    """

    path: Literal["fused", "tiles", "vectors"]
    block_t: int
    block_e: int
    block_d: int
    num_warps: int
    num_stages: int


_CONFIGS: Mapping[str, Any] = {"few": FewConfig, "gemm": GemmConfig, "mlp": MlpConfig}


def ranges_for(layer: Layer, architecture: Architecture) -> tuple[RangeConfig, ...]:
    """Returns the measured configuration where there is one, else the default."""
    tuned = _tuned(architecture.name).get(shape_key(layer))
    return tuned or default_ranges(layer, architecture)


def shape_key(layer: Layer) -> str:
    """Returns what a measured configuration is looked up by: all that changes its speed.

    Biases and the kind of activation do not.
    """
    dtypes = f"{SHORT_NAMES[layer.tokens_dtype]}-{SHORT_NAMES[layer.experts_dtype]}"
    if layer.tf32:
        dtypes += "-tf32"
    gated = "-gated" if layer.options.gated else ""
    return f"d{layer.width}-h{layer.hidden}-e{layer.experts}-k{layer.top_k}{gated}-{dtypes}"


def default_ranges(layer: Layer, architecture: Architecture) -> tuple[RangeConfig, ...]:
    """Chooses paths and tiles from sizes alone.

    Few tokens take vector products, as long as hardly any two of them share an expert. Beyond,
    BLOCK_M is the mean number of rows of an expert, rounded up to 16, 32, 64 or 128.
    """
    few = _last_few_tokens(layer)
    few_up = _few(layer, layer.hidden, depth=layer.width, vectors=layer.top_k)
    few_down = _few(layer, layer.width, depth=layer.hidden, vectors=1)
    ranges = [RangeConfig(few, "few", few_up, few_down)]
    gates = layer.options.rows_per_hidden
    tensor_cores = _on_tensor_cores(layer, architecture)
    on_chip = tensor_cores and layer.width <= _MLP_WIDTH
    blocks_m = (16, 32, 64, 128) if tensor_cores else (16, 32, 64)
    for block_m in blocks_m:
        last = block_m * layer.experts // layer.top_k
        if block_m == blocks_m[-1]:
            last = MAX_TOKENS
        if last <= few:
            continue
        if on_chip:
            ranges.append(RangeConfig(last, "mlp", _mlp(layer, architecture, block_m)))
        else:
            up = _gemm(layer, architecture, block_m, layer.hidden, depth=layer.width, gates=gates)
            down = _gemm(layer, architecture, block_m, layer.width, depth=layer.hidden, gates=1)
            ranges.append(RangeConfig(last, "gemm", up, down))
    return tuple(ranges)


def _last_few_tokens(layer: Layer) -> int:
    """Returns up to how many tokens hardly any two slots share an expert."""
    share = min(layer.top_k, layer.experts) / layer.experts
    last = 1
    for tokens in range(2, _FEW_TOKENS + 1):
        active = layer.experts * (1 - (1 - share) ** tokens)
        if tokens * layer.top_k > _FEW_REREADS * active:
            break
        last = tokens
    return last


def _on_tensor_cores(layer: Layer, architecture: Architecture) -> bool:
    """Whether the products run on tensor cores; TF32 is planned like full float32."""
    return architecture.has_tensor_cores and layer.experts_dtype != torch.float32


def _few(layer: Layer, columns: int, *, depth: int, vectors: int) -> FewConfig:
    # A warp reads 512 contiguous bytes of a row; rows per program as long as 256 programs remain.
    block_k = min(_power_of_2(depth), 512 // layer.experts_dtype.itemsize)
    fits = (n for n in (16, 8) if columns * vectors >= 256 * n)
    return FewConfig(next(fits, 4), block_k, num_warps=4)


def _gemm(
    layer: Layer, architecture: Architecture, block_m: int, columns: int, *, depth: int, gates: int
) -> GemmConfig:
    tensor_cores = _on_tensor_cores(layer, architecture)
    big = architecture.shared_memory >= 200 * 1024
    if block_m <= 32:
        block_n, block_k, num_warps = 64, 128, 4
    elif block_m == 64:
        block_n, block_k, num_warps = 128 // gates, 64, 4
    else:
        block_n, block_k, num_warps = (256 if big else 128) // gates, 64, 8
    if not tensor_cores:
        # Products without tensor cores take their operands from registers.
        block_n, block_k = min(block_n, 64), 32
    tensor_maps = tensor_cores and architecture.has_tensor_maps
    if tensor_maps:
        block_k = 64  # 128 bytes, the widest swizzle.
    block_n = min(block_n, max(16, _power_of_2(columns)))
    while block_k > 16 and depth % block_k:
        block_k //= 2
    stage = (block_m + gates * block_n) * block_k * layer.experts_dtype.itemsize
    num_stages = max(1, min(4, (architecture.shared_memory - 4096) // stage))
    return GemmConfig(block_m, block_n, block_k, num_warps, num_stages, tensor_maps=tensor_maps)


def _mlp(layer: Layer, architecture: Architecture, block_m: int) -> MlpConfig:
    block_n = 32 if architecture.shared_memory < 128 * 1024 else 64
    return MlpConfig(
        block_m,
        min(block_n, max(16, _power_of_2(layer.hidden))),
        num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )


def router_config(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> RouterConfig:
    """Chooses for a range of tokens from sizes alone; nothing here was measured on a GPU."""
    experts = max(16, layer.expert_places)
    weight_bytes = layer.experts * layer.width * layer.routing_dtype.itemsize
    few = last_tokens <= _FEW_TOKENS
    if experts <= 256 and weight_bytes <= (_ALONE_BYTES if few else _FUSED_BYTES):
        block_t = 16 if first_tokens < 1024 else 32 if first_tokens < 4096 else 64
        block_t = min(block_t, 8 * 32 * _KEYS // experts)
        return _tiled(layer, architecture, "fused", block_t, experts)
    if few and last_tokens * weight_bytes <= _VECTOR_BYTES:
        # A warp reads 512 contiguous bytes of an expert's row.
        block_d = min(_power_of_2(layer.width), 512 // layer.routing_dtype.itemsize)
        return RouterConfig("vectors", 1, 4, block_d, num_warps=4, num_stages=2)
    if first_tokens < 64:
        return _tiled(layer, architecture, "tiles", 16, min(experts, 16 if few else 32))
    block_t = 32 if first_tokens < 1024 else 64
    return _tiled(layer, architecture, "tiles", block_t, min(experts, 64))


def _tiled(
    layer: Layer,
    architecture: Architecture,
    path: Literal["fused", "tiles"],
    block_t: int,
    block_e: int,
) -> RouterConfig:
    itemsize = max(layer.tokens_dtype.itemsize, layer.routing_dtype.itemsize)
    depth_bytes = (block_t + block_e) * itemsize
    # 128 contiguous bytes of a row, unless that makes the stages too big.
    block_d = min(128 // itemsize, _power_of_2(layer.width), _STAGE_BYTES // depth_bytes)
    block_d = max(16, 1 << (block_d.bit_length() - 1))
    if needs_upcast(layer, architecture) and layer.routing_dtype.itemsize == 2:
        # The upcast weight passes through registers: deeper blocks spill.
        block_d = 16
    stages = architecture.shared_memory // 2 // (depth_bytes * block_d)
    num_warps = 8 if block_t * block_e > 4 * 32 * _KEYS else 4
    return RouterConfig(path, block_t, block_e, block_d, num_warps, max(1, min(3, stages)))


def needs_upcast(layer: Layer, architecture: Architecture) -> bool:
    """Returns whether products are of float32 and so not by tensor cores.

    For sm_75 Triton compiles no product to tensor cores.
    """
    same = layer.tokens_dtype == layer.routing_dtype
    half = layer.tokens_dtype.itemsize == 2
    return not (same and half and architecture.has_tensor_cores)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _tuned(name: str) -> dict[str, tuple[RangeConfig, ...]]:
    file = files("custom_ops.kernels") / "tuned" / f"{name}.json"
    if not file.is_file():
        return {}
    return {
        key: read_ranges(ranges) for key, ranges in json.loads(file.read_text())["shapes"].items()
    }


def read_ranges(ranges: list[dict[str, Any]]) -> tuple[RangeConfig, ...]:
    """Returns the configurations that :func:`write_ranges` wrote."""

    def read(each: dict[str, Any]) -> RangeConfig:
        config = _CONFIGS[each["path"]]
        blocks = {name: each[name] and config(**each[name]) for name in ("up", "down")}
        return RangeConfig(**each | blocks)

    return tuple(map(read, ranges))


def write_ranges(ranges: tuple[RangeConfig, ...]) -> list[dict[str, Any]]:
    """Returns configurations as JSON's types."""
    return [asdict(each) for each in ranges]
