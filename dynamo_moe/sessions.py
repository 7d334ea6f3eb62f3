"""ONNX Runtime's sessions in which the native library computes the MoE layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_moe.files import rank_files
from dynamo_moe.files.library_operators import library, take_operators
from dynamo_moe.files.model_files import load_graph

if TYPE_CHECKING:
    import onnxruntime

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_CPU = ("CPUExecutionProvider",)


def session(
    path: str | os.PathLike[str],
    *,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = _CPU,
) -> onnxruntime.InferenceSession:
    """Opens an exported file in ONNX Runtime, with the native library's operators for its layers.

    The operators compute MoE layers on the CPU, with plain and with packed weights; ONNX Runtime
    takes them in place of the functions beside the nodes. Functions still compute layers in
    float64. A file whose layers have several configurations, or some in float64, is changed in
    memory so that each layer finds its operator.

    Args:
        path: The file, as :func:`dynamo_moe.export` writes it with the target ``plugin``. One with
            another target has no such nodes, and opens as in ONNX Runtime.
        options: Options of the session, to which the library is added. A set of options takes the
            library once.
        providers: ONNX Runtime's execution providers. The operators are for the CPU alone.

    Raises:
        FileNotFoundError: If there is no such file, or the native library is missing.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If the file is not an ONNX model.
    """
    import onnxruntime

    model = load_graph(path)
    rank_files.need_no_rank(path, model)
    options = onnxruntime.SessionOptions() if options is None else options
    options.register_custom_ops_library(library())
    if not take_operators(model):
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=list(providers))
    folder = Path(path).resolve().parent
    options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=list(providers)
    )
