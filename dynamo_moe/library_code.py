"""Which Python modules are libraries: no state that a model's code reads is in their objects."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LIBRARIES = tuple(
    f"{Path(spec.origin).parent.resolve()}{os.sep}"
    for spec in map(find_spec, ("torch", "sympy", "mpmath", "numpy", "custom_ops", "dynamo_moe"))
    if spec is not None and spec.origin is not None
)
_STANDARD = f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_library(module: Any) -> bool:
    """Whether a Python module is of PyTorch and what it needs, of Python, or of this package."""
    file = getattr(module, "__file__", None)
    if module is None or file is not None:
        return file is not None and _is_library_file(file)
    name = module.__name__
    root = name.partition(".")[0]
    return name in sys.builtin_module_names or (name != root and is_library(sys.modules.get(root)))


def is_installed(module: Any) -> bool:
    """Whether a Python module is of an installed package."""
    file = getattr(module, "__file__", None)
    return file is not None and any(name in file for name in _INSTALLED)


@functools.cache
def _is_library_file(file: str) -> bool:
    path = str(Path(file).resolve())
    standard = path.startswith(_STANDARD) and not any(name in path for name in _INSTALLED)
    return standard or path.startswith(_LIBRARIES)
