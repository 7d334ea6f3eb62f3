"""From a traced program to ONNX nodes: in our own steps, or by ``torch.onnx.export``.

Our steps are those of ``torch.onnx.export``, the slow ones replaced: together several times as
fast, but they use what PyTorch keeps to itself. Where that is missing, or a step fails,
``torch.onnx.export`` does the work.
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.version_converter
import torch
from torch import fx
from torch.export import ExportedProgram

from dynamo_moe.moe_nodes.nodes import set_module
from dynamo_moe.moe_nodes.translation import onnx_translation_table
from dynamo_moe.operators.registry import Operator, operators
from dynamo_moe.private import exporter, tracer
from dynamo_moe.private.pytorch import OpOverload, schema_of
from dynamo_moe.progress.phases import phase
from dynamo_moe.tracing import attention, cache_writes, failures, shortcuts, size_arithmetic
from dynamo_moe.tracing.decomposition import decomposed
from dynamo_moe.tracing.decompositions import DECOMPOSITIONS
from dynamo_moe.tracing.fixed_sizes import FixedSizeError, SizeTrials
from dynamo_moe.tracing.in_place import writes
from dynamo_moe.tracing.nodes import NeedsRetraceError, all_nodes
from dynamo_moe.tracing.size_decisions import decisions_noted, decisions_of

_LOG = logging.getLogger(__name__)

_TRANSLATIONS = {**attention.TRANSLATIONS, **cache_writes.TRANSLATIONS}
_TAKES_OVER = (
    "torch.onnx.export traced the whole program again to translate it, which takes several times "
    "as long"
)


@phase("translation")
def translate(
    program: ExportedProgram, opset: int, trials: SizeTrials, *, retraces: bool = True
) -> tuple[ir.Model, str | None]:
    """Translates a traced program.

    Args:
        program: The program.
        opset: Version of the standard operators.
        trials: What decisions by sizes are checked with.
        retraces: Whether ``torch.onnx.export`` can trace the program again, where our own steps
            fail; one with gradients it cannot.

    Returns:
        The program's graph as ONNX nodes, its MoE layers as bare nodes; and, for the report, why
        ``torch.onnx.export`` did the work, None if our own steps did.

    Raises:
        FixedSizeError: If an operator becomes nodes that are right at the example's sizes only.
        torch.onnx.OnnxExporterError: If an operator has no translation, or PyTorch fails otherwise.
        NeedsRetraceError: If the program would have to be traced again, and cannot.
    """
    with exporter.quiet():
        reason = tracer.missing()
        if not retraces:
            if reason is not None:
                raise torch.onnx.OnnxExporterError(
                    f"PyTorch {torch.__version__} has other private names than are used: {reason}"
                )
            return _translate_in_steps(program, opset, trials), None
        if reason is not None:
            note = (
                f"PyTorch {torch.__version__} is traced and translated by its own exporter alone, "
                f"which takes several times as long: {reason}"
            )
        else:
            try:
                return _translate_in_steps(program, opset, trials), None
            except FixedSizeError:
                raise
            except NeedsRetraceError as error:
                reason = str(error)
            except Exception as error:  # The public way reports it too, or can do without.
                reason = failures.headline(error)
                _LOG.info("torch.onnx.export takes over", exc_info=True)
            note = f"{_TAKES_OVER}: {reason}"
        try:
            return _translate_by_torch(program, opset), note
        except Exception as error:  # PyTorch's decompositions and passes raise anything.
            cause = failures.first_cause(error)
            failure = f"{reason}; then {type(cause).__name__}: {cause}"
            raise torch.onnx.OnnxExporterError(failure) from None


# --- The public way ---


@torch.no_grad()  # Else a loop keeps what its gradient would need, sizes among it, which fails.
@tracer.fractions_unknown()
@shortcuts.composites()
def _translate_by_torch(program: ExportedProgram, opset: int) -> ir.Model:
    onnx_program = torch.onnx.export(
        _with_own_decompositions(program),
        dynamo=True,
        verbose=False,
        optimize=False,
        opset_version=opset,
        custom_translation_table={**onnx_translation_table(), **_TRANSLATIONS},
    )
    if onnx_program is None:  # The type allows it; with dynamo=True it never happens.
        raise torch.onnx.OnnxExporterError("torch.onnx.export returned no program")
    return onnx_program.model


def _with_own_decompositions(program: ExportedProgram) -> ExportedProgram:
    """Returns the program without the operators that PyTorch's exporter translates wrongly.

    Where tensors are changed, these are also composites such as ``einsum``, whose results may be
    views though their schemas say otherwise: PyTorch would take them for new tensors.
    """
    nodes = all_nodes(program)
    targets: set[Any] = {node.target for node in nodes}
    decompositions = {target: DECOMPOSITIONS[target] for target in targets & DECOMPOSITIONS.keys()}
    if any(map(writes, nodes)):
        composites = torch.export.default_decompositions()
        hidden = {target for target in targets - decompositions.keys() if _hides_views(target)}
        decompositions |= {t: composites.pop(t) for t in hidden if t in composites}
    return program.run_decompositions(decompositions) if decompositions else program


def _hides_views(target: Any) -> bool:
    """Whether an operator is composite, and its schema says that its results are new tensors."""
    return (
        isinstance(target, OpOverload)
        and tracer.can_decompose(target)
        and all(value.alias_info is None for value in schema_of(target).returns)
    )


# --- Our steps ---

_translating = exporter.translating(set_module)


@tracer.graphs_compiled_late()
def _translate_in_steps(program: ExportedProgram, opset: int, trials: SizeTrials) -> ir.Model:
    registry, decompositions = _registered(max(opset, 18), operators())
    mode = tracer.fake_mode(program)
    if mode is None:
        raise NeedsRetraceError("the program has no values")
    with shortcuts.decomposing():
        with decisions_noted() as noted:
            module = decomposed(program.graph_module, registry.is_registered, decompositions, mode)
        decisions = decisions_of(program, noted) if noted else []
        trials.check_decomposed(program, decisions, module)
        exporter.promote_dtypes(module)
    size_arithmetic.in_float64(module)
    with _translating():
        signature = _renamed(program, module)
        model: ir.Model = exporter.onnx_program(program, module, signature, registry).model
        set_opset(model, opset)
    return model


def set_opset(model: ir.Model, opset: int) -> None:
    """Makes a graph one of another version of the standard operators, if onnx can convert it."""
    if exporter.keeps_meaning(model, opset):
        model.opset_imports[""] = opset
        common_passes.RemoveUnusedNodesPass()(model)
    else:
        onnxscript.version_converter.convert_version(model, opset, fallback=True)


# For one set of operators: each registration between exports makes another.
@functools.lru_cache(maxsize=1)
def _registered(opset: int, added: tuple[Operator, ...] = ()) -> tuple[Any, dict[Any, Any]]:
    """Returns translations of operators, ``added`` among them, and the others' decompositions."""
    registry = copy.copy(exporter.torchlib(opset))
    registry.functions = {target: [*known] for target, known in registry.functions.items()}
    for operator in added:
        registry.register_op(operator.torch_op, operator.translation(), is_complex=False)
    for target, translation in {**size_arithmetic.TRANSLATIONS, **_TRANSLATIONS}.items():
        registry.register_op(target, translation, is_complex=False)
    return registry, exporter.decomposition_table(registry)


def _renamed(program: ExportedProgram, module: fx.GraphModule) -> Any:
    """Returns the program's signature, its results named as in ``module``."""
    signature = program.graph_signature
    *_, output = module.graph.nodes
    specs = [
        replace(spec, arg=replace(spec.arg, name=node.name)) if isinstance(node, fx.Node) else spec
        for spec, node in zip(signature.output_specs, output.args[0], strict=True)
    ]
    return replace(signature, output_specs=specs)
