"""``moe.experts`` behind a plain router becomes ``moe.dropless``, which holds the router.

Most models compute the routing themselves and hand it to ``moe.experts``. In a traced program the
nodes between the tokens and that routing say what the router is. Where they are such as a plain
router is made of, they are run on random numbers; if one of the operator's own routers gives the
same, up to rounding, it takes their place. The values of weights have no part in that, so a model
whose weights are not in memory gives the same graph.

Legend: T tokens, D model width, E experts, K = top_k.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from custom_ops.options import GROUP_SCORINGS, ROUNDINGS, RouterOptions
from custom_ops.routing import route
from dynamo_moe.private.pytorch import HigherOrderOperator, OpOverload, schema_of
from dynamo_moe.private.tracer import free_unbacked_symbols
from dynamo_moe.ties import TiesByIndex

_LOG = logging.getLogger(__name__)

_moe = torch.ops.moe

_VIEWS = ("contiguous", "flatten", "reshape", "view")
# What a plain router is made of, in place or not. None of it counts tokens or compares numbers, and
# only views take sizes that are symbols, so what holds for a few tokens holds for all: an expert's
# capacity, say, would not show on a few.
_PLAIN = (
    *(*_VIEWS, "clone", "detach", "squeeze", "t", "to", "transpose", "type_as", "unsqueeze"),
    *("add", "addmm", "div", "linear", "matmul", "mm", "mul", "sum"),
    *("gather", "sigmoid", "softmax", "topk"),
    # What a choice of groups of experts is made of besides.
    *("bitwise_not", "expand", "logical_not", "masked_fill", "scatter", "zeros_like"),
)
# A sum of scores below this is one of scores that underflow.
_LARGEST_FLOOR = 1e-12
# Ways to score, and whether the weights may be renormalised.
_SCORINGS = {"softmax": (True, False), "topk_softmax": (True,), "sigmoid": (True, False)}
# The last bit of a logit of 20 is 2e-6 in float32, which is what its weight is off by, relatively.
# Logits in half precision are off by 1e-3: those of both are rounded from the same number.
_TOLERANCE, _TOLERANCE_FLOAT64 = 1e-5, 1e-12
_TOKENS = 64
_SYMBOLIC_SIZE = 8
# The largest source of a trial, in numbers, where the example's sizes are fixed.
_MOST_NUMBERS = 1 << 25
# Multiples of which the even and the odd columns of tokens and router weights are, of biases all,
# where logits are rounded. All products are multiples of 2**-18, so their sums are exact in float32
# up to 64, in whatever order; and every digit of a half precision number is in some column.
_TOKEN_STEPS, _WEIGHT_STEPS, _BIAS_STEPS = (2**-10, 2**-2), (2**-8, 2**-16), (2**-10, 2**-10)
# Some tokens are smaller by this power of two, and so are their products and sums.
_SMALL_EXPONENT = 9


class _Part(NamedTuple):
    """The nodes that compute the routing of an ``experts`` node.

    Attributes:
        experts: The ``experts`` node.
        source: What both the routing and the experts' tokens are computed from.
        weight: A parameter ``[E, D]``.
        biases: Up to two further parameters or buffers of E numbers.
        nodes: The calls in between, in order.
    """

    experts: fx.Node
    source: fx.Node
    weight: fx.Node
    biases: tuple[fx.Node, ...]
    nodes: list[fx.Node]


class _Router(NamedTuple):
    """A router of the operator.

    Attributes:
        options: Its options.
        bias: What of the part's biases is its ``router_bias``; None: it has none.
        selection_bias: The same of its ``selection_bias``.
    """

    options: RouterOptions
    bias: int | None
    selection_bias: int | None


def fuse_routers(program: ExportedProgram) -> None:
    """Turns ``moe.experts`` into ``moe.dropless`` where that has the program's router, in place."""
    signature = program.graph_signature
    changed = {*signature.buffers_to_mutate.values()}
    buffers = {
        name for name, buffer in signature.inputs_to_buffers.items() if buffer not in changed
    }
    parameters = signature.inputs_to_parameters.keys() | buffers
    writes = [node for node in program.graph.nodes if _may_write(node)]
    known: dict[str, _Router | None] = {}
    found = [
        node
        for target in (_moe.experts.default, _moe.experts_packed.default)
        for node in program.graph.find_nodes(op="call_function", target=target)
    ]
    for experts in found:
        part = _part(experts, parameters, writes)
        if part is None:
            continue
        key = _description(part)
        if key not in known:
            known[key] = _identified(part)
        router = known[key]
        if router is not None:
            _fuse(part, router)
    if any(known.values()):
        program.graph_module.recompile()


