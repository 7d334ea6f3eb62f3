"""Private names of onnxscript: its default rewrite rules, and what a rule looks for.

Where they have moved, only our own rules are applied, and each to every node: the graph computes
the same, with more nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import rewriter


def default_rules() -> tuple[Any, ...]:
    """Returns the rewrite rules that ``onnxscript.rewriter.rewrite`` applies by default.

    Not those that look for a number: they take 1e-8 for 0, and 1.00001 for 1.
    """
    rules: Sequence[Any] = getattr(rewriter, "_DEFAULT_REWRITE_RULES", ())
    return tuple(rule for rule in rules if not Root(rule).has_number)


class Root:
    """Conditions of a rewrite rule on the node that it replaces, as far as they are quickly told.

    Nothing, if the rule looks for nodes of several operators at once.

    Attributes:
        has_number: Whether an operand must be a number.
    """

    def __init__(self, rule: Any) -> None:
        pattern: Any = getattr(rule, "_target_pattern", None)
        single = getattr(pattern, "has_single_output_node", False)
        self._operator = pattern.output_node.op if single else None
        self._constants: list[int] = []
        self._producers: list[tuple[int, Any]] = []
        self.has_number = False
        for position, value in enumerate(pattern.output_node.inputs if single else ()):
            if hasattr(value, "value"):
                self._constants.append(position)
                self.has_number |= isinstance(value.value, int | float)
            elif value is not None and value.producer() is not None:
                self._producers.append((position, value.producer().op))

    def has_operator(self, op_type: str) -> bool:
        """Whether a node of this operator may match."""
        return self._operator is None or self._operator.matches(op_type)

    def takes(self, inputs: Sequence[ir.Value | None]) -> bool:
        """Whether a node of the operator may match, given its inputs."""
        for position in self._constants:
            value = inputs[position] if position < len(inputs) else None
            if value is None or value.const_value is None:
                return False
        for position, operator in self._producers:
            value = inputs[position] if position < len(inputs) else None
            node = None if value is None else value.producer()
            if node is None or not operator.matches(node.op_type):
                return False
        return True
