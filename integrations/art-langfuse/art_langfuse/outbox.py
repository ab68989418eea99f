"""What is to be sent, in order and in batches, until it has arrived. Knows nothing about what it is, or by which protocol.

A server that is slow, fails at times or cuts connections costs attempts only. One that stays away for longer than ``PATIENCE``
is asked once at each further delivery, and where that takes seconds half of the time at most, so that nobody waits for it; what
could not be sent stays until it can, up to ``MOST``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar

from art_core.errors import ArtError
from art_core.redaction import printable, without_keys

Item = TypeVar("Item")

PATIENCE = 20.0
"""Seconds in which something is tried again."""
MOST = 5_000
"""Things that wait; of more the oldest are given up."""


class Temporary(Exception):
    """It did not work now: the server cannot be reached, fails, or wants fewer requests."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""


class Refused(Exception):
    """The server does not take this content; other content it may."""


class Denied(ArtError):
    """The server answers us nothing: the keys or the address are wrong."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotDelivered(ArtError):
    """Some of what was to be sent has not arrived."""


def raise_for(status: int | None, said: str, headers: Mapping[str, str] | None = None) -> NoReturn:
    """Raise what an HTTP answer that is no success means."""
    message = f"answer {status} from {printable(without_keys(said))}"
    if status is None or status in (408, 429) or (status >= 500 and status != 501):
        after = str((headers or {}).get("retry-after", "")).strip()
        raise Temporary(message, float(after) if after.isdecimal() else 0.0)
    if status in (400, 413, 422):
        raise Refused(message)
    raise Denied(f"{message}; check the keys and the address", status)


def patiently(attempt: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Return what ``attempt`` does; called again where it raises Temporary, while that fits into ``patience`` seconds."""
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
        self._away, self._ask_again = "", 0.0
        """Why the server takes nothing, as far as is known, and when it is asked again."""
        self._lost = 0

    def __len__(self) -> int:
        """How many things wait."""
        return len(self._waiting)

    def deliver(self, items: Iterable[Item] = ()) -> None:
        """Send what waits and ``items`` after it; raises NotDelivered where some of it was not taken."""
        self._waiting.extend(items)
        self._send("wait to be sent again")

    def close(self) -> None:
        """Send what waits, or try to; raises NotDelivered, with how much was never taken."""
        self._ask_again = 0.0
        self._send("were never sent")
        if self._lost:
            raise NotDelivered(f"{self._what}: {self._lost} were refused or given up")

    def _send(self, otherwise: str) -> None:
        patience, size, refused = 0.0 if self._away else PATIENCE, self._batch, ""
        if time.monotonic() < self._ask_again:
            raise NotDelivered(self._left(otherwise))

        def attempt() -> None:
            nonlocal began
            began = time.monotonic()
            self._post(batch)

        while self._waiting:
            batch, began = list(islice(self._waiting, size)), 0.0
            try:
                patiently(attempt, patience)
            except Refused as error:
                if len(batch) > 1:  # find out which of them it is
                    size = len(batch) // 2
                    continue
                refused, self._lost = str(error), self._lost + 1
            except (Temporary, Denied) as error:
                now = time.monotonic()
                # One that says nothing costs the whole timeout of a question, in seconds.
                self._away, self._ask_again = str(error), now + int(now - began)
                raise NotDelivered(self._left(otherwise)) from error
            self._away, self._ask_again, size = "", 0.0, self._batch
            for _ in batch:
                self._waiting.popleft()
        if refused:
            raise NotDelivered(f"{self._what}: {self._lost} were refused and left out: {refused}")

    def _left(self, are: str) -> str:
        while len(self._waiting) > MOST:
            self._waiting.popleft()
            self._lost += 1
        lost = f", {self._lost} were given up" if self._lost else ""
        return f"{self._what}: {len(self._waiting)} {are}{lost}: {self._away}"
