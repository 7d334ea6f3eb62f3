"""ONNX Runtime's sessions in which the native library computes the MoE layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_moe.files import rank_files
from dynamo_moe.files.library_operators import library, operator_nodes, take_operators
from dynamo_moe.files.model_files import load_graph
from dynamo_moe.moe_nodes.nodes import OFFLOADED_DOMAIN
from dynamo_moe.session_entries import keep_tokens

if TYPE_CHECKING:
    import onnxruntime

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_CPU = ("CPUExecutionProvider",)
_CUDA = "CUDAExecutionProvider"
# Read by the library when it is registered.
_KERNELS = "dynamo_moe.kernels"


def session(
    path: str | os.PathLike[str],
    *,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = _CPU,
    kernels: str | os.PathLike[str] | None = None,
) -> onnxruntime.InferenceSession:
    """Opens an exported file in ONNX Runtime, with the native library's operators for its layers.

    The operators compute MoE layers on the CPU, with plain and with packed weights; ONNX Runtime
    takes them in place of the functions beside the nodes. With the CUDA provider ahead of the
    CPU's, the operators launch kernels that were compiled for this file, and files of
    :func:`dynamo_moe.offload_file` open too. Functions still compute layers in float64. A file
    whose layers have several configurations, or some in float64, is changed in memory so that each
    layer finds its operator.

    Args:
        path: The file, as :func:`dynamo_moe.export` writes it with the target ``plugin``. One with
            another target has no such nodes, and opens as in ONNX Runtime.
        options: Options of the session, to which the library is added. A set of options takes the
            library once. Products of packed linear layers read tokens as they are, as in
            :func:`verify`; with the entry ``session.qdq_matmulnbits_accuracy_level`` of 4, which is
            ONNX Runtime's own default, they round them to 8 bits and may be faster.
        providers: ONNX Runtime's execution providers, those that are preferred first. The operators
            are for ``CPUExecutionProvider`` and, from ONNX Runtime 1.18 on,
            ``CUDAExecutionProvider``.
        kernels: The bundle of ``dynamo-moe compile``, for the CUDA provider. By default, it is the
            one that the environment variable ``DYNAMO_MOE_KERNELS`` names, or else
            ``dynamo_moe.moek`` beside the library; a node's attribute ``kernels`` comes first.

    Raises:
        FileNotFoundError: If there is no such file or bundle, or the native library is missing.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If the file is not an ONNX model; if there are kernels or offloaded experts, and
            the CUDA provider is not among ``providers``; or if there are offloaded experts, and
            this ONNX Runtime has no CUDA provider.
        TypeError: If ``providers`` is one name.
    """
    import onnxruntime

    if isinstance(providers, str):
        raise TypeError(f"providers must be a list of names, such as [{providers!r}]")
    model = load_graph(path)
    rank_files.need_no_rank(path, model)
    options = onnxruntime.SessionOptions() if options is None else options
    if any(node.domain == OFFLOADED_DOMAIN for node in operator_nodes(model)):
        # The runtime says of such a node only that it finds no implementation.
        for names in (providers, onnxruntime.get_available_providers()):
            _need_provider(f"the offloaded experts of {path}", names)
    if kernels is not None:
        _need_provider("kernels", providers)
        options.add_session_config_entry(_KERNELS, str(Path(kernels).resolve(strict=True)))
    keep_tokens(options)
    options.register_custom_ops_library(library())
    if not take_operators(model):
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=list(providers))
    folder = Path(path).resolve().parent
    options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=list(providers)
    )


def _need_provider(what: str, providers: Sequence[Any]) -> None:
    names = [each if isinstance(each, str) else each[0] for each in providers]
    if _CUDA not in names:
        raise ValueError(f"{what} are for the provider {_CUDA}, which is not among {names}")
