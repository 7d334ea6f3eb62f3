"""The lines of a model's code, for messages."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch import nn

_OF_OTHERS = Path(torch.__file__).parent, Path(__file__).parent / "conversion"


def model_line(error: BaseException) -> str | None:
    """Returns the line of the model that an error comes from, like ``net.py:12 (`y.item()`)``.

    That is the last line in a method of a module that is neither PyTorch's own nor a converted
    module's, or in a function of the same file that it calls. None if there is no such line.
    """
    location: tuple[Path, int] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        of_others = any(path.is_relative_to(folder) for folder in _OF_OTHERS)
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        is_own = code.co_varnames[:1] == ("self",) or hasattr(type(first), code.co_name)
        is_method = issubclass(type(first), nn.Module) and is_own
        if (is_method and not of_others) or (location is not None and path == location[0]):
            location = path, line
    if location is None:
        return None
    path, line = location
    text = linecache.getline(str(path), line).strip()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line} (`{text}`)" if text else f"{path}:{line}"
