"""An encoder, and the decoder that writes what it has read, as two parts.

The encoder's file gives the keys and values that each layer of the decoder's attention to the
encoder needs, so that no call of the decoder computes them again.

Legend: B batch, T tokens that the encoder reads, S new tokens, P tokens in the cache, G heads, C
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynamo_moe.evaluation import evaluating
from dynamo_moe.files.model_parts import ModelPart, PartName
from dynamo_moe.language_models.caches import ModelCache, Past, cache_argument, cross_attention
from dynamo_moe.language_models.parts import Parts, once
from dynamo_moe.model_graph import ExportError
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing import failures
from dynamo_moe.tracing.dynamic_shapes import BATCH
from dynamo_moe.tracing.exportable_models import exportable_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CROSS_ATTENTION = "cross_attention"
ENCODER_MASK = "encoder_attention_mask"
_IDS = "input_ids"
_ENCODED = "encoder_sequence"  # T.

# B and T of the encoder's cases. The last are beyond the distances that T5 tells apart.
_READ = ((2, 5), (1, 1), (3, 9), (4, 40), (2, 150))
# T of a decoder's cases, by S: none is in one relation to it.
_READ_BEFORE = {1: 9, 3: 11, 4: 11, 5: 1, 33: 40, 2: 150, 130: 7}
# The case that is compared with the whole model, and how many tokens it writes in two calls.
_COMPARED, _WRITTEN = (4, 9), (2, 1)


class EncoderParts(Parts):
    """The two parts of a model with an encoder.

    Attributes:
        cache: What the decoder keeps of its own tokens.
    """

    def __init__(
        self, model: PreTrainedModel, role: PartName, *, bounded_windows: bool = False
    ) -> None:
        """Finds what the decoder keeps of its tokens, and of what the encoder has read.

        Args:
            model: The model.
            role: The part that this one is about.
            bounded_windows: As of :class:`ModelCache`.

        Raises:
            ExportError: If the model does not run.
            ValueError: If it has no encoder of tokens, its decoder keeps nothing of it, or a file
                cannot keep what it does.
        """
        name = type(model).__name__
        if not model.config.is_encoder_decoder:
            raise ValueError(f"{name} has no encoder: choose another task")
        if model.main_input_name != _IDS:
            raise ValueError(f"the encoder of {name} takes {model.main_input_name}, not {_IDS}")
        self.model, self.role = model, role
        self._whole = model.forward
        whole: Any = model  # transformers does not annotate these.
        self._encoder, self._decoder = whole.get_encoder(), whole.get_decoder()
        self.unused = self._decoder if role == "encoder" else self._encoder
        self._layers, self._width = once((model, "cross attention"), lambda: cross_attention(model))
        if not self._layers:
            raise ValueError(f"the decoder of {name} keeps no keys of its encoder")
        self.cache = once(
            (model, "cache", bounded_windows),
            lambda: ModelCache(model, bounded_windows=bounded_windows),
        )

    @property
    def _start(self) -> int | None:
        """The token that a decoder's text begins with, as for transformers' ``generate``."""
        config = self.model.generation_config or self.model.config
        tokens = (getattr(config, x, None) for x in ("decoder_start_token_id", "bos_token_id"))
        first = next((token for token in tokens if token is not None), None)
        return first if isinstance(first, int) else None  # Each row may have its own.

    def described(self) -> ModelPart:
        """Returns what the part's file says of itself."""
        return ModelPart(self.role, decoder_start_token_id=self._start)

    # --- The example ---

    def cases(self) -> list[dict[str, Any]]:
        """Returns texts for the encoder, with padding anywhere."""
        return [self._read(*sizes) for sizes in _READ]

    def _vocabulary(self, part: nn.Module) -> int:
        """Returns how many tokens an encoder or a decoder knows."""
        owner: Any = part if hasattr(part, "get_input_embeddings") else self.model
        size: int = owner.get_input_embeddings().weight.shape[0]
        return size

    def _read(self, batch: int, tokens: int) -> dict[str, Any]:
        """Returns texts of which one is whole, and others have padding on a side, or within."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(self._vocabulary(self._encoder), (batch, tokens), generator=generator)
        mask = torch.ones_like(ids)
        if tokens > 4:
            mask[1:2, tokens // 2 :] = 0
            mask[2:3, : tokens // 3] = 0
            mask[3:4, 1 : tokens - 1 : 3] = 0
        return {_IDS: ids.flip(0), "attention_mask": mask.flip(0)}

    def decoder_case(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments of the decoder, but for its cache, instead of those of a text model."""
        batch, new = case[_IDS].shape
        tokens = _READ_BEFORE.get(new, 11)
        mask = self._read(batch, tokens)["attention_mask"]
        generator = torch.Generator().manual_seed(0)
        encoded = [
            torch.randn(batch, x.shape[1], tokens, x.shape[3], generator=generator).to(x.dtype)
            for layer in self._layers
            for x in layer
        ]
        ids = case[_IDS] % self._vocabulary(self._decoder)
        return {_IDS: ids, ENCODER_MASK: mask, CROSS_ATTENTION: encoded}

    def with_values(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns a decoder's arguments with keys and values of texts that the encoder has read.

        Scores of random ones are so large that the softmax of some rounds to one token.
        """
        read = self._read(*case[ENCODER_MASK].shape)
        with evaluating(self.model), torch.no_grad():
            return case | {CROSS_ATTENTION: self.performed()(**read)}

    def dimensions(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the names of a case's symbolic dimensions."""
        read = {0: BATCH, 1: _ENCODED}
        if self.role == "encoder":
            return dict.fromkeys(case, read)
        encoded = [{0: BATCH, 2: _ENCODED}] * len(case[CROSS_ATTENTION])
        return {ENCODER_MASK: read, CROSS_ATTENTION: encoded}

    @property
    def _names(self) -> list[str]:
        return [
            f"{CROSS_ATTENTION}.{number}.{kind}"
            for number in range(len(self._layers))
            for kind in ("key", "value")
        ]

    def names(self, case: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns the names of a case's tensors, and of the part's outputs, but for a cache."""
        if self.role == "encoder":
            return [*case], self._names
        inputs = [
            name for key in case for name in (self._names if key == CROSS_ATTENTION else [key])
        ]
        return inputs, ["logits"]

    @staticmethod
    def role_of(inputs: Sequence[str], outputs: Sequence[str]) -> PartName | None:
        """Returns the part whose file has these inputs and outputs; None: another file."""
        first = f"{CROSS_ATTENTION}.0.key"
        if [*inputs] == [_IDS, "attention_mask"] and [*outputs[:1]] == [first]:
            return "encoder"
        if [*inputs[:3]] == [_IDS, ENCODER_MASK, first] and [*outputs[:1]] == ["logits"]:
            return "decoder"
        return None

    # --- The parts ---

    def performed(self) -> Callable[..., Any]:
        """Returns a forward of the encoder: ``[B, G, T, C]`` for each key and value.

        The model's own decoder makes them, of a token whose results nothing uses.
        """

        def encoder(input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
            from transformers import DynamicCache, EncoderDecoderCache

            cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
            self._whole(
                encoder_outputs=self._encoder(input_ids, attention_mask=attention_mask),
                attention_mask=attention_mask,
                decoder_input_ids=torch.zeros_like(input_ids[:, :1]),
                use_cache=True,
                **{cache_argument(self._whole): cache},
            )
            layers = cache.cross_attention_cache.layers
            return [x for layer in layers for x in (layer.keys, layer.values)]

        return encoder

    def decoding(self) -> Callable[..., Any]:
        """Returns a forward of the decoder."""
        cache = self.cache

        def decoder(
            input_ids: Tensor,
            encoder_attention_mask: Tensor,
            cross_attention: Sequence[Tensor],
            past_key_values: Past,
        ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
            from transformers import DynamicCache, EncoderDecoderCache
            from transformers.modeling_outputs import MoEModelOutput

            before = cache.length_of(past_key_values, 0)
            kept = cache.filled(past_key_values, before)
            encoded: Any = DynamicCache()
            pairs = zip(cross_attention[::2], cross_attention[1::2], strict=True)
            for number, (keys, values) in enumerate(pairs):
                encoded.update(keys, values, number)
            batch, new = input_ids.shape
            # Attention asks for its shape, and takes the keys.
            read = encoded.layers[0].keys.new_zeros(*encoder_attention_mask.shape, self._width)
            with exportable_models():
                outputs = self._whole(
                    encoder_outputs=MoEModelOutput(last_hidden_state=read),
                    attention_mask=encoder_attention_mask,
                    decoder_input_ids=input_ids,
                    decoder_attention_mask=encoder_attention_mask.new_ones(batch, before + new),
                    use_cache=True,
                    **{cache_argument(self._whole): EncoderDecoderCache(kept, encoded)},
                )
            if not hasattr(outputs, "logits"):
                raise ValueError(
                    f"{type(self.model).__name__} gives no logits: choose another task"
                )
            return outputs.logits, cache.held(kept)

        return decoder

    # --- Are these the model? ---

    def check(self) -> None:
        """Compares what the parts compute with what the whole model does, with its own caches.

        Raises:
            ExportError: If the model does not run.
            ValueError: If it differs.
        """
        model, name = self.model, type(self.model).__name__
        case = self._read(*_COMPARED)
        text = (case[_IDS] % self._vocabulary(self._decoder))[:, : sum(_WRITTEN)].split(
            _WRITTEN, dim=1
        )
        with state_kept(model), evaluating(model), torch.no_grad():
            try:
                got, expected = self._written_by_parts(case, text), self._written(case, text)
            except ValueError:
                raise
            except Exception as error:  # The model's own code runs.
                raise ExportError(failures.explain(error)) from error
        if not self.agree(got, expected):
            raise ValueError(f"{name} computes other logits than its encoder and decoder by parts")

    def _written_by_parts(self, case: dict[str, Any], text: Sequence[Tensor]) -> Tensor:
        """Returns the logits of a text in several calls."""
        encoded = self.performed()(**case)
        past, results = self.cache.empty(len(text[0])), []
        for new in text:
            logits, past = self.decoding()(new, case["attention_mask"], encoded, past)
            results.append(logits)
        return torch.cat(results, 1)

    def _written(self, case: dict[str, Any], text: Sequence[Tensor]) -> Tensor:
        """Returns the whole model's."""
        kept, results = None, []
        read = self._encoder(case[_IDS], attention_mask=case["attention_mask"])
        name = cache_argument(self._whole)
        for new in text:
            outputs = self._whole(
                encoder_outputs=read,
                attention_mask=case["attention_mask"],
                decoder_input_ids=new,
                use_cache=True,
                **{name: kept},
            )
            kept = getattr(outputs, name)
            results.append(outputs.logits)
        return torch.cat(results, 1)
