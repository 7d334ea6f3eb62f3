"""Which kernels run for how many tokens, and with which block shapes: pure functions and data.

:func:`default_ranges` is a heuristic that needs no GPU; a table in ``tuned/`` that was measured on
the architecture goes before it. Nothing is searched at run time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

from custom_ops.dtypes import SHORT_NAMES
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.layer import Layer, power_of_2
from custom_ops.kernels.spec import MAX_TOKENS

_FEW_TOKENS = 16
# Bytes that a stage of the vector products reads: with these under way in each of a
# multiprocessor's programs, memory is busy; the sums of more do not fit into registers.
_FEW_BYTES = 16 * 1024
# Bytes that memory delivers at a time.
_LINE_BYTES = 128
# Reading an expert's weights again for a second slot costs up to this much more traffic before
# sorting the slots, which is one launch more, pays.
_FEW_REREADS = 1.15
# The hidden tile stays on chip up to this width. At D = 96, H = 384 the separate products move 2.6
# times the bytes; at D = 192 1.4 times, and the kernel's two accumulators spill.
_MLP_WIDTH = 128


# One program reads some 100 kB/us (estimated): it does so with a router weight of the first size at
# any number of tokens, of the second where there are programs for every multiprocessor.
_ALONE_BYTES = 64 * 1024
_FUSED_BYTES = 1024 * 1024
_FUSED_TOKENS = 1024
# Vector products read the weight once per token, from L2; beyond this, tiles of 16 tokens win.
_VECTOR_BYTES = 16 * 1024 * 1024
# Bytes of the weight that a thread loads in one stage of the vector products.
_VECTOR_THREAD_BYTES = 64
_STAGE_BYTES = 24 * 1024
# Elements of a float32 weight that a thread splits in one stage, above which registers run out.
_SPLIT_ELEMENTS = 16
# Registers of a thread of a grouped product besides its accumulators.
_OTHER_REGISTERS = 64
# 64-bit keys of a thread, above which registers spill.
_KEYS = 32


@dataclass(frozen=True)
class TileConfig:
    """The tile of a product.

    Attributes:
        block_m: Rows of one expert, or of the gradient of its weight.
        block_n: Columns of the result; as many again of the weights when gated.
        block_k: Depth of one pipeline stage.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GemmConfig(TileConfig):
    """The tile of a grouped product of the forward pass.

    Attributes:
        group_m: M tiles that take an N tile's weights one after another.
        tensor_maps: Whether the weights come through the tensor memory accelerator.
        persistent: Whether as many programs as run at once compute all tiles, in turn; each then
            loads for its next tile while it stores one.
        swapped: Whether the weights are the product's left operand, so that tensor cores that take
            64 rows and more from shared memory take columns of the weights for them.
    """

    group_m: int = 8
    tensor_maps: bool = False
    persistent: bool = False
    swapped: bool = False


