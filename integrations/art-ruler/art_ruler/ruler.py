"""Group -> scores, by a judge that compares the runs. Knows nothing about training, or about how the judge is reached."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from art_core import exempt
from art_core.errors import ConfigError
from art_core.runtime.gathering import gather_limited
from art_core.types import Group, JsonDict, Trajectory
from art_ruler.answer import Fault, Scored, read_scores
from art_ruler.judge import Answer, Judge, JudgeError, TooLong
from art_ruler.judge_choice import judge_of
from art_ruler.meter import Meter
from art_ruler.prompt import RUBRIC, SYSTEM, Question, question, repair
from art_ruler.record import Record
from art_ruler.scale import ANCHORS, anchors, chunks, one_scale
from art_ruler.shorten import estimate_of
from art_ruler.view import View, view, view_of

log = logging.getLogger("art_ruler")

UNKNOWN_CONTEXT = 32_000
"""Tokens, for a judge of which nobody knows how much it reads."""
HALVINGS = 3
"""How often a question is halved for a judge that says that it is too long."""
LEAST = {"votes": 1, "chunk": ANCHORS + 2, "concurrency": 1, "retries": 0, "context": 1, "timeout": 0.001}
"""The smallest numbers that make sense."""


@dataclass(frozen=True)
class Verdict:
    """What the votes say of one run."""

    score: float
    """Their mean, in [0, 1]."""
    spread: float
    """Their standard deviation (of the population); 0 for a single vote."""
    explanation: str


class Ruler:
    """Scores the runs of a group relative to each other.

    ``judge`` is a LiteLLM model string, a LangChain chat model or ``async def judge(messages) -> str``; None takes
    ART_JUDGE. ``api_base``, ``api_key``, ``retries`` (further attempts, with growing pauses) and ``params`` (which go to
    LiteLLM as they are) are for model strings only; ``timeout`` is in seconds, for one attempt.

    ``votes``: so many independent answers, each with its own labels and order; their mean counts.
    ``chunk``: the most runs in one question; of a larger group the chunks share runs that put them on one scale.
    ``context``: tokens that a question may have; default: what LiteLLM knows of the judge, else 32,000.
    ``images``: whether the judge is shown pictures; default: unless LiteLLM knows that it cannot see.
    ``cache``: a file that keeps what was judged under group, rubric, judge, votes and ``seed`` (another seed: asked again);
    default: ``judge.sqlite`` in the run folder, and none outside a run.
    ``budget``: US dollars that a run's judging may cost; once they are spent no more is asked, and training ends in good
    order. Requests that would pass it, by what they have cost so far, wait or are not made: it is passed by about one request
    at most. ``price``: US dollars per million (input, output) tokens, for a judge whose price LiteLLM does not know.
    ``concurrency``: the most requests at a time.
    Raises ConfigError for what makes no sense, and where there is no judge.
    """

    def __init__(
        self,
        judge: object | None = None,
        *,
        rubric: str | None = None,
        votes: int = 1,
        seed: int = 0,
        chunk: int = 16,
        context: int | None = None,
        images: bool | None = None,
        cache: str | Path | None = None,
        budget: float | None = None,
        price: tuple[float, float] | None = None,
        concurrency: int = 16,
        timeout: float = 120.0,
        retries: int = 3,
        api_base: str | None = None,
        api_key: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        judge = judge or os.environ.get("ART_JUDGE")
        if not judge:
            raise ConfigError(
                "RULER has no judge: set ART_JUDGE to a LiteLLM model string, such as ART_JUDGE=openai/gpt-6-luna (with "
                "its provider's key, here OPENAI_API_KEY), or pass reward=Ruler('openai/gpt-6-luna'). RULER is asked where no "
                "other reward is given: a function is one too (reward=my_function, or --reward FILE.py:NAME)"
            )
        _check(votes=votes, chunk=chunk, concurrency=concurrency, retries=retries, context=context, timeout=timeout)
        _check_money(budget, price)
        if rubric is not None and not rubric.strip():
            raise ConfigError("rubric is empty: say how to grade, or leave it out for art's own")
        self.judge: Judge = judge_of(
            judge, timeout=timeout, retries=retries, api_base=api_base, api_key=api_key, params=params or {}
        )
        self.rubric = rubric or RUBRIC
        self.votes, self.seed, self.chunk = votes, seed, chunk
        self._context, self._images = context, images
        self._fits: int | None = None
        """Tokens of a shortened question that was answered after longer ones were too long."""
        self._meter = Meter(self.judge, budget=budget, price=price, concurrency=concurrency)
        self._cache = Record(Path(cache)) if cache else None
        self._own_cache = cache is None
        self._prepared = self._in_a_run = False

    @property
    def name(self) -> str:
        """Under which scores are kept: the judge, and what else was asked for."""
        rubric = "" if self.rubric == RUBRIC else f" rubric {_digest(self.rubric)[:8]}"
        votes = "" if self.votes == 1 else f" votes {self.votes}"
        return f"ruler {self.judge.name}{rubric}{votes}{f' seed {self.seed}' if self.seed else ''}"

    def begin(self, run_dir: Path) -> None:
        """Keep account, and what was judged, in ``judge.sqlite`` of this run from now on.

        Raises ConfigError where the judge cannot be used, as far as that is known before it is asked.
        """
        self._prepare()
        record = Record(run_dir / "judge.sqlite")
        # Two judges of one name, at other addresses or with other parameters, have accounts of their own.
        identity = self.judge.identity
        self._meter.keep_in(record, f"{self.name} {_digest(identity)[:8]}" if identity else self.name)
        if self._own_cache:
            self._cache = record
        self._in_a_run = True

    def account(self) -> dict[str, float]:
        """Return what judging took, over this run: ``judge/requests``, ``judge/cost`` (US dollars) and so on."""
        return {f"judge/{name}": total for name, total in self._meter.totals().items()}

    def exhausted(self) -> str | None:
        """Return why nothing more is judged; None as long as the budget lasts."""
        return self._meter.exhausted()

    def _prepare(self) -> None:
        self.judge.prepare()
        self._meter.check_price()
        self._prepared = True

    async def score(self, group: Group) -> list[float | None]:
        """Return one score in [0, 1] per trajectory, in order; all None where the judge gave no answer that can be used.

        What the judge says of a run goes to ``trajectory.notes["ruler"]``, the spread of several votes to
        ``trajectory.metrics["judge/spread"]``, and the reason why there is no score to ``trajectory.notes["unscored"]``.
        Raises ConfigError where the judge does not exist or refuses the key.
        """
        views = [view(trajectory) for trajectory in group.trajectories]
        try:
            verdicts = await self._judged(views)
        except (Fault, JudgeError) as error:
            reason = _reason(error)
            # In a run the step's line counts it, and the reason is said once.
            level = logging.INFO if self._in_a_run else logging.WARNING
            log.log(level, "a group of %d runs stays unscored: %s (task %.200r)", len(views), error, group.task)
            for trajectory in group.trajectories:
                trajectory.notes["unscored"] = reason
            return [None] * len(views)
        for trajectory, it in zip(group.trajectories, views, strict=True):
            self._tell(trajectory, verdicts[it])
        return [verdicts[it].score for it in views]

    async def compare(self, conversations: Sequence[Sequence[JsonDict]]) -> list[Verdict]:
        """Return a verdict on each conversation, in order: chat messages from anywhere, all attempts at one task.

        Raises JudgeError where the judge gave no answer that can be used, ConfigError as ``score`` does.
        """
        views = [view_of(messages) for messages in conversations]
        try:
            verdicts = await self._judged(views)
        except Fault as fault:
            raise JudgeError(_reason(fault)) from fault
        return [verdicts[it] for it in views]

    def _tell(self, trajectory: Trajectory, verdict: Verdict) -> None:
        trajectory.notes.pop("unscored", None)
        trajectory.notes["ruler"] = verdict.explanation
        if self.votes > 1:
            trajectory.metrics["judge/spread"] = verdict.spread

    async def _judged(self, given: Sequence[View]) -> dict[View, Verdict]:
        """Return the verdict of every view, from the cache where it has them. Raises Fault or JudgeError without any vote."""
        views = list(dict.fromkeys(given))
        if not views:
            return {}
        if not self._prepared:
            await asyncio.to_thread(self._prepare)
        key = self._key(views)
        kept = self._cache.verdict(key) if key and self._cache else None
        if kept is not None:
            return {it: Verdict(**kept[it.digest]) for it in views}
        with exempt():
            votes = await asyncio.gather(*(self._vote(views) for _ in range(self.votes)), return_exceptions=True)
        whole = _whole(votes)
        verdicts = dict(zip(views, map(_verdict, zip(*whole, strict=True)), strict=True))
        if key and self._cache and len(whole) == self.votes:
            self._cache.keep(key, {it.digest: vars(verdict) for it, verdict in verdicts.items()})
        return verdicts

    def _key(self, views: Sequence[View]) -> str | None:
        """Return what stands for everything that decides the scores; None where the judge is not known well enough."""
        identity = self.judge.identity
        if identity is None:
            return None
        settings = [self.votes, self.seed, self.chunk, self._question_tokens(), self._sees()]
        parts = [SYSTEM, self.rubric, identity, *settings, *sorted(it.digest for it in views)]
        return _digest(json.dumps(parts))

    async def _vote(self, views: Sequence[View]) -> list[Scored]:
        """Return one score per view, in order. Raises Fault or JudgeError where one is missing: a vote is whole or none."""
        places = random.SystemRandom().sample(range(len(views)), len(views))
        size, further = chunks(len(views), self.chunk)
        first = await self._scored(views, places[:size])
        if not further:
            return [first[place] for place in range(len(views))]
        shared = anchors({place: it.score for place, it in first.items()})
        rest = iter(places[size:])
        asked = [[*shared, *(next(rest) for _ in range(count))] for count in further]
        others = await gather_limited(functools.partial(self._scored, views, chunk) for chunk in asked)
        scores = one_scale(_numbers(first), [_numbers(chunk) for chunk in others])
        found = {place: it for chunk in (*others, first) for place, it in chunk.items()}
        return [replace(found[place], score=scores[place]) for place in range(len(views))]

    async def _scored(self, views: Sequence[View], places: Sequence[int]) -> dict[int, Scored]:
        """Return the scores of the views at ``places``, as the judge gives them."""
        context = min(self._question_tokens(), self._fits or sys.maxsize)
        for halving in range(HALVINGS + 1):
            asked = question([views[place] for place in places], self.rubric, context=context, images=self._sees())
            try:
                found = await self._answered(asked)
            except TooLong as error:
                if halving == HALVINGS:
                    raise
                context = min(context, estimate_of(asked.messages)) // 2
                log.warning("%s; the question is shortened to %d tokens", error, context)
            else:
                if halving:  # what never fits, however short, says nothing about other questions
                    self._fits = min(context, self._fits or context)
                return {place: found[label] for place, label in zip(places, asked.labels, strict=True)}
        raise AssertionError

    async def _answered(self, asked: Question) -> dict[str, Scored]:
        """Return the scores by label. Raises Fault where the second answer cannot be read either."""

        def read(answer: Answer) -> dict[str, Scored]:
            return _read(answer, asked.labels)

        answer, found = await self._meter.ask(asked.messages, read)
        if isinstance(found, Fault):
            log.info("the judge is asked once more: %s", found)
            again = [*asked.messages, *repair(answer.text, str(found), asked.labels)]
            answer, found = await self._meter.ask(again, read)
        if isinstance(found, Fault):
            raise found
        return found

    def _question_tokens(self) -> int:
        """Return how long a question may be at first; a quarter of the context is left for the answer and our estimate."""
        return self._context or (self.judge.context or UNKNOWN_CONTEXT) * 3 // 4

    def _sees(self) -> bool:
        return self.judge.images if self._images is None else self._images


def _whole(votes: Sequence[list[Scored] | BaseException]) -> list[list[Scored]]:
    """Return the votes that are whole. Raises what another one failed with where there is none, and what is no vote's failure."""
    whole = [vote for vote in votes if not isinstance(vote, BaseException)]
    for failure in votes:
        if isinstance(failure, BaseException):
            if not whole or not isinstance(failure, Fault | JudgeError):
                raise failure
            log.warning("%d of %d votes count, because %s", len(whole), len(votes), failure)
    return whole


