"""Language models of transformers as ONNX files that generate token by token.

Legend: B batch, S new tokens, P tokens in the cache, V vocabulary, G heads of keys and values,
C width of such a head.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from dynamo_moe.evaluation import check_model, evaluating
from dynamo_moe.export_report import ExportReport
from dynamo_moe.exporting import ExportError, export
from dynamo_moe.files.inputs import DrawnCase
from dynamo_moe.private.pytorch import without_values
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing import failures
from dynamo_moe.tracing.dynamic_shapes import BATCH
from dynamo_moe.weights import placeholders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Task = Literal["text-generation-with-past", "text-generation", "feature-extraction"]
TASKS: tuple[str, ...] = get_args(Task)

# B, S and P of the cases that a file is verified with.
# The last is longer than the chunks in which linear attention is computed.
_VERIFIED = ((1, 5, 0), (3, 1, 6), (2, 4, 3), (2, 33, 0), (2, 2, 40), (1, 130, 0))
# A task's first output.
_RESULTS = {
    "text-generation-with-past": "logits",
    "text-generation": "logits",
    "feature-extraction": "last_hidden_state",
}
# Held while a forward is replaced or restored.
_REPLACING = Lock()


def export_language_model(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    task: Task = "text-generation-with-past",
    **options: Any,
) -> ExportReport:
    """Exports a language model of transformers, after :func:`convert`. B, S and P are symbolic.

    - ``text-generation-with-past``: one file for the prompt (P = 0) and every further token. Its
      inputs: ``input_ids`` ``[B, S]`` int64; ``attention_mask`` ``[B, P + S]`` int64, 0 for
      padding, which is on the left; ``past_key_values.0.key`` ``[B, G, P, C]``,
      ``past_key_values.0.value``, and so on for every layer. Its outputs: ``logits``
      ``[B, S, V]``; ``present.0.key`` ``[B, G, P + S, C]``, ``present.0.value``, … to be the next
      call's ``past_key_values``.
    - ``text-generation``: from ``input_ids`` and ``attention_mask`` ``[B, S]`` to ``logits``.
    - ``feature-extraction``: from the same to ``last_hidden_state`` ``[B, S, D]``.

    Args:
        model: A model in memory, or one opened by :func:`open_checkpoint`.
        path: The file to write.
        task: One of the above.
        options: ``target``, ``body``, ``opset``, ``external_data``, ``link_weights``,
            ``layers_as_functions``, ``repeated_blocks``, ``progress`` and ``profile`` of
            :func:`export`.

    Returns:
        What was written.

    Raises:
        ValueError: If the task is unknown, or is ``text-generation-with-past`` and the model's
            cache holds more than keys and values of attention, such as the states of a
            state-space model.
        TypeError: If the model is not a module.
        ExportError: If PyTorch's exporter cannot take the model.
    """
    check_model(model)
    with performing(model, task):
        case = example_case(model)
        inputs, outputs = ["input_ids", "attention_mask"], [_RESULTS[task]]
        dynamic: dict[str, Any] = {name: {1: "sequence"} for name in inputs}
        if "past_key_values" in case:
            layers, layer = len(case["past_key_values"]), {0: BATCH, 2: "past"}
            dynamic["attention_mask"] = {1: "total_sequence"}
            dynamic["past_key_values"] = [(layer, layer)] * layers
            inputs += _cache_names("past_key_values", layers)
            outputs += _cache_names("present", layers)
        return export(
            model,
            (),
            path,
            kwargs=case,
            dynamic_shapes=dynamic,
            input_names=inputs,
            output_names=outputs,
            **options,
        )


@contextlib.contextmanager
def performing(model: PreTrainedModel, task: Task) -> Iterator[None]:
    """Inside the context, the model's forward takes and returns what its file for a task does.

    For ``text-generation-with-past`` that is ``forward(input_ids, attention_mask,
    past_key_values)``, with a list of (keys, values) per layer; it returns (logits, list of (keys,
    values)). For the others ``forward(input_ids, attention_mask)`` returns one tensor. Contexts of
    one task may overlap, also in several threads; the last to end restores the forward.
    :func:`verify` does this itself.

    Raises:
        ValueError: As :func:`export_language_model`.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    with _REPLACING:
        performed: Any = model.forward
        if getattr(performed, "task", None) != task:
            if task == "text-generation-with-past":
                performed = _with_past(model)
            else:
                performed = _without_past(model, _RESULTS[task])
            performed.task, performed.contexts = task, 0
            performed.original = vars(model).get("forward")  # accelerate's hooks set one.
            model.forward = performed
        performed.contexts += 1
    try:
        yield
    finally:
        with _REPLACING:
            performed.contexts -= 1
            if not performed.contexts:
                del model.forward
                if performed.original is not None:
                    model.forward = performed.original


