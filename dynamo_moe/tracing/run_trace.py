"""The calls of equal blocks, in the order of a trace: what they are given, read and return."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from dynamo_moe import pytree
from dynamo_moe.private import (
    FakeTensor,
    attributes_of,
    change_count,
    storage_key,
    tensor_tables_replaced,
)
from dynamo_moe.tracing import private
from dynamo_moe.tracing.blocks_in_program import computed_outside, computes_between, reads_sizes
from dynamo_moe.tracing.descriptions import Description, Facts, describe, differing_places
from dynamo_moe.tracing.equal_blocks import FEWEST_TRACED, NotSharedError, Run
from dynamo_moe.tracing.layer_caches import Kept, LayerCaches, cache_among
from dynamo_moe.tracing.library_code import file_of, is_library_file
from dynamo_moe.tracing.marks import END, KEPT
from dynamo_moe.tracing.modes import modes, random_states
from dynamo_moe.tracing.reachable_state import State, state_of
from dynamo_moe.tracing.read_names import ReadNames, foreign_modes
from dynamo_moe.tracing.values import (
    SIMPLE,
    are_equal,
    begins_later,
    changed,
    place_of,
    sizes_of,
)
from dynamo_moe.tracing.withheld_tensors import Withheld


@dataclass
class _Call:
    """One call of a block.

    Attributes:
        given: The leaves of its arguments.
        spec: How they are nested.
        versions: How often each was changed in place until then.
        attributes: What code has noted on each tensor, where that is compared.
        modes: What else the block's operators depend on.
        computed: The leaves of what a block has computed that is traced.
        results: The leaves of its results.
        result_spec: How they are nested.
        returned: How often each tensor among them was changed in place until then.
    """

    given: list[Any]
    spec: Any
    versions: list[int] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    modes: Any = None
    computed: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result_spec: Any = None
    returned: list[int] = field(default_factory=list)


@dataclass
class _Proof:
    """A kind of block as its last traced call found it; ``as_described``: as before the trace."""

    own: Description
    as_described: bool
    held: Sequence[Any]
    names: ReadNames
    state: State


class RunTrace:
    """The calls of a run's blocks."""

    def __init__(self, number: int, run: Run) -> None:
        self.number, self.run = number, run
        self.proves = False
        self._calls: list[_Call] = []
        self._carried: set[int] = set()
        self._proofs: list[_Proof] = []
        self._names: dict[int, ReadNames] = {}
        self._reading = False
        self._failure = ""
        # The memory of what stands for other tensors in each unit, where two units are traced.
        self._replaced: set[int] = set()
        # What PyTorch notes on every tensor of a trace.
        self._attributes: set[str] = set()
        self._caches = LayerCaches(number, run, self.fail)
        modules = (module for block in run.blocks for module in block.modules())
        tensors = (tensor for each in run.described for tensor in each.tensors.values())
        self._others = {id(each) for each in (*modules, *tensors)}

    def _refuse(self, reason: str) -> NotSharedError:
        return NotSharedError(f"{self.run.paths[0]} and those after it: {reason}", self.run)

    def begin(self) -> None:
        """Forgets an earlier run of the model."""
        self._calls = []
        self._caches.begin()

    def end(self) -> None:
        """Checks that a run of the model has called every block."""
        self.check()
        if len(self._calls) != len(self.run.blocks):
            self.fail("not all of them are called")
        self._check_returned(self._calls)

    def check(self) -> None:
        """Refuses the run if anything has, even if the model's code or a trial caught the error."""
        if self._failure:
            raise self._refuse(self._failure)

    def call(self, place: int, compute: Callable[[], Any], arguments: Any) -> Any:
        """Runs a block, or gives what stands for its results."""
        if place != len(self._calls):
            self.fail("they are not called in order")
        call = _Call(*pytree.tree_flatten(arguments))
        self._calls.append(call)
        cache = cache_among(call.given)
        call.versions = _versions(call.given)
        call.modes = modes()
        if place >= self.run.period:
            call.attributes = [self._noted(x) for x in call.given if isinstance(x, Tensor)]
        if place >= 2 * self.run.period:
            self._check_given(place)
            if self.proves:
                self._caches.check(place, cache)
        if place >= self.run.traced:
            if self.proves:
                self._check_block(place)
            call.results = self._stand_ins(place)
            self._caches.pass_over(place, cache)
            call.result_spec = self._calls[place - self.run.period].result_spec
        else:
            if cache is not None:
                compute = functools.partial(self._caches.run, place, cache, compute, self.proves)
            last = place >= self.run.traced - self.run.period
            if last and self.proves and self.run.traced_units == FEWEST_TRACED:
                self._check_roles(place, cache)
            run = self._prove if last else self._trace
            results = run(place, compute) if self.proves else compute()
            if not _are_those_of(arguments, call.given, call.spec):
                self.fail("a block changes a container that it is given")
            call.results, call.result_spec = pytree.tree_flatten(results)
            call.computed = call.results
            made = [each for each in call.results if place_of(each, call.given) is None]
            own = [id(each) for each in made if isinstance(each, Tensor)]
            if len({*own}) < len(own):
                self.fail("a block returns a tensor twice, of which each would be another")
            if place % self.run.period == self.run.period - 1:
                call.results = [
                    self._end(each, place, leaf)
                    if isinstance(each, Tensor) and place_of(each, call.given) is None
                    else each
                    for leaf, each in enumerate(call.results)
                ]
        call.returned = _versions(call.results)
        return pytree.tree_unflatten(call.results, call.result_spec)

    def _end(self, result: Tensor, place: int, leaf: int) -> Tensor:
        if not self.proves and place >= self.run.traced - self.run.period:
            return self._tried(result, place, leaf)
        if place < self.run.traced and begins_later(result):
            self.fail("a block returns a part of a tensor, which would be one of its own")
        ended: Tensor = END(result, self.number, place, leaf)
        if place < self.run.period and self.proves:
            self._attributes |= attributes_of(ended).keys()
            if self.run.traced_units == FEWEST_TRACED:
                self._replaced |= {storage_key(result), storage_key(ended)}
        return ended

    def _tried(self, result: Tensor, place: int, leaf: int) -> Tensor:
        """Returns what stands for a result where other sizes are tried.

        The last unit's are what the traced units compute. All before have no value: whatever were
        made of them would not be what the program gives. Without weights, none has values.
        """
        if isinstance(result, FakeTensor):
            return private.another(result)
        if place >= len(self.run.blocks) - self.run.period:
            traced = self._calls[self.run.traced - self.run.period + place % self.run.period]
            return cast(Tensor, traced.computed[leaf]).clone()
        if result.is_floating_point() or result.is_complex():
            return torch.full_like(result, math.nan)
        return result.clone()

    def _noted(self, tensor: Tensor) -> dict[str, Any]:
        """Returns what code has noted on a tensor; tensors with how often they were changed."""
        found = attributes_of(tensor)
        return {
            name: (found[name], _versions([found[name]]))
            for name in found.keys() - self._attributes
        }

    @contextlib.contextmanager
    def tensors_withheld(self) -> Iterator[None]:
        """Refuses the run where code looks for the tensors of a block that is passed over."""
        traced = self.run.traced
        with contextlib.ExitStack() as changes:
            pairs = zip(self.run.blocks[traced:], self.run.described[traced:], strict=True)
            for block, found in pairs:

                def withheld(
                    path: str, held: dict[str, Any], own: Any = found.tensors
                ) -> dict[str, Any]:
                    prefix = f"{path}." if path else ""
                    names = {name for name in held if prefix + name in own}
                    return Withheld(held, names, self.fail) if names else held

                changes.enter_context(tensor_tables_replaced(block, withheld))
            yield

    # --- Blocks that are traced ---

    def _trace(self, place: int, compute: Callable[[], Any]) -> Any:
        """Runs a block, and sees what it reads."""
        call, period = self._calls[place], self.run.period
        last, watched = place >= self.run.traced - period, place >= self.run.traced - 2 * period
        names = self._names[place % period] = ReadNames(proves=last)
        self._reading = True
        try:
            with names.watched() if watched else contextlib.nullcontext():
                results = compute()
        finally:
            self._reading = False
        if reason := self._failure or names.objection:
            raise self._refuse(reason)
        if call.versions != _versions(call.given):
            raise self._refuse("a block changes its input in place")
        return results

    def _prove(self, place: int, compute: Callable[[], Any]) -> Any:
        """Runs the last block of a kind that is traced, which must leave all as it found it."""
        kind, call, block = place % self.run.period, self._calls[place], self.run.blocks[place]
        cache = cache_among(call.given)  # Which it cannot look into.
        objects = [each for each in _objects(call.given) if each is not cache]
        classes = {type(module) for module in block.modules()}
        own, described = describe(block), self.run.described[place]
        held = (*own.outside, *objects, *classes)
        counts, names, drawn = _counts(block), self._names[kind], random_states()
        state = state_of(_reached(held, names), self._others)
        if state.has_tensors and self.run.traced_units == FEWEST_TRACED:
            raise self._refuse("a block reaches tensors that it is not given")
        proof = _Proof(own, described.is_unchanged(), held, names, state)
        results = self._trace(place, compute)
        if new := self._names[kind].values().keys() - names.values().keys():
            raise self._refuse(f"a block uses other names than the ones before: {new}")
        if not self._is_as_described(proof, place):
            self._check_same(proof.own.facts, describe(block).facts)
        self._check_state(proof)
        if _counts(block) != counts:
            raise self._refuse("a block changes a tensor of its own")
        if (modes(), random_states()) != (call.modes, drawn):
            raise self._refuse("a block changes a mode, or draws random numbers")
        self._proofs[kind:] = [proof]
        return results

    def _check_roles(self, place: int, cache: Any) -> None:
        """Checks that the second unit has tensors from known places alone.

        The third is made of its nodes. What stands for another tensor there, such as a weight of
        its own, must not be something that all units have in common as well.
        """
        call, block = self._calls[place], self.run.blocks[place]
        tensors = [each for each in call.given if isinstance(each, Tensor)]
        if any(each is not cache for each in _objects(call.given)) or foreign_modes():
            raise self._refuse("a block is given objects that may hold tensors")
        if any(not attributes_of(each).keys() <= self._attributes for each in tensors):
            raise self._refuse("a block is given a tensor with attributes")
        held = [*block.parameters(), *block.buffers()]
        for layer in () if cache is None else cache.layers:
            held += [each for each in attributes_of(layer).values() if isinstance(each, Tensor)]
        self._replaced |= {storage_key(each) for each in held}

    def _is_as_described(self, proof: _Proof, place: int) -> bool:
        """Whether a block and the traced one of its kind are what they were before the trace."""
        return proof.as_described and self.run.described[place].is_unchanged()

    def _check_state(self, proof: _Proof) -> None:
        reached = _reached(proof.held, proof.names)
        if not proof.state.is_unchanged(reached):
            self._check_same(proof.state.facts, state_of(reached, self._others).facts)

    def _check_same(self, before: Facts, after: Facts) -> None:
        if before != after:
            place = min(differing_places(before, after), key=str)
            raise self._refuse(f"what blocks read changes: {' '.join(map(str, place))}")

    @contextlib.contextmanager
    def reads_watched(self) -> Iterator[None]:
        """Refuses blocks that read attributes which differ between them.

        A module that has nothing but such attributes is asked for each block instead: stochastic
        depth, for one, returns what it is given in evaluation mode, whatever its probability is.
        """
        names: dict[int, set[str]] = {}
        twins: dict[int, list[nn.Module]] = {}
        watched: set[type] = set()
        asked: set[type] = set()
        for kind, differing in enumerate(self.run.differing):
            blocks = self.run.blocks[kind :: self.run.period]
            for path, name in differing:
                modules = [block.get_submodule(path) for block in blocks]
                alone = path and not any(True for _ in modules[0].children())
                alone = alone and not any(True for _ in modules[0].parameters())
                watched.add(type(modules[0]))
                if alone:
                    asked.add(type(modules[0]))
                for module in modules:
                    key = id(attributes_of(module))
                    names.setdefault(key, set()).add(name)
                    if alone:
                        twins[key] = modules
        with contextlib.ExitStack() as changes:
            for cls in watched:
                getter = self._getter(cls.__getattribute__, names)
                changes.enter_context(changed(cls, "__getattribute__", getter))
            for cls in asked:
                asking = self._asking(cls.forward, twins)  # type: ignore[attr-defined]
                changes.enter_context(changed(cls, "forward", asking))
            yield

    def _getter(
        self, original: Callable[..., Any], names: Mapping[int, set[str]]
    ) -> Callable[..., Any]:
        def get(module: Any, name: str) -> Any:
            if self._reading:
                differing = names.get(id(attributes_of(module)), ())
                reader = inspect.currentframe() if differing else None
                while reader and reader.f_code is get.__code__:  # Runs may have a class in common.
                    reader = reader.f_back
                if name in differing:
                    index = self._caches.index(module, name, reader)
                    if index is not None:
                        return index
                all_of_them = (
                    name == "__dict__"
                    and reader
                    and not is_library_file(file_of(reader.f_code, reader.f_globals))
                )
                if name in differing or all_of_them:
                    self.fail(f"a block reads {name}, which is another one's otherwise")
            return original(module, name)

        return get

    def _asking(
        self, original: Callable[..., Any], twins: Mapping[int, Sequence[nn.Module]]
    ) -> Callable[..., Any]:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            others = twins.get(id(attributes_of(module)), ()) if self._reading else ()
            if not others:
                return original(module, *args, **kwargs)
            self._reading = False
            given = pytree.tree_flatten((args, kwargs))
            try:
                results = [original(other, *args, **kwargs) for other in others]
            finally:
                self._reading = True
            same = _are_those_of((args, kwargs), *given)
            if not same or any(place_of(result, args[:1]) is None for result in results):
                self.fail("a block has a module whose attributes are not another one's")
            return args[0]

        return forward

    def fail(self, reason: str) -> NoReturn:
        """Refuses the run, even if the model's code catches the error."""
        self._failure = self._failure or reason
        raise self._refuse(reason)

    # --- Blocks that are passed over ---

    def _check_given(self, place: int) -> None:
        """Checks that a block is given what the block a unit before was given in its place."""
        call, before = self._calls[place], self._calls[place - self.run.period]
        if call.spec != before.spec or call.modes != before.modes:
            self.fail("they are called in different ways")
        if not all(map(_are_alike, call.attributes, before.attributes)):
            self.fail("a tensor that a block is given has other attributes")
        self._check_returned(self._calls[place - 1 : place])
        versions = iter(zip(call.versions, before.versions, strict=False))
        for given, earlier in zip(call.given, before.given, strict=True):
            if isinstance(given, Tensor) and isinstance(earlier, Tensor):
                now, then = next(versions)
                if given is earlier and now == then:
                    if self.proves and storage_key(given) in self._replaced:
                        self.fail("what all are given is a unit's own as well")
                    continue
                leaf = place_of(given, self._calls[place - 1].results)
                its = place_of(earlier, self._calls[place - self.run.period - 1].results)
                if leaf is None or leaf != its or sizes_of(given) != sizes_of(earlier):
                    self.fail("a tensor that a block is given is not the one's before")
                if self.proves and place >= self.run.traced and not place % self.run.period:
                    self._carried.add(leaf)
            elif given is not earlier and not are_equal(given, earlier):
                self.fail("they are given different arguments")

    def _check_returned(self, calls: Iterable[_Call]) -> None:
        """Checks that nothing has changed blocks' results, which would be the ends of units."""
        if any(call.returned != _versions(call.results) for call in calls):
            self.fail("a block's result is changed in place")

    def _check_block(self, place: int) -> None:
        """Checks that a block is like the traced one of its kind, now that it is called."""
        kind = place % self.run.period
        proof = self._proofs[kind]
        if not self._is_as_described(proof, place):
            differing = describe(self.run.blocks[place]).differences(proof.own)
            if differing is None or not differing <= self.run.differing[kind]:
                raise self._refuse("a block has changed since the trace began")
        self._check_state(proof)

    def _stand_ins(self, place: int) -> list[Any]:
        """Returns results like those of the block a unit before."""
        call, before = self._calls[place], self._calls[place - self.run.period]
        results = []
        for leaf, result in enumerate(before.results):
            its = place_of(result, before.given)
            if its is not None:
                results.append(call.given[its])
            elif isinstance(result, Tensor):
                results.append(self._stand_in(result, place, leaf))
            elif type(result) in SIMPLE:
                results.append(result)
            else:
                raise self._refuse("they return other objects than tensors")
        return results

    def _stand_in(self, result: Tensor, place: int, leaf: int) -> Tensor:
        """Returns what stands for a result of a block, given that of the block a unit before.

        The first unit that is passed over and the last one have marks of their own. The tensors of
        those between are of the first one's marks, so that what else is done with any of them is
        another use of those.
        """
        run = self.run
        between = run.traced + run.period <= place < len(run.blocks) - run.period
        twin = private.twin_of(result) if between and self.proves else None
        return self._end(result, place, leaf) if twin is None else twin

    def finish(
        self, program: ExportedProgram, marks: Mapping[Any, fx.Node]
    ) -> tuple[list[list[fx.Node]], Kept]:
        """Returns the nodes that end each traced unit, and what the units leave in a cache."""
        blocks, period = len(self.run.blocks), self.run.period
        self.check()
        own, left = (
            {key[2:]: node for key, node in marks.items() if key[:2] == (mark, self.number)}
            for mark in (END, KEPT)
        )
        for (place, _), node in own.items():
            last_traced = place == self.run.traced - 1
            if (last_traced or self.run.traced <= place < blocks - 1) and any(
                user.target is not END for user in node.users
            ):
                raise self._refuse("a result between two of them is used elsewhere")
        used = {leaf for (place, leaf), node in own.items() if place == blocks - 1 and node.users}
        leaves = sorted(self._carried | used)
        if not leaves:
            raise self._refuse("their results are not used")
        ends = [
            [own.get((period * (unit + 1) - 1, leaf)) for leaf in leaves]
            for unit in range(self.run.traced_units)
        ]
        if any(node is None for nodes in ends for node in nodes):
            raise self._refuse("their results are what they were given")
        nodes: list[list[fx.Node]] = [[node.args[0] for node in unit] for unit in ends]  # type: ignore[union-attr,misc]
        paths = self.run.paths[: self.run.traced]
        if self.run.traced_units == FEWEST_TRACED and (
            reason := computed_outside(nodes, paths[self.run.period :])
        ):
            raise self._refuse(reason)
        if reads_sizes(program, paths):
            raise self._refuse("a block reads a size from data")
        remaining = {node for (place, _), node in own.items() if place >= self.run.traced - 1}
        if computes_between(program, remaining, {*own.values(), *left.values()}):
            raise self._refuse("the model computes something else between them")
        kept = self._caches.finish(program, left)
        both = [node for units in (nodes, kept.nodes) for unit in units for node in unit]
        if kept.inputs and len(set(both)) < len(both):
            raise self._refuse("what a block leaves in a cache is its result as well")
        return nodes, kept


