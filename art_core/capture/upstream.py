"""An Upstream that asks an OpenAI-compatible server, which must return token ids.

The dialect is vLLM's. A request has ``return_token_ids`` and ``logprobs``; an answer, or each chunk of it, has
``prompt_token_ids``, and its choices have ``token_ids`` and ``logprobs.content[].logprob``. A request with ``prompt``
(text or token ids) instead of ``messages`` goes to ``/completions``, and its answer is turned into a chat completion.
"""

from __future__ import annotations

import base64
import errno
import io
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import orjson

from art_core.capture.shape import read_object
from art_core.errors import TOO_LONG, ConfigError, UpstreamError
from art_core.redaction import printable, without_keys
from art_core.types import JsonDict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    import aiohttp
    from yarl import URL

    from art_core.types import Engine, Weights

    Response = AbstractAsyncContextManager[aiohttp.ClientResponse]

TIMED_OUT = "upstream_timeout"
"""The error code of an answer that took too long; a retry would double the work."""
UNREACHABLE = "upstream_unreachable"
"""The error code of a connection that failed before or during the answer."""
CONTEXT_FULL = ("maximum context length", "max_tokens must be at least 1, got 0")
"""vLLM's messages for a full context, which come without a code; the second if the prompt alone fills it."""
LONG_BODY = 2**20
"""Bytes from which on a body is sent in pieces."""
QUOTED_CHARS = 200
"""How much of an unreadable answer is quoted. It is cut after keys are hidden: half a key wouldn't be recognized."""
REFUSAL_CHARS = 2000
"""How much of a server's error message is kept."""
CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 600.0
"""Time limit for other requests, such as loading new weights."""
IDLE_SECONDS = 4.0
"""How long an idle connection is kept: less than the 5 seconds after which uvicorn closes its end."""


