"""Updates the table in docs/reference/transformers_models.md with the last `make test-all`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "build" / "tests" / "architectures"
PAGE = ROOT / "docs" / "reference" / "transformers_models.md"
BEGIN, END = "<!-- table: make test-all writes it -->", "<!-- end of table -->"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from moe_architectures import ARCHITECTURES
    from tensorrt_wheels import RTX, install

    names = sorted(ARCHITECTURES)
    rows = [json.loads((ROWS / f"{name}.json").read_text()) for name in names]
    # There are none where TensorRT for RTX cannot be had, and the table stays as it is.
    engines = {
        name: json.loads((ROWS / f"{name}.engines.json").read_text())
        for name, row in zip(names, rows, strict=True)
        if row["onnxruntime"] is not None
    }
    (rtx,) = distributions(name="tensorrt-rtx-cu13-bindings", path=[str(install(RTX))])
    packages = ("transformers", "torch", "onnxscript", "onnxruntime")
    versions = [
        *(f"{name} {version(name)}" for name in packages),
        f"TensorRT for RTX {rtx.version}",
    ]
    notes = {
        name: " ".join(filter(None, (row["note"], engines.get(name, {}).get("note"))))
        for name, row in zip(names, rows, strict=True)
    }
    lines = [
        BEGIN,
        "",
        f"{', '.join(versions)}:",
        "",
        "| model | class | operator | PyTorch | nodes | ONNX Runtime | `plugin` | `dense` |",
        "|---|---|---|---|---|---|---|---|",
        *(line(row, engines.get(row["model"], {})) for row in rows),
        "",
        *(f"- `{name}`: {note}." for name, note in notes.items() if note),
        "",
        END,
    ]
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    PAGE.write_text(before + "\n".join(lines) + after)


def line(row: dict[str, object], engine: dict[str, str]) -> str:
    ours = row["operator"] in ("dropless", "experts")
    operator = f"`moe.{row['operator']}`" if ours else f"fallback `{row['operator']}`"
    exported = row["onnxruntime"]
    result = "not exported" if exported is None else f"{exported:.1e}"
    cells = (
        f"`{row['model']}`",
        f"`{row['class']}`",
        operator,
        f"{row['pytorch']:.1e}",
        "" if row["nodes"] is None else str(row["nodes"]),
        result,
        engine.get("plugin", ""),
        engine.get("dense", ""),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
