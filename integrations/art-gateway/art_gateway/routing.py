"""Routes rollouts to upstreams and retries failed requests.

A rollout stays with one upstream, whose prefix cache holds its conversation: the one with the highest hash of both names
(rendezvous hashing). So there is no table to keep, and only the rollouts of a failed upstream move.
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
"""Seconds; if a server's Retry-After is longer, the request fails instead."""
FIRST_REST = 1.0
"""Seconds for which an unreachable upstream is avoided if another is up; doubled with each failure up to ``LONGEST_REST``."""
LONGEST_REST = 30.0


class Server(Upstream, Protocol):
    """An upstream with a URL and a version of its weights: ``HttpUpstream`` or ``LocalUpstream``."""

    base_url: str
    policy_version: int

    async def models(self) -> JsonDict: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass
class Backend:
    """An upstream and its health."""

    upstream: Server
    inside: int = 0
    """Requests in flight."""
    failures: int = 0
    """Consecutive failures that mean that it is down; those during a rest aren't counted."""
    rests_until: float = 0.0
    """A time of the monotonic clock."""

    @property
    def up(self) -> bool:
        """Whether it isn't resting after a failure."""
        return time.monotonic() >= self.rests_until

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count the request made in this block, and update the health from its result."""
        self.inside += 1
        try:
            yield
        except UpstreamError as error:
            if is_down(error):
                self.rest(error)
            raise
        else:
            self.failures = 0
        finally:
            self.inside -= 1

    def rest(self, error: Exception) -> None:
        """Leave it alone for a while, longer after each failure."""
        if not self.up:
            # Calls in flight together fail together: count one failure.
            return
        if not self.failures:
            log.warning("%s is down: %s", self.upstream.base_url, error)
        self.failures += 1
        # The exponent is bounded, because after a long outage the power would overflow a float.
        self.rests_until = time.monotonic() + min(FIRST_REST * 2 ** min(self.failures - 1, 16), LONGEST_REST)


@dataclass
class Pool:
    """The upstreams. ``retries`` is the number of attempts after the first, over all upstreams."""

    backends: list[Backend]
    retries: int = 4
    first_pause: float = 0.5
    """Seconds before the first retry; doubled for each further one, times a random factor from 0.5 to 1.5."""
    retried: int = field(default=0, init=False)
    """Retries so far."""

    @classmethod
    def of(cls, upstreams: Sequence[Server], retries: int = 4, first_pause: float = 0.5) -> Pool:
        """Return a pool of ``upstreams``."""
        return cls([Backend(upstream) for upstream in upstreams], retries, first_pause)

    def route(self, rollout_id: str) -> Upstream:
        """Return the upstream that answers a rollout's calls. For one that only relays, retrying is left to the client."""
        ordered = self._ordered(rollout_id)
        first = next((backend for backend in ordered if backend.up), ordered[0]).upstream
        return first if hasattr(first, "relay") else Route(self, ordered)

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
                with backend.track_request():
                    return await backend.upstream.models()
            except UpstreamError as error:
                last_error = error
        raise last_error

    async def start(self) -> None:
        """Start all upstreams. Raises ConfigError if a model can't be loaded."""
        for backend in self.backends:
            await backend.upstream.start()

    async def stop(self) -> None:
        """Close all connections."""
        for backend in self.backends:
            await backend.upstream.stop()


@dataclass(frozen=True)
class Route:
    """The Upstream for one rollout's calls. A request is retried only while no part of its answer has been passed on."""

    pool: Pool
    backends: list[Backend]
    """The rollout's own first, then the alternatives while that one is down."""

    async def chat(self, request: JsonDict) -> JsonDict:
        """Return the answer. Raises the last attempt's UpstreamError."""
        attempt = 0
        while True:
            try:
                backend = self._choose()
                with backend.track_request():
                    return await backend.upstream.chat(request)
            except UpstreamError as error:
                pause = self._pause(error, attempt)
            attempt += 1
            await asyncio.sleep(pause)

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        """Yield the chunks of an answer. Raises the last attempt's UpstreamError; after the first chunk, any UpstreamError."""
        attempt, started = 0, False
        while True:
            try:
                backend = self._choose()
                with backend.track_request():
                    async with aclosing(backend.upstream.stream(request)) as chunks:
                        async for chunk in chunks:
                            started = True
                            yield chunk
                    return
            except UpstreamError as error:
                if started:
                    raise
                pause = self._pause(error, attempt)
            attempt += 1
            await asyncio.sleep(pause)

    def _choose(self) -> Backend:
        return next((backend for backend in self.backends if backend.up), self.backends[0])

    def _pause(self, error: UpstreamError, attempt: int) -> float:
        """Return the seconds until the next attempt; raise ``error`` if there is none."""
        if attempt >= self.pool.retries or not worth_retrying(error):
            raise error
        self.pool.retried += 1
        if is_down(error) and any(backend.up for backend in self.backends):
            return 0.0
        return pause_before(attempt, self.pool.first_pause, error.retry_after)


def is_down(error: UpstreamError) -> bool:
    """Whether an error means that the upstream is unavailable, rather than that it rejected the request."""
    return error.code == UNREACHABLE or error.status == 503


def worth_retrying(error: UpstreamError) -> bool:
    """Whether a retry of the same request may succeed, soon enough to wait for it."""
    soon = (error.retry_after or 0.0) <= LONGEST_PAUSE
    return soon and error.status in WORTH_RETRYING and error.code != TIMED_OUT


def pause_before(attempt: int, first: float, retry_after: float | None) -> float:
    """Return the seconds before retry number ``attempt``, counted from 0; at least ``retry_after``."""
    backoff = min(first * 2**attempt, LONGEST_PAUSE / 2) * random.uniform(0.5, 1.5)
    return max(backoff, retry_after or 0.0)
