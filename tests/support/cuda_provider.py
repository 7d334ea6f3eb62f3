"""A plugin of pytest: the tests of CUDA sessions in ONNX Runtime's real provider, without a GPU.

    PYTHONPATH=FOLDER python -m pytest -p cuda_provider tests/ort/test_gpu_sessions.py

FOLDER has onnxruntime-gpu. CUDA's libraries and the driver are stand-ins; plans run in Triton's
interpreter, so there are fewer tokens.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "sm_80"


class _Graphs:
    """Keeps what is launched in a capture, and launches it again."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.launches: list[Callable[[], None]] = []
        self.capturing = False

    def launched(self, launch: Any) -> None:
        run = self.gpu.interpreted.bound(launch)
        if self.capturing:
            self.launches.append(run)
        else:
            run()

    def called(self, what: int) -> int:
        if what == 1:
            self.launches, self.capturing = [], True
        elif what == 2:
            self.capturing = False
        else:
            for run in self.launches:
                run()
        return 0


@pytest.fixture(scope="session", autouse=True)
def _provider(tmp_path_factory: pytest.TempPathFactory) -> Iterable[None]:
    """Loads the stand-ins before the first session, and gives it kernels to interpret."""
    import onnxruntime

    import cuda_libraries
    import gpu_cases
    import trt_plugin
    from custom_ops.kernels.plan import plan
    from interpreted_gpu import uncompiled_program
    from standin import standin
    from standin_gpu import StandinGpu
    from trt_plugin.bundle import Bundle

    gpu = StandinGpu(standin(), DEVICE)
    library = "libonnxruntime_providers_cuda.so"
    provider = Path(onnxruntime.__file__).parent / "capi" / library
    runtime = cuda_libraries.load(provider, tmp_path_factory.mktemp("cuda"))
    graphs = _Graphs(gpu)
    gpu.driver.on_launch(graphs.launched)
    called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(graphs.called)
    runtime.cuda_runtime_on_graph(called)

    def compiled(layers: Sequence[Any], _: object, path: Path, **__: object) -> None:
        programs = []
        for layer in dict.fromkeys(layers):
            planned = plan(layer, gpu.architecture)
            programs.append(uncompiled_program(planned))
            gpu.interpreted.register(planned, programs[-1])
            for kernel in programs[-1].kernels:
                gpu.driver.add_image(kernel.image)
        path.write_bytes(Bundle(tuple(programs)).data)

    trt_plugin.compile = compiled
    gpu_cases.DEVICE = "cpu"
    gpu_cases.architecture = lambda: gpu.architecture
    tests: Any = sys.modules["test_gpu_sessions"]
    tests.TOKENS, tests.MOST, tests.AGAIN = (1, 5, 0, 40), 40, 2
    yield
    runtime.cuda_runtime_on_graph(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark would skip them."""
    for item in items:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "gpu"]
