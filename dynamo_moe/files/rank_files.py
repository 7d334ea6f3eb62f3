"""The files of one model for the ranks of a group, each with a share of the experts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from torch import nn

from dynamo_moe import local_experts
from dynamo_moe.files.model_files import load_graph

KEY = "dynamo_moe.rank"
"""The entry of a file's metadata that says which rank it is for."""


@dataclass(frozen=True)
class Share:
    """A rank's share of a layer's experts.

    Attributes:
        first: The number of its first expert in the layer.
        count: How many it has, which follow one another.
        total: All of the layer's experts.
    """

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class RankRecord:
    """The rank that a file is for.

    Attributes:
        rank: The rank, in ``0..ranks-1``.
        ranks: How many there are.
        layers: The rank's share of each layer, by the layer's path in the PyTorch model.
        export: A number drawn for all files of one export; empty where a file was exported alone.
        split: Inputs and outputs of which each rank has an equal share, and its axis.
    """

    rank: int
    ranks: int
    layers: Mapping[str, Share]
    export: str = ""
    split: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, strings and numbers, ready for ``json.dumps``."""
        layers = {name: vars(share) for name, share in self.layers.items()}
        return {**vars(self), "layers": layers}


def rank_path(path: Path, rank: int) -> Path:
    """Returns the file of a rank.

    Example:
        >>> rank_path(Path("model.onnx"), 1).name
        'model.rank1.onnx'
    """
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def store(
    model: ir.Model, module: nn.Module, export: str = "", split: Mapping[str, int] | None = None
) -> None:
    """Writes into a graph's metadata the rank whose experts a module has, if it has a rank's.

    Args:
        model: The graph.
        module: The module.
        export: A number that all files of an export share.
        split: The axis of each input and output of which each rank has a share.
    """
    shares = {
        path: local
        for path, layer in module.named_modules()
        if (local := local_experts.of(layer)) is not None
    }
    if not shares:
        return
    any_share = next(iter(shares.values()))
    layers = {
        path: Share(local.share.start, len(local.share), local.total)
        for path, local in shares.items()
    }
    record = RankRecord(any_share.rank, any_share.ranks, layers, export, dict(split or {}))
    model.metadata_props[KEY] = json.dumps(record.to_dict())


def record_of(proto: onnx.ModelProto) -> RankRecord | None:
    """Returns the rank that a file is for; None if it is for all."""
    stored = next((entry.value for entry in proto.metadata_props if entry.key == KEY), None)
    if stored is None:
        return None
    fields = json.loads(stored)
    layers = {name: Share(**share) for name, share in fields["layers"].items()}
    return RankRecord(**{**fields, "layers": layers})


def need_no_rank(path: str | PathLike[str], proto: onnx.ModelProto) -> None:
    """Checks that one process can run a file by itself.

    Raises:
        ValueError: If it is for one of several ranks.
    """
    record = record_of(proto)
    if record is not None and record.ranks > 1:
        raise ValueError(
            f"{path} is for rank {record.rank} of {record.ranks}, which sum over all of them: "
            "dynamo_moe.verify runs them together"
        )


def files_of_ranks(path: str | PathLike[str]) -> list[tuple[Path, onnx.ModelProto]]:
    """Returns the files of all ranks, in order, and their graphs; given any of them.

    Raises:
        ValueError: If the file is for no rank, is not named after its rank, or the files are not
            those of one model: ranks, layers, inputs or outputs differ, or their shares do, or
            experts are missing.
        FileNotFoundError: If a rank's file is missing.
    """
    path = Path(path)
    proto = load_graph(path)
    record = record_of(proto)
    if record is None:
        raise ValueError(f"{path} is a file for one device, not for a rank of several")
    ending = f".rank{record.rank}"
    if not path.stem.endswith(ending):
        raise ValueError(
            f"{path} is for rank {record.rank}: without '{ending}' in its name, the other ranks' "
            "files cannot be found"
        )
    base = path.with_name(f"{path.stem.removesuffix(ending)}{path.suffix}")
    paths = [rank_path(base, rank) for rank in range(record.ranks)]
    for rank, file in enumerate(paths):
        if not file.is_file():
            raise FileNotFoundError(f"the file of rank {rank} of {record.ranks} is missing: {file}")
    files = [(file, proto if file == path else load_graph(file)) for file in paths]
    check(files)
    return files


def header_of(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns what :func:`check` looks at: a graph's inputs and outputs, and the metadata."""
    graph = onnx.GraphProto(input=proto.graph.input, output=proto.graph.output)
    return onnx.ModelProto(graph=graph, metadata_props=proto.metadata_props)


def check(files: Sequence[tuple[Path, onnx.ModelProto]]) -> None:
    """Checks that the files of all ranks, in order, are those of one model.

    Raises:
        ValueError: If they do not fit each other, or experts are missing.
    """
    (first, of_first), *_ = files
    following: dict[str, int] = {}
    totals: dict[str, int] = {}
    for rank, (path, proto) in enumerate(files):
        record = record_of(proto)
        if record is None or (record.rank, record.ranks) != (rank, len(files)):
            was = "no rank" if record is None else f"rank {record.rank} of {record.ranks}"
            raise ValueError(f"{path} must be for rank {rank} of {len(files)}, and is for {was}")
        of_all = record_of(of_first)
        if of_all is not None and record.export != of_all.export:
            raise ValueError(f"{path} and {first} were written by different exports")
        if of_all is not None and record.split != of_all.split:
            raise ValueError(
                f"{path} has a share of {dict(record.split)}, and {first} of {dict(of_all.split)}"
            )
        for kind in ("input", "output"):
            names, others = (
                _types(getattr(graph, kind)) for graph in (of_first.graph, proto.graph)
            )
            if names != others:
                raise ValueError(f"{path} has other {kind}s than {first}: {others}, not {names}")
        if rank == 0:
            following = dict.fromkeys(record.layers, 0)
            totals = {name: share.total for name, share in record.layers.items()}
        if record.layers.keys() != following.keys():
            raise ValueError(f"{path} has other layers than {first}")
        for name, share in record.layers.items():
            if share.first != following[name] or share.total != totals[name]:
                raise ValueError(
                    f"{path} has experts {share.first} to {share.first + share.count - 1} of "
                    f"{share.total} of {name}; after the ranks before, they must begin at "
                    f"{following[name]} of {totals[name]}"
                )
            following[name] += share.count
    for name, count in following.items():
        if count != totals[name]:
            raise ValueError(f"the files have {count} of the {totals[name]} experts of {name}")


def _types(values: Sequence[onnx.ValueInfoProto]) -> list[tuple[str, int, list[int | str]]]:
    """Returns names, dtypes and shapes."""
    types = [(value.name, value.type.tensor_type) for value in values]
    return [
        (name, kind.elem_type, [size.dim_param or size.dim_value for size in kind.shape.dim])
        for name, kind in types
    ]
