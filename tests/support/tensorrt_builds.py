"""Engines of ONNX files, built by TensorRT for RTX in a process each, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorrt_wheels import RTX, environment

_SCRIPT = Path(__file__).with_name("tensorrt_build.py")

Shape = Sequence[int]


@dataclass(frozen=True)
class Build:
    """What the parser and the builder said of a file.

    Attributes:
        parsed: Whether the parser took it.
        parse_errors: The parser's reasons, with node and operator.
        layers: The network's layers: name and type.
        plugins: Those that are plugins: name, plugin, dtypes of the inputs and the output, and the
            output's shape.
        inputs: Dtype and shape by name, -1 for a symbolic size.
        outputs: The same of the outputs.
        profiles: Smallest, usual and largest shape of each input with symbolic sizes.
        parse_seconds: Time of the parser.
        build_seconds: Time of the builder.
        bytes: Size of the engine; 0: there is none.
        errors: What was logged as an error, and how the process ended if it ended early.
        warnings: What was logged as a warning.
        stderr: What the process wrote there.
    """

    parsed: bool
    parse_errors: tuple[str, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    plugins: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...]], ...] = ()
    inputs: Mapping[str, tuple[str, list[int]]] | None = None
    outputs: Mapping[str, tuple[str, list[int]]] | None = None
    profiles: tuple[Mapping[str, list[list[int]]], ...] = ()
    parse_seconds: float = 0.0
    build_seconds: float = 0.0
    bytes: int = 0
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stderr: str = ""

    @property
    def built(self) -> bool:
        """Whether there is an engine."""
        return self.bytes > 0

    def reason(self) -> str:
        """Returns why there is no engine, for a message."""
        return "; ".join((*self.parse_errors, *self.errors)) or "nothing was logged"


def parse(onnx: Path, *, library: Path | None = None) -> Build:
    """Parses a file; skips the test where TensorRT for RTX cannot be had."""
    request = {"engine": None, "library": _text(library), "share_kernels": False}
    return _run({"onnx": str(onnx), **request}, {})


def build(
    onnx: Path,
    *compute_capabilities: str,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None,
    sizes: tuple[int, int, int] = (1, 4, 8),
    profiles: int = 1,
    engine: Path | None = None,
    library: Path | None = None,
    serialized_plugins: Sequence[Path] = (),
    flags: Sequence[str] = (),
    share_kernels: bool = False,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Build:
    """Builds an engine of a file; skips the test where TensorRT for RTX cannot be had.

    Args:
        onnx: The file.
        compute_capabilities: What the engine is for, as in ``"SM89", "SM120"``; the builder knows
            SM75, 80, 86, 89, 120 and 121.
        shapes: Smallest, usual and largest shape of inputs with symbolic sizes.
        sizes: Those of every symbolic size of the other inputs.
        profiles: How many equal profiles.
        engine: Where to write the engine; None: it is thrown away.
        library: A plugin library to load first.
        serialized_plugins: Libraries that the engine holds.
        flags: Names of ``BuilderFlag``.
        share_kernels: Whether equal layers store their programs once.
        variables: More environment variables of the process.
        timeout: Most seconds; None: those that pytest has for a test.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "onnx": str(onnx),
            "engine": str(engine or Path(folder) / "engine"),
            "library": _text(library),
            "compute_capabilities": compute_capabilities or ("SM89",),
            "shapes": dict(shapes or {}),
            "sizes": sizes,
            "profiles": profiles,
            "serialized_plugins": [str(path) for path in serialized_plugins],
            "flags": list(flags),
            "share_kernels": share_kernels,
        }
        return _run(request, variables or {}, timeout)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run(
    request: Mapping[str, object], variables: Mapping[str, str], timeout: float | None = None
) -> Build:
    command = [sys.executable, str(_SCRIPT), json.dumps(request)]
    own = {**environment(RTX), **variables}
    try:
        ran = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Build(parsed=False, errors=(f"stopped after {timeout:.0f} s",))
    if ran.returncode:
        said = ran.stderr.strip().splitlines()[-5:]
        return Build(parsed=False, errors=(f"ended with status {ran.returncode}", *said))
    report = json.loads(ran.stdout.splitlines()[-1])
    for name in ("parse_errors", "errors", "warnings", "profiles"):
        report[name] = tuple(report[name])
    report["layers"] = tuple((name, kind) for name, kind in report["layers"])
    report["plugins"] = tuple(
        (*names, tuple(dtypes), tuple(shape)) for *names, dtypes, shape in report["plugins"]
    )
    return Build(**report, stderr=ran.stderr)
