"""Group -> scores, by a judge that compares the runs. Knows nothing about training, tokens or how the judge is reached."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from art_core import exempt, hookimpl
from art_core.errors import ConfigError
from art_core.types import Group
from art_ruler.answer import Fault, read_scores
from art_ruler.judge import Judge, JudgeError, LiteLLMJudge
from art_ruler.prompt import RUBRIC, question, repair, view

__all__ = ["RUBRIC", "Ruler"]

log = logging.getLogger("art_ruler")


@hookimpl
def register_rewards(register: Callable[[str, Any], None]) -> None:
    """Offer ``reward="ruler"``."""
    register("ruler", Ruler)


class Ruler:
    """Scores the runs of a group relative to each other."""

    def __init__(
        self,
        judge: str | Judge | None = None,
        *,
        rubric: str | None = None,
        votes: int = 1,
        api_base: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """``judge`` is a LiteLLM model string, or ``async def judge(messages) -> text``; None takes ART_JUDGE.

        ``timeout`` is in seconds, for one attempt; ``retries`` counts further attempts, with growing pauses; ``params`` go
        to LiteLLM as they are. These and ``api_base`` and ``api_key`` are for model strings only. The mean of several
        ``votes`` is taken, each with its own labels and order. Raises ConfigError where there is no judge.
        """
        judge = judge or os.environ.get("ART_JUDGE")
        if not judge:
            raise ConfigError(
                "RULER has no judge: set ART_JUDGE to a LiteLLM model string, such as ART_JUDGE=openai/gpt-4.1-mini (with "
                "its provider's key, here OPENAI_API_KEY), or pass reward=Ruler('openai/gpt-4.1-mini')"
            )
        if votes < 1:
            raise ConfigError(f"votes={votes} is not a number of votes: give at least 1")
        if isinstance(judge, str):
            given = {name: value for name, value in (("api_base", api_base), ("api_key", api_key)) if value is not None}
            judge = LiteLLMJudge(judge, timeout=timeout, retries=retries, params=given | dict(params or {}))
        self.judge: Judge = judge
        self.rubric = rubric or RUBRIC
        self.votes = votes

    async def score(self, group: Group) -> list[float | None]:
        """Return one score in [0, 1] per trajectory, in order; all None, with the reason logged, where there is no answer
        that can be read. Raises ConfigError where the judge does not exist or refuses the key.
        """
        views = [view(trajectory) for trajectory in group.trajectories]
        distinct = list(dict.fromkeys(views))
        if not distinct:
            return []
        try:
            with exempt():
                votes = await asyncio.gather(*(self._vote(distinct) for _ in range(self.votes)))
        except (Fault, JudgeError) as error:
            log.warning("a group of %d runs stays unscored: %s (task %.200r)", len(views), error, group.task)
            return [None] * len(views)
        scores = dict(zip(distinct, map(statistics.fmean, zip(*votes, strict=True)), strict=True))
        return [scores[it] for it in views]

    async def _vote(self, views: list[Any]) -> list[float]:
        """Return one score per view, in order; Fault where the second answer cannot be read either."""
        messages, labels = question(views, self.rubric)
        text = await self._ask(messages)
        try:
            found = read_scores(text, labels)
        except Fault as fault:
            log.info("the judge is asked once more: %s", fault)
            found = read_scores(await self._ask([*messages, *repair(text, str(fault), labels)]), labels)
        for label, scored in found.items():
            log.debug("RULER: run %d gets %.3f: %s", labels.index(label), scored.score, scored.explanation)
        return [found[label].score for label in labels]

    async def _ask(self, messages: list[dict[str, Any]]) -> str:
        if isinstance(self.judge, LiteLLMJudge):
            return await self.judge(messages)
        try:
            text = await self.judge(messages)
        except Exception as error:
            raise JudgeError(f"the judge failed: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise JudgeError(f"the judge returned {type(text).__name__}; return the answer's text")
        return text
