"""Which of a run's settings may be seen by others: all but what gives access. Knows nothing about W&B or what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LEFT_OUT = "left out"
GIVES_ACCESS = re.compile("token(?!i[sz])|key|passw|secret|credential|authorization", re.IGNORECASE)
"""In the name of a setting; numbers, such as ``max_tokens``, give none."""
USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")


def without_access(value: Any) -> Any:
    """Return settings without the values whose names say that they give access, and addresses without user and password."""
    if isinstance(value, Mapping):
        return {name: _named(str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_access(one) for one in value]
    return USER_INFO.sub("", value) if isinstance(value, str) else value


def _named(name: str, value: Any) -> Any:
    if value is None or isinstance(value, int | float) or not GIVES_ACCESS.search(name):
        return without_access(value)
    return LEFT_OUT
