"""Why a trace or its translation failed, at which line of the model, and what to do about it."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.model_lines import model_line
from dynamo_moe.operators.registry import NodeError
from dynamo_moe.private import tracer
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing.fixed_sizes import FixedSizeError
from dynamo_moe.tracing.nodes import UnfollowedError

_TORCH = Path(torch.__file__).parent
_LANGUAGE_MODELS = Path(__file__).parents[1] / "language_models"
_PICTURES = (
    ". Vision towers of some models of transformers are exported with the model, by "
    "dynamo_moe.export_language_model(model, folder, task='image-text-to-text') "
    "(docs/how-to/models_that_see_pictures.md)"
)
_FIX_A_SIZE = "Name it in dynamic_shapes with None, as in {'argument': {0: None}}"


def headline(error: BaseException | None) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def first_cause(error: BaseException) -> BaseException:
    """Returns the error that led to another; those of PyTorch's exporter are pages long."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def casts_a_module(error: BaseException) -> bool:
    """Whether an error comes from ``module.to()``, ``.float()`` or the like within a forward."""
    return any(
        tracer.is_module_cast(frame.f_code.co_name) and _is_in(frame, _TORCH)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def model_failure(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], failure: BaseException
) -> Exception | None:
    """Returns the exception that the model raises in PyTorch too, if an operator failed in a trace.

    It does not run where the trace's failure shows that no operator refused the example.
    """
    *_, (frame, _) = traceback.walk_tb(failure.__traceback__)
    by_an_operator = _is_in(frame, _TORCH) and not casts_a_module(failure)
    if not by_an_operator or type(failure).__module__.startswith(tracer.TRACERS):
        return None
    return failure_on(model, args, kwargs)


def failure_on(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Exception | None:
    """Returns the exception that a model raises in PyTorch; it runs once, and is left as it was."""
    try:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad(), state_kept(model):
            torch.func.functional_call(model, buffers, tuple(args), dict(kwargs))
    except Exception as error:  # The model's own code runs.
        return error
    return None


def described(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns the tensors of an example by argument, like ``x [2, 5, 16] float32``."""
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    tensors = (
        f"{name} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for name, value in arguments.items()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    )
    return ", ".join(tensors) or "no tensor"


def explain_model_failure(error: Exception, example: str) -> str:
    """Returns the message for a model that fails without any exporter."""
    line = model_line(error)
    where = f", at {line}" if line else ""
    return f"the model itself fails on the example ({example}){where}: {str(error).strip()}"


def explain(error: BaseException) -> str:
    """Returns why PyTorch's exporter failed, and what to do about it."""
    if isinstance(error, NodeError | UnfollowedError):
        return str(error)
    if isinstance(error, FixedSizeError):
        return (
            f"a size that should be symbolic is fixed by the model: {error}. {_FIX_A_SIZE}, or, "
            "for the sizes that the decision is right for, with Dim('name', max=...) or "
            "16 * Dim('name')"
        )
    cause = str(error.__cause__ or error).strip()
    line = model_line(error)
    where = f" at {line}" if line else ""
    if casts_a_module(error):
        return (
            f"the model casts or moves a module in its forward{where}, which no trace can follow: "
            "cast it once, before the export, or its weights where they are used, as in "
            f"F.linear(x, self.proj.weight.float()) (PyTorch: {cause.splitlines()[0]})"
        )
    if "data-dependent expression" in cause or "_local_scalar_dense" in cause:
        return (
            f"the model decides by the values of a tensor{where}, and a trace has only shapes: "
            f"{cause.splitlines()[0]}{_PICTURES if _packs_pictures(error) else ''}"
        )
    if "conflicts between user-specified ranges" in cause:
        conflicts = "; ".join(re.findall(r"inferred a (static shape of .*)\.", cause))
        lines = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
        notes = "; ".join(dict.fromkeys(lines))
        return (
            f"a dimension that should be symbolic is fixed by the model: {conflicts or cause}"
            f"{notes and ', by '}{notes}. {_FIX_A_SIZE}"
        )
    if re.search(r"DynamicCache|cache_utils\.\w+Cache", cause):
        return (
            "the model returns its cache of keys and values: pass use_cache=False, or use "
            "dynamo_moe.export_language_model"
        )
    fixed = re.search(r"target=torch\.ops\.([\w.]+)\].*SymbolicTensor", cause, re.DOTALL)
    if fixed:
        return (
            f"operator {fixed[1]} has a size that should be symbolic where ONNX has a constant. "
            f"{_FIX_A_SIZE}"
        )
    unknown = re.search(r"Found <class '([^']+)'> in output, which is not a known type", cause)
    if unknown:
        return (
            f"the model returns an object of the class {unknown[1]}, in which PyTorch finds no "
            "tensors: pass the class, if it is a dataclass, to torch.export.register_dataclass "
            "before the export, or return a dictionary or a tuple"
        )
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", cause)
    if missing and "complex-valued input" in cause:
        return (
            f"operator {missing[1]} has no translation to ONNX for complex tensors: ONNX has none; "
            "compute with torch.view_as_real"
        )
    if missing:
        return (
            f"operator {missing[1]} has no translation to ONNX, nor a decomposition into operators "
            "that have one; dynamo_moe.register_op makes one node of it"
        )
    return f"PyTorch's exporter cannot take the model{where}: {cause}"


def _packs_pictures(error: BaseException) -> bool:
    """Whether code failed that gets pictures' sizes as towers of transformers do, in no part."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("grid_thw" in frame.f_code.co_varnames for frame in frames) and not any(
        _is_in(frame, _LANGUAGE_MODELS) for frame in frames
    )


def _is_in(frame: FrameType, folder: Path) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(folder)