def _verdict(of_run: Sequence[Scored]) -> Verdict:
    """Return what the votes on one run come to."""
    scores = [it.score for it in of_run]
    said = [it.explanation if len(of_run) == 1 else f"{it.score:.2f}: {it.explanation}" for it in of_run]
    spread = statistics.pstdev(scores) if len(scores) > 1 else 0.0
    return Verdict(statistics.fmean(scores), spread, "\n".join(said))


def _read(answer: Answer, labels: Sequence[str]) -> dict[str, Scored]:
    """Return the scores by label; Fault where they cannot be read, with why the judge stopped."""
    try:
        return read_scores(answer.text, labels)
    except Fault as fault:
        if not answer.stopped:
            raise
        ended = f" (it was ended by: {answer.stopped})"
        raise Fault(f"{fault}{ended}", f"{fault.kind}{ended}") from fault


def _reason(error: Exception) -> str:
    """Return why a group is unscored, in the same words for every group of which it is true."""
    return f"the judge's answer cannot be used: {error.kind}" if isinstance(error, Fault) else str(error)


def _check(**given: float | None) -> None:
    """Raise ConfigError for a number that is too small."""
    for name, value in given.items():
        if value is not None and not value >= LEAST[name]:
            raise ConfigError(f"{name}={value} is too small: give at least {LEAST[name]}")


def _check_money(budget: float | None, price: tuple[float, float] | None) -> None:
    if budget is not None and not budget > 0:
        raise ConfigError(f"budget={budget} is not a number of US dollars: give one above 0, or leave it out")
    is_pair = isinstance(price, tuple | list) and len(price) == 2 and all(isinstance(it, int | float) for it in price)
    if price is not None and not (is_pair and min(price) >= 0):
        raise ConfigError(f"price={price!r} is not two numbers: give US dollars per million (input, output) tokens")


def _numbers(scored: Mapping[int, Scored]) -> dict[int, float]:
    return {place: it.score for place, it in scored.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
