"""The kernels of the backward pass, compiled."""

from __future__ import annotations

import pytest
import torch

from custom_ops import ExpertOptions
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.weight_formats import plain_format
from trt_plugin.compiling.ahead_of_time import check_shared_memory
from trt_plugin.compiling.tasks import Compiled, Task, task_for
from trt_plugin.compiling.workers import compile_tasks

CASES = {
    "bf16-gated": (torch.bfloat16, ExpertOptions("silu", gated=True)),
    "bf16-interleaved": (
        torch.bfloat16,
        ExpertOptions("clamped_swiglu", gated=True, interleaved=True),
    ),
    "bf16-softcapped": (torch.bfloat16, ExpertOptions("softcapped_silu", gated=True, alpha=4.0)),
    "fp16-rms": (torch.float16, ExpertOptions("gelu", pre_norm="rms", weight_on_input=True)),
    "fp32": (torch.float32, ExpertOptions("gelu")),
    "fp32-gated": (torch.float32, ExpertOptions("silu", gated=True)),
}
DEVICES = ("sm_80", "sm_90", "sm_100")
# Every dtype and every device. test_kernel_code.py has another layer in bfloat16, with all kernels.
ONE_EACH = [("fp32-gated", "sm_80"), ("bf16-interleaved", "sm_90"), ("fp16-rms", "sm_100")]
# These hold the most registers.
PRODUCTS = ("hidden_gradient_kernel", "input_gradient_kernel", "weight_gradient_kernel")


def planned_tasks(case: str, device: str) -> list[list[Task]]:
    """The kernels of a layer's backward pass, for few tokens and for many."""
    dtype, options = CASES[case]
    layer = Layer(
        LayerShape(64, 1024, 768, 4, dtype, plain_format(dtype), options=options, b1=True, b2=True)
    )
    on = architecture(device)
    planned = backward_plan(layer, on, train_parameters=True)
    return [[task_for(spec, on) for spec in each.launches] for each in planned.ranges]


def nothing_spills(tasks: list[Task], jobs: int) -> None:
    spilled = {}

    def done(task: Task, result: Compiled) -> None:
        check_shared_memory(task, result)
        if result.info.local_memory:
            spilled[str(task)] = result.info.local_memory

    compile_tasks(list({task.to_json(): task for task in tasks}.values()), jobs, done)
    assert not spilled


@pytest.mark.every  # test_kernel_code.py has those of one shape.
def test_no_product_spills():
    largest = [task for each in ONE_EACH for task in planned_tasks(*each)[-1]]
    # Together and by one compiler, which takes as long to start as to compile two kernels.
    nothing_spills([task for task in largest if task.function in PRODUCTS], 1)


@pytest.mark.every
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_nothing_spills(case, device):
    nothing_spills([task for tasks in planned_tasks(case, device) for task in tasks], 2)
