"""``verify``: does the ONNX file compute what the PyTorch model computes, on other inputs?"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from custom_ops.dtypes import FLOATS
from dynamo_moe import language_models, pytree
from dynamo_moe.evaluation import check_model, evaluating, unwrapped
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.inputs import random_inputs
from dynamo_moe.files.metadata import layers_of
from dynamo_moe.files.model_files import all_nodes, load_graph
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.moe_nodes.targets.registry import target_of
from dynamo_moe.operators.foreign import foreign_operator
from dynamo_moe.process_state import exclusive
from dynamo_moe.tolerances import Tolerance, tolerance_for
from dynamo_moe.verification.report import CaseResult, VerificationError, VerificationReport
from dynamo_moe.verification.routing import RoutingRecorder, add_routing_outputs, agreement
from dynamo_moe.verification.runtime import RefusedError, Runtime, RuntimeProcess, describe

Case = tuple[Any, ...] | Mapping[str, Any]


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

    A file of :func:`export_language_model` is compared with the model of transformers that it was
    exported from, cache included, on a prompt and on further tokens. A model wrapped by
    ``torch.compile`` or ``AveragedModel`` runs without the wrapper.

    Args:
        path: The ONNX file.
        model: The model that it was exported from, on the CPU; run as in ``eval()``.
        inputs: Cases to run, each a tuple of positional arguments or a mapping of keyword
            arguments. None: random ones of several batch sizes and lengths, drawn for the file's
            inputs: floats from a normal distribution; booleans true; integers below the size of
            what they index, else between the least and the greatest of the example's (0..9 where
            these are unknown or 0; all 1 where the greatest is 1, as in a mask).
        reference: A model with the same arguments that the file must agree with instead, such as
            a copy made before :func:`convert`. The routing is still compared with ``model``, whose
            own error is reported too.
        tolerance: None: by the lowest precision among the file's weights.
        isolated: ONNX Runtime runs in a separate process, so that its crash is an error here.
        timeout: Seconds that this process may take to load the file, and to run each case.

    Returns:
        Errors and routing agreement of every case, all within the tolerance.

    Raises:
        VerificationError: If an error exceeds the tolerance.
        FileNotFoundError: If the file does not exist.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If a case does not fit the file's inputs or the model, or ONNX Runtime cannot
            run the file, for instance because of a node that it does not know and that has no
            body.
        TypeError: If the model is not a module, or ``inputs`` is not a sequence of tuples or
            mappings.
        ChildProcessError: If ONNX Runtime, isolated, died.
        TimeoutError: If it took longer than ``timeout``.
    """
    check_model(model)
    path = Path(path)
    if timeout is not None and not isolated:
        raise ValueError("timeout needs isolated=True: only a separate process can be ended")
    runtime_name = describe()
    stored = load_graph(path)
    proto = inlined(stored)
    tolerance = tolerance or tolerance_for(
        _weight_dtypes(proto), approximate_gelu=_approximates_gelu(proto)
    )
    model = unwrapped(model)
    reference = None if reference is None else unwrapped(reference)
    with ExitStack() as stack:
        drawn = _prepare(stack, proto, [model] if reference is None else [model, reference])
        cases = drawn if inputs is None else _checked(inputs)
        runtime = stack.enter_context(RuntimeProcess(timeout) if isolated else Runtime())
        file = _LoadedFile(path, proto, runtime, is_stored=proto is stored)
        results = []
        for case in cases:
            feeds = _feeds(file.inputs, case)
            try:
                recorder = RoutingRecorder()
                with recorder:
                    outputs = _outputs(model, case)
                expected = outputs if reference is None else _outputs(reference, case)
            except Exception as error:  # The model's own code runs.
                if inputs is None or isinstance(error, IndexError):  # Ids beyond an embedding.
                    raise ValueError(
                        f"the model does not take these inputs ({error}): pass inputs of your own"
                    ) from error
                raise
            results.append(_compare(file, feeds, outputs, expected, recorder.ids, tolerance))
    report = VerificationReport(path, runtime_name, tolerance, tuple(results))
    if not report.passed:
        raise VerificationError(report)
    return report


# --- The errors that the file's weights and layers allow ---


def _weight_dtypes(proto: onnx.ModelProto) -> set[torch.dtype]:
    dtypes = {from_torch_dtype(dtype).value: dtype for dtype in FLOATS}
    # Constants made by the exporter are small and may be wider than the weights.
    stored = {t.data_type for t in proto.graph.initializer if len(t.dims) >= 2}
    return {dtypes[data_type] for data_type in stored if data_type in dtypes}


def _approximates_gelu(proto: onnx.ModelProto) -> bool:
    """Whether a runtime's operator stands for a layer that asks for the exact GELU."""
    activations = {layer.attributes["activation"] for layer in layers_of(proto)}
    approximates = any("gelu" in target.approximations for target in _foreign_targets(proto))
    return "gelu" in activations and approximates


def _foreign_targets(proto: onnx.ModelProto) -> list[Target]:
    """Returns the targets of which a graph has a runtime's own operators."""
    operators = (foreign_operator(node.domain, node.op_type) for node in proto.graph.node)
    return [target_of(operator) for operator in dict.fromkeys(operators) if operator is not None]


