"""Bundles: what is written is read, and nothing else is."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import trt_plugin
from custom_ops import ACTIVATIONS, SCORINGS, ExpertOptions, RouterOptions
from custom_ops.kernels import expressions, spec
from custom_ops.kernels.layer import Layer
from custom_ops.options import CLAMPED, PRE_NORMS
from standin import fake_cubin
from trt_plugin import Bundle, BundleError, _records
from trt_plugin._programs import layer_record, stored_expression
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    LayerRecord,
    Program,
    Range,
    TensorMap,
    is_bundle,
)

LAYER = LayerRecord(
    *(0, 2, 2, 2, 0, 0x24, 2, 0),
    *(8, 2, 64, 128),
    *(1.0, 0.0, 0.0),
)
ONE = Expression(((0, 1),))
TOKENS = Expression(((1, 0),))
# cdiv(T * K, 16)
TILES = Expression(((1, 0), (1, 2), (4, 0), (0, 16), (6, 0)))
MAP = TensorMap("w1", 6, 3, (64, 128, 8), (2, 128, 16384), (64, 32, 1))


def kernel(name: str = "up", image: bytes = fake_cubin(b"any")) -> Kernel:
    return Kernel(name, '{"function":"up"}', image, 4, 49152, True, 64, 16)


def program(**changes: object) -> Program:
    buffers = (Buffer("rows", TILES), Buffer("hidden", TOKENS))
    arguments = (
        Argument("tensor", "x"),
        Argument("workspace", 1),
        Argument("i32", TOKENS),
        Argument("i64", TILES),
        Argument("tensor_map", MAP),
        Argument("null"),
    )
    few = Range(1, 16, (), (Launch(0, (Argument("tensor", "y"),), (TOKENS, ONE, ONE)),))
    many = Range(17, 2**31 - 1, buffers, (Launch(1, arguments, (TILES, ONE, TOKENS)),) * 2)
    whole = Program(LAYER, 90, (few, many), (kernel(), kernel("down", fake_cubin(b"other"))))
    return replace(whole, **changes)  # type: ignore[arg-type]


SMALL = Bundle((program(), program(architecture=80)))


def repaired(data: bytes) -> bytes:
    """The bundle with right checksums, its programs' and its own."""
    for offset, size in _records.DIRECTORY_ENTRY.iter_unpack(data[32:64]):
        data = data[:offset] + checked(data[offset : offset + size]) + data[offset + size :]
    return checked(data)


def checked(data: bytes) -> bytes:
    if len(data) < 28:
        return data
    zeroed = data[:24] + bytes(4) + data[28:]
    return data[:24] + struct.pack("<I", crc32(zeroed)) + data[28:]


def altered(offset: int, form: str, *values: float, base: int = 64) -> bytes:
    """The small bundle with values written over it, from the first program's start on."""
    data = bytearray(SMALL.data)
    struct.pack_into(f"<{form}", data, base + offset, *values)
    return repaired(bytes(data))


def record(table: str, index: int = 0) -> int:
    """Where a record of the first program lies, from the program's start."""
    at = list(_records.TABLES).index(table)
    offset, _ = _records.TABLE_ENTRY.unpack_from(SMALL.data, 64 + 96 + 16 * at)
    return int(offset) + index * _records.TABLES[table]


def reading(data: bytes) -> str:
    with pytest.raises(BundleError) as raised:
        trt_plugin.read(data)
    return str(raised.value)


# --- What is written is read ---


def test_what_is_written_is_read() -> None:
    assert trt_plugin.read(SMALL.data) == SMALL
    assert trt_plugin.read(SMALL.data).data == SMALL.data


def test_a_program_is_the_same_in_a_bundle_and_out_of_it() -> None:
    offset, size = _records.DIRECTORY_ENTRY.unpack_from(SMALL.data, 48)
    assert offset % 64 == 0
    assert SMALL.data[offset : offset + size] == SMALL.programs[1].data


