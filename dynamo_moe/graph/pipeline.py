"""The passes that give a traced graph the form of its target: one list, in order.

Each is a pass of onnx-ir. Its ``requires`` says what it needs of the graph and of the passes before
it, its ``ensures`` what it leaves for those after it, as far as a walk over the nodes shows it;
both are checked at every export. What passes learn beside the graph is in :class:`Findings`.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnx_ir.passes import PostconditionError, PreconditionError

from dynamo_moe.files import metadata
from dynamo_moe.files.copies import Copies
from dynamo_moe.graph import lowering, passes
from dynamo_moe.graph.dequantized_weights import dequantize_weights
from dynamo_moe.graph.fusion import FIRST_OPSET, Fusion, fuse
from dynamo_moe.graph.fusion.skip_norms import drop_unused_sums
from dynamo_moe.graph.instantiate import (
    Instances,
    Units,
    add_results,
    before_sums,
    instantiate,
    values_hidden,
)
from dynamo_moe.graph.joined_products import join_products
from dynamo_moe.graph.layer_functions import make_functions
from dynamo_moe.graph.naming import name_canonically
from dynamo_moe.graph.repeats import roll_repeats
from dynamo_moe.graph.stacked_weights import fold_stacked_weights
from dynamo_moe.graph.transposed_weights import keep_transposed_weights
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.operators.foreign import ForeignOperator
from dynamo_moe.operators.registry import find
from dynamo_moe.progress.phases import phase
from dynamo_moe.weights import placeholders


class Form(NamedTuple):
    """The form that a graph is given.

    Attributes:
        target: What it is for.
        body: How MoE nodes are computed where the target has a choice.
        link_weights: Whether weights may stay in the files that they come from, as they lie there.
        layers_as_functions: Whether equal blocks become calls of functions.
        fuse: Whether norms, rotary embeddings and attention become one node each.
        shared_cache: Whether attention writes into the cache's own buffers.
    """

    target: Target
    body: str
    link_weights: bool = False
    layers_as_functions: bool = False
    fuse: bool = True
    shared_cache: bool = False


@dataclass
class Findings:
    """The knowledge that passes share beside the graph.

    Attributes:
        units: The runs of equal blocks of which the graph has the first units alone.
        layers: The MoE layers; None before they are recorded.
        weights: The names of the initializers that are weights, and not constants of the nodes.
        runs: By run, what was made of the units that the graph does not have.
        copies: The nodes of these units, which the file has beside the graph's.
    """

    units: Sequence[Units] = ()
    layers: list[metadata.Layer] | None = None
    weights: set[str] = field(default_factory=set)
    runs: list[Instances] = field(default_factory=list)
    copies: Copies = field(default_factory=dict)

    def recorded(self) -> list[metadata.Layer]:
        """Returns the layers.

        Raises:
            PreconditionError: If no pass has recorded them.
        """
        if self.layers is None:
            raise PreconditionError("the MoE layers are not recorded")
        return self.layers


@phase("optimization")
def give_form(
    model: ir.Model, form: Form, units: Sequence[Units] = ()
) -> tuple[list[metadata.Layer], Copies]:
    """Gives a traced graph the form of its target, in place.

    Args:
        model: The graph as it was translated, its MoE layers as bare nodes.
        form: What it becomes.
        units: The runs of equal blocks of which it has the first units alone. No value of a weight
            decides what becomes of them, as it may where all are traced: a bias of zeros stays,
            and so do ``1 + weight`` and a batch norm after a convolution.

    Returns:
        The graph's MoE layers, and the nodes of the other units, which the file has beside it.

    Raises:
        ValueError: If the target has no form of a layer.
        NotSharedError: If units are not alike.
    """
    findings = Findings(units)
    for step in passes_to(form, findings):
        step(model)
    return findings.recorded(), findings.copies


def passes_to(form: Form, findings: Findings) -> list[ir.passes.PassBase]:
    """Returns the passes to a form, which fill in the findings."""
    target, link = form.target, form.link_weights
    steps: list[ir.passes.PassBase | None] = [
        FoldWeights(passes.fold_weight_casts, link=link),
        KeepTransposedWeights() if link and target.takes_transposed_weights else None,
        FoldWeights(passes.fold_weight_transposes, link=link),
        FoldStackedWeights(),
        NameNodesByModule(),
        RecordLayers(findings),
        None if target.keeps_nodes else ReplaceNodes(target, findings),
        Simplify(findings, link=link),
        # Again, as a runtime's own nodes may want weights in another order.
        None if target.keeps_nodes else FoldStackedWeights(),
        FuseOperators(findings, _fusion(form)),
        JoinProducts(findings, link=link) if form.fuse and target.takes_attention else None,
        RollRepeats(),
        DequantizeWeights(findings, target.packed_product),
        AddBodies(target, form.body) if target.keeps_nodes else None,
        InstantiateUnits(findings),
        NameCanonically(findings),
        common_passes.ClearMetadataAndDocStringPass(),
        MakeFunctions(findings) if form.layers_as_functions else None,
    ]
    return [step for step in steps if step is not None]


def _fusion(form: Form) -> Fusion:
    """Returns how far a form fuses operators; a function is a whole block, its last sum with it."""
    own = form.target.takes_attention
    sums = own and not form.layers_as_functions
    return Fusion(form.fuse, own, form.shared_cache, sums)


# --- The passes ---


class Step(ir.passes.InPlacePass):
    """A pass that changes the graph in place, whether or not it finds something to change."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        self.change(model)
        return ir.passes.PassResult(model, modified=True)

    @abc.abstractmethod
    def change(self, model: ir.Model) -> None:
        """Changes the graph."""


