"""What do ranks exchange for a layer, if parts are summed, or if tokens move?

    python -m benchmarks.parallel.exchange --json result.json --plot result.png

A model of costs; nothing is measured. Compared are two ways for T tokens and N ranks, each with a
share of the experts, in bfloat16:

- *all-reduce*: all ranks have all tokens, and the parts of all are summed (what ``shard`` does). A
  rank sends its part to each other one in one step, or in two steps as a reduce-scatter and an
  all-gather, whichever takes less. These two with tokens that lie on one rank each take the same.
- *all-to-all*: a token lies on one rank, and goes once to each other rank that has experts of its,
  and its result comes back. The rank that sends or receives the most decides. The exchange of sizes
  ahead of it, for which the host waits, is free here.

A step takes the link's latency and its bytes divided by the bandwidth. Routing is recorded from
small trained models (`benchmarks.residency.record`), or drawn by Zipf's law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.plots import SMALL, panels
from benchmarks.common.report import conditions, parse, parser, table, write_json
from benchmarks.gpu.layers import SHAPES, Shape
from benchmarks.residency import traces
from dynamo_moe.sharding import share_of

RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = (1, 16, 256, 4096, 16384)
KINDS = (traces.RECORDED, "zipf")
#: Experts that each rank has a second time, the busiest of all.
REPLICAS = (0, 1, 2)
_BYTES = 2  # of a number


@dataclass(frozen=True)
class Link:
    """How ranks are connected.

    Attributes:
        name: As its maker calls it.
        bandwidth: Bytes that a rank sends in a second, by the maker; it receives as many.
        latency: Seconds that a step takes without bytes. An assumption.
    """

    name: str
    bandwidth: float
    latency: float


LINKS = (
    Link("NVLink 5", 900e9, 4e-6),
    Link("NVLink 4", 450e9, 4e-6),
    Link("PCIe 5 x16", 63e9, 8e-6),
    Link("400 Gb/s", 50e9, 12e-6),
)
#: Experts and choices are those of the recorded models.
MODELS = (
    replace(SHAPES["qwen3"], title="Qwen3-235B-A22B", width=4096, hidden=1536),
    SHAPES["deepseek"],
)


def all_reduce_seconds(shape: Shape, tokens: int, ranks: int, link: Link) -> float:
    """Returns the time of a sum of ``[tokens, D]`` over the ranks."""
    part = tokens * shape.width * _BYTES / link.bandwidth
    at_once = link.latency + (ranks - 1) * part
    in_two = 2 * link.latency + 2 * (ranks - 1) / ranks * part
    return min(at_once, in_two)


def homes(shape: Shape, ranks: int) -> np.ndarray:
    """Returns the rank of each expert ``[E]``."""
    shares = [share_of(shape.experts, rank, ranks) for rank in range(ranks)]
    return np.concatenate([np.full(len(share), rank) for rank, share in enumerate(shares)])


def moves(ids_TK: np.ndarray, home_E: np.ndarray, ranks: int) -> np.ndarray:
    """Returns how many tokens go from a rank to another ``[N, N]``, if token t lies on t mod N."""
    goes_TN = np.zeros((len(ids_TK), ranks), int)
    np.put_along_axis(goes_TN, home_E[ids_TK], 1, axis=1)
    counts_NN = np.zeros((ranks, ranks), int)
    np.add.at(counts_NN, np.arange(len(ids_TK)) % ranks, goes_TN)
    np.fill_diagonal(counts_NN, 0)
    return counts_NN


def moved_tokens(moves_NN: np.ndarray) -> int:
    """Returns how many tokens the busiest rank sends, or receives."""
    return int(max(moves_NN.sum(0).max(), moves_NN.sum(1).max()))


def busiest_pair(moves_NN: np.ndarray, tokens: int) -> float:
    """Returns the share of a rank's tokens that go to the rank to which most of them go.

    A buffer of one size for each pair of ranks holds as many.
    """
    ranks = len(moves_NN)
    on_N = np.bincount(np.arange(tokens) % ranks, minlength=ranks)
    return float((moves_NN.max(1) / np.maximum(on_N, 1)).max())


def all_to_all_seconds(shape: Shape, moved: int, link: Link) -> float:
    """Returns the time in which tokens go to their experts' ranks, and their results come back."""
    return 2 * (link.latency + moved * shape.width * _BYTES / link.bandwidth)


