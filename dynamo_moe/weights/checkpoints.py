"""Models whose weights stay in the files of a checkpoint until they are written to an ONNX file."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynamo_moe.weights.lazy_tensors import LazyTensor, Stored
from dynamo_moe.weights.quantized_checkpoints import check_plain, with_decoded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_INDEX = "model.safetensors.index.json"
# A header longer than this is not read: the format's own limit.
_MAX_HEADER_BYTES = 100_000_000


def open_checkpoint(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Opens a checkpoint of transformers without reading its weights.

    transformers' own loader renames, fuses and transposes the checkpoint's tensors as this model
    needs them, lazily (:class:`dynamo_moe.weights.lazy_tensors.LazyTensor`). The model can be
    converted and exported, which streams the weights from file to file; it cannot be run before
    :func:`read_weights`.

    Of a quantised checkpoint :func:`convert` leaves the experts' bytes as they are, and
    :func:`export` those of other matrices, where opset 21 or the format permits; what is left is
    decoded as it is written. It may be in MXFP4 (gpt-oss), in FP8 by blocks (DeepSeek-V3),
    with FP4 experts (DeepSeek-V4), of compressed-tensors (``pack-quantized``, ``float-quantized``,
    ``int-quantized``, ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``, ``mxfp8-quantized``,
    ``mixed-precision`` of these), ModelOpt (NVFP4, FP8, MXFP8, ``MIXED_PRECISION`` of these), GPTQ,
    AWQ or AutoRound.

    Args:
        folder: A local folder with ``config.json`` and safetensors files.
        dtype: Floating weights are cast to this as they are written; None: the checkpoint's own.

    Returns:
        The model of the config's ``architectures``, in evaluation mode.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the files do not hold what the model needs, the checkpoint is quantised in a
            way that is not taken, or transformers has no such model.
        TypeError: If ``dtype`` is not a floating dtype.
        ModuleNotFoundError: If transformers is not installed.
    """
    return _load(Path(folder), dtype, lazy=True)


def _by_modelopt(folder: Path) -> dict[str, Any] | None:
    """Returns what ModelOpt says in a file of its own, where ``config.json`` says nothing."""
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        return None
    said = json.loads(file.read_text()).get("quantization", {})
    return {"quant_method": "modelopt", **said}


def load_checkpoint(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Reads a checkpoint whole; like :func:`open_checkpoint` otherwise."""
    return _load(Path(folder), dtype, lazy=False)


def _load(folder: Path, dtype: torch.dtype | None, *, lazy: bool) -> PreTrainedModel:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: it is not a checkpoint's folder")
    tensors: dict[str, Any] = open_tensors(folder)
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    quantization = getattr(config, "quantization_config", None) or _by_modelopt(folder)
    if quantization is not None:
        try:
            stored_as = config.dtype if isinstance(config.dtype, torch.dtype) else None
            tensors = with_decoded(tensors, quantization, dtype or stored_as)
        except ValueError as error:
            raise ValueError(f"{folder} is quantised: {error}") from error
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    else:
        try:
            check_plain(tensors)
        except ValueError as error:
            raise ValueError(f"{folder} says nothing of a quantisation: {error}") from error
    name = (config.architectures or [None])[0]
    model_class = getattr(transformers, str(name), None)
    if model_class is None:
        raise ValueError(f"{folder}/config.json names the architecture {name!r}, unknown here")
    with _quiet(transformers):
        model, loaded = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors if lazy else {name: t.read() for name, t in tensors.items()},
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
        )
    # As from_pretrained leaves them.
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if loaded[what]:
            first = min(map(str, loaded[what]))
            raise ValueError(
                f"{folder} does not fit {name}: {what.replace('_', ' ')} {first}, "
                f"{len(loaded[what])} in all"
            )
    return model.eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers from showing a bar for what takes no time, and its report of the keys."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def open_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Opens safetensors files without reading their values.

    With ``load_state_dict(..., assign=True)``, any model made under ``torch.device("meta")`` takes
    these as its parameters.

    Args:
        path: One file, or a folder with ``model.safetensors``, or with several files and their
            ``model.safetensors.index.json``.

    Returns:
        Lazy tensors by name (:class:`dynamo_moe.weights.lazy_tensors.LazyTensor`).

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is not in the safetensors format, or does not hold what the index
            says.
    """
    path = Path(path)
    if path.is_file():
        return _open_file(path)
    if (path / _INDEX).is_file():
        return _open_indexed(path)
    if (path / "model.safetensors").is_file():
        return _open_file(path / "model.safetensors")
    raise FileNotFoundError(f"{path} holds neither model.safetensors nor {_INDEX}")


def _open_indexed(folder: Path) -> dict[str, torch.Tensor]:
    try:
        files_by_tensor: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / _INDEX} is not an index of safetensors files") from error
    files = {}
    for name in sorted(set(files_by_tensor.values())):
        if Path(name).name != name:
            raise ValueError(f"{folder / _INDEX} names {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}, which its index names")
        files[name] = _open_file(folder / name)
    for tensor, name in files_by_tensor.items():
        if tensor not in files[name]:
            raise ValueError(f"{folder / name} lacks {tensor}, which the index places there")
    return {tensor: files[name][tensor] for tensor, name in files_by_tensor.items()}


def _open_file(path: Path) -> dict[str, torch.Tensor]:
    """Reads the header of a safetensors file.

    Format: https://huggingface.co/docs/safetensors: the header's length as 8 bytes, little endian;
    the header in JSON; the tensors' bytes. The safetensors package gives no offsets.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if size < 8 or not length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a safetensors file: its header has {length} bytes")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            stored = {name: _stored(path, start, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    for name, tensor in stored.items():
        if tensor.offset + tensor.nbytes > size:
            raise ValueError(f"{path} is cut off: {name} ends beyond its {size} bytes")
    return {name: LazyTensor.stored(tensor) for name, tensor in stored.items()}


def _stored(path: Path, start: int, entry: dict[str, Any]) -> Stored:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is unknown")
    shape = tuple(int(length) for length in entry["shape"])
    first, last = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if not 0 <= first <= last or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor {list(shape)} of {dtype} has the bytes {first} to {last}")
    return Stored(path, start + first, shape, dtype)
