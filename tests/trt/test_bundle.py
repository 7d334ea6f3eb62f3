"""Bundles: what is written is read, and everything else is refused."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import trt_plugin
from bundle_fuzzer import fuzz, seed_bundles
from custom_ops import ACTIVATIONS, SCORINGS, ExpertOptions, RouterOptions, options
from custom_ops.kernels import expressions
from custom_ops.kernels.expressions import W_INDEX
from custom_ops.kernels.layer import Layer
from custom_ops.options import CLAMPED, PRE_NORMS
from random_layers import groups
from small_bundles import (
    LAYER,
    MAP,
    OFFLOADED,
    ONE,
    SMALL,
    TILES,
    TOKENS,
    altered,
    checked,
    kernel,
    offloaded,
    program,
    record,
    repaired,
)
from standin import fake_cubin
from trt_plugin import Bundle, BundleError
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    Program,
    Range,
    TensorMap,
    is_bundle,
    records,
)
from trt_plugin.compiling.packing import layer_record, stored_expression
from trt_plugin.launcher import LauncherError, OpenProgram

MOST_TOKENS = 2**31 - 1
ALIGNMENT = 256


def refusal(data: bytes) -> str:
    with pytest.raises(BundleError) as raised:
        trt_plugin.read(data)
    return str(raised.value)


# --- What is written is read ---


def test_what_is_written_is_read() -> None:
    assert trt_plugin.read(SMALL.data) == SMALL
    assert trt_plugin.read(SMALL.data).data == SMALL.data


def test_a_program_is_the_same_in_a_bundle_and_out_of_it() -> None:
    offset, size = records.DIRECTORY_ENTRY.unpack_from(SMALL.data, 48)
    assert offset % 64 == 0
    assert SMALL.data[offset : offset + size] == SMALL.programs[1].data


def test_equal_parts_are_stored_once() -> None:
    data = program(kernels=(kernel("one"), kernel("other"))).data
    assert data.count(kernel().image) == 1
    expressions_of = records.TABLE_ENTRY.unpack_from(data, 120 + 16 * 7)[1]
    assert expressions_of == len({ONE, TOKENS, TILES})


def test_symbols_are_numbered_as_the_sizes_of_a_layer() -> None:
    sizes = sorted(options.SIZES, key=lambda size: size.slot.index)
    names = ["T", *(size.symbol for size in sizes), W_INDEX.value]
    assert names == list(records.SYMBOLS)


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


@settings(max_examples=100, deadline=None)
@given(st.lists(programs, min_size=1, max_size=3).map(tuple))
def test_any_program_survives(programs: tuple[Program, ...]) -> None:
    assert trt_plugin.read(Bundle(programs).data) == Bundle(programs)


def test_a_bundle_needs_a_program() -> None:
    with pytest.raises(ValueError, match="a bundle needs a program"):
        _ = Bundle(()).data


# --- Files ---


def test_a_file_is_written_whole_and_read(tmp_path: Path) -> None:
    path = tmp_path / "model.moek"
    path.write_bytes(b"an older file")
    SMALL.save(path)
    assert trt_plugin.read(path) == SMALL
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_wrong_with_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.moek"
    path.write_bytes(SMALL.data[:100])
    with pytest.raises(
        BundleError, match=r"model\.moek: bundle: truncated: the header says \d+ bytes, got 100"
    ):
        trt_plugin.read(path)


def test_a_bundle_is_told_by_its_name_or_its_bytes(tmp_path: Path) -> None:
    named, unnamed, other = (tmp_path / name for name in ("a.moek", "b", "c.onnx"))
    named.touch()
    unnamed.write_bytes(SMALL.data)
    other.write_bytes(b"\x08\x0a")
    assert [is_bundle(path) for path in (named, unnamed, other)] == [True, True, False]


def test_the_table_shows_every_kernel() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(SMALL)
    text = shown.get()
    assert "2 programs, 4 kernels" in text
    assert "dropless, 2 of 8 experts, 64 x 128, gated silu, float16" in text
    assert "17-" in text
    flags = 128 | 256 | 1024  # rms_norm, residual, w2_transposed
    layer = SMALL.programs[0].layer._replace(flags=flags, norm_eps=0.5)
    with console.capture() as shown:
        console.print(Bundle((replace(SMALL.programs[0], layer=layer),)))
    assert "64 x 128, silu, rms norm, residual, w2 transposed, float16" in shown.get()
    assert "48 KiB" in text


def test_the_dictionary_holds_what_the_table_shows() -> None:
    shown = trt_plugin.read(SMALL.data).to_dict()["programs"][1]
    assert shown["architecture"] == "sm_80"
    assert shown["layer"]["activation"] == "silu"
    assert "alpha" not in shown["layer"]
    assert shown["ranges"][1]["workspace"] == {"rows": "cdiv(T * K, 16)", "hidden": "T"}
    assert shown["kernels"][0]["description"] == {"function": "up"}


def test_a_description_need_not_be_json() -> None:
    plain = program(kernels=(replace(kernel(), description="{"), kernel("down")))
    assert Bundle((plain,)).to_dict()["programs"][0]["kernels"][0]["description"] == "{"


def test_reading_needs_neither_torch_nor_triton(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "a.moek")
    code = (
        "import sys, trt_plugin; trt_plugin.read(sys.argv[1]).to_dict(); "
        "print({'torch', 'triton', 'numpy', 'tensorrt', 'custom_ops'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.moek")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.skipif(shutil.which("localedef") is None, reason="localedef writes the locale")
def test_a_decimal_comma_of_the_host_program_is_not_in_the_json(tmp_path: Path) -> None:
    layer = SMALL.programs[0].layer._replace(flags=128, norm_eps=0.5, routed_scaling=2.5)
    path = tmp_path / "a.moek"
    Bundle((program(layer=layer),)).save(path)
    write_locale = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "comma")]
    if subprocess.run(write_locale, capture_output=True, check=False).returncode:
        pytest.skip("localedef lacks the sources of de_DE")
    code = (
        "import locale, sys, trt_plugin; locale.setlocale(locale.LC_NUMERIC, 'comma'); "
        "layer = trt_plugin.read(sys.argv[1]).programs[0].layer; words = layer.to_dict(); "
        "print(locale.str(1.5), layer.norm_eps, words['norm_eps'], words['routed_scaling'])"
    )
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "LOCPATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == "1,5 0.5 0.5 2.5\n"


# --- What is not a bundle ---


def test_cut_off_anywhere_it_is_an_error() -> None:
    for size in range(len(SMALL.data)):
        assert refusal(SMALL.data[:size]).startswith("bundle: truncated: the header")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_altered_anywhere_it_is_an_error_or_a_bundle(data: st.DataObject) -> None:
    content = bytearray(SMALL.data)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    try:
        read = trt_plugin.read(repaired(bytes(content)))
    except BundleError:
        return
    # What was accepted can be shown and written.
    assert trt_plugin.read(read.data).to_dict() == read.to_dict()


@given(st.binary(max_size=200))
def test_anything_else_is_an_error(data: bytes) -> None:
    assert refusal(data)
    assert refusal(records.FILE_MAGIC + data)


def big(form: str) -> int:
    return int(2 ** (8 * struct.calcsize(f"<{form}")) - 1)


IMAGE = len(kernel().image)


@pytest.mark.parametrize(
    ("offset", "form", "values", "message"),
    [
        (8, "I", [2], "the version must be 3, got 2: compile the bundle, or build the"),
        (16, "Q", [8], "too long: the header says 8 bytes, got"),
        (28, "I", [1], "reserved must be 0, got 1"),
        # The layer
        (32, "I", [2], "the layer's operator must be below 2, got 2"),
        (36, "I", [6], "the layer's tokens and experts must be float32 (1), float16 (2) or bf"),
        (44, "I", [0], "the layer's routing dtype must be float32 (1), float16 (2) or bfloat16"),
        (48, "I", [4], "the layer's router bias must be float32 (1), float16 (2) or bfloat16 (3)"),
        (52, "I", [2048], "the layer's flags must be below 2048, got 2048"),
        (52, "I", [8], "the layer's flag interleaved needs flag gated"),
        (52, "I", [64], "the layer's flag tf32 does not apply and must be 0, got 64"),
        (56, "I", [7], "the layer's activation must be below 7, got 7"),
        (60, "I", [3], "the layer's scoring must be below 3, got 3"),
        (60, "I", [1], "the layer's flag renormalize does not apply and must be 0, got 1"),
        (64, "I", [1025], "the layer's experts must be in 1..1024, got 1025"),
        (68, "I", [9], "the layer's top_k must be in 1..8, got 9"),
        (72, "I", [12], "the layer's width and hidden must be multiples of 8, got 12 and 128"),
        (76, "I", [0], "the layer's width and hidden must be multiples of 8, got 64 and 0"),
        (80, "f", [float("nan")], "the layer's routed_scaling must be finite, got nan"),
        (84, "f", [1.5], "the layer's alpha does not apply and must be 0, got 1.5"),
        (92, "f", [1e-6], "the layer's norm_eps does not apply and must be 0, got 1e-06"),
        (92, "f", [float("inf")], "the layer's norm_eps must be finite, got inf"),
        (96, "I", [3], "the layer's group_scoring must be below 3, got 3"),
        (
            96,
            "III",
            [2, 3, 1],
            "the layer's n_group must divide 8 experts into groups of 2 up",
        ),
        (
            96,
            "III",
            [2, 8, 1],
            "the layer's n_group must divide 8 experts into groups of 2 up",
        ),
        (
            96,
            "III",
            [1, 0, 0],
            "the layer's n_group must divide 8 experts into groups of 1 up",
        ),
        (
            96,
            "III",
            [2, 4, 4],
            "the layer's topk_group must be below n_group, got 4 for both",
        ),
        (
            96,
            "III",
            [2, 4, 0],
            "the layer's topk_group must be in 1..4, the groups, got 0",
        ),
        (96, "III", [1, 8, 1], "the layer's top_k must be in 1..1, the experts of 1 groups"),
        (100, "I", [4], "the layer's n_group does not apply and must be 0, got 4"),
        (104, "I", [2], "the layer's topk_group does not apply and must be 0, got 2"),
        (
            108,
            "I",
            [4],
            "the layer's selection bias must be float32 (1), float16 (2), bfloat16 (3)",
        ),
        # The tables
        (112, "I", [9], "the layer's resident experts must be in 0..8, got 9"),
        (116, "I", [1], "reserved must be 0, got 1"),
        (120, "Q", [8], "table ranges must begin at a multiple of 8 in 296.."),
        (120, "Q", [260], "table ranges must begin at a multiple of 8 in 296.."),
        (128, "Q", [big("Q")], f"table ranges has {big('Q')} records of 48 bytes from byte 296"),
        (128, "Q", [3], "table state must begin at a multiple of 8 in 440.."),
        (128, "Q", [1], "the bytes before table state must be 0"),
        (record("ranges"), "q", [2], "range 0: must go from 1 tokens to at most 2147483647, got"),
        (record("ranges", 1) + 8, "q", [2**31], "range 1: must go from 17 tokens to at most"),
        (record("ranges") + 16, "I", [3], "range 0: launches must lie in 0..3, got 1 from 3"),
        (record("ranges", 1) + 36, "I", [1], "range 1: a launch's buffer must be below 1, got 1"),
        (record("buffers"), "I", [big("I")], "buffer 0: the name's bytes must lie in 0.."),
        (record("buffers") + 8, "I", [3], "buffer 0: the size's expression must be below 3, got"),
        (record("buffers") + 12, "I", [1], "buffer 0: flags must be in 0..0, got 1"),
        (record("launches", 1), "I", [2], "launch 1: kernel must be below 2, got 2"),
        (record("launches") + 8, "I", [99], "launch 0: arguments must lie in 0..13, got 99 from 0"),
        (record("launches") + 20, "I", [7], "launch 0: the grid's expression must be below 3, go"),
        (record("launches") + 24, "I", [2], "launch 0: flags must be in 0..1, got 2"),
        (record("launches") + 24, "I", [1], "flags of a launch outside of waves must be 0, got 1"),
        (record("launches") + 28, "I", [1], "a launch outside of waves waits for must be 0, got 1"),
        (record("arguments"), "II", [7, 0], "argument 0: kind must be below 7, got 7"),
        (record("arguments"), "II", [6, 0], "argument 0: the state's part must be below 0, got 0"),
        (record("arguments"), "II", [0, 1], "argument 0: a null pointer's index must be 0, got 1"),
        (record("arguments"), "II", [1, 11], "argument 0: tensor must be below 11, got 11"),
        (record("arguments"), "II", [3, 9], "argument 0: expression must be below 3, got 9"),
        (record("arguments"), "II", [5, 1], "argument 0: tensor map must be below 1, got 1"),
        (record("tensor maps"), "I", [11], "tensor map 0: tensor must be below 11, got 11"),
        (record("tensor maps") + 4, "I", [5], "type must be float16 (6), float32 (7) or bfloat16"),
        (record("tensor maps") + 8, "I", [6], "tensor map 0: rank must be in 2..5, got 6"),
        (record("tensor maps") + 8, "I", [2], "dimension 2: a size beyond the rank must be 0, got"),
        (record("tensor maps") + 12, "I", [4], "tensor map 0: swizzle must be in 0..3, got 4"),
        (record("tensor maps") + 16, "Q", [0], "dimension 0: size must be in 1..4294967296, got 0"),
        (record("tensor maps") + 56, "Q", [4], "stride must be an element's size, 2, got 4"),
        (record("tensor maps") + 64, "Q", [24], "stride must be a multiple of 16, got 24"),
        (record("tensor maps") + 64, "Q", [2**40], "stride must be in 16..1099511627775, got 1"),
        (record("tensor maps") + 96, "I", [257], "dimension 0: box must be in 1..256, got 257"),
        (record("tensor maps") + 96, "I", [4], "the box in bytes must be a multiple of 16, got 8"),
        (record("tensor maps") + 12, "I", [1], "at most 32, the swizzle's span, got 128"),
        (record("tensor maps") + 116, "I", [2], "tensor map 0: kind must be 1 or 6, got 2"),
        (record("tensor maps") + 116, "I", [6], "tensor map 0: the state's part must be below 0"),
        (record("tensor maps") + 120, "I", [1], "tensor map 0: reserved must be 0, got 1"),
        (record("kernels") + 4, "I", [99999], "kernel 0: the name's bytes must lie in 0.."),
        (record("kernels") + 16, "Q", [1], "place in the program must be a multiple of 64, got"),
        (record("kernels") + 24, "Q", [big("Q")], "kernel 0: the image's bytes must lie in 0.."),
        (record("kernels") + 24, "Q", [0], "name and image must have 1 byte or more, got 2 and 0"),
        (record("kernels") + 4, "I", [0], f"must have 1 byte or more, got 0 and {IMAGE}"),
        (record("kernels") + 32, "I", [33], "kernel 0: warps must be in 1..32, got 33"),
        (record("kernels") + 36, "I", [2**20 + 1], "shared memory in bytes must be in 0..1048576"),
        (record("kernels") + 40, "I", [2], "kernel 0: flags must be in 0..1, got 2"),
        (record("kernels") + 52, "I", [1], "kernel 0: reserved must be 0, got 1"),
        # The cubin: its header, and its only section
        (record("kernels") + 24, "Q", [63], "the cubin must have 64 bytes or more, got 63"),
        (record("images"), "B", [0], "the cubin must be a 64-bit little-endian ELF file"),
        (record("images") + 4, "B", [1], "the cubin must be a 64-bit little-endian ELF file"),
        (record("images") + 18, "H", [62], "the cubin's machine must be 190 (CUDA), got 62"),
        (record("images") + 32, "Q", [132], "bytes of the cubin's segments must lie in 0..131"),
        (record("images") + 54, "2H", [55, 1], "the cubin's segments must have 56 bytes, got 55"),
        (record("images") + 40, "Q", [2**64 - 64], "bytes of the cubin's sections must lie in 0.."),
        (record("images") + 58, "H", [40], "the cubin's sections must have 64 bytes, got 40"),
        (record("images") + 60, "H", [0], "the cubin must have 1 section or more, got 0"),
        (record("images") + 60, "H", [2], "bytes of the cubin's sections must lie in 0..131, got"),
        (record("images") + 88, "Q", [129], "section 0 must lie in 0..131, got 3 from 129"),
        (record("images") + 96, "Q", [2**64 - 1], "section 0 must lie in 0..131, got 18446744073"),
        # Expressions
        (record("expressions"), "I", [99], "expression 0: instructions must lie in 0..7, got"),
        (
            record("expressions") + 4,
            "I",
            [0],
            "the number of instructions must be in 1..256, got 0",
        ),
        (record("expressions") + 4, "I", [2], "expression 0: must leave 1 value, got 2"),
        (record("instructions"), "I", [9], "instruction 0: opcode must be below 9, got 9"),
        (record("instructions") + 4, "I", [1], "instruction 0: reserved must be 0, got 1"),
        (record("instructions"), "I", [2], "instruction 0: add needs 2 values, there are 0"),
        (record("instructions"), "IIq", [1, 0, 6], "instruction 0: symbol must be below 6, got 6"),
        # Text
        (record("strings"), "B", [0xFF], "the name's bytes must be UTF-8 without control charac"),
        (record("strings"), "B", [0x1B], "the name's bytes must be UTF-8 without control charac"),
    ],
)
def test_what_breaks_a_rule_is_named(
    offset: int, form: str, values: list[float], message: str
) -> None:
    refused = refusal(altered(offset, form, *values))
    assert refused.startswith("program 0: ")
    assert message in refused
    # A program by itself, as an engine stores it, is refused for the same reason.
    alone = checked(altered(offset, form, *values)[64 : 64 + len(SMALL.programs[0].data)])
    with pytest.raises(LauncherError) as raised:
        OpenProgram(alone)
    assert raised.value.message == refused.replace("program 0", "program", 1)


def in_offloaded(table: str, index: int = 0) -> int:
    return record(table, index, OFFLOADED)


@pytest.mark.parametrize(
    ("offset", "form", "values", "message"),
    [
        (112, "I", [0], "the number of the state's parts must be in 0..0, got 2"),
        (in_offloaded("ranges") + 16, "I", [1], "range 0: launches must lie in 0..4, got 4 from 1"),
        (in_offloaded("ranges") + 24, "I", [0], "the number of launches after no wave must be 0"),
        (in_offloaded("ranges") + 24, "II", [0, 0], "the waves' expression without a wave must be"),
        (in_offloaded("ranges") + 20, "2I", [2, 1], "flags of a launch outside of waves must be 0"),
        (in_offloaded("ranges") + 24, "2I", [1, 2], "a launch outside of waves waits for must be"),
        (in_offloaded("ranges") + 40, "I", [9], "range 0: the waves' expression must be below"),
        (in_offloaded("ranges") + 44, "I", [1], "range 0: reserved must be 0, got 1"),
        (in_offloaded("launches", 1) + 28, "I", [4], "that another waits for must be below 2, got"),
        (in_offloaded("launches", 1) + 28, "I", [1], "launch 0 of the wave is on the same"),
        (in_offloaded("launches", 2) + 24, "I", [1], "launch 1 of the wave is on the same"),
        (in_offloaded("state", 1) + 8, "I", [3], "state 1: the size must not depend on a call"),
        (in_offloaded("state", 1) + 8, "I", [4], "state 1: the size must not depend on a call"),
        (in_offloaded("state") + 12, "I", [2], "state 0: flags must be in 0..1, got 2"),
        (in_offloaded("arguments"), "II", [6, 2], "argument 0: the state's part must be below 2"),
        (in_offloaded("tensor maps"), "I", [2], "tensor map 0: the state's part must be below 2"),
        (in_offloaded("kernels") + 40, "I", [1], "kernel 0: flags must be in 0..0, got 1"),
    ],
)
def test_what_breaks_a_rule_of_offloaded_layers_is_named(
    offset: int, form: str, values: list[float], message: str
) -> None:
    refused = refusal(altered(offset, form, *values, bundle=OFFLOADED))
    assert refused.startswith("program 0: ")
    assert message in refused


def test_more_launches_of_a_wave_than_are_permitted() -> None:
    whole = offloaded()
    (only,) = whole.ranges
    most = replace(only, wave=only.wave * 16)
    assert trt_plugin.read(Bundle((replace(whole, ranges=(most,)),)).data)
    over = replace(only, wave=(*most.wave, replace(only.wave[1], after=())))
    message = "range 0: the number of launches of a wave must be in 0..32, got 33"
    assert message in refusal(Bundle((replace(whole, ranges=(over,)),)).data)


def test_waves_of_a_resident_layer_are_refused() -> None:
    whole = offloaded(state=())
    (only,) = whole.ranges
    launch = replace(only.wave[1], arguments=(), after=())
    changed = replace(only, wave=(launch,), launches=(), epilogue=())
    resident = replace(whole, layer=LAYER, ranges=(changed,))
    message = "range 0: the number of launches of a wave must be in 0..0, got 1"
    assert message in refusal(Bundle((resident,)).data)


def test_an_offloaded_layer_survives() -> None:
    read = trt_plugin.read(OFFLOADED.data)
    assert read == OFFLOADED
    shown = read.to_dict()["programs"][0]
    assert shown["layer"]["resident_experts"] == 4
    assert shown["state"] == {"expert_of_slot": "16", "w1_slots": "65536"}
    assert shown["ranges"][0]["kernels"] == [1, 0, 1, 1]
    assert "resident_experts" not in trt_plugin.read(SMALL.data).to_dict()["programs"][0]["layer"]


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "B", 0, "bundle: not a kernel bundle: its first bytes differ"),
        (8, "I", 2, "bundle: the version must be 3, got 2: compile the bundle, or"),
        (12, "I", 0, "must have 1 program or more, whose directory fits"),
        (12, "I", big("I"), "bytes, got 4294967295"),
        (16, "Q", 2**20, "bundle: truncated: the header says 1048576 bytes, got"),
        (28, "I", 1, "bundle: reserved must be 0, got 1"),
        (48, "Q", 96, "program 1 must begin at a multiple of 64 in"),
        (48, "Q", 64, "program 1 must begin at a multiple of 64 in"),
        (56, "Q", big("Q"), f"and end within the file, got {big('Q')} bytes"),
        (56, "Q", 64, "bundle: the programs end at byte"),
    ],
)
def test_what_is_wrong_with_the_file_is_named(
    offset: int, form: str, value: int, message: str
) -> None:
    data = bytearray(SMALL.data)
    struct.pack_into(f"<{form}", data, offset, value)
    assert message in refusal(checked(bytes(data)))


def test_a_wrong_checksum_is_named() -> None:
    data = bytearray(SMALL.data)
    data[-1] ^= 1
    assert refusal(bytes(data)).startswith("bundle: damaged: the checksum is ")
    assert refusal(checked(bytes(data))).startswith("program 1: damaged: the checksum is ")


@pytest.mark.slow
def test_any_damage_under_sanitizers(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    seeds = []
    for at, content in enumerate(seed_bundles()):
        seeds.append(tmp_path / f"{at}.moek")
        seeds[-1].write_bytes(content)
    done = fuzz(4, seeds)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_program_needs_a_range() -> None:
    message = refusal(Bundle((program(ranges=()),)).data)
    assert message == "program 0: must have 1 to 256 ranges of tokens, got 0"


def test_a_cubins_section_may_have_no_content() -> None:
    no_bits = altered(record("images") + 64 + 4, "I", 8)
    data = bytearray(no_bits)
    struct.pack_into("<Q", data, 64 + record("images") + 64 + 32, 2**40)
    trt_plugin.read(repaired(bytes(data)))


# --- Expressions ---

SIZES = {"T": 7, "E": 8, "K": 2, "D": 96, "H": 384}


def test_an_expression_is_evaluated_as_in_the_plan() -> None:
    T, K, E = expressions.T, expressions.K, expressions.E
    for value in (
        T * K - 3,
        expressions.cdiv(T * K + 1, 4),
        expressions.minimum(E, T) // 2,
        expressions.maximum(E + 1, expressions.D * expressions.H),
    ):
        stored = stored_expression(value)
        assert stored.evaluate(SIZES) == value.evaluate(SIZES)
        assert str(stored) == str(value) == str(read_back(stored))


def read_back(expression: Expression) -> Expression:
    """The expression after a bundle's writing and reading."""
    (read,) = trt_plugin.read(Bundle((sized(expression),)).data).programs
    return read.ranges[0].buffers[0].size


