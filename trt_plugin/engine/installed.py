"""Which TensorRT is installed, and the plugin's library in it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trt_plugin.plugin import PLUGINS, PluginLoadError, load

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

    def check_targets(self, names: Iterable[str]) -> None:
        """Checks that it builds for architectures, such as ``["sm_89"]``.

        TensorRT builds for the device that it runs on, so it refuses none.

        Raises:
            EngineError: If TensorRT for RTX does not build for one of them.
        """
        if not self.is_rtx:
            return
        known = [
            f"sm_{name.removeprefix('SM')}"
            for name in self.module.ComputeCapability.__members__
            if name.startswith("SM")
        ]
        for name in names:
            if name not in known:
                raise EngineError(
                    f"{self.title} does not build for {name}; it builds for {', '.join(known)}"
                )


def installed_tensorrt(what: str, name: str | None = None) -> Installed:
    """Returns the TensorRT to use.

    Args:
        what: The purpose, for the error.
        name: One of :data:`BUILDERS`; by default TensorRT if it is installed, and else TensorRT for
            RTX.

    Raises:
        EngineError: If it is not installed or cannot be imported.
        ValueError: If there is no builder of this name.
    """
    if name is not None and name not in BUILDERS:
        raise ValueError(f"builder must be one of {', '.join(BUILDERS)}; got {name!r}")
    for candidate in (name,) if name else BUILDERS:
        module = _module(candidate)
        if module is not None:
            return _imported(candidate, module)
    wanted = (name,) if name else BUILDERS
    raise EngineError(
        f"{what} needs {' or '.join(_TITLES[builder] for builder in wanted)}: "
        f"{', or '.join(_INSTALL[builder] for builder in wanted)}; the lean runtime is not enough"
    )


def is_installed(name: str) -> bool:
    """Whether one of :data:`BUILDERS` is installed; it is not imported."""
    return _module(name) is not None


def load_plugin(installed: Installed) -> None:
    """Loads the plugin's library, unless the process has it already.

    Raises:
        EngineError: If TensorRT does not take the library, or its parser could not add the plugin.
        FileNotFoundError: If the library is missing.
    """
    # Whoever loaded the plugin: the parser opens TensorRT for RTX's library when it adds one.
    if installed.is_rtx:
        _name_library()
    if is_plugin_loaded(installed):
        return
    try:
        load(installed.module.get_plugin_registry())
    except PluginLoadError as error:
        raise EngineError(str(error)) from error


def is_plugin_loaded(installed: Installed) -> bool:
    """Whether TensorRT's registry has the plugin."""
    return installed.module.get_plugin_registry().get_creator(PLUGINS[0], "1", "") is not None


def _module(name: str) -> str | None:
    """The name of a builder's module that is installed; None if there is none."""
    for module in _MODULES[name]:
        if module in sys.modules or find_spec(module) is not None:
            return module
    return None


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
    if link.is_symlink():
        raise EngineError(_no_library(link, f"it is a link to {link.readlink()}, which is missing"))
    try:
        link.symlink_to(f"{link.name}.1")
    except FileExistsError:
        # Another process was first.
        return
    except OSError as error:
        reason = f"the link cannot be made here ({error.strerror})"
        raise EngineError(_no_library(link, reason)) from error


def _no_library(link: Path, reason: str) -> str:
    return (
        f"TensorRT for RTX would end this process: its parser looks for {link}, and {reason}. Make "
        f"it with: ln -sf {link.name}.1 {link}"
    )
