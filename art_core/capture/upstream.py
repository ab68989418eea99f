"""An OpenAI-compatible server that returns token ids, as an Upstream. Knows nothing about rollouts or what serves.

The dialect is vLLM's: ``return_token_ids`` and ``logprobs`` in the request; ``prompt_token_ids`` beside the choices,
``token_ids`` and ``logprobs.content[].logprob`` in them; in streaming the same chunk by chunk. A request with ``prompt``
(text or token ids) instead of ``messages`` goes to ``/completions`` and is answered in the shape of a chat completion.
"""

from __future__ import annotations

import base64
import errno
import io
import math
from collections.abc import AsyncIterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import orjson

from art_core.capture.shape import too_deep
from art_core.errors import TOO_LONG, ConfigError, UpstreamError
from art_core.redaction import printable, without_keys
from art_core.types import JsonDict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    import aiohttp

    from art_core.types import Weights

TIMED_OUT = "upstream_timeout"
"""The error code where the server took too long; sending the same again would double its work."""
UNREACHABLE = "upstream_unreachable"
"""The error code where the connection failed before or while it answered."""
FULL = ("maximum context length", "max_tokens must be at least 1, got 0")
"""vLLM's words for that, which come without a code; the second where the prompt alone fills the context."""
LONG_BODY = 2**20
"""Bytes."""
SHOWN = 200
"""Characters of an answer that is none. What is shown is cut after keys are hidden: half a key would not be found."""
LONGEST_REFUSAL = 2000
"""Characters."""
CONNECT_SECONDS = 10.0
ORDER_SECONDS = 600.0
"""For what a server is told to do, such as reading new weights."""
IDLE_SECONDS = 4.0
"""How long an unused connection is kept: less than a server that uses uvicorn, which closes its end after 5 seconds."""