class HttpUpstream:
    """Answers from ``base_url`` (``http://host:port/v1``), in one event loop and with one connection pool.

    ``model`` replaces the model that the agent names. ``timeout`` is in seconds, for a whole answer or between two
    chunks; None: no limit. ``ask`` always has ``COMMAND_SECONDS``. The server's logprobs must be of the distribution at
    the request's temperature (vLLM: ``--logprobs-mode processed_logprobs``). This is also an Engine whose weights never
    change.

    A user and a password in ``base_url`` are sent but never shown. Raises ConfigError if there is an ``api_key`` too.
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
        """The version in every answer, set by the code that swaps the server's weights."""
        # Within a machine or a rack, compression costs more than it saves.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._secrets: tuple[str | None, ...] = ()
        if address.user is not None:
            if api_key:
                raise ConfigError(
                    f"{self.base_url} has a user in its address as well as a key (api_key, ART_UPSTREAM_API_KEY), but "
                    "a request can only send one of them; remove the other"
                )
            pair = base64.b64encode(f"{address.user}:{address.password or ''}".encode()).decode()
            self._headers["authorization"] = f"Basic {pair}"
            self._secrets = pair, address.password
        elif api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
            self._secrets = (api_key,)
        connect = min(timeout or CONNECT_SECONDS, CONNECT_SECONDS)
        self._whole = aiohttp.ClientTimeout(total=timeout, sock_connect=connect)
        self._command = aiohttp.ClientTimeout(total=COMMAND_SECONDS, sock_connect=connect)
        self._between = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=timeout)
        self._chat, self._raw = URL(f"{self.base_url}/chat/completions"), URL(f"{self.base_url}/completions")
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Do nothing: the connection pool opens with the first request."""

    async def load(self, weights: Weights) -> None:
        """Raise ConfigError: a plain address can't change its weights."""
        raise ConfigError(
            f"{self.base_url} serves fixed weights, so it cannot load version {weights.version}; train with "
            "engine='embedded' or an engine that a plugin registers, or call evaluate, which doesn't train"
        )

    async def stop(self) -> None:
        """Close the connections. The next request opens new ones."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a request. Cancelling closes the connection: sampling stops, and what was sampled is lost."""
        async with self._post(request, self._whole) as response:
            return self._normalized(self._read(await response.read()), request)

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer as they come. Raises UpstreamError if the stream ends before the answer."""
        begun: set[int] = set()
        finished: set[int] = set()
        n = request.get("n")
        async with self._post(request, self._between) as response:
            async for event in _events(response.content):
                if event == b"[DONE]":
                    return
                chunk = self._read(event)
                if "error" in chunk:
                    raise self._refusal(502, event, {})
                yield self._normalized(chunk, request)
                for choice in chunk.get("choices") or ():
                    begun.add(choice.get("index", 0))
                    if choice.get("finish_reason"):
                        finished.add(choice.get("index", 0))
        if begun - finished or len(finished) < (n if isinstance(n, int) else 1):
            raise UpstreamError(f"{self.base_url} ended its stream in the middle", status=502, code=UNREACHABLE)

    async def models(self) -> JsonDict:
        """Return the server's own list of models."""
        async with self._response(f"{self.base_url}/models", None, self._whole) as response:
            return self._read(await response.read())

    async def ask(self, url: str, body: JsonDict | None = None) -> bytes:
        """Send the server any other request, POST with a ``body`` and GET without. Raises UpstreamError."""
        async with self._response(url, body, self._command) as response:
            return await response.read()

    def _post(self, request: JsonDict, timeout: aiohttp.ClientTimeout) -> Response:
        body = {**request, "return_token_ids": True, "logprobs": True}
        if self.model is not None:
            body["model"] = self.model
        url = self._chat
        if "prompt" in request:
            # At least 1, because servers read 0 as none.
            url, body["logprobs"] = self._raw, max(int(request.get("logprobs") or 0), 1)
        return self._response(url, body, timeout, allow_redirects=False)

    @asynccontextmanager
    async def _response(
        self, url: str | URL, body: JsonDict | None, timeout: aiohttp.ClientTimeout, *, allow_redirects: bool = True
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, whose response the block reads. Raises UpstreamError for whatever fails on the way."""
        import aiohttp

        content = None if body is None else orjson.dumps(body)
        # aiohttp sends a file in pieces; a long body in one write would hold up all other calls.
        data = io.BytesIO(content) if content and len(content) >= LONG_BODY else content
        settings = {"headers": self._headers, "timeout": timeout, "allow_redirects": allow_redirects}
        try:
            async with self._pool().request("GET" if body is None else "POST", url, data=data, **settings) as response:
                if response.status >= 400:
                    raise self._refusal(response.status, await response.read(), response.headers)
                yield response
        except TimeoutError as error:
            message = f"{self.base_url} did not answer in time ({type(error).__name__})"
            raise UpstreamError(message, status=504, code=TIMED_OUT) from error
        except (aiohttp.ClientError, OSError) as error:
            advice = "is the server running?"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                advice = (
                    "this process has too many open files; raise the limit (ulimit -n) or run fewer agents at a time"
                )
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            message = f"the connection to {self.base_url} failed ({reason}); {advice}"
            raise UpstreamError(message, status=502, code=UNREACHABLE) from error

    def _pool(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._client

    def _refusal(self, status: int, content: bytes, headers: Mapping[str, str]) -> UpstreamError:
        text, code = _message_and_code(status, content)
        after = _seconds(headers.get("retry-after") or "")
        return UpstreamError(self._hidden(text)[:REFUSAL_CHARS], status=status, code=code, retry_after=after)

    def _read(self, content: bytes) -> JsonDict:
        try:
            return read_object(content)
        except ValueError as error:
            raise UpstreamError(f"the upstream's answer {error}: {self._quoted(content)}", status=502) from error

    def _normalized(self, answer: JsonDict, request: JsonDict) -> JsonDict:
        answer["policy_version"] = self.policy_version
        try:
            for choice in answer.get("choices") or ():
                _normal_choice(answer, choice, request)
        except (AttributeError, KeyError, TypeError) as error:
            raise UpstreamError(
                f"the answer of {self.base_url} isn't a completion ({self._hidden(str(error))}): "
                f"{self._quoted(answer)}",
                status=502,
            ) from error
        return answer

    def _hidden(self, text: str) -> str:
        """Return a server's message without the keys that it was sent, which it may quote."""
        return printable(without_keys(text, *self._secrets))

    def _quoted(self, answer: object) -> str:
        return self._hidden(repr(answer))[:QUOTED_CHARS]


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, those of one packet without a pause."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _normal_choice(answer: JsonDict, choice: JsonDict, request: JsonDict) -> None:
    """Turn a choice into what ``Upstream`` promises, also one of ``/completions``."""
    logprobs = choice.get("logprobs") or {}
    if "prompt" in request:
        if ids := choice.pop("prompt_token_ids", None):
            answer.setdefault("prompt_token_ids", ids)
        message = {"role": "assistant", "content": choice.pop("text", None) or ""}
        choice["delta" if request.get("stream") else "message"] = message
        choice["token_logprobs"] = logprobs.get("token_logprobs") or []
    else:
        choice["token_logprobs"] = [token["logprob"] for token in logprobs.get("content") or ()]
    if not request.get("logprobs"):
        choice["logprobs"] = None
    message = choice.get("message") or choice.get("delta") or {}
    if (reasoning := message.pop("reasoning", None)) is not None:
        message["reasoning_content"] = reasoning  # clients don't know vLLM's name


def _message_and_code(status: int, content: bytes) -> tuple[str, str | None]:
    """Return what an error answer says, in OpenAI's shape, in vLLM's older one, or as plain text."""
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
    if status == 400 and any(message in text for message in CONTEXT_FULL):
        code = TOO_LONG
    text = text or f"the upstream answered with status {status} and no body"
    return text, code if isinstance(code, str) else None


def _seconds(retry_after: str) -> float | None:
    """Parse a Retry-After header, which has seconds or a date."""
    with suppress(ValueError):
        seconds = float(retry_after)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    with suppress(ValueError):
        until = parsedate_to_datetime(retry_after)
        return max((until - datetime.now(UTC)).total_seconds(), 0.0) if until.tzinfo else None
    return None


class FixedVersion:
    """An upstream that answers as ``engine`` does, but with its own ``policy_version``."""

    def __init__(self, engine: Engine, policy_version: int) -> None:
        self._engine = engine
        self.policy_version = policy_version

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    async def chat(self, request: JsonDict) -> JsonDict:
        return {**await self._engine.chat(request), "policy_version": self.policy_version}

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield {**chunk, "policy_version": self.policy_version}
