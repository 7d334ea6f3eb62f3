"""What does a layer take on this machine's GPU whose experts lie in host memory, by slots?

    python -m benchmarks.residency.measure --shapes qwen3 --json measured.json

One layer, in bfloat16, with its experts in pinned host memory, takes the steps of the routing that
`benchmarks.residency.simulate` has for it, in a CUDA graph of one step that is replayed. Times are
of all MoE layers of the model, per token, as there: ``simulate --measured measured.json`` draws
them beside its own. ``--dry-run`` tries it without a GPU, on a tiny layer; its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.report import table, write_json
from benchmarks.gpu.layers import Shape
from benchmarks.gpu.speed import Device, gpu_parser, parsed
from benchmarks.gpu.timing import release
from benchmarks.residency import traces
from benchmarks.residency.policies import LRU
from benchmarks.residency.simulate import WARM_UP, run, slots
from custom_ops.kernels.launch_waves import launch_in_waves
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan

STEPS = 256


def host_experts(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Returns random w1 and w2 as the layer's memory has them, pinned where there is a GPU."""
    D, H, F = shape.width, shape.hidden, shape.rows
    sizes = {
        "w1": (D, F) if shape.transposed else (F, D),
        "w2": (H, D) if shape.transposed else (D, H),
    }
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, size in sizes.items():
        found[name] = torch.empty(shape.experts, *size, dtype=dtype, pin_memory=device == "cuda")
        scale = (D if name == "w1" else H) ** -0.5
        for expert in found[name]:
            expert.copy_(torch.randn(size, generator=generator, device=device).mul_(scale))
    return found


class OffloadedLayer:
    """A layer with R slots, and tensors that each of its steps reads and writes."""

    def __init__(
        self, layer: Layer, device: Device, tensors: dict[str, Tensor], resident: int
    ) -> None:
        planned = plan(replace(layer, resident_experts=resident), device.architecture)
        on_gpu = device.name == "cuda"
        memory = partial(torch.zeros, dtype=torch.uint8, device=device.name)
        size = planned.workspace_size(len(tensors["x"]))
        self._ids = tensors["expert_ids"]
        # Replays of the graph use this call's memory, which must live as long.
        self._captured = partial(
            launch_in_waves,
            planned,
            tensors,
            memory(planned.state_size),
            torch.cuda.Stream(priority=-1) if on_gpu else None,
            memory(size),
        )
        self._start: Callable[[], object] = self._captured
        if on_gpu:
            # Kernels are compiled and loaded before the capture.
            self._captured()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._captured()
            self._start = graph.replay

    def run(self, ids_NTK: Tensor) -> None:
        """Enqueues a step for each routing."""
        for ids_TK in ids_NTK:
            self._ids.copy_(ids_TK)
            self._start()


def seconds(call: Callable[[], object], device: Device) -> float:
    """Returns how long the device takes for what a call enqueues."""
    if device.name == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def measure(
    shape: Shape, tokens: int, device: Device, dtype: torch.dtype, count: int, deadline: float
) -> dict[str, Any]:
    """Returns times by slots, the most first, until the deadline; kernels are compiled here, too.

    ``GB/s`` is what the copies must at least have had, if the cache did as its model in Python.
    ``same`` says whether the last step's results are those of the most slots, to the bit.
    """
    layer = shape.layer(dtype, router=False)
    x_TD = torch.randn(tokens, shape.width, device=device.name).to(dtype)
    ids_NTK = _routing(shape, tokens, count).to(device.name)
    first = ceil(WARM_UP * len(ids_NTK))
    tensors = host_experts(shape, dtype, device.name) | {
        "x": x_TD,
        "y": torch.empty_like(x_TD),
        "expert_ids": ids_NTK[0].clone(),
        "expert_weights": torch.full(ids_NTK[0].shape, 1 / shape.top_k, device=device.name),
    }
    if shape.biases:
        tensors["b1"] = torch.zeros(shape.experts, shape.rows, dtype=dtype, device=device.name)
        tensors["b2"] = torch.zeros(shape.experts, shape.width, dtype=dtype, device=device.name)
    steps = list(traces.steps(ids_NTK.flatten(0, 1).cpu().numpy(), tokens))
    expert_bytes = sum(tensors[name][0].nbytes for name in ("w1", "w2"))
    rows: list[dict[str, Any]] = []
    expected: Tensor | None = None
    for resident in sorted(slots(shape.experts), reverse=True):
        if time.monotonic() > deadline:
            break
        offloaded = OffloadedLayer(layer, device, tensors, resident)
        offloaded.run(ids_NTK[:first])
        took = seconds(partial(offloaded.run, ids_NTK[first:]), device)
        expected = tensors["y"].clone() if expected is None else expected
        done = run(LRU, [steps], shape.experts, resident)
        per_step = took / (len(ids_NTK) - first)
        rows.append(
            {
                "resident": resident,
                "ms": 1e3 * per_step * traces.SIMULATED.get(shape.name, 1) / tokens,
                "hit rate, simulated": done.hit_rate,
                "GB/s": sum(done.copied) * expert_bytes / took / 1e9,
                "same": torch.equal(tensors["y"], expected),
            }
        )
        del offloaded
        release()
    return {"shape": shape.name, "tokens": tokens, "steps": len(ids_NTK), "rows": rows}


def _routing(shape: Shape, tokens: int, count: int) -> Tensor:
    """Expert ids ``[steps, T, K]`` int64, of the first layer where the shape was recorded."""
    kind = traces.RECORDED if shape.name in traces.SIMULATED else "uniform"
    ids_TK = traces.trace(kind, shape, count * tokens)[0]
    whole = len(ids_TK) // tokens * tokens
    return torch.from_numpy(ids_TK[:whole]).long().view(-1, tokens, shape.top_k)


@torch.inference_mode()
def main() -> None:
    """Measures on this machine's GPU."""
    known = gpu_parser(__doc__, 300, "json")
    known.add_argument("--steps", type=int, default=STEPS, help="steps of a trace")
    given = parsed(known, known.parse_args())
    deadline = time.monotonic() + given.budget
    device = Device.chosen(given.dry_run)
    asked = [shape for shape in given.shapes if shape.name in traces.SIMULATED or given.dry_run]
    layers = []
    for shape in asked:
        for tokens in given.tokens or [1]:
            found = measure(shape, tokens, device, given.dtype, given.steps, deadline)
            layers.append(found)
            write_json(given.json, device.conditions() | {"layers": layers})
            columns = ["R", "ms per token", "simulated hits", "GB/s at least", "same bits"]
            rows = [list(row.values()) for row in found["rows"]]
            print(table(f"{shape.title}, T={tokens}, {found['steps']} steps", columns, rows))
    if not all(row["same"] for each in layers for row in each["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
