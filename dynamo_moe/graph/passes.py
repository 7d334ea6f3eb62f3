"""Passes over the exported graph that keep a file small, readable and reproducible."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx
import onnx.shape_inference
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnx_ir import tensor_adapters
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules.common import slice_split_rule
from torch import Tensor

from dynamo_moe.files import model_files
from dynamo_moe.graph import rules
from dynamo_moe.graph.exact_integers import reduce_integers_exactly
from dynamo_moe.graph.matching import integers, scalar
from dynamo_moe.graph.rewriting import RulesByRoot
from dynamo_moe.moe_nodes.nodes import module_of
from dynamo_moe.operators.foreign import foreign_operator
from dynamo_moe.operators.registry import find
from dynamo_moe.private import exporter
from dynamo_moe.private.onnxscript import default_rules
from dynamo_moe.weights import placeholders
from dynamo_moe.weights.lazy_tensors import lazy_cast

# All but one: slice_split_rule compares each Slice with each other, which takes half of an export
# of 24 transformer blocks, and matches none of the Slices that PyTorch's exporter makes: it wants
# four inputs, and these have steps as a fifth.
_WANTED: Any = [rule for rule in (*rules.RULES, *default_rules()) if rule is not slice_split_rule]


def _is_narrow_norm(node: ir.Node) -> bool:
    """Whether a node is a batch norm in half precision, which no rule may fold into weights.

    They would be scaled in half precision, where ``var + eps`` may be 0 and a product infinite;
    PyTorch normalises in float32.
    """
    dtype = (
        node.inputs[0].dtype if node.op_type == "BatchNormalization" and node.inputs[0] else None
    )
    return dtype in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


_BY_ROOT: Any = RulesByRoot(_WANTED, leaves=_is_narrow_norm)
_RULES = rewriter.RewriteRuleSet([_BY_ROOT])
_RULES.remove_unused_nodes = False  # optimize does.

# Rules keep what they have matched.
_RULES_LOCK = threading.Lock()

# One round's result can be what another round simplifies.
_ROUNDS = 4

# Operators whose nodes are merged where their inputs are constants.
_OF_CONSTANTS = frozenset({"Cast", "Constant", "Reshape"})

# Bytes of the constants that an inference may read, as in onnx_ir's pass.
_READ_SIZE = 1000

# Elements of the constants that nodes share.
_SHARED_SIZE = 1024


@exporter.quiet()
def optimize(model: ir.Model, keep: Collection[str] = ()) -> None:
    """Simplifies the graph in place and infers what shapes are still missing.

    These are the passes of ``onnxscript.optimizer.optimize``, with rules of our own, and without
    merging weights of equal values, which loses names. Nothing is folded with the weights to keep,
    so that they are stored as they are.
    """

    def should_fold(node: ir.Node) -> bool | None:
        kept = any(value is not None and value.name in keep for value in node.inputs)
        return False if kept else None  # None: the folding's own judgement.

    weights = frozenset(model.graph.initializers)
    common_passes.InlinePass()(model)
    _or_booleans(model)
    _merge_constants(model.graph)
    optimizer.fold_constants_ir(model, should_fold=should_fold)
    _infer_shapes(model)
    _forget_invented_names(model.graph)
    rewriting = rewriter.RewritePass(_RULES)
    for _ in range(_ROUNDS):
        with _RULES_LOCK:
            modified = rewriting(model).modified
        if not modified:
            break
        _remove_unused(model.graph)
        optimizer.fold_constants_ir(model, should_fold=should_fold)
        _remove_unused(model.graph)
    reduce_integers_exactly(model)
    _count_axes_from_the_front(model)
    _keep_pads_of_pools(model)
    ir.passes.Sequential(
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.LiftSubgraphInitializersToMainGraphPass(),
    )(model)
    _share_constants(model.graph, weights)
    merge_equal_nodes(model)
    names = [value.name for value in model.graph.inputs]
    common_passes.OutputFixPass()(model)
    for value, name in zip(model.graph.inputs, names, strict=True):
        value.name = name  # It gives that of an input to the output that it is.
    common_passes.NameFixPass()(model)
    _infer_shapes(model)
    _forget_invented_names(model.graph)


def tidy(model: ir.Model) -> None:
    """Removes what nothing uses, and merges nodes that compute the same."""
    common_passes.RemoveUnusedNodesPass()(model)
    merge_equal_nodes(model)


def _or_booleans(model: ir.Model) -> None:
    """Makes sums of booleans disjunctions, as they are in PyTorch; ONNX adds up numbers alone."""
    for node in model.graph.all_nodes():
        dtypes = {value.dtype for value in node.inputs if value is not None}
        if (node.domain, node.op_type) == ("", "Add") and dtypes == {ir.DataType.BOOL}:
            node.op_type = "Or"


def _merge_constants(graph: ir.Graph) -> None:
    """Merges equal constants, and equal casts and shapes of them, which would be folded one by one.

    Of the nodes that PyTorch's exporter makes, that is every second one.
    """
    first: dict[Any, ir.Value] = {}
    constants: set[ir.Value | None] = set()
    for node in graph:
        folds = not node.domain and node.op_type in _OF_CONSTANTS
        if not folds or not constants.issuperset(node.inputs):
            continue
        result = node.outputs[0]
        key = (node.op_type, node.inputs, *map(_written, node.attributes.values()))
        same = first.setdefault(key, result)
        constants.add(same)
        if same is not result and not result.is_graph_output():
            result.replace_all_uses_with(same)
            graph.remove(node, safe=True)


def _written(attribute: ir.Attr) -> Any:
    """Returns a key that equal attributes share, and no others; zeros have a sign."""
    value = attribute.value
    if attribute.type != ir.AttributeType.TENSOR:
        return attribute.name, repr(value)
    small = value.size <= _SHARED_SIZE and not value.dtype.is_string()
    return value.dtype, tuple(value.shape), value.tobytes() if small else id(value)


def _remove_unused(graph: ir.Graph) -> None:
    """Removes the nodes that nothing uses; what is in branches and loops stays."""
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def _count_axes_from_the_front(model: ir.Model) -> None:
    """Makes the axes of reductions non-negative.

    Over a negative axis of a tensor without elements, such as the rows of an expert that no token
    chose, ONNX Runtime reduces nothing (seen with 1.31: ReduceSum of [0, 5] over -1 is [0, 5]).
    """
    for node in model.graph.all_nodes():
        operand = node.inputs[0] if node.inputs else None
        if node.domain or operand is None or operand.shape is None or not operand.shape.rank():
            continue
        rank = operand.shape.rank()
        if node.op_type in {"ArgMax", "ArgMin"}:
            axis = node.attributes.get_int("axis", 0)
            node.attributes.add(ir.AttrInt64("axis", axis % rank))
        elif node.op_type.startswith("Reduce") and len(node.inputs) > 1:
            axes = integers(node.inputs[1])
            if axes and min(axes) < 0 and node.graph is not None:
                constant = ir.node("Constant", [], {"value_ints": [axis % rank for axis in axes]})
                node.graph.insert_before(node, constant)
                node.replace_input_with(1, constant.outputs[0])


def _keep_pads_of_pools(model: ir.Model) -> None:
    """Makes the zeros of a Pad negative where a pool takes its result.

    ONNX Runtime 1.31 makes a Pad by zeros part of the pool behind it, whose own padding is ignored:
    the largest of a window is then that of the elements alone, and not at least 0. It compares
    bytes.
    """
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or node.domain or not _goes_into_a_pool(node.outputs[0]):
            continue
        x, number = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if x is None or x.dtype is None or not x.dtype.is_floating_point() or node.graph is None:
            continue
        if node.attributes.get_string("mode", "constant") != "constant":
            continue
        if number is None or scalar(number) == 0:
            constant = ir.node("Constant", [], {"value": ir.tensor(-0.0, dtype=x.dtype)})
            node.graph.insert_before(node, constant)
            node.resize_inputs(max(3, len(node.inputs)))
            node.replace_input_with(2, constant.outputs[0])


def _goes_into_a_pool(value: ir.Value) -> bool:
    users = [use.node for use in value.uses()]
    users += [
        use.node for user in users if user.op_type == "Cast" for use in user.outputs[0].uses()
    ]
    return any(user.op_type in {"AveragePool", "MaxPool"} for user in users)


def merge_equal_nodes(model: ir.Model) -> None:
    """Merges nodes that compute the same, but no registered ones: they may draw random numbers."""
    registered = [node for node in model.graph.all_nodes() if find(node) is not None]
    overloads = [node.overload for node in registered]
    for number, node in enumerate(registered):
        node.overload = str(number)
    common_passes.CommonSubexpressionEliminationPass()(model)
    for node, overload in zip(registered, overloads, strict=True):
        node.overload = overload


def _share_constants(graph: ir.Graph, weights: Collection[str]) -> None:
    """Replaces constants of equal values by one, so that what is computed from them is equal."""
    first: dict[Any, ir.Value] = {}
    for constant in list(graph.initializers.values()):
        tensor = constant.const_value
        if constant.name in weights or tensor is None or tensor.size > _SHARED_SIZE:
            continue
        if tensor.dtype.is_string():  # Has no bytes.
            continue
        same = first.setdefault((tensor.dtype, tuple(tensor.shape), tensor.tobytes()), constant)
        if same is not constant and not constant.is_graph_output():
            constant.replace_all_uses_with(same)
            graph.initializers.pop(str(constant.name))


def _forget_invented_names(graph: ir.Graph) -> None:
    """Drops the names that onnx gives to unknown dimensions.

    Later steps can then infer them, and what is equal but for such names is equal.
    """
    for node in graph:
        for output in node.outputs:
            if output.shape is not None and "unk__" in str(output.shape):
                output.shape = ir.Shape(
                    None if str(size).startswith("unk__") else size for size in output.shape
                )


def _infer_shapes(model: ir.Model) -> None:
    # onnx_ir's pass (1.1) would take sequences for tensors, and make the file invalid.
    sequences = any("Sequence" in node.op_type for node in model.graph.all_nodes())
    if not sequences and not _shapes_are_complete(model):
        _infer_by_onnx(model)
        if _type_foreign_results(model):
            _infer_by_onnx(model)


def _infer_by_onnx(model: ir.Model) -> None:
    """Gives the graph's values what onnx infers of their types and shapes.

    onnx_ir's pass makes a second graph of onnx's answer, which takes half of its time. It does so
    where there are branches, loops and functions, and says why onnx fails.
    """
    if model.functions or any(node.graph is not model.graph for node in model.graph.all_nodes()):
        common_passes.ShapeInferencePass()(model)
        return
    try:
        proto = model_files.without_weights(model, as_inputs=True, small=_READ_SIZE)
        inferred = onnx.shape_inference.infer_shapes(
            proto, check_type=True, strict_mode=True, data_prop=True
        )
    except Exception:  # onnx raises errors of several kinds.
        common_passes.ShapeInferencePass()(model)
        return
    known = {info.name: info.type for info in (*proto.graph.value_info, *proto.graph.output)}
    values = {value.name: value for node in model.graph for value in node.outputs}
    for info in (*inferred.graph.value_info, *inferred.graph.output):
        value = values.get(info.name)
        if value is None or known.get(info.name) == info.type:
            continue
        shape = ir.serde.deserialize_type_proto_for_shape(info.type)
        kind = ir.serde.deserialize_type_proto_for_type(info.type)
        if shape is not None:
            value.shape = shape
        if kind is not None and value.dtype != kind.dtype:
            value.dtype = kind.dtype


def _type_foreign_results(model: ir.Model) -> bool:
    """Types the results of runtimes' own MoE operators; returns whether there are any."""
    nodes = [node for node in model.graph if foreign_operator(node.domain, node.op_type)]
    for node in nodes:
        tokens, result = node.inputs[0], node.outputs[0]
        if tokens is not None:
            result.type, result.shape = tokens.type, tokens.shape
    return bool(nodes)


