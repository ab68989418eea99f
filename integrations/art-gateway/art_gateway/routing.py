"""Which upstream answers which rollout, and what is tried again. Knows nothing about HTTP servers or recording.

A rollout stays with one upstream, whose prefix cache holds its conversation: the one with the highest hash of both names
(rendezvous hashing), so that nothing need be remembered and only the rollouts of an upstream that fails go elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from art_core.capture import TIMED_OUT, UNREACHABLE
from art_core.errors import UpstreamError
from art_core.types import JsonDict, Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("art_gateway")

WORTH_RETRYING = frozenset({429, 500, 502, 503, 504})
LONGEST_PAUSE = 60.0
"""Seconds; a server that asks for more is not waited for."""
FIRST_REST = 1.0
"""Seconds for which an upstream that could not be reached is left alone where another one is up; doubled up to the longest."""
LONGEST_REST = 30.0


class Server(Upstream, Protocol):
    """An upstream with a name, whose weights may be swapped: ``HttpUpstream`` or ``LocalUpstream``."""

    base_url: str
    policy_version: int

    async def models(self) -> JsonDict: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass
class Backend:
    """An upstream and how it has been doing."""

    upstream: Server
    inside: int = 0
    """Requests that it is answering."""
    failures: int = 0
    """In a row, of those that say that it is not there; what fails while it rests is not counted again."""
    rests_until: float = 0.0
    """By the monotonic clock."""

    @property
    def up(self) -> bool:
        """Whether it is worth asking."""
        return time.monotonic() >= self.rests_until

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request, and learn from how it ends."""
        self.inside += 1
        try:
            yield
        except UpstreamError as error:
            if is_down(error):
                self._rest(error)
            raise
        else:
            self.failures = 0
        finally:
            self.inside -= 1

    def _rest(self, error: UpstreamError) -> None:
        if not self.up:
            # Calls that were in flight together fail together: one failure.
            return
        if not self.failures:
            log.warning("%s fails: %s", self.upstream.base_url, error)
        self.failures += 1
        # Bounded before it is raised: after a long outage the power would be no float any more.
        self.rests_until = time.monotonic() + min(FIRST_REST * 2 ** min(self.failures - 1, 16), LONGEST_REST)


@dataclass
class Pool:
    """The upstreams. ``retries`` counts further attempts after the first, over all upstreams."""

    backends: list[Backend]
    retries: int = 4
    first_pause: float = 0.5
    """Seconds before the first retry; doubled at each further one, times a random number between a half and one and a half."""
    retried: int = field(default=0, init=False)
    """Attempts that were repeated so far."""

    @classmethod
    def of(cls, upstreams: Sequence[Server], retries: int = 4, first_pause: float = 0.5) -> Pool:
        """Return the pool of these upstreams."""
        return cls([Backend(upstream) for upstream in upstreams], retries, first_pause)

    def route(self, rollout_id: str) -> Route:
        """Return what answers the calls of a rollout."""
        return Route(self, self._ordered(rollout_id))

    def _ordered(self, rollout_id: str) -> list[Backend]:
        if len(self.backends) == 1:
            return self.backends
        name = rollout_id.encode("utf-8", "surrogatepass")

        def rank(backend: Backend) -> bytes:
            return hashlib.blake2b(name, key=backend.upstream.base_url.encode()[-64:], digest_size=8).digest()

        return sorted(self.backends, key=rank, reverse=True)

    async def models(self) -> JsonDict:
        """Return the models of the first upstream that answers."""
        for backend in sorted(self.backends, key=lambda backend: not backend.up):
            try:
                with backend.asked():
                    return await backend.upstream.models()
            except UpstreamError as error:
                refusal = error
        raise refusal

    async def start(self) -> None:
        """Load what has to be loaded. Raises ConfigError where that cannot be done."""
        for backend in self.backends:
            await backend.upstream.start()

    async def stop(self) -> None:
        """Close all connections."""
        for backend in self.backends:
            await backend.upstream.stop()


@dataclass(frozen=True)
class Route:
    """Answers one rollout's calls: an Upstream. A request is sent again only while nothing of its answer was passed on."""

    pool: Pool
    backends: list[Backend]
    """The rollout's own first, then where it goes while that one is down."""

    async def chat(self, request: JsonDict) -> JsonDict:
        """Answer a request. Raises the last attempt's UpstreamError."""
        attempt = 0
        while True:
            try:
                backend = self._choose()
                with backend.asked():
                    return await backend.upstream.chat(request)
            except UpstreamError as error:
                pause = self._pause(error, attempt)
            attempt += 1
            await asyncio.sleep(pause)

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer. Raises the last attempt's UpstreamError, and any once a chunk was yielded."""
        attempt, begun = 0, False
        while True:
            try:
                backend = self._choose()
                with backend.asked():
                    async with aclosing(backend.upstream.stream(request)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            yield chunk
                    return
            except UpstreamError as error:
                if begun:
                    raise
                pause = self._pause(error, attempt)
            attempt += 1
            await asyncio.sleep(pause)

    def _choose(self) -> Backend:
        return next((backend for backend in self.backends if backend.up), self.backends[0])

    def _pause(self, error: UpstreamError, attempt: int) -> float:
        """Return the seconds until the next attempt; raise the error where there is none."""
        if attempt >= self.pool.retries or not worth_retrying(error):
            raise error
        self.pool.retried += 1
        if is_down(error) and any(backend.up for backend in self.backends):
            return 0.0
        return pause_before(attempt, self.pool.first_pause, error.retry_after)


def is_down(error: UpstreamError) -> bool:
    """Whether an error says that the upstream is not there, rather than that it does not like the request."""
    return error.code == UNREACHABLE or error.status == 503


def worth_retrying(error: UpstreamError) -> bool:
    """Whether the same request may succeed when it is sent again, soon enough to wait for it."""
    soon = (error.retry_after or 0.0) <= LONGEST_PAUSE
    return soon and error.status in WORTH_RETRYING and error.code != TIMED_OUT


def pause_before(attempt: int, first: float, retry_after: float | None) -> float:
    """Return the seconds before the retry number ``attempt``, counted from 0: never less than the upstream asks for."""
    grown = min(first * 2**attempt, LONGEST_PAUSE / 2) * random.uniform(0.5, 1.5)
    return max(grown, retry_after or 0.0)