def _fuse(part: _Part, router: _Router) -> None:
    """Turns the part into one node; the translation leaves out what has no use any more."""
    experts, options = part.experts, router.options

    def bias(number: int | None) -> fx.Node | None:
        if number is None:
            return None
        node = part.biases[number]
        if node.meta["val"].ndim == 1:
            return node
        with experts.graph.inserting_before(experts):
            flat = experts.graph.call_function(torch.ops.aten.view.default, (node, [-1]))
        flat.meta["val"] = node.meta["val"].view(-1)
        return flat

    x, _, _, *parameters = experts.args
    router_bias, selection_bias = bias(router.bias), bias(router.selection_bias)
    keywords = {row.name: getattr(options, row.name) for row in options.rows}
    if experts.target is _moe.experts.default:
        experts.target = _moe.dropless.default
        experts.args = (x, part.weight, *parameters, options.top_k, router_bias, selection_bias)
    else:
        packed, rest = parameters[:4], [*parameters[4:], *[None] * (10 - len(parameters))]
        beside, biases = rest[:4], rest[4:]
        experts.target = _moe.dropless_packed.default
        experts.args = (
            *(x, part.weight, *packed, options.top_k),
            *(*beside, router_bias, *biases, selection_bias),
        )
    experts.kwargs = {**experts.kwargs, **keywords}


def _part(experts: fx.Node, parameters: Collection[str], writes: list[fx.Node]) -> _Part | None:
    """Returns the nodes of a node's routing, if a plain router is made of such.

    ``parameters`` are names of placeholders of parameters and of buffers that do not change,
    ``writes`` nodes that may change a tensor in place.
    """
    arguments: Any = experts.args
    x, ids, weights, w1, *_ = arguments
    source = x
    while _is_aten(source, _VIEWS):
        source = source.args[0]
    reached = _reached([x, ids, weights], source, parameters)
    if reached is None:
        return None
    placeholders = [node for node in reached if node.op == "placeholder"]
    calls = sorted(reached.difference(placeholders))
    for write in writes:
        is_of_router = write in reached and _owner(write) in calls
        if calls and calls[0] <= write < experts and not is_of_router:
            return None
    shape = (w1.meta["val"].shape[0], x.meta["val"].shape[-1])
    by_shape: dict[tuple[int, ...], list[fx.Node]] = {shape: []}
    for node in sorted(placeholders):
        sizes = tuple(node.meta["val"].shape)
        # ERNIE's selection bias is [1, E].
        sizes = sizes if sizes == shape or sizes[:-1] not in ((), (1,)) else sizes[-1:]
        by_shape.setdefault(sizes, []).append(node)
    biases = by_shape.pop(shape[:1], [])
    if by_shape.keys() != {shape} or len(by_shape[shape]) != 1 or len(biases) > 2:
        return None
    if not isinstance(ids.meta["val"].shape[-1], int):
        return None
    return _Part(experts, source, by_shape[shape][0], tuple(biases), calls)


