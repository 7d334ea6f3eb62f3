"""A traced program, written so that it can be decomposed and translated."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from dynamo_moe import pytree
from dynamo_moe.private import tracer
from dynamo_moe.private.pytorch import OpOverload, schema_of
from dynamo_moe.tracing.nodes import add_call, all_nodes, values
from dynamo_moe.tracing.projected_lstms import project_outside

_aten = torch.ops.aten
_DROPOUTS = frozenset(
    getattr(_aten, name).default
    for name in ("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout")
)
_NORMS = frozenset(
    getattr(_aten, name).default
    for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm")
)


def make_translatable(program: ExportedProgram, *, gradients: bool = False) -> None:
    """Replaces what decompositions or translations miss, or compute otherwise than PyTorch.

    With gradients, norms keep their running statistics: a step of training gives the new ones.
    """
    _remove_dropouts(program)
    _unsqueeze_complex(program)
    _exportable_sizes(program)
    if not gradients:
        _write_statistics(program)
    _widen_norms(program)
    project_outside(program)
    _promote_einsums(program)


def _remove_dropouts(program: ExportedProgram) -> None:
    """Replaces dropouts in evaluation by the tensors that they take, and are.

    ``torch.export`` takes them for copies: PyTorch 2.13's decompositions and ``torch.onnx.export``
    then miss what is changed in place of one by the name of the other.
    """
    for node in all_nodes(program):
        if node.target not in _DROPOUTS or node.args[2:] != (False,):
            continue
        tensor: Any = node.args[0]
        node.replace_all_uses_with(tensor)
        node.graph.erase_node(node)
        for spec in program.graph_signature.output_specs if node.graph is program.graph else ():
            if spec.arg.name == node.name:
                spec.arg = TensorArgument(tensor.name)


def _unsqueeze_complex(program: ExportedProgram) -> None:
    """Replaces ``unsqueeze`` of complex tensors by ``stack`` of one.

    The rotary embeddings of DeepSeek-V2 and Llama 4 need it: onnxscript 0.7 translates complex
    ``stack``, but not ``unsqueeze``. A program that changes complex tensors stays as it is.
    """
    if any(map(_changes_complex, all_nodes(program))):
        return
    for node in program.graph.nodes:
        if node.target is _aten.unsqueeze.default and node.meta["val"].is_complex():
            tensor, dimension = node.args
            node.target, node.args = _aten.stack.default, ([tensor], dimension)


def _changes_complex(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    changed = values(node.args[0])
    return isinstance(changed, Tensor) and changed.is_complex()


def _exportable_sizes(program: ExportedProgram) -> None:
    """Writes arithmetic of sizes in operators that onnxscript 0.7 translates right.

    ``a // b`` becomes ONNX's Div, which rounds towards zero: ``-(-tokens // 4)`` would be off.
    """
    for node in all_nodes(program):
        if node.target is tracer.SYMBOLIC_SQUARE_ROOT:
            node.target, node.args = operator.pow, (node.args[0], 0.5)
        elif node.target is operator.floordiv and not _is_natural(node.args[0]):
            dividend, divisor = node.args
            with node.graph.inserting_before(node):
                rest = add_call(node.graph, node, operator.mod, dividend, divisor)
                whole = add_call(node.graph, node, operator.sub, dividend, rest)
            node.args = (whole, divisor)


def _is_natural(size: Any) -> bool:
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    return isinstance(value, torch.Tensor) or tracer.is_never_negative(value)


def _write_statistics(program: ExportedProgram) -> None:
    """Takes the running statistics from norms in training, and writes them where they are read.

    The norms' schemas do not say that they write. Without them, they do not, and PyTorch's exporter
    does not take them for norms in evaluation.

    Raises:
        ValueError: If one does so in a branch or a region, and its statistics are read outside.
    """
    norms = dict.fromkeys(node for node in all_nodes(program) if _tracks_statistics(node))
    for node in norms:
        x: Any = node.args[0]
        mean, var, _, momentum = cast(tuple[Any, ...], node.args[3:7])
        users = {user for statistic in (mean, var) for user in statistic.users}
        if node.graph is not program.graph:
            users |= {u for s in (mean, var) for u in _users_outside(program, s)}
            if not users <= norms.keys():
                raise ValueError(
                    "a norm in training writes its running statistics within a branch, a loop or "
                    "a region of autocast, and they are read outside: no file can follow that"
                )
        node.args = (*node.args[:3], None, None, *node.args[5:])
        if users <= norms.keys():
            continue
        # A batch's statistics, or the mean of each instance's.
        batch = [0] if node.target is _aten.batch_norm.default else []
        dims = [*batch, *range(2, x.meta["val"].ndim)]
        with node.graph.inserting_before(node.next):
            for statistic, *call in (
                (mean, _aten.mean.dim, x, dims),
                (var, _aten.var.dim, x, dims, True),
            ):
                new = add_call(node.graph, node, *call)
                if not batch:
                    new = add_call(node.graph, node, _aten.mean.dim, new, [0])
                dtype = statistic.meta["val"].dtype
                new = add_call(node.graph, node, _aten.to.dtype, new, dtype)
                share = add_call(node.graph, node, _aten.mul.Tensor, new, momentum)
                kept = add_call(node.graph, node, _aten.mul.Tensor, statistic, 1 - momentum)
                total = add_call(node.graph, node, _aten.add.Tensor, kept, share)
                add_call(node.graph, node, _aten.copy_.default, statistic, total)


def _users_outside(program: ExportedProgram, operand: fx.Node) -> set[fx.Node]:
    """Returns what else uses what a graph within a program takes by one of its placeholders."""
    inputs = operand.graph.find_nodes(op="placeholder")
    module = operand.graph.owning_module
    found: set[fx.Node] = set()
    for node in all_nodes(program):
        leaves = pytree.tree_leaves(node.args)
        owner: Any = node.graph.owning_module
        graphs = [n for n in leaves if isinstance(n, fx.Node) and n.op == "get_attr"]
        if any(getattr(owner, str(graph.target), None) is module for graph in graphs):
            outer = leaves[len(leaves) - len(inputs) + inputs.index(operand)]
            found |= {*outer.users} - {node}
            if outer.op == "placeholder" and outer.graph is not program.graph:
                found |= _users_outside(program, outer)
    return found


def _tracks_statistics(node: fx.Node) -> bool:
    """Whether a node is a norm that computes with a batch's statistics, and writes them."""
    if node.target not in {_aten.batch_norm.default, _aten.instance_norm.default}:
        return False
    return node.args[5] is True and isinstance(node.args[3], fx.Node)


