"""Asks a running gateway, for the commands that stand beside it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import typer

from art_core.capture import is_loopback

SECONDS = 30


class NoAnswer(typer.BadParameter):
    """Nothing answers at the address, or not as a gateway does, or not now."""


class NotAccepted(typer.BadParameter):
    """The gateway refuses a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def ask(
    url: str, body: dict[str, Any] | None, api_key: str | None, *, has: Sequence[str] = (), missing: str | None = None
) -> dict[str, Any]:
    """Return the JSON object that a gateway answers to a GET or, with a body, to a POST.

    ``has`` are keys that its answer has; ``missing`` is what a 404 means. Raises NotAccepted if it refuses, and NoAnswer if
    nothing answers, or something else than a gateway.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, content, headers)
        # A proxy of the environment can't reach this machine's own addresses.
        own = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname) else []
        with urllib.request.build_opener(*own).open(request, timeout=SECONDS) as answer:
            found = json.load(answer)
        if not isinstance(found, dict) or not found.keys() >= set(has):
            raise ValueError("it is another server")
        return found
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2000).decode(errors="replace")
        message = f"the gateway at {url} answers {error.code}: {missing if missing and error.code == 404 else said}"
        if error.code == 429 or error.code >= 500:
            raise NoAnswer(message) from error
        raise NotAccepted(message, error.code) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"no gateway answers at {url}: {error}; pass its address") from error
