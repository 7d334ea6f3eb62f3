"""The C++ reader of bundles against the Python one, on what is damaged, strange or just random.

Whatever one of them refuses, the other refuses too, and says why; what they take, they understand
alike.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
import test_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bundle import LAYER, MAP, ONE, SMALL, altered, program, programs, repaired, steps

import trt_plugin
from trt_plugin import Bundle, BundleError
from trt_plugin.bundle import Argument, Buffer, Expression, Launch, Program, Range
from trt_plugin.launcher import LauncherError, OpenProgram, find_program

FIRST = SMALL.programs[0].data
MOST_TOKENS = 2**31 - 1
ALIGNMENT = 256
# What breaks arithmetic on counts, offsets and indices, in fields of 4 and of 8 bytes.
STRANGE = {
    "I": (0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 64, 2**32 - 1),
    "Q": (0, 1, 64, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
}


def refusal(data: bytes) -> str | None:
    """What the C++ reader says to a program; None if it takes it."""
    try:
        OpenProgram(data).close()
    except LauncherError as error:
        refused = error
    else:
        return None
    assert refused.status == "invalid bundle"
    message = str(refused).removeprefix("invalid bundle: ")
    assert len(message) > len("program: ")
    assert message.startswith("program: ")
    return message


def first_program(bundle: bytes) -> bytes:
    offset, size = struct.unpack_from("<QQ", bundle, 32)
    return bundle[offset : offset + size]


def python_refusal(bundle: bytes) -> str | None:
    try:
        trt_plugin.read(bundle)
    except BundleError as error:
        return str(error)
    return None


def assert_both_agree(bundle: bytes) -> None:
    """Of a bundle of which the first program may be altered, checksums excepted."""
    native, python = refusal(first_program(bundle)), python_refusal(bundle)
    assert (native is None) == (python is None), (native, python)


# --- Damage ---


def test_a_program_cut_off_anywhere_is_refused():
    for size in range(len(FIRST)):
        assert "truncated" in (refusal(FIRST[:size]) or "")


def test_a_bundle_cut_off_anywhere_is_refused():
    data = SMALL.data
    for size in range(len(data)):
        with pytest.raises(LauncherError, match="bundle: truncated: the header"):
            find_program(data[:size], LAYER, 90)


def test_every_changed_bit_is_noticed():
    for at in range(len(FIRST)):
        changed = bytearray(FIRST)
        changed[at] ^= 1 << at % 8
        assert refusal(bytes(changed))


@pytest.mark.parametrize("form", STRANGE)
def test_strange_numbers_in_every_field(form):
    for at in range(0, len(FIRST) - 8, struct.calcsize(form)):
        # The sizes and the checksums are put right again.
        for value in STRANGE[form]:
            assert_both_agree(altered(at, form, value))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**64))
def test_many_changes_at_once(seed):
    chance = random.Random(seed)  # noqa: S311
    data = SMALL.data
    for _ in range(chance.randint(2, 6)):
        form = chance.choice("BIQ")
        at = chance.randrange(32, len(FIRST) - 8)
        value = chance.choice(STRANGE.get(form, (0, 1, 0x7F, 0x80, 0xFF)))
        changed = bytearray(data)
        struct.pack_into(f"<{form}", changed, 64 + at, value)
        data = bytes(changed)
    assert_both_agree(repaired(data))


@given(st.binary(max_size=400))
def test_anything_else_is_refused(data):
    assert refusal(data)
    assert refusal(FIRST[:32] + data)


RULES = test_bundle.test_what_breaks_a_rule_is_named.pytestmark[0].args[1]
# Where it is not the number itself that is said.
SAID = {
    "flag interleaved needs gated": "flag interleaved needs flag gated",
    "the layer's flag renormalize does not apply and must be 0": "flag renormalize does not apply",
    "the bytes before the table of buffers": "the bytes before table buffers must be 0",
    "box 0 must have at most 32 bytes, the swizzle's span, got 128": "the swizzle's span, is 128",
    r"the cubin must begin with b'\x7fELF\x02\x01', got b'\x00ELF": "no 64-bit ELF file",
    r"the cubin must begin with b'\x7fELF\x02\x01', got b'\x7fELF\x01": "no 64-bit ELF file",
    "the cubin's segments must have 56 bytes each": "must have 56 bytes, has 55",
    "the cubin's section 0 ends at byte 132, the cubin has 131": "are 3 from 129 on, there are 131",
    "box 0 must be a multiple of 16 bytes, got 8": "must be a multiple of 16, is 8",
    r"the name must be UTF-8, got b'\xff": "must be UTF-8 without control characters, number 0",
    r"the name must have no control characters, got '\x1b": "without control characters, number 0",
}


@pytest.mark.parametrize(("offset", "form", "values", "python"), RULES)
def test_the_rule_and_the_value_are_named(offset, form, values, python):
    message = refusal(first_program(altered(offset, form, *values))) or ""
    assert SAID.get(python, str(values[-1])) in message


# --- What is understood ---


@settings(max_examples=100, deadline=None)
@given(programs)
def test_any_program_is_taken(program):
    assert refusal(program.data) is None


def sized(*expressions: Expression, last: int = MOST_TOKENS) -> Program:
    """A program whose workspace has the sizes of some expressions."""
    buffers = tuple(Buffer(f"part {at}", each) for at, each in enumerate(expressions))
    return program(ranges=(Range(1, last, buffers, ()),))


def expected_workspace(changed: Program, tokens: int) -> int | None:
    """By the Python reader's arithmetic; None if it is no size, or larger for 1 token."""
    (only,) = changed.ranges
    totals = []
    for each in (1, tokens):
        sizes = {**changed.layer.sizes, "T": each}
        try:
            parts = [buffer.size.evaluate(sizes) for buffer in only.buffers]
        except (ZeroDivisionError, OverflowError):
            return None
        if min(parts) < 0 or max(parts) >= 2**61:
            return None
        totals.append(sum(-(-part // ALIGNMENT) * ALIGNMENT for part in parts))
    return totals[1] if totals[0] <= totals[1] else None


def assert_workspace(changed: Program, tokens: int) -> None:
    expected = expected_workspace(changed, tokens)
    with OpenProgram(changed.data) as opened:
        if expected is not None:
            assert opened.workspace_size(tokens) == expected
            return
        with pytest.raises(LauncherError, match=rf"for (1|{tokens}) tokens"):
            opened.workspace_size(tokens)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, MOST_TOKENS))
def test_any_expression_has_the_value_that_python_gives_it(expression, tokens):
    assert_workspace(sized(expression), tokens)


# Random trees hardly ever come near the ends of 64 bits.
EDGES = (-(2**63), -(2**63) + 1, -7, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1)


@pytest.mark.parametrize("opcode", range(2, 9))
def test_the_ends_of_64_bits(opcode):
    for a in EDGES:
        for b in EDGES:
            value = Expression(((0, a), (0, b), (opcode, 0)))
            # In two halves, each at least 0 and, as the workspace is, a multiple of 256.
            high = (*value.instructions, (0, 2**20), (5, 0))
            low = (*value.instructions, *high, (0, 2**20), (4, 0), (3, 0))
            halves = (*high, (0, 2**43), (2, 0), (0, 256), (4, 0)), (*low, (0, 256), (4, 0))
            for half in halves:
                assert_workspace(sized(Expression(half)), 5)


def test_as_many_operands_as_the_stack_holds():
    full = Expression(((0, 1),) * 16 + ((2, 0),) * 15)
    assert_workspace(sized(full), 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, MOST_TOKENS), min_size=2, max_size=6).map(sorted))
