"""The command line, ``dynamo-moe``: its commands, and what their exit codes say.

Exit codes: 0 success; 1 an export, a verification, a compilation, an engine or the reading of a
file failed; 2 what was asked for does not exist or makes no sense. A report goes to stdout, all
else to stderr, what the model's own code prints included.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dynamo_moe.cli import engines, models, products, serving  # noqa: F401  Importing adds the commands.
from dynamo_moe.cli.common import app

__all__ = ["app", "main"]


def _version(asked: bool) -> None:
    if asked:
        import dynamo_moe

        typer.echo(f"dynamo-moe {dynamo_moe.__version__}")
        raise typer.Exit


@app.callback()
def _dynamo_moe(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """PyTorch models with Mixture-of-Experts layers, to ONNX."""


def main() -> None:
    """Runs the command line."""
    app()
