"""Group -> scores, by a judge that compares the group's rollouts."""

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
from art_core.plugin_api import gather_limited
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
"""Context in tokens, for a judge whose context is unknown."""
HALVINGS = 3
"""How often a question is halved for a judge that rejects it as too long."""
LEAST = {"votes": 1, "chunk": ANCHORS + 2, "concurrency": 1, "retries": 0, "context": 1, "timeout": 0.001}
"""Smallest valid values."""


@dataclass(frozen=True)
class Verdict:
    """The votes on one rollout, combined."""

    score: float
    """Mean of the votes, in [0, 1]."""
    spread: float
    """Population standard deviation of the votes; 0 for a single vote."""
    explanation: str


class Ruler:
    """Scores the rollouts of a group relative to each other.

    ``judge`` is a LiteLLM model string, a LangChain chat model or ``async def judge(messages) -> str``; None: ART_JUDGE.
    ``api_base``, ``api_key``, ``retries`` (further attempts, with growing pauses) and ``params`` (passed to LiteLLM unchanged)
    apply to model strings only; ``timeout`` is in seconds per attempt.

    ``votes``: number of independent answers, each with its own labels and order; scores are their mean.
    ``chunk``: most rollouts in one question; the chunks of a larger group share rollouts, which put them on one scale.
    ``context``: most tokens in a question; default: what LiteLLM knows about the judge, else 32,000.
    ``images``: whether the judge is shown images; default: yes, unless LiteLLM knows that it has no vision.
    ``cache``: a file that stores verdicts by group, rubric, judge, votes and ``seed`` (change it to ask again);
    default: ``judge.sqlite`` in the run folder; no cache outside a run.
    ``budget``: US dollars that judging may cost in a run; when they are spent, judging stops and training ends cleanly.
    Requests that would exceed it, by their mean cost so far, wait or are not sent, so it is exceeded by at most about one
    request. ``price``: US dollars per million (input, output) tokens, for a judge whose price LiteLLM does not know.
    ``concurrency``: maximum number of concurrent requests.
    Raises ConfigError for invalid arguments, and if there is no judge.
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
                "its provider's key, here OPENAI_API_KEY), or pass reward=Ruler('openai/gpt-6-luna'). RULER is the default "
                "reward; to use a function instead, pass reward=my_function or --reward FILE.py:NAME"
            )
        _check(votes=votes, chunk=chunk, concurrency=concurrency, retries=retries, context=context, timeout=timeout)
        _check_money(budget, price)
        if rubric is not None and not rubric.strip():
            raise ConfigError("rubric is empty; write how to grade, or omit it to use the built-in one")
        self.judge: Judge = judge_of(
            judge, timeout=timeout, retries=retries, api_base=api_base, api_key=api_key, params=params or {}
        )
        self.rubric = rubric or RUBRIC
        self.votes, self.seed, self.chunk = votes, seed, chunk
        self._context, self._images = context, images
        self._accepted_tokens: int | None = None
        """Length of a shortened question that the judge accepted after it had rejected longer ones."""
        self._meter = Meter(self.judge, budget=budget, price=price, concurrency=concurrency)
        self._cache = Record(Path(cache)) if cache else None
        self._default_cache = cache is None
        self._prepared = self._in_a_run = False

    @property
    def name(self) -> str:
        """Name for people, and of a run's rewards: the judge and any non-default settings."""
        rubric = "" if self.rubric == RUBRIC else f" rubric {_digest(self.rubric)[:8]}"
        votes = "" if self.votes == 1 else f" votes {self.votes}"
        return f"ruler {self.judge.name}{rubric}{votes}{f' seed {self.seed}' if self.seed else ''}"

    @property
    def signature(self) -> str:
        """``name``, and what tells judges of one name apart: a digest of everything that decides its answers, if it is known.

        It is known once the judge is prepared.
        """
        identity = self.judge.identity
        return f"{self.name} {_digest(identity)[:8]}" if identity else self.name

    def begin(self, run_dir: Path) -> None:
        """Record costs and verdicts in this run's ``judge.sqlite`` from now on.

        Raises ConfigError if the judge cannot be used, as far as that can be known without sending a request.
        """
        self.prepare()
        record = Record(run_dir / "judge.sqlite")
        self._meter.keep_in(record, self.signature)
        if self._default_cache:
            self._cache = record
        self._in_a_run = True

    def account(self) -> dict[str, float]:
        """Return the run's judging totals: ``judge/requests``, ``judge/cost`` (US dollars) and so on."""
        return {f"judge/{name}": total for name, total in self._meter.totals().items()}

    def exhausted(self) -> str | None:
        """Return why judging has stopped; None as long as the budget lasts."""
        return self._meter.exhausted()

    def prepare(self) -> None:
        """Get ready for the first question, which may take seconds.

        Raises ConfigError if the judge cannot be used, as far as that can be known without sending a request.
        """
        self.judge.prepare()
        self._meter.check_price()
        self._prepared = True

    async def score(self, group: Group, *, again: bool = False) -> list[float | None]:
        """Return one score in [0, 1] per trajectory, in order; all None if the judge gave no usable answer.

        ``again``: ask even if the cache has the verdict; the new one replaces it.
        Stores the judge's explanation in ``trajectory.notes["ruler"]``, the spread of several votes in
        ``trajectory.metrics["judge/spread"]``, and the reason for a missing score in ``trajectory.notes["unscored"]``.
        Raises ConfigError if the judge does not exist or rejects the key.
        """
        views = [view(trajectory) for trajectory in group.trajectories]
        try:
            verdicts = await self._judged(views, again=again)
        except (Fault, JudgeError) as error:
            reason = _reason(error)
            # In a run, the step's log line counts unscored rollouts, and the reason is logged once.
            level = logging.INFO if self._in_a_run else logging.WARNING
            log.log(level, "a group of %d rollouts stays unscored: %s (task %.200r)", len(views), error, group.task)
            for trajectory in group.trajectories:
                trajectory.notes["unscored"] = reason
            return [None] * len(views)
        for trajectory, its_view in zip(group.trajectories, views, strict=True):
            self._annotate(trajectory, verdicts[its_view])
        return [verdicts[its_view].score for its_view in views]

    async def compare(self, conversations: Sequence[Sequence[JsonDict]]) -> list[Verdict]:
        """Return a verdict on each conversation, in order. Each is a list of chat messages; all are attempts at one task.

        Raises JudgeError if the judge gave no usable answer, and ConfigError as ``score`` does.
        """
        views = [view_of(messages) for messages in conversations]
        try:
            verdicts = await self._judged(views)
        except Fault as fault:
            raise JudgeError(_reason(fault)) from fault
        return [verdicts[conversation] for conversation in views]

    def _annotate(self, trajectory: Trajectory, verdict: Verdict) -> None:
        trajectory.notes.pop("unscored", None)
        trajectory.notes["ruler"] = verdict.explanation
        if self.votes > 1:
            trajectory.metrics["judge/spread"] = verdict.spread

    async def _judged(self, all_views: Sequence[View], *, again: bool = False) -> dict[View, Verdict]:
        """Return the verdict on every view, cached unless ``again``, or new. Raises Fault or JudgeError if every vote fails."""
        views = list(dict.fromkeys(all_views))
        if not views:
            return {}
        if not self._prepared:
            await asyncio.to_thread(self.prepare)
        key = self._key(views)
        cached = self._cache.verdict(key) if key and self._cache and not again else None
        if cached is not None:
            return {each: Verdict(**cached[each.digest]) for each in views}
        with exempt():
            votes = await asyncio.gather(*(self._vote(views) for _ in range(self.votes)), return_exceptions=True)
        complete = _complete(votes)
        verdicts = dict(zip(views, map(_verdict, zip(*complete, strict=True)), strict=True))
        if key and self._cache and len(complete) == self.votes:
            self._cache.keep(key, {each.digest: vars(verdict) for each, verdict in verdicts.items()})
        return verdicts

    def _key(self, views: Sequence[View]) -> str | None:
        """Return the cache key, a digest of everything that decides the scores; None if the judge has no identity."""
        identity = self.judge.identity
        if identity is None:
            return None
        settings = [self.votes, self.seed, self.chunk, self._question_tokens(), self._sees()]
        parts = [SYSTEM, self.rubric, identity, *settings, *sorted(each.digest for each in views)]
        return _digest(json.dumps(parts))

    async def _vote(self, views: Sequence[View]) -> list[Scored]:
        """Return one score per view, in order. Raises Fault or JudgeError if any is missing."""
        order = random.SystemRandom().sample(range(len(views)), len(views))
        size, further = chunks(len(views), self.chunk)
        first = await self._scored(views, order[:size])
        if not further:
            return [first[index] for index in range(len(views))]
        shared = anchors({index: scored.score for index, scored in first.items()})
        rest = iter(order[size:])
        chunk_indices = [[*shared, *(next(rest) for _ in range(count))] for count in further]
        others = await gather_limited(functools.partial(self._scored, views, indices) for indices in chunk_indices)
        scores = one_scale(_numbers(first), [_numbers(chunk) for chunk in others])
        merged = {index: scored for chunk in (*others, first) for index, scored in chunk.items()}
        return [replace(merged[index], score=scores[index]) for index in range(len(views))]

    async def _scored(self, views: Sequence[View], indices: Sequence[int]) -> dict[int, Scored]:
        """Ask about the views at ``indices``; return their scores by index."""
        context = min(self._question_tokens(), self._accepted_tokens or sys.maxsize)
        for halving in range(HALVINGS + 1):
            asked = question([views[index] for index in indices], self.rubric, context=context, images=self._sees())
            try:
                scores = await self._answered(asked)
            except TooLong as error:
                if halving == HALVINGS:
                    raise
                context = min(context, estimate_of(asked.messages)) // 2
                log.warning("%s; shortening the question to %d tokens", error, context)
            else:
                if halving:
                    self._accepted_tokens = min(context, self._accepted_tokens or context)
                return {index: scores[label] for index, label in zip(indices, asked.labels, strict=True)}
        raise AssertionError

    async def _answered(self, asked: Question) -> dict[str, Scored]:
        """Return the scores by label. Raises Fault if the second answer can't be read either."""

        def read(answer: Answer) -> dict[str, Scored]:
            return _read(answer, asked.labels)

        answer, scores = await self._meter.ask(asked.messages, read)
        if isinstance(scores, Fault):
            log.info("asking the judge once more: %s", scores)
            again = [*asked.messages, *repair(answer.text, str(scores), asked.labels)]
            answer, scores = await self._meter.ask(again, read)
        if isinstance(scores, Fault):
            raise scores
        return scores

    def _question_tokens(self) -> int:
        """Return the longest question to try first; a quarter of the context is for the answer and the estimate's error."""
        return self._context or (self.judge.context or UNKNOWN_CONTEXT) * 3 // 4

    def _sees(self) -> bool:
        return self.judge.images if self._images is None else self._images


