"""Folders that runtimes open: a file with its configuration and its tokenizer beside it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dynamo_moe.files import library_operators, model_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dynamo_moe.language_models.caches import ModelCache

FolderFormat = Literal["genai", "transformers"]
"""What a folder is for: onnxruntime-genai; transformers.js and optimum's ``ORTModel``."""

FORMATS: tuple[str, ...] = get_args(FolderFormat)

# Where each looks for the model.
_MODELS = {"genai": "model.onnx", "transformers": "onnx/model.onnx"}


def model_in(path: Path) -> Path:
    """Returns the model of a folder that a runtime opens; any other path itself."""
    inside = [path / name for name in _MODELS.values()] if path.is_dir() else []
    return next((file for file in inside if file.is_file()), path)


# What a tokenizer's files are called in a checkpoint's folder.
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "tekken.json", "tokenization_*.py", "chat_template.*"),
    "additional_chat_templates/*",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The copy of the native library.
_LIBRARY = "libdynamo_moe.so"
# Of a model that names no longest text, as with ALiBi: what a runtime makes room for.
_CONTEXT = 4096
# How tokens are chosen, where transformers and onnxruntime-genai have one name for it.
_SEARCH = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


class RuntimeFolder:
    """A folder that a runtime opens.

    Attributes:
        model_path: Where its model is written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FolderFormat) -> None:
        """Makes the folder, if there is none."""
        self._path, self._kind = Path(path), kind
        self.model_path = self._path / _MODELS[kind]
        self.model_path.parent.mkdir(parents=True, exist_ok=True)

    def remove_if_empty(self) -> None:
        """Removes what is left of an export that failed, but for a folder with files in it."""
        for folder in (self.model_path.parent, self._path):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def complete(
        self,
        model: PreTrainedModel,
        files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        cache: ModelCache | None,
        shared_cache: bool,
        library: bool = False,
    ) -> tuple[list[Path], list[str]]:
        """Writes what belongs to a model that is in its place.

        Args:
            model: The model.
            files: Its files, the ONNX file first.
            tokenizer: Its tokenizer; None: that of the checkpoint's folder.
            cache: What the file keeps between tokens, if anything.
            shared_cache: Whether it writes into the cache's buffers.
            library: Whether the native library's operators are to compute its MoE layers.

        Returns:
            All files, and notes for a user.
        """
        self._remove_old_weights(files)
        notes: list[str] = []
        if self._kind == "genai":
            config = _genai_config(model, genai_cache(model, cache), shared_cache=shared_cache)
            copies, notes = self._add_library(config) if library else ([], [])
            if not copies:  # An earlier model's.
                (self._path / _LIBRARY).unlink(missing_ok=True)
            written = [self._write("genai_config.json", config), *copies]
        else:
            files = _renamed_data(files)
            written = list(self._configs(model, has_data=len(files) > 1))
        copied = self._tokenizer(model, tokenizer)
        missing = "no tokenizer was found beside the weights: pass tokenizer, or add its files"
        return [*files, *written, *copied], [*notes, *([] if copied else [missing])]

    def _add_library(self, config: dict[str, Any]) -> tuple[list[Path], list[str]]:
        """Makes the runtime compute MoE layers by the native library, of which it has a copy here.

        It opens the file itself, so each layer has its operator's domain in the file.
        """
        proto = model_files.load_graph(self.model_path)
        if not library_operators.operator_nodes(proto):
            return [], ["no layer is one that the native library computes: it was left out"]
        if library_operators.take_operators(proto):
            with model_files.replacing(self.model_path) as part:
                part.write_bytes(proto.SerializeToString())
        copy = self._path / _LIBRARY
        with model_files.replacing(copy) as part:
            shutil.copyfile(library_operators.library(), part)
        options = config["model"]["decoder"]["session_options"]
        options["custom_ops_library"] = copy.name
        return [copy], []

    def _remove_old_weights(self, files: Sequence[Path]) -> None:
        """Removes weights beside the model that an earlier one had there."""
        if len(files) == 1:
            for end in (".data", "_data"):
                self.model_path.with_name(self.model_path.name + end).unlink(missing_ok=True)

    def _configs(self, model: PreTrainedModel, *, has_data: bool) -> Iterator[Path]:
        web = {"transformers.js_config": {"use_external_data_format": True}} if has_data else {}
        own = self._path / "config.json"
        if own.is_file() and _is_folder_of(model, self._path):  # Its checkpoint needs all of it.
            yield self._write("config.json", {**json.loads(own.read_text("utf-8")), **web})
            return
        config = model.config.to_diff_dict()
        config.pop("quantization_config", None)  # The file's weights are what they are.
        yield self._write("config.json", {**config, **web})
        if model.generation_config is not None:
            yield self._write("generation_config.json", model.generation_config.to_diff_dict())

    def _tokenizer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> list[Path]:
        if tokenizer is None and _is_folder_of(model, self._path):
            return _tokenizer_files(self._path)
        with tempfile.TemporaryDirectory(prefix=".tokenizer.", dir=self._path) as folder:
            source, parts = Path(folder) / "all", Path(folder) / "parts"
            if tokenizer is not None:
                tokenizer.save_pretrained(source)
                found = [file for file in source.rglob("*") if file.is_file()]
            else:
                source = Path(model.name_or_path or ".")
                found = _tokenizer_files(source) if (source / "config.json").is_file() else []
            names = [file.relative_to(source) for file in found]
            for name in names:
                for new in (parts / name, self._path / name):
                    new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, parts / name)
                (parts / name).replace(self._path / name)
        return [self._path / name for name in names]

    def _write(self, name: str, content: Mapping[str, Any]) -> Path:
        with model_files.replacing(self._path / name) as part:
            part.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        return self._path / name


def _is_folder_of(model: PreTrainedModel, path: Path) -> bool:
    """Whether a folder is the one of a model's checkpoint."""
    name = model.name_or_path
    return bool(name) and Path(str(name)).resolve() == path.resolve()


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({file for name in _TOKENIZER_FILES for file in folder.glob(name)})


