"""The command line: ``dynamo-moe export``, ``verify`` and ``inspect``.

Exit codes: 0 success; 1 the export, the verification or the reading of a file failed; 2 what was
asked for does not exist or makes no sense. A report goes to stdout, all else to stderr, what the
model's own code prints included.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dynamo_moe._model_loading import (
    UsageError,
    check_dynamic,
    load_model,
    parse_dynamic,
    parse_shapes,
    users_code,
)

if TYPE_CHECKING:
    from torch import nn

    from dynamo_moe.verification import VerificationReport

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Target(StrEnum):
    """What runs the file."""

    plugin = "plugin"
    dense = "dense"
    onnxruntime = "onnxruntime"


class ExpertsDtype(StrEnum):
    """What the experts' weights are stored in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="[cyan]package.module:factory[/] or [cyan]file.py:factory[/]. The factory returns the "
        "model, or (model, args). Without [cyan]:factory[/] it is called model or build.",
        show_default=False,
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES",
        help="Shape of an example input, once for each input: [cyan]1,3,224,224[/] or "
        "[cyan]2,128:int64[/]. Default: the args of the factory.",
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print errors, and nothing else but what --json asks for."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show an error's traceback, and what PyTorch logs.")
]


@app.command(
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe export my_models.swin:build swin.onnx --shape 1,3,224,224 --verify[/]\n\n"
    "[cyan]dynamo-moe export mixtral.py m.onnx --shape 1,128:int64 --experts-dtype float16[/]\n\n"
    "[cyan]dynamo-moe export mixtral.py m.onnx --shape 1,128:int64 --dynamic ids:1=sequence[/]"
)
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    target: Annotated[
        Target,
        typer.Option(
            metavar="TARGET",
            help="[cyan]plugin[/]: one node per MoE layer, for the TensorRT plugin and ONNX "
            "Runtime. [cyan]dense[/]: standard operators only, every expert on every token. "
            "[cyan]onnxruntime[/]: com.microsoft::MoE.",
        ),
    ] = Target.plugin,
    shape: Shapes = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DIM=LABEL",
            help="Make a dimension of an input symbolic, besides the batch; may be repeated: "
            "[cyan]ids:1=sequence[/]. Without a label it is static: [cyan]scale:0=[/]",
            show_default=False,
        ),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Fix every dimension, the batch too.")
    ] = False,
    opset: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Version of the standard operators, at least 18.", show_default="20"
        ),
    ] = None,
    experts_dtype: Annotated[
        ExpertsDtype | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast the experts' weights: [cyan]float32[/], [cyan]float16[/] or "
            "[cyan]bfloat16[/].",
            show_default=False,
        ),
    ] = None,
    external_data: Annotated[
        bool | None,
        typer.Option(
            "--external-data/--no-external-data",
            help="Weights in a file beside OUT.onnx, or inside it. Default: beside it above 2 GB.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Then run the file in ONNX Runtime and compare.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a PyTorch model with MoE layers to ONNX."""
    console = Console(file=sys.stderr, quiet=quiet)
    with _failures(debug):
        if static and dynamic:
            raise UsageError("--static and --dynamic contradict each other")
        options: dict[str, Any] = {} if opset is None else {"opset": _known_opset(opset)}
        if static or dynamic:
            options["dynamic_shapes"] = parse_dynamic(dynamic) if dynamic else None
        _need_place(out)
        if verify:
            _need_onnxruntime()
        module, args = _load(console, model, shape)
        if args is None:
            raise UsageError(
                f"{model} gives no example inputs: pass --shape, or return (model, args)"
            )
        if dynamic:
            check_dynamic(module, args, options["dynamic_shapes"])
        import torch

        import dynamo_moe

        with _step(console, "Converting"):
            dtype = getattr(torch, experts_dtype.value) if experts_dtype else None
            converted = dynamo_moe.convert(module, experts_dtype=dtype)
        with _step(console, f"Exporting for target {target.value}", mute=not debug):
            exported = dynamo_moe.export(
                module, args, out, target=target.value, external_data=external_data, **options
            )
        verification = _verify(console, out, module, None) if verify else None
        if as_json:
            plain = {
                **exported.to_dict(),
                "conversion": converted.to_dict(),
                "verification": verification and verification.to_dict(),
            }
            _print_json(plain)
        elif not quiet:
            for report in filter(None, (converted, exported, verification)):
                Console().print(report)
        _check(verification)


@app.command(
    epilog="Example: [cyan]dynamo-moe verify swin.onnx my_models.swin:build[/]\n\n"
    "The factory must give the weights that were exported: it loads them, or draws them "
    "(the random seed is the same)."
)
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="An exported file.")],
    model: Model,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="Shape to try, once for each input: [cyan]4,3,224,224[/]. "
            "Default: several batch sizes and lengths.",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare an ONNX file, in ONNX Runtime, with the PyTorch model it came from."""
    console = Console(file=sys.stderr, quiet=quiet)
    with _failures(debug):
        _need_file(file)
        _need_onnxruntime()
        module, args = _load(console, model, shape)
        report = _verify(console, file, module, [args] if shape and args else None)
        if as_json:
            _print_json(report.to_dict())
        elif not quiet:
            Console().print(report)
        _check(report)


@app.command(
    epilog="Example: [cyan]dynamo-moe inspect swin.onnx --picture swin.svg[/]\n\n"
    "With [cyan]-q[/] alone, the exit code says whether the file can be read."
)
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="Any ONNX file.")],
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="PICTURE", help="Draw the graph to a .svg or .png file.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in an ONNX file: MoE layers, weights, operators; and a picture."""
    with _failures(debug):
        _need_file(file)
        if picture and picture.suffix.lower() not in (".svg", ".png"):
            raise UsageError(f"a picture is a .svg or .png file, got {picture.name!r}")
        if picture:
            _need_place(picture)
        import dynamo_moe

        summary = dynamo_moe.inspect(file)
        if as_json:
            _print_json(summary.to_dict())
        elif not quiet:
            Console().print(summary)
        if picture:
            dynamo_moe.draw(file, picture)
            Console(stderr=True, quiet=quiet).print(Text(f"Drew {picture}"), soft_wrap=True)


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


