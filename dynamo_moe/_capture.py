"""From a PyTorch module to an ``ExportedProgram`` that PyTorch's ONNX exporter can translate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental import _config
from torch.nn.modules import transformer

from dynamo_moe._autocast import with_casts
from dynamo_moe._dynamic_shapes import DynamicExample
from dynamo_moe._phases import phase
from dynamo_moe._router_fusion import fuse_routers
from dynamo_moe._state_space import exportable_scans
from dynamo_moe._tracing_costs import cheap_tracing

try:
    from torch.export import _patches
except ImportError:  # Before torch 2.13.
    _patches = None  # type: ignore[assignment]

__all__ = ["capture"]

_aten = torch.ops.aten
_NORMS = frozenset(
    {
        _aten.batch_norm.default,
        _aten.group_norm.default,
        _aten.instance_norm.default,
        _aten.layer_norm.default,
    }
)
_IS_CAUSAL = "_detect_is_causal_mask"


@phase("capture")
def capture(model: torch.nn.Module, example: DynamicExample) -> ExportedProgram:
    """Traces the model: without Python's control flow first, as that is faster; then with it.

    Plain routers are part of their layers' nodes in what is returned.

    Raises:
        Exception: Whatever the model's code or the tracer raises, from the first attempt.
    """
    try:
        program = with_casts(_trace(model, example, strict=False), strict=False)
    except Exception as failure:  # The model's own code runs.
        try:
            program = with_casts(_trace(model, example, strict=True), strict=True)
        except Exception:
            raise failure from None
    _unsqueeze_complex(program)
    _widen_norms(program)
    fuse_routers(program)
    return program


def _trace(model: torch.nn.Module, example: DynamicExample, *, strict: bool) -> ExportedProgram:
    # What torch.onnx.export does around torch.export: a size of 0 or 1 is no case of its own, and
    # LSTMs and GRUs become loops.
    with ExitStack() as stack:
        stack.enter_context(exportable_scans())
        stack.enter_context(cheap_tracing())
        stack.enter_context(_exportable_transformers())
        patch: Any = _config.patch  # type: ignore[attr-defined]
        stack.enter_context(patch(backed_size_oblivious=True))
        for network in ("lstm", "gru"):
            register = getattr(_patches, f"register_{network}_while_loop_decomposition", None)
            if register is not None and example.shapes:
                stack.enter_context(register())
        return torch.export.export(
            model,
            example.args,
            kwargs=example.kwargs,
            dynamic_shapes=example.shapes,
            strict=strict,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


@contextmanager
def _exportable_transformers() -> Iterator[None]:
    """Lets the transformers of ``torch.nn`` compute layer by layer, with the mask that they get.

    In evaluation mode they can call fused operators, which ONNX has no translation for. And they
    compare a mask's values with those of a causal one, only to choose a faster kernel.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    original = getattr(transformer, _IS_CAUSAL, None)

    def is_causal_as_told(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return is_causal is True

    torch.backends.mha.set_fastpath_enabled(False)
    if original is not None:
        setattr(transformer, _IS_CAUSAL, is_causal_as_told)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        if original is not None:
            setattr(transformer, _IS_CAUSAL, original)


def _unsqueeze_complex(program: ExportedProgram) -> None:
    """Replaces ``unsqueeze`` of complex tensors by ``stack`` of one.

    The rotary embeddings of DeepSeek-V2 and Llama 4 need it: onnxscript 0.7 translates complex
    ``stack``, but not ``unsqueeze``.
    """
    for node in program.graph.nodes:
        if node.target is _aten.unsqueeze.default and node.meta["val"].is_complex():
            tensor, dimension = node.args
            node.target, node.args = _aten.stack.default, ([tensor], dimension)


def _widen_norms(program: ExportedProgram) -> None:
    """Casts the inputs of norms whose parameters have another dtype, as PyTorch does inside.

    ONNX wants one dtype. On a CPU, autocast brings norms into this state.
    """
    graphs = (each for each in program.graph_module.modules() if isinstance(each, fx.GraphModule))
    for node in [node for each in graphs for node in each.graph.nodes if node.target in _NORMS]:
        x, dtypes = node.args[0], _dtypes(node.args[1:]) - {node.args[0].meta["val"].dtype}
        if len(dtypes) != 1:
            continue
        with node.graph.inserting_before(node):
            wide = node.graph.call_function(_aten.to.dtype, (x, *dtypes))
            norm = node.graph.call_function(node.target, (wide, *node.args[1:]), node.kwargs)
        wide.meta = {**node.meta, "val": x.meta["val"].to(*dtypes)}
        norm.meta = {**node.meta, "val": node.meta["val"].to(*dtypes)}
        # The node itself keeps its name, which may be that of a result.
        node.target, node.args, node.kwargs = _aten.to.dtype, (norm, node.meta["val"].dtype), {}


def _dtypes(arguments: Iterable[Any]) -> set[torch.dtype]:
    return {
        each.meta["val"].dtype
        for each in arguments
        if isinstance(each, fx.Node) and isinstance(each.meta["val"], Tensor)
    }
