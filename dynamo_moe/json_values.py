"""Reports as JSON's values."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any


def json_values(report: Any) -> dict[str, Any]:
    """Returns a dataclass as dicts, lists, strings and numbers; paths are strings.

    Raises:
        TypeError: If it holds anything else.
    """
    plain: dict[str, Any] = json.loads(json.dumps(asdict(report), default=os.fspath))
    return plain