def _complete(votes: Sequence[list[Scored] | BaseException]) -> list[list[Scored]]:
    """Return the votes that succeeded. Raises a vote's failure if none did, and any error other than Fault and JudgeError."""
    complete = [vote for vote in votes if not isinstance(vote, BaseException)]
    for failure in votes:
        if isinstance(failure, BaseException):
            if not complete or not isinstance(failure, Fault | JudgeError):
                raise failure
            log.warning("%d of %d votes count, because %s", len(complete), len(votes), failure)
    return complete


def _verdict(votes: Sequence[Scored]) -> Verdict:
    """Combine the votes on one rollout."""
    scores = [vote.score for vote in votes]
    texts = [vote.explanation if len(votes) == 1 else f"{vote.score:.2f}: {vote.explanation}" for vote in votes]
    spread = statistics.pstdev(scores) if len(scores) > 1 else 0.0
    return Verdict(statistics.fmean(scores), spread, "\n".join(texts))


def _read(answer: Answer, labels: Sequence[str]) -> dict[str, Scored]:
    """Return the scores by label. Raises Fault, with the reason why the judge stopped, if they can't be read."""
    try:
        return read_scores(answer.text, labels)
    except Fault as fault:
        if not answer.stopped:
            raise
        ended = f" (the judge stopped because of: {answer.stopped})"
        raise Fault(f"{fault}{ended}", f"{fault.kind}{ended}") from fault


def _reason(error: Exception) -> str:
    """Return why a group is unscored, in words that are the same for every group with the same fault, so they can be counted."""
    return f"the judge's answer cannot be used: {error.kind}" if isinstance(error, Fault) else str(error)


def _check(**settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not value >= LEAST[name]:
            raise ConfigError(f"{name} must be at least {LEAST[name]}, got {value}")


def _check_money(budget: float | None, price: tuple[float, float] | None) -> None:
    if budget is not None and not budget > 0:
        raise ConfigError(f"budget must be a number of US dollars above 0, got {budget}; omit it for no limit")
    is_pair = isinstance(price, tuple | list) and len(price) == 2 and all(isinstance(it, int | float) for it in price)
    if price is not None and not (is_pair and min(price) >= 0):
        raise ConfigError(f"price must be two numbers, US dollars per million (input, output) tokens, got {price!r}")


def _numbers(scored: Mapping[int, Scored]) -> dict[int, float]:
    return {index: each.score for index, each in scored.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
