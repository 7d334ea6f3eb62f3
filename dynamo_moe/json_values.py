"""Reports as JSON's values."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def json_values(report: DataclassInstance) -> dict[str, Any]:
    """Returns a dataclass as dicts, lists, strings and numbers; paths are strings.

    Raises:
        TypeError: If it holds anything else.
    """
    plain: dict[str, Any] = json.loads(json.dumps(asdict(report), default=os.fspath))
    return plain
