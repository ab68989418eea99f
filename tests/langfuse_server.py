"""A Langfuse project over real sockets, for tests: OTLP taken apart, scores, both read back in pages, and faults on demand.

What it keeps is what the real one keeps: observations by trace and id, scores by id, so that what comes twice is there once;
``posts`` counts what came.
"""

import base64
import gzip
import json
import threading
from collections import Counter, deque
from contextlib import contextmanager
from datetime import UTC, datetime

from http_server import serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PUBLIC, SECRET = "pk-lf-1", "sk-lf-1"
METADATA = "langfuse.observation.metadata."


class Langfuse:
    """A server's memory and its moods."""

    def __init__(self):
        self.url = ""
        self.spans = {}
        """(trace, span) -> the span as protobuf has it, attributes as a dict."""
        self.scores = {}
        self.posts = Counter()
        self.faults = deque()
        """What happens to the next requests: a status, (status, headers), "cut", "lost" (taken, and no answer), or None."""
        self.hidden = 0
        """So many further reads show nothing: ingestion takes its time."""
        self.page = 3
        self.refuses = None
        """Spans with this in their name are refused, and all that come with them."""
        self.resources, self.encodings = [], set()
        self.lock = threading.Lock()

    def observations(self, trace=None):
        return [shown(span) for span in self.spans.values() if trace in (None, span["trace_id"])]

    def traces(self):
        return list(dict.fromkeys(trace for trace, _ in self.spans))

    def scores_of(self, trace):
        return {it["name"]: it for it in self.scores.values() if it.get("traceId") == trace}

    def record(self, trace, own, given=None, gave=None, *, kind="generation", parent=None, at=0, name="it", **more):
        """Keep what some instrumentation sent: ``more`` are attributes after ``langfuse.``, with __ for dots."""
        said = {"observation.type": kind, **{key.replace("__", "."): it for key, it in more.items()}}
        for key, it in (("observation.input", given), ("observation.output", gave)):
            if it is not None:
                said[key] = it if isinstance(it, str) else json.dumps(it)
        attributes = {f"langfuse.{key}": it for key, it in said.items()}
        start = int((1_790_000_000 + at) * 1e9)
        self.spans[trace, own] = {
            "trace_id": trace, "id": own, "parent": parent, "name": name, "start": start, "end": start + 10**9,
            "status": (0, ""), "attributes": attributes, "events": [],
        }  # fmt: skip

    def rate(self, trace, name, value, **more):
        """Keep a score, as somebody gives it in Langfuse."""
        self.scores[f"{trace}/{name}/{len(self.scores)}"] = {
            "id": f"s{len(self.scores)}", "traceId": trace, "name": name, "value": value, **more
        }  # fmt: skip

    def take_spans(self, body, encoding):
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if encoding == "gzip" else body)
        if self.refuses and self.refuses.encode() in request.SerializeToString():
            return 400
        with self.lock:
            self.encodings.add(encoding)
            for resource in request.resource_spans:
                self.resources.append(values(resource.resource.attributes))
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    it = {
                        "trace_id": span.trace_id.hex(), "id": span.span_id.hex(), "parent": span.parent_span_id.hex() or None,
                        "name": span.name, "start": span.start_time_unix_nano, "end": span.end_time_unix_nano,
                        "status": (span.status.code, span.status.message), "attributes": values(span.attributes),
                        "events": [(event.name, values(event.attributes)) for event in span.events],
                    }  # fmt: skip
                    self.posts["span", it["id"]] += 1
                    self.spans[it["trace_id"], it["id"]] = it
        return 200

    def take_scores(self, scores):
        with self.lock:
            for score in scores:
                self.posts["score", score["id"]] += 1
                self.scores[score["id"]] = score


def values(attributes):
    return {it.key: value(it.value) for it in attributes}


def value(it):
    kind = it.WhichOneof("value")
    return [value(each) for each in it.array_value.values] if kind == "array_value" else getattr(it, kind)


def shown(span):
    """A span as the API for observations has it: input and output are text."""
    get = span["attributes"].get
    said = {key.removeprefix(METADATA): it for key, it in span["attributes"].items() if key.startswith(METADATA)}
    own = {key: json.loads(it) for key, it in said.items()}
    return {
        "id": span["id"], "traceId": span["trace_id"], "projectId": "p", "parentObservationId": span["parent"],
        "type": get("langfuse.observation.type", "span").upper(), "name": span["name"],
        "startTime": when(span["start"]), "endTime": when(span["end"]),
        "level": get("langfuse.observation.level", "DEFAULT"), "statusMessage": get("langfuse.observation.status_message"),
        "sessionId": get("session.id"), "userId": get("user.id"), "environment": get("langfuse.environment", "default"),
        "isRootObservation": span["parent"] is None, "traceName": get("langfuse.trace.name"),
        "tags": get("langfuse.trace.tags", []), "input": get("langfuse.observation.input"),
        "output": get("langfuse.observation.output"), "metadata": own, "model": get("langfuse.observation.model.name"),
        "modelParameters": json.loads(get("langfuse.observation.model.parameters", "null")),
        "usageDetails": json.loads(get("langfuse.observation.usage_details", "{}")),
    }  # fmt: skip