def task_of(model: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> Task | None:
    """Returns the task of a file with these inputs and outputs; None if the model has none."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    if list(inputs[:2]) != ["input_ids", "attention_mask"] or not outputs:
        return None
    layers = len(outputs) // 2
    if layers and list(outputs[1:]) == _cache_names("present", layers):
        return "text-generation-with-past" if outputs[0] == "logits" else None
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    tasks: tuple[Task, ...] = ("text-generation", "feature-extraction")
    return next((task for task in tasks if outputs[0] == _RESULTS[task]), None)


def verification_cases(model: PreTrainedModel) -> list[DrawnCase]:
    """Returns cases for a model within :func:`performing`: a prompt, a step, a part of a prompt.

    Where the task has a cache, parts of prompts have padding in it; where it has none, a prompt has
    padding on either side. The last are longer, and optional: a model may have fewer positions.
    """
    cases = [example_case(model, *sizes) for sizes in _VERIFIED]
    masks = [case["attention_mask"] for case in cases]
    if "past_key_values" in cases[0]:
        masks[2][-1, :2] = masks[4][1, :3] = 0
    else:
        masks[3][0, :30] = masks[3][1, 20:] = 0
    return [
        DrawnCase(
            case,
            optional=number > 2,
            kept=case["attention_mask"][:, -case["input_ids"].shape[1] :] == 1,
        )
        for number, case in enumerate(cases)
    ]


def example_case(
    model: PreTrainedModel, batch: int = 2, new: int = 3, cached: int = 4
) -> dict[str, Any]:
    """Returns random arguments of the model's forward, the same every time.

    Args:
        model: The model, within :func:`performing`.
        batch: B.
        new: S.
        cached: P; for a task with a cache.
    """
    generator = torch.Generator().manual_seed(0)
    past = "past_key_values" in inspect.signature(model.forward).parameters
    cached = cached if past else 0
    vocabulary = model.config.get_text_config().vocab_size
    case: dict[str, Any] = {
        "input_ids": torch.randint(vocabulary, (batch, new), generator=generator),
        "attention_mask": torch.ones(batch, cached + new, dtype=torch.int64),
    }
    if past:
        case["past_key_values"] = [
            tuple(
                torch.randn(batch, heads, cached, width, generator=generator).to(dtype)
                for heads, width, dtype in layer
            )
            for layer in _cache_shapes(model)
        ]
    return case


def _cache_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def _with_past(model: PreTrainedModel) -> Callable[..., Any]:
    from transformers import DynamicCache

    _check_cache(model)
    original = model.forward
    takes_positions = "position_ids" in inspect.signature(original).parameters

    def forward(
        input_ids: Tensor, attention_mask: Tensor, past_key_values: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        _check_sizes(input_ids, past_key_values)
        cache = DynamicCache()
        layers: list[Any] = [_filled(*layer) for layer in past_key_values]
        cache.layers = layers
        options: dict[str, Any] = {}
        if takes_positions:
            # As generate() does: padding on the left does not count.
            positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
            options["position_ids"] = positions[:, -input_ids.shape[1] :]
        options |= {"past_key_values": cache, "use_cache": True}
        result = original(input_ids=input_ids, attention_mask=attention_mask, **options)
        return result.logits, [(layer.keys, layer.values) for layer in layers]

    return forward


def _check_sizes(input_ids: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Checks that B and P are those of all layers: a trace then has one symbol for each."""
    for part in (part for layer in past for part in layer):
        if part.shape[0] != input_ids.shape[0] or part.shape[2] != past[0][0].shape[2]:
            raise ValueError("past_key_values differ in their batch or length")


def _without_past(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    original = model.forward
    takes_cache = "use_cache" in inspect.signature(original).parameters
    options = {"use_cache": False} if takes_cache else {}

    def forward(input_ids: Tensor, attention_mask: Tensor) -> Any:
        outputs = original(input_ids=input_ids, attention_mask=attention_mask, **options)
        return getattr(outputs, name)

    return forward


def _filled(keys: Tensor, values: Tensor) -> Any:
    """A cache layer that holds all tokens: the mask hides what a sliding window does not see."""
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()  # type: ignore[no-untyped-call]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _check_cache(model: PreTrainedModel) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"layer {number} of {type(model).__name__} keeps more than keys and values between "
                f"tokens ({type(layer).__name__}): use task text-generation"
            )


def _cache_shapes(model: PreTrainedModel) -> list[list[tuple[int, int, torch.dtype]]]:
    """Per layer (heads, width, dtype) of keys and of values, found by a run without values."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with state_kept(model), placeholders.placeholders(model), evaluating(model), torch.no_grad():
        try:
            with without_values():
                _, layers = model.forward(ids, torch.ones_like(ids), [])
        except Exception as error:  # The model's own code runs.
            raise ExportError(failures.explain(error)) from error
    return [[(part.shape[1], part.shape[3], part.dtype) for part in layer] for layer in layers]
