"""The files of ranks in ONNX Runtime: each is cut at its sums over ranks, which are done here.

No runtime's own collectives are needed, nor as many devices as ranks. All of them run in one
process, or each in a process of its own, on machines that may be different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from dynamo_moe.files import rank_files
from dynamo_moe.files.model_files import load_graph, subgraphs
from dynamo_moe.files.rank_files import record_of
from dynamo_moe.moe_nodes.nodes import SUM_OVER_RANKS
from dynamo_moe.operators.foreign import ONNXRUNTIME_ALL_REDUCE, TENSORRT_COLLECTIVE
from dynamo_moe.operators.schemas import is_own_domain
from dynamo_moe.verification.exchange import Exchange
from dynamo_moe.verification.runtime import Runtime


def own_file(path: Path, exchange: Exchange) -> onnx.ModelProto:
    """Returns the graph of a process's own file, which fits those of the others.

    Raises:
        RankError: If one of the processes cannot read its file.
        ValueError: If the files do not fit.
    """
    proto = load_graph(path)
    said = exchange((str(path), rank_files.header_of(proto).SerializeToString()))
    rank_files.check([(Path(name), onnx.ModelProto.FromString(head)) for name, head in said])
    return proto


class Part(NamedTuple):
    """A part of a file between two of its sums.

    Attributes:
        nodes: Its nodes, in the order of computation.
        inputs: The names of the values that it takes, but for initializers.
        outputs: Those that it gives to later parts, to sums or to the caller.
        summed: The sum behind it: the names of its input and of its result; None behind the last.
    """

    nodes: list[onnx.NodeProto]
    inputs: list[str]
    outputs: list[str]
    summed: tuple[str, str] | None


class Ranks:
    """The files of ranks in ONNX Runtime, which run side by side.

    Args:
        files: The file of each rank that is in this process, and its graph.
        runtime: What loads and runs them.
        exchange: Where each process has one rank; None: all are in this one.

    Raises:
        ValueError: If the files do not sum equally often.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, onnx.ModelProto]],
        runtime: Runtime,
        exchange: Exchange | None = None,
    ) -> None:
        self._ranks = [_Rank(path, proto, runtime) for path, proto in files]
        self._exchange = exchange
        counts = self._gathered(lambda rank: len(rank.parts) - 1)
        if len({*counts}) > 1:
            raise ValueError(f"the files of the ranks have different numbers of sums: {counts}")
        proto = files[0][1]
        self.inputs = [value.name for value in proto.graph.input]
        self.outputs = [value.name for value in proto.graph.output]
        record = record_of(proto)
        self._split: Mapping[str, int] = {} if record is None else record.split
        self._first = 0 if exchange is None or record is None else record.rank
        self._count = len(counts)
        self._shares = {
            value.name: value.type.tensor_type.shape.dim[self._split[value.name]].dim_value
            for value in proto.graph.input
            if value.name in self._split
        }

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the ranks, and returns the outputs of each in this process, rank by rank.

        Of what is split among them, each gets its share, and all results are the whole. A process
        with one rank may be given its share, and gets that of the results then.

        Raises:
            RefusedError: If ONNX Runtime cannot load a part of a file, or run it on these inputs.
        """
        are_shares = self._exchange is not None and any(
            feeds[name].shape[self._split[name]] == size for name, size in self._shares.items()
        )
        for number, rank in enumerate(self._ranks, self._first):
            rank.begin(
                dict(feeds)
                if are_shares
                else {name: self._share(name, value, number) for name, value in feeds.items()}
            )
        for number, part in enumerate(self._ranks[0].parts):
            added = self._gathered(partial(_Rank.compute, number=number))
            if part.summed is not None:
                total = reduce(np.add, added)
                for rank in self._ranks:
                    rank.end_sum(number, total)
        split = [name for name in self.outputs if name in self._split and not are_shares]
        shares = self._gathered(lambda rank: [rank.values[name] for name in split])
        whole = {
            name: np.concatenate(each, self._split[name])
            for name, each in zip(split, zip(*shares, strict=True), strict=True)
        }
        return [whole.get(name, rank.values[name]) for rank in self._ranks for name in self.outputs]

    def greatest(self, *values: float) -> list[float]:
        """Returns the greatest that any rank has of each value."""
        said = [values] if self._exchange is None else self._exchange(values)
        return [*map(float, np.max(said, axis=0))]

    def _gathered(self, of: Callable[[_Rank], Any]) -> list[Any]:
        """Returns something of all ranks, in order."""
        values = [of(rank) for rank in self._ranks]
        return values if self._exchange is None else self._exchange(*values)

    def _share(self, name: str, value: np.ndarray, rank: int) -> np.ndarray:
        if name not in self._split:
            return value
        axis, ranks = self._split[name], self._count
        if value.shape[axis] % ranks:
            raise ValueError(
                f"{name} has {value.shape[axis]} values along axis {axis}, no multiple of the "
                f"{ranks} ranks"
            )
        return np.split(value, ranks, axis)[rank]


class _Rank:
    """The file of a rank, of which each part has a session."""

    def __init__(self, path: Path, proto: onnx.ModelProto, runtime: Runtime) -> None:
        self.parts = parts_of(proto.graph)
        self.values: dict[str, np.ndarray] = {}
        self._path, self._proto, self._runtime = path, proto, runtime
        self._initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._sessions: dict[int, int] = {}

    def begin(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Has the inputs, and the initializers that the caller or a sum takes as they are."""
        sums = [part.summed[0] for part in self.parts if part.summed is not None]
        taken = {*sums, *(value.name for value in self._proto.graph.output)}
        folder = str(self._path.parent)
        self.values = {
            name: onnx.numpy_helper.to_array(self._initializers[name], folder).copy()
            for name in taken & self._initializers.keys()
        } | dict(feeds)

    def compute(self, number: int) -> np.ndarray | None:
        """Computes a part, and returns what the rank adds to the sum behind it, if there is one."""
        part = self.parts[number]
        if part.outputs:
            feeds = {name: self.values[name] for name in part.inputs}
            if number not in self._sessions:
                model = self._model(part, feeds).SerializeToString()
                self._sessions[number], _ = self._runtime.load(model, str(self._path.parent))
            results = self._runtime.run(self._sessions[number], feeds, part.outputs)
            self.values.update(zip(part.outputs, results, strict=True))
        return None if part.summed is None else self.values[part.summed[0]]

    def end_sum(self, number: int, total: np.ndarray) -> None:
        """Has the result of the sum behind a part."""
        summed = self.parts[number].summed
        if summed is None:
            raise ValueError(f"there is no sum behind part {number} of {self._path}")
        self.values[summed[1]] = total

    def _model(self, part: Part, feeds: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        """Returns a part as a model of its own, for inputs of these dtypes."""
        used = set(chain.from_iterable(map(_used, part.nodes)))
        inputs = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
            )
            for name, value in feeds.items()
        ]
        return onnx.ModelProto(
            ir_version=self._proto.ir_version,
            opset_import=self._proto.opset_import,
            functions=self._proto.functions,
            graph=onnx.GraphProto(
                name=self._proto.graph.name,
                node=part.nodes,
                initializer=[t for name, t in self._initializers.items() if name in used],
                input=inputs,
                output=[onnx.ValueInfoProto(name=name) for name in part.outputs],
            ),
        )


