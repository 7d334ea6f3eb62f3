"""How fast is a layer with packed experts in ONNX Runtime, and how large is its file?

    python -m benchmarks.cpu.packed_experts --json result.json

``float32`` is the layer with plain weights: ``library`` by the native library's operator,
``plugin`` with the body that ships with a node, ``onnxruntime`` as ``com.microsoft::MoE``. The
others have the same weights, packed; ``int4`` as ``onnxruntime`` is ``com.microsoft::QMoE``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.onnx_files import open_session
from benchmarks.common.report import conditions, matching_cases, parser, table, write_json
from benchmarks.common.timing import Timing, time_in_turns
from benchmarks.cpu.function_bodies import LIBRARY, Case
from trt_plugin import library_path

# Threads of a session that waits would take the cores from the one that runs.
NO_SPINNING = {"session.intra_op.allow_spinning": "0"}
GROUP = 32
TARGETS: tuple[Any, ...] = ("plugin", "onnxruntime")
# Sixteen of Qwen3-30B-A3B's experts; gpt-oss-20b's with a quarter of their width and hidden width.
CASES = tuple(
    Case(f"{name}, {tokens} token{'s' * (tokens > 1)}", tokens, *sizes, gated=True)
    for name, sizes in (
        ("D 2048, H 768, 16 of 128 experts", (2048, 768, 16, 8)),
        ("D 704, H 704, 32 experts", (704, 704, 32, 4)),
    )
    for tokens in (1, 256)
)


def layers(case: Case) -> Iterator[tuple[str, Any]]:
    """Yields modules of the same weights by the names of their formats."""
    import torch
    from torch import Tensor, nn

    from custom_ops.packed_weights import ENCODINGS, WHOLE, Encoding, PackedWeight
    from dynamo_moe.packed_experts import PackedExperts
    from dynamo_moe.weights.rounding import rounded

    form: dict[str, Any] = {"activation": case.activation, "gated": case.gated}
    parameters = case.parameters()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, values in parameters.items():
                self.register_parameter(name, nn.Parameter(values))

        def forward(self, x: Tensor) -> Tensor:
            p = dict(self.named_parameters())
            router, w1, w2 = p["router_weight"], p["w1"], p["w2"]
            result: Tensor = torch.ops.moe.dropless(
                x, router, w1, None, w2, None, case.top_k, **form
            )
            return result

    class Packed(nn.Module):
        def __init__(self, weight_format: str, w1: PackedWeight, w2: PackedWeight) -> None:
            super().__init__()
            self.router_weight = nn.Parameter(parameters["router_weight"])
            self.packed_experts = PackedExperts(weight_format, w1, None, w2, None)

        def forward(self, x: Tensor) -> Tensor:
            return self.packed_experts.dropless(x, self.router_weight, top_k=case.top_k, **form)

    def packed(weight: Tensor, encoding: Encoding) -> PackedWeight:
        block = encoding.block or (1, WHOLE if encoding.name == "int8" else GROUP)
        return PackedWeight.stacked([rounded(matrix, encoding, block) for matrix in weight])

    yield "float32", Plain()
    for name, encoding in ENCODINGS.items():
        yield name, Packed(name, *(packed(parameters[w], encoding) for w in ("w1", "w2")))


def export(case: Case, folder: Path) -> dict[str, Path]:
    """Writes the files of the layer, by format and target."""
    import torch

    import dynamo_moe

    paths = {}
    for name, layer in layers(case):
        for target in TARGETS:
            if target != "plugin" and name not in ("float32", "int4", "int8"):
                continue
            paths[f"{name}, {target}"] = path = folder / f"{name}_{target}.onnx"
            dynamo_moe.export(layer.eval(), torch.zeros(2, case.width), path, target=target)
        paths[f"{name}, {LIBRARY}"] = paths[f"{name}, plugin"]
    return paths


def measure(
    case: Case, threads: int, runs: int, only: Collection[str]
) -> dict[str, tuple[Timing, int]]:
    """Times the files of one case, whose calls take turns in this process; returns bytes too."""
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((case.tokens, case.width), np.float32)}
    calls, sizes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in export(case, Path(folder)).items():
            if only and name.split(", ")[1] not in only:
                continue
            library = library_path() if name.endswith(LIBRARY) else None
            session = open_session(path, threads, NO_SPINNING, library=library)
            calls[name] = partial(session.run, None, feeds)
            sizes[name] = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    times = time_in_turns(calls, runs, lambda: None)
    return {name: (timing, sizes[name]) for name, timing in times.items()}


def main() -> None:
    """Times layers with packed experts in ONNX Runtime."""
    known = parser(__doc__, "json")
    known.add_argument("--threads", type=int, default=1, help="threads of each session")
    known.add_argument("--runs", type=int, default=20, help="timed runs of each file")
    known.add_argument("--only", nargs="*", default=(), choices=[LIBRARY, *TARGETS], help="these")
    known.add_argument("--case", default="", help="only layers whose name contains this")
    given = known.parse_args()
    results, rows = [], []
    for case in matching_cases(known, CASES, given.case):
        measured = measure(case, given.threads, given.runs, given.only)
        plain, _ = measured[f"float32, {LIBRARY}"]
        timings = {
            name: asdict(timing) | {"bytes": size} for name, (timing, size) in measured.items()
        }
        results.append(asdict(case) | {"files": timings})
        for name, (timing, size) in measured.items():
            ratio = f"{timing.best / plain.best:.2f}x"
            rows.append([case.name, name, size // 2**20, timing.median, timing.best, ratio])
    columns = ["case", "file", "MiB", "median ms", "best ms", "best, float32 of the library = 1"]
    print(table("one MoE layer", columns, rows))
    described = conditions(["onnxruntime", "onnx", "onnx-ir", "numpy"])
    write_json(given.json, described | {"threads": given.threads, "cases": results})


if __name__ == "__main__":
    main()
