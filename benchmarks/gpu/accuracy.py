"""Are whole models' layers right on this machine's GPU?

    python -m benchmarks.gpu.accuracy --json result.json

A layer's result is compared with the float64 oracle, computed on the GPU too, within the tolerances
of the tests. Workspace and result hold NaN before the launch, so what is not written shows.

Legend: T tokens, K choices.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.report import table, write_json
from benchmarks.gpu.layers import Parameters, Shape, parameters_of, random_tokens
from benchmarks.gpu.speed import Device, gpu_parser, parsed
from benchmarks.gpu.timing import reason, release
from custom_ops import RouterOptions, reference
from custom_ops.kernels.architectures import Architecture
from custom_ops.kernels.launch import launch
from custom_ops.kernels.plan import plan
from dynamo_moe.tolerances import tolerance_for

TOKENS = (1, 16, 4096)
# In float64, DeepSeek-V3's 256 experts take 90 GB.
SHAPES = "qwen3,gpt-oss,mixtral,swin"
# Rows that the oracle computes at once, which bounds its memory.
_ROWS = 1024
# Rounding decides between experts whose scores are closer than this share.
_TIE = 1e-4
_POISON = 0xFF


def without_ties(shape: Shape, parameters: Parameters, tokens: int) -> Tensor:
    """Returns tokens ``[T, D]`` whose K-th and next best expert do not nearly tie."""
    x_TD = random_tokens(parameters, 2 * tokens + 8)
    every = RouterOptions(min(shape.top_k + 1, shape.experts), shape.router.scoring, False)
    _, scores = reference.router(
        x_TD, parameters["router_weight"], parameters.get("router_bias"), every
    )
    kth, following = scores[:, shape.top_k - 1], scores[:, -1]
    if shape.top_k == shape.experts:
        return x_TD[:tokens]
    return x_TD[kth - following > _TIE * kth.abs()][:tokens].contiguous()


def oracle(shape: Shape, parameters: Parameters, x_TD: Tensor) -> Tensor:
    """Returns the layer's result in float64."""
    p, router = parameters, (parameters["router_weight"], parameters.get("router_bias"))
    experts = (p["w1"], p.get("b1"), p["w2"], p.get("b2"))
    rows = []
    for x in x_TD.split(_ROWS):
        routing = reference.router(x, *router, shape.router)
        rows.append(reference.experts(x, *routing, *experts, shape.options))
    return torch.cat(rows)


def compare(shape: Shape, parameters: Parameters, tokens: int, on: Architecture) -> dict[str, Any]:
    """Returns a layer's worst and RMS error, relative to the RMS of what is expected."""
    x_TD = without_ties(shape, parameters, tokens)
    planned = plan(shape.layer(x_TD.dtype), on)
    y_TD = torch.full_like(x_TD, float("nan"))
    size = planned.workspace_size(len(x_TD))
    workspace = torch.full((size,), _POISON, dtype=torch.uint8, device=x_TD.device)
    launch(planned, {**parameters, "x": x_TD, "y": y_TD}, workspace)
    expected = oracle(shape, parameters, x_TD)
    error = (y_TD.double() - expected).abs()
    scale = expected.square().mean().sqrt()
    worst, rms = float(error.max() / scale), float(error.square().mean().sqrt() / scale)
    allowed = tolerance_for({x_TD.dtype})
    return {
        "shape": shape.name,
        "tokens": len(x_TD),
        "worst": worst,
        "rms": rms,
        # NaN is in no order, so it is not right either.
        "right": worst <= allowed.max and rms <= allowed.rms,
    }


@torch.inference_mode()
def main() -> None:
    """Compares layers on this machine's GPU."""
    known = gpu_parser(__doc__, 120, "json")
    known.set_defaults(shapes=SHAPES)
    given = known.parse_args()
    if given.dry_run:
        given.shapes = "tiny"
    given = parsed(known, given)
    deadline = time.monotonic() + given.budget
    device = Device.chosen(given.dry_run)
    found: list[dict[str, Any]] = []
    for shape in given.shapes:
        parameters = parameters_of(shape, given.dtype, device.name)
        for tokens in given.tokens or TOKENS:
            if time.monotonic() > deadline:
                break
            try:
                found.append(compare(shape, parameters, tokens, device.architecture))
            except Exception as error:  # The other layers are compared all the same.
                wrong = {"worst": None, "rms": None, "right": False, "why": reason(error)}
                found.append({"shape": shape.name, "tokens": tokens} | wrong)
            write_json(given.json, device.conditions() | {"layers": found})
        del parameters
        release()
    columns = ["layer", "T", "worst error", "RMS error", "right", "why"]
    rows = [
        [
            *(each["shape"], each["tokens"]),
            *(e and f"{e:.1e}" for e in (each["worst"], each["rms"])),
            *(each["right"], each.get("why")),
        ]
        for each in found
    ]
    print(table("Errors relative to the RMS of the float64 oracle", columns, rows))
    if not all(each["right"] for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
