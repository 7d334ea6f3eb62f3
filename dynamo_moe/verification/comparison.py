"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import external_data_helper
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe import pytree
from dynamo_moe.evaluation import check_model, evaluating, unwrapped
from dynamo_moe.files.inputs import random_inputs
from dynamo_moe.files.model_files import all_nodes, load_graph
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification.routing import RoutingRecorder, agreement, layers_of, routing_graph
from dynamo_moe.verification.runtime import RefusedError, Runtime, RuntimeProcess, describe

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CaseResult", "VerificationError", "VerificationReport", "verify"]

# Of operators that ONNX Runtime has.
_RUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")

Case = tuple[Any, ...] | Mapping[str, Any]


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
        model_error: With a reference, the worst element's error of the model itself: what of
            ``max_error`` is the conversion's.
    """

    shapes: dict[str, tuple[int, ...]]
    max_error: float
    rms_error: float
    routing_agreement: float | None
    passed: bool
    model_error: float | None = None


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
        own = ["model's error"] if any(case.model_error is not None for case in self.cases) else []
        for column in ("inputs", "max error", "RMS error", *own, "same routing", ""):
            table.add_column(column)
        for case in self.cases:
            inputs = [f"{name} {list(shape)}" for name, shape in case.shapes.items()]
            more = [f"and {len(inputs) - 3} more"] if len(inputs) > 4 else []
            shapes = ", ".join(inputs[:3] + more if more else inputs)
            same = case.routing_agreement
            table.add_row(
                shapes,
                f"{case.max_error:.1e}",
                f"{case.rms_error:.1e}",
                *([] if case.model_error is None else [f"{case.model_error:.1e}"]),
                "-" if same is None else f"{same:.2%}",
                "[green]ok[/]" if case.passed else "[red]fails[/]",
            )
        table.caption = f"tolerance: max {self.tolerance.max:.0e}, RMS {self.tolerance.rms:.0e}"
        return table


class VerificationError(AssertionError):
    """The file does not compute what the model computes; ``report`` says where."""

    def __init__(self, report: VerificationReport) -> None:
        worst = max(report.cases, key=lambda case: (not case.passed, case.max_error))
        other, own = "model", ""
        if worst.model_error is not None:
            other, own = "reference", f"; the model's own error is {worst.model_error:.1e}"
        super().__init__(
            f"{report.path} differs from the {other}: max error {worst.max_error:.1e} "
            f"(tolerance {report.tolerance.max:.0e}), RMS {worst.rms_error:.1e} "
            f"({report.tolerance.rms:.0e}) on inputs {worst.shapes}{own}"
        )
        self.report = report


def verify(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    inputs: Sequence[Case] | None = None,
    *,
    reference: torch.nn.Module | None = None,
    tolerance: Tolerance | None = None,
    isolated: bool = False,
    timeout: float | None = None,
) -> VerificationReport:
    """Runs an exported file in ONNX Runtime and the model in PyTorch, and compares.

    A model of transformers is run as its file was exported: that of :func:`export_language_model`
    with its cache, on a prompt and on further tokens. What ``torch.compile`` or ``AveragedModel``
    wraps is run without them.

    Args:
        path: The ONNX file.
        model: The model that it was exported from, on the CPU; run as in ``eval()``.
        inputs: Cases to run, each positional arguments or a mapping of keyword arguments. None:
            random ones of several batch sizes and lengths, drawn from the file's inputs: floats
            from a normal distribution, booleans true, integers below the size of what they index,
            else between the least and the greatest of the example's (0..9 where these are unknown
            or 0; all 1 where that is the greatest, as in a mask).
        reference: A model with the same arguments that the file is to agree with instead, such as
            a copy made before :func:`convert`. ``model`` then gives the routing, and an error of
            its own.
        tolerance: None: by the lowest precision among the file's weights.
        isolated: ONNX Runtime runs in a process of its own, so that its crash is an error here.
        timeout: Seconds that it then may take to load the file, and to run each case.

    Returns:
        Errors and routing agreement of every case, all within the tolerance.

    Raises:
        VerificationError: If an error passes the tolerance.
        FileNotFoundError: If the file does not exist.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If a case does not fit the file's inputs or the model, or ONNX Runtime cannot
            run the file, such as for a node that it does not know and that has no body.
        TypeError: If the model is not a module, or ``inputs`` is not a sequence of tuples or
            mappings.
        ChildProcessError: If ONNX Runtime, isolated, died.
        TimeoutError: If it took longer than ``timeout``.
    """
    check_model(model)
    path = Path(path)
    if timeout is not None and not isolated:
        raise ValueError("timeout needs isolated=True: only a process of its own can be ended")
    name = describe()
    proto = load_graph(path)
    model = unwrapped(model)
    reference = None if reference is None else unwrapped(reference)
    with ExitStack() as stack:
        drawn = _perform(stack, proto, [model] if reference is None else [model, reference])
        cases = drawn if inputs is None else _checked(inputs)
        bound = tolerance or tolerance_for(
            _weight_dtypes(proto), approximate_gelu=_approximates_gelu(proto)
        )
        runtime = stack.enter_context(RuntimeProcess(timeout) if isolated else Runtime())
        file = _File(path, proto, runtime)
        results = []
        for case in cases:
            feeds = _feeds(file.inputs, case)
            try:
                expected = _run_torch(model, reference, case)
            except Exception as error:  # The model's own code runs.
                if inputs is None or isinstance(error, IndexError):  # Ids beyond an embedding.
                    raise ValueError(
                        f"the model takes no such inputs ({error}): pass inputs of your own"
                    ) from error
                raise
            results.append(_compare(file, feeds, expected, bound))
    report = VerificationReport(path, name, bound, tuple(results))
    if not report.passed:
        raise VerificationError(report)
    return report


def _perform(stack: ExitStack, proto: onnx.ModelProto, models: Sequence[Any]) -> list[Any]:
    """Lets the models do what the file does, as long as the stack lasts; returns random cases."""
    from dynamo_moe import language_models

    graph = proto.graph
    inputs, outputs = ([value.name for value in values] for values in (graph.input, graph.output))
    task = language_models.task_of(models[0], inputs, outputs)
    if task is None:
        return random_inputs(proto)
    for model in models:
        stack.enter_context(language_models.performing(model, task))
    return language_models.verification_cases(models[0])


def _checked(inputs: Sequence[Case]) -> list[Case]:
    cases = list(inputs)
    if not cases:
        raise ValueError("inputs holds no case: nothing would be verified")
    for case in cases:
        if not isinstance(case, (tuple, Mapping)):
            raise TypeError(
                "inputs must be a sequence of cases, each a tuple or a mapping, as in [(x,)]; "
                f"got a case of type {type(case).__name__}"
            )
    return cases


class _File:
    """The file in ONNX Runtime; beside it, what decides the routing of its layers, if known.

    The latter is a session of its own: another output changes how ONNX Runtime uses memory, which
    has hidden an error in its MoE.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto, runtime: Runtime) -> None:
        self._path, self._runtime = path, runtime
        try:
            self._session, self.inputs = runtime.load(str(path))
        except RefusedError as error:
            raise ValueError(
                f"ONNX Runtime cannot run {path}: {_reason(str(error), proto)}"
            ) from error
        self._routing = _load_routing(path, proto, runtime)

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[Tensor]:
        return self._run(self._session, feeds)

    def routing(self, feeds: Mapping[str, np.ndarray]) -> list[Tensor]:
        return [] if self._routing is None else self._run(self._routing, feeds)

    def _run(self, session: int, feeds: Mapping[str, np.ndarray]) -> list[Tensor]:
        try:
            return [_to_torch(array) for array in self._runtime.run(session, feeds)]
        except RefusedError as error:
            shapes = {name: list(array.shape) for name, array in feeds.items()}
            raise ValueError(
                f"ONNX Runtime cannot run {self._path} on inputs of shapes {shapes}: {error}"
            ) from error


