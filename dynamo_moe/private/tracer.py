"""Private names of PyTorch by which an export is traced in steps of our own.

They, and those of :mod:`dynamo_moe.private.exporter`, are used with the versions of PyTorch
that they have been run with. With another version, or where a name of either module has moved,
:func:`missing` says so, and an export takes the public way: ``torch.export.export`` and
``torch.onnx.export`` alone. That takes several times as long; what a model decides by a size is
then read from the ranges of its sizes, without the line that decides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.nn.modules import transformer

from dynamo_moe.private import exporter
from dynamo_moe.private.pytorch import (
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    enable_python_dispatcher,
)
from dynamo_moe.process_state import Change, ProcessState, replaced

__all__ = [
    "KNOWN_VERSIONS",
    "SYMBOLIC_SQUARE_ROOT",
    "TRACERS",
    "VMAP_BEGINS",
    "VMAP_ENDS",
    "VMAP_PREPARES",
    "can_decompose",
    "composite_computed",
    "enable_python_dispatcher",
    "exporting",
    "failures_unsaid",
    "fake_mode",
    "fractions_unknown",
    "free_unbacked_symbols",
    "graphs_compiled_late",
    "is_module_cast",
    "is_never_negative",
    "lacks_values",
    "make_fx",
    "has_static_value",
    "missing",
    "no_layers_left",
    "operators_replaced",
    "orders_in_memory_unasked",
    "rnn_loops",
    "scan",
    "sizes_of_one",
    "sizes_replaced",
    "sizes_watched",
    "stack",
    "unfused_transformers",
    "without_gradients",
]

KNOWN_VERSIONS = ((2, 11), (2, 15))
"""The oldest and the newest PyTorch whose private names have been used."""

_absent = exporter.absent
try:
    # Fake tensors of a trace, and the frames of code that Dynamo reads and does not run.
    from torch._dynamo import config as _dynamo_config

    # What follows a trace.
    from torch._export.passes import replace_set_grad_with_hop_pass as _gradients
    from torch._guards import TracingContext, detect_fake_mode

    # Symbolic sizes: the tracer of one operator, arithmetic, conditions.
    from torch.fx.experimental import _config, proxy_tensor
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as _free_unbacked
    from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true
except ImportError as error:
    _absent = str(error)

    def has_static_value(a: Any) -> bool:  # type: ignore[misc]
        """Says that no size is symbolic."""
        return True


if not _absent and (ShapeEnv is None or enable_python_dispatcher is None):
    _absent = "no torch.fx.experimental.symbolic_shapes.ShapeEnv"

try:  # LSTMs and GRUs as loops.
    from torch.export._patches import (
        register_gru_while_loop_decomposition,
        register_lstm_while_loop_decomposition,
    )

    _RNN_LOOPS = (register_lstm_while_loop_decomposition, register_gru_while_loop_decomposition)
except ImportError:
    _RNN_LOOPS = ()  # type: ignore[assignment]

try:  # A recurrence as one operator.
    from torch._higher_order_ops.scan import scan
except ImportError:
    scan = None  # type: ignore[assignment]

try:  # Batch dimensions of torch.vmap.
    from torch._functorch.predispatch import _vmap_decrement_nesting as VMAP_ENDS
    from torch._functorch.predispatch import _vmap_increment_nesting as VMAP_BEGINS
    from torch._functorch.predispatch import lazy_load_decompositions as VMAP_PREPARES
except ImportError:
    VMAP_BEGINS = VMAP_ENDS = VMAP_PREPARES = None  # type: ignore[assignment]


try:  # What torch.func has begun and not ended: batch dimensions, gradients.
    from torch._C._functorch import get_dynamic_layer_stack_depth as _layers_begun
    from torch._C._functorch import pop_dynamic_layer_stack_and_undo_to_depth as _end_layers
except ImportError:
    _layers_begun = _end_layers = None  # type: ignore[assignment]


@contextlib.contextmanager
def no_layers_left() -> Iterator[None]:
    """Ends what ``torch.func`` has begun inside where an error ends it.

    A strict trace leaves it, and then PyTorch draws no random numbers.
    """
    depth = 0 if _layers_begun is None else _layers_begun()
    try:
        yield
    except BaseException:
        if _end_layers is not None:
            _end_layers(depth)
        raise


SYMBOLIC_SQUARE_ROOT = getattr(torch, "_sym_sqrt", None)
"""The operator that ``math.sqrt`` of a size is in a trace."""

_IS_CAUSAL = "_detect_is_causal_mask"
_ARITHMETIC = ("_add", "_mul", "_sub", "_sym_max", "_eq", "_ne", "_ge", "_gt", "_le", "_lt")


# What our steps call or replace, and the first parameters of what is replaced or takes arguments by
# name. Attributes of single objects, such as a program's, only show when a step uses them.
_USED: dict[str, tuple[str, ...]] = {
    "ShapeEnv._log_guard": ("self", "prefix", "g"),
    "TracingContext.extract_stack": (),
    "_config.patch": (),
    "_config.backed_size_oblivious": (),
    "_dynamo_config.fake_tensor_cache_enabled": (),
    "_dynamo_config.patch": (),
    "torch._C._set_grad_enabled": (),
    "torch._C.DispatchKey.CompositeImplicitAutograd": (),
    "FakeTensorMode.dispatch": ("self", "func", "types", "args", "kwargs"),
    "_gradients.replace_set_grad_with_hop_pass": ("gm", "graph_signature"),
    **{f"SymNode.{name}": ("self", "other") for name in _ARITHMETIC},
    "proxy_tensor.get_proxy_mode": (),
    "proxy_tensor._extract_tensor_metadata": ("result", "include_contiguity"),
    "SymNode.wrap_int": ("self", "num"),
    "SymNode.maybe_as_int": ("self",),
    "SymNode.expect_true": ("self", "file", "line"),
    "SymNode.guard_bool": ("self", "file", "line"),
}


@functools.cache
def _changed() -> str:
    """Returns the first name that is absent or takes other arguments; empty if none is."""
    changed = _changed_of(_USED, globals())
    return changed or _changed_of(exporter.USED, vars(exporter))


def _changed_of(used: dict[str, tuple[str, ...]], imported: dict[str, Any]) -> str:
    for name, expected in used.items():
        module, *attributes = name.split(".")
        try:
            value = functools.reduce(getattr, attributes, imported[module])
        except AttributeError as error:
            return str(error)
        if expected:
            parameters = tuple(inspect.signature(value).parameters)
            if parameters[: len(expected)] != expected:
                return f"{name} takes {', '.join(parameters)}"
    return ""


def missing() -> str | None:
    """Returns why this PyTorch's private names are not used; None where they are."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = KNOWN_VERSIONS
    if not oldest <= version <= newest:
        versions = " to ".join(".".join(map(str, version)) for version in KNOWN_VERSIONS)
        return f"it is not one of the versions {versions}"
    absent = _absent or _changed()
    return f"it has other private names: {absent}" if absent else None


