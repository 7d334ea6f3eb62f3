"""Bundles that break a rule of the format are refused, and the rule is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import trt_plugin
from bundle_fuzzer import fuzz, seed_bundles
from small_bundles import (
    LAYER,
    MAP,
    OFFLOADED,
    ONE,
    SMALL,
    altered,
    checked,
    kernel,
    offloaded,
    program,
    record,
    refusal,
    repaired,
    sized,
)
from trt_plugin import Bundle
from trt_plugin.bundle import (
    Argument,
    Buffer,
    Expression,
    Launch,
    Program,
    Range,
)
from trt_plugin.launcher import LauncherError, OpenProgram


def big(form: str) -> int:
    return int(2 ** (8 * struct.calcsize(f"<{form}")) - 1)


IMAGE = len(kernel().image)


@pytest.mark.parametrize(
    ("offset", "form", "values", "message"),
    [
        (8, "I", [3], "the version must be 6, got 3: compile the bundle, or build the"),
        (16, "Q", [8], "too long: the header says 8 bytes, got"),
        (28, "I", [1], "reserved must be 0, got 1"),
        # The layer
        (32, "I", [2], "the layer's operator must be below 2, got 2"),
        (36, "I", [6], "the layer's tokens and experts must be float32 (1), float16 (2) or bf"),
        (44, "I", [0], "the layer's routing dtype must be float32 (1), float16 (2) or bfloat16"),
        (48, "I", [4], "the layer's router bias must be float32 (1), float16 (2) or bfloat16 (3)"),
        (52, "I", [8192], "the layer's flags must be below 8192, got 8192"),
        (52, "I", [8], "the layer's flag interleaved needs flag gated"),
        (52, "I", [64], "the layer's flag tf32 does not apply and must be 0, got 64"),
        (56, "I", [15], "the layer's activation must be below 15, got 15"),
        (52, "II", [0, 14], "the layer's gating as activation needs flag gated"),
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
        (116, "I", [0], "the layer's weight format must be in 1..8, got 0"),
        (116, "I", [9], "the layer's weight format must be in 1..8, got 9"),
        (116, "I", [3], "experts must be bfloat16 (3), as weights of format bfloat16 are, got 2"),
        (120, "I", [32], "block must be 0 by 0, as weights of format float16 have none, got 32 by"),
        (124, "I", [32], "block must be 0 by 0, as weights of format float16 have none, got 0 by"),
        (128, "I", [2], "the layer's scales' dtype does not fit weights of format float16, got 2"),
        (128, "I", [99], "the layer's scales' dtype does not fit weights of format float16, got"),
        (116, "4I", [4, 1, 32, 0], "scales' dtype does not fit weights of format int4, got 0"),
        (116, "4I", [5, 1, 32, 2], "scales' dtype does not fit weights of format mxfp4, got 2"),
        (116, "4I", [4, 5, 32, 2], "block must have a power of two of rows and of columns, from 8"),
        (116, "4I", [4, 1, 4, 2], "block must have a power of two of rows and of columns, from 8"),
        (132, "I", [1], "zero points must be in 0..0 for weights of format float16, got 1"),
        (
            116,
            "5I",
            [4, 1, 32, 2, 3],
            "zero points must be in 0..2 for weights of format int4, got",
        ),
        (136, "I", [1], "the layer's reserved words must be 0"),
        (140, "I", [1], "the layer's reserved words must be 0"),
        (144, "Q", [8], "table ranges must begin at a multiple of 8 in 320.."),
        (144, "Q", [276], "table ranges must begin at a multiple of 8 in 320.."),
        (152, "Q", [big("Q")], f"table ranges has {big('Q')} records of 48 bytes from byte 320"),
        (152, "Q", [3], "table state must begin at a multiple of 8 in 464.."),
        (152, "Q", [1], "the bytes before table state must be 0"),
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
        (record("arguments"), "II", [1, 17], "argument 0: tensor must be below 17, got 17"),
        (record("arguments"), "II", [3, 9], "argument 0: expression must be below 3, got 9"),
        (record("arguments"), "II", [5, 1], "argument 0: tensor map must be below 1, got 1"),
        (record("tensor maps"), "I", [17], "tensor map 0: tensor must be below 17, got 17"),
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
        (record("tensor maps") + 12, "I", [2], "at most 64, the swizzle's span, got 128"),
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
        (8, "I", 3, "bundle: the version must be 6, got 3: compile the bundle, or"),
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


@pytest.mark.every
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
