"""Serves the dashboard's files with a policy that lets browsers run nothing else."""

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
"""The pages show arbitrary text from agents. Even if some gets past the escaping, it must not run or be sent anywhere."""


class Pages(StaticFiles):
    """The dashboard's files; mount it at ``/`` after every other route."""

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
    # Browsers revalidate by ETag each time, so that a newer package never meets old pages.
    headers["Cache-Control"] = "no-cache"