class FoldWeights(Step):
    """Makes what is computed of a weight alone the weight itself: a cast, or a transpose."""

    def __init__(self, fold: Callable[..., None], *, link: bool) -> None:
        self._fold, self._link = fold, link

    def change(self, model: ir.Model) -> None:
        """Folds, but with ``link`` no weight that lies in a file."""
        self._fold(model, link=self._link)

    def ensures(self, model: ir.Model) -> None:
        """Weights are declared as they are."""
        _check_weights(model)


class KeepTransposedWeights(Step):
    """Gives MoE nodes weights as they lie in a file, in place of transposed ones."""

    def requires(self, model: ir.Model) -> None:
        """MoE nodes are bare: their attributes change, and a body depends on them."""
        _need_bare_nodes(model)

    def change(self, model: ir.Model) -> None:
        """Removes transposes, and says so in the nodes' attributes."""
        keep_transposed_weights(model)


class FoldStackedWeights(Step):
    """Makes one weight of what an MoE node's input is computed from, where that is weights."""

    def requires(self, model: ir.Model) -> None:
        """MoE nodes are bare."""
        _need_bare_nodes(model)

    def change(self, model: ir.Model) -> None:
        """Folds what stacks experts' weights."""
        fold_stacked_weights(model)

    def ensures(self, model: ir.Model) -> None:
        """Weights are declared as they are."""
        _check_weights(model)


class NameNodesByModule(Step):
    """Names each node after the PyTorch module that it comes from."""

    def change(self, model: ir.Model) -> None:
        """Names the nodes of the main graph."""
        passes.name_nodes_by_module(model)

    def ensures(self, model: ir.Model) -> None:
        """No two nodes of the main graph have one name."""
        _check_different("node", (node.name for node in model.graph), PostconditionError)


class RecordLayers(Step):
    """Finds the MoE layers, and which initializers are weights.

    Before nodes are replaced, and before constants become initializers too.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def requires(self, model: ir.Model) -> None:
        """MoE nodes are bare."""
        _need_bare_nodes(model)

    def change(self, model: ir.Model) -> None:
        """Leaves the graph as it is."""
        self._findings.weights = set(model.graph.initializers)
        self._findings.layers = metadata.record(model)


class ReplaceNodes(Step):
    """Puts the bodies of registered operators in the place of their nodes."""

    def __init__(self, target: Target, findings: Findings) -> None:
        self._target, self._findings = target, findings

    def requires(self, model: ir.Model) -> None:
        """The layers are recorded, as their nodes go."""
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Lowers the nodes for the target."""
        lowering.lower(model, self._target)

    def ensures(self, model: ir.Model) -> None:
        """No node is left that has a body."""
        left = [node.name for node in _nodes_with_bodies(model)]
        if left:
            raise PostconditionError(f"{left[0]!r} is not replaced by its body")