def tree(stored: Expression) -> expressions.Expression:
    """The plan's expression that is stored like this."""
    stack: list[expressions.Expression] = []
    for opcode, value in stored.instructions:
        operation = expressions.OPERATIONS[opcode]
        if operation == "const":
            stack.append(expressions.Expression.of(value))
        elif operation == "symbol":
            stack.append(expressions.Expression("symbol", value=records.SYMBOLS[value]))
        else:
            b, a = stack.pop(), stack.pop()
            stack.append(expressions.Expression(operation, (a, b)))
    return stack[0]


def fits(value: expressions.Expression, sizes: dict[str, int]) -> bool:
    """Whether each step has a value of 64 bits."""
    try:
        return all(-(2**63) <= step.evaluate(sizes) < 2**63 for step in value.postfix())
    except ZeroDivisionError:
        return False


def check_value(stored: Expression, sizes: dict[str, int]) -> None:
    """Compares with Python's numbers, which have any size."""
    value = tree(stored)
    if fits(value, sizes):
        assert stored.evaluate(sizes) == value.evaluate(sizes)
    else:
        with pytest.raises(ArithmeticError, match="overflows 64 bits or divides by less than 1"):
            stored.evaluate(sizes)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, MOST_TOKENS))
def test_any_expression_has_the_value_that_python_gives_it(stored: Expression, tokens: int) -> None:
    check_value(stored, {**SIZES, "T": tokens, "wave": 3})
    assert str(read_back(stored)) == str(tree(stored))