def is_sum(node: onnx.NodeProto) -> bool:
    """Whether a node sums over ranks: ours, or a runtime's own."""
    if node.op_type == SUM_OVER_RANKS:
        return is_own_domain(node.domain)
    own = (ONNXRUNTIME_ALL_REDUCE, TENSORRT_COLLECTIVE)
    return any(operator.is_of(node.domain, node.op_type) for operator in own)


def without_sums(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a rank's file whose sums over ranks are what the rank alone adds to them."""
    alone = onnx.ModelProto()
    alone.CopyFrom(proto)
    for node in filter(is_sum, alone.graph.node):
        node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    return alone


def parts_of(graph: onnx.GraphProto) -> list[Part]:
    """Returns the parts of a graph between its sums, in the order of computation."""
    sums = [node for node in graph.node if is_sum(node)]
    parts: list[list[onnx.NodeProto]] = [[]]
    for node in graph.node:
        if is_sum(node):
            parts.append([])
        else:
            parts[-1].append(node)
    initializers = {tensor.name for tensor in graph.initializer}
    wanted = {value.name for value in graph.output}.union(*(node.input for node in sums))
    used = [set[str]().union(*map(_used, nodes)) for nodes in parts]
    found = []
    for number, nodes in enumerate(parts):
        made = {name for node in nodes for name in node.output if name}
        inputs = sorted(used[number] - made - initializers)
        outputs = sorted(made & wanted.union(*used[number + 1 :]))
        behind = sums[number] if number < len(sums) else None
        summed = None if behind is None else (behind.input[0], behind.output[0])
        found.append(Part(nodes, inputs, outputs, summed))
    return found


def _used(node: onnx.NodeProto) -> set[str]:
    """Returns the values of a node's graph that it takes, in its branches and loops too."""
    used = {name for name in node.input if name}
    for graph in subgraphs(node):
        inner = {value.name for value in (*graph.input, *graph.initializer)}
        inner |= {name for each in graph.node for name in each.output}
        results = {value.name for value in graph.output}
        used |= results.union(*map(_used, graph.node)) - inner
    return used
