"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import inspect
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
from onnx import external_data_helper
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import custom_ops  # noqa: F401  Registers torch.ops.moe.
from custom_ops.options import RouterOptions
from custom_ops.routing import route
from dynamo_moe import _layers, _schemas
from dynamo_moe._files import load_graph
from dynamo_moe._inputs import random_inputs
from dynamo_moe._modes import check_model, evaluating
from dynamo_moe.inspection import all_nodes
from dynamo_moe.tolerances import Tolerance, tolerance_for

if TYPE_CHECKING:
    import onnxruntime
    from rich.table import Table

__all__ = ["CaseResult", "VerificationError", "VerificationReport", "verify"]

# Of operators that ONNX Runtime has.
_RUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


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
            inputs = [f"{name} {list(shape)}" for name, shape in case.shapes.items()]
            more = [f"and {len(inputs) - 3} more"] if len(inputs) > 4 else []
            shapes = ", ".join(inputs[:3] + more if more else inputs)
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
        ValueError: If a case does not fit the file's inputs or the model, or the file has a node
            that ONNX Runtime does not know and that has no body.
        TypeError: If the model is not a module, or ``inputs`` is not a sequence of tuples or
            mappings.
    """
    check_model(model)
    path = Path(path)
    import onnxruntime

    proto = load_graph(path)
    cases = random_inputs(proto) if inputs is None else list(inputs)
    if not cases:
        raise ValueError("inputs holds no case: nothing would be verified")
    for case in cases:
        if not isinstance(case, (tuple, Mapping)):
            raise TypeError(
                "inputs must be a sequence of cases, each a tuple or a mapping, as in [(x,)]; "
                f"got a case of type {type(case).__name__}"
            )
    bound = tolerance or tolerance_for(
        _weight_dtypes(proto), approximate_gelu=_approximates_gelu(proto)
    )
    session = _session(path, proto)
    with _routing_session(proto, path) as routing:
        try:
            results = tuple(_run_case(session, routing, model, case, bound) for case in cases)
        except IndexError as error:  # Such as random ids beyond an embedding.
            raise ValueError(
                f"the model takes no such inputs ({error}): pass inputs of your own"
            ) from error
    report = VerificationReport(path, f"ONNX Runtime {onnxruntime.__version__}", bound, results)
    if not report.passed:
        raise VerificationError(report)
    return report


def _session(path: Path, proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(path, _session_options())
    except Exception as error:  # ONNX Runtime's exceptions have no base class of their own.
        functions = {(function.domain, function.name) for function in proto.functions}
        bodiless = [
            f"{node.domain}::{node.op_type}"
            for node in all_nodes(proto.graph.node)
            if node.domain not in _RUNTIME_DOMAINS and (node.domain, node.op_type) not in functions
        ]
        if not bodiless:
            raise
        raise ValueError(
            f"ONNX Runtime cannot run {path}: {bodiless[0]} has no body in the file. Give "
            "register_op a body of standard operators, and export again"
        ) from error


@contextmanager
def _routing_session(
    proto: onnx.ModelProto, path: Path
) -> Iterator[onnxruntime.InferenceSession | None]:
    """Yields a session whose outputs decide each MoE layer's routing, in order of the layers.

    A session of its own: another output changes how ONNX Runtime uses memory, which has hidden an
    error in its MoE. None where the file names no layers, or optimisation removed such a value.
    """
    import onnxruntime

    layers = _layers_of(proto)
    known = {name for node in proto.graph.node for name in node.output}
    known |= {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    used = {name for layer in layers for name in _routing_inputs(layer)}
    if not layers or not used <= known:
        yield None
        return
    del proto.graph.output[:]
    for place, layer in enumerate(layers):
        _watch_routing(proto.graph, layer, f"dynamo_moe.layer{place}")
    if not any(external_data_helper.uses_external_data(t) for t in proto.graph.initializer):
        yield onnxruntime.InferenceSession(proto.SerializeToString(), _session_options())
        return
    # External data is found relative to the model's folder.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".verify.", suffix=".onnx") as beside:
        beside.write(proto.SerializeToString())
        beside.flush()
        yield onnxruntime.InferenceSession(beside.name, _session_options())


def _routing_inputs(layer: _layers.Layer) -> list[str]:
    """The values of the graph that decide the layer's routing."""
    if layer.op_type == _schemas.EXPERTS:
        return [layer.inputs[1]]
    return [name for name in (*layer.inputs[:2], *layer.inputs[4:5]) if name]


