"""All cases, by family."""

from public_moe import (
    dbrx,
    deepseek,
    dropless,
    fastmoe,
    gpt_fast,
    llama4,
    makemoe,
    mistral,
    sequential,
    swin_moe,
    torchtitan,
    transformers4,
    tutel,
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
    *makemoe.CASES,
    *sequential.CASES,
    *dropless.CASES,
    *fastmoe.CASES,
    *tutel.CASES,
    *swin_moe.CASES,
]
