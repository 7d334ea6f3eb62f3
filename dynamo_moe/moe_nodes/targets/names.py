"""The names that users write; no import but ``typing``, since the command line needs them first."""

from __future__ import annotations

from typing import Literal, get_args

TargetName = Literal["plugin", "dense", "onnxruntime", "tensorrt_moe"]
BodyName = Literal["loop", "unrolled"]

BODIES: tuple[str, ...] = get_args(BodyName)

DEFAULT_TARGET: TargetName = "plugin"
DEFAULT_BODY: BodyName = "loop"
