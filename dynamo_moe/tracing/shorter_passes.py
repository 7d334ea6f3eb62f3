"""Passes of ``torch.export`` over a whole program, left out where they serve nothing.

:mod:`dynamo_moe.tracing.private` says where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gradients_ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes no regions of a program where it switches gradients on and off.

    The pass would take the program apart, and put it together again with a graph for each region.
    """

    def regions(gm: torch.fx.GraphModule, graph_signature: Any) -> Any:
        for node in list(gm.graph.nodes):
            if node.target is torch._C._set_grad_enabled:
                gm.graph.erase_node(node)
        # The graphs of branches and loops are left to it.
        return original(gm, graph_signature)

    return regions
