"""Make text safe to show, log or store: without keys and passwords, and without terminal control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

LEFT_OUT = "left out"
"""Replaces the value of a secret setting."""
HIDDEN = "***"
"""Replaces a key in a text."""
SHORTEST_KEY = 8
"""Characters; a shorter value isn't a key, and may occur in any text."""
SECRET_SETTING = re.compile(
    "token(?!i[sz]|s)|^(?!.*(max|min|num)).*tokens|key|passw|secret|credential|authorization", re.IGNORECASE
)
"""Matches the names of secret settings, but not ``max_tokens`` and the like."""
SECRET_VARIABLE = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)
"""Matches the names of environment variables that hold a key, or headers with one."""
USER_INFO = re.compile(r"(?<=://)[^/?#\s'\"]*@")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and newline: control characters move the cursor, rename the window, or write to the clipboard."""


def without_access(value: Any) -> Any:
    """Return settings with LEFT_OUT for those with secret names, and addresses without user and password; tuples become lists.

    Numbers stay, whatever their names: they aren't secrets.
    """
    if isinstance(value, Mapping):
        return {name: _setting(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_access(item) for item in value]
    return USER_INFO.sub("", value) if isinstance(value, str) else value


def left_out(name: str, value: Any) -> Any:
    """Return a setting that will be reused, unchanged, or LEFT_OUT if any part of it is secret."""
    return value if without_access({name: value}) == {name: value} else LEFT_OUT


def without_keys(text: str, *keys: str | None) -> str:
    """Return a text without ``keys``, the environment's keys, and user names and passwords in addresses.

    Errors contain them: servers repeat the key that they refuse, and clients the address that they can't reach.
    """
    text = USER_INFO.sub("", text)
    secrets = {key for key in (*keys, *_environment_keys()) if key and len(key) >= SHORTEST_KEY}
    for key in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(key, HIDDEN)
    return text


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped as in Python, such as ``\x1b``."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def describe_error(error: BaseException) -> str:
    """Return the exception as one line with its type, without the API keys that libraries include in their messages."""
    try:
        said = " ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception as broken:  # noqa: BLE001 - a __str__ of other people's code
        said = f"its text can't be read: {type(broken).__name__} in __str__"
    text = printable(without_keys(" ".join(said.split())))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _setting(name: str, value: Any) -> Any:
    if value is None or isinstance(value, int | float) or not SECRET_SETTING.search(name):
        return without_access(value)
    return LEFT_OUT


def _environment_keys() -> Iterator[str]:
    for name, value in os.environ.items():
        # A path to a key isn't a key. It must exist, because base64 may begin with "/" too.
        if SECRET_VARIABLE.search(name) and not (value.startswith("/") and os.path.exists(value)):
            yield value
            if "HEADERS" in name.upper():
                yield from _header_words(value)


def _header_words(text: str) -> Iterator[str]:
    """Yield the words of each header's value, because a server repeats ``Bearer KEY`` or only the key."""
    for header in re.split(r"[,\n]", unquote(text)):
        yield from re.findall(r"[^\s\"'{}]+", re.split("[=:]", header, maxsplit=1)[-1])
