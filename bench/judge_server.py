"""An OpenAI-compatible server in front of a function that judges.

It relies on the prompt's form: every rollout follows ``<trajectory id="LABEL">``, and their common prefix is in ``<shared>``.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

RUN = re.compile(r'<trajectory id="([^"\s]+)">(.*?)(?=</trajectory>|<trajectory id="|\Z)', re.DOTALL)
SHARED = re.compile(r"<shared>(.*?)</shared>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """The judge's answer."""

    text: str
    status: int = 200
    delay: float = 0.0
    """Seconds."""


Judging = Callable[[str, list[dict[str, Any]]], Answer]
"""(path, messages) -> answer."""


class JudgeServer(ThreadingHTTPServer):
    """Answers chat completions at any path that ends in ``/chat/completions``."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, judging: Judging, port: int = 0) -> None:
        """``port`` 0 selects a free one."""
        super().__init__(("127.0.0.1", port), Handler)
        self.judging = judging
        self.asked = 0
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        """The server's address, without a path."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: JudgeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked += 1
        answer = self.server.judging(self.path.removesuffix("/chat/completions"), body["messages"])
        self.server.stopping.wait(answer.delay)
        self._send(answer.status, completion(answer.text) if answer.status == 200 else {"error": {"message": "boom"}})

    def _send(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True  # the client is gone

    def log_message(self, *args: object) -> None:
        pass


def completion(text: str) -> dict[str, Any]:
    """Return an answer in OpenAI's form."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "judge",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
    }


@contextmanager
def serving(judging: Judging) -> Iterator[JudgeServer]:
    """Serve ``judging`` in a thread."""
    server = JudgeServer(judging)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def judging_for_ruler(judging: Judging) -> Iterator[str]:
    """Serve ``judging`` as the judge that RULER asks, and yield its name; restore the environment afterwards."""
    name = "openai/scripted"
    with serving(judging) as server:
        variables = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "the judge's", "ART_JUDGE": name}
        with mock.patch.dict(os.environ, variables):
            yield name


def runs_shown(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the label and the text of every rollout in ``messages``, in order."""
    return [(label, text) for it in messages for label, text in RUN.findall(text_of(it))]


def shared_shown(messages: list[dict[str, Any]]) -> str:
    """Return the rollouts' common prefix; empty if nothing is shared."""
    return "\n".join(text for it in messages for text in SHARED.findall(text_of(it)))


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text, also if it is in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def scores_json(scores: list[dict[str, Any]]) -> str:
    """Return an answer in the requested form."""
    return json.dumps({"scores": scores})


def judging_by(grade: Callable[[str], tuple[float, str]]) -> Judging:
    """Return a judge that grades each rollout on its own: ``grade`` returns the score and the reason for its whole text."""

    def judge(path: str, messages: list[dict[str, Any]]) -> Answer:
        shared, scores = shared_shown(messages), []
        for label, own in runs_shown(messages):
            score, why = grade(f"{shared}\n{own}")
            scores.append({"trajectory_id": label, "explanation": why, "score": score})
        return Answer(scores_json(scores))

    return judge
