"""The same rollouts for ART's RULER and for ours, and how each is called.

Every rollout states its worth (``worth 0.3``), by which the stub recognises it.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from art_core.types import Call, Group, JsonDict, Trajectory
from art_ruler import Ruler

MODEL = "openai/gpt-4.1-mini"
"""For this model both sides request JSON by a schema; the address decides who really answers."""
WORDS = ("alpha", "beta", "gamma", "delta", "invoice", "mail", "read", "sent")
SIZE = 8


@dataclass(frozen=True)
class Run:
    """One rollout's conversation."""

    worth: float
    messages: list[JsonDict]
    side_question: list[JsonDict] | None = None
    """Another conversation of the same rollout."""


@dataclass(frozen=True)
class Outcome:
    """A side's result for a judge's answer."""

    scores: list[float | None]
    reason: str = ""
    """Why scores are missing, if any are."""


class Side(Protocol):
    """One way to judge a group."""

    name: str

    async def group(self, runs: Sequence[Run]) -> Any:
        """Return ``runs`` in the side's own form."""

    async def score(self, group: Any, url: str, timeout: float = 60.0) -> Outcome:
        """Call the judge at ``url``; raises what the side raises."""


def conversation(rng: random.Random, turns: int, last: str) -> list[JsonDict]:
    """Return a system prompt, a task and ``turns`` answers of 40 words with results of 120; the last answer is ``last``."""

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    messages: list[JsonDict] = [
        {"role": "system", "content": "You are an email agent. " + "Be exact. " * 80},
        {"role": "user", "content": "Find the invoice."},
    ]
    for _ in range(turns - 1):
        messages += [{"role": "assistant", "content": words(40)}, {"role": "user", "content": words(120)}]
    return [*messages, {"role": "assistant", "content": last}]


def make_runs(seed: int = 0, turns: int = 2, *, alike: bool = False, side_questions: bool = False) -> list[Run]:
    """Return 8 rollouts worth 0.1 to 0.8, shuffled; if ``alike``, all identical and worth 0.5."""
    rng = random.Random(seed)
    worths = rng.sample([round(0.1 * i, 1) for i in range(1, SIZE + 1)], SIZE)
    runs = []
    for worth in [0.5] * SIZE if alike else worths:
        messages = conversation(random.Random(seed) if alike else rng, turns, f"worth {worth}")
        runs.append(Run(worth, messages, conversation(rng, 2, "thrown away") if side_questions else None))
    return runs


class OurSide:
    """``art_ruler.Ruler``."""

    name = "ours"

    def __init__(self) -> None:
        self._rulers: dict[tuple[str, float], Ruler] = {}

    async def group(self, runs: Sequence[Run]) -> Group:
        """Return ``runs`` with a call for every assistant message."""
        return Group("find", tuple(trajectory_of(run) for run in runs))

    async def score(self, group: Group, url: str, timeout: float = 60.0) -> Outcome:
        """Return the scores, or the note if there are none."""
        key = url, timeout
        if key not in self._rulers:
            settings = {"timeout": timeout, "retries": 1, "concurrency": 32}
            self._rulers[key] = Ruler(MODEL, api_base=url, api_key="none", **settings)
        scores = await self._rulers[key].score(group)
        return Outcome(scores, group.trajectories[0].notes.get("unscored", ""))


def trajectory_of(run: Run) -> Trajectory:
    """Return ``run`` with a call for every assistant message."""
    calls = []
    for agent, messages in (("helper", run.side_question or []), (None, run.messages)):
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                request = {"messages": messages[:i]}
                calls.append(Call((1,), (2,), (-1.0,), agent=agent, request=request, response=message))
    return Trajectory("find", tuple(calls))


class ArtSide:
    """``art.rewards.ruler_score_group``; raises ImportError without openpipe-art."""

    def __init__(self) -> None:
        import art
        from art.rewards import ruler_score_group

        self.name = f"ART {importlib.metadata.version('openpipe-art')}"
        self._art, self._score = art, ruler_score_group

    async def group(self, runs: Sequence[Run]) -> Any:
        """Return a TrajectoryGroup."""
        history = self._art.trajectories.LegacyHistory
        return self._art.TrajectoryGroup(
            self._art.Trajectory(
                messages_and_choices=run.messages,
                additional_histories=[history(messages_and_choices=run.side_question)] if run.side_question else [],
            )
            for run in runs
        )

    async def score(self, group: Any, url: str, timeout: float = 60.0) -> Outcome:
        """Return the rewards by position, in ART's order."""
        params = {"api_base": url, "api_key": "none", "timeout": timeout}
        scored = await self._score(group, MODEL, extra_litellm_params=params)
        return Outcome([it.reward for it in scored.trajectories])
