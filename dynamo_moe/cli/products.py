"""``dynamo-moe inspect`` and ``compile``: the commands that begin with an exported file."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import dynamo_moe
import trt_plugin
from dynamo_moe.cli.common import (
    Debug,
    Json,
    Quiet,
    app,
    failures,
    known_architectures,
    name_architecture,
    need_file,
    need_triton,
    need_writable,
    print_report,
)
from dynamo_moe.cli.model_loading import UsageError
from dynamo_moe.cli.offloading import ResidentExperts, ResidentMemory, offloading

if TYPE_CHECKING:
    from custom_ops.kernels.layer import Layer


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
        typer.Option(metavar="PICTURE", help="Draw an ONNX file's graph to a .svg or .png file."),
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
            need_writable(picture)
        if trt_plugin.is_bundle(file) or trt_plugin.is_engine(file):
            if picture:
                raise UsageError(f"{file} is not an ONNX file: there is no graph to draw")
            is_bundle = trt_plugin.is_bundle(file)
            contents = trt_plugin.read(file) if is_bundle else trt_plugin.read_engine(file)
            print_report(contents, as_json=as_json, quiet=quiet, path=file)
            return
        summary = dynamo_moe.inspect(file)
        print_report(summary, as_json=as_json, quiet=quiet)
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
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH", help="GPU architecture, [cyan]sm_90[/] or [cyan]90[/]; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.moek",
            help="The file to write. Default: FILE.moek beside FILE.onnx.",
        ),
    ] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="A layer to compile for, with or without a file; may be repeated.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most tokens that a layer is run with; kernels for more are left out.",
        ),
    ] = None,
    resident_experts: ResidentExperts = None,
    resident_memory: ResidentMemory = None,
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
        need_writable(out)
        offload = offloading(resident_experts, resident_memory)
        if offload and not file:
            raise UsageError("of a --spec, write resident_experts=R into it")
        need_triton()
        devices = known_architectures(arch or [])
        if not devices:
            raise UsageError(f"what to compile for: {name_architecture()}")
        started = time.perf_counter()
        requested = _layers(file, spec or [], offload)
        layers = [replace(layer, tf32=layer.tf32 or tf32) for layer in requested]
        bundle = trt_plugin.compile(
            layers, devices, out, max_tokens=max_tokens, jobs=jobs, progress=not quiet
        )
        seconds = time.perf_counter() - started
        measured = {"path": out, "seconds": round(seconds, 3)}
        print_report(bundle, as_json=as_json, quiet=quiet, **measured)
        console.print(Text.assemble(f"Wrote {out} ", (f"{seconds:.1f} s", "dim")), soft_wrap=True)


def _layers(file: Path | None, specs: list[str], offload: dict[str, Any] | None) -> list[Layer]:
    from dynamo_moe.files.kernel_layers import kernel_layers
    from dynamo_moe.files.offloading import offloaded_kernel_layers

    try:
        described = [trt_plugin.parse_spec(spec) for spec in specs]
    except ValueError as error:
        raise UsageError(f"--spec: {error}") from None
    in_file = kernel_layers(file) if file else []
    if file and not in_file:
        raise ValueError(f"{file} has no MoE nodes of domain 'moe', as files of target plugin do")
    if file and offload:
        in_file = offloaded_kernel_layers(file, **offload)
    return in_file + described
