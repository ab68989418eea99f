"""Whether the engine serves the weights that the learner has made: both score a fixed text after every swap.

Knows nothing about engines, learners or how weights travel. Distances are root mean squares over the text's tokens, in nats.

The served logprobs must be nearer to the new weights' than to the old ones'. The old ones are those of the last swap of which
this could be told, so what many small steps hide comes out when they have added up to something.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from art_core.errors import ArtError, StaleWeightsError
from art_core.types import Trajectory

TOKENS = 256
"""Of the text."""
FLOOR = 2e-5
"""Nats; what float32 and the order of sums leave between two implementations of one model."""
DAMAGED = 10.0
"""Times the noise, from which the served weights are neither the new nor the old ones."""

LEAST = -9999.0
"""What vLLM says for a logprob of minus infinity."""
LARGE = 0.1
"""Nats; more than 16 bits leave between two implementations of one model."""
FOREIGN = 1.0
"""Nats; more than any number format leaves."""
DIFFERENT = (
    "engine and learner, with the start weights, differ by %.3g nats over a fixed text: they do not compute the same model, or "
    "one of them in a coarse number format"
)
OTHER_MODEL = (
    "engine and learner should both have the start weights, and differ by {:.3g} nats over a fixed text: they do not compute the "
    "same model. Nothing is trained; start the engine's server with the model that the run is given as model="
)

BROKEN = (
    "the learner's own logprobs of a fixed text are not numbers, so its weights are broken, and nothing is known about the "
    "engine's. The step is not counted; lower learning_rate, or look at the start weights, and train again with the same run_dir"
)

log = logging.getLogger("art_core.engine.sentinel")  # below the name whose records a person is shown

Score = Callable[[Sequence[int]], Awaitable[list[float] | None]]
"""The logprob of every token of a text but the first; None where who is asked cannot say."""


@dataclass
class State:
    """What outlives the process."""

    ids: list[int] = field(default_factory=list)
    """The text, from the run's own first calls: there the steps change most. Empty until there is one."""
    start: list[float] = field(default_factory=list)
    """Under the weights that the run began with, by the learner."""
    noise: float = FLOOR
    """The distance between engine and learner while both had the same weights, at least ``FLOOR``."""


class Sentinel:
    """``begin`` before every step, ``check`` after every swap. ``keep`` stores what must outlive the process."""

    def __init__(self, served: Score, learnt: Score, kept: Any, keep: Callable[[Any], None]) -> None:
        self._served, self._learnt, self._keep = served, learnt, keep
        self._state = State(**kept) if kept else State()
        self._told: tuple[int, list[float]] | None = None
        """The last version that was told to be served, and its logprobs by the learner."""
        self._served_last: list[float] = []
        """The text's logprobs by the engine, when both sides were last asked."""
        self._deaf = False
        """Whether the engine or the learner cannot score."""

    async def begin(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Choose the text where there is none, and measure the noise while both sides have the weights of ``version``; after
        a check, StaleWeightsError where the engine serves other weights by now than it did then."""
        if self._deaf:
            return
        if self._told:
            return await self._still(version)
        state = self._state
        ids = state.ids or _text(trajectories)
        if not ids or (logprobs := await self._ask(ids)) is None:
            return
        served, learnt = logprobs
        if not state.ids:
            noise = distance(served, learnt)
            if noise > FOREIGN:
                raise StaleWeightsError(OTHER_MODEL.format(noise))
            if noise > LARGE:
                log.warning(DIFFERENT, noise)
            self._state = State(ids, learnt, max(FLOOR, noise))
            self._keep(asdict(self._state))
        self._told = version, learnt

    async def going_on(self) -> None:
        """Measure the noise anew while the engine has the start weights: a run may go on with another engine, or with the same
        in another number format."""
        served = await self._served(self._state.ids) if self._state.ids else None
        if served is not None and (noise := distance(served, self._state.start)) <= LARGE:
            self._state.noise = max(FLOOR, noise)
            self._keep(asdict(self._state))

    async def resumed(self, version: int) -> None:
        """Check what a run that goes on has loaded into the engine against the weights that it was begun with."""
        if self._state.ids and version:
            self._told = 0, self._state.start
            await self.check(version)

    async def check(self, version: int) -> dict[str, float]:
        """Return metrics: ``mismatch``, the distance between engine and learner, and ``cannot_tell``, 1 where the swap
        changed too little to tell. Raises StaleWeightsError where the engine does not serve ``version``."""
        if self._told is None or (logprobs := await self._ask(self._state.ids)) is None:
            return {}
        served, learnt = logprobs
        old_version, old = self._told
        mismatch, noise = distance(served, learnt), self._state.noise
        changed, to_old = distance(learnt, old), distance(served, old)
        nearer_to_old = changed > noise and to_old <= mismatch
        if nearer_to_old and to_old <= DAMAGED * noise:
            raise StaleWeightsError(self._stale(version, mismatch, to_old, old_version))
        if nearer_to_old or not mismatch <= max(DAMAGED * noise, changed):  # not a number is damaged too
            raise StaleWeightsError(self._damaged(version, mismatch, to_old, old_version))
        if mismatch > DAMAGED * noise:
            log.warning(
                "version %d: the engine's logprobs of a fixed text differ from the learner's by %.3g nats, and by %.3g at the "
                "start of the run; what is sampled is not quite what is trained",
                version, mismatch, noise,
            )  # fmt: skip
        if changed > noise:
            self._told = version, learnt
        return {"mismatch": mismatch, "cannot_tell": float(changed <= noise)}

    async def _still(self, version: int) -> None:
        served = await self._served(self._state.ids)
        if served is None or (moved := distance(served, self._served_last)) <= DAMAGED * self._state.noise:
            return
        raise StaleWeightsError(
            f"the engine does not serve version {version} of the weights any more: a fixed text of {len(self._state.ids)} tokens "
            f"has logprobs there that differ by {moved:.3g} nats from those after the last swap; "
            f"{self._state.noise:.3g} is usual here. Its server was started anew, or somebody else loads weights into it. What "
            "was sampled since then is not trained; train again with the same run_dir, which loads the weights"
        )

    async def _ask(self, ids: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return the text's logprobs by engine and learner; None, said once, where one of them cannot score."""
        served = await self._served(ids)
        learnt = None if served is None else await self._learnt(ids)
        if served is not None and learnt is not None:
            if any(map(math.isnan, learnt)):
                raise ArtError(BROKEN)
            self._served_last = served
            return served, learnt
        self._deaf, who = True, "engine" if served is None else "learner"
        log.info("this %s cannot score a text, so nobody checks that the newest weights are served", who)
        return None

    def _stale(self, version: int, mismatch: float, to_old: float, old_version: int) -> str:
        return (
            f"the engine is old: it was given version {version} of the weights and still serves version {old_version}. "
            f"A fixed text of {len(self._state.ids)} tokens has logprobs there that differ from the learner's "
            f"version {version} by {mismatch:.3g} nats and from its version {old_version} by {to_old:.3g}. The step is not "
            "counted, and the run stops before it samples with old weights; restart the engine and train again with the same "
            "run_dir"
        )

    def _damaged(self, version: int, mismatch: float, to_old: float, old_version: int) -> str:
        return (
            f"the engine serves neither version {version} of the weights, which it was given, nor the old ones: a fixed text of "
            f"{len(self._state.ids)} tokens has logprobs there that differ from the learner's version {version} by "
            f"{mismatch:.3g} nats and from its version {old_version} by {to_old:.3g}; {self._state.noise:.3g} is usual here. The "
            "weights were damaged on their way, or belong to another model. The step is not counted; train again with the same "
            "run_dir"
        )


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square of the differences; not a number where one of the values is none."""
    differences = (max(x, LEAST) - max(y, LEAST) for x, y in zip(a, b, strict=True))
    return math.sqrt(sum(it * it for it in differences) / max(1, len(a)))


def _text(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the end of the first call that sampled something; empty where there is none of two tokens.

    Without its last token: a call may fill the context, and a server that scores a text wants room for one token more.
    """
    calls = [call for trajectory in trajectories for call in trajectory.calls if call.sampled_ids]
    ids = [*calls[0].prompt_ids, *calls[0].sampled_ids[:-1]][-TOKENS:] if calls else []
    return ids if len(ids) > 1 else []
