"""Operators that a runtime defines, and no standard: only that runtime computes their nodes."""

from __future__ import annotations

from dataclasses import dataclass

ONNXRUNTIME_DOMAIN = "com.microsoft"
"""The domain of ONNX Runtime's own operators, and the prefix of its others."""


@dataclass(frozen=True)
class ForeignOperator:
    """A runtime's own operator, as files of a target have it.

    Attributes:
        runtime: The runtime that has it.
        domain: The domain of its nodes.
        op_type: Its name.
        inputs: If it computes a whole MoE layer, its inputs, by the names of ours where they are
            the same.
        any_domain: Whether its runtime goes by the name alone.
    """

    runtime: str
    domain: str
    op_type: str
    inputs: tuple[str, ...] = ()
    any_domain: bool = False

    def is_of(self, domain: str, op_type: str) -> bool:
        """Whether a node of this domain and name is one of the operator's."""
        return op_type == self.op_type and (self.any_domain or domain == self.domain)


ONNXRUNTIME_MOE = ForeignOperator(
    "ONNX Runtime",
    ONNXRUNTIME_DOMAIN,
    "MoE",
    inputs=("x", "router_probs", "w1", "b1", "w2", "b2", "w3", "b3"),
)
ONNXRUNTIME_QMOE = ForeignOperator(
    "ONNX Runtime",
    ONNXRUNTIME_DOMAIN,
    "QMoE",
    inputs=(
        *("x", "router_probs", "w1", "w1_scales", "b1", "w2", "w2_scales", "b2"),
        *("w3", "w3_scales", "b3", "w1_zero_points", "w2_zero_points", "w3_zero_points"),
    ),
)
TRT_MOE = ForeignOperator("TensorRT", "trt", "TRT_MoE", any_domain=True)
ONNXRUNTIME_MATMUL = ForeignOperator("ONNX Runtime", ONNXRUNTIME_DOMAIN, "MatMulNBits")
ONNXRUNTIME_ATTENTION = ForeignOperator("ONNX Runtime", ONNXRUNTIME_DOMAIN, "GroupQueryAttention")
ONNXRUNTIME_QUICK_GELU = ForeignOperator("ONNX Runtime", ONNXRUNTIME_DOMAIN, "QuickGelu")
ONNXRUNTIME_SKIP_NORM = ForeignOperator(
    "ONNX Runtime", ONNXRUNTIME_DOMAIN, "SkipSimplifiedLayerNormalization"
)
ONNXRUNTIME_ALL_REDUCE = ForeignOperator("ONNX Runtime", ONNXRUNTIME_DOMAIN, "AllReduce")
TENSORRT_COLLECTIVE = ForeignOperator("TensorRT", "trt", "DistCollective", any_domain=True)

# Of MoE layers.
FOREIGN_OPERATORS = (ONNXRUNTIME_MOE, ONNXRUNTIME_QMOE, TRT_MOE)


def foreign_operator(domain: str, op_type: str) -> ForeignOperator | None:
    """Returns the operator of :data:`FOREIGN_OPERATORS` that a node is of; None if of none."""
    matching = (operator for operator in FOREIGN_OPERATORS if operator.is_of(domain, op_type))
    return next(matching, None)


def is_foreign(domain: str, op_type: str) -> bool:
    """Whether a runtime defines a node's operator: one of the list, or any other of ONNX Runtime's.

    >>> is_foreign("com.microsoft", "QuickGelu"), is_foreign("", "Gelu")
    (True, False)
    """
    return (
        domain.startswith(ONNXRUNTIME_DOMAIN)
        or foreign_operator(domain, op_type) is not None
        or TENSORRT_COLLECTIVE.is_of(domain, op_type)
    )