class HttpUpstream:
    """Answers from ``base_url`` (``http://host:port/v1``); usable in one event loop, with one connection pool.

    ``model`` replaces the model that the agent names; ``timeout`` is in seconds, for a whole answer or between two chunks;
    None: no limit. What is asked with ``ask`` has ``ORDER_SECONDS``, whatever ``timeout`` says.
    The server's logprobs must be of the distribution at the request's temperature (vLLM: ``--logprobs-mode
    processed_logprobs``). It is also an Engine whose weights never change.

    A user and a password in ``base_url`` are sent, and stand in no message; ConfigError where there is an ``api_key`` too.
    """

    def __init__(
        self, base_url: str, model: str | None = None, *, api_key: str | None = None, timeout: float | None = 600.0
    ) -> None:
        import aiohttp
        from yarl import URL

        address = URL(base_url)
        self.base_url = (base_url if address.user is None else str(address.with_user(None))).rstrip("/")
        self.model = model
        self.policy_version = 0
        """Stamped on every answer; whoever swaps the server's weights sets it."""
        # Compressing what travels between two processes of one machine or rack costs more than it saves.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._secrets: tuple[str | None, ...] = ()
        if address.user is not None:
            if api_key:
                raise ConfigError(
                    f"{self.base_url} is given with a user in its address and with a key (api_key, ART_UPSTREAM_API_KEY), and a "
                    "request can send one of them only; leave the other out"
                )
            pair = base64.b64encode(f"{address.user}:{address.password or ''}".encode()).decode()
            self._headers["authorization"] = f"Basic {pair}"
            self._secrets = pair, address.password
        elif api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
            self._secrets = (api_key,)
        connect = min(timeout or CONNECT_SECONDS, CONNECT_SECONDS)
        self._whole = aiohttp.ClientTimeout(total=timeout, sock_connect=connect)
        self._order = aiohttp.ClientTimeout(total=ORDER_SECONDS, sock_connect=connect)
        self._between = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=timeout)
        self._chat, self._raw = URL(f"{self.base_url}/chat/completions"), URL(f"{self.base_url}/completions")
        self._client: aiohttp.ClientSession | None = None

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
            await self._client.close()
            self._client = None

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a request; cancelling closes the connection, which stops the sampling but loses what was sampled."""
        return self._normal(self._read(await self._answer(self._post(request, self._whole))), request)

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer as they come. UpstreamError where the stream ends before the answer does."""
        begun: set[int] = set()
        finished: set[int] = set()
        asked = request.get("n")
        with self._explained():
            async with self._post(request, self._between) as response:
                if response.status >= 400:
                    raise self._refusal(response.status, await response.read(), response.headers)
                async for event in _events(response.content):
                    if event == b"[DONE]":
                        return
                    chunk = self._read(event)
                    if "error" in chunk:
                        raise self._refusal(502, event, {})
                    yield self._normal(chunk, request)
                    for choice in chunk.get("choices") or ():
                        begun.add(choice.get("index", 0))
                        if choice.get("finish_reason"):
                            finished.add(choice.get("index", 0))
        if begun - finished or len(finished) < (asked if isinstance(asked, int) else 1):
            raise UpstreamError(f"{self.base_url} ended its stream in the middle", status=502, code=UNREACHABLE)

    async def models(self) -> JsonDict:
        """Return the server's own list of models."""
        asking = self._pool().get(f"{self.base_url}/models", headers=self._headers, timeout=self._whole)
        return self._read(await self._answer(asking))

    async def ask(self, url: str, body: JsonDict | None = None) -> bytes:
        """Ask the server for something else: POST ``body`` as it is, GET where there is none. Raises UpstreamError."""
        content = None if body is None else orjson.dumps(body)
        method = "GET" if body is None else "POST"
        return await self._answer(
            self._pool().request(method, url, data=content, headers=self._headers, timeout=self._order)
        )

    async def _answer(self, asking: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> bytes:
        with self._explained():
            async with asking as response:
                content = await response.read()
                if response.status >= 400:
                    raise self._refusal(response.status, content, response.headers)
        return content

    def _post(self, request: JsonDict, timeout: aiohttp.ClientTimeout) -> aiohttp.client._RequestContextManager:
        body = {**request, "return_token_ids": True, "logprobs": True}
        if self.model is not None:
            body["model"] = self.model
        address = self._chat
        if "prompt" in request:
            # 1, not 0: servers read 0 as none. An agent's own larger number is kept.
            address, body["logprobs"] = self._raw, max(int(request.get("logprobs") or 0), 1)
        content = orjson.dumps(body)
        # What is long is sent in pieces: one write of it would hold up all other calls.
        data = content if len(content) < LONG_BODY else io.BytesIO(content)
        return self._pool().post(address, data=data, headers=self._headers, timeout=timeout, allow_redirects=False)

    def _pool(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._client

    def _normal(self, answer: JsonDict, request: JsonDict) -> JsonDict:
        answer["policy_version"] = self.policy_version
        try:
            for choice in answer.get("choices") or ():
                _normal_choice(answer, choice, request)
        except (AttributeError, KeyError, TypeError) as error:
            raise UpstreamError(
                f"the answer of {self.base_url} has not the shape of a completion ({self._hidden(str(error))}): "
                f"{self._shown(answer)}",
                status=502,
            ) from error
        return answer

    def _read(self, content: bytes) -> JsonDict:
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise UpstreamError(
                f"the upstream's answer is not JSON ({error}): {self._shown(content)}", status=502
            ) from error
        if not isinstance(answer, dict):
            raise UpstreamError(f"the upstream's answer is not a JSON object: {self._shown(content)}", status=502)
        if too_deep(content, answer):
            raise UpstreamError(f"the upstream's answer is nested too deeply: {self._shown(content)}", status=502)
        return answer

    def _refusal(self, status: int, content: bytes, headers: Mapping[str, str]) -> UpstreamError:
        text, code = _said(status, content)
        after = _seconds(headers.get("retry-after"))
        return UpstreamError(self._hidden(text)[:LONGEST_REFUSAL], status=status, code=code, retry_after=after)

    def _hidden(self, text: str) -> str:
        """Return what the server says without what it was sent: a server may say the key that it refuses."""
        return printable(without_keys(text, *self._secrets))

    def _shown(self, answer: object) -> str:
        return self._hidden(repr(answer))[:SHOWN]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import aiohttp

        try:
            yield
        except TimeoutError as error:
            raise UpstreamError(
                f"{self.base_url} did not answer in time ({type(error).__name__})", status=504, code=TIMED_OUT
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            advice = "is the server running?"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                advice = (
                    "this process may open no more files; raise the limit (ulimit -n) or run fewer agents at a time"
                )
            raise UpstreamError(
                f"the connection to {self.base_url} failed ({what}); {advice}", status=502, code=UNREACHABLE
            ) from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, all that one packet holds without a pause between them."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _normal_choice(answer: JsonDict, choice: JsonDict, request: JsonDict) -> None:
    """Turn a choice into what ``Upstream`` promises; one of ``/completions`` into one of a chat completion."""
    logprobs = choice.get("logprobs") or {}
    if "prompt" in request:
        if ids := choice.pop("prompt_token_ids", None):
            answer.setdefault("prompt_token_ids", ids)
        said = {"role": "assistant", "content": choice.pop("text", None) or ""}
        choice["delta" if request.get("stream") else "message"] = said
        choice["token_logprobs"] = logprobs.get("token_logprobs") or []
    else:
        choice["token_logprobs"] = [token["logprob"] for token in logprobs.get("content") or ()]
    if not request.get("logprobs"):
        choice["logprobs"] = None
    said = choice.get("message") or choice.get("delta") or {}
    if (thought := said.pop("reasoning", None)) is not None:
        said["reasoning_content"] = thought  # vLLM's name is not the one that clients know


def _said(status: int, content: bytes) -> tuple[str, str | None]:
    """Read message and code of OpenAI's error shape, of the older one of vLLM, and of anything else as text."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    code: object = None
    if isinstance(error, dict):
        text, code = str(error.get("message") or error), error.get("code")
    else:
        text = error if isinstance(error, str) else content.decode(errors="replace")
    if status == 400 and any(words in text for words in FULL):
        code = TOO_LONG
    text = text or f"the upstream answered with status {status} and no body"
    return text, code if isinstance(code, str) else None


def _seconds(retry_after: str | None) -> float | None:
    """Read a Retry-After header: seconds, or a date."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max((until - datetime.now(UTC)).total_seconds(), 0.0) if until.tzinfo else None
