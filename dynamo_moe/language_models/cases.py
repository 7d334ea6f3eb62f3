"""Arguments of a model within :func:`performing`: an example, cases to verify with, a check.

Legend: B batch, S new tokens, P tokens in the cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dynamo_moe.evaluation import evaluating
from dynamo_moe.files.cache_entries import MASK, PAST_LENGTH
from dynamo_moe.files.inputs import DrawnCase
from dynamo_moe.files.model_parts import PartName
from dynamo_moe.language_models.caches import ModelCache, Past
from dynamo_moe.language_models.forwards import (
    cache_of,
    is_of_transformers,
    parts_of,
    performing,
)
from dynamo_moe.process_state import exclusive
from dynamo_moe.restoring import state_kept
from dynamo_moe.tolerances import tolerance_for
from dynamo_moe.weights.lazy_tensors import LazyTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_ROOM = 8
"""The fewest tokens that a cache of a fixed length has room for: more than the example's 7."""

# B, S and P of the cases that a file is verified with. LEAST_ROOM holds the first three.
# The last is longer than the chunks in which linear attention is computed.
_VERIFIED = ((1, 5, 0), (3, 1, 6), (2, 4, 3), (2, 33, 0), (2, 2, 40), (1, 130, 0))
_NEEDED = 2  # Those behind it are longer than a model may take.
# Of those with a cache, the tokens of the last row that are padding.
_PADDING = {2: 2, 4: 3}


def example_case(
    model: PreTrainedModel, batch: int = 2, new: int = 3, cached: int | None = None
) -> dict[str, Any]:
    """Returns random arguments of the model's forward, the same every time.

    Args:
        model: The model, within :func:`performing`.
        batch: B.
        new: S.
        cached: P, for a task with a cache; None: as many as its trace needs.
    """
    generator = torch.Generator().manual_seed(0)
    cache = cache_of(model)
    parts = parts_of(model)
    if parts is not None and cache is None:
        return parts.cases()[0]
    if cache is None:
        cached = 0
    elif cached is None:
        cached = cache.example_length
    if cache is not None and cache.length is not None:
        cached = min(cached, cache.length - new)
        if cached < 0:
            raise ValueError(f"cache_length must be at least {new}, got {cache.length}")
    vocabulary = model.config.get_text_config().vocab_size
    case: dict[str, Any] = {
        "input_ids": torch.randint(vocabulary, (batch, new), generator=generator),
        "attention_mask": torch.ones(batch, cached + new, dtype=torch.int64),
    }
    if cache is not None and cache.length is not None:
        after = cache.length - cached - new
        case["attention_mask"] = F.pad(case["attention_mask"], (0, after))
        case[PAST_LENGTH] = torch.tensor([cached])
    if parts is not None:
        case = parts.decoder_case(case)
    if cache is not None:
        case["past_key_values"] = cache.random(batch, cached, generator)
    return case


def example_length(model: PreTrainedModel) -> int:
    """Returns S of the example: several chunks of a state space, as a trace knows one too well."""
    sizes = [getattr(module, "chunk_size", None) for module in model.modules()]
    return 3 + max((size for size in sizes if isinstance(size, int)), default=0)


def verification_cases(model: PreTrainedModel, *, one_goes_on: bool = False) -> list[DrawnCase]:
    """Returns cases for a model within :func:`performing`: a prompt, a step, a part of a prompt.

    Where the task has a cache, parts of prompts have padding in it; where it has none, a prompt has
    padding on either side. The last are longer, and optional: a model may have fewer positions.
    A cache of more than keys and values holds what the model has left in it after a prompt. Where
    it compresses blocks of tokens, a token, some, and more than a block of each kind fill some.

    Args:
        model: The model.
        one_goes_on: Whether a file takes several tokens after others of one sequence alone.
    """
    parts, cache = parts_of(model), cache_of(model)
    if parts is not None and cache is None:
        return [
            DrawnCase(case, number > _NEEDED, case[MASK] == 1 if MASK in case else None)
            for number, case in enumerate(parts.cases())
        ]
    check_cache(model)
    drawn = []
    sizes = [*_VERIFIED]
    for block in [] if cache is None else cache.blocks:
        sizes += [(1, 1, block - 1), (1, 3, 2 * block - 2), (2, block + 2, block + 1)]
    for number, (batch, new, past) in enumerate(sizes):
        if cache is None:
            case = example_case(model, batch, new)
            mask, first = case[MASK], 0
            if number == 3:
                mask[0, :30] = mask[1, 20:] = 0
        else:
            if cache.length is not None and past + new > cache.length:
                continue
            only = one_goes_on and new > 1 and past > 0
            case = example_case(model, 1 if only else batch, new, past)
            if parts is not None:
                try:
                    case = parts.with_values(case)
                except Exception:  # The model's own code runs.
                    if number > _NEEDED:
                        continue
                    raise
            mask = case.get(MASK)  # A decoder behind an encoder has none.
            if mask is not None:
                mask[-1, : _PADDING.get(number, 0)] = 0
            if not cache.is_plain:
                case["past_key_values"] = _past_of(model, cache, case, past)
            first = past
        kept = None if mask is None else mask[:, first : first + new] == 1
        drawn.append(DrawnCase(case, optional=number > _NEEDED, kept=kept))
    return drawn


