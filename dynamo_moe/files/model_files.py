"""Reading an ONNX model without its weights, and writing one."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from dynamo_moe.files import protobuf
from dynamo_moe.progress import phases
from dynamo_moe.weights.placeholders import written_in_turn

# A protobuf message cannot pass 2 GiB; the graph itself needs room too.
EXTERNAL_DATA_LIMIT = 2**31 - 2**26
# Bytes up to which a weight stays inside the model's file.
_SMALL = 256


def destination(path: Path) -> Path:
    """Returns where a file for ``path`` is written: there, or where a link leads.

    Raises:
        FileNotFoundError: If its folder does not exist.
        IsADirectoryError: If it is a folder itself.
        FileExistsError: If it is a device or the like, which a file would replace.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no file, and would be replaced by one; name another")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} into")
    return path


def model_bytes(model: ir.Model) -> int:
    """Returns the bytes of the model's initializers."""
    return sum(map(_bytes_of, model.graph.initializers.values()))


def without_weights(
    model: ir.Model,
    *,
    as_inputs: bool = False,
    small: int = _SMALL,
) -> onnx.ModelProto:
    """Returns the model without the main graph's initializers, but for those up to ``small`` bytes.

    If asked for, the others are inputs, after the model's own.
    """
    large = _large(model, small)
    proto = protobuf.without(model, large)
    if as_inputs:
        protobuf.add_inputs(proto.graph, large)
    return proto


