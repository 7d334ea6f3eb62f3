"""Models to train, export and measure."""

from dynamo_moe.models.dropless_mlp import DroplessMoEMlp
from dynamo_moe.models.swin_moe import (
    SwinMoE,
    SwinMoEConfig,
    swin_moe_cifar,
    swin_moe_digits,
    swin_moe_tiny,
)

__all__ = [
    "DroplessMoEMlp",
    "SwinMoE",
    "SwinMoEConfig",
    "swin_moe_cifar",
    "swin_moe_digits",
    "swin_moe_tiny",
]
