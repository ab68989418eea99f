"""What requests to the gateway must fulfil, and what the bodies of its commands say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from art_core.capture import Exchange, Refused, is_loopback

if TYPE_CHECKING:
    from starlette.types import Scope

ENCODED_V1 = re.compile(rb"%2fv1(%2f|/)", re.IGNORECASE)
MAX_COMMAND_BYTES = 2**20


def check_id(scope: Scope, rollout_id: str | None) -> None:
    """Raise Refused (400) for an ambiguous id, which could record two rollouts as one."""
    if rollout_id is None:
        return
    # The path arrives decoded, with U+FFFD for bytes that aren't UTF-8.
    if "\ufffd" in rollout_id:
        raise Refused("a rollout's id must be percent-encoded UTF-8 without U+FFFD", status=400, code="rollout_id")
    encoded = ENCODED_V1.search(scope.get("raw_path") or b"")
    if encoded or "/v1/" in f"{rollout_id}/":
        raise Refused(
            f"a rollout's id may not contain /v1/ or end in /v1, where the path to the API begins: {scope['path']}",
            status=400,
            code="rollout_id",
        )


def check_page(exchange: Exchange, *, local: bool) -> None:
    """Raise Refused (403, 421) for requests that a web page makes on its visitor's behalf.

    Browsers send the page's ``Origin``; a page whose own name resolves to this machine (DNS rebinding) sends that as ``Host``.
    """
    host, origin = exchange.headers.get("host", ""), exchange.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Refused(f"pages of {origin:.100} may not call this gateway", status=403, code="other_origin")
    if local and not is_loopback(_name_in(host)):
        raise Refused(
            f"without a key this gateway only answers to this machine's own names, not to {host!r:.100}; start it with --api-key",
            status=421,
            code="other_host",
        )


def _name_in(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # an invalid address in brackets
        return None


def wrong_key() -> Refused:
    """Return the error for a request without the gateway's key."""
    return Refused(
        "missing or wrong key: send the gateway's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        status=401,
        code="invalid_api_key",
    )


def read_command(body: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a command's body; empty for an empty body. Raises Refused (400)."""
    try:
        fields = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise Refused(f"the request body isn't JSON: {error}", status=400, code="invalid_json") from None
    number = int | float | None
    if (
        not isinstance(fields, dict)
        or not isinstance(fields.get("reward"), number)
        or not isinstance(fields.get("error"), str | None)
        or not isinstance(version := fields.get("policy_version", 0), int)
        or not -1 <= version < 2**63
        or not isinstance(metrics := fields.get("metrics") or {}, dict)
        or not all(isinstance(value, int | float) for value in metrics.values())
    ):
        raise Refused(
            "the body must be a JSON object: reward a number, metrics numbers by name, error a string, policy_version an "
            "integer from -1 to 2**63 - 1",
            status=400,
        )
    return fields


def read_feedback(body: bytes | None) -> tuple[str, float, dict[str, float], str]:
    """Return the conversation, the score, the metrics and who says so in the body of a feedback. Raises Refused (400)."""
    try:
        fields = orjson.loads(body or b"")
        conversation, score, metrics = fields["conversation"], fields["score"], fields.get("metrics") or {}
        by = fields.get("by", "feedback")
        numbers = [score, *metrics.values()]
        if (
            not (isinstance(conversation, str) and isinstance(by, str))
            or any(type(it) not in (int, float) for it in numbers)
            or not 0 <= score <= 1
        ):
            raise ValueError
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Refused(
            'the body must be {"conversation": the name in its address or in the header x-art-conversation of its answers, '
            '"score": a number from 0 to 1, "metrics": optional numbers by name, "by": optional, who scored it}',
            status=400,
            code="feedback",
        ) from None
    return conversation, float(score), metrics, by


def read_change(body: bytes | None) -> tuple[float, str]:
    """Return the share and the reason in a body. Raises Refused (400)."""
    try:
        fields = orjson.loads(body or b"")
        share, why = fields["share"], fields.get("why", "set by hand")
        if not isinstance(why, str) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ValueError
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Refused(
            'the body must be {"share": a number from 0 to 1, "why": an optional text}', status=400, code="share"
        ) from None
    return float(share), why
