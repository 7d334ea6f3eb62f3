"""``generate``: text from an exported language model in ONNX Runtime, a token at a time.

Neither PyTorch nor transformers is needed: the file's inputs and its metadata say what it keeps
between tokens.

Legend: B batch, L tokens of the prompt, S tokens of a call, V vocabulary, D width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo_moe.files import model_parts
from dynamo_moe.files.cache_entries import KEY, PAST_LENGTH, CacheEntry, loads
from dynamo_moe.files.model_parts import FILES, GRID, files_in, grid_positions
from dynamo_moe.session_entries import keep_tokens

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import ArrayLike, NDArray

_PAST, _PRESENT = "past_key_values.", "present."
_FEATURES = "image_features"
_ENCODER_MASK = "encoder_attention_mask"
_TYPES = "token_type_ids"
_DTYPES = {
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}


def generate(
    path: str | os.PathLike[str] | onnxruntime.InferenceSession,
    input_ids: ArrayLike,
    attention_mask: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    decoder_input_ids: ArrayLike | None = None,
    **pictures: ArrayLike,
) -> NDArray[np.int64]:
    """Writes text with files of :func:`export_language_model`, the most likely token each time.

    What the file keeps between tokens is found in its metadata, or by the names
    ``past_key_values.*`` and ``present.*``, as other exporters write them. A file without a cache
    computes the whole text again for each token.

    Args:
        path: The file, or a session of ONNX Runtime with it, which need not load it again; or the
            folder of a model that sees pictures or has an encoder.
        input_ids: The prompts, ``[B, L]``; a row that is shorter has padding on its left, or
            anywhere if an encoder reads it.
        attention_mask: ``[B, L]``, 0 for padding; None: there is none.
        max_new_tokens: How many tokens are written at most.
        eos_token_id: The tokens that end a row. When all rows have ended, no more are written.
        pad_token_id: What follows in a row that has ended; None: the first of ``eos_token_id``.
        decoder_input_ids: Behind an encoder, all that the text begins with, ``[B, S]``; None: the
            token that the model begins with.
        pictures: With the folder of a model that sees some, what its ``vision.onnx`` takes, by
            name: ``pixel_values``, and ``image_grid_thw`` or ``image_position_ids`` if it does, as
            the model's image processor makes them. The pictures are those of all rows in order;
            each has its tokens in ``input_ids``.

    Returns:
        The prompts with what follows, ``[B, L + new]``, as ``generate`` of transformers does;
        behind an encoder, ``decoder_input_ids`` with what follows, ``[B, S + new]``.

    Raises:
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If the file is no language model that this can run, a prompt is empty or has
            padding on its right, or any where the file compresses blocks of tokens, a number is out
            of range, the text would be longer than the file's cache, the pictures are not those
            that the folder takes and the prompts have tokens of, or ``decoder_input_ids`` are given
            without an encoder, or are missing where the model does not say what it begins with.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens}")
    ends = [] if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
    padding = pad_token_id if pad_token_id is not None else next(iter(ends), 0)
    arrays = {name: np.asarray(x) for name, x in pictures.items()}
    model, text, mask = _begun(path, _prompts(input_ids, attention_mask), decoder_input_ids, arrays)
    model.check_padding(mask)
    model.check_length(text.shape[1] + max_new_tokens - 1)  # The last is not read.
    has_ended = np.zeros((len(text), 1), bool)
    new = text
    for _ in range(max_new_tokens):
        logits = model.logits(new if model.has_cache else text, mask)
        new = np.where(has_ended, padding, logits.argmax(-1)[:, None])
        text = np.concatenate([text, new], axis=1)
        mask = np.concatenate([mask, np.ones_like(new)], axis=1)
        has_ended |= np.isin(new, ends)
        if has_ended.all():
            break
    return text


def _tokens(name: str, tokens: ArrayLike, rows: int | None = None) -> NDArray[np.int64]:
    """Returns an argument's tokens, ``[B, L]``."""
    try:
        text = np.asarray(tokens)
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths") from None
    shape = f"[{'B' if rows is None else rows}, L]"
    fits = text.ndim == 2 and text.size and rows in (None, len(text))
    if not fits or text.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be integers {shape} of at least one token, got {text.dtype} "
            f"{list(text.shape)}"
        )
    if text.min() < 0:
        raise ValueError(f"{name} must be at least 0, got {int(text.min())}")
    return text.astype(np.int64)