@contextmanager
def _failures(debug: bool) -> Iterator[None]:
    """Turns exceptions into one line on stderr and an exit code."""
    try:
        yield
    except Exception as error:
        if debug:
            raise
        text = Text.assemble(("error: ", "bold red"), _one_line(error))
        Console(stderr=True).print(text, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None


def _one_line(error: BaseException) -> str:
    # The messages of these, and our own, are made for users. Others are understood by their type
    # and their cause: torch wraps what a model's own forward raised.
    made_for_users = isinstance(error, (AssertionError, ImportError, OSError, ValueError))
    ours = type(error).__module__.startswith("dynamo_moe.")
    while error.__cause__ and not (made_for_users or ours):
        error = error.__cause__
    line, *_ = str(error).strip().splitlines() or [""]
    if made_for_users and line:
        return line
    kind = "" if ours else f"{type(error).__name__}: "
    return f"{kind}{line} (--debug shows where)"


@contextmanager
def _step(console: Console, doing: str, *, mute: bool = False) -> Iterator[None]:
    started = time.perf_counter()
    with console.status(f"{doing} ..."), users_code(quiet=console.quiet, mute=mute):
        yield
    seconds = time.perf_counter() - started
    console.print(Text.assemble(f"{doing} ", (f"{seconds:.1f} s", "dim")), soft_wrap=True)


def _load(
    console: Console, model: str, shapes: Sequence[str] | None
) -> tuple[nn.Module, tuple[Any, ...] | None]:
    given = parse_shapes(shapes) if shapes else None
    with _step(console, f"Loading {model}"):
        module, args = load_model(model)
    return module.eval(), given or args


def _verify(
    console: Console, file: Path, module: nn.Module, inputs: Sequence[tuple[Any, ...]] | None
) -> VerificationReport:
    import dynamo_moe

    with _step(console, "Verifying in ONNX Runtime"):
        try:
            return dynamo_moe.verify(file, module, inputs)
        except dynamo_moe.VerificationError as error:
            return error.report


def _check(report: VerificationReport | None) -> None:
    """Fails where a verification, already shown, did."""
    import dynamo_moe

    if report is not None and not report.passed:
        raise dynamo_moe.VerificationError(report)


def _need_file(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"no such file: {path}")


def _need_place(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file to write")
    if not path.parent.is_dir():
        raise UsageError(f"no such folder: {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write into folder: {path.parent}")


def _known_opset(opset: int) -> int:
    import onnx

    from dynamo_moe.exporting import MIN_OPSET

    newest = onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= opset <= newest:
        raise UsageError(f"--opset must be from {MIN_OPSET} to {newest}, got {opset}")
    return opset


def _need_onnxruntime() -> None:
    if find_spec("onnxruntime") is None:
        raise ImportError("verifying needs ONNX Runtime: pip install 'dynamo-moe[onnxruntime]'")


def _print_json(report: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(_finite(report), indent=2, default=str))


def _finite(value: Any) -> Any:
    """The value with NaN and infinity, which JSON has not, as strings."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Runs the command line."""
    app()
