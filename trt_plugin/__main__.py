"""``python -m trt_plugin``: compiles layers given by hand, without the command line's packages.

``dynamo-moe compile`` does this and more. The build of a wheel with kernels runs this.
"""

from __future__ import annotations

import argparse
import sys

import trt_plugin


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trt_plugin",
        description="Compile the kernels of MoE layers ahead of time.",
    )
    parser.add_argument("--spec", action="append", required=True, help="a layer; may be repeated")
    parser.add_argument("--arch", action="append", required=True, help="sm_90; may be repeated")
    parser.add_argument("--out", required=True, help="the bundle to write")
    arguments = parser.parse_args()
    try:
        layers = [trt_plugin.parse_spec(text) for text in arguments.spec]
        trt_plugin.compile(layers, arguments.arch, arguments.out)
    except (ValueError, ImportError, OSError, trt_plugin.CompileError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
