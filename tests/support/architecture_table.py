"""Updates the table in docs/reference/transformers_models.md with the last `make test-all`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "build" / "tests" / "architectures"
PAGE = ROOT / "docs" / "reference" / "transformers_models.md"
# Of the files that TensorRT for RTX gets.
TARGETS = ("plugin", "dense")
COLUMNS = (
    *("model", "class", "operator", "PyTorch", "nodes", "ONNX Runtime", "tokens"),
    *(f"`{target}`" for target in TARGETS),
)
BEGIN, END = "<!-- table: make test-all writes it -->", "<!-- end of table -->"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from moe_architectures import ARCHITECTURES
    from tensorrt_wheels import RTX

    packages = ROOT / "build" / "tensorrt" / RTX / "packages"
    found = list(distributions(name="tensorrt-rtx-cu13-bindings", path=[str(packages)]))
    if not found:
        sys.stderr.write("The table stays as it is: TensorRT for RTX cannot be had.\n")
        return
    names = sorted(ARCHITECTURES)
    rows = [read_row(name) for name in names]
    for row in rows:
        row["tokens"] = (ROWS / f"{row['model']}.tokens.json").exists()
        for target in TARGETS if row["onnxruntime"] is not None else ():
            engine = read_row(f"{row['model']}.{target}")
            row[target] = engine["outcome"]
            row["note"] = row["note"] or engine["note"]
    used = ("transformers", "torch", "onnxscript", "onnxruntime")
    versions = [f"{name} {version(name)}" for name in used]
    versions.append(f"TensorRT for RTX {found[0].version}")
    lines = [
        BEGIN,
        "",
        f"{', '.join(versions)}:",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *map(line, rows),
        "",
        *(f"- `{row['model']}`: {row['note']}." for row in rows if row["note"]),
        "",
        END,
    ]
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    PAGE.write_text(before + "\n".join(lines) + after)


def write_row(name: str, row: dict[str, Any]) -> None:
    """Writes what a test has found of an architecture."""
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{name}.json").write_text(json.dumps(row))


def read_row(name: str) -> dict[str, Any]:
    """Returns what :func:`write_row` wrote."""
    row: dict[str, Any] = json.loads((ROWS / f"{name}.json").read_text())
    return row


def line(row: dict[str, object]) -> str:
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
        "equal" if row["tokens"] else "",
        *(str(row.get(target, "")) for target in TARGETS),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
