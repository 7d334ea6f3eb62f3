"""TensorRT's wheels from PyPI, each installed once into a folder of its own under build/.

Two are the lean runtime, of TensorRT 10 and of 11. The third, TensorRT for RTX, also has the ONNX
parser and the builder, and builds engines on a machine without a GPU. Their licence permits tests
like these, but not to distribute them or what they build.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from standin import ROOT

#: Versions of the lean runtime.
LEAN = ("10.16", "11.4")
#: TensorRT for RTX.
RTX = "rtx-1.7"

_PACKAGES = {
    "10.16": ("tensorrt-lean-cu12-libs==10.16.*", "tensorrt-lean-cu12-bindings==10.16.*"),
    "11.4": ("tensorrt-lean-cu13-libs==11.4.*", "tensorrt-lean-cu13-bindings==11.4.*"),
    RTX: ("tensorrt-rtx-cu13-libs==1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116"),
}
_PIP_SECONDS = 540


@cache
def install(version: str) -> Path:
    """Returns the folder that has a version's module; skips the test where it cannot be had."""
    folder = ROOT / "build" / "tensorrt" / version
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / "packages"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _pip_install(version, packages)
            if version == RTX:
                # The parser opens the library by this name before it adds a plugin, and ends the
                # process where it finds none.
                link = packages / "tensorrt_rtx_libs" / "libtensorrt_rtx.so"
                link.symlink_to("libtensorrt_rtx.so.1")
            (folder / "complete").touch()
    return packages


def environment(version: str) -> dict[str, str]:
    """Returns the environment of a process that imports a version's module and this project."""
    path = os.pathsep.join((str(install(version)), str(ROOT)))
    return {**os.environ, "PYTHONPATH": path}


def _pip_install(version: str, packages: Path) -> None:
    # Their other dependencies are packages of CUDA, which nothing here needs.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    try:
        subprocess.run(
            [*pip, "--target", str(packages), *_PACKAGES[version]],
            check=True,
            capture_output=True,
            text=True,
            timeout=_PIP_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:]
        pytest.skip(f"TensorRT {version} cannot be installed: {reason}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"TensorRT {version} takes too long to be installed")
