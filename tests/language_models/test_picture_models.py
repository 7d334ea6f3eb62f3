"""Models that see pictures: their three files and transformers write the same text."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.datasets import load_sample_image

import dynamo_moe
from dynamo_moe.files.model_parts import FILES, PARTS, ModelPart, grid_positions
from dynamo_moe.language_models import example_case, performing
from dynamo_moe.tracing import packed_pictures
from moe_architectures import ARCHITECTURES
from picture_models import PICTURE, PICTURE_MODELS

TASK: Any = "image-text-to-text"
# Of text whose places are counted on three axes, and added features; of patches that say their
# places, and tokens of a picture that see one another. Llava's pictures have one size.
FEW = ("qwen3_vl_moe",)
START, END = 62, 63


def session(folder: Path, part: Any) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / FILES[part])


def pictures_of(folder: Path, count: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns random pictures, of different sizes if the vision takes such, and their tokens."""
    vision = session(folder, "vision")
    shapes = {value.name: value.shape for value in vision.get_inputs()}
    generator = torch.Generator().manual_seed(5)
    width = shapes["pixel_values"][1:]
    if "image_position_ids" in shapes:
        return placed_pictures(count, width[1], generator)
    if "image_grid_thw" not in shapes:
        pictures = torch.randn(count, *width, generator=generator)
        (features,) = vision.run(["image_features"], {"pixel_values": pictures.numpy()})
        return {"pixel_values": pictures}, [len(np.asarray(features)) // count] * count
    grids = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 8, 2]])[:count]
    pixels = torch.randn(int(grids.prod(-1).sum()), *width, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grids}, (grids.prod(-1) // 4).tolist()


def placed_pictures(
    count: int, width: int, generator: torch.Generator, merged: int = 2
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns pictures of as many patches, of which some are padding, at (-1, -1)."""
    sizes = [(4, 6), (6, 4), (2, 8)][:count]
    places = torch.full((count, 32, 2), -1)
    for picture, (rows, columns) in zip(places, sizes, strict=True):
        x, y = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        picture[: rows * columns] = torch.stack([x, y], -1).flatten(0, 1)
    pixels = torch.rand(count, 32, width, generator=generator) * (places[..., :1] >= 0)
    parts = [rows * columns // merged**2 for rows, columns in sizes]
    return {"pixel_values": pixels, "image_position_ids": places}, parts


def tokens_of(parts: int) -> list[int]:
    """Returns the tokens of a picture: one that begins it, one for each part, one that ends it.

    After a last part, transformers' generate would go on from its row and column.
    """
    return [START, *[PICTURE] * parts, END]


def prompts(*rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows with padding on the left; a list in a row is a picture of so many tokens."""
    flat = [
        [
            token
            for item in row
            for token in (tokens_of(*item) if isinstance(item, list) else [item])
        ]
        for row in rows
    ]
    length = max(map(len, flat))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in flat])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in flat])
    return ids, mask


def written(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, pictures: dict[str, torch.Tensor]
) -> np.ndarray:
    """Returns the prompts and 16 tokens after each, as transformers writes them."""
    names = inspect.signature(model.forward).parameters
    types = (ids == PICTURE).int()
    given = {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    text: torch.Tensor = model.generate(ids, attention_mask=mask, **given, **pictures, **options)
    return text.numpy()


def exporting() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in FEW else pytest.mark.every)
        for name, model in PICTURE_MODELS.items()
        if not model.refused
    ]