# --- Values of a trace ---


def free_unbacked_symbols(value: Any) -> set[Any]:
    """Returns the symbols of a value that are read from data, such as nonzero's size."""
    if not _absent:
        return set(_free_unbacked(value))
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    expressions = (size.node.expr for size in sizes if isinstance(size, torch.SymInt))
    # PyTorch's names of sizes of the inputs begin with an s.
    return {
        symbol
        for expression in expressions
        for symbol in expression.free_symbols
        if not symbol.name.startswith("s")
    }


def is_never_negative(size: Any) -> bool:
    """Whether a symbolic size is known to be 0 or more."""
    return not _absent and bool(statically_known_true(size >= 0))


def fake_mode(program: ExportedProgram) -> Any:
    """Returns the mode of the fake tensors that are a program's values; None if it has none."""
    if _absent:
        return None
    return detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])


def can_decompose(operator: Any) -> bool:
    """Whether an operator is composite: PyTorch computes it by others."""
    return bool(operator._can_decompose())


# --- Decisions by sizes ---


def sizes_watched(noting: Callable[[Any, str], None]) -> ProcessState:
    """Returns a change that calls a function with each condition on sizes that a trace depends on.

    The function also takes what kind of condition PyTorch says it is.
    """

    def watching(original: Any) -> Any:
        def log_guard(environment: Any, prefix: str, condition: Any, *args: Any, **kw: Any) -> None:
            noting(condition, prefix)
            original(environment, prefix, condition, *args, **kw)

        return log_guard

    return ProcessState(lambda: replaced(ShapeEnv, "_log_guard", watching))


