"""An OpenAI-compatible server that returns token ids, as an Upstream. Knows nothing about rollouts or what serves.

The dialect is vLLM's: ``return_token_ids`` and ``logprobs`` in the request; ``prompt_token_ids`` beside the choices,
``token_ids`` and ``logprobs.content[].logprob`` in them; in streaming the same chunk by chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import orjson

from art_core.errors import ConfigError, UpstreamError
from art_core.types import JsonDict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from art_core.types import Weights


class HttpUpstream:
    """Answers from ``base_url`` (``http://host:port/v1``); usable in one event loop, with one connection pool.

    ``model`` replaces the model that the agent names; ``timeout`` is in seconds, for a whole answer or between two chunks.
    The server's logprobs must be of the distribution at the request's temperature (vLLM: ``--logprobs-mode
    processed_logprobs``). It is also an Engine whose weights never change.
    """

    def __init__(
        self, base_url: str, model: str | None = None, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.policy_version = 0
        """Stamped on every answer; whoever swaps the server's weights sets it."""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None)
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        """Nothing to load; the connection pool opens with the first request."""

    async def load(self, weights: Weights) -> None:
        """Refuse: a plain address cannot be told to change its weights. Raises ConfigError."""
        raise ConfigError(
            f"{self.base_url} serves fixed weights, so version {weights.version} cannot be loaded into it; train with "
            "engine='embedded' or an engine that a plugin registers, or measure what it serves with evaluate"
        )

    async def stop(self) -> None:
        """Close the connections. The next request opens new ones."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a request; cancelling closes the connection, which stops the sampling but loses what was sampled."""
        with self._explained():
            response = await self._pool().post("/chat/completions", content=self._body(request))
            if response.is_error:
                raise _refusal(response.status_code, response.content)
            completion = _json_object(response.content)
        return self._normal(completion, request)

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer as they come."""
        with self._explained():
            async with self._pool().stream("POST", "/chat/completions", content=self._body(request)) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    event = line.removeprefix("data:").strip()
                    if event == "[DONE]":
                        return
                    chunk = _json_object(event)
                    if "error" in chunk:
                        raise _refusal(502, event.encode())
                    yield self._normal(chunk, request)

    def _pool(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.base_url,
                headers={"content-type": "application/json", **self._headers},
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
                trust_env=False,
            )
        return self._client

    def _body(self, request: JsonDict) -> bytes:
        body = {**request, "return_token_ids": True, "logprobs": True}
        if self.model is not None:
            body["model"] = self.model
        return orjson.dumps(body)

    def _normal(self, answer: JsonDict, request: JsonDict) -> JsonDict:
        answer["policy_version"] = self.policy_version
        for choice in answer.get("choices", ()):
            content = (choice.get("logprobs") or {}).get("content") or ()
            choice["token_logprobs"] = [token["logprob"] for token in content]
            if not request.get("logprobs"):
                choice["logprobs"] = None
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise UpstreamError(
                f"{self.base_url} did not answer in time ({type(error).__name__})", status=504
            ) from error
        except httpx.HTTPError as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UpstreamError(
                f"the connection to {self.base_url} failed ({what}); is the server running?", status=502
            ) from error


def _json_object(content: bytes | str) -> JsonDict:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UpstreamError(f"the upstream's answer is not JSON ({error}): {content[:200]!r}", status=502) from error
    if not isinstance(answer, dict):
        raise UpstreamError(f"the upstream's answer is not a JSON object: {content[:200]!r}", status=502)
    return answer


def _refusal(status: int, content: bytes) -> UpstreamError:
    """Read OpenAI's error shape, the older one of vLLM, and anything else as text."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        code = error.get("code")
        return UpstreamError(
            str(error.get("message") or error), status=status, code=code if isinstance(code, str) else None
        )
    text = error if isinstance(error, str) else content.decode(errors="replace")[:500]
    return UpstreamError(text or f"the upstream answered with status {status} and no body", status=status)