def test_the_workspace_grows_with_the_tokens(tokens):
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
    assert sizes == [several.workspace_size(each) for each in tokens]


def test_a_workspace_that_shrinks_is_refused():
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
            "must have 1 to 256 ranges of tokens, has 257",
        ),
        (
            lambda count: launching(times=count),
            64,
            "range 0: the number of launches must be in 0..64, is 65",
        ),
        (
            # An expression has an odd number of instructions.
            lambda pairs: sized(Expression(((0, 1), *((0, 1), (2, 0)) * pairs))),
            127,
            "expression 0: the number of instructions must be in 1..256, is 257",
        ),
        (
            lambda count: program(ranges=(Range(1, 9, (Buffer("part", ONE),) * count, ()),)),
            32,
            "range 0: the number of buffers must be in 0..32, is 33",
        ),
        (
            lambda count: launching(*[Argument("null")] * count),
            64,
            "launch 0: the number of arguments must be in 0..64, is 65",
        ),
        (
            lambda count: launching(*[Argument("tensor_map", MAP)] * count),
            4,
            "launch 0: the number of tensor maps must be in 0..4, is 5",
        ),
    ],
)
def test_no_more_than_the_limits(program_of, most, message):
    full, over = program_of(most), program_of(most + 1)
    assert refusal(full.data) is None
    assert python_refusal(Bundle((full,)).data) is None
    assert message in (refusal(over.data) or "")
    assert python_refusal(Bundle((over,)).data)
