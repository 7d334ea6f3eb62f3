"""``dynamo-moe triton-model``: engines as a server's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import trt_plugin
from dynamo_moe.cli.common import (
    ENGINES,
    Debug,
    Quiet,
    app,
    failures,
    need_file,
    need_writable_folder,
)
from dynamo_moe.cli.model_loading import UsageError


@app.command(
    rich_help_panel=ENGINES,
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe triton-model swin.engine models/swin[/]\n\n"
    "[cyan]dynamo-moe triton-model qwen3.engine models/qwen3 --ranks 4[/]",
)
def triton_model(
    engine: Annotated[Path, typer.Argument(metavar="FILE.engine", help="The engine.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The model's folder, in a model repository.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="FILE.engine is the name of engines for N ranks, FILE.rank0.engine and so on.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="The GPU of each rank, [cyan]0,1[/].", show_default="0 and so on"
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a model of the Triton Inference Server: engines under its names, and its config.

    The engines are copied. Nothing is written if the folder is there already.
    """
    with failures(debug):
        from dynamo_moe.files.rank_files import rank_path

        engines = [engine] if ranks is None else [rank_path(engine, each) for each in range(ranks)]
        for file in engines:
            need_file(file)
        if folder.exists():
            raise UsageError(f"{folder} exists already: name a new folder")
        need_writable_folder(folder)
        numbers = None if gpus is None else _numbers(gpus)
        if numbers is not None and len(set(numbers)) != (ranks or 0):
            raise UsageError(f"--gpus needs a number for each of --ranks; got {gpus}")
        files = trt_plugin.write_triton_model(engines, folder, gpus=numbers)
        if not quiet:
            console = Console(stderr=True)
            console.print(f"Wrote {files[0].parent}", soft_wrap=True)
            if any(_needs_library(file) for file in engines):
                library = trt_plugin.library_path(self_registering=True)
                console.print(
                    f"Start the server with --backend-config=tensorrt,plugins={library}",
                    soft_wrap=True,
                )


def _needs_library(engine: Path) -> bool:
    """Whether an engine has layers of the plugin, and not its library."""
    contents = trt_plugin.read_engine(engine)
    return bool(contents.programs) and contents.library is None


def _numbers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"--gpus must be numbers with commas between them; got {text}")
    return [int(number) for number in numbers]
