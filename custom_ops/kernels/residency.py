"""Experts in host memory, of which the device holds R at a time: the cache and its copies.

The weights stay in pinned host memory that the device reads. Each layer has R slots on the device,
of one expert's w1 and w2 each, and tables of what they hold, which persist from call to call. After
the routing, :func:`residency_kernel` decides which experts take which slots, as
:class:`custom_ops.offload.ExpertCache` does; :func:`copy_experts_kernel` copies the missing ones;
the products read weights through the table of places. Where a call has more experts than there are
slots, they take turns: at most R of them in a wave.

Legend: T tokens, K = top_k, E experts, R slots of the device, F rows and D columns of an expert's
w1, H columns of its w2. A token's K choices are called token slots here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import triton
import triton.language as tl

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import kernel_of
from custom_ops.kernels.expressions import E, Expression, K, T, cdiv, minimum
from custom_ops.kernels.index_sort import experts_of
from custom_ops.kernels.layer import Layer, power_of_2
from custom_ops.kernels.spec import (
    Argument,
    Buffer,
    Constant,
    KernelSpec,
    StatePointer,
    Step,
    TensorPointer,
    WaveLaunch,
    WorkspacePointer,
)

# Token slots that are looked at in one go.
_SLOTS_AT_ONCE = 512
# The bus delivers up to 0.5 MB in the time that a read takes (450 GB/s of NVLink-C2C in 1 us; an
# estimate): so much is under way for each expert. More programs would keep products waiting.
_COPY_BYTES = 16 * 1024
_COPY_PROGRAMS = 32
_COPY_WARPS = 4


@triton.jit
def _rows_of_experts(
    expert_ids_ptr,
    row_of_slot_ptr,
    token_slots,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns how many token slots each expert has, and gives each that has one a row."""
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, token_slots, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        expert, valid = experts_of(expert_ids_ptr, slot, token_slots, E)
        tl.store(row_of_slot_ptr + slot, tl.where(valid, slot, -1), mask=slot < token_slots)
        counts += tl.histogram(expert, BLOCK_E, mask=valid)
    return counts


