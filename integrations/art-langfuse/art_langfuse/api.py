"""Langfuse's public API through its SDK's client: observations and scores, read in pages and written, with retries.

The SDK's ``Langfuse`` object is not made: it is one per process and key, so it would be the user's own, or become it.
Knows nothing about what observations mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from art_core.types import JsonDict
from art_langfuse.account import Account
from art_langfuse.outbox import PATIENCE, Refused, Temporary, patiently, raise_for

if TYPE_CHECKING:
    from langfuse.api import ObservationV2

FIELDS = "core,basic,time,io,metadata,model,usage,trace_context"
SEVERAL = 50
"""Traces whose scores are asked for at a time."""
TIMEOUT = 30


class Project:
    """A Langfuse project."""

    def __init__(self, account: Account, patience: float = PATIENCE) -> None:
        import httpx
        from langfuse.api import LangfuseAPI

        self.host, self._patience = account.host, patience
        self._http = httpx.Client(timeout=TIMEOUT)
        self._api = LangfuseAPI(
            base_url=account.host, username=account.public_key, password=account.secret_key,
            x_langfuse_public_key=account.public_key, httpx_client=self._http,
        )  # fmt: skip

    def close(self) -> None:
        self._http.close()

    def add_scores(self, scores: Sequence[Mapping[str, Any]]) -> None:
        """Add scores, or replace those with the same ids; once. Raises Temporary, Refused or Denied."""
        from langfuse.api import CreateScoreBatchResults

        answer = self._once(lambda: self._api.scores.create(request=list(scores), request_options=ONCE))  # type: ignore[arg-type]
        if isinstance(answer, CreateScoreBatchResults) and answer.rejected:
            raise Refused("; ".join(error.message for error in answer.errors)[:500])

    def roots(self, conditions: Sequence[JsonDict]) -> Iterator[ObservationV2]:
        """Yield the first observations of the traces that meet the conditions, the newest first."""
        wanted = [_condition("boolean", "isRootObservation", "=", True), *conditions]
        yield from self._observations(filter=json.dumps(wanted), fields=FIELDS)

    def observations(self, trace: str) -> list[ObservationV2]:
        """Return all observations of a trace, in the order in which they began."""
        found = list(self._observations(trace_id=trace, fields=FIELDS))
        return sorted(found, key=lambda it: (it.start_time, it.end_time or it.start_time))

    def _observations(self, **wanted: Any) -> Iterator[ObservationV2]:
        yield from self._pages(self._api.observations.get_many, limit=100, **wanted)

    def scores(self, traces: Sequence[str]) -> dict[str, list[Any]]:
        """Return the scores of each trace and of its observations."""
        found: dict[str, list[Any]] = {trace: [] for trace in traces}
        for first in range(0, len(traces), SEVERAL):
            together = ",".join(traces[first : first + SEVERAL])
            for score in self._pages(self._api.scores.get_many, limit=100, trace_id=together, fields="details,subject"):
                subject = score.subject
                trace = getattr(subject, "trace_id", None) if subject and subject.kind == "observation" else None
                found.setdefault(trace or getattr(subject, "id", ""), []).append(score)
        return found

    def _pages(self, get: Callable[..., Any], **wanted: Any) -> Iterator[Any]:
        cursor = None
        while True:
            page = patiently(
                lambda: self._once(lambda: get(cursor=cursor, request_options=ONCE, **wanted)),  # noqa: B023
                self._patience,
            )
            yield from page.data
            cursor = page.meta.cursor
            if not cursor:
                return

    def _once(self, ask: Callable[[], Any]) -> Any:
        import httpx
        from langfuse.api.core import ApiError

        try:
            return ask()
        except httpx.TransportError as error:
            raise Temporary(f"{self.host} cannot be reached: {type(error).__name__}: {error}") from error
        except ApiError as error:
            raise_for(error.status_code, f"{self.host}: {str(error.body)[:300]}", error.headers)


ONCE: Any = {"max_retries": 0}
"""Retries are made here, so that lost connections are retried too."""


def conditions(
    *, name: str | None = None, tags: Sequence[str] = (), session: str | None = None, user: str | None = None,
    environment: str | None = None, since: str | None = None, until: str | None = None,
) -> list[JsonDict]:  # fmt: skip
    """Return what a trace must meet, as Langfuse's API takes it. ``tags``: all of them; ``since`` and ``until``: ISO 8601."""
    texts = {"traceName": name, "sessionId": session, "userId": user, "environment": environment}
    found = [_condition("string", column, "=", value) for column, value in texts.items() if value is not None]
    if tags:
        found.append(_condition("arrayOptions", "traceTags", "all of", list(tags)))
    found += [_condition("datetime", "startTime", sign, it) for sign, it in ((">=", since), ("<", until)) if it]
    return found


def _condition(kind: str, column: str, operator: str, value: Any) -> JsonDict:
    return {"type": kind, "column": column, "operator": operator, "value": value}
