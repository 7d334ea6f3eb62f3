"""What does a weight cost for few tokens, in each format? Bytes and instructions, without a GPU.

    python -m benchmarks.gpu.packed_code --arch sm_80,sm_90 --json result.json

Compiles the products of few tokens and counts the instructions of their loops. Nothing runs. Few
tokens read every weight once, so what counts is whether the device can issue the instructions as
fast as its memory delivers the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from math import prod

import torch

from benchmarks.common.report import conditions, parser, table
from benchmarks.gpu.kernel_code import RECORD, Figures, disassemble, in_loops, write
from benchmarks.gpu.layers import SHAPES
from custom_ops.kernels.architectures import Architecture, architecture
from custom_ops.kernels.layer import power_of_2
from custom_ops.kernels.plan import plan
from custom_ops.packed_weights import WHOLE
from custom_ops.weight_formats import WeightFormat, packed_format, plain_format
from trt_plugin.compiling import compile_plans

#: Where the figures of the repository's kernels are.
PACKED_RECORD = RECORD.with_name("packed_code.json")
#: The format names of the table.
FORMATS: dict[str, WeightFormat] = {
    "bf16": plain_format(torch.bfloat16),
    "int4, groups of 128": packed_format("int4", torch.bfloat16, torch.bfloat16, (1, 128)),
    "int4, groups of 32, zero points": packed_format(
        "int4", torch.bfloat16, torch.bfloat16, (1, 32), zero_points_block=(1, 32)
    ),
    "mxfp4": packed_format("mxfp4", torch.bfloat16, torch.int8, (1, 32)),
    "fp8, blocks of 128": packed_format("fp8", torch.bfloat16, torch.float32, (128, 128)),
    "nvfp4": packed_format("nvfp4", torch.bfloat16, torch.int8, (1, 16)),
    "int8, rows": packed_format("int8", torch.bfloat16, torch.bfloat16, (1, WHOLE)),
}
# Of an H100 SXM, as its architecture's whitepaper has them: multiprocessors, threads whose
# instruction one issues in a clock, clocks a second, bytes of memory a second.
_H100 = (132, 128, 1.755e9, 3.35e12)


@dataclass(frozen=True)
class Cost:
    """What a weight costs in a kernel.

    Attributes:
        bytes: Of memory, with its share of the scales.
        instructions: Of a thread in the kernel's loops, with all that is in them.
        affordable: Instructions that an H100 issues in the time in which its memory delivers the
            bytes.
        registers: Of a thread.
        local_memory: Bytes of a thread, for spilled registers.
        loads_in_flight: Bytes of weights that a block has on their way.
    """

    bytes: float
    instructions: float
    affordable: float
    registers: int
    local_memory: int
    loads_in_flight: int


def measure(
    devices: Iterable[Architecture], shape: str = "qwen3", *, progress: bool = True
) -> dict[str, Figures]:
    """Compiles and disassembles; returns the costs by architecture, format and kernel."""
    plain = SHAPES[shape].layer(torch.bfloat16)
    found, plans = [], []
    for device in devices:
        for name, weight_format in FORMATS.items():
            layer = replace(plain, shape=replace(plain.shape, weight_format=weight_format))
            planned = plan(layer, device)
            few = planned.ranges[0]
            for launch in few.launches:
                if launch.name.startswith("few"):
                    alone = replace(few, first=1, launches=(launch,))
                    plans.append(replace(planned, ranges=(alone,)))
                    found.append((f"{device.name} {name} {launch.name}", layer, launch))
    bundle = compile_plans(plans, progress=progress)
    figures = {}
    for (name, layer, launch), program in zip(found, bundle.programs, strict=True):
        (kernel,) = program.kernels
        is_first = launch.name == "few_up_kernel"
        matrix = layer.shape.matrices["w1" if is_first else "w2"]
        size = layer.shape.weight_format.expert_bytes(*matrix) / prod(matrix)
        rows = launch.constants["BLOCK_N"] * (
            layer.shape.options.rows_per_hidden if is_first else power_of_2(layer.shape.top_k)
        )
        weights = rows * launch.constants["BLOCK_K"]
        issued = len(list(in_loops(disassemble(kernel.image)))) * 32 * kernel.num_warps / weights
        multiprocessors, threads, clock, bandwidth = _H100
        figures[name] = asdict(
            Cost(
                bytes=round(size, 3),
                instructions=round(issued, 2),
                affordable=round(multiprocessors * threads * clock / (bandwidth / size), 2),
                registers=kernel.registers,
                local_memory=kernel.local_memory,
                loads_in_flight=int(size * weights * (launch.constants["NUM_STAGES"] - 1)),
            )
        )
    return figures


def read_record(version: str) -> dict[str, Figures]:
    """Returns the repository's figures for a version of Triton; none if there are none."""
    record: dict[str, dict[str, Figures]] = json.loads(PACKED_RECORD.read_text())["kernels"]
    return record.get(version, {})


def main() -> None:
    """Compiles, prints a table, and writes the figures."""
    command = parser(__doc__, "json")
    command.add_argument("--arch", default="sm_90", help="architectures, such as sm_80,sm_90")
    given = command.parse_args()
    found = measure(map(architecture, given.arch.split(",")))
    columns = ["kernel", *(field.name.replace("_", " ") for field in fields(Cost))]
    rows = [[name, *cost.values()] for name, cost in found.items()]
    print(table("A weight of Qwen3-30B-A3B, a few tokens", columns, rows))
    if given.json:
        where = conditions(["triton", "torch"])
        write(given.json, where, {where["versions"]["triton"]: found})


if __name__ == "__main__":
    main()
