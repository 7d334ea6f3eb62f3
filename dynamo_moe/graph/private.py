"""Private names of onnxscript: its default rewrite rules, and what a rule looks for.

Where they have moved, only our own rules are applied, and each to every node: the graph computes
the same, with more nodes.
"""

from __future__ import annotations

from typing import Any

from onnxscript import rewriter


def default_rules() -> tuple[Any, ...]:
    """Returns the rewrite rules that ``onnxscript.rewriter.rewrite`` applies by default."""
    return tuple(getattr(rewriter, "_DEFAULT_REWRITE_RULES", ()))


def operator_of(rule: Any) -> str | None:
    """Returns the operator of the nodes that a rule can match; None: nodes of several operators."""
    pattern = getattr(rule, "_target_pattern", None)
    single = getattr(pattern, "has_single_output_node", False)
    if pattern is None or not single or not pattern.output_node.op_identifier():
        return None
    operator: str = pattern.output_node.op_type
    return operator
