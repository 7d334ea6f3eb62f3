"""Private names by which a traced program becomes ONNX nodes, in steps of our own.

Most are of PyTorch's exporter. :func:`dynamo_moe.private.tracer.missing` says whether they are
used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.defs import OpSchema
from onnx_ir.schemas import OpSignature
from onnxscript import TracedOnnxFunction
from torch import Tensor, fx
from torch.export import ExportedProgram

from dynamo_moe.process_state import ProcessState, collector_paused, replaced

__all__ = [
    "USED",
    "absent",
    "decomposition_table",
    "keeps_meaning",
    "members_looked_up_once",
    "onnx_program",
    "promote_dtypes",
    "quiet",
    "torchlib",
    "translating",
]

absent = ""
"""The first name that this PyTorch's exporter lacks; empty if it has all."""
try:
    from torch.onnx._internal.exporter import _building, _core, _decomp, _fx_passes
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.fx.passes import type_promotion
except ImportError as error:
    absent = str(error)

try:  # The operators whose meaning changes between versions, and up to which version.
    from onnxscript.version_converter import _version_converter

    _ADAPTED = {key[:2] for key in _version_converter.registry.op_adapters}
    _NEWEST_ADAPTED = _version_converter.SUPPORTED_MAX_ONNX_OPSET
except (ImportError, AttributeError):
    _ADAPTED, _NEWEST_ADAPTED = set(), 0

USED: dict[str, tuple[str, ...]] = {
    "_building.ir": (),
    "_core._exported_program_to_onnx_program": ("exported_program", "registry"),
    "_core._set_node_metadata": ("fx_node", "ir_node"),
    "ONNXRegistry.from_torchlib": ("opset_version",),
    "ONNXRegistry.register_op": ("self", "target", "function"),
    "ONNXRegistry.is_registered": ("self", "target"),
    "_decomp.get_onnx_implemented_overloads": (),
    "_decomp.create_onnx_friendly_decomposition_table": ("onnx_registered_ops",),
    "_fx_passes.remove_assertion_nodes": (),
    "type_promotion.TypePromotionTable": (),
    "type_promotion.InsertTypePromotion": (),
    "type_promotion.get_type_promotion_rule": (),
    "type_promotion._TypePromotionInterpreter._maybe_promote_node": ("self", "node", "rule"),
    "type_promotion._TypePromotionInterpreter._set_current_node": (),
}
"""The names that our steps call or replace, as :mod:`dynamo_moe.private.tracer` lists names."""


def _derived_once(original: Any) -> Any:
    """Derives an ONNX operator's signature once; PyTorch does so for every node."""
    signatures: dict[Any, OpSignature] = {}

    def derived(schema: OpSchema) -> OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = original.__get__(None, OpSignature)(schema)
        return signatures[key]

    return staticmethod(derived)


# Their remarks are about functions that are not the user's, and constants that stay as they are.
_REMARKING = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences remarks of the exporter, and of constant folding, also about logarithms of 0."""
    with contextlib.ExitStack() as changes:
        for logger in map(logging.getLogger, _REMARKING):
            changes.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        changes.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        changes.enter_context(np.errstate(all="ignore"))
        yield


quiet = ProcessState(_quiet)
"""Without remarks that are not for the user."""


def _module_alone(
    set_module: Callable[[ir.Node, str], None],
) -> Callable[[Any], Callable[[fx.Node, ir.Node], None]]:
    """Notes the module that a node comes from, of all that PyTorch formats for each node."""

    def noted(fx_node: fx.Node, ir_node: ir.Node) -> None:
        stack = fx_node.meta.get("nn_module_stack") or {"": ("", None)}
        paths = [path for path, _ in stack.values()]
        # The root's path is empty; nodes that PyTorch adds for sizes have an internal name instead.
        set_module(ir_node, "" if paths[0] else _SLICE.sub(_path_in_list, paths[-1]))

    return lambda _: noted


# How a trace that has seen a module twice names those of a part of a list.
_SLICE = re.compile(r"\.slice\((None|\d+), [^,()]*, (?:None|1)\)\.(\d+)")


def _path_in_list(match: re.Match[str]) -> str:
    start, position = match.groups()
    return f".{(0 if start == 'None' else int(start)) + int(position)}"


@contextlib.contextmanager
def _members_looked_up_once() -> Iterator[None]:
    """Remembers the members of protocols, which Python 3.11 looks up for every isinstance.

    onnx-ir asks a few thousand times whether something is a tensor: 30 ms of an export.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with replaced(typing, "_get_protocol_attrs", functools.cache):
        yield


