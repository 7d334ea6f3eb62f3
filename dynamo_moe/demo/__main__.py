"""``python -m dynamo_moe.demo``: train a small Swin-MoE on real images, export it, run it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(add_completion=False)

_NEEDED = ("sklearn", "onnxruntime", "matplotlib", "networkx", "fast_sugiyama")


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder for files and pictures.")] = Path(
        "demo-output"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and the training.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")] = False,
) -> None:
    """Trains a small Swin-MoE on handwritten digits, exports it four ways, compares the files."""
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        _fail(f"the demo needs {', '.join(missing)}: pip install 'dynamo-moe[demo]'")
    # Importing torch and onnx takes seconds, which --help and the check above need not wait for.
    from dynamo_moe.demo.pipeline import DemoError, run
    from dynamo_moe.demo.view import final_view

    console = Console()
    try:
        result = run(output, epochs=epochs, seed=seed, console=None if quiet else console)
    except DemoError as error:
        _fail(str(error))
    if not quiet:
        console.rule("Result")
    console.print(final_view(result))
    if result.failures:
        _fail("; ".join(result.failures))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