def test_equal_parts_are_stored_once() -> None:
    data = program(kernels=(kernel("one"), kernel("other"))).data
    assert data.count(kernel().image) == 1
    expressions_of = _records.TABLE_ENTRY.unpack_from(data, 96 + 16 * 6)[1]
    assert expressions_of == len({ONE, TOKENS, TILES})


numbers = st.integers(-(2**63), 2**63 - 1)
steps = st.recursive(
    st.one_of(
        st.tuples(st.just(0), numbers).map(lambda step: (step,)),
        st.tuples(st.just(1), st.integers(0, 4)).map(lambda step: (step,)),
    ),
    lambda parts: st.tuples(parts, parts, st.integers(2, 8)).map(
        lambda tree: (*tree[0], *tree[1], (tree[2], 0))
    ),
    max_leaves=8,
).map(Expression)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1)
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
    st.sampled_from(_records.TENSORS),
    st.integers(0, 3),
    st.tuples(*[st.integers(1, 2**32)] * 5),
    st.tuples(*[st.integers(1, 2**36 - 1)] * 4),
    st.tuples(*[st.integers(1, 32)] * 5),
)
arguments = st.one_of(
    st.just(Argument("null")),
    st.builds(Argument, st.just("tensor"), st.sampled_from(_records.TENSORS)),
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
        BundleError, match=r"model\.moek: the bundle says that it has \d+ bytes, th"
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
    flags = _records.LAYER_FLAGS["rms_norm"] | _records.LAYER_FLAGS["residual"]
    layer = SMALL.programs[0].layer._replace(flags=flags, norm_eps=0.5)
    with console.capture() as shown:
        console.print(Bundle((replace(SMALL.programs[0], layer=layer),)))
    assert "64 x 128, silu, rms norm, residual, float16" in shown.get()
    assert "48 KiB" in text


def test_the_dictionary_holds_what_the_table_shows() -> None:
    told = SMALL.to_dict()["programs"][1]
    assert told["architecture"] == "sm_80"
    assert told["layer"]["activation"] == "silu"
    assert "alpha" not in told["layer"]
    assert told["ranges"][1]["workspace"] == {"rows": "cdiv(T * K, 16)", "hidden": "T"}
    assert told["kernels"][0]["description"] == {"function": "up"}


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


# --- What is not a bundle ---


def test_cut_off_anywhere_it_is_an_error() -> None:
    for size in range(len(SMALL.data)):
        assert "bundle" in reading(SMALL.data[:size])


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


def test_every_altered_bit_is_noticed() -> None:
    for at in range(len(SMALL.data)):
        content = bytearray(SMALL.data)
        content[at] ^= 1 << at % 8
        assert reading(bytes(content))


@given(st.binary(max_size=200))
def test_anything_else_is_an_error(data: bytes) -> None:
    assert reading(data)
    assert reading(_records.FILE_MAGIC + data)


def big(form: str) -> int:
    return int(2 ** (8 * struct.calcsize(f"<{form}")) - 1)


@pytest.mark.parametrize(
    ("offset", "form", "values", "message"),
    [
        (8, "I", [2], "the program's version must be 1, got 2"),
        (16, "Q", [8], "the program says that it has 8 bytes"),
        (28, "I", [1], "the reserved field of the program's header must be 0, got 1"),
        # The layer
        (32, "I", [2], "the layer's operator must be below 2, got 2"),
        (36, "I", [6], "the layer's tokens_dtype must be one of 1 (float32), 2 (float16), 3 (b"),
        (44, "I", [0], "the layer's routing_dtype must be one of 1 (float32), 2 (float16), 3 (b"),
        (52, "I", [512], "the layer's flags must be below 512, got 512"),
        (52, "I", [8], "flag interleaved needs gated"),
        (52, "I", [64], "the layer's flag tf32 does not apply and must be 0"),
        (56, "I", [7], "the layer's activation must be below 7, got 7"),
        (60, "I", [3], "the layer's scoring must be below 3, got 3"),
        (60, "I", [1], "the layer's flag renormalize does not apply and must be 0"),
        (64, "I", [1025], "the layer's E must be in 1..1024, got 1025"),
        (68, "I", [9], "the layer's K must be in 1..8, got 9"),
        (72, "I", [12], "the layer's D must be a multiple of 8, got 12"),
        (76, "I", [0], "the layer's H must be a multiple of 8, got 0"),
        (80, "f", [float("nan")], "the layer's routed_scaling must be finite, got nan"),
        (84, "f", [1.5], "the layer's alpha does not apply and must be 0, got 1.5"),
        (92, "f", [1e-6], "the layer's norm_eps does not apply and must be 0, got"),
        (92, "f", [float("inf")], "the layer's norm_eps must be finite, got inf"),
        # The tables
        (96, "Q", [8], "the table of ranges begins at byte 8, before the end of what precedes"),
        (96, "Q", [260], "the table of ranges must begin at a multiple of 8, got byte 260"),
        (104, "Q", [big("Q")], "the table of ranges ends at byte"),
        (104, "Q", [3], "the table of buffers begins at byte"),
        (104, "Q", [1], "the bytes before the table of buffers"),
        (
            record("ranges"),
            "q",
            [2],
            "follow one another from 1 to at most 2147483647, got 2 to 16",
        ),
        (record("ranges", 1) + 8, "q", [2**31], "got 17 to 2147483648 where 17 comes next"),
        (
            record("ranges") + 16,
            "I",
            [3],
            "record 0 of the ranges: launches 3 to 3 must be below 3",
        ),
        (record("ranges", 1) + 28, "I", [1], "a buffer of launch 0 must be below 1, got 1"),
        (record("buffers"), "I", [big("I")], "the name ends at byte"),
        (record("buffers") + 8, "I", [3], "size must be below 3, got 3"),
        (record("buffers") + 12, "I", [1], "the reserved field must be 0, got 1"),
        (
            record("launches", 1),
            "I",
            [2],
            "record 1 of the launches: kernel must be below 2, got 2",
        ),
        (record("launches") + 8, "I", [99], "arguments 0 to 98 must be below 13, their number"),
        (record("launches") + 20, "I", [7], "grid's z must be below 3, got 7"),
        (record("launches") + 24, "Q", [7], "the reserved field must be 0, got 7"),
        (
            record("arguments"),
            "II",
            [6, 0],
            "record 0 of the arguments: kind must be below 6, got 6",
        ),
        (record("arguments"), "II", [0, 1], "a null pointer's index must be 0, got 1"),
        (record("arguments"), "II", [1, 10], "tensor must be below 10, got 10"),
        (record("arguments"), "II", [5, 1], "tensor map must be below 1, got 1"),
        (record("tensor maps"), "I", [10], "tensor must be below 10, got 10"),
        (
            record("tensor maps") + 4,
            "I",
            [5],
            "dtype must be one of 6 (float16), 7 (float32), 9 (b",
        ),
        (record("tensor maps") + 8, "I", [6], "rank must be in 2..5, got 6"),
        (record("tensor maps") + 8, "I", [2], "fields beyond the rank must be 0, got 8"),
        (record("tensor maps") + 12, "I", [4], "swizzle must be below 4, got 4"),
        (record("tensor maps") + 16, "Q", [0], "size 0 must be in 1..2^32, got 0"),
        (record("tensor maps") + 56, "Q", [4], "the first stride must be 2, got 4"),
        (record("tensor maps") + 64, "Q", [24], "stride 1 must be a multiple of 16 in 16..2^40"),
        (record("tensor maps") + 96, "I", [257], "box 0 must be in 1..256, got 257"),
        (record("tensor maps") + 96, "I", [4], "box 0 must be a multiple of 16 bytes, got 8"),
        (
            record("tensor maps") + 12,
            "I",
            [1],
            "box 0 must have at most 32 bytes, the swizzle's span, got 128",
        ),
        (record("tensor maps") + 116, "I", [1], "the reserved fields must be 0, got 1"),
        (
            record("kernels") + 4,
            "I",
            [99999],
            "record 0 of the kernels: the name ends at byte 99999",
        ),
        (record("kernels") + 16, "Q", [1], "the image must begin at a multiple of 64 bytes from"),
        (record("kernels") + 24, "Q", [big("Q")], "the image ends at byte"),
        (record("kernels") + 24, "Q", [0], "name and image must have 1 byte or more, have 2 and 0"),
        (
            record("kernels") + 4,
            "I",
            [0],
            f"name and image must have 1 byte or more, have 0 and {len(kernel().image)}",
        ),
        # The cubin: its header, and its only section
        (record("kernels") + 24, "Q", [63], "the cubin must have 64 bytes or more, has 63"),
        (
            record("images"),
            "B",
            [0],
            r"the cubin must begin with b'\x7fELF\x02\x01', got b'\x00ELF",
        ),
        (
            record("images") + 4,
            "B",
            [1],
            r"the cubin must begin with b'\x7fELF\x02\x01', got b'\x7fELF\x01",
        ),
        (record("images") + 18, "H", [62], "the cubin's machine must be 190 (CUDA), got 62"),
        (record("images") + 32, "Q", [132], "the cubin's table of segments ends at byte 132"),
        (record("images") + 54, "2H", [55, 1], "the cubin's segments must have 56 bytes each"),
        (
            record("images") + 40,
            "Q",
            [2**64 - 64],
            "the cubin's table of sections ends at byte 18446744073709551616, the cubin has 131",
        ),
        (record("images") + 58, "H", [40], "the cubin's sections must have 64 bytes each, got 40"),
        (record("images") + 60, "H", [0], "the cubin must have 1 section or more, has 0"),
        (
            record("images") + 60,
            "H",
            [2],
            "the cubin's table of sections ends at byte 192, the cub",
        ),
        (
            record("images") + 88,
            "Q",
            [129],
            "the cubin's section 0 ends at byte 132, the cubin has 131",
        ),
        (
            record("images") + 96,
            "Q",
            [2**64 - 1],
            "the cubin's section 0 ends at byte 18446744073709551743, the cubin has 131",
        ),
        (record("kernels") + 32, "I", [33], "warps must be in 1..32, got 33"),
        (record("kernels") + 36, "I", [2**20 + 1], "shared memory must be at most 1048576 bytes"),
        (record("kernels") + 40, "I", [2], "flags must be below 2, got 2"),
        (record("kernels") + 52, "I", [1], "the reserved field must be 0, got 1"),
        (record("expressions"), "I", [99], "record 0 of the expressions: instructions 99 to"),
        (record("expressions") + 4, "I", [0], "an expression must leave 1 value, it leaves 0"),
        (record("instructions"), "I", [9], "instruction 0: the opcode must be below 9, got 9"),
        (record("instructions") + 4, "I", [1], "an instruction's reserved field must be 0, got 1"),
        (record("instructions"), "I", [2], "instruction 0: add needs 2 values, there are 0"),
        (record("strings"), "B", [0xFF], "the name must be UTF-8, got b'\\xff"),
        (record("strings"), "B", [0x1B], "the name must have no control characters, got '\\x1b"),
    ],
)
def test_what_breaks_a_rule_is_named(
    offset: int, form: str, values: list[float], message: str
) -> None:
    told = reading(altered(offset, form, *values))
    assert told.startswith("program 0: ")
    assert message in told


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "B", 0, r"not a bundle: it must begin with b'MOEK\r\n\x1a\n', got b'\x00OEK"),
        (8, "I", 2, "the bundle's version must be 1, got 2"),
        (12, "I", 0, "a bundle must have 1 program or more, it has 0"),
        (12, "I", big("I"), "the directory of 4294967295 programs ends at byte"),
        (28, "I", 1, "the reserved field of the bundle's header must be 0, got 1"),
        (48, "Q", 96, "program 1 must begin at a multiple of 64, got byte 96"),
        (48, "Q", 64, "program 1 begins at byte 64, before the end of what precedes it"),
        (56, "Q", big("Q"), "program 1 ends at byte"),
    ],
)
def test_what_is_wrong_with_the_file_is_named(
    offset: int, form: str, value: int, message: str
) -> None:
    data = bytearray(SMALL.data)
    struct.pack_into(f"<{form}", data, offset, value)
    assert message in reading(checked(bytes(data)))


