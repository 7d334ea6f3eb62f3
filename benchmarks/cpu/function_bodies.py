"""How fast is the function body of ``DroplessMoE`` in ONNX Runtime, against its alternatives?

    python -m benchmarks.cpu.function_bodies --json result.json

``library`` is the operator of the native library, which takes the place of the node's body.
``onnxruntime`` is ``com.microsoft::MoE``. ``dense`` runs every expert on every token in two batched
products. ``body`` is what ships with a node, ``unrolled`` what does with ``body="unrolled"``.
``naive`` is the loop one writes first: over all experts, selecting with NonZero and accumulating
with ScatterND. Where there are few tokens, the two ways of ``body`` are also timed alone:
``gathered`` copies the weights that each slot needs, ``visited`` goes through the experts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.common.layers import LayerCase
from benchmarks.common.onnx_files import Array, open_session, time_runs
from benchmarks.common.report import (
    conditions,
    matching_cases,
    merged,
    parser,
    table,
    write_json,
)
from benchmarks.common.timing import Timing, fresh_processes, turns
from dynamo_moe.moe_nodes.bodies import (
    BodyConfig,
    body,
    dense_body,
    dropless,
    gathered,
    unrolled_body,
)
from dynamo_moe.moe_nodes.bodies.expert import activate
from dynamo_moe.moe_nodes.bodies.layer import Experts, function, onnxruntime_body, routed
from dynamo_moe.moe_nodes.bodies.ops import Ops
from trt_plugin.native import library_path

TURNS = 3
WARMUP = 3
# Different tokens choose different experts; one input alone would find its experts in the cache.
INPUTS = 8
FEW = 16


class Case(LayerCase):
    """A layer and a number of tokens."""

    @property
    def config(self) -> BodyConfig:
        """What the bodies compute."""
        import torch

        from custom_ops.layer_shape import LayerShape
        from custom_ops.options import ExpertOptions, RouterOptions
        from custom_ops.weight_formats import plain_format

        biases = not self.gated
        shape = LayerShape(
            experts=self.experts,
            width=self.width,
            hidden=self.hidden,
            top_k=self.top_k,
            tokens_dtype=torch.float32,
            weight_format=plain_format(torch.float32),
            options=ExpertOptions(self.activation, gated=self.gated),
            router=RouterOptions(self.top_k),
            routing_dtype=torch.float32,
            weights_dtype=torch.float32 if biases else None,
            b1=biases,
            b2=biases,
        )
        return BodyConfig(shape)


CASES = (
    Case("Swin stage 1", 3136, 96, 384, 8, 2),
    Case("Swin stage 1, 64 experts", 3136, 96, 384, 64, 2),
    Case("one token", 1, 512, 1024, 64, 2),
    Case("fine-grained", 256, 512, 256, 128, 8, gated=True),
    Case("fine-grained, one token", 1, 512, 256, 128, 8, gated=True),
    Case("fine-grained, two tokens", 2, 512, 256, 128, 8, gated=True),
    Case("narrow experts", 16, 256, 128, 256, 8, gated=True),
    Case("wide experts, one token", 1, 1024, 2048, 8, 2, gated=True),
    Case("wide experts", 16, 1024, 2048, 8, 2, gated=True),
    Case("wide experts, many tokens", 1024, 1024, 2048, 8, 2, gated=True),
    Case("fine-grained, few tokens", 32, 512, 256, 128, 8, gated=True),
    Case("fine-grained, many tokens", 4096, 512, 256, 128, 8, gated=True),
    Case("narrow experts, one token", 1, 256, 128, 256, 8, gated=True),
    Case("narrow experts, many tokens", 2048, 256, 128, 256, 8, gated=True),
)
LIBRARY = "library"


def torch_layer(case: Case) -> Any:
    """Returns a module with random parameters.

    PyTorch is imported here: the processes that time sessions start faster without it.
    """
    from torch import Tensor, nn

    from custom_ops import dropless

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, values in case.parameters().items():
                self.register_parameter(name, nn.Parameter(values))

        def forward(self, x: Tensor) -> Tensor:
            p = dict(self.named_parameters())
            parameters = p["router_weight"], p["w1"], p.get("b1"), p["w2"], p.get("b2")
            form: dict[str, Any] = {"activation": case.activation, "gated": case.gated}
            return dropless(x, *parameters, case.top_k, p.get("router_bias"), **form)

    return Layer()


def naive_experts(
    outer: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
    """A loop over all experts that accumulates into a loop-carried result."""
    op = outer.inner()
    i = op.value("i", ir.TensorType(ir.DataType.INT64), shape=[])
    condition = op.value("condition", ir.TensorType(ir.DataType.BOOL), shape=[])
    y_TD = op.value("y_TD", ir.TensorType(ir.DataType.FLOAT))

    def linear(rows: ir.Value, weight: str, bias: str) -> ir.Value:
        w_IO = op.Transpose(op.Gather(parameters[weight], i, out=weight), perm=[1, 0], out="t")
        product = op.MatMul(rows, w_IO, out="product")
        if bias not in parameters:
            return product
        return op.Add(product, op.Gather(parameters[bias], i, out=bias), out="biased")

    slots_2R = op.NonZero(op.Equal(ids_TK, i, out="chosen_TK"), out="slots_2R")
    slots_R2 = op.Transpose(slots_2R, perm=[1, 0], out="slots_R2")
    tokens_R1 = op.Slice(slots_R2, [0], [1], [1], out="tokens_R1")
    weights_R1 = op.Unsqueeze(op.GatherND(weights_TK, slots_R2, out="w_R"), [1], out="w_R1")
    h_RH = activate(op, config, linear(op.GatherND(x_TD, tokens_R1, out="x_RD"), "w1", "b1"))
    y_RD = op.Mul(linear(h_RH, "w2", "b2"), weights_R1, out="y_RD")
    next_TD = op.ScatterND(y_TD, tokens_R1, y_RD, reduction="add", out="next_TD")
    go_on = op.Identity(condition, out="go_on")
    graph = ir.Graph([i, condition, y_TD], [go_on, next_TD], nodes=op.nodes, name="expert")
    experts = outer.Squeeze(outer.size("num_experts"), [0], out="E")
    zeros_TD = outer.zeros(outer.Shape(x_TD, out="TD"), ir.DataType.FLOAT, out="zeros_TD")
    true = outer.constant("true", True, ir.DataType.BOOL)
    return outer.Loop(experts, true, zeros_TD, body=graph, out="y_TD")


def branch(experts: Experts) -> Experts:
    """One of the branches of ``body``, for every number of slots."""

    def alone(op: Ops, config: BodyConfig, *values: Any) -> ir.Value:
        return op.Squeeze(experts(op, config, *values), [1], out="y_TD")

    return alone


def bodies(case: Case, opset: int) -> dict[str, ir.Function]:
    """Returns what is timed."""
    config = case.config
    found = {
        "dense": dense_body(config, opset),
        "body": body(config, opset),
        "unrolled": unrolled_body(config, opset, num_experts=case.experts),
        "onnxruntime": onnxruntime_body(config, opset),
    }
    experts: dict[str, Experts] = {"naive": naive_experts}
    if case.tokens <= FEW:
        experts["gathered"] = branch(gathered.experts)
        experts["visited"] = branch(dropless.one_by_one)
    written = {name: function(config, opset, "moe", routed(way)) for name, way in experts.items()}
    return found | written


def export(case: Case, folder: Path, only: Collection[str]) -> dict[str, Path]:
    """Writes a file of the layer with each body, or (some in ``only``) with these."""
    import torch

    import dynamo_moe

    example = torch.zeros(2, case.width)
    dynamo_moe.export(torch_layer(case), example, folder / "exported.onnx")
    model = ir.load(folder / "exported.onnx")
    (exported,) = model.functions
    paths = {LIBRARY: folder / "exported.onnx"}
    for name, replaced in bodies(case, model.opset_imports[""]).items():
        if only and name not in only:
            continue
        if replaced.identifier() != exported:
            raise ValueError(f"{name} is {replaced.identifier()}, the file's body {exported}")
        model.functions[exported] = replaced
        paths[name] = folder / f"{name}.onnx"
        ir.save(model, paths[name])
    return paths


def turn(
    case: Case, path: Path, threads: int, runs: int, library: Path | None = None
) -> tuple[list[float], Array]:
    """Returns milliseconds of the runs of one file in this process, and its first result."""
    session = open_session(path, threads, library=library)
    rng = np.random.default_rng(1)
    size = case.tokens, case.width
    feeds = [{"x": rng.standard_normal(size, np.float32)} for _ in range(INPUTS)]
    (result,) = session.run(None, feeds[0])
    time_runs(session, None, feeds, WARMUP)
    return time_runs(session, None, feeds, runs), result


def measure(case: Case, threads: int, runs: int, only: Collection[str]) -> dict[str, Timing]:
    """Times the bodies of one case in turns and compares their results.

    Each turn is a process of its own, as each session is for a user: the waiting threads of other
    sessions in the process take the cores (Swin stage 1 then took 7 or 12 ms by chance).
    """
    results: dict[str, Array] = {}
    with tempfile.TemporaryDirectory() as folder, fresh_processes() as processes:
        paths = export(case, Path(folder), only)
        times: dict[str, list[float]] = {name: [] for name in paths}
        for number, name in turns(paths, TURNS):
            print(f"{case.name}: turn {number + 1} of {TURNS}, {name}", flush=True)
            library = library_path() if name == LIBRARY else None
            job = processes.submit(turn, case, paths[name], threads, runs, library)
            new, results[name] = job.result()
            times[name] += new
    for name, result in results.items():
        # com.microsoft::MoE has GELU in its tanh form.
        atol = 2e-3 if name == "onnxruntime" else 1e-4
        np.testing.assert_allclose(result, results[LIBRARY], atol=atol)
    return {name: Timing.of(samples) for name, samples in times.items()}


def main() -> None:
    """Times the bodies in ONNX Runtime."""
    known = parser(__doc__, "json")
    known.add_argument("--threads", type=int, default=2, help="threads of each session")
    known.add_argument("--runs", type=int, default=15, help="timed runs of each body in each turn")
    known.add_argument("--only", nargs="*", default=(), help="these bodies, beside the library's")
    known.add_argument("--case", default="", help="only layers whose name contains this")
    given = known.parse_args()
    described = conditions(["onnxruntime", "onnx", "onnx-ir", "numpy"])
    results, rows = [], []
    for case in matching_cases(known, CASES, given.case):
        timings = measure(case, given.threads, given.runs, given.only)
        results.append(asdict(case) | {name: asdict(t) for name, t in timings.items()})
        cases = merged(results, CASES, given)
        write_json(given.json, described | {"threads": given.threads, "cases": cases})
        for name, timing in timings.items():
            ratio = f"{timing.median / timings[LIBRARY].median:.2f}x"
            rows.append([case.name, name, timing.median, timing.best, ratio])
    columns = ["case", "body", "median ms", "best ms", "this / library"]
    print(table("one MoE layer", columns, rows))


if __name__ == "__main__":
    main()