def _reason(error: str, proto: onnx.ModelProto) -> str:
    """Why ONNX Runtime cannot load a file."""
    functions = {(function.domain, function.name) for function in proto.functions}
    for node in all_nodes(proto.graph.node):
        if node.domain not in _RUNTIME_DOMAINS and (node.domain, node.op_type) not in functions:
            return (
                f"{node.domain}::{node.op_type} has no body in the file. Give register_op a body "
                "of standard operators, and export again"
            )
    missing = re.search(r"Could not find an implementation for (\w+)\(\d+\)", error)
    weights = {tensor.data_type for tensor in proto.graph.initializer}
    if missing and onnx.TensorProto.BFLOAT16 in weights:
        return (
            f"on a CPU it has no {missing[1]} of bfloat16. Verify an export of the model in "
            "float32, or with the experts alone in bfloat16"
        )
    return error


def _load_routing(path: Path, proto: onnx.ModelProto, runtime: Runtime) -> int | None:
    watched = routing_graph(proto)
    if watched is None:
        return None
    if not any(external_data_helper.uses_external_data(t) for t in watched.graph.initializer):
        return runtime.load(watched.SerializeToString())[0]
    # External data is found relative to the model's folder.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".verify.", suffix=".onnx") as beside:
        beside.write(watched.SerializeToString())
        beside.flush()
        return runtime.load(beside.name)[0]


