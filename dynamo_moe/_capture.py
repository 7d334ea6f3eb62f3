"""From a PyTorch module to an ``ExportedProgram`` that PyTorch's ONNX exporter can translate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental import _config
from torch.nn.modules import transformer

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
_IS_CAUSAL = "_detect_is_causal_mask"


@phase("capture")
def capture(model: torch.nn.Module, example: DynamicExample) -> ExportedProgram:
    """Traces the model: without Python's control flow first, as that is faster; then with it.

    Plain routers are part of their layers' nodes in what is returned.

    Raises:
        Exception: Whatever the model's code or the tracer raises, from the first attempt.
    """
    try:
        program = _trace(model, example, strict=False)
    except Exception as failure:  # The model's own code runs.
        try:
            program = _trace(model, example, strict=True)
        except Exception:
            raise failure from None
    _unsqueeze_complex(program)
    fuse_routers(program)
    return program


def _trace(model: torch.nn.Module, example: DynamicExample, *, strict: bool) -> ExportedProgram:
    # What torch.onnx.export does around torch.export: a size of 0 or 1 is no case of its own, and
    # LSTMs and GRUs become loops.
    with ExitStack() as stack:
        stack.enter_context(exportable_scans())
        stack.enter_context(cheap_tracing())
        stack.enter_context(_exportable_transformers())
        stack.enter_context(_exportable_casts())
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


@contextmanager
def _exportable_casts() -> Iterator[None]:
    """Lets a forward cast a module to the dtype that it has, as ``self.router.float()`` does.

    Such a cast would assign the parameters anew, which a trace does not allow.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        held = (*module.parameters(recurse), *module.buffers(recurse))
        kinds = {(tensor.dtype, tensor.device) for tensor in held}
        cast: Callable[..., nn.Module] = original
        return module if _keeps(function, kinds) else cast(module, function, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _keeps(
    function: Callable[[Tensor], Tensor], kinds: Iterable[tuple[torch.dtype, torch.device]]
) -> bool:
    """Whether a function of tensors, such as a cast, leaves such tensors what they are."""
    try:
        results = [function(torch.empty(0, dtype=dtype, device=device)) for dtype, device in kinds]
    except Exception:  # Such as for a device that is not there; the module's own cast will say it.
        return False
    return all((r.dtype, r.device) == kind for r, kind in zip(results, kinds, strict=True))


def _unsqueeze_complex(program: ExportedProgram) -> None:
    """Replaces ``unsqueeze`` of complex tensors by ``stack`` of one.

    The rotary embeddings of DeepSeek-V2 and Llama 4 need it: onnxscript 0.7 translates complex
    ``stack``, but not ``unsqueeze``.
    """
    for node in program.graph.nodes:
        if node.target is _aten.unsqueeze.default and node.meta["val"].is_complex():
            tensor, dimension = node.args
            node.target, node.args = _aten.stack.default, ([tensor], dimension)
