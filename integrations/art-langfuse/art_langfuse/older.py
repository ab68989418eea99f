"""Langfuse servers that do not know the API for observations, as many do that people host themselves: the same, by traces.

Today's SDK has no client for these paths. Knows nothing about what observations mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from art_core.types import JsonDict

if TYPE_CHECKING:
    from langfuse.api import ObservationV2

PAGE = 50
NAMES = {
    ("traceName", "="): "name",
    ("sessionId", "="): "sessionId",
    ("userId", "="): "userId",
    ("environment", "="): "environment",
    ("traceTags", "all of"): "tags",
    ("startTime", ">="): "fromTimestamp",
    ("startTime", "<"): "toTimestamp",
}
"""Conditions by what this API calls them."""


class Traces:
    """Reads traces with ``get(path, **query) -> JSON``."""

    def __init__(self, get: Callable[..., Any]) -> None:
        self._get = get
        self._read: dict[str, JsonDict] = {}
        """What was read for the scores, until the observations are asked for."""

    def traces(self, conditions: Sequence[JsonDict]) -> Iterator[str]:
        """Yield the ids of the traces that meet the conditions, the newest first."""
        wanted = {NAMES[it["column"], it["operator"]]: it["value"] for it in conditions}
        page, pages = 1, 1
        while page <= pages:
            found = self._get("/api/public/traces", page=page, limit=PAGE, orderBy="timestamp.desc", **wanted)
            yield from (trace["id"] for trace in found["data"])
            page, pages = page + 1, found["meta"]["totalPages"]

    def observations(self, trace: str) -> list[ObservationV2]:
        """Return a trace's observations; [] where there is no such trace yet. What the trace itself says is its first one's."""
        from langfuse.api import ObservationV2
        from langfuse.api.core.pydantic_utilities import parse_obj_as

        from art_langfuse.outbox import Denied

        try:
            read = self._read.pop(trace, None) or self._get(f"/api/public/traces/{trace}")
        except Denied as error:
            if error.status == 404:
                return []
            raise
        found = [{"projectId": read.get("projectId") or "", **it} for it in read["observations"]]
        for it in found:
            if not it.get("parentObservationId"):
                given = {key: read[key] for key in ("input", "output") if it.get(key) is None and key in read}
                it.update(given)
        return [parse_obj_as(ObservationV2, it) for it in found]

    def scores(self, trace: str) -> list[Any]:
        """Return the scores of a trace and of its observations, with what today's API gives of them."""
        self._read[trace] = self._get(f"/api/public/traces/{trace}")
        return [_score(trace, it) for it in self._read[trace].get("scores") or ()]


def _score(trace: str, it: JsonDict) -> Any:
    own = it.get("observationId")
    subject = SimpleNamespace(kind="observation" if own else "trace", id=own or trace, trace_id=trace)
    value = it.get("stringValue") if it.get("dataType") == "CATEGORICAL" else it.get("value")
    return SimpleNamespace(name=it["name"], value=value, comment=it.get("comment"), subject=subject)
