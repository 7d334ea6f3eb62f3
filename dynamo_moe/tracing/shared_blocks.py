"""The trace of a model in which equal blocks are passed over after the first units of them.

The trace runs the model's own code, so what happens between blocks is seen. A block that is passed
over gives tensors like those of the block a unit before; the program then shows what becomes of
them. If they go from block to block and the last one's to the rest, the program is that of the
model with two or three units, and the graph made of it can be given the other units' nodes.
Anything else ends the trace, and the model is traced whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from dynamo_moe.private import (
    attributes_of,
    modules_by_path,
    own_parts,
    submodules_replaced,
    tensors_replaced,
)
from dynamo_moe.tracing import private
from dynamo_moe.tracing.equal_blocks import NotSharedError, Run
from dynamo_moe.tracing.layer_caches import Kept
from dynamo_moe.tracing.marks import END, KEPT
from dynamo_moe.tracing.nodes import all_nodes
from dynamo_moe.tracing.run_trace import RunTrace
from dynamo_moe.tracing.values import changed


class SharedTrace:
    """Lets the blocks of some runs be passed over while a model is traced or tried.

    Attributes:
        runs: The runs.
        cuts: By run, once the program is known, the nodes that end its traced units.
        kept: By run, what its units leave in a cache.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Run]) -> None:
        """Takes what :func:`dynamo_moe.tracing.equal_blocks.runs_of` has found in a model."""
        self.runs = runs
        self._model = model
        self.cuts: list[list[list[fx.Node]]] = []
        self.kept: list[Kept] = []
        self._traces = [RunTrace(number, run) for number, run in enumerate(runs)]
        self._members = {
            id(attributes_of(block)): (trace, place)
            for trace in self._traces
            for place, block in enumerate(trace.run.blocks)
        }
        self._running: RunTrace | None = None
        # Blocks whose submodules PyTorch need not go through, a few dozen times each, and these.
        self._closed = [block for run in runs for block in run.blocks[run.traced :]]
        self._submodules = [own_parts(block)[2] for block in self._closed]
        inside = [module for block in self._closed for _, module in modules_by_path(block)[1:]]
        with self._submodules_hidden():
            outside = {module for _, module in modules_by_path(model)}
        if len({*inside}) < len(inside) or not outside.isdisjoint(inside):
            # It would not see that a module has several paths, and take others.
            self._closed, self._submodules = [], []

    def _submodules_hidden(self) -> contextlib.AbstractContextManager[None]:
        return submodules_replaced(self._closed, [{} for _ in self._closed])

    def _name_submodules(self) -> None:
        """Tells a running trace the paths of what it has not seen; a model may call it."""
        paths = private.module_paths()
        for block in self._closed if paths else []:
            prefix = paths[block]
            paths.update((part, f"{prefix}.{path}") for path, part in modules_by_path(block)[1:])

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Takes the weights from blocks that are passed over, and their calls.

        Around the model's forward, where PyTorch looks at all of a model, they have no submodules.
        """
        with contextlib.ExitStack() as changes:
            for trace in self._traces:
                for block in trace.run.blocks[trace.run.traced :]:
                    changes.enter_context(tensors_replaced(block, lambda path, tensor: None))
                changes.enter_context(trace.reads_watched())
            changes.enter_context(self._submodules_hidden())
            withholding = self._withholding(self._model.forward)
            changes.enter_context(changed(self._model, "forward", withholding))
            for kind in {type(block) for run in self.runs for block in run.blocks}:
                changes.enter_context(changed(kind, "forward", self._forward(kind.forward)))
            yield

    def _withholding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Refuses runs whose weights the model's own code looks for where blocks are passed over.

        PyTorch does so around the model's forward, which is why it is not done there.
        """

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as changes:
                changes.enter_context(submodules_replaced(self._closed, self._submodules))
                self._name_submodules()
                for trace in self._traces:
                    trace.begin()
                    changes.enter_context(trace.tensors_withheld())
                results = original(*args, **kwargs)
            for trace in self._traces:
                trace.end()
            return results

        return forward

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = self._members.get(id(attributes_of(module)))
            if found is None or self._running is not None:
                return original(module, *args, **kwargs)
            self._running, place = found
            try:
                compute = functools.partial(original, module, *args, **kwargs)
                return self._running.call(place, compute, (args, kwargs))
            finally:
                self._running = None

        return forward

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Checks every call of a block: the context of the trace itself."""
        for trace in self._traces:
            trace.proves = True
        try:
            yield
        finally:
            for trace in self._traces:
                trace.proves = False

    def finish(self, program: ExportedProgram) -> None:
        """Takes the marks out of a program, whose blocks are then a chain.

        Raises:
            NotSharedError: If results of blocks that were passed over are used elsewhere.
        """
        marks: dict[tuple[Any, int, int, int], fx.Node] = {}
        for node in all_nodes(program):
            if node.target in (END, KEPT):
                number, place, leaf = (int(each) for each in node.args[-3:])  # type: ignore[arg-type]
                key = node.target, number, place, leaf
                if key in marks or node.graph is not program.graph:
                    raise NotSharedError("a block is called again, or in a region of its own")
                marks[key] = node
        found = [trace.finish(program, marks) for trace in self._traces]
        self.cuts = [ends for ends, _ in found]
        self.kept = [kept for _, kept in found]
        for node in marks.values():
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        for node in reversed(marks.values()):
            node.graph.erase_node(node)

    def check(self) -> None:
        """Checks that the model did the same with its blocks wherever its sizes were tried.

        Raises:
            NotSharedError: If it did not.
        """
        for trace in self._traces:
            trace.check()

    def mark(self, program: ExportedProgram) -> None:
        """Makes the ends of the traced units results of the program, after its own.

        What stands for results of the other units is none any longer.
        """
        output = program.graph.output_node()
        ends = [node for units in self.cuts for nodes in units for node in nodes]
        kept = [node for each in self.kept for nodes in each.nodes for node in nodes]
        if not {*ends, *kept} <= set(program.graph.nodes):
            raise NotSharedError("the program was traced again")
        absent = {place for each in self.kept for place in each.absent}
        results: Any = output.args[0]
        specs = program.graph_signature.output_specs
        own = [place for place in range(len(results)) if place not in absent]
        if any(results[place] is not node for each in self.kept for place, node in each.traced):
            raise NotSharedError("the program has other results")
        specs[:] = [specs[place] for place in own]
        output.args = ((*(results[place] for place in own), *ends),)
        specs.extend(
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in ends
        )
