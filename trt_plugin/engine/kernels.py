"""Which kernels an engine stores, and how the plugin gets them while a file is parsed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from trt_plugin.bundle import Bundle, LayerRecord
from trt_plugin.engine.installed import EngineError, Installed
from trt_plugin.launcher import find_program
from trt_plugin.native import LauncherError, call

_ARCHITECTURES = "DYNAMO_MOE_ARCHITECTURES"


def choose_kernels(
    installed: Installed,
    architectures: Iterable[str | int] | None,
    bundle: Bundle | None,
) -> tuple[list[str], Bundle | None]:
    """Returns the targets, and the programs that the engine stores; None without a bundle."""
    if bundle is None:
        return _targets(installed, architectures, None), None
    allowed = _allowed(bundle)
    targets = _targets(installed, architectures, allowed)
    return targets, _chosen(allowed, [program.layer for program in bundle.programs], targets)


def _targets(
    installed: Installed,
    architectures: Iterable[str | int] | None,
    bundle: Bundle | None,
) -> list[str]:
    """Returns the names of the architectures to build or store kernels for; none if all will do."""
    from custom_ops.kernels.architectures import architecture

    if architectures is not None:
        if bundle is None and not installed.is_rtx:
            raise EngineError(
                f"{installed.title} builds for the device that it runs on: give no architectures, "
                "or give them with kernels, or build with TensorRT for RTX"
            )
        names = [architecture(name).name for name in architectures]
    elif bundle is not None and installed.is_rtx:
        names = _architectures(bundle)
    else:
        return []
    distinct = list(dict.fromkeys(names))
    installed.check_targets(distinct)
    return distinct


def _architectures(bundle: Bundle) -> list[str]:
    return list(dict.fromkeys(f"sm_{program.architecture}" for program in bundle.programs))


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
    return Bundle(
        tuple(program for program in bundle.programs if f"sm_{program.architecture}" in names)
    )


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
                data = find_program(bundle.data, layer, int(name.removeprefix("sm_")))
            except LauncherError as error:
                if error.status != "not found":
                    raise
                named = os.environ.get(_ARCHITECTURES)
                narrowed = f", of which {_ARCHITECTURES}={named} leaves others out" if named else ""
                raise EngineError(
                    f"the bundle{narrowed} has no kernels for {name} of the layer "
                    f"{layer_text(layer.to_dict())}: compile it for {', '.join(targets)}"
                ) from error
            chosen.add(data)
    return Bundle(tuple(program for program in bundle.programs if program.data in chosen))


@contextmanager
def giving_kernels(bundle: Bundle | None, name: str) -> Iterator[None]:
    """Gives the plugins that this thread creates their kernels, whatever the environment names.

    A parser creates plugins in the thread that calls it. A node's own ``kernels`` come first.

    Args:
        bundle: The kernels; None: the environment decides.
        name: The bundle's name in the plugin's messages.

    Raises:
        LauncherError: If the plugin cannot read the bundle.
    """
    if bundle is None:
        yield
        return
    data = bundle.data
    call("kernels_begin", os.fsencode(name), data, len(data))
    try:
        yield
    finally:
        call("kernels_end")