# Random trees hardly ever come near the ends of 64 bits.
EDGES = (-(2**63), -(2**63) + 1, -7, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1)


@pytest.mark.parametrize("opcode", range(2, 9))
def test_the_ends_of_64_bits(opcode: int) -> None:
    for a, b in product(EDGES, EDGES):
        check_value(Expression(((0, a), (0, b), (opcode, 0))), SIZES)


def test_as_many_operands_as_the_stack_holds() -> None:
    full = Expression(((0, 1),) * 16 + ((2, 0),) * 15)
    assert full.evaluate(SIZES) == 16
    with pytest.raises(ArithmeticError, match="instruction 16: the stack must not pass 16 values"):
        Expression(((0, 1),) * 17 + ((2, 0),) * 16).evaluate(SIZES)


# --- The workspace ---


def sized(*expressions: Expression, last: int = MOST_TOKENS) -> Program:
    """A program whose workspace has buffers of some sizes."""
    buffers = tuple(Buffer(f"part {at}", each) for at, each in enumerate(expressions))
    return program(ranges=(Range(1, last, buffers, ()),))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, MOST_TOKENS), min_size=2, max_size=6).map(sorted))
def test_the_workspace_grows_with_the_tokens(tokens: list[int]) -> None:
    several = replace(
        SMALL.programs[0],
        ranges=(
            # The workspace of few tokens is the larger one.
            Range(1, 9, (Buffer("few", Expression(((0, 100_000),))),), ()),
            replace(SMALL.programs[0].ranges[1], first=10, launches=()),
        ),
    )
    with OpenProgram(several.data) as opened:
        sizes = [opened.workspace_size(each) for each in tokens]
    assert sizes == sorted(sizes)
    many = {t: sum(-(-size // 256) * 256 for size in (-(-t // 8), t)) for t in tokens if t > 9}
    assert sizes == [max(100_096, many.get(each, 0)) for each in tokens]


def test_a_workspace_that_shrinks_is_refused() -> None:
    # 1000 - T
    shrinking = sized(Expression(((0, 1000), (1, 0), (3, 0))), last=900)
    with OpenProgram(shrinking.data) as opened:
        assert opened.workspace_size(1) == opened.workspace_size(200) == 1024
        with pytest.raises(LauncherError) as caught:
            opened.workspace_size(900)
    assert str(caught.value) == (
        "invalid bundle: program: the workspace must not shrink as tokens grow, has 1024 bytes for "
        "1 tokens and 256 for 900 tokens"
    )


# --- Limits ---


def launching(*arguments: Argument, times: int = 1) -> Program:
    launches = (Launch(0, arguments, (ONE, ONE, ONE)),) * times
    return program(ranges=(Range(1, 9, (), launches),))


@pytest.mark.parametrize(
    ("program_of", "most", "message"),
    [
        (
            lambda count: program(
                ranges=tuple(Range(at, at, (), ()) for at in range(1, count + 1))
            ),
            256,
            "must have 1 to 256 ranges of tokens, got 257",
        ),
        (
            lambda count: launching(times=count),
            64,
            "range 0: the number of launches must be in 0..64, got 65",
        ),
        (
            # An expression has an odd number of instructions.
            lambda pairs: sized(Expression(((0, 1), *((0, 1), (2, 0)) * pairs))),
            127,
            "expression 0: the number of instructions must be in 1..256, got 257",
        ),
        (
            lambda count: program(ranges=(Range(1, 9, (Buffer("part", ONE),) * count, ()),)),
            32,
            "range 0: the number of buffers must be in 0..32, got 33",
        ),
        (
            lambda count: launching(*[Argument("null")] * count),
            64,
            "launch 0: the number of arguments must be in 0..64, got 65",
        ),
        (
            lambda count: launching(*[Argument("tensor_map", MAP)] * count),
            4,
            "launch 0: the number of tensor maps must be in 0..4, got 5",
        ),
        (
            # Kernels that share a string take 56 bytes each, but are described with all of it.
            lambda size: program(
                kernels=(kernel("down"), *[replace(kernel(), description="x" * size)] * 50)
            ),
            4096,
            "kernel 1: the description's bytes must be at most 4096, got 4097",
        ),
        (
            lambda size: program(kernels=(kernel("x" * size), kernel("down"))),
            4096,
            "kernel 0: the name's bytes must be at most 4096, got 4097",
        ),
    ],
)
def test_no_more_than_the_limits(
    program_of: Callable[[int], Program], most: int, message: str
) -> None:
    full, over = program_of(most), program_of(most + 1)
    assert trt_plugin.read(Bundle((full,)).data).programs == (full,)
    assert message in refusal(Bundle((over,)).data)


# --- The layer ---


floats = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sizes = st.integers(1, 512).map(lambda size: 8 * size)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    activation = draw(st.sampled_from(ACTIVATIONS))
    gated = activation in CLAMPED or draw(st.booleans())
    options = ExpertOptions(
        activation,
        gated=gated,
        interleaved=gated and draw(st.booleans()),
        weight_on_input=draw(st.booleans()),
        alpha=draw(st.floats(0.1, 10)),
        limit=draw(st.floats(0.1, 100)),
        pre_norm=draw(st.sampled_from(PRE_NORMS)),
        norm_eps=draw(st.floats(2.0**-126, 1.0)),
        residual=draw(st.booleans()),
    )
    experts = draw(st.integers(1, 1024))
    top_k = draw(st.integers(1, min(32, experts)))
    router = None
    if draw(st.booleans()):
        scoring = draw(st.sampled_from(SCORINGS))
        scaling = draw(st.floats(-10, 10))
        grouped = draw(groups(experts, top_k))
        router = RouterOptions(top_k, scoring, draw(st.booleans()), scaling, **grouped)
    flags = ("b1", "b2", "tf32", "w1_transposed", "w2_transposed")
    return Layer(
        *(experts, draw(sizes), draw(sizes), top_k),
        *(draw(floats), draw(floats), options, router),
        draw(floats if router else st.sampled_from([torch.int32, torch.int64])),
        draw(st.none() | floats if router else floats),
        selection_dtype=draw(st.none() | floats) if router else None,
        **{name: draw(st.booleans()) for name in flags},
    )


@settings(deadline=None)
@given(layers())
def test_a_layer_survives_and_its_record_is_its_canonical_form(layer: Layer) -> None:
    record = layer_record(layer)
    assert len(record.to_bytes()) == 84
    assert layer_record(layer.canonical()) == record
    bundle = Bundle((program(layer=record),))
    assert trt_plugin.read(bundle.data).programs[0].layer == record
    assert record.to_dict()["experts"] == layer.experts
    assert record.to_dict()["residual"] == layer.options.residual
    assert record.to_dict()["w1_transposed"] == layer.w1_transposed
    assert record.to_dict()["w2_transposed"] == layer.w2_transposed
    described = record.to_dict()
    limited = layer.router is not None and layer.router.limits_groups
    assert described.get("n_group") == (layer.router.n_group if limited else None)
    assert ("norm_eps" in record.to_dict()) == (layer.options.pre_norm == "rms")
    assert record.sizes == layer.sizes