def _watch_routing(graph: onnx.GraphProto, layer: _layers.Layer, name: str) -> None:
    """Adds the layer's expert ids, as the file's own tokens and router give them, as an output.

    The top-k of logits is that of their scores: every scoring is monotonic.
    """

    def add(op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{name}.{len(graph.node)}.{output}" for output in range(outputs)]
        graph.node.append(onnx.helper.make_node(op_type, inputs, names, **attributes))
        return names[-1]

    inputs = _routing_inputs(layer)
    ids = inputs[0]
    if layer.op_type == _schemas.DROPLESS:
        tokens, weight, *bias = (add("Cast", value, to=onnx.TensorProto.FLOAT) for value in inputs)
        logits = add("MatMul", tokens, add("Transpose", weight, perm=[1, 0]))
        for value in bias:
            logits = add("Add", logits, value)
        top_k = add("Constant", value_ints=[layer.attributes["top_k"]])
        ids = add("TopK", logits, top_k, outputs=2)
    graph.output.append(onnx.ValueInfoProto(name=add("Identity", ids)))


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
    if not expected:
        raise ValueError("the model returns no tensor: nothing would be verified")
    if len(results) != len(expected):
        raise ValueError(f"the file has {len(results)} outputs, the model {len(expected)}")
    errors = [
        _errors(torch.from_numpy(result), reference)
        for result, reference in zip(results, expected, strict=True)
    ]
    # Not Python's max, which loses a NaN that is not first.
    max_error, rms_error = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
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
) -> tuple[list[Tensor], list[Tensor]]:
    recorder = _RoutingRecorder()
    args, kwargs = _arguments(model, case)
    with torch.no_grad(), evaluating(model), recorder:
        result = model(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return leaves, recorder.ids


def _arguments(
    model: torch.nn.Module, case: tuple[Any, ...] | Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a case as the model's forward takes it: by name where the names are its own."""
    if not isinstance(case, Mapping):
        return case, {}
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return (), dict(case)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return ((), dict(case)) if set(case) <= named else (tuple(case.values()), {})


class _RoutingRecorder(TorchDispatchMode):
    """Notes the routing of every MoE operator that runs inside it, but for branches of cond."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not.
        self.ids: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.moe.experts.default:
            self.ids.append(args[1])
        elif func is torch.ops.moe.dropless.default:
            tokens, weight, top_k = args[0], args[1], args[6]
            bias = args[7] if len(args) > 7 else None
            options = RouterOptions(top_k, scoring=kwargs.get("scoring", "softmax"))
            self.ids.append(route(tokens.reshape(-1, tokens.shape[-1]), weight, bias, options)[0])
        return func(*args, **kwargs)


def _agreement(routed: list[Tensor], watched: list[Tensor]) -> float | None:
    """Returns the fraction of (token, layer) pairs whose sets of experts agree."""
    if not watched or len(watched) != len(routed):
        return None
    same = []
    for ours, file in zip(routed, watched, strict=True):
        ids, other = (value.reshape(-1, ours.shape[-1]).sort(dim=-1)[0] for value in (ours, file))
        same.append((ids == other).all(dim=-1))
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


def _approximates_gelu(proto: onnx.ModelProto) -> bool:
    """Whether ``com.microsoft::MoE`` computes a layer that asks for the exact GELU."""
    activations = {layer.attributes["activation"] for layer in _layers_of(proto)}
    return "gelu" in activations and any(n.domain == "com.microsoft" for n in proto.graph.node)


def _layers_of(proto: onnx.ModelProto) -> list[_layers.Layer]:
    return _layers.from_metadata({prop.key: prop.value for prop in proto.metadata_props})
