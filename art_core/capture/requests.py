"""What a client has sent, read and checked. Pure; knows nothing about what answers."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import orjson

from art_core.capture.http import Refused
from art_core.capture.shape import DEEPEST, too_deep
from art_core.types import JsonDict


def name(header: str | None) -> str | None:
    """Return a name that a header gives."""
    # Plugins send names percent-encoded: a header holds Latin-1 only.
    return unquote(header) if header else None


def json_object(body: bytes) -> JsonDict:
    """Return the object that a body holds; Refused for anything else."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the request body is not JSON: {error}", status=400, code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(f"the request body is a {type(value).__name__}; send a JSON object", status=400)
    if too_deep(body, value):
        raise Refused(f"the request body is nested deeper than {DEEPEST} levels", status=400, code="invalid_json")
    return value


def checked(request: JsonDict) -> JsonDict:
    """Return the chat-completions request; Refused where it cannot be one."""
    if "prompt" in request and "messages" not in request:
        _check_prompt(request["prompt"])
    else:
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise Refused("'messages' must be a list with at least one message object", status=400)
    if not isinstance(request.get("temperature"), int | float | None):
        raise Refused(f"'temperature' must be a number, not {request['temperature']!r}", status=400)
    return request


def _check_prompt(prompt: object) -> None:
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (prompt and (ids or isinstance(prompt, str))):
        raise Refused(
            "'prompt' must be a text or a list of token ids, and not empty; send several as requests", status=400
        )
