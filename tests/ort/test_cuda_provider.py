"""The tests of CUDA sessions in ONNX Runtime's real CUDA provider, on stand-ins for CUDA.

It cannot be installed beside the CPU's package: ONNXRUNTIME_GPU names a folder, which
``pip install --no-deps --target FOLDER onnxruntime-gpu`` has filled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from standin import ROOT


@pytest.mark.slow
def test_its_sessions_run_the_operators() -> None:
    folder = os.environ.get("ONNXRUNTIME_GPU")
    if not folder:
        pytest.skip("ONNXRUNTIME_GPU names no folder with onnxruntime-gpu")
    assert list(Path(folder).glob("onnxruntime/capi/libonnxruntime_providers_cuda.so"))
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", "."]
    command += ["-p", "cuda_provider", "tests/ort/test_gpu_sessions.py"]
    paths = os.pathsep.join((folder, str(ROOT), str(ROOT / "tests" / "support")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    # None is skipped.
    assert re.search(r"\n=+ \d+ passed in", done.stdout), done.stdout[-2000:]
