"""Nodes that a file has more often than a graph, such as those of equal blocks.

A node of a graph takes several times as long to make, and to write, as a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(slots=True, eq=False)
class Copy:
    """A node of a file that is one of the graph, but for its values and its name.

    Attributes:
        source: The graph's node.
        inputs: Its inputs.
        outputs: Its results; they have no producer.
        module: The path of the PyTorch module that it comes from.
        name: Its name in the file.
    """

    source: ir.Node
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value]
    module: str = ""
    name: str = ""

    @property
    def domain(self) -> str:
        """The domain of its operator."""
        return self.source.domain

    @property
    def op_type(self) -> str:
        """The name of its operator."""
        return self.source.op_type


Copies = Mapping[ir.Node, Sequence[Copy]]
"""By a node of the main graph, the copies that follow it in the file."""


def with_copies(nodes: Iterable[ir.Node], copies: Copies) -> Iterator[ir.Node | Copy]:
    """Yields nodes in the file's order."""
    for node in nodes:
        yield node
        yield from copies.get(node, ())
