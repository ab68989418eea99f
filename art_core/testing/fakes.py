"""Stand-ins for the heavy parts: an engine that answers from a script, a learner that only counts, an agent without a
framework."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from art_core.errors import StoreError, UpstreamError
from art_core.types import EngineBase, JsonDict, LearnerBase, Loss, TokenTree, Weights

Reply = str | JsonDict
"""The text of an answer, or an assistant message with ``content`` and ``tool_calls``."""


class FakeEngine(EngineBase):
    """An engine without a model: token ids are bytes, and every logprob is ``logprob``.

    ``reply`` is a text, a list of replies to cycle through, or a function of the request, which may raise ``UpstreamError``.
    As with a real chat template, the prompt of a later turn extends the earlier prompt and answer; a raw ``prompt`` is used
    unchanged.
    """

    def __init__(
        self, reply: Reply | Sequence[Reply] | Callable[[JsonDict], Reply] = "ok", *, logprob: float = -0.5
    ) -> None:
        self.reply = reply
        self.logprob = logprob
        self.requests: list[JsonDict] = []
        """Every request the engine got."""
        self.loaded: list[Weights] = []
        self.started = self.stopped = 0
        self._turn = 0

    async def start(self) -> None:
        self.started += 1

    async def stop(self) -> None:
        self.stopped += 1

    async def load(self, weights: Weights) -> None:
        self.loaded.append(weights)

    @property
    def version(self) -> int:
        """Version of the weights that are served."""
        return self.loaded[-1].version if self.loaded else 0

    def _choice(self, request: JsonDict, index: int) -> JsonDict:
        reply = self.reply
        if callable(reply):
            reply = reply(request)
        elif isinstance(reply, Sequence) and not isinstance(reply, str):
            reply = reply[self._turn % len(reply)]
            self._turn += 1
        message = {"role": "assistant", **({"content": reply} if isinstance(reply, str) else reply)}
        ids = list(render(message)[len(OPEN) :])
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "token_ids": ids,
            "token_logprobs": [self.logprob] * len(ids),
        }

    async def chat(self, request: JsonDict) -> JsonDict:
        self.requests.append(request)
        if not request.get("messages") and not request.get("prompt"):
            raise UpstreamError("messages is empty", status=400)
        prompt = prompt_ids(request)
        choices = [self._choice(request, index) for index in range(request.get("n") or 1)]
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model", "policy"),
            "choices": choices,
            "usage": usage,
            "prompt_token_ids": prompt,
            "policy_version": self.version,
        }

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        whole = await self.chat(request)
        head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        first = {"prompt_token_ids": whole["prompt_token_ids"], "policy_version": whole["policy_version"]}
        for choice in whole["choices"]:
            message, ids = choice["message"], choice["token_ids"]
            content = message.get("content") or ""
            middle = len(content) // 2
            deltas: list[JsonDict] = [{"role": "assistant", "content": content[:middle]}, {"content": content[middle:]}]
            if calls := message.get("tool_calls"):
                deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            for i, delta in enumerate(deltas):
                last = i == len(deltas) - 1
                part = ids[i:] if last else ids[i : i + 1]
                chunk = {"index": choice["index"], "delta": delta}
                chunk["finish_reason"] = choice["finish_reason"] if last else None
                chunk |= {"token_ids": part, "token_logprobs": [self.logprob] * len(part)}
                yield {**head, **first, "choices": [chunk]}
                first = {}
        if (request.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": whole["usage"]}


OPEN, CLOSE = b"<assistant>", b"</>"


def render(message: JsonDict) -> bytes:
    """Return a message as in FakeEngine's prompt; like chat templates, it ignores the spacing of arguments."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    shown = json.dumps([[call["name"], _parsed(call["arguments"])] for call in calls]) if calls else ""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return f"<{message['role']}>{text}{shown}".encode() + CLOSE


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def prompt_ids(request: JsonDict) -> list[int]:
    """Return the token ids of FakeEngine's prompt: the bytes of the rendered tools and messages, or of a raw prompt."""
    prompt = request.get("prompt")
    if prompt:
        return list(prompt.encode() if isinstance(prompt, str) else prompt)
    tools = json.dumps(request["tools"]).encode() if request.get("tools") else b""
    return list(tools + b"".join(map(render, request["messages"])) + OPEN)


def version_logprobs(version: int, ids: Sequence[int]) -> list[float]:
    """Return made-up logprobs of every token of ``ids`` but the first; they differ between versions."""
    return [-1 - (31 * token + 17 * version + place) % 97 / 97 for place, token in enumerate(ids[1:])]


class CountingLearner(LearnerBase):
    """A learner without a model; a step only increments the version."""

    def __init__(self) -> None:
        self.version = 0
        self.trees: list[Sequence[TokenTree]] = []
        """The trees of every step."""

    def step(self, trees: Sequence[TokenTree], *, loss: Loss | None = None) -> dict[str, float]:
        self.trees.append(trees)
        self.version += 1
        return {"tokens": float(sum(tree.num_tokens for tree in trees))}

    def measure(self, trees: Sequence[TokenTree]) -> float:
        return 0.0

    def weights(self) -> Weights:
        return Weights(self.version, path=None, live={})

    def publish(self, folder: Path) -> Weights:
        self.save(folder)
        return Weights(self.version, path=folder)

    def score(self, ids: Sequence[int]) -> list[float]:
        return version_logprobs(self.version, ids)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version.json").write_text(json.dumps(self.version))

    def restore(self, folder: Path) -> None:
        try:
            self.version = json.loads((folder / "version.json").read_text())
        except OSError as error:
            raise StoreError(f"{folder} is not a checkpoint of a CountingLearner: {error}") from error


class ScriptedAgent:
    """An agent that makes ``turns`` chat calls to its rollout's address and returns the last answer; needs httpx only.

    Call it as ``agent(input, address)``; ``request`` is added to every request.
    """

    def __init__(self, turns: int = 1, **request: Any) -> None:
        self.turns = turns
        self.request = request

    async def __call__(self, task_input: Any, address: Any) -> str:
        import httpx

        url, headers = f"{address.base_url}/chat/completions", {"Authorization": f"Bearer {address.api_key}"}
        messages: list[JsonDict] = [{"role": "user", "content": str(task_input)}]
        answer = ""
        async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
            for turn in range(self.turns):
                body = {"model": address.model, "messages": messages, **self.request}
                response = await client.post(url, json=body)
                response.raise_for_status()
                message = response.json()["choices"][0]["message"]
                answer = message.get("content") or ""
                messages += [message, {"role": "user", "content": f"turn {turn + 1}"}]
        return answer