def estimated_registers(config: GemmConfig, gates: int) -> int:
    """Returns about how many registers a thread of a product takes.

    These are its share of the accumulators, and as many others as beside those of the widest tile.
    """
    return gates * config.block_m * config.block_n // (32 * config.num_warps) + _OTHER_REGISTERS


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
    """The path and the blocks up to a number of tokens.

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
    """Returns the key of a measured configuration: all that changes its speed.

    Biases and the kind of activation do not.
    """
    weight_format = layer.shape.weight_format
    dtypes = f"{SHORT_NAMES[layer.shape.tokens_dtype]}-{SHORT_NAMES[weight_format.operand_dtype]}"
    if not weight_format.is_plain:
        dtypes += "-".join(("", weight_format.name, *map(str, weight_format.block)))
    if layer.tf32:
        dtypes += "-tf32"
    options = layer.shape.options
    gates = "-interleaved" if options.interleaved else "-gated" if options.gated else ""
    layout = "-w1t" * layer.shape.layout.w1_transposed + "-w2t" * layer.shape.layout.w2_transposed
    shape = layer.shape
    sizes = f"d{shape.width}-h{shape.hidden}-e{shape.experts}-k{shape.top_k}"
    return f"{sizes}{gates}-{dtypes}{layout}"


def default_ranges(layer: Layer, architecture: Architecture) -> tuple[RangeConfig, ...]:
    """Chooses paths and tiles from sizes alone.

    Few tokens take vector products, as long as hardly any two of them share an expert. Beyond,
    BLOCK_M is the mean number of rows of an expert, rounded up to 16, 32, 64 or 128.
    """
    few = _last_few_tokens(layer)
    gates = layer.shape.options.rows_per_hidden
    few_up = _few(
        layer,
        architecture,
        layer.shape.hidden,
        depth=layer.shape.width,
        transposed=layer.shape.layout.w1_transposed,
        gates=gates,
        vectors=layer.shape.top_k,
    )
    few_down = _few(
        layer,
        architecture,
        layer.shape.width,
        depth=layer.shape.hidden,
        transposed=layer.shape.layout.w2_transposed,
        slots=layer.shape.top_k,
    )
    ranges = [RangeConfig(few, "few", few_up, few_down)]
    tensor_cores = on_tensor_cores(layer, architecture)
    plain = layer.shape.weight_format.is_plain
    on_chip = tensor_cores and layer.shape.width <= _MLP_WIDTH and plain
    blocks_m = (16, 32, 64, 128) if tensor_cores else (16, 32, 64)
    for block_m in blocks_m:
        last = block_m * layer.shape.experts // layer.shape.top_k
        if block_m == blocks_m[-1]:
            last = MAX_TOKENS
        if last <= few:
            continue
        if on_chip:
            ranges.append(RangeConfig(last, "mlp", _mlp(layer, block_m)))
        else:
            up = _gemm(
                layer,
                architecture,
                block_m,
                layer.shape.hidden,
                depth=layer.shape.width,
                gates=gates,
            )
            down = _gemm(layer, architecture, block_m, layer.shape.width, depth=layer.shape.hidden)
            if gates == 1:
                # It activates twice the elements that it does when gated: registers run out.
                up = replace(up, persistent=False)
            ranges.append(RangeConfig(last, "gemm", up, down))
    return tuple(ranges)


def _last_few_tokens(layer: Layer) -> int:
    """Returns up to how many tokens hardly any two slots share an expert."""
    share = min(layer.shape.top_k, layer.shape.experts) / layer.shape.experts
    last = 1
    for tokens in range(2, _FEW_TOKENS + 1):
        active = layer.shape.experts * (1 - (1 - share) ** tokens)
        if tokens * layer.shape.top_k > _FEW_REREADS * active:
            break
        last = tokens
    return last


def on_tensor_cores(layer: Layer, architecture: Architecture) -> bool:
    """Whether the products run on tensor cores; TF32 is planned like full float32."""
    return (
        architecture.has_tensor_cores and layer.shape.weight_format.operand_dtype != torch.float32
    )


def _few(
    layer: Layer,
    architecture: Architecture,
    columns: int,
    *,
    depth: int,
    transposed: bool,
    gates: int = 1,
    slots: int = 1,
    vectors: int = 1,
) -> FewConfig:
    """Chooses the block of a vector product.

    Args:
        layer: The layer.
        architecture: Where it runs.
        columns: Elements of a result.
        depth: Elements of a vector.
        transposed: Whether the weights lie as (in, out).
        gates: Rows of the weights for an element of the result.
        slots: Vectors that a program multiplies.
        vectors: Times that a token's products take ``slots`` vectors.
    """
    # Registers hold the products; those of packed weights are summed up by words.
    weight_format = layer.shape.weight_format
    itemsize = weight_format.operand_dtype.itemsize if weight_format.is_plain else 1
    slots = power_of_2(slots)
    if transposed:
        blocks_n = [width // (gates * itemsize) for width in (_LINE_BYTES, _LINE_BYTES // 2)]
    else:
        blocks_n = [n for n in (16, 8, 4) if slots * gates * n * _LINE_BYTES <= _FEW_BYTES]
    # As wide as leaves two programs for each multiprocessor.
    fits = (n for n in blocks_n if columns * vectors >= 256 * n)
    block_n = min(next(fits, blocks_n[-1]), power_of_2(columns))
    block_k = min(power_of_2(depth), _FEW_BYTES // (slots * gates * block_n * itemsize))
    # Beyond the end of a row, a block has nothing to load.
    while block_k * itemsize > _LINE_BYTES and -depth % block_k > depth / 8:
        block_k //= 2
    # A thread copies no less than 4 bytes of the vectors, or it would wait for them.
    threads = slots * block_k * itemsize // 4
    return FewConfig(
        block_n,
        block_k,
        num_warps=max(1, min(4, threads // 32)),
        num_stages=4 if architecture.shared_memory >= 128 * 1024 else 3,
    )


def _gemm(
    layer: Layer,
    architecture: Architecture,
    block_m: int,
    columns: int,
    *,
    depth: int,
    gates: int = 1,
) -> GemmConfig:
    tensor_cores = on_tensor_cores(layer, architecture)
    plain = layer.shape.weight_format.is_plain
    block_n, num_warps = (64, 4) if block_m <= 32 else (128 // gates, block_m // 16)
    block_k = 64
    if not tensor_cores:
        # Products without tensor cores take their operands from registers, and so does decoding.
        block_n, block_k = min(block_n, 64 if plain else 32), 32
        if not plain:
            num_warps = max(4, block_m // 8)
    block_n = min(block_n, max(16, power_of_2(columns)))
    while block_k > 16 and depth % block_k:
        block_k //= 2
    # Operands then stay in shared memory, which leaves registers for two programs of 8 warps; each
    # stage has a buffer of its own, where other products need one less.
    asynchronous = tensor_cores and architecture.has_async_products and block_m >= 64
    # The compiler joins the gate and up columns of one row through registers.
    joined = gates == 2 and layer.shape.layout.w1_transposed and not layer.shape.options.interleaved
    programs = 2 if asynchronous or num_warps == 4 else 1
    itemsize = layer.shape.weight_format.operand_dtype.itemsize
    stage = (block_m + gates * block_n) * block_k * itemsize
    stages = (architecture.shared_memory // programs - 1024) // stage
    return GemmConfig(
        block_m,
        block_n,
        block_k,
        num_warps,
        num_stages=max(1, min(4, stages + (not asynchronous))),
        tensor_maps=tensor_cores and architecture.has_tensor_maps and not joined and plain,
        # With tcgen05, registers for a second program run out.
        persistent=asynchronous and architecture.capability == 90,
    )


def _mlp(layer: Layer, block_m: int) -> MlpConfig:
    return MlpConfig(
        block_m,
        min(32, max(16, power_of_2(layer.shape.hidden))),
        num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )


def router_config(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> RouterConfig:
    """Chooses for a range of tokens from sizes alone; nothing here was measured on a GPU."""
    experts = layer.expert_places
    weight_bytes = layer.shape.experts * layer.shape.width * layer.shape.routing_dtype.itemsize
    few = last_tokens <= _FEW_TOKENS
    fused_bytes = _FUSED_BYTES if first_tokens >= _FUSED_TOKENS else _ALONE_BYTES
    if experts <= 256 and weight_bytes <= fused_bytes:
        if few:
            return _vectors(layer, architecture, "fused", experts, num_warps=8)
        block_t = 16 if first_tokens < 1024 else 32 if first_tokens < 4096 else 64
        block_t = min(block_t, 8 * 32 * _KEYS // experts)
        return _tiled(layer, architecture, "fused", block_t, max(16, experts))
    if few and last_tokens * weight_bytes <= _VECTOR_BYTES:
        # Experts of a program as long as 256 programs remain.
        fits = (n for n in (4, 2) if first_tokens * layer.shape.experts >= 256 * n)
        return _vectors(layer, architecture, "vectors", next(fits, 1), num_warps=4)
    block = 16 if first_tokens < 64 else 32 if first_tokens < 1024 else 64
    return _tiled(layer, architecture, "tiles", block, max(16, min(experts, block)))


def _vectors(
    layer: Layer,
    architecture: Architecture,
    path: Literal["fused", "vectors"],
    block_e: int,
    num_warps: int,
) -> RouterConfig:
    row_bytes = _VECTOR_THREAD_BYTES * 32 * num_warps // block_e
    block_d = min(row_bytes // layer.shape.routing_dtype.itemsize, power_of_2(layer.shape.width))
    num_stages = _stages(architecture, _depth_bytes(layer, 1, block_e) * block_d)
    return RouterConfig(path, 1, block_e, block_d, num_warps, num_stages)


def _tiled(
    layer: Layer,
    architecture: Architecture,
    path: Literal["fused", "tiles"],
    block_t: int,
    block_e: int,
) -> RouterConfig:
    depth_bytes = _depth_bytes(layer, block_t, block_e)
    # 512 contiguous bytes of a row, unless that makes the stages too big.
    itemsize = max(layer.shape.tokens_dtype.itemsize, layer.shape.routing_dtype.itemsize)
    block_d = min(512 // itemsize, power_of_2(layer.shape.width), _STAGE_BYTES // depth_bytes)
    # With four warps, tiles of 32x32 spill 8 bytes.
    num_warps = 8 if block_t * block_e > 4 * 32 * _KEYS or block_t == block_e == 32 else 4
    upcast = needs_upcast(layer, architecture)
    if not upcast and layer.shape.routing_dtype == torch.float32:
        block_d = min(block_d, _SPLIT_ELEMENTS * 32 * num_warps // block_e)
    block_d = max(16, 1 << (block_d.bit_length() - 1))
    if upcast and layer.shape.routing_dtype.itemsize == 2:
        # The upcast weight passes through registers: deeper blocks spill.
        block_d = 16
    num_stages = _stages(architecture, depth_bytes * block_d)
    return RouterConfig(path, block_t, block_e, block_d, num_warps, num_stages)


def _depth_bytes(layer: Layer, block_t: int, block_e: int) -> int:
    return (
        block_t * layer.shape.tokens_dtype.itemsize + block_e * layer.shape.routing_dtype.itemsize
    )


def _stages(architecture: Architecture, stage_bytes: int) -> int:
    # Two programs on a multiprocessor, if they can be.
    return max(1, min(3, architecture.shared_memory // 2 // stage_bytes))


def needs_upcast(layer: Layer, architecture: Architecture) -> bool:
    """Returns whether products are of float32 and so not by tensor cores.

    These take two operands of one 16-bit dtype, or bfloat16 tokens and a float32 weight, which is
    a sum of three bfloat16 terms; float16 has too few exponents for that. For sm_75 Triton
    compiles no product to tensor cores.
    """
    same = layer.shape.tokens_dtype == layer.shape.routing_dtype
    exact = (same and layer.shape.tokens_dtype.itemsize == 2) or (
        layer.shape.tokens_dtype == torch.bfloat16 and layer.shape.routing_dtype == torch.float32
    )
    return not (exact and architecture.has_tensor_cores)


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

    def read(entry: dict[str, Any]) -> RangeConfig:
        config = _CONFIGS[entry["path"]]
        blocks = {name: entry[name] and config(**entry[name]) for name in ("up", "down")}
        return RangeConfig(**entry | blocks)

    return tuple(map(read, ranges))


def write_ranges(ranges: tuple[RangeConfig, ...]) -> list[dict[str, Any]]:
    """Returns configurations as JSON's types."""
    return [asdict(config) for config in ranges]
