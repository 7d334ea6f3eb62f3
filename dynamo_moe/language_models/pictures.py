"""A model that sees pictures, as three parts that run one after another.

They are found by the names that transformers gives them in all its models, and compared with the
whole model.

Legend: B batch, S new tokens, I pictures, F tokens that stand for parts of pictures, D width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dynamo_moe import pytree
from dynamo_moe.evaluation import evaluating
from dynamo_moe.files.model_parts import GRID, ModelPart, PartName, grid_positions
from dynamo_moe.language_models.parts import Parts
from dynamo_moe.model_graph import ExportError
from dynamo_moe.private import transformers as private
from dynamo_moe.private.pytorch import is_exporting, without_values
from dynamo_moe.restoring import state_kept
from dynamo_moe.tracing import failures
from dynamo_moe.tracing.packed_pictures import (
    listed_pictures,
    packed_pictures,
    unsplit_pictures,
)
from dynamo_moe.weights import placeholders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEATURES = "image_features"
EMBEDS = "inputs_embeds"
_VISION = "get_image_features"
# Column and row of each patch, of pictures with as many patches each.
_PLACES = "image_position_ids"
# 1 where a token stands for a part of a picture, whose tokens see one another.
_TYPES = "token_type_ids"
_SEE_ONE_ANOTHER = ("gemma3",)  # Others have it in their text's config.
_MODEL_TYPES = ("mm_token_type_ids", "token_type_ids")
# What the first layers add to their hidden states, of pictures' tokens and of all tokens.
_ADDED_FEATURES, _ADDED_EMBEDS = "deepstack_features", "deepstack_embeds"
# What a decoder gets that its file does without, or gets by another name.
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "cache", EMBEDS}
_ADDED = {"visual_pos_masks", "deepstack_visual_embeds"}
# The first input and output of each part's file.
_FIRST: dict[PartName, str] = {
    "vision": "pixel_values",
    "embedding": "input_ids",
    "decoder": EMBEDS,
}
_RESULTS: dict[PartName, str] = {"vision": FEATURES, "embedding": EMBEDS, "decoder": "logits"}
# Rows and columns of the example's pictures, as tokens.
_SIZES = ((2, 3), (4, 2))
# The first layer of a vision tower, and what a config calls the rows that make a token.
_PROJECTIONS = (nn.Conv3d, nn.Conv2d, nn.Linear)
_MERGED = ("spatial_merge_size", "merge_size", "merge_kernel_size")


class PictureParts(Parts):
    """The parts of a model that sees pictures.

    Attributes:
        model: The model.
        role: The part that this one is about.
        decoder: What computes hidden states of embeddings in it.
        pictures: An example of what the vision takes: ``pixel_values``, and what goes with them.
        added: How many further features are added to the decoder's hidden states, one behind each
            of its first layers.
        positions: How the decoder counts tokens, as in :class:`ModelPart`.
    """

    def __init__(self, model: PreTrainedModel, role: PartName) -> None:
        """Finds the parts.

        Args:
            model: The model.
            role: The part that this one is about.

        Raises:
            ExportError: If its vision does not run.
            ValueError: If it sees no pictures, or takes more than a file of a part can.
        """
        name = type(model).__name__
        self.model, self.role = model, role
        self._whole = model.forward
        owner = next((x for x in (model, model.base_model) if hasattr(x, _VISION)), None)
        token = _config_value(model.config, "image_token_id", "image_token_index")
        if owner is None or token is None:
            raise ValueError(f"{name} sees no pictures: choose another task")
        self._features: Callable[..., Any] = getattr(owner, _VISION)
        whole: Any = model  # transformers does not annotate these.
        self._tower = whole.get_encoder(modality="image")
        self.decoder: nn.Module = whole.get_decoder()
        self._token = int(token)
        # Of whose experts an export does not warn.
        self.unused = None if role == "decoder" else self.decoder
        embedding: Any = model.get_input_embeddings()
        self._dtype = embedding.weight.dtype
        parameters = inspect.signature(self._features).parameters
        self._is_packed, self._has_places = GRID in parameters, _PLACES in parameters
        needed = [
            key
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and key not in ("pixel_values", GRID)
        ]
        if needed:
            raise ValueError(f"{name} takes {', '.join(needed)} with its pictures")
        is_grid = any(hasattr(x, "get_rope_index") for x in (model, model.base_model))
        merged = _config_value(model.config.vision_config, *_MERGED) or 1
        self._merged = (merged, merged) if isinstance(merged, int) else tuple(merged)
        self._block = math.prod(self._merged)
        self.positions: Literal["text", "grid"] = "grid" if is_grid else "text"
        self._types = self._argument_of_types()
        self.pictures, features = self._understood()
        self.added = len(features) - 1

    def _argument_of_types(self) -> str | None:
        """Returns the argument that says which tokens are a picture's, if these see one another."""
        config = self.model.config
        sees = _config_value(config.get_text_config(), "use_bidirectional_attention")
        if sees != "vision" and config.model_type not in _SEE_ONE_ANOTHER:
            return None
        parameters = inspect.signature(self._whole).parameters
        return next(name for name in _MODEL_TYPES if name in parameters)

    def _understood(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns an example of pictures that the vision takes, and features without values."""
        model = self.model
        if self._is_packed:
            examples = self._packed_examples()
        else:
            examples = [self._example_of_places() if self._has_places else self._example()]
        with state_kept(model), placeholders.placeholders(model), evaluating(model):
            for number, example in enumerate(examples):
                try:
                    with without_values(unknown_sizes=True), torch.no_grad():
                        copied = {key: value.clone() for key, value in example.items()}
                        return example, self.vision(**copied)
                except Exception as error:  # The model's own code runs.
                    if number == len(examples) - 1:
                        raise ExportError(failures.explain(error)) from error
        raise AssertionError

    def described(self) -> ModelPart:
        """Returns what the part's file says of itself."""
        merged = self._merged[0] if self.positions == "grid" else 1
        return ModelPart(self.role, self._token, self.positions, merged)

    # --- The example ---

    def _packed_examples(self) -> list[dict[str, Tensor]]:
        """Returns patches of two pictures, one after another, as they are or as a row each."""
        layers = [x for kind in _PROJECTIONS for x in self._tower.modules() if isinstance(x, kind)]
        rows_merged, columns_merged = self._merged
        sizes = [[1, rows * rows_merged, columns * columns_merged] for rows, columns in _SIZES]
        grids = torch.tensor(sizes)
        patch = layers[0].weight.shape[1:]
        shapes = dict.fromkeys([(patch.numel(),), tuple(patch)])
        count = int(grids.prod(-1).sum())
        return [{"pixel_values": _random(count, *shape), GRID: grids} for shape in shapes]

    def _example_of_places(self) -> dict[str, Tensor]:
        """Returns two pictures of as many patches, those that the second lacks at (-1, -1)."""
        config = self.model.config.vision_config
        pooled = config.pooling_kernel_size
        count = max(rows * columns for rows, columns in _SIZES) * pooled**2
        places = torch.full((len(_SIZES), count, 2), -1)
        for places_N2, (rows, columns) in zip(places, _SIZES, strict=True):
            of_all = torch.cartesian_prod(
                torch.arange(rows * pooled), torch.arange(columns * pooled)
            )
            places_N2[: len(of_all)] = of_all.flip(1)
        pixels = _random(len(_SIZES), count, 3 * config.patch_size**2)
        return {"pixel_values": pixels * (places[..., :1] >= 0), _PLACES: places}

    def _example(self) -> dict[str, Tensor]:
        """Returns two pictures of the one size that the vision takes."""
        config = self.model.config.vision_config
        size = _config_value(config, "image_size")
        if size is None:
            raise ValueError(
                f"the config of {type(self.model).__name__} does not say which pictures it takes: "
                "it has no image_size"
            )
        sides = (size, size) if isinstance(size, int) else size
        channels = _config_value(config, "num_channels", "in_channels") or 3
        return {"pixel_values": _random(2, channels, *sides)}

    def cases(self) -> list[dict[str, Any]]:
        """Returns several: two pictures, one, and for the embedding none, as in further tokens."""
        if self.role == "vision":
            alone = {key: value[:1] for key, value in self.pictures.items()}
            if self._is_packed:
                alone["pixel_values"] = self.pictures["pixel_values"][: int(alone[GRID].prod())]
            return [dict(self.pictures), alone]
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        cases = []
        for seen in ((2, 3), (0, 4), (0, 0)):  # By row.
            ids = torch.randint(vocabulary, (2, 7), generator=generator)
            ids[ids == self._token] = 1 if self._token != 1 else 2
            ids[:, -1] = self._token
            for row, count in zip(ids, seen, strict=True):
                row[1 : 1 + count] = self._token
            width = self.model.config.get_text_config().hidden_size
            rows = [
                torch.randn(sum(seen), width, generator=generator) for _ in range(1 + self.added)
            ]
            case: dict[str, Any] = {"input_ids": ids, FEATURES: rows[0].to(self._dtype)}
            if self.added:
                case[_ADDED_FEATURES] = [row.to(self._dtype) for row in rows[1:]]
            cases.append(case)
        return cases

    def decoder_case(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments of the decoder, but for its cache, instead of those of a text model."""
        generator = torch.Generator().manual_seed(0)
        ids, mask = case["input_ids"], case["attention_mask"]
        shape = *ids.shape, self.model.config.get_text_config().hidden_size
        embeds = torch.randn(shape, generator=generator).to(self._dtype)
        made: dict[str, Any] = {EMBEDS: embeds, "attention_mask": mask}
        if self.positions == "grid":
            first = mask.shape[1] - ids.shape[1]
            steps = torch.randint(2, (3, *ids.shape), generator=generator).cumsum(-1)
            made["position_ids"] = first + steps
        if self._types is not None:
            made[_TYPES] = torch.randint(2, ids.shape, generator=generator)
        if self.added:
            made[_ADDED_EMBEDS] = [
                torch.randn(shape, generator=generator).to(self._dtype) for _ in range(self.added)
            ]
        return made

    def dimensions(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the names of a case's symbolic dimensions."""
        if self.role == "vision":
            rows = "patches" if self._is_packed else "images"
            sizes = {key: {0: "images"} for key in case} | {"pixel_values": {0: rows}}
            if self._has_places:
                sizes = {key: {**size, 1: "patches"} for key, size in sizes.items()}
            return sizes
        if self.role == "embedding":
            rows_of = {0: "features"}
            embedded = {"input_ids": {0: "batch", 1: "sequence"}, FEATURES: rows_of}
            return embedded | ({_ADDED_FEATURES: [rows_of] * self.added} if self.added else {})
        sequence: dict[int, str | None] = {0: "batch", 1: "sequence"}
        names: dict[str, Any] = {EMBEDS: sequence}
        if self.positions == "grid":
            names["position_ids"] = {0: None, 1: "batch", 2: "sequence"}
        if self._types is not None:
            names[_TYPES] = sequence
        return names | ({_ADDED_EMBEDS: [sequence] * self.added} if self.added else {})

    def names(self, case: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns the names of a case's tensors, and of a part's outputs but for a cache."""
        inputs = []
        for key, value in case.items():
            listed = key in (_ADDED_FEATURES, _ADDED_EMBEDS)
            inputs += [f"{key}.{number}" for number in range(len(value))] if listed else [key]
        added = {"vision": _ADDED_FEATURES, "embedding": _ADDED_EMBEDS}.get(self.role)
        numbers = range(self.added) if added is not None else ()
        return inputs, [_RESULTS[self.role], *(f"{added}.{number}" for number in numbers)]

    @staticmethod
    def role_of(inputs: Sequence[str], outputs: Sequence[str]) -> PartName | None:
        """Returns the part whose file has these inputs and outputs; None: another file."""
        if FEATURES in inputs or inputs[:1] != ["input_ids"]:
            for part, first in _FIRST.items():
                if [*inputs[:1]] == [first] and [*outputs[:1]] == [_RESULTS[part]]:
                    return part
        return None

    # --- The parts ---

    def performed(self) -> Callable[..., Any]:
        """Returns a forward of the vision or the embedding."""

        def vision(**pictures: Tensor) -> list[Tensor]:
            return self.vision(**pictures)

        def embedding(
            input_ids: Tensor, image_features: Tensor, deepstack_features: Sequence[Tensor] = ()
        ) -> list[Tensor]:
            return self.embedding(input_ids, image_features, deepstack_features)

        return vision if self.role == "vision" else embedding

    def decoding(self, decoder: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns a forward of the decoder.

        Args:
            decoder: A function of tokens, the mask, and options of the model's own forward.
            options: Some of them.
        """

        def forward(
            inputs_embeds: Tensor,
            attention_mask: Tensor,
            position_ids: Tensor | None = None,
            deepstack_embeds: Sequence[Tensor] = (),
            token_type_ids: Tensor | None = None,
            **further: Any,
        ) -> Any:
            if position_ids is not None:
                further["position_ids"] = position_ids
            if token_type_ids is not None and self._types is not None:
                # Of the tokens in the cache, too, which none of the new ones sees for its type.
                before = torch.zeros_like(attention_mask[:, token_type_ids.shape[1] :])
                further[self._types] = torch.cat([before, token_type_ids], dim=1)
            with self._adding(deepstack_embeds):
                tokens = {EMBEDS: inputs_embeds}
                return decoder(tokens, attention_mask, **further, **options)

        return forward

    def vision(self, **pictures: Tensor) -> list[Tensor]:
        """Returns the pictures' features ``[F, D]``, and those that are added to hidden states."""
        pixels = pictures["pixel_values"]
        if self._is_packed and isinstance(pixels.shape[0], int) and pixels.shape[0] % self._block:
            raise ValueError(
                f"pixel_values must be patches in blocks of {self._block}, got {pixels.shape[0]}"
            )
        # A trace knows no sizes of pictures; where there are values, the model's own code runs.
        is_traced = type(pixels) is not Tensor or is_exporting()
        if not is_traced:
            return self._gathered(pictures)
        if self._is_packed:
            of_any_number = packed_pictures(self._tower, pixels.shape[0])
        else:
            of_any_number = unsplit_pictures() if self._has_places else listed_pictures()
        with of_any_number:
            return self._gathered(pictures)

    def _gathered(self, pictures: Mapping[str, Tensor]) -> list[Tensor]:
        # A tower that takes places scales patches before it rounds them, others take its dtype.
        rounds = not self._has_places
        taken = {
            key: x.to(self._dtype) if rounds and x.is_floating_point() else x
            for key, x in pictures.items()
        }
        outputs = self._features(**taken, return_dict=True)
        features = outputs.pooler_output if "pooler_output" in outputs else None
        if features is None:
            projector = getattr(self.model, "multi_modal_projector", nn.Identity())
            features = projector(outputs.last_hidden_state.flatten(0, -2))
        added = getattr(outputs, "deepstack_features", None) or ()
        return [_in_a_row(x) for x in (features, *added)]

    def embedding(
        self, input_ids: Tensor, image_features: Tensor, deepstack_features: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Returns embeddings ``[B, S, D]``, and what is added to hidden states, 0 at other tokens.

        Args:
            input_ids: ``[B, S]``.
            image_features: ``[F, D]``.
            deepstack_features: ``[F, D]`` each. Tokens beyond these are what they are otherwise.
        """
        stands = input_ids == self._token
        number = stands.flatten().cumsum(0).view_as(input_ids)
        seen = stands & (number <= image_features.shape[0])
        number = torch.where(seen, number, 0)
        embeds = self.model.get_input_embeddings()(torch.where(seen, 0, input_ids))
        features, *added = (
            torch.cat([x.new_zeros(1, x.shape[1]), x])[number].to(embeds.dtype)
            for x in (image_features, *deepstack_features)
        )
        return [torch.where(seen[..., None], features, embeds), *added]

    @contextmanager
    def _adding(self, embeds: Sequence[Tensor]) -> Iterator[None]:
        """Lets the decoder add these ``[B, S, D]`` to its hidden states, one behind a layer."""
        if not embeds:
            yield
            return
        decoder = self.decoder
        seen = torch.ones(embeds[0].shape[:2], dtype=torch.bool)  # All: others add zeros.
        given = {"visual_pos_masks": seen, "deepstack_visual_embeds": [*embeds]}
        hook = decoder.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | given), with_kwargs=True
        )
        try:
            with private.features_added(decoder, lambda hidden, _, added: hidden + added):
                yield
        finally:
            hook.remove()

    # --- Are these the model? ---

    def check(self) -> None:
        """Compares what the decoder gets from the model with what it gets from the other parts.

        Raises:
            ValueError: If it differs, or the model gives it more.
        """
        model, name = self.model, type(self.model).__name__
        with state_kept(model), evaluating(model), torch.no_grad():
            features, *added = self.vision(**self.pictures)
            packed = self._packed_vision() if self._is_packed else [features, *added]
            ids = self._prompt(len(features))
            mask = torch.ones_like(ids)
            got = self._decoder_arguments(ids, mask)
            embeds, *_ = self.embedding(ids, features, added)
        known = {key: value for key, value in got.items() if _has_tensors(value)}
        unknown = sorted(known.keys() - _KNOWN - (_ADDED if self.added else set()))
        if unknown:
            raise ValueError(f"the decoder of {name} gets {', '.join(unknown)} with its embeddings")
        own_mask = known.get("attention_mask", mask)
        if not isinstance(own_mask, Tensor) or own_mask.shape != mask.shape:
            self._check_logits(ids, mask, embeds)
        pairs = {EMBEDS: (embeds, known[EMBEDS]), FEATURES: (packed[0], features)}
        for what, (ours, theirs) in pairs.items():
            if not self.agree(ours, theirs):
                raise ValueError(f"{name} computes other {what} than its parts")
        positions = known.get("position_ids")
        if self.positions == "grid":
            grids = self.pictures[GRID].numpy()
            expected, _ = grid_positions(ids.numpy(), mask.numpy(), grids, self.described())
            if positions is None or not torch.equal(positions[-3:], torch.from_numpy(expected)):
                raise ValueError(f"{name} gives a picture's tokens other places than its grid's")

    def _check_logits(self, ids: Tensor, mask: Tensor, embeds: Tensor) -> None:
        """Compares logits of a model that masks pictures' tokens in its own way."""
        model, types = self.model, (ids == self._token).int()
        given: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        parameters = inspect.signature(self._whole).parameters
        of_types = {name: types for name in _MODEL_TYPES if name in parameters}
        with state_kept(model), evaluating(model), torch.no_grad():
            expected = self._whole(input_ids=ids, **given, **of_types, **self.pictures).logits
            of_types = {} if self._types is None else {self._types: types}
            logits = self._whole(inputs_embeds=embeds, **given, **of_types).logits
        if not self.agree(logits, expected):
            raise ValueError(f"the tokens of a picture see one another in {type(model).__name__}")

    def _packed_vision(self) -> list[Tensor]:
        """Returns what a trace of the vision computes."""
        with packed_pictures(self._tower, self.pictures["pixel_values"].shape[0]):
            return self._gathered(self.pictures)

    def _prompt(self, count: int) -> Tensor:
        """Returns a row of text and the tokens of both pictures."""
        counts = [count // 2] * 2
        if self._is_packed:
            sizes = self.pictures[GRID].prod(-1)
            counts = (sizes * count // sizes.sum()).tolist()
        elif self._has_places:
            sizes = (self.pictures[_PLACES][..., 0] >= 0).sum(-1)
            counts = (sizes * count // sizes.sum()).tolist()
        text = next(token for token in (1, 2) if token != self._token)
        start = _config_value(self.model.config, "vision_start_token_id") or text
        first, second = ([start, *[self._token] * number] for number in counts)
        return torch.tensor([[text, *first, text, *second, text]])

    def _decoder_arguments(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Returns what the whole model gives its decoder."""
        got: dict[str, Any] = {}

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            got.update(kwargs)
            raise _ReachedError

        types = (ids == self._token).int()
        names = inspect.signature(self._whole).parameters
        given = {"mm_token_type_ids": types, "token_type_ids": types, "attention_mask": mask}
        given = {key: value for key, value in given.items() if key in names}
        hook = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        with suppress(_ReachedError):
            self._whole(input_ids=ids, **given, **self.pictures)
        hook.remove()
        return got


class _ReachedError(Exception):
    """The decoder is called."""


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _in_a_row(features: Any) -> Tensor:
    """Returns features of all pictures ``[F, D]``, which a model may give one by one."""
    tensors = [features] if isinstance(features, Tensor) else features
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors])


def _config_value(config: Any, *names: str) -> Any:
    """Returns the first of these that a config has."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