members_looked_up_once = ProcessState(_members_looked_up_once)
"""Without which onnx-ir takes longer to make a graph and to change it."""


def translating(set_module: Callable[[ir.Node, str], None]) -> ProcessState:
    """Returns how PyTorch makes ONNX nodes of a decomposed program.

    Args:
        set_module: Notes the path of the module that a node comes from.
    """
    return ProcessState(
        # Elsewhere it is looked up anew for every attribute.
        lambda: replaced(_building, "ir", lambda _: ir),
        lambda: replaced(OpSignature, "from_op_schema", _derived_once),
        lambda: replaced(_core, "_set_node_metadata", _module_alone(set_module)),
    )


def keeps_meaning(model: ir.Model, opset: int) -> bool:
    """Whether a graph means the same by a later version of the standard operators."""
    return (
        not model.functions
        and model.opset_imports.get("", opset) <= opset <= _NEWEST_ADAPTED
        and all(
            (node.domain, node.op_type) not in _ADAPTED and (node.version or 0) <= opset
            for node in model.graph.all_nodes()
        )
    )


def _domain_alone(_: Any) -> Any:
    """Returns a translation's ``function_ir`` without the signature, which is read from its source.

    The registry asks for nothing but the domain, of each of 500 translations: 0.3 s.
    """
    return property(lambda function: SimpleNamespace(domain=function.opset.domain))


_registering = ProcessState(lambda: replaced(TracedOnnxFunction, "function_ir", _domain_alone))


@functools.cache
def torchlib(opset: int) -> Any:
    """Returns the exporter's own translations of operators, as a registry."""
    with collector_paused(), _registering():
        return ONNXRegistry.from_torchlib(opset_version=opset)


def decomposition_table(registry: Any) -> dict[Any, Any]:
    """Returns PyTorch's decompositions of the operators that a registry has no translation for."""
    translated = set(_decomp.get_onnx_implemented_overloads(registry))
    return _decomp.create_onnx_friendly_decomposition_table(translated)


def _give_values(module: fx.GraphModule) -> None:
    """Gives the nodes of a branch's or a loop's constants these as values, which a file has."""
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target, None)
        if isinstance(constant, Tensor):
            node.meta["val"] = constant


def onnx_program(
    program: ExportedProgram, module: fx.GraphModule, signature: Any, registry: Any
) -> Any:
    """Returns a decomposed program, whose graph and signature are given, as ONNX nodes."""
    changed = copy.copy(program)  # Unlike a new program, it is not checked.
    changed._graph_module = _fx_passes.remove_assertion_nodes(module)
    # What assertions compared stays, with bounds that no int64 holds.
    for part in changed._graph_module.modules():
        if isinstance(part, fx.GraphModule):
            part.graph.eliminate_dead_code()
            _give_values(part)
    changed._graph_signature = signature
    return _core._exported_program_to_onnx_program(changed, registry=registry)


@functools.cache
def _promotions() -> Any:
    return type_promotion.TypePromotionTable()


def promote_dtypes(module: fx.GraphModule) -> None:
    """Makes the promotion of dtypes explicit, and runs only the nodes that this changes."""

    # Defined here, since the module is imported where the base class has moved, too.
    class Promotion(type_promotion._TypePromotionInterpreter):
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

    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            promotion = type_promotion.InsertTypePromotion(part)
            promotion.interpreter = Promotion(part, _promotions())
            promotion.run()
