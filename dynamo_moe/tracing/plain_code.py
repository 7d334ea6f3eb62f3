"""Whether a model's own code computes from its arguments and from what its objects hold alone.

A short list of what is known, and no other: code that imports, writes attributes or globals, reads
a global object, looks itself up (``globals``, ``vars``, ``id``) or keeps an object in a closure may
do otherwise for the next block without that anything compared shows it.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Collection
from types import FrameType, ModuleType
from typing import Any

_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float"),
        *("frozenset", "int", "isinstance", "issubclass", "len", "list", "max", "min", "pow"),
        *("range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple"),
        *("type", "zip"),
    }
)
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")
_SPECIAL = frozenset({"__call__", "__class__", "__init__", "__name__"})
# Writes to what is the code's own.
_WRITES = ("STORE_FAST", "STORE_DEREF", "STORE_SUBSCR", "STORE_SLICE", "DELETE_FAST")
_PACKAGES = frozenset(
    {"torch", "math", "typing", "custom_ops", "dynamo_moe", "transformers", "torchvision", "timm"}
)


def objection(frame: FrameType, simple: Collection[type], *, nested: bool) -> str | None:
    """Returns what in a called function's code is not known to be harmless; None if all is.

    Args:
        frame: The call.
        simple: Types whose values cannot change.
        nested: Whether another function that was looked at has made it: its closure then holds
            that one's variables.
    """
    code = frame.f_code
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, str(instruction.argval)
        if operation.startswith(("IMPORT", "STORE", "DELETE")):
            outer = operation == "STORE_DEREF" and name in code.co_freevars
            if outer or not operation.startswith(_WRITES):
                return f"{code.co_qualname} writes or imports {name}"
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            error = getattr(builtins, name, None)
            known = name in _BUILTINS or (
                isinstance(error, type) and issubclass(error, BaseException)
            )
            if name in frame.f_globals:
                known = _is_fixed(frame.f_globals[name], simple)
            if not known:
                return f"{code.co_qualname} uses the global {name}"
        elif operation.startswith(_READS) and name.startswith("__") and name not in _SPECIAL:
            return f"{code.co_qualname} uses {name}"
    for name in () if nested else code.co_freevars:
        if name not in frame.f_locals or not _is_fixed(frame.f_locals[name], simple):
            return f"{code.co_qualname} uses {name} of another function"
    return None


def _is_fixed(value: Any, simple: Collection[type]) -> bool:
    """Whether a value is of a kind whose changes are seen: no object with a state of its own."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _PACKAGES
    return type(value) in simple or isinstance(value, (type, types.FunctionType))
