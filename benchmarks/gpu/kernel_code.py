"""What do the kernels compile to? Registers, occupancy and instructions, without a GPU.

    python -m benchmarks.gpu.kernel_code --arch sm_90,sm_100 --json result.json

Compiles the kernels of the measured shapes ahead of time and disassembles them. Nothing runs, so
the figures say what a kernel can reach, not what it does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from operator import eq, ge, le
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import conditions, parser, table
from benchmarks.gpu.layers import Shape, matching
from custom_ops.kernels.architectures import ARCHITECTURES, Architecture, architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan
from trt_plugin.bundle import Kernel
from trt_plugin.compiling import compile_plans

#: Where the figures of the repository's kernels are.
RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernel_code.json"

# A label, or an instruction behind its address and its predicate.
_LINE = re.compile(
    r"^(?:(\.L_x_\d+):|\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);)", re.MULTILINE
)
_LABEL = re.compile(r"\.L_x_\d+")
_MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "UTCOMMA", "UTCQMMA", "QGMMA", "IMMA")


#: The fields of a :class:`Code` by name.
Figures = dict[str, Any]


@dataclass(frozen=True)
class Code:
    """Figures of one compiled kernel.

    Attributes:
        warps: Of a block.
        registers: Of a thread.
        local_memory: Bytes of a thread, for spilled registers.
        shared_memory: Bytes of a block.
        blocks_per_sm: Blocks that a multiprocessor holds at a time.
        instructions: In all.
        matrix: Matrix instructions by kind, such as ``HGMMA``.
        tensor_loads: Loads by the tensor memory accelerator.
        async_copies: Asynchronous copies from global to shared memory.
        wide_loads: Loads of 16 bytes from global memory.
        narrow_loads: Other loads from global memory.
        loop_barriers: Barriers of the whole block within loops.
    """

    warps: int
    registers: int
    local_memory: int
    shared_memory: int
    blocks_per_sm: int
    instructions: int
    matrix: Mapping[str, int]
    tensor_loads: int
    async_copies: int
    wide_loads: int
    narrow_loads: int
    loop_barriers: int


#: What a figure may do without getting worse.
ALLOWED: Mapping[str, Callable[[Any, Any], bool]] = {
    "registers": le,
    "local_memory": le,
    "shared_memory": le,
    "blocks_per_sm": ge,
    "instructions": le,
    "matrix": eq,
    "tensor_loads": eq,
    "async_copies": ge,
    "narrow_loads": le,
    "loop_barriers": le,
}


def worse(new: Figures, old: Figures) -> list[str]:
    """Returns what got worse, in words."""
    return [
        f"{name}: {old[name]} -> {new[name]}"
        for name, allowed in ALLOWED.items()
        if not allowed(new[name], old[name])
    ]


def code_of(kernel: Kernel, device: Architecture) -> Code:
    """Disassembles a kernel and counts."""
    text = disassemble(kernel.image)
    names = [instruction.split()[0] for _, instruction in _LINE.findall(text) if instruction]
    loads = [name for name in names if name.startswith(("LDG.", "LD.E"))]
    wide = sum(".128" in name for name in loads)
    kinds = [name.partition(".")[0] for name in names]
    return Code(
        warps=kernel.num_warps,
        registers=kernel.registers,
        local_memory=kernel.local_memory,
        shared_memory=kernel.shared_memory,
        blocks_per_sm=device.blocks_per_multiprocessor(
            kernel.num_warps, kernel.registers, kernel.shared_memory
        ),
        instructions=len(names) - kinds.count("NOP"),
        matrix={kind: kinds.count(kind) for kind in _MATRIX if kind in kinds},
        tensor_loads=kinds.count("UTMALDG"),
        async_copies=kinds.count("LDGSTS"),
        wide_loads=wide,
        narrow_loads=len(loads) - wide,
        loop_barriers=sum(line.startswith("BAR.") for line in in_loops(text)),
    )


def in_loops(text: str) -> Iterator[str]:
    """Yields the instructions between a label and a later branch back to it, each once."""
    lines = _LINE.findall(text)
    labels = {label: at for at, (label, _) in enumerate(lines) if label}
    inside: set[int] = set()
    for at, (_, instruction) in enumerate(lines):
        if target := instruction.startswith("BRA") and _LABEL.search(instruction):
            inside.update(range(labels.get(target.group(), at), at))
    yield from (lines[at][1] for at in sorted(inside) if lines[at][1])


def disassemble(image: bytes) -> str:
    """Returns a cubin's instructions, as the disassembler in Triton's package writes them.

    Raises:
        FileNotFoundError: If that package has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(image)
        done = subprocess.run(
            [_disassembler(), "-c", str(path)], capture_output=True, text=True, check=True
        )
    return done.stdout


