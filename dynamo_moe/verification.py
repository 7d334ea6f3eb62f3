"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from custom_ops.options import RouterOptions
from custom_ops.routing import route
from dynamo_moe import _layers, _schemas
from dynamo_moe._inputs import random_inputs
from dynamo_moe.tolerances import Tolerance, tolerance_for

if TYPE_CHECKING:
    import onnxruntime
    from rich.table import Table

__all__ = ["CaseResult", "VerificationError", "VerificationReport", "verify"]

_WATCHED = "dynamo_moe.watched."


@dataclass(frozen=True)
class CaseResult:
    """One set of inputs.

    Attributes:
        shapes: The inputs' shapes by ONNX input.
        max_error: Worst element's error over all outputs, relative to the expected output's RMS.
        rms_error: RMS of the errors, relative likewise.
        routing_agreement: Fraction of (token, layer) pairs whose set of experts agrees, 0 to 1;
            None where the file names no MoE layers.
        passed: Whether the errors keep the tolerance.
    """

    shapes: dict[str, tuple[int, ...]]
    max_error: float
    rms_error: float
    routing_agreement: float | None
    passed: bool


@dataclass(frozen=True)
class VerificationReport:
    """What :func:`verify` saw."""

    path: Path
    runtime: str
    tolerance: Tolerance
    cases: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every case keeps the tolerance."""
        return all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return {**asdict(self), "path": str(self.path), "passed": self.passed}

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        verdict = "[green]agrees[/]" if self.passed else "[red]DIFFERS[/]"
        title = f"{escape(str(self.path))} in {self.runtime}: {verdict}"
        table = Table(title=title, title_justify="left")
        for column in ("inputs", "max error", "RMS error", "same routing", ""):
            table.add_column(column)
        for case in self.cases:
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in case.shapes.items())
            agreement = case.routing_agreement
            table.add_row(
                shapes,
                f"{case.max_error:.1e}",
                f"{case.rms_error:.1e}",
                "-" if agreement is None else f"{agreement:.2%}",
                "[green]ok[/]" if case.passed else "[red]fails[/]",
            )
        table.caption = f"tolerance: max {self.tolerance.max:.0e}, RMS {self.tolerance.rms:.0e}"
        return table


class VerificationError(AssertionError):
    """The file does not compute what the model computes; ``report`` says where."""

    def __init__(self, report: VerificationReport) -> None:
        worst = max(report.cases, key=lambda case: (not case.passed, case.max_error))
        super().__init__(
            f"{report.path} differs from the model: max error {worst.max_error:.1e} "
            f"(tolerance {report.tolerance.max:.0e}), RMS {worst.rms_error:.1e} "
            f"({report.tolerance.rms:.0e}) on inputs {worst.shapes}"
        )
        self.report = report


def verify(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    inputs: Sequence[tuple[Any, ...] | Mapping[str, Any]] | None = None,
    *,
    tolerance: Tolerance | None = None,
) -> VerificationReport:
    """Runs an exported file in ONNX Runtime and the model in PyTorch, and compares.

    Args:
        path: The ONNX file.
        model: The model that it was exported from, on the CPU; run as in ``eval()``.
        inputs: Cases to run, each positional arguments or a mapping of keyword arguments. None:
            random ones of several batch sizes and lengths, drawn from the file's inputs: floats
            from a normal distribution, integers from 0..9, booleans true.
        tolerance: None: by the lowest precision among the file's weights.

    Returns:
        Errors and routing agreement of every case, all within the tolerance.

    Raises:
        VerificationError: If an error passes the tolerance.
        FileNotFoundError: If the file does not exist.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If a case does not fit the file's inputs.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    import onnxruntime

    proto = onnx.load(path, load_external_data=False)
    cases = random_inputs(proto) if inputs is None else list(inputs)
    bound = tolerance or tolerance_for(_weight_dtypes(proto), approximate_gelu=_uses_ort_moe(proto))
    session = onnxruntime.InferenceSession(path, _session_options())
    with _routing_session(proto, path) as routing:
        results = tuple(_run_case(session, routing, model, case, bound) for case in cases)
    report = VerificationReport(path, f"ONNX Runtime {onnxruntime.__version__}", bound, results)
    if not report.passed:
        raise VerificationError(report)
    return report


@contextmanager
def _routing_session(
    proto: onnx.ModelProto, path: Path
) -> Iterator[onnxruntime.InferenceSession | None]:
    """Yields a session whose outputs decide each MoE layer's routing, in order of the layers.

    A session of its own: another output changes how ONNX Runtime uses memory, which has hidden an
    error in its MoE. None where the file names no layers, or optimisation removed such a value.
    """
    import onnxruntime

    layers = _layers.from_metadata({prop.key: prop.value for prop in proto.metadata_props})
    names = [
        layer.tokens if layer.op_type == _schemas.DROPLESS else layer.inputs[1] for layer in layers
    ]
    produced = {name for node in proto.graph.node for name in node.output}
    produced |= {graph_input.name for graph_input in proto.graph.input}
    if not names or not set(names) <= produced:
        yield None
        return
    del proto.graph.output[:]
    for place, name in enumerate(names):  # Two layers may share their tokens, an output not.
        watched = f"{_WATCHED}{place}"
        proto.graph.node.append(onnx.helper.make_node("Identity", [name], [watched]))
        proto.graph.output.append(onnx.ValueInfoProto(name=watched))
    # External data is found relative to the model's folder.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".verify.", suffix=".onnx") as beside:
        beside.write(proto.SerializeToString())
        beside.flush()
        yield onnxruntime.InferenceSession(beside.name, _session_options())