def _prompts(
    input_ids: ArrayLike, attention_mask: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    text = _tokens("input_ids", input_ids)
    mask = np.ones_like(text) if attention_mask is None else np.asarray(attention_mask)
    if mask.shape != text.shape:
        raise ValueError(
            f"attention_mask must have input_ids' shape {list(text.shape)}, got {list(mask.shape)}"
        )
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("attention_mask must hold 0 for padding, and 1")
    if not mask.any(1).all():
        raise ValueError(f"row {int(mask.any(1).argmin())} of attention_mask has no 1")
    return text, mask.astype(np.int64)


def _check_padding_is_left(mask: NDArray[np.int64]) -> None:
    for row, seen in enumerate(mask):
        if (np.diff(seen) < 0).any():
            raise ValueError(
                f"padding must be on the left: row {row} of attention_mask has 0 after 1"
            )


def _session(
    path: str | os.PathLike[str] | onnxruntime.InferenceSession,
) -> onnxruntime.InferenceSession:
    import onnxruntime

    if isinstance(path, onnxruntime.InferenceSession):
        return path
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    keep_tokens(options)
    return onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )


def _begun(
    path: str | os.PathLike[str] | onnxruntime.InferenceSession,
    prompts: tuple[NDArray[np.int64], NDArray[np.int64]],
    decoder_input_ids: ArrayLike | None,
    pictures: dict[str, NDArray[Any]],
) -> tuple[_Model, NDArray[np.int64], NDArray[np.int64]]:
    """Returns a file or the parts of a folder, the text that it goes on from, and its mask."""
    text, mask = prompts
    is_folder = isinstance(path, (str, os.PathLike)) and Path(path).is_dir()
    sessions = {part: _session(file) for part, file in files_in(path).items()} if is_folder else {}
    decoder = sessions["decoder"] if sessions else _session(path)
    if pictures and "vision" not in sessions:
        what = "a file alone takes" if not sessions else "a model with an encoder takes"
        raise ValueError(
            f"{what} no {', '.join(pictures)}: pictures are for the folder of a model that sees "
            "some"
        )
    if "encoder" in sessions:
        begin = _beginning(_part(decoder), len(text), decoder_input_ids)
        model = _WritingModel(sessions["encoder"], decoder, text, mask)
        return model, begin, np.ones_like(begin)
    if decoder_input_ids is not None:
        raise ValueError("decoder_input_ids are for the folder of a model with an encoder")
    _check_padding_is_left(mask)
    if not sessions:
        return _Model(decoder, len(text)), text, mask
    seen, grids = _seen(sessions["vision"], pictures), pictures.get(GRID)
    return _SeeingModel(sessions["embedding"], decoder, seen, text, mask, grids), text, mask


def _beginning(
    part: model_parts.ModelPart, batch: int, decoder_input_ids: ArrayLike | None
) -> NDArray[np.int64]:
    """Returns what a decoder's text begins with, ``[B, S]``."""
    if decoder_input_ids is None:
        start = part.decoder_start_token_id
        if start is None:
            raise ValueError("the model does not say what it begins with: pass decoder_input_ids")
        return np.full((batch, 1), start)
    return _tokens("decoder_input_ids", decoder_input_ids, rows=batch)


