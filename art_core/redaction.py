"""What people, logs and stores are shown: nothing that gives access, and nothing that a terminal obeys. Knows nothing about
where a text comes from or where it goes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

LEFT_OUT = "left out"
"""Stands for a setting that gives access."""
HIDDEN = "***"
"""Stands for a key in a text."""
SHORTEST = 8
"""Characters: what is shorter is no key, and may stand in any text."""
GIVES_ACCESS = re.compile(
    "token(?!i[sz]|s)|^(?!.*(max|min|num)).*tokens|key|passw|secret|credential|authorization", re.IGNORECASE
)
"""In the name of a setting; ``max_tokens`` and its kin give none, nor does a number."""
OF_A_KEY = re.compile("(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)
"""The name of an environment variable that holds a key, or headers with one."""
USER_INFO = re.compile(r"(?<=://)[^/?#\s'\"]*@")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and new line: with these a text moves the cursor, renames the window, or writes to the clipboard."""


def without_access(value: Any) -> Any:
    """Return settings without the values whose names say that they give access, and addresses without user and password."""
    if isinstance(value, Mapping):
        return {name: _named(str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_access(one) for one in value]
    return USER_INFO.sub("", value) if isinstance(value, str) else value


def left_out(name: str, value: Any) -> Any:
    """Return a setting that is kept to be used again, or LEFT_OUT for one that gives access, in whatever part of it."""
    return value if without_access({name: value}) == {name: value} else LEFT_OUT


def without_keys(text: str, *keys: str | None) -> str:
    """Return a text without these keys, those of the environment, and the passwords of addresses: servers say the key that they
    refuse, and clients the address that they cannot reach."""
    text = USER_INFO.sub("", text)
    known = {key for key in (*keys, *_of_environment()) if key and len(key) >= SHORTEST}
    for key in sorted(known, key=len, reverse=True):  # one may be a part of another
        text = text.replace(key, HIDDEN)
    return text


def printable(text: str) -> str:
    r"""Return a text with its control characters as they are written in Python, such as ``\x1b``."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _named(name: str, value: Any) -> Any:
    if value is None or isinstance(value, int | float) or not GIVES_ACCESS.search(name):
        return without_access(value)
    return LEFT_OUT


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        # A path is where a key is, not a key; base64 may begin with "/" too.
        if OF_A_KEY.search(name) and not (value.startswith("/") and os.path.exists(value)):
            yield value
            if "HEADERS" in name.upper():
                yield from _of_headers(value)


def _of_headers(text: str) -> Iterator[str]:
    """Yield the words of every header's value, without its name: a server says ``Bearer KEY`` back, or the key alone."""
    for header in re.split(r"[,\n]", unquote(text)):
        yield from re.findall(r"[^\s\"'{}]+", re.split("[=:]", header, maxsplit=1)[-1])
