"""Whose code a model's is: that of PyTorch and what it needs, of installed packages, or its own."""

from __future__ import annotations

import collections
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
"""Where the code is that watches a trace."""

# Whose code a trace runs beside the model's: no state that a model reads is there.
_LIBRARIES = tuple(
    f"{Path(spec.origin).parent.resolve()}{os.sep}"
    for spec in map(find_spec, ("torch", "sympy", "mpmath", "numpy", "custom_ops", "dynamo_moe"))
    if spec is not None and spec.origin is not None
)
_STANDARD = f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}"
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.cache
def is_library_file(file: str | None) -> bool:
    """Whether a file is of PyTorch and what it needs, of Python, or of this package."""
    if file is None:
        return False
    if file.startswith("<"):
        return file.startswith("<frozen ")
    path = str(Path(file).resolve())
    standard = path.startswith(_STANDARD) and not any(each in path for each in _INSTALLED)
    return standard or path.startswith(_LIBRARIES)


@functools.cache
def is_installed_file(file: str | None) -> bool:
    """Whether a file is of an installed package, which changes between versions alone."""
    return file is not None and any(each in file for each in _INSTALLED)


def file_of(code: types.CodeType, names: Mapping[str, Any]) -> str | None:
    """Returns the file of a function's code; of generated code, that of the function's module."""
    file = code.co_filename
    if not file.startswith("<") or file.startswith("<frozen "):
        return file
    makes_tuples = code.co_names == ("_tuple_new",) and names.get("_tuple_new") == tuple.__new__
    if makes_tuples and not code.co_freevars:  # Of a named tuple, in a namespace of its own.
        return collections.__file__
    module = sys.modules.get(str(names.get("__name__")))
    of_module = module is not None and vars(module) is names
    return getattr(module, "__file__", None) if of_module else None


def is_library(module: Any) -> bool:
    """Whether a Python module is of PyTorch and what it needs, of Python, or of this package."""
    file = getattr(module, "__file__", None)
    if module is None or file is not None:
        return is_library_file(file)
    name = module.__name__
    root = name.partition(".")[0]
    return name in sys.builtin_module_names or (name != root and is_library(sys.modules.get(root)))