def stack() -> Iterator[tuple[str, int]]:
    """Yields the files and lines of what runs or is read by Dynamo, the innermost first."""
    traced = TracingContext.extract_stack()
    yield from ((entry.filename, entry.lineno or 0) for entry in reversed(traced))
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


TRACERS = ("torch._dynamo.", "torch._export.", "torch.export.", "torch.fx.")
"""Where the errors are from that say what a trace cannot do; others may be the model's."""


def lacks_values(error: RuntimeError) -> bool:
    """Whether an error says that a traced program has a constant without values."""
    return "fake tensor in the exported program constant" in str(error)


def decides_by_values(error: RuntimeError) -> bool:
    """Whether an error says that a trace has to decide by a tensor's value."""
    return "data-dependent expression" in str(error)


def is_module_cast(function: str) -> bool:
    """Whether a function of ``torch.nn.Module`` is what casts and moves modules."""
    return function == "_apply"


# --- What the shortcuts of a trace replace ---
# Each replacement takes what PyTorch calls, and returns what takes its place.

Replacement = Callable[[Any], Any]


def operators_replaced(remembered: Replacement) -> list[Change]:
    """Returns changes to how operators' results are found.

    PyTorch's own cache of operators' results takes longer to look them up than to find them anew.
    """
    return [
        lambda: _dynamo_config.patch(fake_tensor_cache_enabled=False),
        partial(replaced, FakeTensorMode, "dispatch", remembered),
    ]


def sizes_replaced(
    remembered: Replacement,
    integers_made_once: Replacement,
    symbols_known: Replacement,
    truths_known: Replacement,
) -> list[Change]:
    """Returns changes to the arithmetic of symbolic sizes."""
    return [
        *(partial(replaced, SymNode, name, remembered) for name in _ARITHMETIC),
        partial(replaced, SymNode, "wrap_int", integers_made_once),
        partial(replaced, SymNode, "maybe_as_int", symbols_known),
        partial(replaced, SymNode, "expect_true", truths_known),
        partial(replaced, SymNode, "guard_bool", truths_known),
    ]


def _without_memory_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Does not ask in which order each result is in memory, which the export does not read."""
    return functools.partial(original, include_contiguity=False)


def orders_in_memory_unasked() -> list[Change]:
    """Returns the change by which a trace does not ask for results' orders in memory."""
    return [partial(replaced, proxy_tensor, "_extract_tensor_metadata", _without_memory_format)]


# --- Capture ---