def _past_of(model: PreTrainedModel, cache: ModelCache, case: dict[str, Any], past: int) -> Past:
    """Returns what a model keeps of random tokens before a case's own."""
    batch = len(next(iter(case.values())))
    empty = cache.empty(batch)
    if not past:
        return empty
    prompt = example_case(model, batch, past, 0)
    if MASK in case:
        prompt[MASK] = case[MASK][:, :past]
    with evaluating(model), torch.no_grad():
        kept: Past = model.forward(**prompt | {"past_key_values": empty})[1]
    return kept


def check_cache(model: PreTrainedModel) -> None:
    """Checks that a model computes with its cache what it does without, if weights have values.

    States of zeros may not stand for no tokens; and a model may not expect keys of tokens to come.

    Raises:
        ValueError: If the model computes something else without a cache.
    """
    cache = cache_of(model)
    if cache is None or not has_values(model):
        return
    forward: Any = model.forward
    if cache.length is not None:
        calls, case = _in_two_calls(example_case(model, 1, min(33, cache.length), 0))
    elif cache.blocks:
        calls, case = _by_blocks(example_case(model, 1, 2 * max(cache.blocks) + 2, 0), cache.blocks)
    elif all(kept.holds_tokens for kept in cache.tensors):
        return
    else:
        case = example_case(model, 1, 5, 0)
        del case["past_key_values"]
        calls = [case]
    with state_kept(model), evaluating(model), torch.no_grad():
        past, results = cache.empty(1), []
        for call in calls:
            logits, past = forward(**call | {"past_key_values": past})
            results.append(logits)
        begun = torch.cat(results, 1).float()
        alone = forward.alone(**case).float()
    error = (begun - alone).square().mean().sqrt() / alone.square().mean().sqrt()
    if error > tolerance_for({x.dtype for x in model.parameters()}).rms:
        if cache.length is not None:
            raise ValueError(
                f"{type(model).__name__} computes something else with a cache of a fixed length "
                f"(its logits differ by {error:.1e}), as a model does that takes the number of "
                "keys for that of the tokens so far: leave out cache_length"
            )
        if cache.blocks:
            raise ValueError(
                f"{type(model).__name__} computes something else with its cache than without (its "
                f"logits differ by {error:.1e}): use task text-generation"
            )
        raise ValueError(
            f"{type(model).__name__} begins with states that are not zeros (with zeros, its logits "
            f"differ by {error:.1e}): use task text-generation"
        )


def _by_blocks(
    case: dict[str, Any], blocks: list[int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns a prompt in calls that end around the first block of each kind, and in one."""
    ids, mask = case["input_ids"], case["attention_mask"]
    ends = sorted({0, 1, ids.shape[1], *(n + more for n in blocks for more in (-1, 0, 2))})
    calls = [
        {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end]}
        for begin, end in pairwise(ends)
    ]
    return calls, {"input_ids": ids, "attention_mask": mask}


def _in_two_calls(case: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns a prompt in two calls of a cache of a fixed length, and in one without a cache."""
    ids = case["input_ids"]
    length = ids.shape[1]
    calls = []
    for begin, end in ((0, length - 2), (length - 2, length)):
        mask = torch.zeros_like(case["attention_mask"])
        mask[:, :end] = 1
        call = {"input_ids": ids[:, begin:end], "attention_mask": mask}
        calls.append(call | {PAST_LENGTH: torch.tensor([begin])})
    return calls, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_parts(model: torch.nn.Module, first: PartName) -> None:
    """Compares the parts of a model of transformers with the whole, if weights have values.

    Raises:
        ExportError: If the model does not run.
        ValueError: If they compute something else.
    """
    if is_of_transformers(model) and has_values(model):
        with performing(model, first), exclusive():
            parts = parts_of(model)
            if parts is not None:
                parts.check()


def has_values(model: PreTrainedModel) -> bool:
    """Whether a model can run where it is."""
    return not any(isinstance(x, LazyTensor) or x.device.type != "cpu" for x in model.parameters())
