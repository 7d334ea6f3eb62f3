"""What is read from a cubin is what ptxas said when it made it."""

from __future__ import annotations

import re
import struct
import subprocess
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from trt_plugin.compiling.cubin import CubinError, CubinInfo, Parameter, inspect_cubin

# A pointer, a tensor map, an integer of each size; 64 bytes of stack and 2048 of shared memory.
PTX = """
.version 8.7
.target {target}
.address_size 64
.visible .entry kernel(
  .param .u64 p0, .param .align 64 .b8 p1[128], .param .u32 p2, .param .u64 p3, .param .u16 p4
) .reqntid 64
{{
  .shared .align 16 .b8 shared[2048];
  .local .align 8 .b8 local[64];
  .reg .b64 %rd<8>;
  .reg .b32 %r<8>;
  ld.param.u64 %rd1, [p0];
  ld.param.u32 %r1, [p2];
  mov.u32 %r2, shared;
  add.u32 %r2, %r2, %r1;
  st.shared.u32 [%r2], %r1;
  ld.shared.u32 %r3, [%r2+4];
  mov.u64 %rd2, local;
  cvt.u64.u32 %rd3, %r1;
  add.u64 %rd4, %rd2, %rd3;
  st.local.u32 [%rd4], %r3;
  st.local.u32 [%rd2+16], %r1;
  ld.local.u32 %r4, [%rd4+8];
  st.global.u32 [%rd1], %r4;
  ret;
}}
"""
TOOLS = sorted(Path(str(files("triton.backends.nvidia") / "bin")).glob("ptxas*"))
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@cache
def made(tool: Path, target: str, source: str = PTX) -> tuple[bytes, str]:
    """A cubin, and what ptxas said."""
    with TemporaryDirectory() as folder:
        ptx, out = Path(folder) / "in.ptx", Path(folder) / "out.cubin"
        ptx.write_text(source.format(target=target))
        command = [str(tool), "-v", f"--gpu-name={target}", str(ptx), "-o", str(out)]
        said = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        if "is not defined for option 'gpu-name'" in said or "Unsupported .version" in said:
            pytest.skip(f"{tool.name} does not know {target}")
        return out.read_bytes(), said


def number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
@pytest.mark.parametrize("target", TARGETS)
def test_it_says_what_ptxas_said(tool: Path, target: str) -> None:
    cubin, said = made(tool, target)
    info = inspect_cubin(cubin)
    # Its address is a multiple of 64; where the parameters begin depends on the architecture.
    first = info.parameters[1].offset
    assert first in (32, 48, 64)
    assert info == CubinInfo(
        name="kernel",
        parameters=(
            Parameter(0, 8),
            Parameter(first, 128),
            Parameter(first + 128, 4),
            Parameter(first + 136, 8),
            Parameter(first + 144, 2),
        ),
        threads=64,
        registers=number(r"Used (\d+) registers", said),
        local_memory=number(r"(\d+) bytes stack frame", said),
        static_shared_memory=number(r"(\d+) bytes smem", said),
    )
    assert info.local_memory >= 64


def test_a_kernel_may_have_no_parameters() -> None:
    source = PTX[: PTX.index("(")] + "() {{ ret; }}"
    info = inspect_cubin(made(TOOLS[0], "sm_80", source)[0])
    assert (info.name, info.parameters, info.threads) == ("kernel", (), 0)
    assert (info.local_memory, info.static_shared_memory) == (0, 0)


def test_two_kernels_are_too_many() -> None:
    source = PTX[: PTX.index("(")] + "() {{ ret; }} .visible .entry other() {{ ret; }}"
    with pytest.raises(CubinError, match=r"must have one kernel, got (kernel|other), "):
        inspect_cubin(made(TOOLS[0], "sm_80", source)[0])


@pytest.mark.parametrize("data", [b"", b"MOEK" * 40, b"\x7fELF\x02\x01" + bytes(100)])
def test_something_else_is_no_cubin(data: bytes) -> None:
    with pytest.raises(CubinError, match="cubin"):
        inspect_cubin(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_cubin_is_an_error_or_a_cubin(data: st.DataObject) -> None:
    cubin = bytearray(made(TOOLS[0], "sm_80")[0])
    if data.draw(st.booleans()):
        del cubin[data.draw(st.integers(0, len(cubin) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if len(cubin) > 8 else 0):
        at = data.draw(st.integers(0, len(cubin) - 8))
        struct.pack_into("<Q", cubin, at, data.draw(st.integers(0, 2**64 - 1)))
    with suppress(CubinError):
        assert isinstance(inspect_cubin(bytes(cubin)), CubinInfo)
