"""Stand-ins for CUDA's libraries, with which ONNX Runtime's CUDA provider loads without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from standin import ROOT

_RUNTIME = ROOT / "tests" / "native" / "cuda_runtime.cc"
#: Of the driver, which :func:`standin.standin` is, and of compilers.
_OTHERS = re.compile(r"lib(cuda\.so|c\.|m\.|dl|rt|pthread|stdc\+\+|gcc_s|onnxruntime)|ld-linux")


def load(provider: Path, folder: Path) -> ctypes.CDLL:
    """Makes and loads what a provider's library links to; returns CUDA's runtime.

    Args:
        provider: ``libonnxruntime_providers_cuda.so``.
        folder: Where the libraries are made.
    """
    wanted = _undefined(provider)
    runtime = None
    for library in _needed(provider):
        is_runtime = library.startswith("libcudart")
        known = set(re.findall(r"\b(\w+)\(", _RUNTIME.read_text())) if is_runtime else set()
        rest = folder / f"{library}.cc"
        rest.write_text(_functions(sorted(wanted[library] - known)))
        script = folder / f"{library}.map"
        script.write_text(f"{library} {{ global: *; }};\n")
        path = folder / library
        command = ["g++", "-std=c++17", "-fPIC", "-shared", f"-Wl,-soname,{library}"]
        command += [f"-Wl,--version-script={script}", str(rest), "-o", str(path)]
        command += [str(_RUNTIME), "-ldl"] if is_runtime else []
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        runtime = loaded if is_runtime else runtime
    assert runtime is not None
    return runtime


def _functions(names: list[str]) -> str:
    """Functions that succeed; those that create something give an address."""
    text = 'extern "C" {\nstatic void* object[64];\n'
    for name in names:
        if "Create" in name:
            text += f"int {name}(void** made) {{ *made = object; return 0; }}\n"
        else:
            text += f"int {name}() {{ return 0; }}\n"
    return text + "}\n"


def _needed(library: Path) -> list[str]:
    found = re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", str(library)))
    return [name for name in found if not _OTHERS.match(name)]


def _undefined(library: Path) -> dict[str, set[str]]:
    """The names of functions that a library takes from others, by their version: its name."""
    found = defaultdict(set)
    pattern = r"\*UND\*\s+\w+\s+\(?([\w.]+)\)?\s+(\w+)$"
    for version, name in re.findall(pattern, _said("objdump", "-T", str(library)), re.MULTILINE):
        found[version].add(name)
    return found


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
