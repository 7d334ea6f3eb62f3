"""The files of all ranks in one process: each is cut at its sums over ranks, which are done here.

No runtime's own collectives are needed, nor as many devices as ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.shape_inference

from dynamo_moe.files.model_files import subgraphs
from dynamo_moe.moe_nodes.nodes import SUM_OVER_RANKS
from dynamo_moe.operators.foreign import ONNXRUNTIME_ALL_REDUCE, TENSORRT_COLLECTIVE
from dynamo_moe.operators.schemas import is_own_domain
from dynamo_moe.verification.runtime import Runtime


class Segment(NamedTuple):
    """A part of a file between two of its sums.

    Attributes:
        model: The part, with the initializers that it needs.
        inputs: The names of the values that it takes.
        outputs: Those that it gives.
        summed: The sum behind it: the names of its input and of its result; None behind the last.
    """

    model: onnx.ModelProto
    inputs: list[str]
    outputs: list[str]
    summed: tuple[str, str] | None


class Ranks:
    """The files of all ranks in ONNX Runtime, which run side by side.

    Args:
        files: Each rank's file and its graph.
        runtime: What loads and runs them.

    Raises:
        RefusedError: If ONNX Runtime cannot load a file.
        ValueError: If the files do not sum the same values.
    """

    def __init__(self, files: Sequence[tuple[Path, onnx.ModelProto]], runtime: Runtime) -> None:
        self._runtime = runtime
        self.inputs = [value.name for value in files[0][1].graph.input]
        cuts = [[*segments(proto)] for _, proto in files]
        for (path, _), cut in zip(files, cuts, strict=True):
            if [part.summed for part in cut] != [part.summed for part in cuts[0]]:
                raise ValueError(f"{path} sums other values over the ranks than {files[0][0]}")
        self._steps = [
            [
                _Loaded(self._load(part, path.parent), part)
                for (path, _), part in zip(files, parts, strict=True)
            ]
            for parts in zip(*cuts, strict=True)
        ]

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[np.ndarray]:
        """Runs all ranks, and returns the named outputs of the first.

        Raises:
            RefusedError: If ONNX Runtime cannot run a file on these inputs.
        """
        known = [dict(feeds) for _ in self._steps[0]]
        for step in self._steps:
            for values, loaded in zip(known, step, strict=True):
                values.update(self._results(loaded, values))
            summed = step[0].part.summed
            if summed is not None:
                part, result = summed
                total = reduce(np.add, [values[part] for values in known])
                for values in known:
                    values[result] = total
        return [known[0][name] for name in outputs]

    def _load(self, part: Segment, folder: Path) -> int | None:
        if not part.outputs:
            return None
        session, _ = self._runtime.load(part.model.SerializeToString(), str(folder))
        return session

    def _results(self, loaded: _Loaded, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        session, part = loaded
        if session is None:
            return {}
        needed = {name: values[name] for name in part.inputs}
        return dict(
            zip(part.outputs, self._runtime.run(session, needed, part.outputs), strict=True)
        )


class _Loaded(NamedTuple):
    """A part, and the number of its session; None if it computes nothing."""

    session: int | None
    part: Segment


def is_sum(node: onnx.NodeProto) -> bool:
    """Whether a node sums over ranks: ours, or a runtime's own."""
    if node.op_type == SUM_OVER_RANKS:
        return is_own_domain(node.domain)
    own = (ONNXRUNTIME_ALL_REDUCE, TENSORRT_COLLECTIVE)
    return any(operator.is_of(node.domain, node.op_type) for operator in own)


def segments(proto: onnx.ModelProto) -> Iterator[Segment]:
    """Cuts a file at the sums of its main graph, whose nodes are in the order of computation.

    Yields:
        The parts, in order.
    """
    graph = proto.graph
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    infos = {v.name: v for v in (*inferred.value_info, *graph.input, *graph.output)}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    sums = [node for node in graph.node if is_sum(node)]
    parts: list[list[onnx.NodeProto]] = [[]]
    for node in graph.node:
        if is_sum(node):
            parts.append([])
        else:
            parts[-1].append(node)
    wanted = {value.name for value in graph.output}.union(*(node.input for node in sums))
    used = [set[str]().union(*map(_used, nodes)) for nodes in parts]
    for number, nodes in enumerate(parts):
        made = {name for node in nodes for name in node.output if name}
        inputs = sorted(used[number] - made - initializers.keys())
        outputs = sorted(made & wanted.union(*used[number + 1 :]))
        model = onnx.ModelProto(
            ir_version=proto.ir_version,
            opset_import=proto.opset_import,
            functions=proto.functions,
            graph=onnx.GraphProto(
                name=f"{graph.name}_{number}",
                node=nodes,
                initializer=[initializers[n] for n in sorted(used[number] & initializers.keys())],
                input=[infos[name] for name in inputs],
                output=[infos[name] for name in outputs],
            ),
        )
        behind = sums[number] if number < len(sums) else None
        summed = None if behind is None else (behind.input[0], behind.output[0])
        yield Segment(model, inputs, outputs, summed)


def _used(node: onnx.NodeProto) -> set[str]:
    """Returns the values of a node's graph that it takes, in its branches and loops too."""
    used = {name for name in node.input if name}
    for graph in subgraphs(node):
        inner = {value.name for value in (*graph.input, *graph.initializer)}
        inner |= {name for each in graph.node for name in each.output}
        results = {value.name for value in graph.output}
        used |= results.union(*map(_used, graph.node)) - inner
    return used
