"""What the kernels compile to is no worse than what docs/benchmarks/kernel_code.json says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import pytest

pytest.importorskip("triton")

import torch
import triton

from benchmarks.gpu import kernel_code
from benchmarks.gpu.candidates import gemm_candidates
from benchmarks.gpu.check import CANDIDATES
from benchmarks.gpu.kernel_code import Case, disassemble, in_loops, measure, worse
from benchmarks.gpu.layers import SHAPES
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.grouped_gemm import expert_down_step, expert_up_step
from custom_ops.kernels.plan import plan
from standin import ROOT
from trt_plugin.compiling.specs import parse_spec
from trt_plugin.compiling.tasks import Compiled, Task, task_for
from trt_plugin.compiling.workers import compile_tasks

RECORD = kernel_code.read_record(triton.__version__)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

recorded = pytest.mark.skipif(not RECORD, reason=f"no record for Triton {triton.__version__}")


def known_kernels(case: Case) -> list[str]:
    """The names of a case's kernels, which are those of the record."""
    of_case = f"{case.shape.name} {case.device.name} "
    known = {name for name in RECORD if name.startswith(of_case)}
    assert case.kernels().keys() == known, "write the record anew and look at what changed"
    return list(case.kernels())


# Bytes of a thread, where the assembler leaves registers for another block.
SPILLED = {"mixtral sm_90 1 route_kernel": 8}


def check(cases: list[Case], names: Iterable[str]) -> None:
    pattern = "|".join(f"^{re.escape(name)}$" for name in names)
    found = measure(cases, pattern, progress=False)
    problems = {name: worse(code, RECORD[name]) for name, code in found.items()}
    assert not {name: what for name, what in problems.items() if what}
    spilled = {name: code["local_memory"] for name, code in found.items() if code["local_memory"]}
    assert spilled.items() <= SPILLED.items()


@recorded
@pytest.mark.slow
def test_no_kernel_got_worse() -> None:
    """Each at its most tokens."""
    case = Case(SHAPES["qwen3"], architecture("sm_90"))
    # A name's last part is the kernel's, "backward" or not; what is before it is the fewest tokens.
    last = {re.sub(r" \d+ (?=[a-z])", " ", name): name for name in known_kernels(case)}
    check([case], last.values())


@recorded
@pytest.mark.every
@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "tiny"])
def test_no_kernel_of_any_shape_got_worse(shape: str, device: str) -> None:
    case = Case(SHAPES[shape], architecture(device))
    check([case], known_kernels(case))


# A matrix instruction whose left operand is registers; it follows the result.
LEFT_IN_REGISTERS = re.compile(r"HGMMA\S* R\d+, R\d+, ")


# Shape, product and height of a tile: every pair of values.
PAIRS = [("qwen3", "up", 16), ("qwen3", "down", 32), ("gpt-oss", "up", 32), ("gpt-oss", "down", 16)]
OTHERS = [(shape, product, 48 - block_m) for shape, product, block_m in PAIRS]


def swapped_tasks(shape: str, product: str, block_m: int) -> list[Task]:
    """The swapped candidates of a product."""
    layer, on = SHAPES[shape].layer(torch.bfloat16), architecture("sm_90")
    if product == "up":
        step, sizes = (
            expert_up_step,
            (layer.shape.hidden, layer.shape.width, layer.shape.options.rows_per_hidden),
        )
    else:
        step, sizes = expert_down_step, (layer.shape.width, layer.shape.hidden, 1)
    tried = gemm_candidates(layer, on, block_m, *sizes)[:CANDIDATES]
    steps = [step(layer, on, config) for config in tried if config.swapped]
    tasks = [task_for(spec, on) for each in steps for spec in each.launches]
    assert tasks
    return tasks


@pytest.mark.slow
@pytest.mark.every
def test_swapped_weights_are_read_from_shared_memory():
    """Of each product the candidate that is tried first."""
    check_swapped([swapped_tasks(*each)[0] for each in PAIRS], 1)


@pytest.mark.every
@pytest.mark.parametrize("products", [PAIRS, OTHERS], ids=["pairs", "others"])
def test_swapped_weights_of_any_candidate_are_read_from_shared_memory(products):
    check_swapped([task for each in products for task in swapped_tasks(*each)], 2)


