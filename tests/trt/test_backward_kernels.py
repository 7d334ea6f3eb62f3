"""The kernels of the backward pass, compiled."""

from __future__ import annotations

import pytest
import torch

from custom_ops import ExpertOptions
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.layer import Layer
from trt_plugin.compiling.ahead_of_time import check_shared_memory
from trt_plugin.compiling.tasks import Compiled, Task, task_for
from trt_plugin.compiling.workers import compile_tasks


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, ExpertOptions("silu", gated=True)),
        (torch.bfloat16, ExpertOptions("clamped_swiglu", gated=True, interleaved=True)),
        (torch.float16, ExpertOptions("gelu", pre_norm="rms", weight_on_input=True)),
        (torch.float32, ExpertOptions("gelu")),
        (torch.float32, ExpertOptions("silu", gated=True)),
    ],
    ids=["bf16-gated", "bf16-interleaved", "fp16-rms", "fp32", "fp32-gated"],
)
def test_nothing_spills(dtype, options, device):
    layer = Layer(64, 1024, 768, 4, dtype, dtype, options=options, b1=True, b2=True)
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