def test_a_wrong_checksum_is_named() -> None:
    data = bytearray(SMALL.data)
    data[-1] ^= 1
    assert reading(bytes(data)).startswith("the bundle is damaged: its checksum is ")
    assert reading(checked(bytes(data))).startswith(
        "program 1: the program is damaged: its checksu"
    )


def test_a_cubins_section_may_have_no_content() -> None:
    no_bits = altered(record("images") + 64 + 4, "I", 8)
    data = bytearray(no_bits)
    struct.pack_into("<Q", data, 64 + record("images") + 64 + 32, 2**40)
    trt_plugin.read(repaired(bytes(data)))


def test_a_program_needs_a_range() -> None:
    assert "must have 1 to 256 ranges of tokens, it has 0" in reading(
        Bundle((program(ranges=()),)).data
    )


# --- Expressions ---

SIZES = {"T": 7, "E": 8, "K": 2, "D": 96, "H": 384}


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ((), "an expression must leave 1 value, it leaves 0"),
        (((0, 1), (0, 2)), "an expression must leave 1 value, it leaves 2"),
        (((0, 1), (2, 0)), "instruction 1: add needs 2 values, there are 1"),
        (((1, 5),), "instruction 0: the symbol must be below 5, got 5"),
        (((0, 1), (0, 1), (2, 1)), "instruction 2: an operation's value must be 0, got 1"),
        (((0, 1),) * 17 + ((2, 0),) * 16, "instruction 16: the stack must not pass 16 values"),
    ],
)
def test_an_expression_that_cannot_be_evaluated_is_refused(
    instructions: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Expression(instructions)


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
        assert str(stored) == str(value)


def test_evaluation_says_what_it_cannot_do() -> None:
    with pytest.raises(OverflowError, match="does not fit 64 bits"):
        Expression(((0, 2**62), (0, 2), (4, 0))).evaluate(SIZES)
    with pytest.raises(ZeroDivisionError, match="cdiv needs a divisor of at least 1, got 0"):
        Expression(((0, 1), (0, 0), (6, 0))).evaluate(SIZES)


# --- The layer ---


def test_names_are_those_of_the_operators() -> None:
    assert _records.ACTIVATIONS == ACTIVATIONS
    assert _records.SCORINGS == SCORINGS
    assert _records.TENSORS == spec.TENSORS
    assert _records.SYMBOLS == expressions.SYMBOLS


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
        router = RouterOptions(top_k, scoring, draw(st.booleans()), scaling)
    return Layer(
        *(experts, draw(sizes), draw(sizes), top_k),
        *(draw(floats), draw(floats), options, router),
        draw(floats if router else st.sampled_from([torch.int32, torch.int64])),
        draw(st.none() | floats if router else floats),
        *(draw(st.booleans()) for _ in range(3)),
    )


@settings(deadline=None)
@given(layers())
def test_a_layer_survives_and_its_record_is_its_canonical_form(layer: Layer) -> None:
    record = layer_record(layer)
    assert len(record.to_bytes()) == 64
    assert layer_record(layer.canonical()) == record
    bundle = Bundle((program(layer=record),))
    assert trt_plugin.read(bundle.data).programs[0].layer == record
    assert record.to_dict()["experts"] == layer.experts
    assert record.to_dict()["residual"] == layer.options.residual
    assert ("norm_eps" in record.to_dict()) == (layer.options.pre_norm == "rms")
    assert record.sizes == layer.sizes
