"""What a request's body may be, and how a refusal says why: in a few lines, without what was sent. Knows nothing about routes."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse

from art_core.errors import ArtError, StoreError

MOST_FAULTS = 10
"""That one answer names."""
MOST_LETTERS = 300
"""Of what it says about each."""


class StrictJson(APIRoute):
    """A route whose body is JSON as others write it too: no NaN, no Infinity, which Python alone reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return strictly


class _Strict(Request):
    async def json(self) -> Any:
        text = await self.body()
        try:
            return json.loads(text, parse_constant=_no_number)
        except RecursionError:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # no UTF-8, an integer of thousands of digits, one of the constants
            raise json.JSONDecodeError(str(error)[:MOST_LETTERS], "", 0) from None


def say_refusals(app: FastAPI) -> None:
    """Let ``app`` answer what is refused, by the model of a body or further in, with the reason."""
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(ArtError, _failed)  # type: ignore[arg-type]


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    # Without "input" and "ctx": they are what was sent, of any size, and may hold what JSON cannot say.
    faults = [
        {"type": it["type"], "loc": [_short(part) for part in it["loc"]], "msg": _short(it["msg"])}
        for it in error.errors()[:MOST_FAULTS]
    ]
    return JSONResponse({"detail": faults}, 422)


async def _failed(_: Request, error: ArtError) -> JSONResponse:
    return JSONResponse({"detail": _short(str(error), 10)}, 503 if isinstance(error, StoreError) else 400)


def _short(told: Any, times: int = 1) -> Any:
    return told if isinstance(told, int) else str(told)[: times * MOST_LETTERS].encode(errors="replace").decode()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
