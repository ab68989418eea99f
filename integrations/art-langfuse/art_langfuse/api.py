"""Langfuse's public API through its SDK's client: reads observations and scores in pages, and writes scores, with retries.

The SDK's ``Langfuse`` object is not used: there is one per process and key, so it could be the user's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from art_core.errors import ArtError
from art_core.plugin_api import without_keys
from art_core.types import JsonDict
from art_langfuse.account import Account
from art_langfuse.outbox import PATIENCE, Denied, Refused, Temporary, patiently, raise_for

if TYPE_CHECKING:
    from langfuse.api import ObservationV2

    from art_langfuse.older import Traces

FIELDS = "core,basic,io,metadata,model,trace_context"
PAGE = 100
SEVERAL = 50
"""Most traces per request for scores."""
TIMEOUT = 30
UNKNOWN_PATH = (404, 405, 501)
ONCE: Any = {"max_retries": 0}
"""We do the retries, because the SDK does not retry lost connections."""


class NotRead(ArtError):
    """Langfuse does not answer, or not as expected."""


class Project:
    """A Langfuse project. Reading raises NotRead or Denied."""

    def __init__(self, account: Account, patience: float = PATIENCE) -> None:
        import httpx
        from langfuse.api import LangfuseAPI

        self.host, self._patience = account.host, patience
        self._authorization = account.headers()["Authorization"]
        auth = (account.public_key, account.secret_key)
        self._http = httpx.Client(timeout=TIMEOUT, auth=auth, base_url=account.host)
        self._api = LangfuseAPI(
            base_url=account.host, username=account.public_key, password=account.secret_key,
            x_langfuse_public_key=account.public_key, httpx_client=self._http,
        )  # fmt: skip

    def close(self) -> None:
        self._http.close()

    def add_scores(self, scores: Sequence[Mapping[str, Any]]) -> None:
        """Add scores, or replace those with the same ids, without retries. Raises Temporary, Refused or Denied."""
        from langfuse.api import CreateScoreBatchResults

        answer = self._once(lambda: self._api.scores.create(request=list(scores), request_options=ONCE))  # type: ignore[arg-type]
        if isinstance(answer, CreateScoreBatchResults) and answer.rejected:
            raise Refused(self._excerpt("; ".join(error.message for error in answer.errors), 500))

    def traces(self, conditions: Sequence[JsonDict]) -> Iterator[str]:
        """Yield the ids of the traces that meet the conditions, the newest first; an id may be repeated."""
        if self._older is not None:
            yield from self._older.traces(conditions)
            return
        filters = json.dumps([_condition("boolean", "isRootObservation", "=", True), *conditions])
        for root in self._pages(self._api.observations.get_many, filter=filters, fields="core"):
            if root.trace_id:
                yield root.trace_id

    def observations(self, trace: str) -> list[ObservationV2]:
        """Return all observations of a trace, in the order in which they started."""
        if self._older is not None:
            observations = self._older.observations(trace)
        else:
            observations = list(self._pages(self._api.observations.get_many, trace_id=trace, fields=FIELDS))
        return sorted(observations, key=lambda it: (it.start_time, it.end_time or it.start_time))

    def scores(self, traces: Sequence[str]) -> dict[str, list[Any]]:
        """Return the scores of each trace and of its observations, for at most ``SEVERAL`` traces."""
        if self._older is not None:
            return {trace: self._older.scores(trace) for trace in traces}
        scores: dict[str, list[Any]] = {trace: [] for trace in traces}
        query = {"trace_id": ",".join(traces), "fields": "details,subject"}
        for score in self._pages(self._api.scores.get_many, **query) if traces else ():
            subject = score.subject
            trace = subject.trace_id if subject.kind == "observation" else subject.id
            scores.setdefault(trace, []).append(score)
        return scores

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a path that the SDK does not cover."""
        return self._patiently(lambda: self._fetch(path, query))

    @cached_property
    def _older(self) -> Traces | None:
        """The reader for a server without the observations API; None if it has that API."""
        try:
            self._patiently(lambda: self._api.observations.get_many(limit=1, fields="core", request_options=ONCE))
        except Denied as error:
            if error.status in UNKNOWN_PATH:
                from art_langfuse.older import Traces

                return Traces(self.get)
            raise
        return None

    def _pages(self, get: Callable[..., Any], **query: Any) -> Iterator[Any]:
        cursor = None
        while True:
            page = self._patiently(lambda: get(cursor=cursor, limit=PAGE, request_options=ONCE, **query))  # noqa: B023
            yield from page.data
            cursor = page.meta.cursor
            if not cursor:
                return

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        try:
            return patiently(lambda: self._once(ask), self._patience)
        except (Temporary, Refused) as error:
            raise NotRead(f"cannot read from Langfuse: {error}") from error

    def _fetch(self, path: str, query: Mapping[str, Any]) -> Any:
        answer = self._http.get(path, params=query)
        if not answer.is_success:
            raise_for(answer.status_code, f"{self.host}{path}: {self._excerpt(answer.text, 300)}", answer.headers)
        try:
            return answer.json()
        except ValueError as error:
            excerpt = self._excerpt(answer.text, 100)
            raise NotRead(
                f"{self.host}{path} answered {answer.status_code} without JSON ({excerpt!r}); check that LANGFUSE_HOST is "
                "Langfuse's address, and that no proxy answers instead"
            ) from error

    def _once(self, ask: Callable[[], Any]) -> Any:
        import httpx
        import pydantic
        from langfuse.api.core import ApiError

        try:
            return ask()
        except pydantic.ValidationError as error:
            raise NotRead(f"{self.host} did not answer as Langfuse's SDK expects: {error}") from error
        except httpx.TransportError as error:
            raise Temporary(f"{self.host} cannot be reached: {type(error).__name__}: {error}") from error
        except ApiError as error:
            raise_for(error.status_code, f"{self.host}: {self._excerpt(str(error.body), 300)}", error.headers)

    def _excerpt(self, text: str, length: int) -> str:
        """Redact our credentials in a server's text, then truncate it: half a key would not be recognized."""
        return without_keys(text, *self._authorization.split())[:length]


def conditions(
    *, name: str | None = None, tags: Sequence[str] = (), session: str | None = None, user: str | None = None,
    environment: str | None = None, since: str | None = None, until: str | None = None,
) -> list[JsonDict]:  # fmt: skip
    """Return filters for traces in the form of Langfuse's API. All ``tags`` must match; ``since`` and ``until`` are ISO 8601."""
    strings = {"traceName": name, "sessionId": session, "userId": user, "environment": environment}
    filters = [_condition("string", column, "=", value) for column, value in strings.items() if value is not None]
    if tags:
        filters.append(_condition("arrayOptions", "traceTags", "all of", list(tags)))
    bounds = ((">=", since), ("<", until))
    filters += [_condition("datetime", "startTime", operator, time) for operator, time in bounds if time]
    return filters


def _condition(kind: str, column: str, operator: str, value: Any) -> JsonDict:
    return {"type": kind, "column": column, "operator": operator, "value": value}