def _reached(
    results: list[fx.Node], source: fx.Node, parameters: Collection[str]
) -> set[fx.Node] | None:
    """Returns the nodes between a source and results; None if they are no plain router's."""
    reached: set[fx.Node] = set()
    waiting = [*results]
    while waiting:
        node = waiting.pop()
        if node is source or node in reached:
            continue
        known = node.name in parameters or node.target is operator.getitem
        if not (known or _is_aten(node, _PLAIN) or _is_comparison(node)):
            return None
        sizes = [argument for argument in node.all_input_nodes if _is_size(argument)]
        if sizes and not _is_aten(node, _VIEWS):
            return None
        reached.add(node)
        waiting += [argument for argument in node.all_input_nodes if argument not in sizes]
    return reached


def _is_comparison(node: fx.Node) -> bool:
    """Whether a node is one of the comparisons that plain routers have besides top-k.

    They are the best expert of each group, and ERNIE's floor below a sum of scores.
    """
    if node.target is torch.ops.aten.max.dim:
        return True
    first: Any = node.args[0] if node.args else None
    arguments: Any = (*node.args[1:], *node.kwargs.values())
    is_floor = _is_aten(node, ("clamp", "clamp_min")) and len(arguments) == 1
    return (
        is_floor
        and "max" not in node.kwargs
        and isinstance(arguments[0], float)
        and arguments[0] <= _LARGEST_FLOOR
        and _is_aten(first, ("sum",))
    )


def _is_aten(node: fx.Node, names: Collection[str]) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return schema_of(target).name.removeprefix("aten::").removesuffix("_") in names


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size of the inputs; one that is read from data is not."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