def _are_those_of(arguments: Any, leaves: Sequence[Any], spec: Any) -> bool:
    """Whether the leaves of arguments are what they were."""
    now, nested = pytree.tree_flatten(arguments)
    return nested == spec and all(map(operator.is_, now, leaves))


def _versions(values: Sequence[Any]) -> list[int]:
    """Returns how often each tensor among some values was changed in place."""
    return [change_count(each) for each in values if isinstance(each, Tensor)]


def _are_alike(noted: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether what is noted on two tensors is the same: simple values, or the same tensors.

    Some versions of PyTorch note the node of a tensor that was changed in place.
    """
    kinds = Tensor, fx.Proxy
    return noted.keys() == earlier.keys() and all(
        are_equal(value, its) or (isinstance(value, kinds) and value is its and count == then)
        for (value, count), (its, then) in ((noted[name], earlier[name]) for name in noted)
    )


def _objects(given: Sequence[Any]) -> list[Any]:
    return [each for each in given if not (isinstance(each, Tensor) or type(each) in SIMPLE)]


def _reached(held: Sequence[Any], names: ReadNames) -> dict[Hashable, Any]:
    """Returns objects, and what classes' forward and the names in a block's code stand for now."""
    # Nothing else is said of the classes of libraries.
    kinds = (each for each in held if isinstance(each, type) and issubclass(each, nn.Module))
    forwards = [kind.forward for kind in kinds]
    return {**dict(enumerate((*held, *forwards))), **names.values()}


def _counts(block: nn.Module) -> list[tuple[int, int]]:
    """Returns which tensors a block has, and how often each was changed in place."""
    return [(id(each), change_count(each)) for each in (*block.parameters(), *block.buffers())]