@pytest.mark.parametrize("name", exporting())
def test_16_greedy_tokens(name: str, tmp_path: Path) -> None:
    """The same as transformers', of pictures in both rows, in one, and in none."""
    original, model = PICTURE_MODELS[name].build(), PICTURE_MODELS[name].build()
    dynamo_moe.convert(model)
    folder = tmp_path / "model"
    report = dynamo_moe.export_language_model(model, folder, task=TASK)
    assert sorted(file.stem for file in folder.iterdir()) == sorted(PARTS[TASK])
    assert bool(report.layers) is not PICTURE_MODELS[name].is_dense
    (three, sizes), (two, _) = pictures_of(folder, 3), pictures_of(folder, 2)
    first, second, third = ([size] for size in sizes)
    cases = [
        (prompts([5, first, 9, second, 11], [7, 8, third, 4]), three),
        (prompts([5, 3, 4], [9, first, 6, second]), two),
        (prompts([5, first, 6, second]), two),
        (prompts([5, 9, 3, 2]), {}),
    ]
    texts = []
    for batch, pictures in cases:
        expected = written(original, *batch, pictures)
        text = dynamo_moe.generate(folder, *batch, max_new_tokens=16, **pictures)
        np.testing.assert_array_equal(text, expected)
        texts.append(text)
    for file in report.files:
        assert dynamo_moe.verify(file, model).passed
    if name == "qwen3_vl_moe":
        verified = dynamo_moe.verify(folder, model, library=True)
        assert len(verified.by_operator or ()) == sum(report.operators.values())
    # The text depends on the pictures.
    (batch, pictures) = cases[2]
    others = pictures | {"pixel_values": 1 - pictures["pixel_values"]}
    other = dynamo_moe.generate(folder, *batch, max_new_tokens=16, **others)
    assert (other != texts[2]).any()


def test_tokens_of_a_picture_see_one_another() -> None:
    model = PICTURE_MODELS["gemma4"].build()
    dynamo_moe.convert(model)
    with performing(model, "decoder"), torch.no_grad():
        case = example_case(model, batch=1, new=6, cached=5)
        logits = [
            model(**case | {"token_type_ids": torch.tensor([types])})[0]
            for types in ([0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0])
        ]
    before, others = logits[0], logits[1:]
    for other in others:
        assert torch.equal(other[:, 0], before[:, 0])
        assert (other[:, 1] - before[:, 1]).abs().max() > 0.5, "it sees those behind it"
    # One picture of three tokens, or two.
    assert (others[0][:, 1] - others[1][:, 1]).abs().max() > 0.5


REFUSED = [name for name, model in PICTURE_MODELS.items() if model.refused]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "paligemma" else pytest.mark.every)
        for name in REFUSED
    ],
)
def test_what_is_more_than_the_parts_is_refused(name: str, tmp_path: Path) -> None:
    described = PICTURE_MODELS[name]
    model = described.build()
    dynamo_moe.convert(model)
    with pytest.raises((ValueError, dynamo_moe.ExportError), match=described.refused):
        dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    assert not list(tmp_path.iterdir())


@pytest.mark.every
def test_patches_are_rounded_where_the_model_does(tmp_path: Path) -> None:
    """Gemma 4 scales them before that."""
    model = PICTURE_MODELS["gemma4"].build().to(torch.bfloat16)
    dynamo_moe.convert(model)
    dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    assert dynamo_moe.verify(tmp_path / "model", model).passed


@pytest.mark.every
def test_patches_of_its_own_image_processor(tmp_path: Path) -> None:
    """Of two pictures, each padded to as many patches."""
    code = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    processor = code.Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    )
    photographs = [load_sample_image("flower.jpg"), load_sample_image("china.jpg")[:200]]
    pictures = dict(processor(photographs, return_tensors="pt"))
    first, second = ([count] for count in pictures.pop("num_soft_tokens_per_image").tolist())
    ids, mask = prompts([5, first, 9], [7, 8, second, 4])
    model = PICTURE_MODELS["gemma4"].build()
    expected = written(model, ids, mask, pictures)
    dynamo_moe.convert(model)
    dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    text = dynamo_moe.generate(tmp_path / "model", ids, mask, max_new_tokens=16, **pictures)
    np.testing.assert_array_equal(text, expected)
    assert (text[0, -16:] != text[1, -16:]).any()


def test_embeddings_of_each_layer_are_refused(tmp_path: Path) -> None:
    described = PICTURE_MODELS["gemma4"]
    text = {**described.text, "hidden_size_per_layer_input": 8}
    model = replace(described, text=text).build()
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match="gets per_layer_inputs with its embeddings"):
        dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)


