"""Where the nodes of a traced program come from: equal blocks, or what stands between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx
from torch.export import ExportedProgram

from dynamo_moe.tracing.marks import END


def reads_sizes(program: ExportedProgram, paths: Collection[str]) -> bool:
    """Whether modules read sizes from data: the file has one name for each such size."""
    return any(
        node.meta.get("unbacked_bindings") and _is_in(node, paths) for node in program.graph.nodes
    )


def computes_between(
    program: ExportedProgram, ends: Collection[fx.Node], marks: Collection[fx.Node]
) -> bool:
    """Whether anything but marks that its results need is computed between the first and last end.

    It would come after all blocks in the file, and not between their nodes.
    """
    remaining = set(ends)
    between: list[fx.Node] = []
    begun = False
    for node in program.graph.nodes:
        begun = begun or node in remaining
        remaining.discard(node)
        if begun and remaining and node not in marks:
            between.append(node)
    used = _before([program.graph.output_node()], ()) if between else ()
    return any(node in used for node in between)


def computed_outside(ends: Sequence[Sequence[fx.Node]], paths: Collection[str]) -> str:
    """Returns why the second unit's nodes are not those of its modules alone; empty if they are.

    Args:
        ends: By unit, the nodes that it ends with.
        paths: The paths of the second unit's modules.
    """
    for node in _before(ends[1], _before(ends[0], ())):
        if node.op == "call_function" and node.target is not END and not _is_in(node, paths):
            return f"{node.name} is computed between blocks"
    return ""


def _is_in(node: fx.Node, paths: Collection[str]) -> bool:
    """Whether a node was traced in one of some modules."""
    return any(path in paths for path, _ in node.meta.get("nn_module_stack", {}).values())


def _before(nodes: Collection[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """Returns nodes and what they are computed from, up to those that are known."""
    found: set[fx.Node] = set()
    remaining = [*nodes]
    while remaining:
        node = remaining.pop()
        if node not in found and node not in known:
            found.add(node)
            remaining += node.all_input_nodes
    return found
