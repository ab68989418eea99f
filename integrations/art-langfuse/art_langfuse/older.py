"""Reads Langfuse servers without the observations API, as many self-hosted ones are, through the traces API.

Today's SDK has no client for these paths.
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
"""Filter (column, operator) -> its parameter in this API."""


class Traces:
    """Reads traces with ``get(path, **query) -> JSON``."""

    def __init__(self, get: Callable[..., Any]) -> None:
        self._get = get
        self._read: dict[str, JsonDict] = {}
        """Traces that were read for their scores, kept until their observations are requested."""

    def traces(self, conditions: Sequence[JsonDict]) -> Iterator[str]:
        """Yield the ids of the traces that meet the conditions, the newest first."""
        query = {NAMES[condition["column"], condition["operator"]]: condition["value"] for condition in conditions}
        page, pages = 1, 1
        while page <= pages:
            answer = self._get("/api/public/traces", page=page, limit=PAGE, orderBy="timestamp.desc", **query)
            yield from (trace["id"] for trace in answer["data"])
            page, pages = page + 1, answer["meta"]["totalPages"]

    def observations(self, trace: str) -> list[ObservationV2]:
        """Return a trace's observations; [] if it does not exist yet. The trace's own input and output go to its root."""
        from langfuse.api import ObservationV2
        from langfuse.api.core.pydantic_utilities import parse_obj_as

        from art_langfuse.outbox import Denied

        try:
            data = self._read.pop(trace, None) or self._get(f"/api/public/traces/{trace}")
        except Denied as error:
            if error.status == 404:
                return []
            raise
        observations = [
            {"projectId": data.get("projectId") or "", **observation} for observation in data["observations"]
        ]
        for observation in observations:
            if not observation.get("parentObservationId"):
                missing = [key for key in ("input", "output") if observation.get(key) is None and key in data]
                observation.update({key: data[key] for key in missing})
        return [parse_obj_as(ObservationV2, observation) for observation in observations]

    def scores(self, trace: str) -> list[Any]:
        """Return the scores of a trace and of its observations, in the form of today's API."""
        self._read[trace] = self._get(f"/api/public/traces/{trace}")
        return [_score(trace, score) for score in self._read[trace].get("scores") or ()]


def _score(trace: str, score: JsonDict) -> Any:
    observation = score.get("observationId")
    kind = "observation" if observation else "trace"
    subject = SimpleNamespace(kind=kind, id=observation or trace, trace_id=trace)
    value = score.get("stringValue") if score.get("dataType") == "CATEGORICAL" else score.get("value")
    return SimpleNamespace(name=score["name"], value=value, comment=score.get("comment"), subject=subject)