def fold_weight_transposes(model: ir.Model, *, link: bool = False) -> None:
    """Replaces ``Transpose(weight)`` by the transposed weight under the weight's own name.

    The stock constant folding would do so under an invented name, in memory. Here the transposed
    tensor is a view that becomes contiguous when it is written. A weight that is also used as it
    is keeps its Transpose, and so does, with ``link``, a matrix that lies in a file as it is.
    """

    def transposed(weight: Tensor, perm: Sequence[int]) -> Tensor | None:
        linked = link and weight.ndim == 2 and _lies_in_a_file(weight)
        return None if linked else weight.detach().permute(*perm)

    _fold_into_weights(model, "Transpose", "perm", transposed)


def fold_weight_casts(model: ir.Model, *, link: bool = False) -> None:
    """Replaces ``Cast(weight)`` by the weight in that dtype, cast as it is written.

    Autocast leaves such nodes. A weight that is also used as it is keeps its Cast, and so does,
    with ``link``, one that lies in a file as it is.
    """

    def cast(weight: Tensor, dtype: int) -> Tensor | None:
        if not weight.is_floating_point() or (link and _lies_in_a_file(weight)):
            return None
        return lazy_cast(weight, tensor_adapters.to_torch_dtype(ir.DataType(dtype)))

    _fold_into_weights(model, "Cast", "to", cast)