def check_swapped(tasks: list[Task], jobs: int) -> None:
    problems = {}

    def done(task: Task, result: Compiled) -> None:
        code = disassemble(result.cubin)
        assert "HGMMA" in code
        if LEFT_IN_REGISTERS.search(code) or result.info.local_memory:
            problems[str(task)] = result.info

    # Together, since a compiler takes as long to start as to compile two kernels.
    compile_tasks(tasks, jobs, done)
    assert not problems


@pytest.mark.parametrize(
    ("weight_format", "device"),
    [
        ("int4", "sm_89"),
        *(
            pytest.param(name, device, marks=pytest.mark.every)
            for name in ("int4", "int8", "mxfp4", "nvfp4", "fp8")
            for device in ("sm_75", "sm_80", "sm_90", "sm_100")
        ),
    ],
)
def test_decoding_leaves_room_where_there_are_no_tensor_cores(weight_format, device):
    """Tokens are float32; the largest tile once lay in local memory."""
    shape = "experts=8,top_k=2,width=512,hidden=512,dtype=fp32,activation=silu,gated"
    planned = plan(parse_spec(f"{shape},weight_format={weight_format}"), architecture(device))
    tasks = [
        task_for(spec, planned.architecture)
        for spec in planned.ranges[-1].kernels()
        if spec.name in ("expert_up_kernel", "expert_down_kernel")
    ]
    assert len(tasks) == 2
    spilled = {}
    compile_tasks(tasks, 1, lambda task, code: spilled.update({str(task): code.info.local_memory}))
    assert spilled == {str(task): 0 for task in tasks}


DISASSEMBLED = """
.text.example:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   BRA `(.L_x_1) ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_1:
        /*0070*/                   EXIT ;
"""


def test_a_loop_is_what_a_branch_goes_back_over():
    names = [instruction.split()[0] for instruction in in_loops(DISASSEMBLED)]
    assert names == ["LDG.E.128", "BAR.SYNC.DEFER_BLOCKING"]


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "device", "blocks"),
    [
        (32, 4, 0, "sm_90", 16),  # 64 warps
        (128, 8, 0, "sm_90", 2),  # 65,536 registers
        (129, 8, 0, "sm_90", 1),
        (64, 4, 98_304, "sm_90", 2),  # 228 KiB
        (64, 4, 98_304, "sm_89", 1),  # 100 KiB
        (16, 1, 0, "sm_90", 32),
        (16, 4, 0, "sm_89", 12),  # 48 warps
    ],
)
def test_blocks_per_multiprocessor(registers, warps, shared, device, blocks):
    held = architecture(device).blocks_per_multiprocessor(warps, registers, shared)
    assert held == blocks


def test_the_tests_version_of_triton_has_a_record():
    (version,) = re.findall(r"^triton==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert kernel_code.read_record(version)


def test_the_record_is_json(tmp_path):
    figures = {"3.9.0": {"a": {"registers": 1}, "b": {"matrix": {"HMMA": 2}}}, "3.6.0": {"a": {}}}
    kernel_code.write(tmp_path / "record.json", {"cores": 2}, figures)
    content = (tmp_path / "record.json").read_text()
    assert json.loads(content) == {"conditions": {"cores": 2}, "kernels": figures}
    assert content.count("\n") == 12


def test_what_is_worse():
    old = {
        "registers": 64, "local_memory": 0, "shared_memory": 1024, "blocks_per_sm": 4,
        "instructions": 100, "matrix": {"HGMMA": 8}, "tensor_loads": 4, "async_copies": 8,
        "narrow_loads": 2, "loop_barriers": 1,
    }  # fmt: skip
    assert worse(old, old) == []
    better = old | {"registers": 60, "blocks_per_sm": 5, "async_copies": 9, "loop_barriers": 0}
    assert worse(better, old) == []
    assert worse(old | {"matrix": {"HMMA": 8}, "local_memory": 8}, old) == [
        "local_memory: 0 -> 8",
        "matrix: {'HGMMA': 8} -> {'HMMA': 8}",
    ]