class Simplify(Step):
    """Simplifies the graph by onnxscript's and our own rules, and infers shapes.

    The layers' weights stay as they are, and so do, with ``link``, those that lie in a file; the
    values of equal blocks' weights decide nothing.
    """

    def __init__(self, findings: Findings, *, link: bool = False) -> None:
        self._findings, self._link = findings, link

    def requires(self, model: ir.Model) -> None:
        """No node has its body beside it, which would be inlined; the layers are recorded."""
        _need_bare_nodes(model)
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Simplifies the graph."""
        kept = {name for layer in self._findings.recorded() for name in layer.inputs[1:]}
        if self._link:
            kept |= placeholders.linkable(model)
        with values_hidden(model, self._findings.units):
            passes.optimize(model, keep=kept)

    def ensures(self, model: ir.Model) -> None:
        """All constants are initializers, but for results."""
        if not _is_simplified(model):
            raise PostconditionError("constants are left among the nodes")


class FuseOperators(Step):
    """Makes norms, rotary embeddings and attention one node each, where the opset has them.

    The values of equal blocks' weights decide nothing: a factor of one element is no constant.
    """

    def __init__(self, findings: Findings, wanted: Fusion) -> None:
        self._findings, self._wanted = findings, wanted

    def requires(self, model: ir.Model) -> None:
        """The graph is simplified: the forms are those that are left."""
        _need_simplified(model)

    def change(self, model: ir.Model) -> None:
        """Fuses the operators of the main graph."""
        if model.opset_imports.get("", 0) >= FIRST_OPSET:
            runs = self._findings.units
            ends = {name for units in runs for names in units.ends for name in names}
            with values_hidden(model, runs):
                fuse(model, self._wanted, ends)
            self._findings.units = [before_sums(model, units) for units in self._findings.units]
            drop_unused_sums(model)

    def ensures(self, model: ir.Model) -> None:
        """All constants are initializers, still."""
        if not _is_simplified(model):
            raise PostconditionError("constants are left among the nodes")


class JoinProducts(Step):
    """Makes the products of one tensor with several weights of a module one product."""

    def __init__(self, findings: Findings, *, link: bool = False) -> None:
        self._findings, self._link = findings, link

    def requires(self, model: ir.Model) -> None:
        """The layers and the weights are recorded: joined weights are weights, too."""
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Joins the products of the main graph."""
        if model.opset_imports.get("", 0) >= FIRST_OPSET:
            self._findings.weights |= join_products(model, link=self._link)

    def ensures(self, model: ir.Model) -> None:
        """Weights are declared as they are."""
        _check_weights(model)


class RollRepeats(Step):
    """Replaces runs of equal normalisations by a Loop each."""

    def requires(self, model: ir.Model) -> None:
        """All constants are initializers: equal steps are found by the values of theirs."""
        _need_simplified(model)

    def change(self, model: ir.Model) -> None:
        """Rolls the runs of the main graph."""
        roll_repeats(model)


class DequantizeWeights(Step):
    """Keeps packed matrices of products packed: for DequantizeLinear, or a runtime's operator."""

    def __init__(self, findings: Findings, product: ForeignOperator | None = None) -> None:
        self._findings, self._product = findings, product

    def requires(self, model: ir.Model) -> None:
        """The graph is simplified, which would read the scales."""
        _need_simplified(model)

    def change(self, model: ir.Model) -> None:
        """Replaces weights that decode."""
        self._findings.weights |= dequantize_weights(model, self._product)


class AddBodies(Step):
    """Puts the bodies of registered operators beside their nodes, as functions."""

    def __init__(self, target: Target, body: str | None = None) -> None:
        self._target, self._body = target, body

    def requires(self, model: ir.Model) -> None:
        """The graph is simplified, which would inline the functions."""
        _need_simplified(model)

    def change(self, model: ir.Model) -> None:
        """Lowers the nodes for the target."""
        lowering.lower(model, self._target, self._body)

    def ensures(self, model: ir.Model) -> None:
        """Each node that has a body has it in the file."""
        functions = {(domain, name) for domain, name, _ in model.functions}
        for node in _nodes_with_bodies(model):
            if (node.domain, node.op_type) not in functions:
                raise PostconditionError(f"{node.name!r} has no body beside it")