def _may_write(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _owner(node: fx.Node) -> fx.Node:
    """Returns the node whose memory a node's result may share."""
    target: Any = node.target
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    shares = target is operator.getitem or (arguments and arguments[0].alias_info is not None)
    first = node.args[0] if shares else None
    return _owner(first) if isinstance(first, fx.Node) else node


def _description(part: _Part) -> str:
    """Returns the same for parts that compute the same."""
    names: dict[Any, str] = {node: f"%{number}" for number, node in enumerate(part.nodes)}
    names |= {part.source: "source", part.weight: "weight"}
    names |= {bias: f"bias {number}" for number, bias in enumerate(part.biases)}

    def name(node: fx.Node) -> str:
        return names.get(node) or str(node.meta["val"])

    calls = [(str(node.target), fx.map_arg((node.args, node.kwargs), name)) for node in part.nodes]
    routing = fx.map_arg(part.experts.args[:3], name)
    values = [node.meta["val"] for node in (part.source, part.weight, *part.biases)]
    return repr((calls, routing, [(value.shape, value.dtype) for value in values]))


def _identified(part: _Part) -> _Router | None:
    """Returns the operator's router that gives the same routing, if one does."""
    tokens, ids, weights = (node.meta["val"] for node in part.experts.all_input_nodes[:3])
    top_k = ids.shape[-1]
    roundings = ROUNDINGS if _is_half(tokens) else ROUNDINGS[:1]
    candidates = [
        _Router(RouterOptions(top_k, scoring, renormalize, scaling, *groups, rounding), *roles)
        for roles in _roles(part)
        for groups in _groups(part)
        for scaling in _scalings(part)
        for scoring, renormalize in _scorings(part)
        for rounding in roundings
    ]
    errors = [0.0] * len(candidates)
    tolerance = _TOLERANCE_FLOAT64 if tokens.dtype == torch.float64 else _TOLERANCE
    # Candidates do not round weights: whether theirs round to the part's is what is compared.
    rounds = _is_half(weights) and weights.dtype == tokens.dtype
    weights_dtype = weights.dtype if rounds else torch.float64
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for x_TD, weight, biases, routing_TE in _examples(part):
                for number, (options, *roles) in enumerate(candidates):
                    bias, selection_bias = (None if r is None else biases[r] for r in roles)
                    routing = route(x_TD, weight, bias, options, selection_bias)
                    routed_TE = _dense(*routing, len(weight))
                    error = _error(routed_TE, routing_TE, weights_dtype, tolerance)
                    errors[number] = max(errors[number], error)
    except Exception:  # Whatever it is, the model's own router can do without.
        _LOG.info("The router of %s stays: no trial of it", part.experts, exc_info=True)
        return None
    for router, error in zip(candidates, errors, strict=True):
        if error == 0:
            options = replace(router.options, routing_weights_dtype=ROUNDINGS[rounds])
            return router._replace(options=options)
    _LOG.info("The router of %s stays: the nearest is off by %.1e", part.experts, min(errors))
    return None


def _roles(part: _Part) -> Iterator[tuple[int | None, int | None]]:
    """Yields which of the part's biases may be the router's, and which the selection's."""
    dtypes = [node.meta["val"].dtype for node in part.biases]
    numbers = range(len(dtypes))
    for bias, selection_bias in itertools.product((*numbers, None), repeat=2):
        uses_each_once = {bias, selection_bias} - {None} == {*numbers} and bias != selection_bias
        # In ONNX the router's weight and bias have one type.
        fits = bias is None or dtypes[bias] == part.weight.meta["val"].dtype
        if (uses_each_once or not numbers) and fits:
            yield bias, selection_bias


def _groups(part: _Part) -> Iterator[tuple[str, int, int]]:
    """Yields how groups may be scored, their number, and how many of them may be chosen."""
    experts = part.weight.meta["val"].shape[0]
    topks: list[tuple[Any, ...]] = [
        node.args for node in part.nodes if _is_aten(node, ("topk",)) and len(node.args) > 1
    ]
    candidates: set[tuple[int, int]] = {
        (groups, k)
        for groups in _numbers_of_groups(part)
        for scores, k, *_ in topks
        if scores.meta["val"].shape[-1] == groups
    }
    for n_group, topk_group in sorted(candidates):
        for scoring in GROUP_SCORINGS[1:]:
            options = RouterOptions(1, "softmax", True, 1.0, scoring, n_group, topk_group)
            if options.limits_groups and all(holds for holds, _ in options.rules(experts)):
                yield scoring, n_group, topk_group
    yield "none", 1, 1


def _numbers_of_groups(part: _Part) -> set[int]:
    """Returns into how many groups the part's views may split the experts."""
    experts = part.weight.meta["val"].shape[0]
    shapes = [node.meta["val"].shape for node in part.nodes if _is_aten(node, _VIEWS)]
    return {
        shape[-2]
        for shape in shapes
        if len(shape) == 3 and all(isinstance(size, int) for size in shape[-2:])
        if shape[-2] * shape[-1] == experts
    }


def _scorings(part: _Part) -> list[tuple[str, bool]]:
    """Returns the operator's ways to score, first those whose order is that of the part's nodes.

    The softmax of the top-k is the renormalised top-k of the softmax.
    """
    order = [node for node in part.nodes if _is_aten(node, ("softmax", "topk"))]
    topk_first = bool(order) and _is_aten(order[0], ("topk",))
    scorings = sorted(_SCORINGS, key=lambda scoring: (scoring == "topk_softmax") != topk_first)
    return [
        (scoring, normalization) for scoring in scorings for normalization in _SCORINGS[scoring]
    ]


def _scalings(part: _Part) -> Iterator[float]:
    """Yields the constants that a routing may be scaled by."""
    yield 1.0
    for node in part.nodes:
        factor = node.args[1] if len(node.args) > 1 else None
        if isinstance(factor, (int, float)) and factor > 0 and _is_aten(node, ("mul", "div")):
            yield float(factor) if _is_aten(node, ("mul",)) else 1 / factor


def _examples(part: _Part) -> Iterator[tuple[Tensor, Tensor, list[Tensor], Tensor]]:
    """Yields tokens ``[T, D]``, weight, biases, and the part's routing of them as ``[T, E]``."""
    generator = torch.Generator().manual_seed(0)

    def random(draw: Any, *sizes: int) -> Tensor:
        result: Tensor = draw(sizes, generator=generator, device="cpu")
        return result

    in_steps = _is_half(part.source.meta["val"]) and _is_half(part.weight.meta["val"])

    def cast(value: Tensor, node: fx.Node, steps: tuple[float, float]) -> Tensor:
        stepped = _in_steps(value, *steps) if in_steps else value
        return stepped.to(node.meta["val"].dtype)

    experts, width = part.weight.meta["val"].shape
    sizes = [_size(size) for size in part.source.meta["val"].shape]
    if math.prod(sizes) > _MOST_NUMBERS:
        raise ValueError(f"{sizes} are too many numbers for a trial")
    weight = (random(torch.randn, experts, width) + 1) / math.sqrt(width)
    weight = cast(weight, part.weight, _WEIGHT_STEPS)
    # Small, so that they do not choose alone; then all below 0, where a 0 in place of the scores of
    # experts outside the chosen groups would be the greatest.
    centres = [0.0, -3.0] if part.biases else [0.0]
    seen = 0
    while seen < _TOKENS or centres:
        centre = centres.pop(0) if centres else 0.0
        biases = [
            cast(random(torch.randn, *node.meta["val"].shape) / 4 + centre, node, _BIAS_STEPS)
            for node in part.biases
        ]
        # Logits around 0, or around -18, where all sigmoids are small.
        low = random(torch.rand, *sizes[:-1], 1).round_().mul_(-18 / math.sqrt(width))
        source = cast(random(torch.randn, *sizes).add_(low), part.source, _TOKEN_STEPS)
        if in_steps:
            # Small logits differ where scores in half precision are equal.
            source *= random(torch.rand, *sizes[:-1], 1).round_().mul_(-_SMALL_EXPONENT).exp2_()
        values = {part.source: source, part.weight: weight}
        x, ids, weights = _run(part, values | dict(zip(part.biases, biases, strict=True)))
        x_TD, routing_TE = x.reshape(-1, width), _dense(ids, weights, experts)
        if not len(x_TD):
            raise ValueError("an example without tokens")
        some = slice(None, None, math.ceil(len(x_TD) / _TOKENS))
        yield x_TD[some], weight, [bias.view(-1) for bias in biases], routing_TE[some]
        seen += len(x_TD[some])


def _run(part: _Part, inputs: dict[fx.Node, Tensor]) -> list[Tensor]:
    """Returns the tokens, ids and weights that the experts get; of equal scores the first count."""
    values: dict[fx.Node, Any] = {**inputs}

    def value(node: fx.Node) -> Any:
        return values[node] if node in values else _size(node.meta["val"])

    with TiesByIndex():
        for node in part.nodes:
            target: Any = node.target
            values[node] = target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
    return [value(node) for node in part.experts.all_input_nodes[:3]]


def _size(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, _SYMBOLIC_SIZE)))