@dataclass(frozen=True)
class _Expected:
    """What PyTorch computes: the model and, if there is one, the reference."""

    model: list[Tensor]
    reference: list[Tensor] | None
    routing: list[Tensor]


def _compare(
    file: _File, feeds: Mapping[str, np.ndarray], expected: _Expected, bound: Tolerance
) -> CaseResult:
    max_error, rms_error = _worst("file", file.run(feeds), expected.reference or expected.model)
    model_error = None
    if expected.reference is not None:
        model_error, _ = _worst("model", expected.model, expected.reference)
    return CaseResult(
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        max_error=max_error,
        rms_error=rms_error,
        routing_agreement=agreement(expected.routing, file.routing(feeds)),
        passed=max_error <= bound.max and rms_error <= bound.rms,
        model_error=model_error,
    )


def _worst(what: str, results: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """The worst errors over all outputs."""
    if not expected:
        raise ValueError("the model returns no tensor: nothing would be verified")
    if len(results) != len(expected):
        raise ValueError(f"the {what} has {len(results)} outputs, the model {len(expected)}")
    errors = [_errors(result, wanted) for result, wanted in zip(results, expected, strict=True)]
    # Not Python's max, which loses a NaN that is not first.
    max_error, rms_error = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
    return max_error, rms_error


def _feeds(names: Sequence[str], case: Case) -> dict[str, np.ndarray]:
    if isinstance(case, Mapping) and set(case) == set(names):
        return {name: _to_numpy(value) for name, value in case.items()}
    leaves = [leaf for leaf in pytree.tree_leaves(case) if isinstance(leaf, Tensor)]
    if len(leaves) != len(names):
        raise ValueError(
            f"a case must hold one tensor per input of the file ({', '.join(names)}); "
            f"got {len(leaves)}"
        )
    return {name: _to_numpy(leaf) for name, leaf in zip(names, leaves, strict=True)}


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _run_torch(model: torch.nn.Module, reference: torch.nn.Module | None, case: Case) -> _Expected:
    recorder = RoutingRecorder()
    with recorder:
        results = _outputs(model, case)
    return _Expected(
        results, None if reference is None else _outputs(reference, case), recorder.ids
    )


def _outputs(model: torch.nn.Module, case: Case) -> list[Tensor]:
    # Copies: a forward may write into its arguments.
    copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, case)
    args, kwargs = _arguments(model, copied)
    # Compiled parts run eagerly: a dispatch mode looks at every operator.
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
        result = model(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _arguments(model: torch.nn.Module, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a case as the model's forward takes it: by name where the names are its own."""
    if not isinstance(case, Mapping):
        return case, {}
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return (), dict(case)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return ((), dict(case)) if set(case) <= named else (tuple(case.values()), {})


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
    dtypes = {from_torch_dtype(dtype).value: dtype for dtype in FLOATS}
    # Constants made by the exporter are small and may be wider than the weights.
    found = {t.data_type for t in proto.graph.initializer if len(t.dims) >= 2}
    return {dtypes[data_type] for data_type in found if data_type in dtypes}


def _approximates_gelu(proto: onnx.ModelProto) -> bool:
    """Whether ``com.microsoft::MoE`` computes a layer that asks for the exact GELU."""
    activations = {layer.attributes["activation"] for layer in layers_of(proto)}
    return "gelu" in activations and any(n.domain == "com.microsoft" for n in proto.graph.node)
