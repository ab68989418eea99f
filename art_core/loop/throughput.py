"""How much the engine computes, from its own totals. Knows nothing about what it computes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from art_core.errors import CaptureError


class Throughput:
    """What came since it was last asked. ``counters`` returns the totals of ``EngineBase.counters``, or nothing."""

    def __init__(self, counters: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        self._counters = counters
        self._last: Mapping[str, float] = {}
        self._asked = time.monotonic()

    async def taken(self) -> dict[str, float]:
        """Return ``tokens_per_second`` (sampled) and ``cache_hit_rate``, the share of the prompts' tokens that were not computed
        anew, since the last call; empty where the engine does not count or cannot be reached, without the rate where no
        prompt came."""
        try:
            now = dict(await self._counters())
        except CaptureError:  # whoever needs an answer of the engine is told
            return {}
        moment = time.monotonic()
        # A server that was started anew counts from 0 again.
        new = {name: max(0.0, total - self._last.get(name, 0.0)) for name, total in now.items()}
        seconds, self._last, self._asked = moment - self._asked, now, moment
        if not now:
            return {}
        found = {"tokens_per_second": new["sampled_tokens"] / max(seconds, 1e-9)}
        if new["prompt_tokens"]:
            found["cache_hit_rate"] = new["cached_tokens"] / new["prompt_tokens"]
        return found