class _Model:
    """A file, and what it has kept of the text so far.

    Attributes:
        has_cache: Whether it keeps anything.
    """

    tokens = "input_ids"
    further: tuple[str, ...] = ()

    def __init__(self, session: onnxruntime.InferenceSession, batch: int) -> None:
        self._session = session
        self._names = [value.name for value in session.get_inputs()]
        self._dtypes = {value.name: _DTYPES.get(value.type) for value in session.get_inputs()}
        entries = cache_of(session)
        known = {self.tokens, "attention_mask", "position_ids", PAST_LENGTH, _TYPES, *self.further}
        known |= {entry.input for entry in entries}
        unknown = [name for name in self._names if name not in known]
        outputs = [value.name for value in session.get_outputs()]
        if unknown or self.tokens not in self._names or "logits" not in outputs:
            raise ValueError(
                f"the file must have the inputs {self.tokens}, attention_mask and caches, and the "
                f"output logits; it has {', '.join(self._names)} and {', '.join(outputs)}"
            )
        self.has_cache = bool(entries)
        self._entries = entries
        self._kept = {entry.input: _first(entry, batch) for entry in entries}
        self._room = min((entry.room for entry in entries if entry.room is not None), default=None)

    def check_padding(self, mask: NDArray[np.int64]) -> None:
        """Raises ValueError if there is padding, and the file would compress it with the text."""
        if mask.all() or not any(entry.is_of_blocks for entry in self._entries):
            return
        raise ValueError(
            f"row {int((mask == 0).any(1).argmax())} of attention_mask has padding, which this "
            "file would compress with the tokens: pass rows of one length, or one at a time"
        )

    def check_length(self, tokens: int) -> None:
        """Checks that the cache has room for so many tokens."""
        if self._room is not None and tokens > self._room:
            raise ValueError(
                f"the file's cache has room for {self._room} tokens, but the prompts and what may "
                f"follow are {tokens}: choose fewer max_new_tokens, or export with a larger "
                "cache_length"
            )

    def logits(self, new: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the last token's logits ``[B, V]``, and keeps what the next call needs.

        Args:
            new: ``[B, S]``.
            mask: Of these and of all tokens before, ``[B, P + S]``.
        """
        given = self._given(new, mask)
        feeds = {
            name: _value(x.astype(self._dtypes[name]))
            for name, x in given.items()
            if name in self._names
        }
        binding = self._session.io_binding()
        for name, value in (feeds | self._kept).items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        replaced = [entry for entry in self._entries if entry.update != "written"]
        for entry in replaced:
            binding.bind_output(entry.output)
        for entry in self._entries:
            if entry.update == "written":
                binding.bind_ortvalue_output(entry.output, self._kept[entry.input])
        self._session.run_with_iobinding(binding)
        logits, *kept = binding.get_outputs()
        self._kept |= {entry.input: x for entry, x in zip(replaced, kept, strict=False)}
        last: NDArray[Any] = logits.numpy()[:, -1]
        return last

    def _given(self, new: NDArray[np.int64], mask: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns what goes into the file besides its cache."""
        positions = np.maximum(mask.cumsum(-1) - 1, 0)[:, -new.shape[1] :]
        given = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        if self._room is not None:
            given["attention_mask"] = np.pad(mask, ((0, 0), (0, self._room - mask.shape[1])))
            given[PAST_LENGTH] = np.array([mask.shape[1] - new.shape[1]])
        return given


class _SeeingModel(_Model):
    """A decoder, the embedding before it, and the pictures' features until they are read."""

    tokens = "inputs_embeds"

    def __init__(
        self,
        embedding: onnxruntime.InferenceSession,
        decoder: onnxruntime.InferenceSession,
        seen: dict[str, NDArray[Any]],
        text: NDArray[np.int64],
        mask: NDArray[np.int64],
        grids: NDArray[np.int64] | None,
    ) -> None:
        self.further = tuple(value.name for value in embedding.get_outputs())
        super().__init__(decoder, len(text))
        self._embedding, self._seen = embedding, seen
        part = _part(decoder)
        self._image_token = part.image_token_id
        count, expected = int((text == part.image_token_id).sum()), len(seen.get(_FEATURES, ()))
        if count != expected:
            raise ValueError(
                f"input_ids has {count} tokens {part.image_token_id}, but the pictures have "
                f"{expected} parts"
            )
        self._positions: NDArray[np.int64] | None = None
        if part.positions == "grid":
            grids = np.zeros((0, 3), np.int64) if grids is None else grids
            self._positions, self._following = grid_positions(text, mask, grids, part)

    def _given(self, new: NDArray[np.int64], mask: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        feeds = {
            value.name: self._seen.get(value.name, _nothing(value))
            for value in self._embedding.get_inputs()
        }
        embedded = self._embedding.run(list(self.further), feeds | {"input_ids": new})
        self._seen = {}
        given = super()._given(new, mask) | dict(zip(self.further, embedded, strict=True))
        if self._positions is not None:
            given["position_ids"] = self._positions
            self._positions = np.tile(self._following[:, None], (3, 1, 1))
            self._following = self._following + 1
        if _TYPES in self._names:
            given[_TYPES] = new == self._image_token
        return given


class _WritingModel(_Model):
    """A decoder behind an encoder, which has read the prompts."""

    def __init__(
        self,
        encoder: onnxruntime.InferenceSession,
        decoder: onnxruntime.InferenceSession,
        text: NDArray[np.int64],
        mask: NDArray[np.int64],
    ) -> None:
        names = [value.name for value in encoder.get_outputs()]
        self.further = (_ENCODER_MASK, *names)
        super().__init__(decoder, len(text))
        binding = encoder.io_binding()
        for name, array in {"input_ids": text, "attention_mask": mask}.items():
            binding.bind_ortvalue_input(name, _value(array))
        for name in names:
            binding.bind_output(name)
        encoder.run_with_iobinding(binding)
        read = dict(zip(names, binding.get_outputs(), strict=True))
        self._kept |= read | {_ENCODER_MASK: _value(mask)}

    def _given(self, new: NDArray[np.int64], mask: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        return {"input_ids": new}


def _seen(
    vision: onnxruntime.InferenceSession, pictures: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Returns the features of pictures by name; none if there are no pictures."""
    if not pictures:
        return {}
    inputs = {value.name: value for value in vision.get_inputs()}
    if inputs.keys() != pictures.keys():
        raise ValueError(
            f"the pictures must be {', '.join(inputs)}; got {', '.join(pictures) or 'none'}"
        )
    if GRID in pictures and (pictures[GRID][:, 0] != 1).any():
        raise ValueError(f"{GRID} must have one frame a picture, got {pictures[GRID][:, 0].max()}")
    feeds = {name: x.astype(_DTYPES[inputs[name].type]) for name, x in pictures.items()}
    names = [value.name for value in vision.get_outputs()]
    return dict(zip(names, vision.run(names, feeds), strict=True))


def _part(session: onnxruntime.InferenceSession) -> model_parts.ModelPart:
    described = session.get_modelmeta().custom_metadata_map.get(model_parts.KEY)
    if described is None:
        raise ValueError(f"{FILES['decoder']} does not say what it is part of")
    return model_parts.loads(described)


def _nothing(value: Any) -> NDArray[Any]:
    """Returns an input without rows."""
    sizes = [size if isinstance(size, int) else 0 for size in value.shape]
    return np.zeros(sizes, _DTYPES[value.type])


def cache_of(session: onnxruntime.InferenceSession) -> list[CacheEntry]:
    """Returns what a file keeps between tokens, by its metadata, or else by its names.

    Raises:
        ValueError: If an input has no output that it continues as.
    """
    described = session.get_modelmeta().custom_metadata_map.get(KEY)
    if described is not None:
        return loads(described)
    outputs = {value.name for value in session.get_outputs()}
    entries = [_entry(x) for x in session.get_inputs() if x.name.startswith(_PAST)]
    missing = [entry.output for entry in entries if entry.output not in outputs]
    if missing:
        raise ValueError(f"the file has no output {missing[0]!r}, but the input before it")
    return entries


def _entry(value: Any) -> CacheEntry:
    """Returns what an input's name and shape say: keys and values, whose past is symbolic."""
    name = value.name.removeprefix(_PAST)
    if value.type not in _DTYPES:
        raise ValueError(f"input {value.name!r} is {value.type}, which NumPy does not have")
    shape = tuple(
        "batch" if not axis else size if isinstance(size, int) else "past"
        for axis, size in enumerate(value.shape)
    )
    return CacheEntry(
        input=value.name,
        output=_PRESENT + name,
        role=name.rpartition(".")[2],
        shape=shape,
        dtype=_DTYPES[value.type],
        initial="empty" if "past" in shape else "zeros",
        update="appended" if "past" in shape else "replaced",
    )


def _first(entry: CacheEntry, batch: int) -> onnxruntime.OrtValue:
    sizes = {"batch": batch}  # The others are numbers of tokens.
    shape = [sizes.get(size, 0) if isinstance(size, str) else size for size in entry.shape]
    return _value(np.zeros(shape, entry.dtype))


def _value(array: NDArray[Any]) -> onnxruntime.OrtValue:
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