def _widen_norms(program: ExportedProgram) -> None:
    """Casts the inputs of norms whose parameters have another dtype, as PyTorch does inside.

    ONNX allows one dtype only. On a CPU, autocast leaves norms in this state.
    """
    for node in all_nodes(program):
        target: Any = node.target
        if target not in _NORMS:
            continue
        x, *others = values(node.args)
        dtypes = {value.dtype for value in others if isinstance(value, Tensor)} - {x.dtype}
        if len(dtypes) != 1:
            continue
        with node.graph.inserting_before(node):
            wide = add_call(node.graph, node, _aten.to.dtype, node.args[0], *dtypes)
            norm = node.graph.call_function(target, (wide, *node.args[1:]), node.kwargs)
        norm.meta = {**node.meta, "val": node.meta["val"].to(*dtypes)}
        # The node itself keeps its name, which may be that of a result.
        node.target, node.args, node.kwargs = _aten.to.dtype, (norm, node.meta["val"].dtype), {}


def _promote_einsums(program: ExportedProgram) -> None:
    """Casts the operands of einsum to one dtype, as PyTorch does inside; ONNX allows no other."""
    for node in all_nodes(program):
        if node.target is not _aten.einsum.default:
            continue
        operands = cast(Sequence[fx.Node], node.args[1])
        dtypes = {operand.meta["val"].dtype for operand in operands}
        if len(dtypes) > 1:
            dtype = reduce(torch.promote_types, dtypes)
            with node.graph.inserting_before(node):
                wide = [add_call(node.graph, node, _aten.to.dtype, x, dtype) for x in operands]
            node.update_arg(1, wide)
