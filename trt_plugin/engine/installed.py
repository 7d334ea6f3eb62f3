"""Which TensorRT is installed, and the plugin's library in it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trt_plugin.plugin import PLUGINS, PluginLoadError, load

__all__ = ["BUILDERS", "EngineError", "Installed", "installed_tensorrt", "load_plugin"]

#: Names of the builders: TensorRT, and TensorRT for RTX.
BUILDERS = ("tensorrt", "rtx")

# Each builder's module under its possible names.
_MODULES = {"tensorrt": ("tensorrt",), "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
_TITLES = {"tensorrt": "TensorRT", "rtx": "TensorRT for RTX"}
_INSTALL = {
    "tensorrt": "pip install 'dynamo-moe[tensorrt]'",
    "rtx": "pip install 'dynamo-moe[tensorrt-rtx]'",
}


class EngineError(RuntimeError):
    """An engine cannot be built, loaded or run; the message says why, and what to do."""


@dataclass(frozen=True)
class Installed:
    """A TensorRT that can be imported.

    Attributes:
        name: One of :data:`BUILDERS`.
        module: Its Python module.
    """

    name: str
    module: Any

    @property
    def is_rtx(self) -> bool:
        """Whether it is TensorRT for RTX."""
        return self.name == "rtx"

    @property
    def title(self) -> str:
        """Name and version for people."""
        return f"{_TITLES[self.name]} {self.module.__version__}"


def installed_tensorrt(what: str, name: str | None = None) -> Installed:
    """Returns the TensorRT to use.

    Args:
        what: What needs it, for the error.
        name: One of :data:`BUILDERS`; by default TensorRT if it is installed, and else TensorRT for
            RTX.

    Raises:
        EngineError: If it is not installed or cannot be imported.
        ValueError: If there is no builder of this name.
    """
    if name is not None and name not in BUILDERS:
        raise ValueError(f"builder must be one of {', '.join(BUILDERS)}; got {name!r}")
    for candidate in (name,) if name else BUILDERS:
        for module in _MODULES[candidate]:
            if module in sys.modules or find_spec(module) is not None:
                return _imported(candidate, module)
    wanted = (name,) if name else BUILDERS
    raise EngineError(
        f"{what} needs {' or '.join(_TITLES[each] for each in wanted)}: "
        f"{', or '.join(_INSTALL[each] for each in wanted)}; the lean runtime is not enough"
    )


def load_plugin(found: Installed) -> None:
    """Loads the plugin's library, unless the process has it already.

    Raises:
        EngineError: If TensorRT does not take the library.
        FileNotFoundError: If the library is missing.
    """
    registry = found.module.get_plugin_registry()
    if registry.get_creator(PLUGINS[0], "1", "") is not None:
        return
    if found.is_rtx:
        _name_library()
    try:
        load(registry)
    except PluginLoadError as error:
        raise EngineError(str(error)) from error


def _imported(name: str, module: str) -> Installed:
    try:
        return Installed(name, importlib.import_module(module))
    except ImportError as error:
        raise EngineError(f"{module} cannot be imported: {error}") from error


def _name_library() -> None:
    """Makes the link to TensorRT for RTX's library that its parser opens.

    The wheel has the library as ``libtensorrt_rtx.so.1``. Before the parser adds a plugin, it opens
    ``libtensorrt_rtx.so``, and it ends the process if there is none.
    """
    spec = find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        # Not the wheel: an installation of the SDK has both names.
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    link = folder / "libtensorrt_rtx.so"
    if link.exists() or not (folder / f"{link.name}.1").exists():
        return
    try:
        link.symlink_to(f"{link.name}.1")
    except FileExistsError:
        # Another process was first.
        return
    except OSError as error:
        raise EngineError(
            f"TensorRT for RTX would end this process: its parser looks for {link}, and the link "
            f"cannot be made here ({error.strerror}). Make it with: "
            f"ln -s {link.name}.1 {link}"
        ) from error
