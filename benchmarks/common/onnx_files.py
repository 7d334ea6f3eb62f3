"""ONNX files: what is in them, and how long they run in ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.timing import milliseconds

PACKAGES = ("torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript")
Array = np.ndarray[Any, np.dtype[Any]]


def open_session(
    path: Path,
    threads: int | None = None,
    entries: Mapping[str, str] | None = None,
    *,
    library: Path | None = None,
) -> Any:
    """Loads a file, with default options but for threads, session entries, custom operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    if threads is not None:
        options.intra_op_num_threads = threads
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(path, options)


def time_runs(
    session: Any,
    outputs: Sequence[str] | None,
    feeds: Sequence[Mapping[str, Array]],
    runs: int,
    limit: float = math.inf,
) -> list[float]:
    """Returns milliseconds of runs whose inputs take turns; none begins after ``limit`` of them."""
    times: list[float] = []
    for feed in islice(cycle(feeds), runs):
        if sum(times) > limit:
            break
        times.append(milliseconds(partial(session.run, outputs, feed)))
    return times


def count_nodes(path: Path) -> dict[str, int]:
    """Returns the nodes of a file's main graph, and of all graphs once functions are inlined."""
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    model = ir.load(path)
    main_graph = sum(1 for _ in model.graph.all_nodes())
    InlinePass()(model)
    inlined = sum(1 for _ in model.graph.all_nodes())
    return {"nodes": main_graph, "nodes, functions inlined": inlined}


def file_bytes(path: Path) -> int:
    """Returns the bytes of a file and of those beside it that hold its weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def relative_error(found: Array, wanted: Array) -> float:
    """Returns the largest difference, over the largest value.

    Raises:
        ValueError: If the shapes differ.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"the result is {found.shape}, not {wanted.shape}")
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