def _sizes_of_one_symbolic() -> Any:
    """Treats sizes of 0 and 1 as any other, as torch.onnx.export does around torch.export."""
    if missing() is not None:
        return contextlib.nullcontext()
    return _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _unfused_transformers() -> Iterator[None]:
    """Lets the transformers of ``torch.nn`` compute layer by layer, with the mask they are given.

    In evaluation mode they can call fused operators, which ONNX has no translation for. They also
    compare a mask's values with those of a causal one, only to choose a faster kernel.
    """

    def believed(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return is_causal is True

    mha = torch.backends.mha
    with contextlib.ExitStack() as changes:
        changes.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if hasattr(transformer, _IS_CAUSAL):
            changes.enter_context(replaced(transformer, _IS_CAUSAL, lambda _: believed))
        yield


unfused_transformers = ProcessState(_unfused_transformers)
"""Lets the transformers of ``torch.nn`` compute layer by layer."""

# A state of its own: captures and decompositions that overlap share one.
sizes_of_one = ProcessState(_sizes_of_one_symbolic)
"""Treats sizes of 0 and 1 as any other."""


def _unknown(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def is_unknown(value: Any) -> bool:
        return isinstance(value, (torch.SymFloat, torch.SymBool)) and not has_static_value(value)

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(mode, func, types, args, kwargs)
        if getattr(result, "constant", None) is None:
            return result
        if any(map(is_unknown, (*args, *(kwargs or {}).values()))):
            result.constant = None
        return result

    return dispatched


@contextlib.contextmanager
def _fractions_unknown() -> Iterator[None]:
    """Makes no constants of constants and fractions of sizes: ``torch.tensor(2.0) * (rows / 4)``.

    PyTorch knows the values of constants while it traces. It computes with 0 for the fraction, and
    ``int()`` of the product, as of an expert's capacity, would be that number in the program.
    """
    if missing() is not None:
        yield
        return
    with replaced(FakeTensorMode, "dispatch", _unknown):
        yield


fractions_unknown = ProcessState(_fractions_unknown)
"""Makes no constants of constants and fractions of sizes."""


# What a failed trace also says to stderr, pages of it.
_LOGGERS = (
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
)


@contextlib.contextmanager
def _failures_unsaid() -> Iterator[None]:
    """Lets a trace that fails say so in its error alone: another way of tracing may succeed.

    PyTorch also logs what it thinks of the error, and prints the program as far as it is traced.
    """
    with contextlib.ExitStack() as changes:
        for logger in map(logging.getLogger, _LOGGERS):
            changes.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        with contextlib.suppress(ImportError):
            printing: Any = importlib.import_module(_LOGGERS[0])
            printing.print = lambda *_, **__: None  # In place of the builtin.
            changes.callback(delattr, printing, "print")
        yield


failures_unsaid = ProcessState(_failures_unsaid)
"""Lets a trace that fails say so in its error alone."""


@contextlib.contextmanager
def _said_to_export() -> Iterator[None]:
    """Lets ``torch.compiler.is_exporting()`` say to a model what it says in a trace."""
    with contextlib.ExitStack() as changes:
        for name in ("_is_compiling_flag", "_is_exporting_flag"):
            if hasattr(torch.compiler, name):
                changes.enter_context(replaced(torch.compiler, name, lambda _: True))
        yield


exporting = ProcessState(_said_to_export)
"""How a model runs that should do what it does in a trace."""


def _without_regions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes no regions of a program where it switches gradients on and off.

    PyTorch's pass would take the program apart, and put it together again with a graph for each.
    """

    def regions(gm: fx.GraphModule, graph_signature: Any) -> Any:
        for node in list(gm.graph.nodes):
            if node.target is torch._C._set_grad_enabled:
                gm.graph.erase_node(node)
        # The graphs of branches and loops are left to it.
        return original(gm, graph_signature)

    return regions


@contextlib.contextmanager
def _gradients_ignored() -> Iterator[None]:
    if missing() is not None:
        yield
        return
    name = "replace_set_grad_with_hop_pass"
    with replaced(_gradients, name, _without_regions):
        yield


without_gradients = ProcessState(_gradients_ignored)
"""Traces a model for its results alone: where it switches gradients off does not matter."""


@contextlib.contextmanager
def _graphs_compiled_late() -> Iterator[None]:
    """Makes the Python code of this thread's graphs when they are called, or it is read."""
    thread = threading.get_ident()

    def postponing(recompile: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], Any]:
        def code(module: fx.GraphModule) -> Any:
            recompile(module)
            return vars(module)["_code"]

        def postponed(module: fx.GraphModule) -> Any:
            if threading.get_ident() != thread:
                return recompile(module)
            cls: Any = type(module)

            def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
                recompile(self)
                return cls.forward(self, *args, **kwargs)

            vars(module).pop("_code", None)
            cls.forward = forward
            cls._code = functools.cached_property(code)
            cls._code.__set_name__(cls, "_code")
            return None

        return postponed

    if missing() is not None:
        yield
        return
    with replaced(fx.GraphModule, "recompile", postponing):
        yield


graphs_compiled_late = ProcessState(_graphs_compiled_late)
"""Makes no Python code of graphs that are only rewritten; Dynamo reads its own."""


def composite_computed(operator: OpOverload, function: Callable[..., Any]) -> Change:
    """Returns a change by which a trace computes a composite operator by a function.

    Where the function returns NotImplemented, the operator is computed by PyTorch's own code.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return operator._op_dk(key, *args, **kwargs) if result is NotImplemented else result

    @contextlib.contextmanager
    def change() -> Iterator[None]:
        kernels, called = (getattr(operator, n, None) for n in ("py_kernels", "_dispatch_cache"))
        if missing() is not None or kernels is None or called is None or key in kernels:
            yield
            return
        called.clear()
        kernels[key] = kernel
        try:
            yield
        finally:
            del kernels[key]
            called.clear()

    return change


@contextlib.contextmanager
def _rnns_called_anew() -> Iterator[None]:
    """Lets RNNs forget which kernels they have called, before those change and after."""

    def forget() -> None:
        for rnn in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
            getattr(rnn, "_dispatch_cache", {}).clear()

    forget()
    try:
        yield
    finally:
        forget()


rnn_loops = ProcessState(_rnns_called_anew, *_RNN_LOOPS)
"""Makes LSTMs and GRUs loops, whose number of steps may be symbolic."""
