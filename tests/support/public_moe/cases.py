"""All cases, by family."""

from public_moe import (
    davidmrau,
    dbrx,
    deepseek,
    deepspeed,
    dense,
    dropless,
    fastmoe,
    gpt_fast,
    left_alone,
    llama4,
    lucidrains,
    makemoe,
    megablocks,
    mistral,
    named,
    remote_code,
    sequential,
    swin_moe,
    torchtitan,
    transformers4,
    tutel,
    vision,
)
from public_moe.surroundings import Case

__all__ = ["CASES"]

CASES: list[Case] = [
    *transformers4.CASES,
    *named.CASES,
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
    *remote_code.CASES,
    *davidmrau.CASES,
    *lucidrains.CASES,
    *dense.CASES,
    *megablocks.CASES,
    *deepspeed.CASES,
    *vision.CASES,
    *left_alone.CASES,
]
