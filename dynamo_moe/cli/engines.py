"""``dynamo-moe engine`` and ``plugin-path``: what hands a file to TensorRT."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dynamo_moe.cli.common import Debug, Quiet, app, failures, need_file, need_place
from dynamo_moe.cli.model_loading import UsageError


@app.command(
    epilog="Example:\n\n"
    "[cyan]dynamo-moe engine swin.onnx --shapes x=1x1x8x8:32x1x8x8:64x1x8x8 -o swin.engine[/]"
)
def engine(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A file of target plugin.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.engine",
            help="The file to write. Default: FILE.engine beside FILE.onnx.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MIN:USUAL:MAX",
            help="Shapes of an input, like [cyan]x=1x64:16x64:128x64[/]; may be repeated.",
        ),
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.moek",
            help="The bundle of the layers' kernels. Default: FILE.moek if it is there.",
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="File that measured tactics are read from and written to."),
    ] = None,
    with_library: Annotated[
        bool,
        typer.Option("--with-library", help="Store the plugin's library in the engine."),
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build a TensorRT engine, whose MoE layers are the plugin."""
    with failures(debug):
        need_file(file)
        out = out or file.with_suffix(".engine")
        need_place(out)
        beside = file.with_suffix(".moek")
        if kernels:
            need_file(kernels)
        elif beside.is_file():
            kernels = beside
        import trt_plugin

        try:
            profiles = dict(trt_plugin.parse_shapes(text) for text in shapes or ())
        except ValueError as error:
            raise UsageError(f"--shapes: {error}") from None
        started = time.perf_counter()
        trt_plugin.build_engine(
            file,
            out,
            profiles,
            kernels=kernels,
            timing_cache=timing_cache,
            with_library=with_library,
            progress=not quiet,
        )
        seconds = time.perf_counter() - started
        text = Text.assemble(f"Wrote {out} ", (f"{seconds:.1f} s", "dim"))
        Console(stderr=True, quiet=quiet).print(text, soft_wrap=True)


@app.command()
def plugin_path(debug: Debug = False) -> None:
    """Print where the TensorRT plugin's library is, as for trtexec --dynamicPlugins."""
    with failures(debug):
        import trt_plugin

        typer.echo(trt_plugin.library_path())
