"""Strict parsing of request bodies, and short explanations of refusals that don't repeat what was sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse

from art_core.errors import ArtError, StoreError

MAX_PROBLEMS = 10
"""Problems listed in one answer."""
MAX_PROBLEM_LENGTH = 300
"""Characters about each problem."""


class StrictJson(APIRoute):
    """A route whose body must be standard JSON: no NaN or Infinity, which Python's parser accepts."""

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
            raise json.JSONDecodeError("nested too deeply", "", 0) from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # invalid UTF-8, an integer of thousands of digits, or a constant such as NaN
            raise json.JSONDecodeError(str(error)[:MAX_PROBLEM_LENGTH], "", 0) from None


def explain_refusals(app: FastAPI) -> None:
    """Make ``app`` answer refused requests, from validation or from an ArtError, with the reason."""
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(ArtError, _failed)  # type: ignore[arg-type]


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    # Without "input" and "ctx", which repeat what was sent: it may be huge, or impossible to express in JSON.
    problems = [
        {"type": each["type"], "loc": [_short(part) for part in each["loc"]], "msg": _short(each["msg"])}
        for each in error.errors()[:MAX_PROBLEMS]
    ]
    return JSONResponse({"detail": problems}, 422)


async def _failed(_: Request, error: ArtError) -> JSONResponse:
    return JSONResponse({"detail": _short(str(error), 10)}, 503 if isinstance(error, StoreError) else 400)


def _short(value: Any, times: int = 1) -> Any:
    return (
        value if isinstance(value, int) else str(value)[: times * MAX_PROBLEM_LENGTH].encode(errors="replace").decode()
    )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} isn't valid JSON")
