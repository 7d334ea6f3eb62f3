"""The function body of ``DroplessMoE`` in ONNX Runtime on the CPU, against its alternatives.

    python -m benchmarks.onnx_body --json result.json

``dense`` runs every expert on every token in two batched products. ``body`` is what ships with a
node, ``unrolled`` what does with ``body="unrolled"``. ``naive`` (``--naive``) is the loop one
writes first: over all experts, selecting with NonZero and accumulating with ScatterND.
``--branches`` times the two ways of ``body`` alone, where there are few tokens: ``gathered`` copies
the weights that each slot needs, ``visited`` goes through the experts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import typer
from rich.console import Console
from rich.table import Table

from benchmarks._timing import Timing, record
from dynamo_moe._bodies import (
    BodyConfig,
    _dropless,
    _gathered,
    body,
    dense_body,
    unrolled_body,
)
from dynamo_moe._bodies._expert import activate
from dynamo_moe._bodies._layer import Experts, function, routed
from dynamo_moe._bodies._ops import Ops

OPSET = 20
TURNS = 3
WARMUP = 3
# Different tokens choose different experts; the times of one alone would be those of a warm cache.
INPUTS = 8
FEW = 16


@dataclass(frozen=True)
class Case:
    """A layer and a number of tokens."""

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    gated: bool = False

    @property
    def config(self) -> BodyConfig:
        """Biases and exact GELU as in Swin, or gated SiLU without biases as in Qwen."""
        if self.gated:
            return BodyConfig(activation="silu", gated=True)
        return BodyConfig(has_router_bias=True, has_b1=True, has_b2=True)


CASES = (
    Case("Swin stage 1", 3136, 96, 384, 8, 2),
    Case("Swin stage 1, 64 experts", 3136, 96, 384, 64, 2),
    Case("one token", 1, 512, 1024, 64, 2),
    Case("fine-grained", 256, 512, 256, 128, 8, gated=True),
    Case("fine-grained, one token", 1, 512, 256, 128, 8, gated=True),
    Case("fine-grained, two tokens", 2, 512, 256, 128, 8, gated=True),
    Case("narrow experts", 16, 256, 128, 256, 8, gated=True),
)


def naive_body(config: BodyConfig, opset: int) -> ir.Function:
    """A loop over all experts that accumulates into a loop-carried result."""
    return function(config, opset, "moe", routed(_naive_experts))


def _naive_experts(
    outer: Ops,
    config: BodyConfig,
    parameters: Mapping[str, ir.Value],
    x_TD: ir.Value,
    ids_TK: ir.Value,
    weights_TK: ir.Value,
) -> ir.Value:
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


def branch(experts: Experts, config: BodyConfig, opset: int) -> ir.Function:
    """``body`` with one of its branches for every number of slots."""

    def alone(op: Ops, config: BodyConfig, *values: Any) -> ir.Value:
        return op.Squeeze(experts(op, config, *values), [1], out="y_TD")

    return function(config, opset, "moe", routed(alone))


BODIES: Mapping[str, Callable[[BodyConfig, int], ir.Function]] = {
    "dense": dense_body,
    "body": body,
    "gathered": partial(branch, _gathered.experts),
    "visited": partial(branch, _dropless.one_by_one),
    "naive": naive_body,
}


def build(name: str, case: Case) -> ir.Function:
    """A body by its name."""
    if name == "unrolled":
        return unrolled_body(case.config, OPSET, num_experts=case.experts)
    return BODIES[name](case.config, OPSET)


def parameters(case: Case) -> dict[str, np.ndarray]:
    """Random parameters, scaled so that activations stay near 1."""
    rng = np.random.default_rng(0)
    E, D, H = case.experts, case.width, case.hidden
    F = 2 * H if case.gated else H
    shapes = {
        "router_weight": (E, D),
        "w1": (E, F, D),
        "w2": (E, D, H),
        "router_bias": (E,),
        "b1": (E, F),
        "b2": (E, D),
    }
    return {
        name: rng.standard_normal(shapes[name], np.float32) / np.float32(shapes[name][-1] ** 0.5)
        for name in case.config.inputs
        if name != "x"
    }


def session(case: Case, body: ir.Function, threads: int) -> ort.InferenceSession:
    """One layer in ONNX Runtime."""
    x = ir.val("x", ir.DataType.FLOAT, ["T", case.width])
    y = ir.val("y", ir.DataType.FLOAT, ["T", case.width])
    weights = {
        name: ir.val(name, const_value=ir.tensor(array, name=name))
        for name, array in parameters(case).items()
    }
    config = case.config
    attributes: dict[str, int | float | str] = {
        "top_k": case.top_k,
        "num_experts": case.experts,
        "in_features": case.width,
        "hidden_features": case.hidden,
        "activation": config.activation,
        "gated": int(case.gated),
        "interleaved": 0,
        "weight_on_input": 0,
        "activation_alpha": 1.702,
        "activation_limit": 7.0,
        "pre_norm": "none",
        "norm_eps": 1e-6,
        "residual": 0,
        "scoring": config.scoring,
        "renormalize": int(config.renormalize),
        "routed_scaling": 1.0,
        "plugin_version": "1",
        "plugin_namespace": "",
    }
    node = ir.node(
        body.name, [x, *weights.values()], attributes, domain=body.domain, outputs=[y], name="moe"
    )
    graph = ir.Graph(
        [x],
        [y],
        nodes=[node],
        initializers=list(weights.values()),
        opset_imports={"": OPSET, body.domain: 1},
        name="layer",
    )
    model = ir.Model(graph, ir_version=10, functions=[body])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def turn(case: Case, name: str, threads: int, runs: int) -> tuple[list[float], np.ndarray]:
    """Milliseconds of the runs of one body in this process, and its result."""
    s = session(case, build(name, case), threads)
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((case.tokens, case.width), np.float32) for _ in range(INPUTS)]
    (result,) = s.run(None, {"x": xs[0]})
    for x in xs[:WARMUP]:
        s.run(None, {"x": x})
    times = []
    for x in islice(cycle(xs), runs):
        start = time.perf_counter()
        s.run(None, {"x": x})
        times.append((time.perf_counter() - start) * 1e3)
    return times, result


def measure(case: Case, names: Sequence[str], threads: int, runs: int) -> dict[str, Timing]:
    """Times the bodies of one case in turns and compares their results.

    Each turn is a process of its own, as each session is for a user: the waiting threads of other
    sessions in the process take the cores (Swin stage 1 then took 7 or 12 ms by chance).
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    results = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for _ in range(TURNS):
            for name in names:
                new, results[name] = processes.submit(turn, case, name, threads, runs).result()
                times[name] += new
    for result in results.values():
        np.testing.assert_allclose(result, results["dense"], atol=1e-4)
    return {name: Timing(statistics.median(ms), min(ms)) for name, ms in times.items()}