def imbalance(ids_TK: np.ndarray, home_E: np.ndarray, ranks: int, replicas: int) -> float:
    """Returns the busiest rank's share of the choices, over the mean.

    Args:
        ids_TK: The choices.
        home_E: The rank of each expert.
        ranks: N.
        replicas: How many experts each rank has in addition: the busiest ones of all, each on the
            least busy rank, which takes half of its choices.
    """
    counts = np.bincount(ids_TK.ravel(), minlength=len(home_E)).astype(float)
    load = np.bincount(home_E, counts, ranks)
    room = np.full(ranks, replicas)
    busiest = np.argsort(-counts)[: replicas * ranks]
    for expert in busiest:
        home = home_E[expert]
        open_ranks = [rank for rank in range(ranks) if room[rank] and rank != home]
        if not open_ranks:
            break
        other = min(open_ranks, key=lambda rank: load[rank])
        half = counts[expert] / 2
        if load[other] + half < load[home]:
            load[other] += half
            load[home] -= half
            room[other] -= 1
    return float(load.max() / load.mean())


def rows_of(shape: Shape, kind: str) -> list[dict[str, Any]]:
    """Returns the figures of a model, for each number of ranks and tokens."""
    ids_TK = traces.trace(kind, shape, max(TOKENS))[0]
    found = []
    for ranks in RANKS:
        home_E = homes(shape, ranks)
        for tokens in TOKENS:
            chosen = np.resize(ids_TK, (tokens, ids_TK.shape[1]))
            moves_NN = moves(chosen, home_E, ranks)
            moved = moved_tokens(moves_NN)
            times = {
                link.name: {
                    "all-reduce": all_reduce_seconds(shape, tokens, ranks, link),
                    "all-to-all": all_to_all_seconds(shape, moved, link),
                }
                for link in LINKS
            }
            found.append(
                {
                    "model": shape.title,
                    "routing": kind,
                    "ranks": ranks,
                    "tokens": tokens,
                    "bytes of a token": {
                        "all-reduce": 2 * (ranks - 1) / ranks * shape.width * _BYTES,
                        "all-to-all": 2 * moved * shape.width * _BYTES / tokens,
                    },
                    "busiest pair": busiest_pair(moves_NN, tokens),
                    "imbalance": [imbalance(chosen, home_E, ranks, more) for more in REPLICAS],
                    "seconds": times,
                }
            )
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws how many times as long the sum takes as moving tokens, by tokens, ranks and link."""
    title = "Time of all-reduce, divided by that of all-to-all (recorded routing; a model of costs)"
    names = [link["name"] for link in result["links"]]
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    colors = ("#9ecae1", "#6baed6", "#3b5bdb", "#0b6e4f", "#c2570c", "#111111")
    with panels(path, len(models) * len(names), len(names), (3.1, 2.6), title) as axes:
        places = [(model, name) for model in models for name in names]
        for panel, (model, name) in zip(axes, places, strict=True):
            for ranks, color in zip(RANKS, colors, strict=True):
                rows = [
                    row
                    for row in result["rows"]
                    if (row["model"], row["ranks"]) == (model, ranks)
                    and row["routing"] == traces.RECORDED
                ]
                ratios = [
                    row["seconds"][name]["all-reduce"] / row["seconds"][name]["all-to-all"]
                    for row in rows
                ]
                panel.plot([row["tokens"] for row in rows], ratios, color=color, label=str(ranks))
            panel.axhline(1, color="#888888", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.tick_params(labelsize=SMALL)
            panel.set_title(f"{model}, {name}", fontsize=SMALL + 1)
            panel.set_xlabel("tokens", fontsize=SMALL)
        axes[0].legend(title="ranks", fontsize=SMALL - 1, title_fontsize=SMALL - 1)


def report(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Returns a table of a kind of routing: bytes, times and imbalance, by model, ranks, tokens."""
    shown = [row for row in rows if row["routing"] == kind and row["tokens"] in (16, 4096)]
    columns = ["model", "ranks", "tokens", "all-reduce, KB a token", "all-to-all, KB a token"]
    columns += [f"{link.name}, us" for link in LINKS]
    columns += ["busiest pair", *(f"imbalance, {more} replicas" for more in REPLICAS)]
    cells = []
    for row in shown:
        bytes_of = row["bytes of a token"]
        times = [
            " / ".join(f"{1e6 * seconds:.0f}" for seconds in row["seconds"][link.name].values())
            for link in LINKS
        ]
        sizes = [bytes_of["all-reduce"] / 1e3, bytes_of["all-to-all"] / 1e3]
        cells.append([row["model"], row["ranks"], row["tokens"], *sizes, *times])
        cells[-1] += [row["busiest pair"], *row["imbalance"]]
    return table(f"{kind} routing; times of all-reduce / all-to-all", columns, cells)


def main() -> None:
    """Prints tables, and writes the figures and the picture."""
    given = parse(parser(__doc__, "json", "plot"), draw)
    rows = [row for shape in MODELS for kind in KINDS for row in rows_of(shape, kind)]
    for kind in KINDS:
        print(report(rows, kind))
    result = {**conditions(("numpy",)), "links": [asdict(link) for link in LINKS], "rows": rows}
    write_json(given.json, result)
    if given.plot is not None:
        draw(result, given.plot)


if __name__ == "__main__":
    main()