def _lies_in_a_file(weight: Tensor) -> bool:
    return bool(getattr(weight, "origin", None))


def _fold_into_weights(
    model: ir.Model, op_type: str, attribute: str, folded: Callable[[Tensor, Any], Tensor | None]
) -> None:
    """Puts ``folded(weight, attribute)`` in the place of weights that only equal nodes use."""
    for weight in list(model.graph.initializers.values()):
        users = [node for node, _ in weight.uses()]
        tensor = weight.const_value
        if not users or not isinstance(tensor, ir.Tensor) or weight.is_graph_output():
            continue
        attributes = [node.attributes.get(attribute) for node in users if node.op_type == op_type]
        values = [entry.value for entry in attributes if entry is not None]
        if len(values) < len(users) or any(value != values[0] for value in values):
            continue
        if any(user.outputs[0].is_graph_output() for user in users):
            continue
        new = folded(tensor.raw, values[0]) if isinstance(tensor.raw, Tensor) else None
        if new is None:
            continue
        weight.const_value = placeholders.as_ir(new, weight.name)
        weight.shape = ir.Shape(new.shape)
        weight.type = ir.TensorType(tensor_adapters.from_torch_dtype(new.dtype))
        for user in users:
            user.outputs[0].replace_all_uses_with(weight)
            if user.graph is not None:  # The branch of an If has a graph of its own.
                user.graph.remove(user, safe=True)


def name_nodes_by_module(model: ir.Model) -> None:
    """Names each node after the PyTorch module that it comes from: ``blocks.0.mlp/Add``."""
    seen: Counter[str] = Counter()
    for node in model.graph:
        name = "/".join(filter(None, [module_of(node), node.op_type]))
        seen[name] += 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"


def _shapes_are_complete(model: ir.Model) -> bool:
    """Whether every value of the main graph has a type and a shape of sizes and names."""
    values = (output for node in model.graph for output in node.outputs)
    return all(
        value.dtype is not None
        and value.shape is not None
        and not any(value.shape.is_unknown_dim(axis) for axis in range(value.shape.rank()))
        for value in values
    )
