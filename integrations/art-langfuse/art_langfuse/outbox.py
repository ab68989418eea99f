"""Sends items in order and in batches until they have arrived.

If a server is slow, fails now and then or drops connections, requests are retried. If it is unavailable for longer than
``PATIENCE``, each further delivery makes one attempt, and slow attempts take at most half of the time, so training does not wait.
Unsent items are kept for later deliveries, up to ``MOST``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar

from art_core.errors import ArtError
from art_core.plugin_api import printable, without_keys

Item = TypeVar("Item")

PATIENCE = 20.0
"""Seconds during which a request is retried."""
MOST = 5_000
"""Most unsent items; beyond that, the oldest are dropped."""


class Temporary(Exception):
    """A temporary failure: the server cannot be reached, fails, or limits the rate of requests."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait, as requested by the server."""


class Refused(Exception):
    """The server rejects this content, but may accept other content."""


class Denied(ArtError):
    """The server rejects all requests: the keys or the address are wrong."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotDelivered(ArtError):
    """Some items have not been sent."""


def raise_for(status: int | None, details: str, headers: Mapping[str, str] | None = None) -> NoReturn:
    """Raise the exception for an unsuccessful HTTP status."""
    message = f"status {status} from {printable(without_keys(details))}"
    if status is None or status in (408, 429) or (status >= 500 and status != 501):
        retry_after = str((headers or {}).get("retry-after", "")).strip()
        raise Temporary(message, float(retry_after) if retry_after.isdecimal() else 0.0)
    if status in (400, 413, 422):
        raise Refused(message)
    raise Denied(f"{message}; check the keys and the address", status)


def patiently(attempt: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Return the result of ``attempt()``, which is retried if it raises Temporary, for up to ``patience`` seconds."""
    import tenacity

    growing = tenacity.wait_random_exponential(multiplier=0.2, max=5.0)

    def wait(state: tenacity.RetryCallState) -> float:
        assert state.outcome is not None
        return max(growing(state), state.outcome.exception().retry_after)  # type: ignore[union-attr]

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Temporary), stop=tenacity.stop_before_delay(patience), wait=wait, reraise=True
    )  # fmt: skip
    return retrying(attempt)


class Outbox(Generic[Item]):
    """Sends with ``post(batch)``, which raises Temporary, Refused or Denied."""

    def __init__(self, what: str, post: Callable[[Sequence[Item]], None], batch: int) -> None:
        self._what, self._post, self._batch = what, post, batch
        self._waiting: deque[Item] = deque()
        self._unavailable, self._next_attempt = "", 0.0
        """Why the server is unavailable, empty if it is available, and the time of the next attempt."""
        self._lost = 0

    def __len__(self) -> int:
        """Return the number of unsent items."""
        return len(self._waiting)

    def deliver(self, items: Iterable[Item] = ()) -> None:
        """Send the unsent items, then ``items``; raises NotDelivered if some could not be sent."""
        self._waiting.extend(items)
        self._send("wait to be sent again")

    def close(self) -> None:
        """Try once more to send the unsent items; raises NotDelivered, with the number that were never sent."""
        self._next_attempt = 0.0
        self._send("were never sent")
        if self._lost:
            raise NotDelivered(f"{self._what}: {self._lost} were refused or dropped")

    def _send(self, fate: str) -> None:
        """Send the unsent items; ``fate`` says in the NotDelivered error what becomes of the rest."""
        patience, size, refused = 0.0 if self._unavailable else PATIENCE, self._batch, ""
        if time.monotonic() < self._next_attempt:
            raise NotDelivered(self._summary(fate))

        def attempt() -> None:
            nonlocal began
            began = time.monotonic()
            self._post(batch)

        while self._waiting:
            batch, began = list(islice(self._waiting, size)), 0.0
            try:
                patiently(attempt, patience)
            except Refused as error:
                if len(batch) > 1:  # find the item that is refused
                    size = len(batch) // 2
                    continue
                refused, self._lost = str(error), self._lost + 1  # the next one may be, too, so the size stays 1
            except (Temporary, Denied) as error:
                now = time.monotonic()
                # A server that does not answer takes a whole timeout, so wait as long before the next attempt.
                self._unavailable, self._next_attempt = str(error), now + int(now - began)
                raise NotDelivered(self._summary(fate)) from error
            else:
                size = min(2 * size, self._batch)
            self._unavailable, self._next_attempt = "", 0.0
            for _ in batch:
                self._waiting.popleft()
        if refused:
            raise NotDelivered(f"{self._what}: {self._lost} were refused and skipped: {refused}")

    def _summary(self, fate: str) -> str:
        """Drop the oldest items beyond ``MOST``, and say how many are unsent and why."""
        while len(self._waiting) > MOST:
            self._waiting.popleft()
            self._lost += 1
        lost = f", {self._lost} were dropped" if self._lost else ""
        return f"{self._what}: {len(self._waiting)} {fate}{lost}: {self._unavailable}"