class InstantiateUnits(Step):
    """Makes the nodes of the units that the graph does not have; the file has them alone."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def requires(self, model: ir.Model) -> None:
        """The graph is simplified, as the nodes are copied as they are; the layers are recorded."""
        _need_simplified(model)
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Adds the units' weights and results to the graph."""
        findings = self._findings
        copies: Copies = {}
        for units in findings.units:
            instances, findings.layers, findings.weights = instantiate(
                model, units, findings.recorded(), findings.weights
            )
            findings.runs.append(instances)
            copies = {**copies, **instances.copies}
        findings.copies = copies
        add_results(model, findings.runs)


class NameCanonically(Step):
    """Names nodes, results and constants after the graph alone, the layers' inputs with them."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def requires(self, model: ir.Model) -> None:
        """No two values have one name, by which the layers know theirs."""
        _check_different("value", _value_names(model), PreconditionError)
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Names the graph and the copies of its nodes."""
        findings, graph = self._findings, model.graph
        names = name_canonically(model, findings.weights, findings.copies)
        values = {*names.values(), *graph.initializers, *(x.name or "" for x in graph.inputs)}
        findings.layers = [layer.renamed(names).in_file(values) for layer in findings.recorded()]

    def ensures(self, model: ir.Model) -> None:
        """No two nodes or values have one name."""
        _check_different(
            "node", (node.name for node in model.graph.all_nodes()), PostconditionError
        )
        _check_different("value", _value_names(model), PostconditionError)


class MakeFunctions(Step):
    """Makes equal blocks calls of one function."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def requires(self, model: ir.Model) -> None:
        """The graph has its names: those inside of a function are made of them."""
        _check_different("value", _value_names(model), PreconditionError)
        self._findings.recorded()

    def change(self, model: ir.Model) -> None:
        """Outlines the units of each run."""
        findings = self._findings
        weights = findings.weights.union(*(layer.inputs for layer in findings.recorded()))
        findings.copies, inner = make_functions(model, findings.runs, weights)
        findings.layers = [layer.renamed(inner) for layer in findings.recorded()]


# --- What they need and leave ---


def _nodes_with_bodies(model: ir.Model) -> Iterable[ir.Node]:
    for node in model.graph.all_nodes():
        operator = find(node)
        if operator is not None and operator.body is not None:
            yield node


def _need_bare_nodes(model: ir.Model) -> None:
    """Checks that no node of a registered operator has its body beside it."""
    functions = {(domain, name) for domain, name, _ in model.functions}
    if not functions:
        return
    for node in _nodes_with_bodies(model):
        if (node.domain, node.op_type) in functions:
            raise PreconditionError(f"{node.name!r} has its body beside it already")


def _is_simplified(model: ir.Model) -> bool:
    """Whether constants are initializers, but for those that the graph returns."""
    return not any(
        node.op_type == "Constant" and not node.domain and not node.outputs[0].is_graph_output()
        for node in model.graph
    )


def _need_simplified(model: ir.Model) -> None:
    if not _is_simplified(model):
        raise PreconditionError("the graph is not simplified: constants are among its nodes")


def _check_weights(model: ir.Model) -> None:
    """Checks that initializers have the dtype and the sizes, where known, of their values."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and not _fits(value, tensor):
            raise PostconditionError(
                f"weight {value.name!r} is declared {value.dtype} {value.shape}, but is "
                f"{tensor.dtype} {tensor.shape}"
            )


def _fits(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    sizes = tensor.shape.numpy()
    if value.shape is None or (value.dtype, value.shape.rank()) != (tensor.dtype, len(sizes)):
        return False
    declared = zip(value.shape, sizes, strict=True)
    return all(size == actual for size, actual in declared if isinstance(size, int))


def _value_names(model: ir.Model) -> Iterable[str | None]:
    yield from {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph.all_nodes():
        yield from (output.name for output in node.outputs if output.name != "")


def _check_different(
    what: str, names: Iterable[str | None], error: type[ir.passes.InvariantError]
) -> None:
    """Checks that all have a name, and each a different one."""
    for name, count in Counter(names).items():
        if not name or count > 1:
            raise error(f"{count} times a {what} is called {name!r}")
