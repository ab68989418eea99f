"""How fast the engine computes, from its own counters."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from art_core.errors import CaptureError


class Throughput:
    """Rates since the last call. ``counters`` returns the totals of ``EngineBase.counters``, or nothing."""

    def __init__(self, counters: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        self._counters = counters
        self._totals: Mapping[str, float] = {}
        self._at = time.monotonic()

    async def taken(self) -> dict[str, float]:
        """Return ``tokens_per_second`` (sampled) and ``cache_hit_rate``, the share of the prompts' tokens that was cached.

        Without the latter if there was no prompt; empty if the engine does not count or cannot be reached.
        """
        try:
            totals = await self._counters()
        except CaptureError:  # raised to whoever needs the engine's answer
            return {}
        before, since, self._totals, self._at = self._totals, self._at, totals, time.monotonic()
        if not totals:
            return {}
        # A restarted server counts from 0 again.
        new = {name: max(0.0, total - before.get(name, 0.0)) for name, total in totals.items()}
        rates = {"tokens_per_second": new["sampled_tokens"] / max(self._at - since, 1e-9)}
        if new["prompt_tokens"]:
            rates["cache_hit_rate"] = new["cached_tokens"] / new["prompt_tokens"]
        return rates
