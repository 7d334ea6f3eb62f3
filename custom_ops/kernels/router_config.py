"""Which of the router's paths is taken, and with which blocks: a pure function of the sizes.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.layer import Layer

__all__ = ["RouterConfig", "needs_upcast", "router_config"]


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


# One program reads some 100 kB/us (estimated): it does so with a weight of the first size at any
# number of tokens, of the second where the experts take far longer anyway.
_ALONE_BYTES = 64 * 1024
_FUSED_BYTES = 1024 * 1024
_FEW_TOKENS = 16
# Vector products read the weight once per token, from L2; beyond this, tiles of 16 tokens win.
_VECTOR_BYTES = 16 * 1024 * 1024
_STAGE_BYTES = 24 * 1024
# 64-bit keys of a thread, above which registers spill.
_KEYS = 32


def router_config(
    layer: Layer, architecture: Architecture, first_tokens: int, last_tokens: int
) -> RouterConfig:
    """Chooses from sizes alone; nothing here was measured on a GPU.

    Args:
        layer: A layer with a router.
        architecture: Where it runs.
        first_tokens: Fewest tokens that it is launched for.
        last_tokens: Most tokens.
    """
    experts = max(16, _power_of_2(layer.experts))
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


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
