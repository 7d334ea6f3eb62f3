"""Random programs of a bundle, by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from small_bundles import LAYER
from standin import fake_cubin
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    Program,
    Range,
    TensorMap,
    records,
)

numbers = st.integers(-(2**63), 2**63 - 1)
steps = st.recursive(
    st.one_of(
        st.tuples(st.just(0), numbers).map(lambda step: (step,)),
        st.tuples(st.just(1), st.integers(0, 5)).map(lambda step: (step,)),
    ),
    lambda parts: st.tuples(parts, parts, st.integers(2, 8)).map(
        lambda tree: (*tree[0], *tree[1], (tree[2], 0))
    ),
    max_leaves=8,
).map(Expression)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=1024)
maps = st.builds(
    lambda rank, tensor, swizzle, sizes, strides, box: TensorMap(
        tensor,
        6,
        swizzle,
        sizes[:rank],
        (2, *(16 * stride for stride in strides[: rank - 1])),
        # As wide as the swizzle's span at most.
        (8 * min(box[0], 2**swizzle if swizzle else 32), *box[1:rank]),
    ),
    st.integers(2, 5),
    st.sampled_from(records.TENSORS),
    st.integers(0, 3),
    st.tuples(*[st.integers(1, 2**32)] * 5),
    st.tuples(*[st.integers(1, 2**36 - 1)] * 4),
    st.tuples(*[st.integers(1, 32)] * 5),
)
arguments = st.one_of(
    st.just(Argument("null")),
    st.builds(Argument, st.just("tensor"), st.sampled_from(records.TENSORS)),
    st.builds(Argument, st.just("workspace"), st.integers(0, 1)),
    st.builds(Argument, st.sampled_from(["i32", "i64"]), steps),
    st.builds(Argument, st.just("tensor_map"), maps),
)
launches = st.builds(
    Launch,
    st.integers(0, 1),
    st.lists(arguments, max_size=6)
    .filter(lambda given: sum(each.kind == "tensor_map" for each in given) <= 4)
    .map(tuple),
    st.tuples(steps, steps, steps),
)
buffers = st.builds(Buffer, names, steps)
parts = st.tuples(st.tuples(buffers, buffers), st.lists(launches, max_size=3).map(tuple))
images = st.binary(max_size=200).map(fake_cubin)
kernels = st.builds(
    Kernel,
    name=names,
    description=st.just("") | names,
    image=images,
    num_warps=st.integers(1, 32),
    shared_memory=st.integers(0, 2**20),
    dependent_launch=st.booleans(),
    registers=st.integers(0, 255),
    local_memory=st.integers(0, 2**32 - 1),
)
programs = st.builds(
    lambda first, second, middle, architecture, kernels: Program(
        LAYER,
        architecture,
        (Range(1, middle, *first), Range(middle + 1, 2**31 - 1, *second)),
        kernels,
    ),
    parts,
    parts,
    st.integers(1, 2**31 - 2),
    st.integers(0, 2**32 - 1),
    st.tuples(kernels, kernels),
)
