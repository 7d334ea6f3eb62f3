"""Writing an ONNX model: beside its place first, then renamed into it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir

__all__ = ["EXTERNAL_DATA_LIMIT", "model_bytes", "save_model"]

# A protobuf message cannot pass 2 GiB; the graph itself needs room too.
EXTERNAL_DATA_LIMIT = 2**31 - 2**26


def model_bytes(model: ir.Model) -> int:
    """Returns the bytes of the model's initializers."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def save_model(model: ir.Model, path: Path, external_data: bool | None) -> list[Path]:
    """Writes the model, and its weights to ``<name>.data`` where asked for or needed.

    A reader of ``path`` sees the old file or the new one, never half of either.

    Args:
        model: The model to write.
        path: Where to; its folder must exist.
        external_data: Weights in a file beside the model; None: only above 2 GB.

    Returns:
        The files written, the model first.

    Raises:
        ValueError: If ``external_data`` is False and the weights pass 2 GB.
        FileNotFoundError: If the folder does not exist.
    """
    weights = model_bytes(model)
    if external_data is False and weights > EXTERNAL_DATA_LIMIT:
        raise ValueError(
            f"the weights have {weights} bytes; one ONNX file holds at most "
            f"{EXTERNAL_DATA_LIMIT}: leave external_data unset or pass True"
        )
    if external_data is None:
        external_data = weights > EXTERNAL_DATA_LIMIT
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} into")
    names = [path.name, f"{path.name}.data"] if external_data else [path.name]
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        beside = Path(folder)
        ir.save(model, beside / path.name, external_data=names[1] if external_data else None)
        written = [name for name in reversed(names) if (beside / name).exists()]
        for name in written:
            (beside / name).replace(path.parent / name)
    return [path.parent / name for name in reversed(written)]
