"""The kernels of the backward pass, compiled."""

from __future__ import annotations

import itertools

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
    "fp16-rms": (torch.float16, ExpertOptions("gelu", pre_norm="rms", weight_on_input=True)),
    "fp32": (torch.float32, ExpertOptions("gelu")),
    "fp32-gated": (torch.float32, ExpertOptions("silu", gated=True)),
}
DEVICES = ("sm_80", "sm_90", "sm_100")
# Every dtype and every device. test_kernel_code.py has another layer in bfloat16.
ONE_EACH = {("fp32-gated", "sm_80"), ("bf16-interleaved", "sm_90"), ("fp16-rms", "sm_100")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "device"),
    [
        pytest.param(*each, marks=() if each in ONE_EACH else pytest.mark.every)
        for each in itertools.product(CASES, DEVICES)
    ],
)
def test_nothing_spills(case, device):
    dtype, options = CASES[case]
    layer = Layer(
        LayerShape(64, 1024, 768, 4, dtype, plain_format(dtype), options=options, b1=True, b2=True)
    )
    on = architecture(device)
    planned = backward_plan(layer, on, train_parameters=True)
    tasks = {(task := task_for(spec, on)).to_json(): task for spec in planned.kernels()}
    spilled = {}

    def done(task: Task, result: Compiled) -> None:
        check_shared_memory(task, result)
        if result.info.local_memory:
            spilled[task.function] = result.info.local_memory

    compile_tasks(list(tasks.values()), 2, done)
    assert not spilled
