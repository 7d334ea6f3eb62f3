"""What a model's forward takes and returns while a file of a role is made or compared.

Legend: B batch, S new tokens, P tokens in the cache, L = P + S.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Condition, get_ident
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor

from dynamo_moe.files.cache_entries import PAST_LENGTH
from dynamo_moe.files.model_parts import FILES, PartName, PartTask
from dynamo_moe.language_models.caches import ModelCache, Past, cache_argument
from dynamo_moe.language_models.encoders import EncoderParts
from dynamo_moe.language_models.parts import Parts
from dynamo_moe.language_models.pictures import PictureParts
from dynamo_moe.tracing.exportable_models import exportable_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FileTask = Literal["text-generation-with-past", "text-generation", "feature-extraction"]
Task = FileTask | PartTask
TASKS: tuple[str, ...] = (*get_args(FileTask), *get_args(PartTask))
Role = FileTask | PartName
"""What a file does: a task, or one of the parts of one."""

RESULTS: dict[Role, str] = {
    "text-generation-with-past": "logits",
    "text-generation": "logits",
    "feature-extraction": "last_hidden_state",
}
"""What the file of a task gives first."""

# Held while a forward is replaced or restored.
_REPLACING = Condition()


@contextlib.contextmanager
def performing(
    model: PreTrainedModel,
    role: Role,
    *,
    bounded_windows: bool = False,
    cache_length: int | None = None,
) -> Iterator[None]:
    """Inside the context, the model's forward takes and returns what its file for a role does.

    For ``text-generation-with-past`` that is ``forward(input_ids, attention_mask,
    past_key_values)``, with a tuple of tensors, such as (keys, values), for each layer that keeps
    some; it returns (logits, list of such tuples). With ``cache_length``, another argument is in
    front of ``past_key_values``: ``past_sequence_length``. For the other tasks of one file
    ``forward(input_ids, attention_mask)`` returns one tensor; the parts of a task of several files
    take and return what their files do. Contexts of one role may overlap, also in several threads;
    the last to end restores the forward. Those of other roles wait for that.
    :func:`verify` does this itself.

    Raises:
        ValueError: As :func:`export_language_model`, or if the same thread is in a context of
            another role.
    """
    if role not in RESULTS and role not in FILES:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {role!r}")
    form, thread = (role, bounded_windows, cache_length), get_ident()
    with _REPLACING:
        performed: Any = model.forward
        while getattr(performed, "form", form) != form:
            if thread in performed.threads:
                raise ValueError(
                    f"{type(model).__name__} performs {performed.form[0]!r} here: end that before "
                    f"{role!r}"
                )
            _REPLACING.wait()
            performed = model.forward
        if not hasattr(performed, "form"):
            if role in FILES:
                performed = _part(model, role, bounded_windows=bounded_windows)
            elif role == "text-generation-with-past":
                if model.config.is_encoder_decoder:
                    raise ValueError(
                        f"{type(model).__name__} has an encoder: use task "
                        "'text2text-generation-with-past'"
                    )
                performed = _with_past(
                    model, bounded_windows=bounded_windows, cache_length=cache_length
                )
            else:
                performed = _without_past(model, RESULTS[role])
            performed.form, performed.threads = form, []
            performed.original = vars(model).get("forward")  # accelerate's hooks set one.
            model.forward = performed
        performed.threads.append(thread)
    try:
        yield
    finally:
        with _REPLACING:
            performed.threads.remove(thread)
            if not performed.threads:
                del model.forward
                if performed.original is not None:
                    model.forward = performed.original
                _REPLACING.notify_all()


def is_of_transformers(model: torch.nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether transformers has made a model, which need not be installed."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def role_of(model: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> Role | None:
    """Returns the role of a file with these inputs and outputs; None if the model has none."""
    if not is_of_transformers(model):
        return None
    part = EncoderParts.role_of(inputs, outputs) or PictureParts.role_of(inputs, outputs)
    if part is not None:
        return part
    if list(inputs[:2]) != ["input_ids", "attention_mask"] or not outputs:
        return None
    kept = inputs[3:] if list(inputs[2:3]) == [PAST_LENGTH] else inputs[2:]
    past = [name.removeprefix("past_key_values.") for name in kept]
    if past and list(outputs[1:]) == [f"present.{name}" for name in past]:
        return "text-generation-with-past" if outputs[0] == "logits" else None
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    tasks: tuple[FileTask, ...] = ("text-generation", "feature-extraction")
    return next((task for task in tasks if outputs[0] == RESULTS[task]), None)


def cache_of(model: PreTrainedModel) -> ModelCache | None:
    """Returns the cache of a model within :func:`performing`; None if its task has none."""
    return getattr(model.forward, "cache", None)


def parts_of(model: PreTrainedModel) -> Parts | None:
    """Returns the parts of a model whose forward is one of them."""
    return getattr(model.forward, "parts", None)


class _Decoder:
    """A causal model that computes new tokens from what a cache keeps, or from nothing."""

    def __init__(self, model: PreTrainedModel, cache: ModelCache) -> None:
        self._forward = model.forward
        self._takes_positions = "position_ids" in inspect.signature(self._forward).parameters
        self._cache = cache

    def logits(
        self,
        tokens: dict[str, Tensor],
        attention_mask: Tensor,
        past_length: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the logits of new tokens: the last of the mask's, or those after the past."""
        (new,) = tokens.values()
        if self._takes_positions:
            # As generate() does: padding on the left does not count. These are the tokens before.
            positions = attention_mask.cumsum(-1) - attention_mask
            options.setdefault("position_ids", _of_new_tokens(positions, new, past_length))
        if past_length is not None and not self._cache.is_plain:
            # Linear attention reads the last columns as the new tokens', attention the first L.
            of_new = _of_new_tokens(attention_mask, new, past_length)
            attention_mask = torch.cat([attention_mask, of_new], dim=1)
        logits: Tensor = self._forward(**tokens, attention_mask=attention_mask, **options).logits
        return logits

    def logits_and_past(
        self,
        tokens: dict[str, Tensor],
        attention_mask: Tensor,
        past_key_values: Past,
        past_length: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Returns the logits of new tokens, and what the cache keeps after them."""
        (new,) = tokens.values()
        before = attention_mask.shape[1] - new.shape[1] if past_length is None else past_length
        before = self._cache.length_of(past_key_values, before)
        if self._cache.blocks:  # Their number says P: a longer mask would move the new tokens.
            attention_mask = attention_mask[:, : before + new.shape[1]]
        filled = self._cache.filled(past_key_values, before)
        options |= {cache_argument(self._forward): filled, "use_cache": True}
        with exportable_models():  # Some recurrences of transformers cannot go on from a state.
            logits = self.logits(tokens, attention_mask, past_length, **options)
        return logits, self._cache.held(filled)


def _of_new_tokens(x_BL: Tensor, new: Tensor, past_length: Tensor | None) -> Tensor:
    """Returns the columns of new tokens: the last ones, or those after the past."""
    if past_length is None:
        return x_BL[:, -new.shape[1] :]
    steps = torch.arange(new.shape[1], device=new.device)
    return x_BL.index_select(1, past_length + steps)


def _with_past(
    model: PreTrainedModel,
    *,
    bounded_windows: bool,
    cache_length: int | None = None,
    parts: PictureParts | None = None,
) -> Callable[..., Any]:
    cache = ModelCache(model, bounded_windows=bounded_windows, cache_length=cache_length)
    decoder = _Decoder(model, cache)

    def growing(
        input_ids: Tensor, attention_mask: Tensor, past_key_values: Past
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        return decoder.logits_and_past({"input_ids": input_ids}, attention_mask, past_key_values)

    def with_room(
        input_ids: Tensor,
        attention_mask: Tensor,
        past_sequence_length: Tensor,
        past_key_values: Past,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        tokens = {"input_ids": input_ids}
        return decoder.logits_and_past(
            tokens, attention_mask, past_key_values, past_sequence_length
        )

    def alone(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return decoder.logits({"input_ids": input_ids}, attention_mask, use_cache=False)

    performed: Any = growing if cache_length is None else with_room
    if parts is not None:
        performed = parts.decoding(decoder.logits_and_past)
    performed.alone = alone if parts is None else parts.decoding(decoder.logits, use_cache=False)
    performed.cache = cache
    replacement: Callable[..., Any] = performed
    return replacement


def _part(model: PreTrainedModel, part: PartName, *, bounded_windows: bool) -> Callable[..., Any]:
    parts: Parts
    if part == "encoder" or (part == "decoder" and model.config.is_encoder_decoder):
        parts = encoding = EncoderParts(model, part, bounded_windows=bounded_windows)
        if part == "decoder":
            performed: Any = encoding.decoding()
            performed.cache = encoding.cache
    else:
        parts = seeing = PictureParts(model, part)
        if part == "decoder":
            performed = _with_past(model, bounded_windows=bounded_windows, parts=seeing)
    if part != "decoder":
        performed = parts.performed()
    performed.parts, performed.unused = parts, parts.unused
    replacement: Callable[..., Any] = performed
    return replacement


def _without_past(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    original = model.forward
    takes_cache = "use_cache" in inspect.signature(original).parameters
    options = {"use_cache": False} if takes_cache else {}

    def forward(input_ids: Tensor, attention_mask: Tensor) -> Any:
        outputs = original(input_ids=input_ids, attention_mask=attention_mask, **options)
        if not hasattr(outputs, name):
            raise ValueError(f"{type(model).__name__} gives no {name}: choose another task")
        return getattr(outputs, name)

    return forward
