"""One request to an ASGI application without a socket, and what was answered."""

import asyncio
import json
from dataclasses import dataclass, field

from art_core.capture import CaptureApp


@dataclass
class Asked:
    """A request whose client stays until ``leave`` is set, and what it has been sent."""

    body: bytes | list[bytes] = b""
    path: str = "/"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = [self.body] if isinstance(self.body, bytes) else self.body
        self._left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if self._left:
            del self._left[-1]["more_body"]

    @property
    def scope(self) -> dict:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        return {"type": "http", "method": self.method, "path": self.path, "headers": headers}

    async def receive(self) -> dict:
        if self._left:
            return self._left.pop(0)
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        [start] = [message for message in self.sent if message["type"] == "http.response.start"]
        assert start is self.sent[0]
        return start["status"]

    @property
    def told(self) -> dict[str, str]:
        """The answer's headers."""
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> str:
        *before, last = self.sent[1:]
        assert {message["type"] for message in self.sent[1:]} == {"http.response.body"}
        assert all(message["more_body"] for message in before) and not last.get("more_body")
        return b"".join(message["body"] for message in self.sent[1:]).decode()

    @property
    def json(self) -> dict:
        assert self.told["content-length"] == str(len(self.text.encode()))
        return json.loads(self.text)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def events(self) -> list:
        *events, rest = self.text.split("\n\n")
        assert rest == ""
        said = [event.removeprefix("data: ") for event in events]
        return [event if event == "[DONE]" else json.loads(event) for event in said]


def asked_of(rollout: str, body: object, path: str = "/v1/chat/completions", **headers: str) -> Asked:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Asked(content, f"/rollouts/{rollout}{path}", headers=names)


async def answered(app: CaptureApp, asked: Asked) -> Asked:
    await app(asked.scope, asked.receive, asked.send)
    return asked


def under_way(app: CaptureApp, asked: Asked) -> asyncio.Task:
    return asyncio.create_task(answered(app, asked))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def said(asked: Asked) -> str:
    return asked.json["choices"][0]["message"]["content"]
