"""Calls of the operators on a GPU, and launches of their plans on poisoned memory.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from custom_ops import RouterOptions
from custom_ops.kernels.architectures import Architecture, nearest_architecture
from custom_ops.kernels.configs import FewConfig, GemmConfig, MlpConfig, RangeConfig
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan, plan_with
from custom_ops.kernels.spec import MAX_TOKENS, ForwardPlan
from custom_ops.options import ROUTER_OPTIONS
from kernel_runs import layer_of
from moe_cases import Case, assert_matches, make_case
from tie_margins import TIE, choice_margins

DEVICE = "cuda"
#: Of ONNX Runtime's sessions.
PROVIDER = "CUDAExecutionProvider"
#: NaN in every float dtype, and -1 ("no expert") in every integer dtype.
POISON = 0xFF

_GUARD = 4096


def _one_range(
    path: str,
    up: FewConfig | GemmConfig | MlpConfig,
    down: FewConfig | GemmConfig | None = None,
) -> tuple[RangeConfig, ...]:
    return (RangeConfig(MAX_TOKENS, path, up, down),)


#: Each path of the forward pass, with blocks that a small layer does not fill.
PATHS = {
    "few": _one_range("few", FewConfig(8, 128, 4), FewConfig(4, 64, 4)),
    "gemm": _one_range(
        "gemm", GemmConfig(32, 64, 64, 4, 3), GemmConfig(32, 64, 64, 4, 3, group_m=3)
    ),
    "tensor-maps": _one_range(
        "gemm",
        GemmConfig(64, 64, 64, 4, 3, tensor_maps=True),
        GemmConfig(64, 128, 64, 4, 3, group_m=3, tensor_maps=True),
    ),
    "swapped": _one_range(
        "gemm",
        GemmConfig(16, 64, 64, 4, 3, swapped=True),
        GemmConfig(16, 64, 64, 4, 3, group_m=3, swapped=True),
    ),
    "swapped-tensor-maps": _one_range(
        "gemm",
        GemmConfig(32, 32, 64, 4, 3, tensor_maps=True, swapped=True),
        GemmConfig(32, 64, 64, 4, 3, group_m=3, tensor_maps=True, swapped=True),
    ),
    "persistent": _one_range(
        "gemm",
        GemmConfig(64, 64, 64, 4, 3, persistent=True),
        GemmConfig(64, 64, 64, 4, 3, group_m=3, persistent=True),
    ),
    "persistent-tensor-maps": _one_range(
        "gemm",
        GemmConfig(64, 64, 64, 4, 3, tensor_maps=True, persistent=True),
        GemmConfig(64, 128, 64, 4, 3, group_m=3, tensor_maps=True, persistent=True),
    ),
    "mlp": _one_range("mlp", MlpConfig(32, 64, 4, 2)),
}


def runs_on(path: str, on: Architecture) -> bool:
    """Whether an architecture has what a path of :data:`PATHS` takes."""
    return on.has_tensor_maps or not path.endswith("tensor-maps")


def one_multiprocessor(on: Architecture) -> Architecture:
    """The architecture with so few that a persistent program has several tiles of a small layer."""
    return replace(on, multiprocessors=1)


def architecture() -> Architecture:
    """The architecture that the device's plans are made for."""
    return nearest_architecture(*torch.cuda.get_device_capability())


def on_gpu(case: Case) -> Case:
    """The case with its tensors moved to the device."""
    moved = {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in case.arguments.items()
    }
    return case.changed(**moved)


def gpu_case(op: str, tokens: int, **sizes) -> Case:
    """A random case on the device, without tokens whose K-th and next best expert nearly tie.

    Rounding would decide the routing of such tokens.
    """
    case = make_case(op, (tokens,), **{"width": 136, "hidden": 72, "experts": 8} | sizes)
    return on_gpu(without_ties(case) if op == "dropless" and tokens > 1 else case)


def without_ties(case: Case) -> Case:
    """The case with one token that chooses clearly in place of those that nearly tie."""
    a = case.arguments
    router = {
        row.name: case.options[row.name] for row in ROUTER_OPTIONS if row.name in case.options
    }
    margins = choice_margins(
        a["x"],
        a["router_weight"],
        a["router_bias"],
        RouterOptions(a["top_k"], **router),
        a["selection_bias"],
    )
    x = torch.where((margins < TIE)[:, None], a["x"][margins.argmax()], a["x"])
    return case.changed(x=x)


def check(case: Case, dtypes: set[torch.dtype] = frozenset()) -> Tensor:
    """Compares the operator's result with the oracle's, and returns it."""
    result = case()
    assert result.device.type == DEVICE
    assert result.dtype == case.arguments["x"].dtype
    assert_matches(result, case.oracle(), set(dtypes) or case.dtypes)
    return result


def gradients(case: Case, run: Callable[[Case], Tensor] = lambda case: case()) -> dict[str, Tensor]:
    """Gradients of every float, given one fixed gradient of the result."""
    leaves = case.with_grad()
    result = run(leaves)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(result.shape, generator=generator).bfloat16().to(DEVICE, result.dtype)
    found = torch.autograd.grad(result, list(leaves.floats.values()), dy)
    return dict(zip(leaves.floats, found, strict=True))


@contextmanager
def allow_tf32(*, allowed: bool):
    """Allows or forbids TF32 in float32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def plan_of(case: Case, ranges: tuple[RangeConfig, ...] = ()) -> ForwardPlan:
    """The case's plan, or a plan with the given configurations."""
    layer, on = layer_of(case), architecture()
    return plan_with(layer, one_multiprocessor(on), ranges) if ranges else plan(layer, on)


def launch_poisoned(chosen: ForwardPlan, case: Case) -> Tensor:
    """Runs a plan on poisoned memory; checks that nothing is written beyond workspace and y."""
    tensors = {name: value for name, value in case.arguments.items() if isinstance(value, Tensor)}
    x = tensors["x"]
    size = chosen.workspace_size(len(x))
    y_bytes = x.numel() * x.element_size()
    workspace, inner = _poisoned(size)
    memory, y = _poisoned(y_bytes)
    y = y.view(x.dtype).view(x.shape)
    launch(chosen, {**tensors, "y": y}, inner)
    for name, whole, used in (("workspace", workspace, size), ("y", memory, y_bytes)):
        for band in (whole[:_GUARD], whole[_GUARD + used :]):
            assert bool((band == POISON).all()), f"written outside of {name}"
    return y


def _poisoned(size: int) -> tuple[Tensor, Tensor]:
    """Poisoned memory, and the part between its guard bands; both start at multiples of 256."""
    whole = torch.full((size + 2 * _GUARD,), POISON, dtype=torch.uint8, device=DEVICE)
    assert whole.data_ptr() % 256 == 0 or DEVICE == "cpu"
    return whole, whole[_GUARD : _GUARD + size]
