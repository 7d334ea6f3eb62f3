"""The steps of ``torch.onnx.export`` from a traced program to ONNX nodes, the slow ones replaced.

PyTorch keeps these steps to itself; this is the one module that uses private names of
``torch.onnx``, and importing it fails where they have moved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from typing import Any

import onnx_ir as ir
import onnxscript.version_converter
from onnx.defs import OpSchema
from onnx_ir.schemas import OpSignature
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx.experimental import _config
from torch.onnx._internal.exporter import _core, _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from dynamo_moe.operators.registry import Operator, operators
from dynamo_moe.tracing.decomposition import NeedsRetraceError, decomposed
from dynamo_moe.tracing.fixed_sizes import SizeTrials, of_program
from dynamo_moe.tracing.size_decisions import decisions_noted, decisions_of
from dynamo_moe.tracing.tracing_costs import cheap_tracing

__all__ = ["translate_in_steps"]

# Whoever changes onnx_ir's class restores it: nobody else does meanwhile.
_changed = Lock()


def translate_in_steps(program: ExportedProgram, opset: int, trials: SizeTrials) -> ir.Model:
    """Returns the program's graph as ONNX nodes.

    Raises:
        FixedSizeError: If a decomposition is right at the example's sizes only.
        NeedsRetraceError: If the program cannot be decomposed operator by operator.
        Exception: Whatever a step raises.
    """
    registry, decompositions = _registered(max(opset, 18), operators())
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if mode is None:
        raise NeedsRetraceError("the program has no values")
    patch: Any = _config.patch  # type: ignore[attr-defined]
    with patch(backed_size_oblivious=True), cheap_tracing():
        with decisions_noted() as noted:
            module = decomposed(program.graph_module, registry.is_registered, decompositions, mode)
        if noted:
            decisions = decisions_of(program, noted)
            trials.check(program, decisions, of_program(program), of_program(program, module))
        _Promotion.apply(module)
        module = _fx_passes.remove_assertion_nodes(module)
    stepped = copy.copy(program)
    stepped._graph_module = module
    stepped._graph_signature = _renamed(program, module)
    with _signatures_once():
        model = _core._exported_program_to_onnx_program(stepped, registry=registry).model
    onnxscript.version_converter.convert_version(model, opset, fallback=True)
    return model


@functools.cache
def _torchlib(opset: int) -> ONNXRegistry:
    return ONNXRegistry.from_torchlib(opset_version=opset)


# Of one set of operators: each registration between exports makes another.
@functools.lru_cache(maxsize=1)
def _registered(opset: int, own: tuple[Operator, ...] = ()) -> tuple[Any, dict[Any, Any]]:
    """Returns the translations of operators, ``own`` among them, and the others' decompositions."""
    registry = copy.copy(_torchlib(opset))
    registry.functions = {target: [*known] for target, known in registry.functions.items()}
    for operator in own:
        registry.register_op(operator.torch_op, operator.translation(), is_complex=False)
    translated = set(_decomp.get_onnx_implemented_overloads(registry))
    return registry, _decomp.create_onnx_friendly_decomposition_table(translated)


@contextlib.contextmanager
def _signatures_once() -> Iterator[None]:
    """Derives an ONNX operator's signature once; PyTorch does so for every node.

    In one thread at a time: another's export derives them as PyTorch does.
    """
    if not _changed.acquire(blocking=False):
        yield
        return
    patched: Any = OpSignature
    original = vars(OpSignature)["from_op_schema"]
    signatures: dict[Any, OpSignature] = {}

    def derived(schema: OpSchema) -> OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = original.__get__(None, OpSignature)(schema)
        return signatures[key]

    patched.from_op_schema = staticmethod(derived)
    try:
        yield
    finally:
        patched.from_op_schema = original
        _changed.release()


class _Promotion(type_promotion._TypePromotionInterpreter):
    """Makes the promotion of dtypes explicit, and runs only the nodes that this changes."""

    @classmethod
    def apply(cls, module: fx.GraphModule) -> None:
        promotion = type_promotion.InsertTypePromotion(module)
        promotion.interpreter = cls(module, _promotions())
        promotion.run()

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "output":
            return None
        if node.op == "placeholder" or "val" not in node.meta:
            return super().run_node(node)
        rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
        if rule is not None:
            with self._set_current_node(node):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]


@functools.cache
def _promotions() -> Any:
    return type_promotion.TypePromotionTable()


def _renamed(program: ExportedProgram, module: fx.GraphModule) -> Any:
    """Returns the program's signature, its results named as in ``module``."""
    signature = program.graph_signature
    *_, output = module.graph.nodes
    specs = [
        replace(spec, arg=replace(spec.arg, name=node.name)) if isinstance(node, fx.Node) else spec
        for spec, node in zip(signature.output_specs, output.args[0], strict=True)
    ]
    return replace(signature, output_specs=specs)