@triton.jit
def _tabulate_waves(
    tiles,  # [BLOCK_E], of the expert at each position
    starts,  # [BLOCK_E], its first row
    expert,  # [BLOCK_E]
    wave_tiles_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    E: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes the tile table in the order of waves, and where each wave begins in it."""
    position = tl.arange(0, tiles.shape[0])
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    begins = (position % R == 0) & (position < E)
    tl.store(wave_tiles_ptr + position // R, first_tile, mask=begins)
    tl.store(wave_tiles_ptr + (E + R - 1) // R, tl.sum(tiles, axis=0))
    for t in tl.range(0, tl.max(tiles, axis=0)):
        used = t < tiles
        tl.store(tile_expert_ptr + first_tile + t, expert, mask=used)
        tl.store(tile_row_ptr + first_tile + t, starts + t * BLOCK_M, mask=used)


@triton.jit(do_not_specialize=["tokens"])
def residency_kernel(
    expert_ids_ptr,  # [T, K] where token slots are not sorted, else None
    row_of_slot_ptr,  # [T, K]
    row_starts_ptr,  # [E + 1] where they are sorted, else None
    slot_of_expert_ptr,  # [E], plus 1; 0 for none
    expert_of_slot_ptr,  # [R], plus 1; 0 for none
    last_use_ptr,  # [R], int64
    clock_ptr,  # [1], int64
    copy_expert_ptr,  # [E]
    place_of_expert_ptr,  # [E]
    wave_of_expert_ptr,  # [E]
    wave_tiles_ptr,  # [waves + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Places the active experts in one program, and writes the tables as the last wave leaves them.

    The active experts stand in a line: first those that have a slot, then the missing ones, each in
    ascending order. Each R of them are a wave. In the first wave the missing ones take the slots
    that were used the longest time ago; later ones take all slots again, from the first on.
    """
    NEVER: tl.constexpr = 2**63 - 1  # Beyond every last use.
    position = tl.arange(0, BLOCK_E)
    if row_starts_ptr is None:
        rows = _rows_of_experts(expert_ids_ptr, row_of_slot_ptr, tokens * K, E, BLOCK_E, BLOCK_N)
        starts = rows
    else:
        starts = tl.load(row_starts_ptr + position, mask=position < E, other=0)
        rows = tl.load(row_starts_ptr + position + 1, mask=position < E, other=0) - starts
    slot_of_expert = tl.load(slot_of_expert_ptr + position, mask=position < E, other=0) - 1
    slot = tl.arange(0, BLOCK_R)
    expert_of_slot = tl.load(expert_of_slot_ptr + slot, mask=slot < R, other=0) - 1
    last_use = tl.load(last_use_ptr + slot, mask=slot < R, other=0)
    now = tl.load(clock_ptr) + 1
    # Everything is loaded before anything is stored.
    tl.debug_barrier()

    active = (rows > 0).to(tl.int32)
    hit = active * (slot_of_expert >= 0).to(tl.int32)
    hits = tl.sum(hit, axis=0)
    count = tl.sum(active, axis=0)
    expert = tl.sort(position + BLOCK_E * (2 - active - hit)) % BLOCK_E
    wave = position // R

    in_use = tl.gather(active, tl.maximum(expert_of_slot, 0), 0) * (expert_of_slot >= 0)
    free = (in_use == 0) & (slot < R)
    oldest = tl.sort(tl.where(free, last_use * BLOCK_R + slot, NEVER))
    victim = (oldest % BLOCK_R).to(tl.int32)
    place = tl.where(
        position < hits,
        tl.gather(slot_of_expert, expert, 0),
        tl.where(
            wave == 0,
            tl.gather(victim, tl.minimum(tl.maximum(position - hits, 0), BLOCK_R - 1), 0),
            position - wave * R,
        ),
    )

    is_active = position < count
    missing = is_active & (position >= hits)
    tl.store(copy_expert_ptr + position, tl.where(missing, expert, -1), mask=position < E)
    tl.store(place_of_expert_ptr + expert, place, mask=is_active)
    tl.store(wave_of_expert_ptr + expert, tl.where(is_active, wave, -1), mask=expert < E)

    evicted = (slot < count - hits) & (oldest != NEVER)
    old = tl.gather(expert_of_slot, victim, 0)
    tl.store(slot_of_expert_ptr + old, 0, mask=evicted & (old >= 0))
    # A later wave takes the slots of the first ones in it.
    stays = is_active & ((wave + 1) * R + place >= count)
    tl.store(slot_of_expert_ptr + expert, tl.where(stays, place + 1, 0), mask=is_active)
    tl.store(expert_of_slot_ptr + place, expert + 1, mask=stays)
    tl.store(last_use_ptr + place, now, mask=stays)
    tl.store(clock_ptr, now)

    if row_starts_ptr is not None:
        tiles = tl.gather(tl.cdiv(rows, BLOCK_M), expert, 0)
        starts = tl.gather(starts, expert, 0)
        _tabulate_waves(
            tiles, starts, expert, wave_tiles_ptr, tile_expert_ptr, tile_row_ptr, E, R, BLOCK_M
        )


@triton.jit(do_not_specialize=["wave"])
def copy_experts_kernel(
    source_ptr,  # [E, SIZE], in host memory
    slots_ptr,  # [R, SIZE]
    copy_expert_ptr,  # [E], -1 for none
    place_of_expert_ptr,  # [E]
    wave,
    E: tl.constexpr,
    R: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a share of one of a wave's missing experts to its slot."""
    position = wave * R + tl.program_id(1)
    if position >= E:
        return
    expert = tl.load(copy_expert_ptr + position)
    if expert < 0:
        return
    place = tl.load(place_of_expert_ptr + expert)
    source_ptr += expert.to(tl.int64) * SIZE
    slots_ptr += place.to(tl.int64) * SIZE
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(first, SIZE, tl.num_programs(0) * BLOCK):
        element = start + tl.arange(0, BLOCK)
        inside = element < SIZE
        block = tl.load(source_ptr + element, mask=inside, eviction_policy="evict_first")
        tl.store(slots_ptr + element, block, mask=inside)


def state_buffers(layer: Layer) -> tuple[Buffer, ...]:
    """Returns a layer's state: tables of ``4 E + 12 R + 8`` bytes, then R slots for w1 and for w2.

    Each buffer is rounded up to 256 bytes.
    """
    slots = layer.resident_experts
    if slots is None:
        return ()
    buffers = [
        ("slot_of_expert", torch.int32, layer.shape.experts),
        ("expert_of_slot", torch.int32, slots),
        ("last_use", torch.int64, slots),
        ("clock", torch.int64, 1),
    ]
    for name, (tensor, sizes) in layer.shape.stored.items():
        buffers.append((f"{name}_slots", tensor.dtype, slots * prod(sizes)))
    return tuple(Buffer(name, dtype, Expression.of(count)) for name, dtype, count in buffers)


def waves(layer: Layer) -> Expression:
    """Returns in how many waves T tokens' experts are computed at most."""
    return cdiv(minimum(E, T * K), _slots(layer))


def residency_step(layer: Layer, architecture: Architecture, block_m: int | None) -> Step:
    """Places the active experts: the routing, or sorted token slots, to places, waves and copies.

    Args:
        layer: The layer.
        architecture: Where it runs.
        block_m: Rows of a tile, whose table is put in the order of waves; None where token slots
            are not sorted, which then get the buffer ``row_of_slot``.
    """
    slots = _slots(layer)
    block_e = max(32, power_of_2(layer.shape.experts))
    names = ("copy_expert", "place_of_expert", "wave_of_expert")
    buffers = [Buffer(name, torch.int32, E) for name in names]
    kernel_arguments: dict[str, Argument | float | str] = {
        "copy_expert_ptr": WorkspacePointer("copy_expert", torch.int32)
    }
    unused: tuple[str, ...]
    if block_m is None:
        buffers.append(Buffer("row_of_slot", torch.int32, T * K))
        unused = ("row_starts_ptr", "wave_tiles_ptr", "tile_expert_ptr", "tile_row_ptr")
    else:
        waves_at_most = -(-layer.shape.experts // slots)
        buffers.append(Buffer("wave_tiles", torch.int32, Expression.of(waves_at_most + 1)))
        unused = ("expert_ids_ptr", "row_of_slot_ptr")
    kernel_arguments.update(dict.fromkeys(unused, Constant(None)))
    state = {
        buffer.name: StatePointer(buffer.name, buffer.dtype) for buffer in state_buffers(layer)
    }
    for name in ("slot_of_expert", "expert_of_slot", "last_use", "clock"):
        kernel_arguments[f"{name}_ptr"] = state[name]
    launch = {
        "block_m": block_m or 1,
        "block_n": _SLOTS_AT_ONCE,
        "block_e": block_e,
        "block_r": max(32, power_of_2(slots)),
        "num_warps": 4,
    }
    spec = kernel_of(residency_kernel, layer, architecture, (1,), launch, **kernel_arguments)
    return Step(tuple(buffers), (spec,))


def wave_launches(
    layer: Layer, architecture: Architecture, products: Sequence[KernelSpec]
) -> tuple[WaveLaunch, ...]:
    """Returns a wave: each weight is copied beside the product that does not read it.

    Args:
        layer: The layer.
        architecture: Where it runs.
        products: The first and the second product, or one kernel for both.
    """
    copies = [list(_copies(layer, architecture, weight)) for weight in layer.shape.matrices]
    if len(products) == 1:
        copies = [[*copies[0], *copies[1]]]
    wave: list[WaveLaunch] = []
    for copied, product in zip(copies, products, strict=True):
        product_index = len(wave) + len(copied)
        # The streams run in order: the first copy waits for the last wave's product, which waits
        # for its last copy.
        afters = [(product_index,), *[()] * (len(copied) - 1)]
        wave += [WaveLaunch(c, side=True, after=a) for c, a in zip(copied, afters, strict=True)]
        wave.append(WaveLaunch(product, side=False, after=(product_index - 1,)))
    return tuple(wave)


def _copies(layer: Layer, architecture: Architecture, weight: str) -> Iterator[KernelSpec]:
    for name, (tensor, sizes) in layer.shape.stored.items():
        if not name.startswith(weight):
            continue
        dtype, size = tensor.dtype, prod(sizes)
        block = _COPY_BYTES // dtype.itemsize
        programs = min(_COPY_PROGRAMS, -(-size // block))
        yield kernel_of(
            copy_experts_kernel,
            layer,
            architecture,
            (programs, minimum(_slots(layer), T * K)),
            {"block": block, "num_warps": _COPY_WARPS},
            source_ptr=TensorPointer(name, dtype),
            slots_ptr=StatePointer(f"{name}_slots", dtype),
            copy_expert_ptr=WorkspacePointer("copy_expert", torch.int32),
            SIZE=size,
        )


def _slots(layer: Layer) -> int:
    if layer.resident_experts is None:
        raise ValueError("all experts of the layer are resident")
    return layer.resident_experts
