"""The model of costs of experts over ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.layers import SHAPES
from benchmarks.parallel.exchange import (
    Link,
    all_reduce_seconds,
    all_to_all_seconds,
    busiest_pair,
    draw,
    homes,
    imbalance,
    moved_tokens,
    moves,
)

LINK = Link("slow", bandwidth=1e6, latency=1e-3)
SHAPE = SHAPES["mixtral"]  # 8 experts, 2 to a token, 4096 wide


def test_a_sum_takes_the_better_of_two_ways() -> None:
    part = SHAPE.width * 2 / 1e6
    assert all_reduce_seconds(SHAPE, 1, 2, LINK) == pytest.approx(1e-3 + part)
    assert all_reduce_seconds(SHAPE, 1, 8, LINK) == pytest.approx(2e-3 + 2 * 7 / 8 * part)


def test_tokens_move_once_to_each_other_rank() -> None:
    home_E = homes(SHAPE, 4)
    assert home_E.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # Token 0 lies on rank 0, token 1 on rank 1, and so on.
    ids_TK = np.array([[0, 1], [2, 3], [0, 1], [0, 4]])
    # Rank 0 receives two, rank 3 sends two.
    assert moved_tokens(moves(ids_TK, home_E, 4)) == 2
    assert moved_tokens(moves(ids_TK[:2], home_E, 4)) == 0
    assert moved_tokens(moves(np.array([[2, 3]]), home_E, 4)) == 1  # Once for both.
    assert all_to_all_seconds(SHAPE, 0, LINK) == pytest.approx(2e-3)


def test_a_buffer_for_each_pair_of_ranks_holds_the_busiest() -> None:
    home_E = homes(SHAPE, 2)
    # Tokens 0 and 2 lie on rank 0, of which one goes to rank 1; token 1 stays there.
    ids_TK = np.array([[0, 4], [5, 6], [0, 1]])
    assert busiest_pair(moves(ids_TK, home_E, 2), 3) == 0.5
    assert busiest_pair(moves(ids_TK[:1], home_E, 2), 1) == 1


def test_copies_of_busy_experts_even_the_load() -> None:
    home_E = homes(SHAPE, 4)
    ids_TK = np.array([[0, 1]] * 6 + [[2, 4], [6, 7]])
    assert imbalance(ids_TK, home_E, 4, 0) == pytest.approx(12 / 4)
    assert imbalance(ids_TK, home_E, 4, 1) == pytest.approx(6 / 4)
    assert imbalance(np.array([[0, 2], [4, 6]]), home_E, 4, 1) == 1


def test_the_picture(tmp_path: Path) -> None:
    from benchmarks.parallel import exchange

    rows = exchange.rows_of(exchange.MODELS[1], "recorded")
    links = [vars(link) for link in exchange.LINKS]
    draw({"links": links, "rows": rows}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