def check_folder(
    path: str | os.PathLike[str], kind: FolderFormat | None, *, links: bool = False
) -> None:
    """Checks that there is such a format, and can be a folder at ``path``.

    Args:
        path: The folder.
        kind: The format; None: no folder is wanted.
        links: Whether weights should stay in other files.

    Raises:
        ValueError: If there is no such format.
        NotADirectoryError: If ``path`` is a file.
        FileNotFoundError: If the folder that it is in does not exist.
    """
    if kind is None:
        return
    if kind not in FORMATS:
        raise ValueError(f"folder must be one of {', '.join(FORMATS)}; got {kind!r}")
    check_place(Path(path), links=links)


def check_place(path: Path, *, links: bool) -> None:
    """Checks that there can be a folder at ``path``; see :func:`check_folder`."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; name a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to make {path.name} in")
    if links:
        raise ValueError("a folder for a runtime holds its weights: leave out link_weights")


def genai_cache(model: PreTrainedModel, cache: ModelCache | None) -> ModelCache:
    """Returns a model's cache, which onnxruntime-genai can keep.

    Raises:
        ValueError: If its cache is not keys and values of one shape in all layers.
    """
    name = type(model).__name__
    if cache is None:
        raise ValueError("onnxruntime-genai needs a cache: task text-generation-with-past")
    for kept in cache.tensors:
        if kept.window is not None:
            raise ValueError(
                "onnxruntime-genai keeps all tokens in all layers: leave out bounded_windows"
            )
        if kept.role not in ("key", "value") or not kept.holds_tokens:
            raise ValueError(
                f"onnxruntime-genai keeps keys and values alone, but layer {kept.layer} of {name} "
                f"keeps {kept.role} too: dynamo_moe.generate runs its file"
            )
        if kept.shape != cache.tensors[0].shape:
            raise ValueError(
                f"onnxruntime-genai keeps keys and values of one shape, but those of {name} have "
                f"{list(cache.tensors[0].shape)} and {list(kept.shape)}: dynamo_moe.generate runs "
                "its file"
            )
    layers = [layer[0].layer for layer in cache.layers]
    if layers != list(range(len(layers))):
        raise ValueError(f"onnxruntime-genai counts layers from 0; those of {name} are {layers}")
    return cache


def _genai_config(
    model: PreTrainedModel, cache: ModelCache, *, shared_cache: bool
) -> dict[str, Any]:
    text = model.config.get_text_config()
    _, heads, _, width = cache.tensors[0].shape
    context = getattr(text, "max_position_embeddings", None) or _CONTEXT
    given = model.generation_config.to_dict() if model.generation_config is not None else {}
    ids = {name: given.get(name, getattr(text, name, None)) for name in _TOKENS}
    ends = ids["eos_token_id"] if ids["eos_token_id"] is not None else []
    first = ends[0] if isinstance(ends, list) and ends else ends
    padding = ids["pad_token_id"] if ids["pad_token_id"] is not None else first
    search = {name: given.get(name) for name in _SEARCH}
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": 0 if ids["bos_token_id"] is None else ids["bos_token_id"],
            "eos_token_id": ends,
            "pad_token_id": padding or 0,
            "context_length": context,
            "vocab_size": text.vocab_size,
            "decoder": {
                "filename": _MODELS["genai"],
                "head_size": width,
                "hidden_size": text.hidden_size,
                "num_attention_heads": text.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(cache.layers),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            },
        },
        "search": {
            **{name: default if search[name] is None else search[name]
               for name, default in _SEARCH.items()},
            "max_length": context,
            "past_present_share_buffer": shared_cache,
        },
    }  # fmt: skip


def _renamed_data(files: Sequence[Path]) -> list[Path]:
    """Gives weights beside a model the name that transformers.js knows them by."""
    model = files[0]
    if len(files) == 1:
        return [model]
    return model_files.rename_model(files, model, data=model.with_name(f"{model.name}_data"))
