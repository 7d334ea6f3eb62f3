"""Compiles kernels, in a process of its own.

Reads tasks from standard input and writes results to standard output, one JSON object a line. The
compiler's own prints go to standard error.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
from typing import Any

# Fields that a launch needs, and features that the launcher must be able to refuse.
_METADATA = (
    *("name", "num_warps", "num_ctas", "shared", "launch_pdl", "launch_cooperative_grid"),
    *("global_scratch_size", "profile_scratch_size", "tensordesc_meta"),
)
_HOPPER = 90
# Triton's variable for the assembler of Hopper and Blackwell.
_NEWER_ASSEMBLER = "TRITON_PTXAS_BLACKWELL_PATH"


def main() -> None:
    """Works until standard input ends."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = _compile(json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=results, flush=True)


def _compile(task: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        getattr(importlib.import_module(task["module"]), task["function"]),
        signature=task["signature"],
        constexprs=task["constants"],
        attrs={(index,): [["tt.divisibility", 16]] for index in task["aligned"]},
    )
    # Triton assembles for sm_90 with CUDA 13, whose cubins take driver 580; with its CUDA 12, 525.
    if task["capability"] == _HOPPER:
        os.environ[_NEWER_ASSEMBLER] = triton.knobs.nvidia.ptxas.path
    else:
        os.environ.pop(_NEWER_ASSEMBLER, None)
    target = GPUTarget("cuda", task["capability"], 32)
    compiled = triton.compile(source, target=target, options=task["options"])
    metadata = {name: getattr(compiled.metadata, name, None) for name in _METADATA}
    return {"metadata": metadata, "cubin": base64.b64encode(compiled.asm["cubin"]).decode()}


if __name__ == "__main__":
    main()
