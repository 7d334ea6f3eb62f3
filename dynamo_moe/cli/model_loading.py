"""A model and its example inputs, as a command line names them; and how its code is kept quiet."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEFAULT_FACTORIES = ("model", "build")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")


class UsageError(ValueError):
    """The command line asks for something that does not exist or makes no sense."""


def is_checkpoint(model: str) -> bool:
    """Whether a MODEL on the command line is the folder of a checkpoint; a package is a module.

    Raises:
        UsageError: If it is a folder of something else.
    """
    folder = Path(model)
    if not folder.is_dir() or (folder / "__init__.py").is_file():
        return False
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is a folder without config.json: no checkpoint")
    return True


def load_model(spec: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Returns the model of ``package.module:factory`` or ``path/to/file.py:factory``.

    The factory is a model, or a callable without required arguments that returns a model or
    (model, arguments). Without ``:factory`` it is called ``model``, or else ``build``. The random
    seed is 0 when it runs, so one that draws its weights draws the same ones each time.

    Returns:
        The model and its example arguments, or None if there are none.

    Raises:
        UsageError: There is no such module or factory, or what the name means is not a factory.
    """
    location, _, name = spec.partition(":")
    # A drive letter is not a module.
    if len(location) == 1 and name[:1] in ("\\", "/"):
        drive, (location, _, name) = location, name.partition(":")
        location = f"{drive}:{location}"
    is_file = location.endswith(".py") or "/" in location or "\\" in location
    module = _import_file(Path(location)) if is_file else _import_module(location)
    name, factory = _find(module, name, location)
    torch.manual_seed(0)
    return _call(factory, name)


def parse_shapes(shapes: Sequence[str]) -> tuple[Tensor, ...]:
    """Makes a tensor of random values for each shape, the same in every run.

    Raises:
        UsageError: A shape is not a list of sizes, or its dtype is unknown.

    Example:
        >>> [(list(x.shape), x.dtype) for x in parse_shapes(["1,3", "2,8:int64"])]
        [([1, 3], torch.float32), ([2, 8], torch.int64)]
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(_random(text, generator) for text in shapes)


def parse_dynamic(dimensions: Sequence[str]) -> dict[str, dict[int, str | None]]:
    """Returns the ``dynamic_shapes`` of ``NAME:DIM=LABEL``; without a label one is static.

    Raises:
        UsageError: One has another form, or a dimension is there twice.

    Example:
        >>> parse_dynamic(["tokens:1=sequence", "scale:0="])
        {'tokens': {1: 'sequence'}, 'scale': {0: None}}
    """
    shapes: dict[str, dict[int, str | None]] = {}
    for text in dimensions:
        match = re.fullmatch(r"([^\W\d]\w*):(\d+)=([^\W\d]\w*)?", text, re.ASCII)
        if match is None:
            raise UsageError(
                f"--dynamic {text!r} is not NAME:DIM=LABEL like tokens:1=sequence, or NAME:DIM= "
                "for a static dimension"
            )
        name, dimension, label = match[1], int(match[2]), match[3]
        if dimension in shapes.setdefault(name, {}):
            raise UsageError(f"--dynamic names dimension {dimension} of {name!r} twice")
        shapes[name][dimension] = label
    return shapes


def check_example(
    model: nn.Module, args: tuple[Any, ...], dynamic: Mapping[str, Mapping[int, str | None]] | None
) -> None:
    """Checks the arguments' number, and the names of symbolic dimensions.

    Raises:
        UsageError: The model's forward does not take this number of arguments, or ``dynamic`` names
            an input or a dimension that does not exist.
    """
    from dynamo_moe.tracing import dynamic_shapes

    try:
        dynamic_shapes.resolve(model, args, {}, dynamic)
    except TypeError as error:
        raise UsageError(f"{error}; --shape is given once for each input, in their order") from None
    except ValueError as error:
        raise UsageError(f"--dynamic {str(error).removeprefix('dynamic_shapes ')}") from None


@contextmanager
def users_code(*, quiet: bool) -> Iterator[None]:
    """Keeps what the model's code prints off stdout, and its ``sys.exit`` from being ours.

    Args:
        quiet: Nothing is shown at all.
    """
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO() if quiet else sys.stderr))
        if quiet:
            stack.enter_context(redirect_stderr(StringIO()))
            # PyTorch's handlers hold the stderr of its import.
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
        try:
            yield
        except SystemExit as error:
            said = f"the model's code called sys.exit({error.code!r})"
            raise ValueError(f"{said} (--debug shows where)") from error


def _random(text: str, generator: torch.Generator) -> Tensor:
    sizes, colon, dtype_name = text.partition(":")
    if colon and dtype_name not in _DTYPES:
        raise UsageError(f"shape {text!r}: the dtype must be one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, dtype_name or "float32")
    try:
        shape = [int(size) for size in sizes.split(",")]
    except ValueError:
        message = f"shape {text!r} is not a list of sizes like 1,3,224,224 or 2,128:int64"
        raise UsageError(message) from None
    if min(shape) < 0:
        raise UsageError(f"shape {text!r} has a negative size: give the sizes of an example")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    # Below the number of rows of any embedding.
    return torch.randint(0, 2, shape, generator=generator, dtype=dtype)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    # Not the file's own name, which may be another module's.
    name = f"_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As `python file.py` does, so that the file's neighbours can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    # Dataclasses look their module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is neither a package.module nor a file.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module is there, and imports another one that is not.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"no module named {error.name!r}") from None


def _find(module: ModuleType, name: str, location: str) -> tuple[str, Any]:
    for candidate in (name,) if name else _DEFAULT_FACTORIES:
        if hasattr(module, candidate):
            return candidate, getattr(module, candidate)
    if not name:
        expected = " or ".join(repr(default) for default in _DEFAULT_FACTORIES)
        raise UsageError(f"{location} has no {expected}: write {location}:FACTORY")
    close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"{location} has no {name!r}{hint}")


def _call(factory: Any, name: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    from dynamo_moe.evaluation import check_model

    made, args = factory, None
    if not isinstance(factory, nn.Module):
        _check_factory(factory, name)
        made = factory()
    if isinstance(made, tuple) and len(made) == 2:
        made, args = made
        if isinstance(args, Tensor):
            args = (args,)
        if not isinstance(args, tuple):
            kind = type(args).__name__
            raise UsageError(f"{name!r} must return a tuple of arguments, got {kind}")
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise UsageError(f"{name!r} must return a torch.nn.Module or (module, args), got {kind}")
    try:
        check_model(made)
    except TypeError as error:
        raise UsageError(f"{name!r} must return another model: {error}") from None
    return made, args


def _check_factory(factory: Any, name: str) -> None:
    if not callable(factory):
        kind = type(factory).__name__
        raise UsageError(f"{name!r} is not a factory: it is of type {kind}, and cannot be called")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # Some builtins have none.
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if required:
        raise UsageError(
            f"{name!r} needs arguments ({', '.join(required)}); name a factory that needs none"
        )