def when(nanoseconds):
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def meets(it, condition):
    column = {"traceTags": "tags"}.get(condition["column"], condition["column"])
    here, there = it[column], condition["value"]
    match condition["operator"]:
        case "=":
            return here == there
        case "all of":
            return set(there) <= set(here)
        case ">=":
            return datetime.fromisoformat(here) >= datetime.fromisoformat(there)
        case "<":
            return datetime.fromisoformat(here) < datetime.fromisoformat(there)


def paged(items, cursor, size):
    first = int(cursor or 0)
    meta = {"limit": size} | ({"cursor": str(first + size)} if first + size < len(items) else {})
    return JSONResponse({"data": items[first : first + size], "meta": meta})


@contextmanager
def langfuse_server(*, older=False):
    """Serve; ``older``: with the API for traces in place of that for observations."""
    server = Langfuse()
    routes = [
        Route("/api/public/otel/v1/traces", faulty(server, take_spans), methods=["POST"]),
        Route("/v1/traces", faulty(server, take_spans), methods=["POST"]),
        Route("/api/public/scores", faulty(server, take_scores), methods=["POST"]),
        Route("/api/public/v2/observations", faulty(server, list_observations)),
        Route("/api/public/v3/scores", faulty(server, list_scores)),
    ]
    if older:
        by_trace = Route("/api/public/traces/{id}", faulty(server, one_trace))
        routes = [*routes[:3], Route("/api/public/traces", faulty(server, list_traces)), by_trace]
    with serving(*routes) as url:
        server.url = url
        yield server


def faulty(server, answer):
    async def respond(request):
        fault = server.faults.popleft() if server.faults else None
        if fault == "cut":
            return Broken()
        if isinstance(fault, int | tuple):
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            return JSONResponse({"message": "not now"}, status, headers)
        expected = "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode()
        if request.url.path.startswith("/api/") and request.headers.get("authorization") != expected:
            return JSONResponse({"message": "Invalid credentials"}, 401)
        found = await answer(server, request)
        return Broken() if fault == "lost" else found

    return respond


class Broken(Response):
    """Promises more than it sends, and so cuts the connection."""

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})


async def take_spans(server, request):
    status = server.take_spans(await request.body(), request.headers.get("content-encoding"))
    return Response(b"", status, media_type="application/x-protobuf")


async def take_scores(server, request):
    server.take_scores(await request.json())
    return JSONResponse({"message": "Accepted"}, 202)


async def list_observations(server, request):
    query = request.query_params
    if server.hidden:
        server.hidden -= 1
        return paged([], None, server.page)
    found = server.observations(query.get("traceId"))
    if "usage" not in query.get("fields", ""):
        found = [{key: it for key, it in each.items() if key != "usageDetails"} for each in found]
    for condition in json.loads(query.get("filter", "[]")):
        found = [it for it in found if meets(it, condition)]
    return paged(sorted(found, key=lambda it: it["startTime"], reverse=True), query.get("cursor"), server.page)


async def list_scores(server, request):
    query = request.query_params
    wanted = query["traceId"].split(",")
    found = [read_back(it) for it in server.scores.values() if it.get("traceId") in wanted]
    return paged(found, query.get("cursor"), server.page)


def read_back(score):
    subject = {"kind": "trace", "id": score["traceId"]}
    if score.get("observationId"):
        subject = {"kind": "observation", "id": score["observationId"], "traceId": score["traceId"]}
    at = score.get("timestamp") or datetime.now(UTC).isoformat()
    return {
        "projectId": "p", "source": "API", "environment": "default", "createdAt": at, "updatedAt": at, "timestamp": at,
        "dataType": "NUMERIC", **score, "subject": subject,
    }  # fmt: skip


async def list_traces(server, request):
    query, found = request.query_params, []
    for trace in server.traces():
        root = next(it for it in server.observations(trace) if it["parentObservationId"] is None)
        kept = {"name": root["traceName"], "sessionId": root["sessionId"], "userId": root["userId"]}
        if all(query.get(key, value) == value for key, value in kept.items()) and set(query.getlist("tags")) <= set(
            root["tags"]
        ):
            found.append({"id": trace, "timestamp": root["startTime"], **kept})
    found.sort(key=lambda it: it["timestamp"], reverse=True)
    page, pages = int(query["page"]), -(-len(found) // server.page)
    data = found[(page - 1) * server.page : page * server.page]
    return JSONResponse({"data": data, "meta": {"page": page, "totalItems": len(found), "totalPages": pages}})


async def one_trace(server, request):
    trace = request.path_params["id"]
    found = server.observations(trace)
    if not found:
        return JSONResponse({"message": "not found"}, 404)
    [root] = [it for it in found if it["parentObservationId"] is None]
    said = {key: root.pop(key) for key in ("input", "output")}
    scores = [it for it in server.scores.values() if it.get("traceId") == trace]
    return JSONResponse({"id": trace, "projectId": "p", **said, "observations": found, "scores": scores})
