"""All targets, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo_moe.moe_nodes.targets.dense import DENSE
from dynamo_moe.moe_nodes.targets.names import BODIES, DEFAULT_BODY
from dynamo_moe.moe_nodes.targets.onnxruntime import ONNXRUNTIME
from dynamo_moe.moe_nodes.targets.plugin import PLUGIN
from dynamo_moe.moe_nodes.targets.record import Target
from dynamo_moe.moe_nodes.targets.tensorrt_moe import TENSORRT_MOE
from dynamo_moe.operators.foreign import ForeignOperator

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (PLUGIN, DENSE, ONNXRUNTIME, TENSORRT_MOE)}
)


def chosen_target(name: str, body: str) -> Target:
    """Returns the target that a user asks for, with the body that its nodes should get.

    Raises:
        ValueError: If there is no such target or body, or the target does not have this body.
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {name!r}")
    if body not in BODIES:
        raise ValueError(f"body must be one of {', '.join(BODIES)}; got {body!r}")
    takers = targets_with_body(body)
    if name not in takers:
        raise ValueError(
            f"body {body!r} needs target {' or '.join(map(repr, takers))}: with {name!r} nodes "
            "have no body"
        )
    return TARGETS[name]


def targets_with_body(body: str) -> tuple[str, ...]:
    """Returns the targets with which a user may name this body: the default with any.

    >>> targets_with_body("unrolled")
    ('plugin',)
    """
    return tuple(
        name for name, target in TARGETS.items() if body == DEFAULT_BODY or body in target.bodies
    )


def target_of(operator: ForeignOperator) -> Target:
    """Returns the target whose files have a runtime's operator."""
    return next(target for target in TARGETS.values() if operator in target.foreign)
