"""The exported files are byte for byte the recorded ones."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from exported_files import DIGESTS, FILES, VERSIONS, digests

# What is written in the same ways as others: forms of a file, as of the operators alone, and models
# whose experts are found as another's are. The last has two sets of layers and one of vision.
FURTHER = {
    *("swin-moe-digits-unrolled", "swin-moe-digits-dense", "granitemoe", "llama4"),
    *("torchtitan-score-before", "swin-moe-dropless", "qwen3-omni-moe"),
}
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
RECORDED = json.loads(DIGESTS.read_text())


@pytest.mark.skipif(
    RECORDED["versions"] != VERSIONS, reason="recorded with other releases of the packages"
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.every] * (name in FURTHER)) for name in FILES],
)
def test_files_are_as_recorded(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # One example is not converted.
        assert digests(name, tmp_path) == RECORDED["files"][name]


def test_the_recorded_releases_are_the_pinned_ones() -> None:
    """With others, the files are not compared."""
    pins = dict(re.findall(r"^(\S+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    recorded = {name: release.partition("+")[0] for name, release in RECORDED["versions"].items()}
    assert recorded == {name: pins[name] for name in recorded}


def test_every_file_is_recorded() -> None:
    assert set(FILES) >= FURTHER
    assert set(RECORDED["files"]) == set(FILES)
