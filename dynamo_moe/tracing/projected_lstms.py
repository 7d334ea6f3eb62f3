"""LSTMs whose states are projected, by LSTMs whose states are not: ONNX has no others.

A step's ``W_hh h`` of the projected ``h = W_hr o`` is ``(W_hh W_hr) o``. That of the first state,
which is no projection, is a product of further columns of the first step's input.

Legend: L length, B batch, I inputs, H hidden width, P width of the projection.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from dynamo_moe.tracing.nodes import add_call, all_nodes

_aten = torch.ops.aten


def project_outside(program: ExportedProgram) -> None:
    """Replaces a program's LSTMs with projections."""
    for node in all_nodes(program):
        if node.target is not _aten.lstm.input:
            continue
        states: Any = node.args[1]
        hidden, cells = (state.meta["val"].shape[-1] for state in states)
        if hidden != cells:
            with node.graph.inserting_before(node):
                results = _Replacement(node).results()
            for user in [*node.users]:
                number: Any = user.args[1]
                user.replace_all_uses_with(results[number])
                node.graph.erase_node(user)
            node.graph.erase_node(node)


class _Replacement:
    """The nodes that take the place of an LSTM."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node

    def _call(self, target: Any, *args: Any) -> Any:
        return add_call(self._node.graph, self._node, target, *args)

    def results(self) -> list[fx.Node]:
        """Returns the LSTM's results, and its last states, of all layers."""
        arguments: Any = self._node.args
        x, states, parameters, _, num_layers, _, _, bidirectional, batch_first = arguments
        sides = 2 if bidirectional else 1
        size = len(parameters) // (num_layers * sides)
        y = self._call(_aten.transpose.int, x, 0, 1) if batch_first else x
        ends: list[tuple[fx.Node, fx.Node]] = []
        for first in range(0, num_layers * sides, sides):
            of_sides = []
            for side in range(sides):
                at = first + side
                own = parameters[size * at : size * (at + 1)]
                h, c = (self._call(_aten.slice.Tensor, state, 0, at, at + 1) for state in states)
                result, cell = self._one_side(self._flipped(y, side), h, c, own)
                ends.append((self._call(_aten.select.int, result, 0, -1), cell))
                of_sides.append(self._flipped(result, side))
            y = self._call(_aten.cat.default, of_sides, 2) if len(of_sides) > 1 else of_sides[0]
        hidden, cells = zip(*ends, strict=True)
        y = self._call(_aten.transpose.int, y, 0, 1) if batch_first else y
        stacked = self._call(_aten.stack.default, [*hidden])
        return [y, stacked, self._call(_aten.cat.default, [*cells])]

    def _flipped(self, x_LBI: fx.Node, side: int) -> fx.Node:
        return self._call(_aten.flip.default, x_LBI, [0]) if side else x_LBI

    def _one_side(
        self, x_LBI: fx.Node, h_1BP: fx.Node, c_1BH: fx.Node, parameters: Sequence[fx.Node]
    ) -> tuple[fx.Node, fx.Node]:
        """Returns the projected results ``[L, B, P]`` and the last cell ``[1, B, H]``."""
        w_ih, w_hh, *biases, w_hr = parameters
        later = self._call(_aten.slice.Tensor, self._call(_aten.slice.Tensor, x_LBI, 0, 1), 2, 0, 1)
        zeros = self._call(_aten.zeros_like.default, later)
        width = h_1BP.meta["val"].shape[2]
        zeros = self._call(_aten.expand.default, zeros, [-1, -1, width])
        columns = self._call(_aten.cat.default, [h_1BP, zeros])
        x_LBI = self._call(_aten.cat.default, [x_LBI, columns], 2)
        weights = [
            self._call(_aten.cat.default, [w_ih, w_hh], 1),
            self._call(_aten.mm.default, w_hh, w_hr),
            *biases,
        ]
        states = [self._call(_aten.zeros_like.default, c_1BH), c_1BH]
        options = (bool(biases), 1, 0.0, False, False, False)
        lstm = self._node.graph.call_function(_aten.lstm.input, (x_LBI, states, weights, *options))
        cell: Tensor = c_1BH.meta["val"]
        # Its own code would run each step.
        result = cell.new_empty((*x_LBI.meta["val"].shape[:2], cell.shape[2]))
        lstm.meta = {**self._node.meta, "val": (result, cell, cell)}
        y_LBH, last = (self._call(operator.getitem, lstm, number) for number in (0, 2))
        w_HP = self._call(_aten.t.default, w_hr)
        return self._call(_aten.matmul.default, y_LBH, w_HP), last
