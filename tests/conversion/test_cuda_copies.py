"""Converted models on the operators' CUDA implementation: no call copies weights.

Tensors are the CPU's, and nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_moe
from custom_ops import _cuda, _cuda_backward, _grouped
from custom_ops.kernels.spec import ForwardPlan
from moe_architectures import ARCHITECTURES, example_inputs
from public_moe import dbrx

launcher = pytest.importorskip("custom_ops.kernels.launch")


class Work(TorchDispatchMode):
    """Notes every operator of ATen that does more than view a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return ARCHITECTURES[name].build(), example_inputs(ARCHITECTURES[name], 2, 5)


def dbrx_layer() -> tuple[nn.Module, dict[str, Any]]:
    layer = dbrx.DbrxFFN(hidden_size=32, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.eval(), {"x": torch.randn(2, 5, 32)}


# Which of w1 and w2 lie as (in, out). Each way in which transformers' experts say that they are
# stored is there: mixtral's is that of all others, some of whose routers see groups or biases
# (deepseek_v3); nemotron_h has no gate, and gpt_oss interleaves it.
LAYOUTS = {
    "aria": (True, True),
    "dbrx": (False, True),
    "deepseek_v3": (False, False),
    "gpt_oss": (True, True),
    "llama4": (True, True),
    "mixtral": (False, False),
    "nemotron_h": (False, False),
    "openai_privacy_filter": (True, True),
    "qwen3_moe": (False, False),
    "switch_transformers": (False, False),
}


@pytest.fixture
def device(monkeypatch):
    """A GPU on which nothing starts."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launcher, "_start_by_jit", lambda *_: None)
    plans = _cuda._plan, _cuda_backward._plan
    for cached in plans:
        cached.cache_clear()
    yield
    for cached in plans:
        cached.cache_clear()


def converted(family: str, *, frozen: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A family's model, whose experts are where they stay, and its inputs."""
    build: Callable[[], tuple[nn.Module, dict[str, Any]]] = (
        dbrx_layer if family == "dbrx" else partial(transformers_model, family)
    )
    torch.manual_seed(0)
    model, inputs = build()
    model.requires_grad_(requires_grad=not frozen)
    assert dynamo_moe.convert(model).replaced
    with torch.no_grad():
        model(**inputs)  # Experts that are modules get stacked here.
    return model, inputs


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_call_allocates_the_result_and_the_workspace_and_copies_nothing(
    family, device, monkeypatch
):
    # Where gate and up are separate stacks, frozen weights are put together once.
    model, inputs = converted(family, frozen=True)
    calls, launched = [], []

    def forward(*arguments: Any) -> Tensor:
        with Work() as work:
            y = _cuda.forward(*arguments)
        calls.append(work.calls)
        return y.zero_()

    launch = launcher.launch

    def noted(plan: ForwardPlan, tensors: Mapping[str, Tensor]) -> None:
        launched.append((plan.layer, tensors))
        launch(plan, tensors)

    monkeypatch.setattr(_grouped, "forward", forward)
    monkeypatch.setattr(launcher, "launch", noted)
    with torch.no_grad():
        model(**inputs)
        model(**inputs)
    assert calls
    assert all(each == ["empty_like", "empty"] for each in calls), calls
    for layer, tensors in launched:
        assert (layer.shape.layout.w1_transposed, layer.shape.layout.w2_transposed) == LAYOUTS[
            family
        ]
        assert tensors["w1"].is_contiguous()
        assert tensors["w2"].is_contiguous()
    # All are still there, so a copy would have another address.
    weights = [(tensors["w1"].data_ptr(), tensors["w2"].data_ptr()) for _, tensors in launched]
    layers = len(weights) // 2
    assert weights[:layers] == weights[layers:]


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_backward_pass_allocates_gradients_and_the_workspace_and_copies_nothing(
    family, device, monkeypatch
):
    model, inputs = converted(family)
    stored = {each.untyped_storage().data_ptr() for each in model.parameters()}
    calls, launched = [], []

    def backward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        with Work() as work:
            gradients = _cuda_backward.experts_backward(*arguments, **options)
        calls.append(work.calls)
        return tuple(each.zero_() for each in gradients)

    launch = launcher.launch

    def noted(plan: ForwardPlan, tensors: Mapping[str, Tensor]) -> None:
        launched.append(tensors)
        launch(plan, tensors)

    monkeypatch.setattr(_grouped, "experts_backward", backward)
    monkeypatch.setattr(launcher, "launch", noted)
    outputs = model(**inputs)
    result = outputs if isinstance(outputs, Tensor) else outputs[0]
    result.float().sum().backward()
    assert calls
    assert all(set(each) <= {"empty", "empty_like", "new_empty"} for each in calls), calls
    for tensors in launched:
        for name in ("w1", "w2"):
            # Where gate and up are separate stacks, each step puts them together.
            joined = (family, name) == ("dbrx", "w1")
            assert (tensors[name].untyped_storage().data_ptr() in stored) != joined
