"""The README's example runs as written."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, README.name, "exec"), {"__name__": "__main__"})  # noqa: S102  Our own.
    assert "agrees" in capsys.readouterr().out
    assert (tmp_path / "swin_moe.onnx").is_file()
