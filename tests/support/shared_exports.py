"""Exports in both ways: equal blocks shared, and each of them traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_moe
from dynamo_moe.graph import pipeline


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Exports a model, or one for a task, and returns how many of its runs were shared."""

    def export(model: nn.Module, example: Any = None, path: Any = None, **options: Any) -> int:
        runs: list[Any] = []
        path = path or tmp_path / "model.onnx"

        def counted(graph: Any, units: Any, *args: Any) -> Any:
            found = instantiate(graph, units, *args)
            runs.append(units)
            return found

        with monkeypatch.context() as context:
            context.setattr(pipeline, "instantiate", counted)
            if "task" in options:
                dynamo_moe.export_language_model(model, path, **options)  # type: ignore[arg-type]
            else:
                example = torch.zeros(2, 8) if example is None else example
                dynamo_moe.export(model, example, path, **options)
        return len(runs)

    instantiate = pipeline.instantiate
    return export


@pytest.fixture
def compared(tmp_path: Path, shared: Callable[..., int]) -> Callable[..., int]:
    """Exports a model in both ways, compares the files, and returns how many runs were shared."""

    def compare(make: Callable[[], nn.Module], example: Any = None, **options: Any) -> int:
        counts, files = [], []
        for shares in (True, False):
            folder = tmp_path / str(shares)
            folder.mkdir(exist_ok=True)
            way = {"repeated_blocks": "auto" if shares else "off"}
            counts.append(shared(make(), example, folder / "model.onnx", **way, **options))
            files.append({each.name: each.read_bytes() for each in folder.iterdir()})
        assert files[0] == files[1]
        assert not counts[1]
        return counts[0]

    return compare


def opened_twice(model: Any, folder: Path) -> Callable[[], nn.Module]:
    """Returns what opens a model's checkpoint beside each of the files of ``compared``."""
    folders = [folder / str(shares) for shares in (True, False)]
    for each in folders:
        model.save_pretrained(each)
    remaining = iter(folders)

    def make() -> nn.Module:
        opened: nn.Module = dynamo_moe.open_checkpoint(next(remaining))
        dynamo_moe.convert(opened)
        return opened

    return make
