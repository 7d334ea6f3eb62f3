"""The TensorRT plugin: where its library is, and loading it into TensorRT."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["PLUGINS", "PluginLoadError", "library_path", "load"]

#: The plugins' names in TensorRT's registry; version "1", namespace "".
PLUGINS = ("DroplessMoE", "DroplessMoEExperts")

_MODULES = ("tensorrt", "tensorrt_lean_bindings")
_OLDEST = (10, 9)
_NEWEST_MAJOR = 11


class PluginLoadError(RuntimeError):
    """TensorRT cannot use the plugin; the message says why, and what to do."""


def library_path() -> Path:
    """Returns the file of the plugin's library, for ``trtexec --dynamicPlugins``, or C++.

    Raises:
        FileNotFoundError: If it was not built: it is on Linux, when dynamo-moe is installed.
    """
    path = Path(str(files("trt_plugin") / "libdynamo_moe.so"))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the library is built when dynamo-moe is installed on Linux; "
            "install it there again with a C++ compiler"
        )
    return path


def load(registry: Any = None) -> Any:
    """Registers the plugins with TensorRT, before a network is parsed or an engine loaded.

    Args:
        registry: TensorRT's ``IPluginRegistry``, such as an engine's or a runtime's own; by default
            that of the module ``tensorrt``, else ``tensorrt_lean_bindings``: the one imported
            already comes first.

    Returns:
        The registry.

    Raises:
        PluginLoadError: If TensorRT is missing or of another version, or refuses the library, or if
            the plugins are registered already.
        FileNotFoundError: If the library was not built.
    """
    path = library_path()
    module = _module(registry)
    _check_version(module)
    if registry is None:
        registry = module.get_plugin_registry()
    present = [name for name in PLUGINS if registry.get_creator(name, "1", "") is not None]
    if present:
        raise PluginLoadError(
            f"TensorRT's registry has {' and '.join(present)} already: load the library once, by "
            "trt_plugin.load() or by an engine that holds it"
        )
    registry.load_library(str(path))
    missing = [name for name in PLUGINS if registry.get_creator(name, "1", "") is None]
    if missing:
        raise PluginLoadError(
            f"TensorRT {module.__version__} did not register {' and '.join(missing)} of {path}; its "
            "logger says why"
        )
    return registry


def _module(registry: Any) -> ModuleType:
    """The module of TensorRT that a registry belongs to, or the one to use."""
    if registry is not None:
        return sys.modules[type(registry).__module__.partition(".")[0]]
    for name in sorted(_MODULES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if error.name != name:
                raise PluginLoadError(f"{name} cannot be imported: {error}") from error
    raise PluginLoadError(
        f"neither {' nor '.join(_MODULES)} is installed: install TensorRT, or load the library "
        f"{library_path()} from C++"
    )


def _check_version(module: ModuleType) -> None:
    match = re.match(r"(\d+)\.(\d+)", module.__version__)
    version = tuple(map(int, match.groups())) if match else (0, 0)
    if version < _OLDEST or version[0] > _NEWEST_MAJOR:
        raise PluginLoadError(
            f"the plugin works with TensorRT {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST_MAJOR}.x, "
            f"{module.__name__} is {module.__version__}"
        )
