"""Exports in both ways: equal blocks shared, and each of them traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe import pytree

Make = Callable[[], nn.Module]
Compared = Callable[..., tuple[str, ...]]
Checked = Callable[..., None]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    """Exports a model in both ways, compares the files, and returns what was shared."""

    def compare(make: Make, example: Any = None, **options: Any) -> tuple[str, ...]:
        shared, blocks = _exported(make, example, tmp_path / "auto", options)
        alone, none = _exported(make, example, tmp_path / "off", options)
        assert shared == alone
        assert not none
        return blocks

    return compare


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Exports a model; its file is the one without sharing, or right where nothing is shared.

    Where the model's state makes a plain trace another one than the model, shared files are right,
    and those in which nothing is shared may be wrong alike.
    """

    def check(
        make: Make, example: Any = None, before: Callable[[], Any] = bool, **options: Any
    ) -> None:
        def exported(way: str) -> tuple[dict[str, bytes], tuple[str, ...]] | None:
            before()
            with suppress(dynamo_moe.ExportError):
                return _exported(make, example, tmp_path / way, options)
            return None

        def is_right() -> bool:
            session = ort.InferenceSession(tmp_path / "auto" / "model.onnx")
            for inputs in _sizes(_example(example), session):
                before()
                model = make()
                if not _is_right(model, inputs, session):
                    return False
            return True

        auto = exported("auto")
        is_shared = auto and any(blocks.endswith(" traced") for blocks in auto[1])
        if auto and not is_shared and is_right():
            return
        off = exported("off")
        if (auto and auto[0]) != (off and off[0]):
            assert auto
            assert is_right()

    return check


def _example(example: Any) -> tuple[Any, ...]:
    if example is None:
        example = torch.linspace(-1, 1, 16).reshape(2, 8)
    return example if isinstance(example, tuple) else (example,)


def _exported(
    make: Make, example: Any, folder: Path, options: dict[str, Any]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Returns a model's files, and what was shared; the folder's name is the way."""
    folder.mkdir(exist_ok=True)
    options = {"repeated_blocks": folder.name, **options}
    path = folder / "model.onnx"
    if "task" in options:
        report = dynamo_moe.export_language_model(make(), path, **options)  # type: ignore[arg-type]
    else:
        report = dynamo_moe.export(make(), _example(example), path, **options)
    return {file.name: file.read_bytes() for file in report.files}, report.blocks


def _sizes(example: tuple[Any, ...], session: ort.InferenceSession) -> Iterator[tuple[Any, ...]]:
    """Yields an example, and larger ones where a file takes them."""
    leaves, structure = pytree.tree_flatten(example)
    shapes = [value.shape for value in session.get_inputs()]
    yield example
    for factor in (
        (3, 8) if any(isinstance(size, str) for shape in shapes for size in shape) else ()
    ):
        larger = [
            leaf.repeat(*(factor if isinstance(size, str) else 1 for size in shape))
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        yield pytree.tree_unflatten(larger, structure)


def _is_right(model: nn.Module, example: tuple[Any, ...], session: ort.InferenceSession) -> bool:
    """Whether a file computes what a model does the first time that it is called, if it does."""
    inputs = [leaf.numpy().copy() for leaf in pytree.tree_leaves(example)]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            expected = pytree.tree_leaves(model(*example))
        except RuntimeError:  # It may refuse larger sizes.
            return True
    names = [value.name for value in session.get_inputs()]
    results = session.run(None, dict(zip(names, inputs, strict=True)))
    tensors = [leaf.numpy() for leaf in expected if isinstance(leaf, Tensor)]
    return len(results) == len(tensors) and all(
        result.shape == tensor.shape and np.allclose(result, tensor, rtol=1e-5, atol=1e-5)
        for result, tensor in zip(results, tensors, strict=True)
    )


def opened_twice(model: Any, folder: Path) -> Make:
    """Returns what opens a model's checkpoint beside each of the files of ``compared``."""
    folders = [folder / way for way in ("auto", "off")]
    for each in folders:
        model.save_pretrained(each)
    remaining = iter(folders)

    def make() -> nn.Module:
        opened: nn.Module = dynamo_moe.open_checkpoint(next(remaining))
        dynamo_moe.convert(opened)
        return opened

    return make