def _dense(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Returns the weight ``[T, E]`` of every expert, in float64."""
    ids_TK, weights_TK = (value.reshape(-1, value.shape[-1]) for value in (ids, weights))
    zeros_TE = torch.zeros(len(ids_TK), experts, dtype=torch.float64, device="cpu")
    return zeros_TE.scatter_add(1, ids_TK.long(), weights_TK.double())


def _error(result: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float) -> float:
    """Returns how far weights are from what their tolerance rounds to, in a dtype.

    The largest distance, relative to the weight; infinite for another expert.
    """
    low, high = ((result * (1 + side * tolerance)).to(dtype).double() for side in (-1, 1))
    error = (expected - expected.clamp(low, high)).abs() / expected.abs()
    outside = ~((low <= expected) & (expected <= high))
    return float(error.where(outside, 0.0).nan_to_num(nan=math.inf).max())


def _is_half(value: Tensor) -> bool:
    return value.dtype.itemsize == 2


def _in_steps(value: Tensor, even: float, odd: float) -> Tensor:
    """Rounds the even and the odd columns to multiples of a number each."""
    steps = torch.tensor([even, odd], device="cpu").repeat(value.shape[-1] // 2 + 1)
    steps = steps[: value.shape[-1]]
    return (value / steps).round() * steps
