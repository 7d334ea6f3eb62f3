"""The file in ONNX Runtime, or the files of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from torch import Tensor

from dynamo_moe.files import rank_files
from dynamo_moe.files.block_functions import inlined
from dynamo_moe.files.library_operators import OPERATORS, operator_nodes, take_operators
from dynamo_moe.files.library_operators import library as library_file
from dynamo_moe.files.model_files import all_nodes, load_graph
from dynamo_moe.moe_nodes.nodes import OFFLOADED_DOMAIN
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.moe_nodes.targets.registry import target_of
from dynamo_moe.operators.foreign import foreign_operator
from dynamo_moe.verification import widening
from dynamo_moe.verification.exchange import Exchange
from dynamo_moe.verification.ranks import Ranks, without_sums
from dynamo_moe.verification.routing import add_routing_outputs
from dynamo_moe.verification.runtime import RefusedError, Runtime


class LoadedFile:
    """The file in ONNX Runtime, with its layers' expert ids as further outputs, if they are known.

    One session gives both, unless the file has functions of blocks, which hide their layers, or
    nodes of a runtime's own operator. ONNX Runtime lets ``com.microsoft::MoE`` write its result
    over its input while still reading it, if nothing reads that input afterwards (seen with 1.31.1:
    errors of 2 and more). Computing the routing reads it, which hides the error (from 1.4 to 0.8 in
    a file of two layers). So such a file runs as it is, and the routing comes from a session of its
    own.

    Attributes:
        inputs: The names of the file's inputs.
        missing: An operator that ONNX Runtime does not have in bfloat16: the file is computed in
            float32. Empty if it runs as it is.
    """

    def __init__(
        self,
        path: Path,
        proto: onnx.ModelProto,
        runtime: Runtime,
        *,
        is_stored: bool,
        profiles: str = "",
    ) -> None:
        self._path, self._runtime, self.ranks = path, runtime, 1
        self._outputs = [value.name for value in proto.graph.output]
        separate = bool(foreign_targets(proto)) or not (is_stored or profiles)
        self._computed = [node.name for node in operator_nodes(proto)] if profiles else []
        as_it_is: tuple[Any, ...] = (str(path),)
        if profiles:
            library = library_file(), profiles
            take_operators(proto)
            as_it_is = proto.SerializeToString(), str(path.parent), library
        self._routed, routed = add_routing_outputs(proto), as_it_is
        if self._routed:
            routed = (proto.SerializeToString(), str(path.parent), *as_it_is[2:])
        self.missing = ""
        try:
            self._load(as_it_is, routed, separate=separate)
        except RefusedError as error:
            self.missing = _missing_in_bfloat16(str(error), proto)
            if not self.missing:
                raise _unreadable(path, error, proto) from error
            wide = (_in_float32(path, arguments) for arguments in (as_it_is, routed))
            try:
                self._load(*wide, separate=separate)
            except RefusedError as second:
                raise _unreadable(path, second, proto) from second

    def _load(self, as_it_is: _Arguments, routed: _Arguments, *, separate: bool) -> None:
        self._session, self.inputs = self._runtime.load(*(as_it_is if separate else routed))
        self._routing_session = self._session
        if self._routed and separate:
            self._routing_session, _ = self._runtime.load(*routed)

    def moe_nodes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the MoE nodes that operators of the library computed, and those that did not."""
        ran = {name for op, name in self._runtime.nodes_run(self._session) if op in OPERATORS}
        by_function = tuple(name for name in self._computed if name not in ran)
        return tuple(name for name in self._computed if name in ran), by_function

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

    def greatest(self, *values: float) -> list[float]:
        """Returns the values: there are no other files."""
        return [*values]

    def _run(
        self, session: int, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> list[Tensor]:
        try:
            return [_to_torch(array) for array in self._runtime.run(session, feeds, outputs)]
        except RefusedError as error:
            raise _refusal(self._path, feeds, error) from error


class LoadedRanks:
    """The files of all ranks, without expert ids, of which each has its own alone.

    Attributes:
        inputs: The names of the files' inputs.
        missing: As of :class:`LoadedFile`.
    """

    def __init__(
        self, path: Path, proto: onnx.ModelProto, runtime: Runtime, exchange: Exchange | None
    ) -> None:
        self._path = path
        files = [(path, proto)]
        if exchange is None:
            files = [(file, inlined(each)) for file, each in rank_files.files_of_ranks(path)]
        self.missing = _missing_in_part(path, files[0][1], runtime)
        if self.missing:
            files = [(file, widening.in_float32(each)) for file, each in files]
        self._ranks = Ranks(files, runtime, exchange)
        self.inputs, self.ranks = self._ranks.inputs, len(files)

    def greatest(self, *values: float) -> list[float]:
        """Returns the greatest that any rank has of each value: all of them go on as one."""
        return self._ranks.greatest(*values)

    def run(
        self, feeds: Mapping[str, np.ndarray], *, routing: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs of each rank, rank by rank."""
        try:
            return [_to_torch(array) for array in self._ranks.run(feeds)], []
        except RefusedError as error:
            raise _refusal(self._path, feeds, error) from error


def _refusal(path: Path, feeds: Mapping[str, np.ndarray], error: RefusedError) -> ValueError:
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    return ValueError(f"ONNX Runtime cannot run {path} on inputs of shapes {shapes}: {error}")


# Domains of the operators that ONNX Runtime has.
_RUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


_Arguments = tuple[Any, ...]
"""Of :meth:`Runtime.load`."""


def _in_float32(path: Path, arguments: _Arguments) -> _Arguments:
    """Returns what loads a file so that it computes in float32, instead of in bfloat16."""
    model, *rest = arguments
    is_file = isinstance(model, str)
    proto = inlined(load_graph(path)) if is_file else onnx.ModelProto.FromString(model)
    return (widening.in_float32(proto).SerializeToString(), *(rest or [str(path.parent)]))


def _missing_in_part(path: Path, proto: onnx.ModelProto, runtime: Runtime) -> str:
    """Returns the operator of a rank's file that ONNX Runtime does not have in bfloat16."""
    if not widening.has_bfloat16(proto):
        return ""
    alone = without_sums(proto)
    try:
        runtime.load(alone.SerializeToString(), str(path.parent))
    except RefusedError as error:
        return _missing_in_bfloat16(str(error), alone)
    return ""


def _missing_in_bfloat16(error: str, proto: onnx.ModelProto) -> str:
    """Returns the operator that ONNX Runtime does not have in a file's bfloat16, or nothing."""
    missing = re.search(r"Could not find an implementation for (\w+)\(\d+\)", error)
    return missing[1] if missing and widening.has_bfloat16(proto) else ""


def _unreadable(path: Path, error: RefusedError, proto: onnx.ModelProto) -> ValueError:
    return ValueError(f"ONNX Runtime cannot run {path}: {_reason(str(error), proto)}")


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
        if node.domain == OFFLOADED_DOMAIN:
            return "its experts are offloaded. Verify the file that it was made from"
        if node.domain not in _RUNTIME_DOMAINS and (node.domain, node.op_type) not in functions:
            return (
                f"{node.domain}::{node.op_type} has no body in the file. Give register_op a body "
                "of standard operators, and export again"
            )
    return error


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Returns a tensor as a file takes it."""
    if tensor.is_complex():  # A file has pairs of real numbers.
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def foreign_targets(proto: onnx.ModelProto) -> list[Target]:
    """Returns the targets of which a graph has a runtime's own operators."""
    operators = (foreign_operator(node.domain, node.op_type) for node in proto.graph.node)
    return [target_of(operator) for operator in dict.fromkeys(operators) if operator is not None]
