"""Caches of keys and values that hold a layer for each of a run's blocks.

Every block is given the whole ``DynamicCache`` of transformers, and the number of its own layer
tells them apart. What a block may do with the two is one thing: ``cache.update(keys, values,
self.layer_idx)``, in code that shows that nothing else gets hold of the number. Then the number
does not matter, and what the layer holds before and after is what the block is given and returns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NoReturn

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from dynamo_moe import pytree
from dynamo_moe.private import attributes_of, change_count, storage_key
from dynamo_moe.tracing.direct_calls import DirectCall, direct_call, place_in
from dynamo_moe.tracing.equal_blocks import Run
from dynamo_moe.tracing.marks import KEPT
from dynamo_moe.tracing.values import SIMPLE, are_equal, changed, sizes_of

_MODULE = "transformers.cache_utils"


def cache_among(values: Collection[Any]) -> Any:
    """Returns the cache among a block's arguments; None if there is none that is known, or more."""
    module = sys.modules.get(_MODULE)
    kind = getattr(module, "DynamicCache", None)
    found = {id(value): value for value in values if kind is not None and type(value) is kind}
    cache = next(iter(found.values())) if len(found) == 1 else None
    return cache if cache is not None and _is_known(cache) else None


def _is_known(cache: Any) -> bool:
    """Whether a cache hands what it is given to the layer of the number, and does nothing else."""
    kind, module = type(cache), sys.modules[_MODULE]
    update, held = kind.update, attributes_of(cache)
    own = all(
        {"__getattribute__", "__getattr__"}.isdisjoint(vars(each)) for each in kind.__mro__[:-1]
    )
    of_library = type(update) is FunctionType and update.__code__.co_filename == module.__file__
    layers = held.get("layers")
    return (
        own
        and of_library
        and "update" not in held
        and held.get("offloading") is False
        and type(layers) is list
        and all(type(layer) is module.DynamicLayer for layer in layers)
        and len({id(layer) for layer in layers}) == len(layers)
    )


class _Index:
    """Stands for the number of a block's layer: equal to nothing, and no number."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name


@dataclass
class _Update:
    """A call of ``update`` that is being made: by which frame, and with which number."""

    frame: FrameType
    plain: DirectCall
    index: _Index | None = None


@dataclass
class _Layer:
    """What a layer holds when a block is called, and after it.

    Attributes:
        before: Its attributes.
        versions: How often each of its tensors was changed in place until then.
        after: Its attributes after the block.
    """

    before: dict[str, Any]
    versions: list[int]
    after: dict[str, Any]

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        """Returns what a layer holds now."""
        held = _Layer(dict(attributes_of(layer)), [], {})
        held.versions = [change_count(each) for each in held.given]
        return held

    @property
    def given(self) -> list[Tensor]:
        """The tensors that it holds before."""
        return [value for value in self.before.values() if isinstance(value, Tensor)]

    @property
    def new(self) -> dict[str, Tensor]:
        """The tensors that it did not hold before."""
        held = self.after.items()
        return {
            name: x for name, x in held if isinstance(x, Tensor) and _named(x, self.before) is None
        }


@dataclass(frozen=True)
class Kept:
    """What the units of a run leave in a cache, in a traced program.

    Attributes:
        nodes: By traced unit, the results.
        inputs: By unit, the names of the program's inputs that hold what was there before.
        places: By unit, the results' places among the program's.
    """

    nodes: Sequence[Sequence[fx.Node]]
    inputs: Sequence[Sequence[str]] = ()
    places: Sequence[Sequence[int]] = ()

    @property
    def traced(self) -> list[tuple[int, fx.Node]]:
        """The results of the traced units, with their places."""
        pairs = zip(self.places, self.nodes, strict=False)
        return [pair for places, nodes in pairs for pair in zip(places, nodes, strict=True)]

    @property
    def absent(self) -> list[int]:
        """The places of the other units' results."""
        return [place for places in self.places[len(self.nodes) :] for place in places]


