"""The rewrite rules one by one: graphs that they simplify, and graphs that they leave alone.

Graphs are written in ONNX's text format. N and M are sizes known only at run time, K depends on
them. A rule's negative cases are its first graph with one change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript import rewriter

from dynamo_moe.graph.rules import RULES

SIZES = ({"N": 3, "M": 5}, {"N": 1, "M": 1}, {"N": 0, "M": 2})
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    "tensor(int64)": np.int64,
}

Changes = Mapping[str, str]


class Rule(NamedTuple):
    """The test cases of a rule.

    Attributes:
        graph: A graph that the rule simplifies.
        left: The operators that remain, except for the shapes that they read.
        also: Changes of the graph after which the rule still simplifies it to these operators.
        not_if: Changes after which it does not, and the condition they violate.
        ulps: Allowed difference from the graph's results.
    """

    graph: str
    left: list[str]
    also: Mapping[str, Changes]
    not_if: Mapping[str, Changes]
    ulps: int = 0


def neutral(node: str, number: int) -> Rule:
    """An operand that changes nothing, and others that do."""
    it = f"{{{number}}}"
    operand = "number)" if node.endswith("number)") else "(number"
    return Rule(
        f"g (float[N, M] x, float c) => (float[N, M] y) <float number = {it}> {{ y = {node} }}",
        ["Identity"],
        {
            # Numbers of half precision are written as their bits.
            "half precision": {"float": "float16", it: "{15360}" if number else it},
            "integers": {"float": "int64"},
        },
        {
            "nearly the number": {it: "{1.0000001}" if number else "{1e-8}"},
            "another number": {it: f"{{{1 - number}}}"},
            "computed": {"{ y =": "{ other = Neg(c)  y =",
                         operand: operand.replace("number", "other")},
            "of two elements": {f"number = {it}": f"number = {{{number}, {number}}}",
                                "float number": "float[2] number", "[N, M]": "[N, 2]"},
            "of more dimensions": {"float number": "float[1, 1] number"},
        },
    )  # fmt: skip


def same_shape(op_type: str) -> Rule:
    return Rule(
        f"g (float[N, M] x) => (float[N, M] y) {{ shape = Shape(x)  y = {op_type}(x, shape) }}",
        ["Identity"],
        {
            "sizes": {"[N, M]": "[2, 3]"},
            "no dimensions": {"[N, M]": ""},
        },
        {
            "another name": {"[N, M] y": "[N, K] y"},
            "another order": {"[N, M] y": "[M, N] y"},
            "another size": {"[N, M] x": "[N, 1] x", "[N, M] y": "[N, 4] y"},
            "another rank": {"[N, M] y": "[1, N, M] y"},
            "a dimension without a name": {"[N, M]": "[N, ?]"},
            "x of unknown rank": {"[N, M] x": "[] x"},
            "y of unknown rank": {"[N, M] y": "[] y"},
            "unknown ranks": {"[N, M]": "[]"},
        },
    )


def reshaped_again(op_type: str, x: str, first: str) -> Rule:
    return Rule(
        f"""g (float{x} x) => (float[K, 4] y)
        <int64[{first.count(",") + 1}] first = {first}, int64[2] shape = {{-1, 4}}>
        {{
            dimensions = Shape(x)
            a = {op_type}(x, first)
            y = Reshape(a, shape)
        }}""",
        ["Reshape"],
        {
            "zeros are zeros": {"Reshape(a, shape)": "Reshape<allowzero = 1>(a, shape)"},
            "zeros are zeros, and there is one": {
                "[N, ": "[0, ",
                "[K, 4] y": "[2, 0] y",
                "{-1, 4}": "{2, 0}",
                "Reshape(a, shape)": "Reshape<allowzero = 1>(a, shape)",
            },
            "zeros are zeros, and the shape is computed": {
                "[K, 4] y": f"{x} y",
                "Reshape(a, shape)": "Reshape<allowzero = 1>(a, dimensions)",
            },
        },
        {
            "a copied dimension": {"{-1, 4}": "{0, -1}", "[K, 4] y": "[N, K] y"},
            "a computed shape, which may copy": {
                "[K, 4] y": f"{x} y",
                "Reshape(a, shape)": "Reshape(a, dimensions)",
            },
        },
    )


def over_root(product: str, swapped: str) -> Rule:
    return Rule(
        f"""g (float[N, M] x, float[N, 1] v) => (float[N, M] y)
        {{ root = Sqrt(v)  r = Reciprocal(root)  y = {product} }}""",
        ["Sqrt", "Div"],
        {"half precision": {"float": "float16"}},
        {
            "the other order": {product: swapped},
            "a reciprocal that is also used elsewhere": {"y = ": "half = Mul(x, r)  y = ",
                                                         product: product.replace("x", "half")},
            "no root": {"Sqrt(v)": "Exp(v)"},
            "a sum": {product: product.replace("Mul", "Add")},
        },
        ulps=2,
    )  # fmt: skip


TESTED = {
    "_GatheredInOrder": Rule(
        """g (float[N, M] x) => (float[N, 1, 1, N] y)
        <int64 zero = {0}, int64 one = {1}, int64[3] others = {1, 2, 3}, int64[1] last = {-1},
        int64[3] firsts = {0, 1, 2}, int64[N, 1, 1, 1] down, int64[1, 1, 1, N] along>
        {
            size = Shape<start = 0, end = 1>(x)
            n = Squeeze(size)
            counts = Range(zero, n, one)
            down = Unsqueeze(counts, others)
            along = Unsqueeze(counts, firsts)
            both = Max(down, along)
            shape = Shape(both)
            wide = Expand(down, shape)
            high = Expand(along, shape)
            first = Unsqueeze(wide, last)
            second = Unsqueeze(high, last)
            pairs = Concat<axis = -1>(first, second)
            y = GatherND(x, pairs)
        }""",
        ["Squeeze", *["Constant"] * 4, "Reshape", "Slice", "Constant", "Unsqueeze"],
        {},
        {
            "not from the first one": {"Range(zero": "Range(one"},
            "every second one": {"n, one)": "n, n)"},
            "the other order": {"(first, second)": "(second, first)"},
            "a batch": {"GatherND": "GatherND<batch_dims = 1>"},
            "one row for all": {"int64[N, 1, 1, 1] down": "int64[1, 1, 1, 1] down"},
            "three axes": {"[N, M] x": "[N, M, 2] x", "[N, 1, 1, N] y": "[N, 1, 1, N, 2] y"},
        },
    ),
    "Add0": neutral("Add(x, number)", 0),
    "Add0First": neutral("Add(number, x)", 0),
    "Sub0": neutral("Sub(x, number)", 0),
    "Mul1": neutral("Mul(x, number)", 1),
    "Mul1First": neutral("Mul(number, x)", 1),
    "Div1": neutral("Div(x, number)", 1),
    "ReshapeToSameShape": same_shape("Reshape"),
    "ExpandToSameShape": same_shape("Expand"),
    "_CopiedDimensions": Rule(
        """g (float[N, M, 12] x) => (float[N, M, 3, 4] y) <int64[2] tail = {3, 4}>
        {
            head = Shape<start = 0, end = 2>(x)
            shape = Concat<axis = 0>(head, tail)
            y = Reshape(x, shape)
        }""",
        ["Constant", "Reshape"],
        {"joined": {"[N, M, 12] x": "[N, M, 3, 4] x", "[N, M, 3, 4] y": "[N, M, 12, 1] y",
                    "{3, 4}": "{12, 1}"}},
        {
            "a constant shape": {
                "shape = Concat": "computed = Concat",
                "<int64[2] tail": "<int64[4] shape = {0, 0, 3, 4}, int64[2] tail",
            },
            "one name alone": {"[N, M,": "[N, 5,"},
            "a name in another place": {"[N, M, 3, 4] y": "[M, N, 3, 4] y"},
            "a name past the rank of x": {
                "[N, M, 12] x": "[N, M] x",
                "[N, M, 3, 4] y": "[N, M, K] y",
            },
            "a dimension without a name": {"[N, M,": "[N, ?,"},
            "no elements": {", 12] x": ", 0] x", "3, 4": "0, 4"},
            "x of unknown rank": {"[N, M, 12] x": "[] x"},
            "y of unknown rank": {"[N, M, 3, 4] y": "[] y"},
        },
    ),
    "_NoPadding": Rule(
        """g (float[N, M] x) => (float[N, M] y)
        <int64[4] pads = {0, 0, 0, 0}, float value = {1}, int64[2] axes = {0, 1}>
        { y = Pad(x, pads) }""",
        ["Identity"],
        {
            "a value": {"Pad(x, pads)": "Pad(x, pads, value)"},
            "a value and axes": {"Pad(x, pads)": "Pad(x, pads, value, axes)"},
            "another mode": {"Pad(x, pads)": 'Pad<mode = "edge">(x, pads)'},
        },
        {
            "padding": {"{0, 0, 0, 0}": "{0, 0, 0, 1}"},
            "cropping": {"{0, 0, 0, 0}": "{0, -1, 0, 0}"},
            "computed": {"{ y = Pad": "{ twice = Add(pads, pads)  y = Pad",
                         "(x, pads)": "(x, twice)"},
        },
    ),
    "ReshapeOfReshape": reshaped_again("Reshape", "[N, 12]", "{0, 3, 4}"),
    "ReshapeOfSqueeze": reshaped_again("Squeeze", "[N, 1, 12]", "{1}"),
    "ReshapeOfUnsqueeze": reshaped_again("Unsqueeze", "[N, 12]", "{1}"),
    "_UnsqueezedAgain": Rule(
        """g (float[N, M] x, int64[2] computed) => (float[1, 1, N, 1, 1, M] y)
        <int64[2] first = {2, 0}, int64[2] second = {1, 3}>
        { a = Unsqueeze(x, first)  y = Unsqueeze(a, second) }""",
        ["Constant", "Unsqueeze"],
        {
            "the first of no axes": {"int64[2] first = {2, 0}": "int64[0] first = {}",
                                     "[1, 1, N, 1, 1, M]": "[N, 1, M, 1]"},
        },
        {
            "the first from the end": {"{2, 0}": "{-2, 0}"},
            "the second from the end": {"{1, 3}": "{1, -3}"},
            "the first computed": {"(x, first)": "(x, computed)"},
            "the second computed": {"(a, second)": "(a, computed)"},
            "no axes": {"int64[2] first = {2, 0}": "int64[0] first = {}",
                        "int64[2] second = {1, 3}": "int64[0] second = {}",
                        "[1, 1, N, 1, 1, M] y": "[N, M] y"},
            "y of unknown rank": {"[1, 1, N, 1, 1, M] y": "[] y"},
        },
    ),
    "_SlicedAgain": Rule(
        """g (float[N, 8, 6] x, int64[1] computed) => (float[N, K, 3] y)
        <int64[1] s1 = {1}, int64[1] e1 = {99}, int64[1] a1 = {1}, int64[1] t1 = {2},
        int64[1] s2 = {-1}, int64[1] e2 = {-9}, int64[1] a2 = {2}, int64[1] t2 = {-2}>
        { a = Slice(x, s1, e1, a1, t1)  y = Slice(a, s2, e2, a2, t2) }""",
        ["Constant", "Constant", "Constant", "Constant", "Slice"],
        {},
        {
            **{f"{name} computed": {f" {name},": " computed,"} for name in ("s1", "e1", "a1",
                                                                         "s2", "e2", "a2")},
            "t1 computed": {"t1)": "computed)"},
            "t2 computed": {"t2)": "computed)"},
            "the same axis": {"a2 = {2}": "a2 = {1}"},
            "the first axis from the end": {"a1 = {1}": "a1 = {-2}"},
            "the second axis from the end": {"a2 = {2}": "a2 = {-1}"},
            "axes of no elements": {"int64[1] a1 = {1}": "int64[0] a1 = {}",
                                    "int64[1] a2 = {2}": "int64[0] a2 = {}"},
            "no steps": {", t1)": ")", ", t2)": ")"},
            "no axes": {", a1, t1)": ")", ", a2, t2)": ")"},
        },
    ),
    "_AndTrue": Rule(
        "g (bool[N, M] x) => (bool[N, M] y) <bool[1] true = {1}> { y = And(true, x) }",
        ["Identity"],
        {
            "on the right": {"And(true, x)": "And(x, true)"},
            "a scalar": {"bool[1] true": "bool true"},
        },
        {
            "false": {"{1}": "{0}"},
            "more than one element": {"[N, M]": "[N, 2]",
                                      "bool[1] true = {1}": "bool[2] true = {1, 1}"},
            "computed": {"{ y = And(true, x)": "{ other = Not(true)  y = And(other, x)"},
            "a result of more dimensions": {"[N, M] x": "[M] x", "[N, M] y": "[1, M] y",
                                            "bool[1] true": "bool[1, 1] true"},
            "x of unknown rank": {"[N, M] x": "[] x"},
            "y of unknown rank": {"[N, M] y": "[] y"},
            "unknown ranks": {"[N, M]": "[]"},
            "a dimension without a name": {"[N, M]": "[N, ?]"},
        },
    ),
    "_SameType": Rule(
        "g (float[N] x, float[M] like) => (float[N] y) { y = CastLike(x, like) }",
        ["Identity"],
        {"half precision": {"float": "float16"}},
        {
            "another type": {"float[M] like": "float16[M] like", "float[N] y": "float16[N] y"},
            "unknown types": {"y = CastLike(x, like)":
                              "a = Neg(x)  b = Neg(like)  y = CastLike(a, b)"},
            "x of unknown type": {"y = CastLike(x, like)": "a = Neg(x)  y = CastLike(a, like)"},
        },
    ),
    "OverRoot": over_root("Mul(x, r)", "Mul(r, x)"),
    "OverRootFirst": over_root("Mul(r, x)", "Mul(x, r)"),
    "_SumBefore": Rule(
        """g (int64[N, M] x, int64[N, M] other) => (int64[N, M] y) <int64 axis = {1}>
        { total = CumSum(x, axis)  y = Sub(total, x) }""",
        ["CumSum"],
        {"another axis": {"{1}": "{0}"}, "from the end": {"{1}": "{-1}"}},
        {
            "less another tensor": {"Sub(total, x)": "Sub(total, other)"},
            "the other way": {"Sub(total, x)": "Sub(x, total)"},
            "without each already": {"CumSum(": "CumSum<exclusive = 1>("},
            "from the last on": {"CumSum(": "CumSum<reverse = 1>("},
            "real numbers, which are rounded": {"int64[N, M]": "float[N, M]"},
        },
    ),
    "_ShiftedSoftmax": Rule(
        """g (float[N, 4, M] x, int64[1] computed) => (float[N, 4, M] y) <int64[1] axes = {2}>
        { most = ReduceMax(x, axes)  less = Sub(x, most)  y = Softmax(less) }""",
        ["Softmax"],
        {
            "another axis": {"{2}": "{1}", "Softmax(": "Softmax<axis = -2>("},
            "from the end": {"{2}": "{-1}"},
        },
        {
            "the greatest of another axis": {"{2}": "{1}"},
            "of two axes": {"int64[1] axes = {2}": "int64[2] axes = {1, 2}"},
            "of a computed axis": {"(x, axes)": "(x, computed)"},
            "of another tensor": {"less = Sub(x, most)": "other = Abs(x)  less = Sub(other, most)"},
            "without the axis": {"ReduceMax(": "ReduceMax<keepdims = 0>(",
                                 "[N, 4, M] x": "[4, M, M] x", "[N, 4, M] y": "[4, M, M] y"},
            "x of unknown rank": {"[N, 4, M] x": "[] x"},
        },
        ulps=4,
    ),
}  # fmt: skip


SIMPLIFIED = [
    pytest.param(name, changes, id=f"{name}-{what}")
    for name, rule in TESTED.items()
    for what, changes in {"as it is": {}, **rule.also}.items()
]
LEFT_ALONE = [
    pytest.param(name, changes, id=f"{name}-{what}")
    for name, rule in TESTED.items()
    for what, changes in rule.not_if.items()
]


def test_every_rule_is_tested() -> None:
    assert sorted(rule.name for rule in RULES) == sorted(TESTED)


@pytest.mark.parametrize(("name", "changes"), SIMPLIFIED)
def test_simplifies(name: str, changes: Changes) -> None:
    before, after = model(name, changes), model(name, changes)
    rewriter.rewrite(after, [rule_named(name)])
    left = [node.op_type for node in after.graph if node.op_type != "Shape"]
    assert left == TESTED[name].left
    for sizes in SIZES:
        found, wanted = run(after, sizes), run(before, sizes)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if TESTED[name].ulps:
            np.testing.assert_array_max_ulp(found, wanted, TESTED[name].ulps)
        else:
            np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize(("name", "changes"), LEFT_ALONE)
def test_leaves_alone(name: str, changes: Changes) -> None:
    assert rule_named(name).apply_to_model(model(name, changes)) == 0


def rule_named(name: str) -> rewriter.RewriteRule:
    return next(rule for rule in RULES if rule.name == name)


def model(name: str, changes: Changes) -> ir.Model:
    text = TESTED[name].graph
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 20]> {text}')


def run(tested: ir.Model, sizes: Mapping[str, int]) -> np.ndarray:
    """Runs the model unoptimised; its inputs count up or alternate."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(tested).SerializeToString(), options)
    feeds: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else sizes[size] for size in value.shape]
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        dtype = DTYPES[value.type]
        feeds[value.name] = (numbers % 2 if dtype is np.bool_ else numbers).astype(dtype)
    (result,) = session.run(None, feeds)
    return result
