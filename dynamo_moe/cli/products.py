"""``dynamo-moe inspect`` and ``compile``: what begins with an exported file."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from dynamo_moe.cli.common import (
    Debug,
    Json,
    Quiet,
    app,
    failures,
    known_architectures,
    name_architecture,
    need_file,
    need_place,
    need_triton,
    print_json,
)
from dynamo_moe.cli.model_loading import UsageError

if TYPE_CHECKING:
    from custom_ops.kernels.layer import Layer

__all__ = ["compile", "inspect"]


@app.command(
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe inspect swin.onnx --picture swin.svg[/]\n\n"
    "[cyan]dynamo-moe inspect swin.moek[/]\n\n"
    "[cyan]dynamo-moe inspect swin.engine[/]\n\n"
    "With [cyan]-q[/] alone, the exit code says whether the file can be read."
)
def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Any ONNX file, a bundle of kernels, or an engine of TensorRT."
        ),
    ],
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="PICTURE",
            help="Draw an ONNX file's graph to a .svg or .png file.",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in an ONNX file (MoE layers, weights, operators), a bundle or an engine.

    Of an engine it shows the kernels of MoE layers; the rest takes TensorRT and a GPU to read.
    """
    with failures(debug):
        need_file(file)
        if picture and picture.suffix.lower() not in (".svg", ".png"):
            raise UsageError(f"a picture is a .svg or .png file, got {picture.name!r}")
        if picture:
            need_place(picture)
        import dynamo_moe
        import trt_plugin

        if trt_plugin.is_bundle(file) or trt_plugin.is_engine(file):
            if picture:
                raise UsageError(f"{file} is not an ONNX file: there is no graph to draw")
            is_bundle = trt_plugin.is_bundle(file)
            found = trt_plugin.read(file) if is_bundle else trt_plugin.read_engine(file)
            if as_json:
                print_json({"path": file, **found.to_dict()})
            elif not quiet:
                Console().print(found)
            return
        summary = dynamo_moe.inspect(file)
        if as_json:
            print_json(summary.to_dict())
        elif not quiet:
            Console().print(summary)
        if picture:
            dynamo_moe.draw(file, picture)
            Console(stderr=True, quiet=quiet).print(Text(f"Drew {picture}"), soft_wrap=True)


@app.command(
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe compile swin.onnx --arch sm_90 --arch sm_89[/]\n\n"
    "[cyan]dynamo-moe compile --arch sm_90 -o layer.moek --spec "
    "experts=8,top_k=2,width=768,hidden=3072,dtype=fp16,activation=silu,gated[/]"
)
def compile(  # noqa: A001  The command's name.
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.onnx]",
            help="A file of target plugin; the kernels of its MoE nodes are compiled.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH",
            help="GPU architecture, [cyan]sm_90[/] or [cyan]90[/]; may be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.moek",
            help="The file to write. Default: FILE.moek beside FILE.onnx.",
            show_default=False,
        ),
    ] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="A layer to compile for, with or without a file; may be repeated.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most tokens that a layer is run with; kernels for more are left out.",
            show_default=False,
        ),
    ] = None,
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32",
            help="Products of float32 experts may round their inputs to TF32; the router's never.",
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            min=1,
            help="Number of kernels to compile at a time. Default: one for each core.",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the kernels that MoE layers need; no GPU is required."""
    console = Console(file=sys.stderr, quiet=quiet)
    with failures(debug):
        if file:
            need_file(file)
        elif not spec:
            raise UsageError("what to compile for: name an ONNX file, or a layer with --spec")
        if not out:
            if not file:
                raise UsageError("where to write to: name a file with -o OUT.moek")
            out = file.with_suffix(".moek")
        need_place(out)
        need_triton()
        devices = known_architectures(arch or [])
        if not devices:
            raise UsageError(f"what to compile for: {name_architecture()}")
        started = time.perf_counter()
        layers = [replace(each, tf32=each.tf32 or tf32) for each in _layers(file, spec or [])]
        import trt_plugin

        bundle = trt_plugin.compile(
            layers, devices, out, max_tokens=max_tokens, jobs=jobs, progress=not quiet
        )
        seconds = time.perf_counter() - started
        if as_json:
            print_json({"path": out, "seconds": round(seconds, 3), **bundle.to_dict()})
        elif not quiet:
            Console().print(bundle)
        console.print(Text.assemble(f"Wrote {out} ", (f"{seconds:.1f} s", "dim")), soft_wrap=True)


def _layers(file: Path | None, specs: list[str]) -> list[Layer]:
    import trt_plugin
    from dynamo_moe.files.kernel_layers import kernel_layers

    try:
        given = [trt_plugin.parse_spec(spec) for spec in specs]
    except ValueError as error:
        raise UsageError(f"--spec: {error}") from None
    found = [each.layer for each in kernel_layers(file)] if file else []
    if file and not found:
        raise ValueError(f"{file} has no MoE nodes of domain 'moe', as files of target plugin do")
    return found + given
