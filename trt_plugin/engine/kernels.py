"""Which kernels an engine stores, and how the plugin is told while a file is parsed."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from trt_plugin.bundle import Bundle, LayerRecord
from trt_plugin.engine.installed import EngineError, Installed
from trt_plugin.launcher import find_program
from trt_plugin.native import LauncherError

# What the plugin reads while a file is parsed.
_KERNELS = "DYNAMO_MOE_KERNELS"
_ARCHITECTURES = "DYNAMO_MOE_ARCHITECTURES"
# The variables belong to the process: parsers take turns.
_NAMING = threading.Lock()


def choose_kernels(
    found: Installed,
    architectures: Iterable[str | int] | None,
    bundle: Bundle | None,
) -> tuple[list[str], Bundle | None]:
    """Returns the targets, and the programs that the engine stores; None if that is all of them."""
    if bundle is None:
        return _targets(found, architectures, None), None
    allowed = _allowed(bundle)
    targets = _targets(found, architectures, allowed)
    chosen = _chosen(allowed, [each.layer for each in bundle.programs], targets)
    # If it is the same, the plugin reads the given file, and its errors name it.
    return targets, None if chosen == bundle else chosen


def _targets(
    found: Installed,
    architectures: Iterable[str | int] | None,
    bundle: Bundle | None,
) -> list[str]:
    """Returns the names of the architectures to build or store kernels for; none if all will do."""
    from custom_ops.kernels.architectures import architecture

    if architectures is not None:
        if bundle is None and not found.is_rtx:
            raise EngineError(
                f"{found.title} builds for the device that it runs on: give no architectures, or "
                "give them with kernels, or build with TensorRT for RTX"
            )
        names = [architecture(each).name for each in architectures]
    elif bundle is not None and found.is_rtx:
        names = _architectures(bundle)
    else:
        return []
    distinct = list(dict.fromkeys(names))
    found.check_targets(distinct)
    return distinct


def _architectures(bundle: Bundle) -> list[str]:
    return list(dict.fromkeys(f"sm_{each.architecture}" for each in bundle.programs))


def _allowed(bundle: Bundle) -> Bundle:
    """Returns the programs of the architectures that the environment names; all if it names none.

    Raises:
        EngineError: If it names one that the bundle lacks.
    """
    text = os.environ.get(_ARCHITECTURES, "")
    names = [f"sm_{name.removeprefix('sm_')}" for name in text.split(",") if name]
    known = _architectures(bundle)
    for name in names:
        if name not in known:
            raise EngineError(
                f"the environment variable {_ARCHITECTURES} is {text!r}: it must name "
                f"architectures of the bundle, {', '.join(known)}"
            )
    if not names:
        return bundle
    return Bundle(tuple(each for each in bundle.programs if f"sm_{each.architecture}" in names))


def _chosen(bundle: Bundle, layers: Iterable[LayerRecord], targets: Sequence[str]) -> Bundle:
    """Returns the programs that the engine stores: of each layer, those that the targets run.

    Raises:
        EngineError: If a layer has none for a target: the engine would fail there.
    """
    from trt_plugin.bundle.view import layer_text

    if not targets:
        return bundle
    chosen = set()
    for layer in dict.fromkeys(layers):
        for name in targets:
            try:
                found = find_program(bundle.data, layer, int(name.removeprefix("sm_")))
            except LauncherError as error:
                if error.status != "not found":
                    raise
                named = os.environ.get(_ARCHITECTURES)
                narrowed = f", of which {_ARCHITECTURES}={named} leaves others out" if named else ""
                raise EngineError(
                    f"the bundle{narrowed} has no kernels for {name} of the layer "
                    f"{layer_text(layer.to_dict())}: compile it for {', '.join(targets)}"
                ) from error
            chosen.add(found)
    return Bundle(tuple(each for each in bundle.programs if each.data in chosen))


@contextmanager
def kernels_from(
    bundle: str | PathLike[str] | None, chosen: Bundle | None = None
) -> Iterator[str | None]:
    """Tells the plugin where the kernels are; it reads them when the parser creates it.

    Yields the file that it reads; None if the environment decides.

    Args:
        bundle: A bundle's file; None leaves the environment as it is.
        chosen: Those of its programs that the engine stores; None for all.
    """
    if bundle is None:
        with _NAMING:
            yield None
        return
    with tempfile.TemporaryDirectory(prefix="dynamo-moe-") as folder, _NAMING:
        path = Path(bundle).resolve()
        if chosen is not None:
            path = Path(folder) / path.name
            chosen.save(path)
        old = {name: os.environ.get(name) for name in (_KERNELS, _ARCHITECTURES)}
        os.environ[_KERNELS] = str(path)
        # The choice is made. The plugin would want each layer for all that the variable names.
        os.environ.pop(_ARCHITECTURES, None)
        try:
            yield str(path)
        finally:
            for name, value in old.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
