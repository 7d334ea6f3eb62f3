"""Functions of several kernels, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits for the results of the kernel ahead, and lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def converted(x, dtype):
    """Converts numbers to another dtype; sm_75 has no way from float16 to bfloat16."""
    if x.dtype == tl.float16 and dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def load_block(ptrs, inside, WHOLE: tl.constexpr):
    """Loads a block, with zeros outside; masked only if it is not WHOLE."""
    if WHOLE:
        block = tl.load(ptrs)
    else:
        block = tl.load(ptrs, mask=inside, other=0.0)
    return block