def main(
    threads: Annotated[int, typer.Option(help="Threads of each session.")] = 2,
    runs: Annotated[int, typer.Option(help="Timed runs of each body in each turn.")] = 15,
    naive: Annotated[bool, typer.Option("--naive", help="Also time the naive loop.")] = False,
    branches: Annotated[
        bool, typer.Option("--branches", help="Also time each way of the body for few tokens.")
    ] = False,
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
) -> None:
    """Times the function body against the dense graph in ONNX Runtime."""
    table = Table("case", "body", "median ms", "best ms", "dense / this", title="one MoE layer")
    results = []
    for chosen in CASES:
        if case not in chosen.name:
            continue
        names = ["dense", "body", "unrolled"] + ["naive"] * naive
        if branches and chosen.tokens <= FEW:
            names += ["gathered", "visited"]
        timings = measure(chosen, names, threads, runs)
        dense = timings["dense"].median
        for name, timing in timings.items():
            table.add_row(
                chosen.name if name == "dense" else "",
                name,
                f"{timing.median:.2f}",
                f"{timing.best:.2f}",
                f"{dense / timing.median:.1f}x",
            )
        results.append(asdict(chosen) | {name: asdict(t) for name, t in timings.items()})
    Console().print(table)
    if json_file is not None:
        environment = record(["onnxruntime", "onnx", "onnx-ir", "numpy"])
        text = json.dumps(environment | {"threads": threads, "cases": results}, indent=2)
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