@phases.phase("serialization")
def save_model(
    model: ir.Model,
    path: Path,
    external_data: bool | None,
    proto: onnx.ModelProto | None = None,
) -> list[Path]:
    """Writes the model, and its weights to ``<name>.data`` if asked for, or (None) above 2 GB.

    Weights that are external tensors already stay where they are. What :func:`without_weights`
    returns of the model as it is can be given, which saves time; it is taken apart.

    Returns:
        The files written, the model first.

    Raises:
        ValueError: If ``external_data`` is False and the weights pass 2 GB.
        OSError: If the disk has no room for the weights.
    """
    values = [value for value in model.graph.initializers.values() if _is_in_memory(value)]
    weights = sum(_bytes_of(value) for value in values)
    if external_data is False and weights > EXTERNAL_DATA_LIMIT:
        raise ValueError(
            f"the weights have {weights} bytes; one ONNX file holds at most "
            f"{EXTERNAL_DATA_LIMIT}: leave external_data unset or pass True"
        )
    if external_data is None:
        external_data = weights > EXTERNAL_DATA_LIMIT
    free = shutil.disk_usage(path.parent).free
    if weights > free:
        reason = f"{path.name} needs {weights} bytes for its weights, {path.parent} has {free} left"
        raise OSError(errno.ENOSPC, reason)
    with written_in_turn(model), _folder_beside(path) as folder:
        part, data = folder / "new" / path.name, folder / "new" / f"{path.name}.data"
        part.parent.mkdir()
        large = _large(model)
        if proto is None:
            proto = protobuf.without(model, large)
        if external_data:
            _move_out([value for value in large if _is_in_memory(value)], data, weights)
        protobuf.write(proto, part, large)
        files = [part, data] if data.exists() else [part]
        return move_together(files, path.parent, old=folder / "old")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path in a folder beside ``path``; the file written there takes its place.

    A reader of ``path`` sees the old file or the new one, never half of either. If the body raises,
    ``path`` stays as it is.
    """
    with _folder_beside(path) as folder:
        yield folder / path.name
        (folder / path.name).replace(path)


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder)


def rename_model(files: Sequence[Path], path: Path, *, data: Path | None = None) -> list[Path]:
    """Gives the files of :func:`save_model` the name that they were meant for, in the same folder.

    All of them, or none. Where the weights lie beside the model, their new name is all that changes
    in it: ``data``, or that of ``path`` with ``.data`` behind it. Returns the files, the model
    first.
    """
    model, *beside = files
    if not beside:
        model.replace(path)
        return [path]
    [old] = beside
    new = path.with_name(f"{path.name}.data") if data is None else data
    proto = load_graph(model)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if (entry.key, entry.value) == ("location", old.name):
                entry.value = new.name
    with _folder_beside(path) as folder:
        part, data_part = folder / "new" / path.name, folder / "new" / new.name
        part.parent.mkdir()
        part.write_bytes(proto.SerializeToString())
        old.replace(data_part)
        try:
            renamed = move_together([part, data_part], path.parent, old=folder / "old")
        except BaseException:
            data_part.replace(old)
            raise
    if model != path:
        model.unlink()
    return renamed


def move_together(files: Sequence[Path], folder: Path, *, old: Path) -> list[Path]:
    """Moves files into a folder, all of them or none; models last, so that their weights are there.

    Those whose places they take are in ``old`` afterwards, a folder to be made. Returns the files
    where they are, as they were listed: each model before its weights.
    """
    folder.mkdir(exist_ok=True)
    old.mkdir()
    done: list[Path] = []
    try:
        for file in reversed(files):
            place = folder / file.name
            if place.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a file cannot replace a directory", place)
            done.append(file)
            if os.path.lexists(place):
                _keep(place, old / file.name)
            file.replace(place)
    except BaseException:
        for file in done:
            kept = old / file.name
            if not file.exists():
                (folder / file.name).replace(file)
            if os.path.lexists(kept):
                kept.replace(folder / file.name)
        raise
    return [folder / file.name for file in files]


def _keep(path: Path, kept: Path) -> None:
    """Gives a file a second name, so that it has the first one until another takes its place."""
    try:
        os.link(path, kept, follow_symlinks=False)
    except (OSError, NotImplementedError):  # Not every file system has links.
        path.replace(kept)


def move_folder(old: Path, new: Path, last: Path) -> None:
    """Moves all files of a folder into another one beside it, and removes what is left of it.

    ``last`` takes its place last, so that what it refers to is there.
    """
    files = [file for file in old.rglob("*") if file.is_file() and file != last]
    for file in (*files, last):
        moved = new / file.relative_to(old)
        moved.parent.mkdir(parents=True, exist_ok=True)
        file.replace(moved)
    shutil.rmtree(old)


def _move_out(values: Sequence[ir.Value], path: Path, total: int) -> None:
    """Writes weights to a file; the values then refer to it."""
    tensors = [value.const_value for value in values if value.const_value is not None]
    if not tensors:
        return
    done = 0

    def began(tensor: ir.TensorProtocol, _: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        phases.report(done, total)
        done += tensor.nbytes

    moved = ir.external_data.convert_tensors_to_external(
        tensors, path.parent, path.name, callback=began
    )
    for value, tensor in zip(values, moved, strict=True):
        value.const_value = tensor
    phases.report(total, total)


def _is_in_memory(value: ir.Value) -> bool:
    return value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor)


def is_small(value: ir.Value, limit: int = _SMALL) -> bool:
    """Whether a weight stays inside the graph; strings do, as they have no bytes."""
    if value.dtype == ir.DataType.STRING:
        return True
    return _bytes_of(value) <= limit and _is_in_memory(value)


def _large(model: ir.Model, limit: int = _SMALL) -> list[ir.Value]:
    return [value for value in model.graph.initializers.values() if not is_small(value, limit)]


def _bytes_of(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def load_graph(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Reads an ONNX file without its external data.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not an ONNX model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    if not path.is_file():
        raise ValueError(f"{path} is not an ONNX model: it is not a file")
    if not path.stat().st_size:
        raise ValueError(f"{path} is not an ONNX model: it is empty")
    model = onnx.ModelProto()
    # Mapped rather than read: weights inside the file are then held once, not twice.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            with memoryview(content) as view:
                model.ParseFromString(view)
        except DecodeError:
            raise ValueError(f"{path} is not an ONNX model: it is not a protobuf message") from None
    if not model.ir_version or not model.HasField("graph"):
        raise ValueError(f"{path} is not an ONNX model: it has no IR version or no graph")
    return model


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, each followed by those in its branches and loop bodies."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """A node's branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs
