"""Checks that the engine serves the learner's newest weights: after every swap, both score a fixed text.

Distances are root mean squares over the text's tokens, in nats. The served logprobs must be nearer to those of the new
weights than to those of the old ones. The old weights are those of the last swap that changed more than the noise, so
many small steps that never arrive are noticed once they add up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from art_core.errors import ArtError, StaleWeightsError
from art_core.types import Trajectory

TEXT_TOKENS = 256
FLOOR = 2e-5
"""Nats; two implementations of one model differ by this much in float32, by rounding and the order of sums."""
LARGE = 0.1
"""Nats; more than two implementations of one model differ by in 16 bits."""
FOREIGN = 1.0
"""Nats; more than any number format explains."""
DAMAGE_FACTOR = 10.0
"""A factor of the noise: the distance from which the served weights are neither the new nor the old ones."""
MINUS_INFINITY = -9999.0
"""vLLM's logprob of an impossible token."""
APART = (
    "version %d: the logprobs of a fixed text differ by %.3g nats between engine and learner; %.3g is usual. One of them "
    "uses a coarser number format, or another model: the policy that samples is not quite the one that is trained"
)

log = logging.getLogger("art_core.engine.sentinel")  # a child of the logger whose records are displayed

Score = Callable[[Sequence[int]], Awaitable[list[float] | None]]
"""Returns the logprob of every token of a text but the first; None if unsupported."""


@dataclass
class State:
    """The state of the check that is stored in the run folder."""

    ids: list[int] = field(default_factory=list)
    """The text, from the run's own first calls, where the steps change most; empty before the first step."""
    start: list[float] = field(default_factory=list)
    """Its logprobs under the start weights, by the learner."""
    noise: float = FLOOR
    """The distance between engine and learner with the same weights, at least ``FLOOR``."""


class Sentinel:
    """``begin`` before every step; after every swap, ``check`` the logprobs that the engine returns for ``probe``."""

    def __init__(self, engine: Score, learner: Score, stored: Any, store: Callable[[Any], None]) -> None:
        self._engine, self._learner, self._store = engine, learner, store
        self._state = State(**(stored or {}))
        self._old: tuple[int, list[float]] | None = None
        """The last version that the check could tell from the one before, and its logprobs by the learner."""
        self._last_served: list[float] = []
        self._off = False
        """Whether the engine or the learner can't score."""

    @property
    def probe(self) -> list[int]:
        """The text to score after the next swap; empty if there is nothing to compare it with."""
        return [] if self._off or self._old is None else self._state.ids

    async def begin(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Before the first step, choose the text and measure the noise while both sides have ``version``. Before later
        steps, raise StaleWeightsError if the engine no longer serves what it did at the last check."""
        ids = self._state.ids or _choose_text(trajectories)
        if self._off or not ids:
            return
        served = await self._engine(ids)
        if self._old is None:
            if (learnt := await self._by_learner(ids, served)) is not None:
                self._old = version, learnt
                if not self._state.ids:  # else measured by resume()
                    self._measure(ids, served, learnt)
        elif served and (moved := distance(served, self._last_served)) > DAMAGE_FACTOR * self._state.noise:
            raise StaleWeightsError(
                f"the engine no longer serves version {version} of the weights: its logprobs of a fixed text differ by "
                f"{moved:.3g} nats from those after the last swap. Its server was restarted, or another process loads "
                "weights into it. Calls since then are not trained; train again with the same run_dir, which loads the "
                "weights"
            )

    def _measure(self, ids: list[int], served: Sequence[float], learnt: list[float]) -> None:
        noise = distance(served, learnt)
        if noise > FOREIGN:
            raise StaleWeightsError(
                f"engine and learner should both have the start weights, and differ by {noise:.3g} nats over a fixed text: "
                "they do not compute the same model. Nothing is trained; start the engine's server with the run's model="
            )
        if noise > LARGE:
            log.warning(APART, 0, noise, FLOOR)
        self._state = State(ids, learnt, max(FLOOR, noise))
        self._store(asdict(self._state))

    async def resume(self) -> None:
        """Let the next check compare with the start weights, which the engine has now. The noise is measured again, because
        a run may resume with another engine or number format."""
        state = self._state
        if not state.ids:
            return
        self._old = 0, state.start
        served = await self._engine(state.ids)
        if served is not None and (noise := distance(served, state.start)) <= LARGE:
            state.noise = max(FLOOR, noise)
            self._store(asdict(state))

    async def check(self, version: int, served: list[float] | None) -> dict[str, float]:
        """Return metrics: ``mismatch``, the distance between engine and learner, and ``cannot_tell``, 1 if the swap
        changed too little to tell. Raises StaleWeightsError if the engine does not serve ``version``."""
        if not self.probe or (learnt := await self._by_learner(self.probe, served)) is None:
            return {}
        (old, old_logprobs), noise = self._old, self._state.noise
        to_new, to_old = distance(served, learnt), distance(served, old_logprobs)
        changed = distance(learnt, old_logprobs)
        nearer_to_old = changed > noise and to_old <= to_new
        if nearer_to_old or not to_new <= max(DAMAGE_FACTOR * noise, changed):  # a NaN is damage too
            distances = (
                f"over a fixed text it is {to_new:.3g} nats from the new weights and {to_old:.3g} from the old ones; "
                f"{noise:.3g} is usual. The step is not counted"
            )
            if nearer_to_old and to_old <= DAMAGE_FACTOR * noise:
                raise StaleWeightsError(
                    f"the engine was sent version {version} of the weights and still serves version {old}: {distances}; "
                    "restart the engine and train again with the same run_dir"
                )
            raise StaleWeightsError(
                f"the engine serves neither version {version} of the weights, which it was sent, nor the old ones: "
                f"{distances}. They were damaged on their way, or belong to another model; train again with the same run_dir"
            )
        if to_new > DAMAGE_FACTOR * noise:
            log.warning(APART, version, to_new, noise)
        if changed > noise:
            self._old = version, learnt
        return {"mismatch": to_new, "cannot_tell": float(changed <= noise)}

    async def _by_learner(self, ids: Sequence[int], served: list[float] | None) -> list[float] | None:
        """Return the learner's logprobs; None, logged once, if the engine or the learner can't score."""
        learnt = None if served is None else await self._learner(ids)
        if learnt is None:
            self._off = True
            log.info("%s has no score(): skipping the stale-weights check", "engine" if served is None else "learner")
            return None
        if any(map(math.isnan, learnt)):
            raise ArtError(
                "the learner's own logprobs of a fixed text are not numbers, so its weights are broken. The step is not "
                "counted; lower learning_rate, or check the start weights, and train again with the same run_dir"
            )
        self._last_served = served
        return learnt


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square of the differences; NaN if a value is NaN."""
    differences = (max(x, MINUS_INFINITY) - max(y, MINUS_INFINITY) for x, y in zip(a, b, strict=True))
    return math.sqrt(sum(difference**2 for difference in differences) / max(1, len(a)))


def _choose_text(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the end of the first call that sampled something; empty if that has fewer than two tokens.

    Without its last token: a call may fill the context, and a server that scores a text needs room for one token more.
    """
    calls = (call for trajectory in trajectories for call in trajectory.calls if call.sampled_ids)
    ids = [*call.prompt_ids, *call.sampled_ids[:-1]][-TEXT_TOKENS:] if (call := next(calls, None)) else []
    return ids if len(ids) > 1 else []