def _session_options() -> onnxruntime.SessionOptions:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def _run_case(
    session: onnxruntime.InferenceSession,
    routing: onnxruntime.InferenceSession | None,
    model: torch.nn.Module,
    case: tuple[Any, ...] | Mapping[str, Any],
    bound: Tolerance,
) -> CaseResult:
    feeds = _feeds(session, case)
    expected, routed = _run_torch(model, case)
    results = session.run(None, feeds)
    if len(results) != len(expected):
        raise ValueError(f"the file has {len(results)} outputs, the model {len(expected)}")
    errors = [
        _errors(torch.from_numpy(result), reference)
        for result, reference in zip(results, expected, strict=True)
    ]
    max_error = max(error for error, _ in errors)
    rms_error = max(error for _, error in errors)
    watched = [] if routing is None else routing.run(None, feeds)
    return CaseResult(
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        max_error=max_error,
        rms_error=rms_error,
        routing_agreement=_agreement(routed, [torch.from_numpy(value) for value in watched]),
        passed=max_error <= bound.max and rms_error <= bound.rms,
    )


def _feeds(
    session: onnxruntime.InferenceSession, case: tuple[Any, ...] | Mapping[str, Any]
) -> dict[str, np.ndarray]:
    names = [graph_input.name for graph_input in session.get_inputs()]
    if isinstance(case, Mapping) and set(case) == set(names):
        return {name: value.numpy(force=True) for name, value in case.items()}
    leaves = [leaf for leaf in pytree.tree_leaves(case) if isinstance(leaf, Tensor)]
    if len(leaves) != len(names):
        raise ValueError(
            f"a case must hold one tensor per input of the file ({', '.join(names)}); "
            f"got {len(leaves)}"
        )
    return {name: leaf.numpy(force=True) for name, leaf in zip(names, leaves, strict=True)}


def _run_torch(
    model: torch.nn.Module, case: tuple[Any, ...] | Mapping[str, Any]
) -> tuple[list[Tensor], list[_Routing]]:
    recorder = _RoutingRecorder()
    training = model.training
    try:
        with torch.no_grad(), recorder:
            model.eval()
            result = model(**case) if isinstance(case, Mapping) else model(*case)
    finally:
        model.train(training)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return leaves, recorder.routings


class _Routing:
    """How one layer of the PyTorch model chose experts, to be replayed on other tokens."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._router: tuple[Tensor, Tensor | None, RouterOptions] | None = None
        if func is torch.ops.moe.experts.default:
            self.ids = args[1].reshape(-1, args[1].shape[-1])
            return
        fields = ("scoring", "renormalize", "routed_scaling")
        options = RouterOptions(
            args[6], **{name: kwargs[name] for name in fields if name in kwargs}
        )
        self._router = (args[1], args[7] if len(args) > 7 else None, options)
        self.ids = self.ids_of(args[0])

    def ids_of(self, watched: Tensor) -> Tensor:
        """Returns the ids ``[T, K]`` that follow from the watched value: tokens, or ids."""
        rows = watched.reshape(-1, watched.shape[-1])
        if self._router is None:
            return rows
        weight, bias, options = self._router
        return route(rows, weight, bias, options)[0]


class _RoutingRecorder(TorchDispatchMode):
    """Notes the routing of every MoE operator that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not.
        self.routings: list[_Routing] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.moe.dropless.default, torch.ops.moe.experts.default):
            self.routings.append(_Routing(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _agreement(routings: list[_Routing], watched: list[Tensor]) -> float | None:
    if not watched or len(watched) != len(routings):
        return None
    same = [
        (routing.ids.sort(dim=-1)[0] == routing.ids_of(value).sort(dim=-1)[0]).all(dim=-1)
        for routing, value in zip(routings, watched, strict=True)
    ]
    return float(torch.cat(same).double().mean())


def _errors(result: Tensor, expected: Tensor) -> tuple[float, float]:
    if result.shape != expected.shape:
        raise ValueError(
            f"the file returns {list(result.shape)} where the model returns {list(expected.shape)}"
        )
    if expected.numel() == 0:
        return 0.0, 0.0
    difference = (result.double() - expected.double()).abs()
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    return float(difference.max() / scale), float(difference.square().mean().sqrt() / scale)


def _weight_dtypes(proto: onnx.ModelProto) -> set[torch.dtype]:
    dtypes = {
        onnx.TensorProto.DOUBLE: torch.float64,
        onnx.TensorProto.FLOAT: torch.float32,
        onnx.TensorProto.FLOAT16: torch.float16,
        onnx.TensorProto.BFLOAT16: torch.bfloat16,
    }
    # Constants made by the exporter are small and may be wider than the weights.
    found = {t.data_type for t in proto.graph.initializer if len(t.dims) >= 2}
    return {dtypes[data_type] for data_type in found if data_type in dtypes}


def _uses_ort_moe(proto: onnx.ModelProto) -> bool:
    return any(
        node.domain == "com.microsoft"
        and any(attribute.s == b"gelu" for attribute in node.attribute)
        for node in proto.graph.node
    )
