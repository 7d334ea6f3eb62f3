"""The README's example runs as written, and its counts are those of the pages it names."""

import re
from pathlib import Path

import pytest

from picture_models import PICTURE_MODELS
from public_moe import CASES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, README.name, "exec"), {"__name__": "__main__"})  # noqa: S102  Our own.
    assert "agrees" in capsys.readouterr().out
    assert (tmp_path / "swin_moe.onnx").is_file()


def test_counts_of_public_structures() -> None:
    page = (ROOT / "docs" / "reference" / "public_structures.md").read_text(encoding="utf-8")
    (converted,) = re.findall(r"\| after `convert` \| (\d+) \|", page)
    assert f"has {len(CASES)} small models" in page
    assert f"| of {len(CASES)} models | converted |" in page
    readme = " ".join(README.read_text(encoding="utf-8").split())
    assert f"[{converted} of {len(CASES)} structures]" in readme


def test_count_of_models_that_see_pictures() -> None:
    count = sum(not model.refused for model in PICTURE_MODELS.values())
    assert f"{count} [that see pictures]" in " ".join(README.read_text("utf-8").split())


def test_count_of_architectures() -> None:
    page = (ROOT / "docs" / "reference" / "transformers_models.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if "| `moe." in line and "not exported" not in line]
    assert f"**transformers models**: {len(rows)} architectures" in README.read_text("utf-8")
