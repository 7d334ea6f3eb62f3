"""A plugin of pytest: the first case of each of the GPU's tests runs on the CPU.

    python -m pytest -p gpu_rehearsal tests/ops/test_gpu.py

Plans run in Triton's interpreter, the operators as on any CPU. Tests that need what CUDA alone has,
such as graphs and streams, are left out.
"""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

# They name CUDA, or take long.
_LEFT_OUT = ("cuda", "need_memory", "torch.compile", "opcheck")
_MOST_TOKENS = 4


def pytest_configure() -> None:
    """Lets the tests' helpers work without a GPU."""
    import gpu_cases
    from custom_ops.kernels.architectures import architecture

    gpu_cases.DEVICE = "cpu"
    gpu_cases.PROVIDER = "CPUExecutionProvider"
    gpu_cases.architecture = lambda: architecture("sm_90")
    make = gpu_cases.gpu_case
    gpu_cases.gpu_case = lambda op, tokens, **sizes: make(op, min(tokens, _MOST_TOKENS), **sizes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the first case of each test that can run, without the mark that skips it."""
    first: dict[object, pytest.Item] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        function = item.function
        source = inspect.getsource(function)
        path = item.callspec.params.get("path") if hasattr(item, "callspec") else None
        # The vector products take several times as long; plans for few tokens have them as well.
        if path != "few" and not any(name in source for name in _LEFT_OUT):
            first.setdefault(function, item)
    kept = list(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in kept:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "gpu"]
