"""From a traced program to ONNX nodes: in our own steps, or by ``torch.onnx.export``.

Our steps are several times as fast, but use what PyTorch keeps to itself. In a version of PyTorch
that they have not been run with, or where one fails, ``torch.onnx.export`` does the work.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from dynamo_moe.moe_nodes.translation import onnx_translation_table
from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing.decomposition import NeedsRetraceError
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS
from dynamo_moe.tracing.fixed_sizes import FixedSizeError, SizeTrials
from dynamo_moe.tracing.known_torch import is_known

try:
    from dynamo_moe.tracing.exporter_steps import translate_in_steps
except ImportError:  # A version of PyTorch that has rearranged its exporter.
    translate_in_steps = None  # type: ignore[assignment]

__all__ = ["translate"]

_LOG = logging.getLogger(__name__)


@phase("translation")
def translate(program: ExportedProgram, opset: int, trials: SizeTrials) -> ir.Model:
    """Returns the program's graph as ONNX nodes, its MoE layers as bare nodes.

    Raises:
        FixedSizeError: If an operator becomes nodes that are right at the example's sizes only.
        torch.onnx.OnnxExporterError: If an operator has no translation.
    """
    with _quiet():
        if translate_in_steps is not None and is_known():
            try:
                return translate_in_steps(program, opset, trials)
            except FixedSizeError:
                raise
            except NeedsRetraceError as reason:
                _LOG.info("The whole program is traced again: %s", reason)
            except Exception:  # Whatever it is, the public way reports it, or can do without.
                _LOG.info("torch.onnx.export takes over", exc_info=True)
        return _translate_by_torch(program, opset)


def _translate_by_torch(program: ExportedProgram, opset: int) -> ir.Model:
    onnx_program = torch.onnx.export(
        _with_own_decompositions(program),
        dynamo=True,
        verbose=False,
        optimize=False,
        opset_version=opset,
        custom_translation_table=onnx_translation_table(),
    )
    if onnx_program is None:  # The type allows it; with dynamo=True it never happens.
        raise torch.onnx.OnnxExporterError("torch.onnx.export returned no program")
    return onnx_program.model


def _with_own_decompositions(program: ExportedProgram) -> ExportedProgram:
    """Returns the program without the operators that PyTorch's exporter translates wrongly."""
    modules = (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
    targets = {node.target for module in modules for node in module.graph.nodes}
    own = {target: DECOMPOSITIONS[target] for target in targets & DECOMPOSITIONS.keys()}
    return program.run_decompositions(own) if own else program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's remarks about packages and functions that are not the user's."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        registration.setLevel(level)
