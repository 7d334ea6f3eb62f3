"""All cases, by family."""

from public_moe import (
    dbrx,
    deepseek,
    gpt_fast,
    llama4,
    mistral,
    torchtitan,
    transformers4,
)
from public_moe.surroundings import Case

__all__ = ["CASES"]

CASES: list[Case] = [
    *transformers4.CASES,
    *mistral.CASES,
    *deepseek.CASES,
    *gpt_fast.CASES,
    *torchtitan.CASES,
    *llama4.CASES,
    *dbrx.CASES,
]