@cache
def _disassembler() -> str:
    package = find_spec("triton")
    if package is None or package.origin is None:
        raise FileNotFoundError("no disassembler: Triton, whose package has one, is not installed")
    path = Path(package.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not path.exists():
        raise FileNotFoundError(f"no disassembler: {path} is not there")
    return str(path)


@dataclass(frozen=True)
class Case:
    """A shape on an architecture."""

    shape: Shape
    device: Architecture

    def kernels(self) -> dict[str, ForwardPlan]:
        """Returns what runs in bfloat16, each kernel as a plan of its own by its name.

        Names are shape, architecture, ``backward`` for the backward pass, fewest tokens and kernel,
        with a number from a range's second of a name on. What several ranges of tokens share is
        there once; the router is, and of the backward pass what the forward pass has not.
        """
        dtype, found = torch.bfloat16, {}
        forward = plan(self.shape.layer(dtype), self.device)
        layer = self.shape.layer(dtype, router=False)
        backward = backward_plan(layer, self.device, train_parameters=True)
        shared = {launch.name for launch in forward.kernels()}
        seen: set[str] = set()
        for planned, prefix, left_out in ((forward, "", set()), (backward, "backward ", shared)):
            for span in planned.ranges:
                names: Counter[str] = Counter()
                for launch in span.launches:
                    compiled = (
                        f"{launch.name} {launch.num_warps} {launch.num_stages} {launch.arguments}"
                    )
                    names[launch.name] += 1
                    if compiled in seen or launch.name in left_out:
                        continue
                    seen.add(compiled)
                    number = f" {names[launch.name]}" if names[launch.name] > 1 else ""
                    name = f"{prefix}{span.first} {launch.name}{number}"
                    alone = replace(span, first=1, launches=(launch,))
                    found[f"{self.shape.name} {self.device.name} {name}"] = replace(
                        planned, ranges=(alone,)
                    )
        return found


def measure(
    cases: Iterable[Case], kernels: str = "", *, progress: bool = True
) -> dict[str, Figures]:
    """Compiles and disassembles; returns the figures by the names of :meth:`Case.kernels`.

    Args:
        cases: What to compile.
        kernels: A pattern that a name must contain, such as ``expert|few``.
        progress: Whether to show a bar while compiling.
    """
    wanted = {
        name: (case, alone)
        for case in cases
        for name, alone in case.kernels().items()
        if re.search(kernels, name)
    }
    bundle = compile_plans([each for _, each in wanted.values()], progress=progress)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = pool.map(
            code_of,
            (program.kernels[0] for program in bundle.programs),
            (case.device for case, _ in wanted.values()),
        )
        return {name: asdict(code) for name, code in zip(wanted, codes, strict=True)}


def read_record(version: str) -> dict[str, Figures]:
    """Returns the repository's figures for a version of Triton; none if there are none."""
    record: dict[str, dict[str, Figures]] = json.loads(RECORD.read_text())["kernels"]
    return record.get(version, {})


def main() -> None:
    """Compiles, prints a table, and writes the figures."""
    command = parser(__doc__, "json")
    known = ",".join(each.name for each in ARCHITECTURES.values())
    command.add_argument("--arch", default="sm_90", help=f"architectures among {known}")
    command.add_argument("--shapes", default="", help="shapes, such as qwen3,swin; default: all")
    command.add_argument(
        "--kernels", default="", help="a pattern of names, such as expert|few or backward"
    )
    given = command.parse_args()
    cases = [
        Case(shape, architecture(name))
        for name in given.arch.split(",")
        for shape in matching(given.shapes)
    ]
    found = measure(cases, given.kernels)
    columns = ["kernel", *(field.name.replace("_", " ") for field in fields(Code))]
    rows = []
    for name, code in found.items():
        matrix = " ".join(f"{kind} {count}" for kind, count in code["matrix"].items())
        rows.append([name, *(code | {"matrix": matrix}).values()])
    print(table("Compiled kernels; by shape, architecture and fewest tokens", columns, rows))
    if given.json:
        where = conditions(["triton", "torch"])
        version = where["versions"]["triton"]
        kept = json.loads(given.json.read_text())["kernels"] if given.json.exists() else {}
        write(given.json, where, {**kept, version: kept.get(version, {}) | found})


def write(path: Path, where: Figures, kernels: Mapping[str, Mapping[str, Figures]]) -> None:
    """Writes figures by Triton's version and kernel, a line for each kernel."""
    versions = ",\n".join(
        f"    {json.dumps(version)}: {{\n"
        + ",\n".join(f"      {json.dumps(name)}: {json.dumps(code)}" for name, code in each.items())
        + "\n    }"
        for version, each in kernels.items()
    )
    path.write_text(
        f'{{\n  "conditions": {json.dumps(where)},\n  "kernels": {{\n{versions}\n  }}\n}}\n'
    )


if __name__ == "__main__":
    main()
