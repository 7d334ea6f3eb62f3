"""Counts how many of the structures become a correct file, before and after ``convert``.

Usage: ``PYTHONPATH=tests/support python -m public_moe.counting [--convert] [--seconds 60] [NAME
...]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import dynamo_moe
from public_moe.cases import CASES
from public_moe.surroundings import Case, ClaimsCuda

RIGHT, RANDOM = "right", "random"
REFUSED, WRONG, FAILS, DIED, LATE = "not exported", "wrong", "fails at run time", "died", "late"

_SUPPORT = Path(__file__).parents[1]
_ROOT = _SUPPORT.parents[1]

# Batch, length and seed: shapes other than the example's, several draws of each.
_SIZES = [(2, 5, 0), (3, 7, 1), (1, 9, 2), (1, 1, 3), (4, 16, 4), (5, 3, 5), (8, 32, 6)]
_DYNAMIC = {"x": {0: "batch", 1: "length"}}
# Relative to the RMS of the result. Summing in another order changes it by at most 1e-5. The second
# one is for the case whose experts compute in bfloat16.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2


@dataclass(frozen=True)
class Row:
    """The result for one case.

    Attributes:
        name: Name of the case.
        status: ``right`` in ONNX Runtime at every size, ``random`` if that cannot be decided, or
            what went wrong.
        converted: Number of MoE modules that ``convert`` replaced.
        layers: Number of nodes in the file that are MoE layers.
        nodes: Number of nodes in the file.
        error: Largest error, relative to the RMS of the model's result.
        message: The error message, if any.
    """

    name: str
    status: str
    converted: int = 0
    layers: int = 0
    nodes: int = 0
    error: float = 0.0
    message: str = ""


def count_exports(
    names: Sequence[str] | None = None,
    *,
    convert: bool = False,
    seconds: float | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Measures cases, each in a separate process because runtimes may crash.

    Args:
        names: Names of the cases; None for all.
        convert: Call ``dynamo_moe.convert`` before the export.
        seconds: Time limit for one case, if it has one.
        jobs: Number of parallel processes.
    """

    def one(name: str) -> Row:
        command = [sys.executable, "-m", "public_moe.counting", "--here", name]
        command += ["--convert"] if convert else []
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": str(_SUPPORT)},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Row(name, LATE, message=f"no result in {seconds:g} s")
        if done.returncode != 0:
            return Row(name, DIED, message=f"exit status {done.returncode}: {done.stderr[-200:]}")
        return Row(**json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names or [case.name for case in CASES]))


def measure(name: str, folder: Path, *, convert: bool = False) -> Row:
    """Measures one case in this process."""
    case = next(case for case in CASES if case.name == name)
    original, model = case.build(), case.build()
    example = case.args(*_SIZES[0])
    converted = len(dynamo_moe.convert(model, example).replaced) if convert else 0
    path = folder / "model.onnx"
    try:
        report = dynamo_moe.export(model, example, path, dynamic_shapes=case.dynamic or _DYNAMIC)
    except Exception as failure:  # An exporter can raise anything.
        return Row(name, REFUSED, converted, message=_first_line(failure))
    found = {"layers": sum(report.operators.values()), "nodes": sum(report.nodes.values())}
    expected = {size: _expected(case, original, size) for size in _SIZES}
    try:
        error = max(_error(case, path, size, wanted) for size, wanted in expected.items() if wanted)
    except Exception as failure:  # ONNX Runtime has many kinds of exceptions.
        return Row(name, FAILS, converted, **found, message=_first_line(failure))
    limit = _HALF_TOLERANCE if name == "torchtitan-2026" else _TOLERANCE
    status = RANDOM if case.random else RIGHT if error <= limit else WRONG
    return Row(name, status, converted, **found, error=error)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows in Markdown, and how many have each status."""
    lines = [
        "| case | status | converted | layers | nodes | error | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.status} | {row.converted} | {row.layers} | {row.nodes} "
        f"| {row.error:.0e} | {row.message[:100].replace('|', '/')} |"
        for row in rows
    ]
    return "\n".join([*lines, "", str(dict(Counter(row.status for row in rows)))])


def _expected(
    case: Case, model: torch.nn.Module, size: tuple[int, int, int]
) -> list[Tensor] | None:
    """Returns the model's results; None if the model itself does not accept the size."""
    try:
        with torch.no_grad(), ClaimsCuda() if case.cuda_only else nullcontext():
            result = model(*case.args(*size))
    except (IndexError, RuntimeError):
        return None
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


def _error(case: Case, path: Path, size: tuple[int, int, int], expected: list[Tensor]) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    args = case.args(*size)
    feeds = {name: value.numpy() for name, value in zip(names, args, strict=True)}
    results = [torch.from_numpy(x) for x in session.run(None, feeds)]
    worst = 0.0
    for result, wanted in zip(results, expected, strict=True):
        if result.shape != wanted.shape:
            raise ValueError(f"shape {list(result.shape)} instead of {list(wanted.shape)}")
        scale = wanted.double().square().mean().sqrt().clamp_min(1e-6)
        difference = (result.double() - wanted.double()).abs().max() / scale
        worst = max(worst, float(difference.nan_to_num(float("inf"))))
    return worst


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="one case in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as folder:
            row = measure(arguments.names[0], Path(folder), convert=arguments.convert)
        sys.stdout.write("\n" + json.dumps(asdict(row)) + "\n")
        return
    rows = count_exports(
        arguments.names or None,
        convert=arguments.convert,
        seconds=arguments.seconds,
        jobs=arguments.jobs,
    )
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