def test_a_model_without_pictures_is_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build()
    dynamo_moe.convert(model)
    with pytest.raises(ValueError, match="MixtralForCausalLM sees no pictures: choose another"):
        dynamo_moe.export_language_model(model, tmp_path / "model", task=TASK)
    with pytest.raises(ValueError, match="no folder for genai can hold a model that sees pictures"):
        dynamo_moe.export_language_model(model, tmp_path / "m", task=TASK, folder="genai")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = PICTURE_MODELS["llava"].build()
    folder = tmp_path_factory.mktemp("llava") / "model"
    dynamo_moe.export_language_model(model, folder, task=TASK)
    return model, folder


@pytest.mark.every
def test_verify_takes_the_folder(llava: tuple[Any, Path]) -> None:
    model, folder = llava
    report = dynamo_moe.verify(folder, model)
    assert report.path == folder
    firsts = [next(iter(case.shapes)) for case in report.cases]
    assert list(dict.fromkeys(firsts)) == ["pixel_values", "input_ids", "inputs_embeds"]
    with pytest.raises(ValueError, match="inputs are those of one file"):
        dynamo_moe.verify(folder, model, [{}])
    with pytest.raises(ValueError, match=r"model has no node that the native library's operators"):
        dynamo_moe.verify(folder, model, library=True)


def test_pictures_and_prompts_must_fit(llava: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = llava
    pictures, (count,) = pictures_of(folder, 1)
    ids, _ = prompts([5, [count], 9])
    with pytest.raises(ValueError, match=rf"has {count} tokens 60, but the pictures have 0 parts"):
        dynamo_moe.generate(folder, ids, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"has 0 tokens 60, but the pictures have \d+ parts"):
        dynamo_moe.generate(folder, [[5, 9]], max_new_tokens=1, **pictures)
    with pytest.raises(ValueError, match="must be pixel_values; got pixels"):
        dynamo_moe.generate(folder, ids, max_new_tokens=1, pixels=pictures["pixel_values"])
    with pytest.raises(ValueError, match="a file alone takes no pixel_values: pictures"):
        dynamo_moe.generate(session(folder, "decoder"), ids, max_new_tokens=1, **pictures)
    with pytest.raises(ValueError, match=r"has no vision\.onnx, embedding\.onnx, decoder\.onnx"):
        dynamo_moe.generate(tmp_path, ids, max_new_tokens=1)


@pytest.mark.parametrize(
    ("grids", "merged", "window", "patch"),
    [
        ([[1, 4, 6], [1, 4, 4], [1, 8, 2]], 2, 16, 4),
        ([[1, 14, 22], [2, 6, 10]], 2, 24, 4),
        ([[1, 7, 5], [1, 3, 3]], 1, 12, 4),
    ],
)
def test_windows_of_pictures(grids: list[list[int]], merged: int, window: int, patch: int) -> None:
    own = pytest.importorskip("transformers.vision_utils")
    grid = torch.tensor(grids)
    expected, ends = own.get_vision_window_index(grid, merged, window, patch)
    patches = int(grid.prod(-1).sum())
    index, end_of_each = packed_pictures._windows(patches, grid, merged, window, patch)
    torch.testing.assert_close(index, expected)
    torch.testing.assert_close(end_of_each.unique_consecutive(), ends.long())


def test_places_of_tokens() -> None:
    part = ModelPart("decoder", PICTURE, "grid", 2)
    ids, mask = prompts([5, [6], 9], [7])
    grids = np.array([[1, 4, 6]])
    positions, following = grid_positions(ids.numpy(), mask.numpy(), grids, part)
    assert positions[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert not positions[:, 1].any()
    assert following.tolist() == [7, 1]
    with pytest.raises(ValueError, match="row 0 has another number of tokens 60 than its pictures"):
        grid_positions(ids.numpy(), mask.numpy(), np.array([[1, 4, 8]]), part)
    with pytest.raises(ValueError, match="image_grid_thw has 1 pictures more than input_ids"):
        grid_positions(ids.numpy(), mask.numpy(), np.concatenate([grids, grids]), part)