# --- The cases ---


def _prepare(stack: ExitStack, proto: onnx.ModelProto, models: Sequence[Any]) -> list[Any]:
    """Makes the models' forwards do what the file does while the stack lasts; returns cases."""
    graph = proto.graph
    inputs, outputs = ([value.name for value in values] for values in (graph.input, graph.output))
    task = language_models.task_of(models[0], inputs, outputs)
    if task is None:
        return random_inputs(ir.from_proto(proto))
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


# --- PyTorch ---


def _outputs(model: torch.nn.Module, case: Case) -> list[Tensor]:
    # Copies: a forward may write into its arguments.
    copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, case)
    args, kwargs = _arguments(model, copied)
    # Compiled parts run eagerly: a dispatch mode sees every operator. The stance is the process's,
    # and so are the methods of nn.Module that another thread's export has replaced.
    with exclusive(), torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
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


# --- ONNX Runtime ---


class _LoadedFile:
    """The file in ONNX Runtime, with its layers' expert ids as further outputs, if they are known.

    One session gives both, unless the file has functions of blocks, which hide their layers, or
    nodes of a runtime's own operator. ONNX Runtime lets ``com.microsoft::MoE`` write its result
    over its input while still reading it, if nothing reads that input afterwards (seen with 1.31.1:
    errors of 2 and more). Computing the routing reads it, which hides the error (from 1.4 to 0.8 in
    a file of two layers). So such a file runs as it is, and the routing comes from a session of its
    own.
    """

    def __init__(
        self, path: Path, proto: onnx.ModelProto, runtime: Runtime, *, is_stored: bool
    ) -> None:
        self._path, self._runtime = path, runtime
        self._outputs = [value.name for value in proto.graph.output]
        separate = bool(_foreign_targets(proto)) or not is_stored
        self._routed = add_routing_outputs(proto)
        as_it_is: tuple[Any, ...] = (str(path),)
        routed = (proto.SerializeToString(), str(path.parent)) if self._routed else as_it_is
        try:
            self._session, self.inputs = runtime.load(*(as_it_is if separate else routed))
        except RefusedError as error:
            raise ValueError(
                f"ONNX Runtime cannot run {path}: {_reason(str(error), proto)}"
            ) from error
        self._routing_session = self._session
        if self._routed and separate:
            self._routing_session, _ = runtime.load(*routed)

    def run(
        self, feeds: Mapping[str, np.ndarray], *, routing: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs, and each layer's expert ids if they are wanted and known."""
        routed = self._routed if routing else []
        if self._routing_session != self._session:
            outputs = self._run(self._session, feeds, self._outputs)
            return outputs, self._run(self._routing_session, feeds, routed) if routed else []
        results = self._run(self._session, feeds, [*self._outputs, *routed])
        return results[: len(self._outputs)], results[len(self._outputs) :]

    def _run(
        self, session: int, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> list[Tensor]:
        try:
            return [_to_torch(array) for array in self._runtime.run(session, feeds, outputs)]
        except RefusedError as error:
            shapes = {name: list(array.shape) for name, array in feeds.items()}
            raise ValueError(
                f"ONNX Runtime cannot run {self._path} on inputs of shapes {shapes}: {error}"
            ) from error


# Domains of the operators that ONNX Runtime has.
_RUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


def _reason(error: str, proto: onnx.ModelProto) -> str:
    """Returns why ONNX Runtime cannot load a file."""
    functions = {(function.domain, function.name) for function in proto.functions}
    for node in all_nodes(proto.graph.node):
        foreign = foreign_operator(node.domain, node.op_type)
        if foreign is not None and not target_of(foreign).runs_in_onnxruntime:
            return (
                f"only {foreign.runtime} has {foreign.op_type}. Verify an export of the same model "
                "with target 'plugin' or 'dense'"
            )
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


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


# --- Both ---


def _compare(
    file: _LoadedFile,
    feeds: Mapping[str, np.ndarray],
    model_outputs: list[Tensor],
    expected: list[Tensor],
    routed: list[Tensor],
    bound: Tolerance,
) -> CaseResult:
    outputs, in_file = file.run(feeds, routing=bool(routed))
    max_error, rms_error = _worst_errors("file", outputs, expected)
    model_error = (
        None if model_outputs is expected else _worst_errors("model", model_outputs, expected)[0]
    )
    return CaseResult(
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        max_error=max_error,
        rms_error=rms_error,
        routing_agreement=agreement(routed, in_file),
        passed=max_error <= bound.max and rms_error <= bound.rms,
        model_error=model_error,
    )


def _worst_errors(
    what: str, results: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, float]:
    if not expected:
        raise ValueError("the model returns no tensor: nothing would be verified")
    if len(results) != len(expected):
        raise ValueError(f"the {what} has {len(results)} outputs, the model {len(expected)}")
    errors = [_errors(result, wanted) for result, wanted in zip(results, expected, strict=True)]
    # Not Python's max, which loses a NaN that is not first.
    max_error, rms_error = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
    return max_error, rms_error


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
