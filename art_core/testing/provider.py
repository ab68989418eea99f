"""What an agent talks to outside a rollout: a plain model provider on 127.0.0.1, with scripted answers.

Answers call every tool once, then fill in a schema or are a text. Tasks have marks, and every answer carries its task's mark,
so that mixed-up rollouts show.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from art_core.capture.dialect import Dialect, Paths
from art_core.capture.listening import address_of, http_server, listen
from art_core.capture.record import for_client
from art_core.capture.server import CHAT
from art_core.errors import UpstreamError
from art_core.testing.fakes import FakeEngine
from art_core.types import JsonDict

MARK = re.compile(r"(?:task|refused)-\d{3}")
REFUSED_TASK = "Please do refused-000."
"""The text of a task whose every model call is refused."""
_CLOSE = {"connection": "close"}
_UUID = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")


@dataclass(frozen=True)
class ProviderRequest:
    """A request as it arrived, with random ids masked."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: str


class PlainProvider:
    """Answers ``{base_url}/chat/completions``, and the paths of installed dialects, with a FakeEngine's answers.

    Every connection ends with its answer: agents seldom close their clients, and an open connection warns when it is
    garbage-collected.
    """

    def __init__(self, engine: FakeEngine, dialects: Mapping[str, Dialect]) -> None:
        self._engine = engine
        self._dialects = {CHAT: Dialect(), **dialects}
        self._paths = Paths(self._dialects)
        self.base_url = ""
        """``http://127.0.0.1:PORT/v1``, set by ``running``."""
        self.requests: list[ProviderRequest] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[PlainProvider]:
        """Serve from a thread, apart from the agent's event loop."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        server = http_server(Starlette(routes=[Route("/{rest:path}", self._answer, methods=["GET", "POST"])]))
        with listen("127.0.0.1", 0) as listener:
            self.base_url = f"{address_of('127.0.0.1', listener.getsockname()[1])}/v1"
            thread = threading.Thread(target=server.run, args=([listener],), name="plain-provider", daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join(10)

    @contextlib.contextmanager
    def callers(self) -> Iterator[set[threading.Thread]]:
        """Collect the threads that call during the block: those that connect, because every call opens a connection."""
        threads: set[threading.Thread] = set()
        port, connect, own = urlsplit(self.base_url).port, socket.socket.connect, "connect" in vars(socket.socket)

        @functools.wraps(connect)
        def watched(connecting: socket.socket, address: Any) -> None:
            if isinstance(address, tuple) and address[1] == port:
                threads.add(threading.current_thread())
            connect(connecting, address)

        socket.socket.connect = watched
        try:
            yield threads
        finally:
            if own:
                socket.socket.connect = connect
            else:  # restore the inherited method
                del socket.socket.connect

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        raw = (await request.body()).decode()
        headers = tuple(sorted((name, masked(value)) for name, value in request.headers.items()))
        self.requests.append(ProviderRequest(request.url.path, headers, masked(raw)))
        found = self._paths.split(f"/rollouts/plain{request.url.path}")
        if found is None:
            error = {"message": f"there is no {request.url.path} here"}
            return JSONResponse({"error": error}, status_code=404, headers=_CLOSE)
        dialect, body = self._dialects[found[1]], json.loads(raw)
        try:
            chat = dialect.to_chat(body)
            if chat.get("stream"):
                chunks = self._engine.stream(chat)
                # Wait for the first chunk, because a refusal is a status and not an event.
                events = dialect.stream_from_chat(body, _visible_chunks(await anext(chunks), chunks))
                return StreamingResponse(events, media_type=dialect.media_type, headers=_CLOSE)
            return JSONResponse(dialect.from_chat(body, for_client(await self._engine.chat(chat))), headers=_CLOSE)
        except UpstreamError as error:
            refusal = dialect.error(str(error), error.status, error.code)
            return JSONResponse(refusal, status_code=error.status, headers=_CLOSE)


async def _visible_chunks(first: JsonDict, rest: AsyncIterator[JsonDict]) -> AsyncIterator[JsonDict]:
    yield for_client(first)
    async for chunk in rest:
        yield for_client(chunk)


def masked(text: str) -> str:
    """Return ``text`` with random ids masked."""
    return _UUID.sub("ID", text)


def task(number: int) -> str:
    """Return the text of a task that is answered."""
    return f"Please do task-{number:03}."


def marks(value: Any) -> set[str]:
    """Return the marks of all tasks in a JSON-serializable value or a text."""
    return set(MARK.findall(value if isinstance(value, str) else json.dumps(value, default=str)))


def scripted_reply(request: JsonDict) -> JsonDict:
    """Return the reply to a chat request, a function of the request alone.

    Calls a forced tool, or else the first offered tool that wasn't called yet; otherwise fills in the response format, or
    answers with a text. Raises UpstreamError (400) for ``REFUSED_TASK``.
    """
    match = MARK.search(json.dumps(request["messages"]))
    mark = match.group() if match else "no task"
    if mark.startswith("refused"):
        raise UpstreamError(f"{mark} is refused, to test how failures are reported", status=400, code="refused")
    tool = _next_tool(request)
    if tool is not None:
        arguments = json.dumps(example(tool.get("parameters") or {}, mark))
        # Unique within a conversation, as a random id would be, but the same for the same request.
        call_id = f"call_{len(request['messages'])}_{mark.replace('-', '_')}"
        call = {"id": call_id, "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}
    schema = ((request.get("response_format") or {}).get("json_schema") or {}).get("schema")
    return {"content": f"answer to {mark}" if schema is None else json.dumps(example(schema, mark))}


def _next_tool(request: JsonDict) -> JsonDict | None:
    tools = [tool["function"] for tool in request.get("tools") or () if "function" in tool]
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and "function" in choice:
        return next(tool for tool in tools if tool["name"] == choice["function"]["name"])
    if not tools or choice == "none":
        return None
    calls = [call for message in request["messages"] for call in message.get("tool_calls") or ()]
    called = {call.get("function", {}).get("name") for call in calls}
    uncalled = [tool for tool in tools if tool["name"] not in called]
    return uncalled[0] if uncalled else tools[-1] if choice == "required" else None


def example(schema: JsonDict, text: str, root: JsonDict | None = None) -> Any:
    """Return a value that conforms to an everyday JSON schema; every free string in it is ``text``."""
    root = schema if root is None else root
    if "$ref" in schema:
        target = functools.reduce(lambda part, key: part[key], schema["$ref"].removeprefix("#/").split("/"), root)
        return example(target, text, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for combination in ("anyOf", "oneOf", "allOf"):
        if schema.get(combination):
            return example(schema[combination][0], text, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: example(part, text, root) for name, part in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [example(schema.get("items") or {}, text, root)] * max(1, schema.get("minItems", 1))
    number = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, text)
