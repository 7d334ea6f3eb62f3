"""What the benchmark of exports exports, and by which exporters."""

from __future__ import annotations

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
    quick: bool = False  # whether a quick run has it


@dataclass(frozen=True)
class Case:
    """Exports that are compared with each other."""

    name: str
    model: str
    rows: tuple[Row, ...]

    def shrunk(self) -> Case:
        """The rows of a quick run, with few blocks."""
        quick = [row for row in self.rows if row.quick]
        rows = tuple(replace(row, blocks=max(1, row.blocks // 12)) for row in quick)
        return replace(self, rows=rows)


CASES = (
    Case(
        "example size",
        "t5",
        tuple(
            Row(
                f"L {length}, batch {batch}", batch=batch, length=length, quick=length == batch * 64
            )
            for batch in (2, 8)
            for length in (16, 128, 512, 1024)
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
        ),
    ),
    Case(
        "Llama",
        "llama",
        (
            Row("6 blocks", (OURS, DYNAMO), blocks=6, quick=True),
            Row("12 blocks", (OURS, DYNAMO), blocks=12),
            Row("24 blocks", (OURS, DYNAMO, TORCHSCRIPT, TRANSFORMERS), blocks=24, quick=True),
            Row("48 blocks", (OURS, DYNAMO), blocks=48),
        ),
    ),
    Case(
        "Mixtral",
        "mixtral",
        (Row("24 blocks", (OURS, DYNAMO, ONE_NODE, TRANSFORMERS), blocks=24, quick=True),),
    ),
    Case(
        "checkpoint",
        "qwen3",
        (Row("logits", blocks=48), Row("logits and cache", blocks=48, cache=True, quick=True)),
    ),
    Case("Swin-MoE", "swin", (Row("Swin-T", (OURS, ONE_NODE), quick=True),)),
)
