"""What the benchmark of exports exports, and by which exporters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

OURS = "ours"
DYNAMO = "dynamo"
ONE_NODE = "dynamo, one node a layer"
TORCHSCRIPT = "TorchScript"
TRANSFORMERS = "transformers"
COLORS = {
    OURS: "#0b6e4f",
    DYNAMO: "#c2570c",
    ONE_NODE: "#f2a65a",
    TORCHSCRIPT: "#3b5bdb",
    TRANSFORMERS: "#9c36b5",
}


@dataclass(frozen=True)
class Row:
    """A model and its example, exported by each of ``exporters``."""

    label: str
    exporters: tuple[str, ...] = (OURS,)
    blocks: int = 6
    batch: int = 2
    length: int = 16
    dynamic: bool = True  # whether batch and length are symbolic
    cache: bool = False  # whether the keys and values of earlier tokens are inputs and outputs
    stage: int | None = None  # which of Swin's has that many blocks, from 0; None: it is Swin-T
    linked: bool = False  # whether its weights stay in a checkpoint's file
    first: bool = False  # whether it is the first export of its process
    quick: bool = False  # whether a quick run has it


@dataclass(frozen=True)
class Case:
    """Exports that are compared with each other."""

    name: str
    model: str
    rows: tuple[Row, ...]
    is_checkpoint: bool = False  # whether the model can be opened without its weights

    def shrunk(self) -> Case:
        """The rows of a quick run, with few blocks."""
        quick = [row for row in self.rows if row.quick]
        rows = tuple(replace(row, blocks=max(1, row.blocks // 12)) for row in quick)
        return replace(self, rows=rows)

    def alone(self) -> Case:
        """The rows by our export alone; those of a checkpoint's weights linked as well."""
        rows = tuple(replace(row, exporters=(OURS,)) for row in self.rows)
        linked = [replace(row, label=f"linked, {row.label}", linked=True) for row in rows]
        return replace(self, rows=(*rows, *(linked if self.is_checkpoint else ())))


DEPTHS = (6, 12, 24, 48, 96)


def _by_depth(
    peers: Mapping[int, tuple[str, ...]], *, stage: int | None = None, label: str = "{} blocks"
) -> tuple[Row, ...]:
    """Returns a row of each depth, with the peers of some."""
    return tuple(
        Row(
            label.format(blocks),
            (OURS, *peers.get(blocks, ())),
            blocks=blocks,
            stage=stage,
            quick=blocks == 24,
        )
        for blocks in DEPTHS
    )


CASES = (
    Case(
        "linear layer",
        "linear",
        (
            Row("first of the process", (OURS, DYNAMO, TORCHSCRIPT), first=True, quick=True),
            Row("later", (OURS, DYNAMO, TORCHSCRIPT)),
        ),
    ),
    Case(
        "example size",
        "t5",
        tuple(
            Row(f"L {length}, batch {batch}", batch=batch, length=length, quick=length == 128)
            for batch in (2, 8)
            for length in (16, 128, 1024)
        ),
    ),
    Case(
        "T5-small",
        "t5",
        (
            Row("L 16", (OURS, DYNAMO, TORCHSCRIPT, TRANSFORMERS), quick=True),
            Row("L 512", (OURS, DYNAMO, TORCHSCRIPT), length=512),
            Row("L 1024, batch 8", (OURS, DYNAMO, TORCHSCRIPT), length=1024, batch=8),
            Row("L 16, static", (OURS, DYNAMO, TORCHSCRIPT), dynamic=False, quick=True),
            Row("L 16, first of the process", (OURS, DYNAMO, TORCHSCRIPT), first=True),
            Row("L 512, first of the process", (OURS, TORCHSCRIPT), length=512, first=True),
        ),
    ),
    Case(
        "Llama",
        "llama",
        _by_depth(
            {
                **dict.fromkeys(DEPTHS, (DYNAMO, TORCHSCRIPT)),
                24: (DYNAMO, TORCHSCRIPT, TRANSFORMERS),
            }
        ),
        is_checkpoint=True,
    ),
    Case(
        "Mixtral",
        "mixtral",
        _by_depth(
            {
                6: (DYNAMO, TORCHSCRIPT),
                24: (DYNAMO, ONE_NODE, TORCHSCRIPT, TRANSFORMERS),
                96: (DYNAMO, TORCHSCRIPT),
            }
        ),
        is_checkpoint=True,
    ),
    Case(
        "Qwen3-MoE",
        "qwen3-moe",
        _by_depth(dict.fromkeys((6, 24, 96), (DYNAMO, TORCHSCRIPT))),
        is_checkpoint=True,
    ),
    Case(
        "checkpoint",
        "qwen3",
        (Row("logits", blocks=48), Row("logits and cache", blocks=48, cache=True, quick=True)),
    ),
    Case("Qwen3-235B-A22B", "qwen3-235b", (Row("logits", blocks=94, quick=True),)),
    Case(
        "Swin-MoE",
        "swin",
        (
            Row("Swin-T", (OURS, ONE_NODE), quick=True),
            *_by_depth({6: (ONE_NODE,), 24: (ONE_NODE,)}, stage=2, label="stage 3, {} blocks"),
            *(
                Row(f"stage {stage + 1}, {blocks} blocks", blocks=blocks, stage=stage)
                for stage in (0, 1, 3)
                for blocks in (6, 48, 96)
            ),
        ),
    ),
)
