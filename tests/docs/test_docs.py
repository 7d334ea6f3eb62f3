"""The tutorials and how-to pages run as written and print the output they show.

The ``python`` blocks of a page run in order in one namespace; a block that begins with the comment
``# name.py`` becomes that file. A ``text`` block is the output of the block before it. Functions
named ``test_*`` are called, as pytest would. In ``console`` blocks, ``dynamo-moe`` commands run
and print what is shown. A
``py`` or ``cpp`` block that begins with the comment ``# path/in/repository`` quotes lines of that
file.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from pathlib import Path

import onnxruntime
import pytest
import rich
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import dynamo_moe
from dynamo_moe.cli import app
from dynamo_moe.conversion import registry
from dynamo_moe.models import DroplessMoEMlp

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*DOCS.glob("tutorials/*.md"), *DOCS.glob("how-to/*.md")])
SLOW = {
    "models_that_see_pictures",
    "swin_moe_to_onnx",
    "swin_transformer_moe",
    "transformers_models",
    "upcycle_a_dense_model",
}

BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<content>.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ dynamo-moe (.*)\n((?:[^$\n].*\n|\n)*)", re.MULTILINE)
FILE = re.compile(r"# (\S+\.py)\n")
# What may differ between runs or machines: errors, times, versions.
VARYING = re.compile(r"\d\.\d+e[-+]\d\d|\d+\.\d s|(?<=ONNX Runtime )[\d.]+|(?<=pytorch )[\d.+\w]+")


def comparable(output: str) -> str:
    # The width of a table's cells depends on what varies.
    lines = (re.sub(r" +|[─━]+", " ", VARYING.sub("#", line)) for line in output.splitlines())
    return "\n".join(line.rstrip() for line in lines if line.strip())


def matches(printed: str, shown: str) -> bool:
    """Whether the output is as shown; a line of three dots stands for any number of lines."""
    parts = re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)
    pattern = r"\n?.*".join(re.escape(comparable(part)) for part in parts)
    return re.fullmatch(pattern, comparable(printed), re.DOTALL) is not None


def run_commands(content: str) -> None:
    """Runs the lines ``$ dynamo-moe ...``; what is shown below one is what it prints."""
    for line, shown in COMMAND.findall(content):
        result = CliRunner().invoke(app, shlex.split(line))
        assert result.exit_code == 0, f"{line}: {result.output}"
        if shown:
            assert matches(result.output, shown), f"shown:\n{shown}\nprinted:\n{result.output}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder whose files can be imported. Adapters are unregistered after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    rich.reconfigure(width=80, color_system=None, force_terminal=False)
    return tmp_path


def test_there_are_pages() -> None:
    assert len(PAGES) > 8


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in PAGES],
    ids=lambda page: page.stem,
)
@pytest.mark.page
def test_page_runs(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": f"test_{page.stem}"}
    printed = ""
    for block in BLOCK.finditer(text):
        kind, content = block["kind"], block["content"]
        if kind == "text":
            assert matches(printed, content), f"shown:\n{content}\nprinted:\n{printed}"
            printed = ""
            continue
        if kind == "python":
            assert not printed, f"printed, and not shown: {printed}"
            file = FILE.match(content)
            if file:
                (folder / file[1]).write_text(content, encoding="utf-8")
            else:
                # Line numbers in a traceback are those of the page.
                code = "\n" * text.count("\n", 0, block.start("content")) + content
                exec(compile(code, str(page), "exec"), namespace)  # noqa: S102  Our own.
            printed = capsys.readouterr().out
        elif kind == "console":
            run_commands(content)
    assert not printed, f"printed, and not shown: {printed}"
    for name, function in list(namespace.items()):
        if name.startswith("test_") and inspect.isfunction(function):
            fixtures = {"tmp_path": folder}
            function(**{name: fixtures[name] for name in inspect.signature(function).parameters})


QUOTED = re.compile(r"^```(?:py|cpp)\n(?:#|//) (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTES = [quote for page in PAGES for quote in QUOTED.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("file", "lines"), QUOTES, ids=[file for file, _ in QUOTES])
def test_code_that_a_page_quotes_is_in_the_file(file: str, lines: str) -> None:
    content = (DOCS.parent / file).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines.splitlines() if line and line not in content] == []


def test_gelu_of_onnxruntimes_moe(tmp_path: Path) -> None:
    """It is the tanh form, as the pages say; with weights of 1, the expert returns GELU itself."""
    layer = DroplessMoEMlp(1, 1, num_experts=1, top_k=1)
    for name, parameter in layer.named_parameters():
        torch.nn.init.constant_(parameter, float(name in ("w1", "w2")))
    model = torch.nn.Sequential(layer).eval()
    dynamo_moe.convert(model)
    path = tmp_path / "gelu.onnx"
    dynamo_moe.export(model, torch.zeros(2, 1), path, target="onnxruntime")
    x = torch.linspace(-6, 6, 10_001)[:, None]
    y = torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(y, F.gelu(x, approximate="tanh"), rtol=0, atol=1e-6)
    assert 4e-4 < (y - F.gelu(x)).abs().max() < 5.5e-4
