"""The exported files are byte for byte the recorded ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from exported_files import DIGESTS, FILES, VERSIONS, digests

# The longest to export, with two sets of layers and one of vision.
LARGE = ("qwen3-omni-moe",)
RECORDED = json.loads(DIGESTS.read_text())


@pytest.mark.skipif(
    RECORDED["versions"] != VERSIONS, reason="recorded with other releases of the packages"
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.every] * (name in LARGE)) for name in FILES],
)
def test_files_are_as_recorded(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # One example is not converted.
        assert digests(name, tmp_path) == RECORDED["files"][name]


def test_every_file_is_recorded() -> None:
    assert set(RECORDED["files"]) == set(FILES)