class LayerCaches:
    """The layers of caches that a run's blocks use."""

    def __init__(self, number: int, run: Run, fail: Callable[[str], NoReturn]) -> None:
        """Takes a run, its number and what refuses it."""
        self._number, self._run, self._fail = number, run, fail
        self._layers: dict[int, _Layer] = {}
        # By kind, where its blocks read the number of their layer.
        self._indices: dict[int, frozenset[tuple[str, str]]] = {}
        self._watch: _Watch | None = None
        # What the cache holds beside its layers.
        self._own: list[Any] | None = None

    # --- Blocks that are traced ---

    def begin(self) -> None:
        """Forgets what layers held, since the first block is called."""
        self._layers.clear()
        self._own = None

    def run(self, place: int, cache: Any, compute: Callable[[], Any], proves: bool) -> Any:
        """Runs a block that is given a cache, and notes what becomes of its layer."""
        before = {id(each): _Layer.of(each) for each in cache.layers}
        contents = _contents(cache)
        results = self._watched(place, cache, compute) if proves else compute()
        number = self._index(place, cache)
        layer = None if number is None else cache.layers[number]
        if proves:
            after = _contents(cache)
            for found in (contents, after):
                found.pop(id(layer), None)
            if contents != after:
                self._fail("a block changes more than its own layer of a cache")
        if layer is not None:
            self._layers[place] = held = before[id(layer)]
            held.after = dict(attributes_of(layer))
            if proves:
                self._check_new(held, results)
            self._write(layer, place, held)
        return results

    def index(self, module: Any, name: str, frame: FrameType | None) -> Any:
        """Returns what stands for an attribute that is read as the number of a layer, or None."""
        return self._watch and self._watch.index(module, name, frame)

    def _watched(self, place: int, cache: Any, compute: Callable[[], Any]) -> Any:
        self._watch = watch = _Watch(cache, self._fail)
        kind = type(cache)
        try:
            with changed(kind, "__getattribute__", watch.getter(kind.__getattribute__)):
                results = compute()
        finally:
            self._watch = None
            watch.cache = None  # Whoever keeps the method calls it in vain.
        if watch.update is not None:
            self._fail("a block does not call what it reads of a cache")
        block = self._run.blocks[place]
        paths = {id(attributes_of(module)): path for path, module in block.named_modules()}
        found = {(paths.get(id(attributes_of(i.module))), i.name) for i in watch.indices}
        if any(path is None for path, _ in found):
            self._fail("a block reads the number of another one's layer")
        used = frozenset((str(path), name) for path, name in found)
        if self._indices.setdefault(place % self._run.period, used) != used:
            self._fail("blocks of one kind use a cache in different ways")
        return results

    def _check_new(self, held: _Layer, results: Any) -> None:
        """Checks that what a block leaves in its layer is tensors that nothing else changes."""
        if held.versions != [change_count(each) for each in held.given]:
            self._fail("a block changes what its layer of a cache held in place")
        values = (*held.before.values(), *held.after.values())
        if any(not isinstance(each, Tensor) and type(each) not in SIMPLE for each in values):
            self._fail("a layer of a cache holds other objects than tensors")
        leaves = (*held.given, *pytree.tree_leaves(results))
        others = {storage_key(each) for each in leaves if isinstance(each, Tensor)}
        keys = [storage_key(each) for each in held.new.values()]
        if len(set(keys)) < len(keys) or not others.isdisjoint(keys):
            self._fail("what a block leaves in a cache shares its memory")

    def _write(self, layer: Any, place: int, held: _Layer) -> None:
        """Marks what a block leaves in its layer, or what stands for it."""
        for leaf, (name, value) in enumerate(held.new.items()):
            held.after[name] = KEPT(value, held.given, self._number, place, leaf)
        attributes = attributes_of(layer)
        attributes.clear()
        attributes.update(held.after)

    def _index(self, place: int, cache: Any) -> int | None:
        """Returns the number of a block's layer."""
        block = self._run.blocks[place]
        paths = self._indices.get(place % self._run.period, frozenset())
        numbers = [attributes_of(block.get_submodule(path)).get(name) for path, name in paths]
        if not numbers:
            return None
        number = numbers[0]
        if type(number) is not int or any(
            type(each) is not int or each != number for each in numbers
        ):
            self._fail("a block uses several layers of a cache")
        if not 0 <= number < len(cache.layers):
            self._fail("a block's layer is not in the cache")
        return number

    # --- Blocks that are passed over ---

    def check(self, place: int, cache: Any) -> None:
        """Checks that a block's layer holds what that of the block a unit before held."""
        held = () if cache is None else attributes_of(cache).items()
        own = _ids((name, value) for name, value in held if name != "layers")
        if own != (self._own or own):
            self._fail("a cache changes between blocks")
        self._own = own
        number = None if cache is None else self._index(place, cache)
        earlier = self._layers.get(place - self._run.period)
        if (number is None) != (earlier is None):
            self._fail("not all blocks use a cache")
        if number is not None and earlier is not None:
            now = _Layer.of(cache.layers[number])
            if now.versions != earlier.versions or not _alike(now.before, earlier.before):
                self._fail("layers of a cache hold different things")

    def pass_over(self, place: int, cache: Any) -> None:
        """Leaves in a block's layer what is like that which the block a unit before has left."""
        number = None if cache is None else self._index(place, cache)
        if number is None:
            return
        layer, earlier = cache.layers[number], self._layers[place - self._run.period]
        self._layers[place] = held = _Layer.of(layer)
        for name, value in earlier.after.items():
            same = _named(value, earlier.before)
            held.after[name] = value if same is None else held.before[same]
        self._write(layer, place, held)

    # --- The program ---

    def finish(self, program: ExportedProgram, marks: Mapping[tuple[int, int], fx.Node]) -> Kept:
        """Returns what the units leave in a cache; ``marks`` are by block and leaf.

        Raises:
            NotSharedError: If that is not results of the program alone, or what was there is none
                of its inputs.
        """
        period, blocks, traced_units = (
            self._run.period,
            len(self._run.blocks),
            self._run.traced_units,
        )
        if not self._layers:
            return Kept([()] * traced_units, places=[()] * (blocks // period))
        signature = program.graph_signature
        specs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        own = {spec.arg.name for spec in specs}
        output = program.graph.output_node()
        results: Any = output.args[0]
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            self._fail("the program has results of other kinds")
        nodes: list[list[fx.Node]] = []
        inputs: list[list[str]] = []
        places: list[list[int]] = []
        pattern = None
        for start in range(0, blocks, period):
            keys = sorted(key for key in marks if start <= key[0] < start + period)
            offsets = [(place - start, leaf) for place, leaf in keys]
            with_layers = {
                place - start for place in self._layers if start <= place < start + period
            }
            if {offset for offset, _ in offsets} != with_layers or offsets != (pattern or offsets):
                self._fail("what some blocks leave in a cache is not used")
            pattern = offsets
            given: dict[int, Any] = {}
            places.append([])
            for key in keys:
                users = [user for user in marks[key].users if user.target is not KEPT]
                if users != [output] or results.count(marks[key]) != 1:
                    self._fail("what a block leaves in a cache is used elsewhere")
                places[-1].append(results.index(marks[key]))
                if given.setdefault(key[0], marks[key].args[1]) != marks[key].args[1]:
                    self._fail("what a layer of a cache held is not known")
            used = [node for each in given.values() for node in each]
            if any(node.op != "placeholder" or node.name not in own for node in used):
                self._fail("a layer of a cache holds what is not an input")
            inputs.append([node.name for node in used])
            nodes.append([marks[key].args[0] for key in keys])  # type: ignore[misc]
        names = [name for each in inputs for name in each]
        traced = [node for each in nodes[:traced_units] for node in each]
        if len(set(names)) < len(names) or len({len(each) for each in inputs}) > 1:
            self._fail("layers of a cache hold one tensor")
        if len(set(traced)) < len(traced) or any(node.op != "call_function" for node in traced):
            self._fail("what a block leaves in a cache is something else as well")
        return Kept(nodes[:traced_units], inputs, places)


class _Watch:
    """Lets code have nothing of a cache but calls of ``update`` with the number of a layer.

    Attributes:
        cache: The cache; None once the block has ended.
        update: The call that is being made.
        indices: The numbers that calls were made with.
    """

    def __init__(self, cache: Any, fail: Callable[[str], NoReturn]) -> None:
        self.cache, self._fail = cache, fail
        self.update: _Update | None = None
        self.indices: list[_Index] = []
        self._updates = False

    def getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get(cache: Any, name: str) -> Any:
            if cache is not self.cache or self._updates or name == "__class__":
                return original(cache, name)
            frame = _caller(inspect.currentframe())
            plain = direct_call(frame, "update") if name == "update" and frame else None
            if frame is None or plain is None or self.update is not None:
                self._fail(f"a block reads {name} of a cache")
            self.update = _Update(frame, plain)
            return self._called

        return get

    def index(self, module: Any, name: str, frame: FrameType | None) -> _Index | None:
        update = self.update
        if hasattr(type(module), name):  # A property, say.
            return None
        if update is None or frame is not update.frame or update.index is not None:
            return None
        if place_in(update.frame) not in update.plain.attributes:
            return None
        update.index = _Index(module, name)
        return update.index

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        update, self.update = self.update, None
        frame = _caller(inspect.currentframe())
        direct = update is not None and frame is update.frame
        if update is None or not direct or place_in(update.frame) != update.plain.call:
            self._fail("a block calls a method of a cache that it has kept")
        given: Any = args[2] if len(args) > 2 else kwargs.get("layer_idx")
        index = update.index
        if index is None or given is not index:
            self._fail("a block uses a layer of a cache that is not its own")
        self.indices.append(index)
        number = attributes_of(index.module)[index.name]
        args = tuple(number if each is index else each for each in args)
        kwargs = {name: number if each is index else each for name, each in kwargs.items()}
        self._updates = True
        try:
            return type(self.cache).update(self.cache, *args, **kwargs)
        finally:
            self._updates = False


def _caller(frame: FrameType | None) -> FrameType | None:
    return frame and frame.f_back


def _contents(cache: Any) -> dict[int, Any]:
    """Returns what a cache and its layers hold, in terms that are equal for the same objects."""
    layers = attributes_of(cache)["layers"]
    found = {id(each): _ids(attributes_of(each).items()) for each in (cache, *layers)}
    return {**found, id(layers): _ids(enumerate(layers))}


def _ids(held: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(name, value if type(value) in SIMPLE else id(value)) for name, value in held]


def _named(value: Any, among: Mapping[str, Any]) -> str | None:
    """Returns the name of a tensor itself."""
    own = isinstance(value, Tensor)
    return next((name for name, each in among.items() if own and each is value), None)


def _alike(held: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether what a layer holds shows no difference from what another one held."""
    return list(held) == list(earlier) and all(
        sizes_of(one) == sizes_of(other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else are_equal(one, other)
        for one, other in zip(held.values(), earlier.values(), strict=True)
    )
