"""Two steps of real training for agent programs that the shipped model can't serve: it is made to say what a script says.

Prompts, token ids and logprobs are the model's own, so the run can be audited like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer

import art_core as art
from art_audit import audit, recompute
from art_core.store import Store
from art_embedded import TINY, engine
from art_embedded.engine import EmbeddedEngine

Reply = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns an assistant message, ``content`` or one of ``tool_calls``, for a chat request."""
HEAD = ("id", "created", "model", "prompt_token_ids", "policy_version")


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "content": None,
        "tool_calls": [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}],
    }


class ScriptedModel(EmbeddedEngine):
    """The model ``"tiny"``, whose answers are those of ``reply``."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(TINY), art.TrainConfig())
        self._reply = reply
        self._tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer with the reply, its ids and the logprobs that the model gives them."""
        whole = await super().chat({**request, "max_completion_tokens": 1})
        message = {"role": "assistant", **self._reply(request)}
        ids = self._tokenizer.encode(_text(message) + "<|im_end|>").ids
        prompt = whole["prompt_token_ids"]
        logprobs = (await self.score([*prompt, *ids]))[-len(ids) :]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole["choices"] = [choice | {"token_ids": ids, "token_logprobs": logprobs}]
        return whole

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer in one chunk."""
        whole = await self.chat(request)
        choice = dict(whole["choices"][0])
        delta = choice.pop("message")
        calls = [{"index": place, **call} for place, call in enumerate(delta.get("tool_calls") or ())]
        head = {name: whole[name] for name in HEAD} | {"object": "chat.completion.chunk"}
        yield {**head, "choices": [choice | {"delta": delta | ({"tool_calls": calls} if calls else {})}]}


def _text(message: dict[str, Any]) -> str:
    called = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f'<tool_call>\n{{"name": "{it["name"]}", "arguments": {it["arguments"]}}}\n</tool_call>' for it in called]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


@contextlib.contextmanager
def proxied() -> Iterator[list[str]]:
    """Let this process and its children use a proxy that refuses everything, and collect what was asked of it."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            asked.append(self.requestline)
            self.send_error(502)

        do_CONNECT = do_GET = do_POST = do_HEAD = _refuse

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    proxy = f"http://127.0.0.1:{server.server_port}"
    names = ("http_proxy", "https_proxy", "all_proxy")
    try:
        with mock.patch.dict(os.environ, {name: proxy for it in names for name in (it, it.upper())}):
            yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def two_steps(agent: object, task: str, reply: Reply, folder: Path, **settings: Any) -> list[art.Trajectory]:
    """Train for two steps of two rollouts, check that nothing is missing, and return the rollouts.

    Not more, because the prompts have thousands of tokens, and each answer is scored with all of its prompt.
    """
    with (
        proxied() as asked,
        mock.patch.object(engine, "MAX_SCORED", 16_384),
        mock.patch.object(recompute, "TOKENS", 16_384),
    ):
        shape = {"tasks_per_step": 1, "group_size": 2, "max_concurrent": 2, "learning_rate": 1e-3}
        result = art.train_sync(
            agent, [task], model="tiny", engine=ScriptedModel(reply), learner="torch", steps=2, run_dir=folder,
            progress=False, **shape, **settings,
        )  # fmt: skip
        audited = audit(folder)
    assert (result.report["steps"], audited.problems, asked) == (2, (), [])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 for step in steps)
    with Store(folder / "run.sqlite") as store:
        rollouts = list(store.trajectories())
    assert [rollout.error for rollout in rollouts] == [None] * len(rollouts)
    assert all(not any(kind.values()) for rollout in rollouts for kind in rollout.unrecorded.values())
    return rollouts
