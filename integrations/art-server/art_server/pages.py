"""The dashboard's files, as they are in the package, with a policy that lets nothing else run. Knows nothing about runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from starlette.datastructures import MutableHeaders
    from starlette.responses import Response
    from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Agents say what they like, and the pages show it: what gets past the escaping must still not run, or be sent anywhere."""


class Pages(StaticFiles):
    """To be mounted at ``/`` after every other route."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        _guard(response.headers)
        return response


def pages() -> Pages:
    """Return the dashboard: ``app.mount("/", pages())`` after every other route."""
    return Pages()


def _guard(headers: MutableHeaders) -> None:
    headers["Content-Security-Policy"] = POLICY
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Opener-Policy"] = "same-origin"
    # Asked again every time, and answered by its ETag: a newer package must not meet yesterday's pages.
    headers["Cache-Control"] = "no-cache"
