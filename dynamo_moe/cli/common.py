"""Shared by the commands: options, errors, steps, reports."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dynamo_moe.cli.model_loading import UsageError, users_code

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Commands of the way to TensorRT come after the others, under this heading.
ENGINES = "Engines"

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print errors, and nothing else but what --json asks for."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show an error's traceback, and how far PyTorch traced the model."
    ),
]


@contextmanager
def failures(debug: bool) -> Iterator[None]:
    """Turns exceptions into one line on stderr and an exit code."""
    try:
        yield
    except Exception as error:
        line = message_of(error, hint="" if debug else " (--debug shows where)")
        text = Text.assemble(("error: ", "bold red"), line)
        Console(stderr=True).print(text, soft_wrap=True)
        if debug:
            traceback.print_exception(error)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None


def message_of(error: BaseException, *, hint: str = "") -> str:
    """Returns an exception's message and notes in one line.

    Args:
        error: The exception.
        hint: Added where the message does not say all that a user needs.
    """
    # The messages of these, and our own, are made for users. The others need their type and their
    # cause to be understood: torch wraps what a model's own forward raised.
    made_for_users = isinstance(error, (AssertionError, ImportError, OSError, ValueError))
    notes = getattr(error, "__notes__", [])
    ours = type(error).__module__.startswith(("dynamo_moe.", "trt_plugin."))
    while error.__cause__ and not (made_for_users or ours):
        error = error.__cause__
    line, *_ = str(error).strip().splitlines() or [""]
    if not (ours or (made_for_users and line)):
        line = f"{type(error).__name__}: {line}"
    # Notes of many lines, such as a compiler's output, are for --debug.
    short = [note for note in notes if "\n" not in note]
    return "; ".join((line, *short)) + ("" if made_for_users and line else hint)


@contextmanager
def step(console: Console, doing: str, *, status: bool = True) -> Iterator[None]:
    """Shows what is being done, and how long it took; the model's own code may print meanwhile."""
    started = time.perf_counter()
    shown = console.status(f"{doing} ...") if status else nullcontext()
    with shown, users_code(quiet=console.quiet):
        yield
    seconds = time.perf_counter() - started
    console.print(Text.assemble(f"{doing} ", (f"{seconds:.1f} s", "dim")), soft_wrap=True)


@contextmanager
def show_bytes(console: Console, doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that shows how many bytes of how many are done, on a terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
    ) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def need_file(path: Path) -> None:
    """Raises a :class:`UsageError` if there is no such file."""
    if not path.exists():
        raise UsageError(f"no such file: {path}")


def need_writable(path: Path) -> None:
    """Raises a :class:`UsageError` if no file can be written there."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file to write")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file, and would be replaced by one: name another")
    if not path.parent.is_dir():
        raise UsageError(f"no such folder: {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write into folder: {path.parent}")


def need_writable_folder(path: Path) -> None:
    """Raises a :class:`UsageError` if there cannot be a folder there to write into."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: name a folder")
    above = path if path.is_dir() else path.parent
    if not above.is_dir():
        raise UsageError(f"no such folder: {above}")
    if not os.access(above, os.W_OK):
        raise UsageError(f"cannot write into folder: {above}")


def print_report(report: Any, *, as_json: bool, quiet: bool, **beside: Any) -> None:
    """Prints a report as JSON, behind what stands ``beside`` it there, or for a terminal."""
    if as_json:
        print_json({**beside, **report.to_dict()})
    elif not quiet:
        Console().print(report)


def need_triton() -> None:
    """Raises an ImportError that says how to install Triton, if it is missing."""
    if find_spec("triton") is None:
        raise ImportError("compiling needs Triton: pip install 'dynamo-moe[kernels]'")


def known_architectures(names: Sequence[str]) -> list[str]:
    """Returns architectures as ``sm_90``, or raises a :class:`UsageError` for an unknown one."""
    from custom_ops.kernels.architectures import architecture

    try:
        return [architecture(name).name for name in names]
    except ValueError as error:
        raise UsageError(f"--arch: {error}") from None


def name_architecture() -> str:
    """Returns how to name a GPU architecture, for an error."""
    from custom_ops.kernels.architectures import ARCHITECTURES

    known = ", ".join(architecture.name for architecture in ARCHITECTURES.values())
    return f"name a GPU architecture with --arch: {known}"


def print_json(report: Mapping[str, Any]) -> None:
    """Prints a report as JSON, numbers that are not finite as strings."""
    typer.echo(json.dumps(_finite(report), indent=2, default=str))


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by strings."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
