"""The private name of PyTorch by which a program's gradients are traced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from dataclasses import replace

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec

from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import enable_python_dispatcher

__all__ = ["missing", "with_gradients"]

try:
    from torch.export.experimental import _export_forward_backward
except ImportError:
    _export_forward_backward = None  # type: ignore[assignment]


def missing() -> str | None:
    """Returns why this PyTorch's gradients cannot be exported, which has no public way."""
    name = "torch.export.experimental._export_forward_backward"
    reason = tracer.missing()
    if reason is None and _export_forward_backward is None:
        reason = f"it has no {name}"
    if reason is None:
        first, *others = inspect.signature(_export_forward_backward).parameters.values()
        if first.name != "ep" or any(parameter.default is parameter.empty for parameter in others):
            reason = f"{name} takes {', '.join(parameter.name for parameter in (first, *others))}"
    return reason


def with_gradients(
    program: ExportedProgram, trained: Collection[str]
) -> tuple[ExportedProgram, list[OutputSpec]]:
    """Returns a program whose one result is a loss with the gradients of some parameters.

    All are plain results of the returned program; the specifications beside it say which they are.
    """
    names = program.graph_signature.inputs_to_parameters
    for node in program.graph.find_nodes(op="placeholder"):
        # A tensor with two names has two inputs, of which one is used.
        if node.name in names and not (node.users and names[node.name] in trained):
            node.meta["val"] = node.meta["val"].detach()
    # Padding by symbolic sizes needs the dispatcher.
    with enable_python_dispatcher():
        joint = copy.copy(_export_forward_backward(program))
    signature = joint.graph_signature
    plain = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in signature.output_specs]
    joint._graph_signature = replace(signature, output_specs=plain)
    return joint, list(signature.output_specs)
