"""Loads the TensorRT plugin into TensorRT."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trt_plugin.native import call, library_path

#: The plugins' names in TensorRT's registry; namespace "".
PLUGINS = ("DroplessMoE", "DroplessMoEExperts")
#: The versions of each: the second for layers whose experts are offloaded, the third for those
#: whose routers round, the fourth for both.
VERSIONS = ("1", "2", "3", "4")

_MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "tensorrt_lean_bindings")
_OLDEST = (10, 9)
_NEWEST_MAJOR = 11
# TensorRT for RTX counts its versions anew.
_OLDEST_RTX = (1, 7)
_NEWEST_MAJOR_RTX = 1


class PluginLoadError(RuntimeError):
    """TensorRT cannot use the plugin; the message says why, and what to do."""


def load(registry: Any = None) -> Any:
    """Registers the plugins with TensorRT, before a network is parsed or an engine loaded.

    Args:
        registry: TensorRT's ``IPluginRegistry``, such as an engine's or a runtime's own. By default
            that of the first of the modules ``tensorrt``, ``tensorrt_rtx``,
            ``tensorrt_rtx_bindings`` and ``tensorrt_lean_bindings`` that is installed; one that is
            already imported comes first.

    Returns:
        The registry.

    Raises:
        PluginLoadError: If TensorRT is missing, has an unsupported version or refuses the library,
            or if the plugins are already registered.
        FileNotFoundError: If the library was not built.
    """
    path = library_path()
    module = _module(registry)
    _check_version(module)
    if registry is None:
        registry = module.get_plugin_registry()
    present = [name for name in PLUGINS if any(_versions(registry, name))]
    if present:
        raise PluginLoadError(
            f"TensorRT's registry already has {' and '.join(present)}: load the library once, by "
            "trt_plugin.load() or by an engine that holds it"
        )
    registry.load_library(str(path))
    missing = [name for name in PLUGINS if not all(_versions(registry, name))]
    if missing:
        raise PluginLoadError(
            f"TensorRT {module.__version__} did not register {' and '.join(missing)} of {path}: "
            "its log says why"
        )
    return registry


@contextmanager
def sharing_kernels() -> Iterator[None]:
    """Lets the engine of a network store the kernels of equal layers once.

    Without it, each layer's kernels are stored with the layer. With it, one of the layers stores
    them and the others name them. The network is parsed inside, in the calling thread; it may be
    built later.

    Raises:
        FileNotFoundError: If the library was not built.

    Example:
        .. code-block:: python

            with trt_plugin.sharing_kernels():
                parsed = parser.parse_from_file("model.onnx")
    """
    call("sharing_begin")
    try:
        yield
    finally:
        call("sharing_end")


def _versions(registry: Any, name: str) -> list[bool]:
    """Which versions of a plugin a registry has."""
    return [registry.get_creator(name, version, "") is not None for version in VERSIONS]


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
        f"none of {', '.join(_MODULES)} is installed: install TensorRT, or load the library "
        f"{library_path()} from C++"
    )


def _check_version(module: ModuleType) -> None:
    match = re.match(r"(\d+)\.(\d+)", module.__version__)
    version = tuple(map(int, match.groups())) if match else (0, 0)
    is_rtx = module.__name__.startswith("tensorrt_rtx")
    oldest, newest = (_OLDEST_RTX, _NEWEST_MAJOR_RTX) if is_rtx else (_OLDEST, _NEWEST_MAJOR)
    if version < oldest or version[0] > newest:
        raise PluginLoadError(
            f"the plugin works with TensorRT {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST_MAJOR}.x and "
            f"TensorRT for RTX {_OLDEST_RTX[0]}.{_OLDEST_RTX[1]} to {_NEWEST_MAJOR_RTX}.x, "
            f"{module.__name__} is {module.__version__}"
        )
