"""Token slots sorted by expert, by index alone, and the table of tiles over the sorted rows.

Stable, hence deterministic, and without atomics in memory. Every program of the two-kernel form
counts the experts in its share of the slots; then each sums the counts of all shares by itself,
which spares a third launch.

Legend: T tokens, K = top_k, E experts, N = T*K slots (slot n is choice n % K of token n // K), of
which R have an expert and so a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.arguments import kernel_of, max_tiles
from custom_ops.kernels.device import wait_for_previous
from custom_ops.kernels.expressions import E, Expression, IntLike, K, T, cdiv, minimum
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.spec import Argument, Buffer, KernelSpec, Step, WorkspacePointer


class SortedSlots(NamedTuple):
    """The tables that the sort writes, int32.

    Attributes:
        slot_of_row: ``[N]``; the slot of row r, for the first R rows.
        row_of_slot: ``[N]``; -1 where the slot has no expert.
        row_starts: ``[E + 1]``; where each expert's rows start, and R.
        tile_expert: ``[max_tiles]``; -1 where a tile is not used.
        tile_row: ``[max_tiles]``; the first row of a tile.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    row_starts: Tensor
    tile_expert: Tensor
    tile_row: Tensor


def index_sort_reference(ids_N: Tensor, experts: int, block_m: int) -> SortedSlots:
    """The kernels' results, in torch; ``slot_of_row`` has R elements, unused tiles row -1.

    Args:
        ids_N: Expert ids; one outside ``0..experts-1`` names no expert.
        experts: E.
        block_m: Rows of a tile.
    """
    valid_N = (ids_N >= 0) & (ids_N < experts)
    counts_E = torch.bincount(ids_N[valid_N], minlength=experts)
    row_starts = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    order_N = torch.where(valid_N, ids_N, experts).argsort(stable=True)
    slot_of_row = order_N[: row_starts[-1]]
    row_of_slot = torch.full_like(order_N, -1)
    row_of_slot[slot_of_row] = torch.arange(len(slot_of_row))
    active = min(experts, len(ids_N))
    tiles = torch.full((2, active + (len(ids_N) - active) // block_m), -1)
    used = [
        (expert, row)
        for expert, count in enumerate(counts_E.tolist())
        for row in range(int(row_starts[expert]), int(row_starts[expert]) + count, block_m)
    ]
    tiles[:, : len(used)] = torch.tensor(used, dtype=torch.int64).reshape(-1, 2).mT
    return SortedSlots(*(t.int() for t in (slot_of_row, row_of_slot, row_starts, *tiles)))


@triton.jit
def experts_of(ids_ptr, slot, end, E: tl.constexpr):
    """Returns the experts of slots below ``end`` as int32, and whether they have one."""
    expert = tl.load(ids_ptr + slot, mask=slot < end, other=-1)
    valid = (expert >= 0) & (expert < E)
    return tl.where(valid, expert, 0).to(tl.int32), valid


@triton.jit
def _rank(
    expert,  # [BLOCK_N]
    valid,  # [BLOCK_N]
    E: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Returns how many earlier slots of the block have the same expert, where they have one."""
    if SCAN:
        # The counts of four experts share an integer, 16 bits for each.
        shift = (expert % 4 * 16).to(tl.int64)
        one = valid.to(tl.int64) << shift
        counts = tl.zeros_like(one)
        for four in tl.range(0, tl.cdiv(E, 4)):
            of_four = expert // 4 == four
            counts = tl.where(of_four, tl.cumsum(tl.where(of_four, one, 0), axis=0), counts)
        rank = ((counts >> shift) & 0xFFFF).to(tl.int32) - 1
    else:
        n = tl.arange(0, expert.shape[0])
        earlier = n[None, :] < n[:, None]
        key = tl.where(valid, expert, -1)
        rank = tl.sum(((key[:, None] == key[None, :]) & earlier).to(tl.int32), axis=1)
    return rank


@triton.jit
def _place(
    ids_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    first,  # slots first..end-1
    end,
    next_row,  # [BLOCK_E]
    E: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gives each slot the next row of its expert, in order of slots."""
    for start in tl.range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        expert, valid = experts_of(ids_ptr, slot, end, E)
        row = tl.gather(next_row, expert, 0) + _rank(expert, valid, E, SCAN)
        tl.store(row_of_slot_ptr + slot, tl.where(valid, row, -1), mask=slot < end)
        tl.store(slot_of_row_ptr + row, slot, mask=valid)
        next_row += tl.histogram(expert, next_row.shape[0], mask=valid)


@triton.jit
def _tabulate(
    counts,  # [BLOCK_E], rows of each expert
    starts,  # [BLOCK_E], first row of each expert
    row_starts_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    slots,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes this program's share of the tile table, and the first program ``row_starts``."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    BLOCK_E: tl.constexpr = counts.shape[0]
    expert = tl.arange(0, BLOCK_E)
    if program == 0:
        tl.store(row_starts_ptr + expert, starts, mask=expert < E)
        tl.store(row_starts_ptr + E, tl.sum(counts, axis=0))
    tiles = tl.cdiv(counts, BLOCK_M)
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    for t in tl.range(program, tl.max(tiles, axis=0), programs):
        used = t < tiles
        tl.store(tile_expert_ptr + first_tile + t, expert, mask=used)
        tl.store(tile_row_ptr + first_tile + t, starts + t * BLOCK_M, mask=used)
    active = tl.minimum(slots, E)
    end = active + (slots - active) // BLOCK_M
    for start in tl.range(tl.sum(tiles, axis=0) + program * BLOCK_E, end, programs * BLOCK_E):
        tile = start + expert
        tl.store(tile_expert_ptr + tile, -1, mask=tile < end)
        tl.store(tile_row_ptr + tile, -1, mask=tile < end)


@triton.jit(do_not_specialize=["tokens"])
def sort_kernel(
    expert_ids_ptr,  # [N]
    slot_of_row_ptr,  # [R]
    row_of_slot_ptr,  # [N]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sorts few slots in one program."""
    wait_for_previous(PDL)
    slots = tokens * K
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, slots, BLOCK_N):
        expert, valid = experts_of(expert_ids_ptr, start + tl.arange(0, BLOCK_N), slots, E)
        counts += tl.histogram(expert, BLOCK_E, mask=valid)
    starts = tl.cumsum(counts, axis=0) - counts
    _tabulate(counts, starts, row_starts_ptr, tile_expert_ptr, tile_row_ptr, slots, E, BLOCK_M)
    _place(expert_ids_ptr, slot_of_row_ptr, row_of_slot_ptr, 0, slots, starts, E, SCAN, BLOCK_N)


@triton.jit
def _share(slots, BLOCK_N: tl.constexpr):
    """Returns the slots ``first..end-1`` of this program: whole blocks, as many for each."""
    share = tl.cdiv(tl.cdiv(slots, BLOCK_N), tl.num_programs(0)) * BLOCK_N
    first = tl.program_id(0) * share
    # The sum of first and share may be beyond 32 bits.
    return first, first + tl.minimum(share, slots - first)


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(
    expert_ids_ptr,  # [N]
    counts_ptr,  # [programs, E]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts each expert's slots in this program's share."""
    wait_for_previous(PDL)
    first, end = _share(tokens * K, BLOCK_N)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(first, end, BLOCK_N):
        expert, valid = experts_of(expert_ids_ptr, start + tl.arange(0, BLOCK_N), end, E)
        counts += tl.histogram(expert, BLOCK_E, mask=valid)
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + tl.program_id(0) * E + expert, counts, mask=expert < E)


@triton.jit(do_not_specialize=["tokens"])
def place_kernel(
    expert_ids_ptr,  # [N]
    counts_ptr,  # [programs, E]
    slot_of_row_ptr,  # [R]
    row_of_slot_ptr,  # [N]
    row_starts_ptr,  # [E + 1]
    tile_expert_ptr,  # [tiles]
    tile_row_ptr,  # [tiles]
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Places this program's share of the slots, after the same experts' of earlier programs."""
    wait_for_previous(PDL)
    expert = tl.arange(0, BLOCK_E)[None, :]
    all_counts = tl.zeros((BLOCK_P, BLOCK_E), tl.int32)
    earlier_counts = tl.zeros((BLOCK_P, BLOCK_E), tl.int32)
    for start in tl.range(0, tl.num_programs(0), BLOCK_P):
        program = (start + tl.arange(0, BLOCK_P))[:, None]
        inside = (program < tl.num_programs(0)) & (expert < E)
        count = tl.load(counts_ptr + program * E + expert, mask=inside, other=0)
        all_counts += count
        earlier_counts += tl.where(program < tl.program_id(0), count, 0)
    counts = tl.sum(all_counts, axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    slots = tokens * K
    _tabulate(counts, starts, row_starts_ptr, tile_expert_ptr, tile_row_ptr, slots, E, BLOCK_M)
    first, end = _share(slots, BLOCK_N)
    next_row = starts + tl.sum(earlier_counts, axis=0)
    _place(expert_ids_ptr, slot_of_row_ptr, row_of_slot_ptr, first, end, next_row, E, SCAN, BLOCK_N)


# Up to so many experts their counts are scanned; with more, comparing slots is cheaper.
_SCANNED_EXPERTS = 32
# Slots that a program ranks at a time: by comparing each two of them in registers, or by scans, of
# which a thread does eight.
_COMPARED_SLOTS = 64
_SCANNED_SLOTS = 1024
# One program handles this many sooner than a second kernel starts (an estimate, like all here).
_ONE_PROGRAM_SLOTS = 512
# Up to four programs for each multiprocessor. Each reads the counts of all, at most 128 KiB, and
# this many in one go.
_MAX_PROGRAMS = 512
_COUNTS = 32 * 1024
_COUNTS_AT_ONCE = 4096


def index_sort_step(
    layer: Layer, architecture: Architecture, block_m: int, last_tokens: int
) -> Step:
    """Sorts the slots of up to ``last_tokens`` tokens by expert: :class:`SortedSlots`' buffers.

    A tile has ``block_m`` rows.
    """
    block_e = max(32, triton.next_power_of_2(layer.shape.experts))
    counts = (T * K, T * K, E + 1, max_tiles(block_m), max_tiles(block_m))
    outputs = tuple(
        Buffer(name, torch.int32, Expression.of(count))
        for name, count in zip(SortedSlots._fields, counts, strict=True)
    )
    one_program = last_tokens * layer.shape.top_k <= _ONE_PROGRAM_SLOTS
    scan = layer.shape.experts <= _SCANNED_EXPERTS
    block_n = _COMPARED_SLOTS
    if scan:
        block_n = _ONE_PROGRAM_SLOTS if one_program else _SCANNED_SLOTS
    launch = {
        "scan": scan,
        "block_m": block_m,
        "block_n": block_n,
        "block_e": block_e,
        "block_p": _COUNTS_AT_ONCE // block_e,
        "num_warps": 4,
    }

    def spec(function: Any, programs: IntLike, **kernel_arguments: Argument) -> KernelSpec:
        return kernel_of(function, layer, architecture, (programs,), launch, **kernel_arguments)

    if one_program:
        return Step(outputs, (spec(sort_kernel, 1),))
    counts_ptr = WorkspacePointer("slot_counts", torch.int32)
    programs = minimum(cdiv(T * K, block_n), min(_MAX_PROGRAMS, _COUNTS // block_e))
    slot_counts = Buffer("slot_counts", torch.int32, programs * E)
    kernels = (
        spec(kernel, programs, counts_ptr=counts_ptr) for kernel in (count_kernel, place_kernel)
    )
    return Step((slot_counts, *outputs), tuple(kernels))
