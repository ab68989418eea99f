"""``art watch``: a process beside a gateway that scores the conversations recorded there, by a function or a judge.

It reads the run folder and sends each score to ``POST /feedback``, so nothing that a reward does can disturb the gateway.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_gateway.asking import NoAnswer, NotAccepted, ask
from art_gateway.command import read_share

if TYPE_CHECKING:
    from art_core.store import Store
    from art_core.types import Trajectory

EXAMPLE = (
    "Examples: `art watch runs/production --reward judge.py:judge --share 20%`; once, from a timer: "
    "`art watch runs/production --reward judge.py:judge --once`"
)
AT_ONCE = 8
"""Conversations that are scored at the same time."""
BATCH = 64
"""Conversations after which new ones are looked for."""
LOOK_SECONDS = 5.0
SAY_SECONDS = 60.0
SCORE_SECONDS = 600.0
"""Time limit of a reward for one conversation."""
TRIES, RETRY_SECONDS = 3, 600.0
"""How often a conversation is tried that could not be scored, and how long after the last time."""
UNSCORED = """
SELECT rollout_id, split FROM rollouts WHERE finished BETWEEN ? AND ? AND NOT EXISTS (
    SELECT 1 FROM scores s WHERE s.rollout_id = rollouts.rollout_id AND NOT s.aside AND s.reward IS NOT NULL
) ORDER BY rollouts.seq
"""
"""Conversations without a score whose last call is neither too new nor too old."""


def watch(
    run_dir: Annotated[Path, typer.Argument(help="The gateway's run folder.")],
    reward: Annotated[
        str, typer.Option(help="FILE:NAME of a function of one conversation, or of a judge: from 0 to 1.")
    ],
    gateway: Annotated[str, typer.Option(help="The gateway's address.")] = "http://127.0.0.1:8400",
    share: Annotated[str, typer.Option(help="How many of the conversations are scored; a judge costs money.")] = "100%",
    quiet: Annotated[
        float, typer.Option(min=0, help="Seconds without a call after which a conversation has ended.")
    ] = 300.0,
    hours: Annotated[float, typer.Option(min=0, help="Conversations that ended earlier are skipped.")] = 24.0,
    once: Annotated[bool, typer.Option("--once", help="Score what has been recorded, then exit.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="ART_GATEWAY_API_KEY", help="The gateway's key.")] = None,
) -> None:
    """Score the conversations that a gateway records, while it runs.

    The reward is called with a trajectory: task is {"input": what the user said first}, output is the text of the last answer,
    and calls is everything that was said. The reward isn't told which side answered. Conversations that have a score, such as
    a user's, are skipped. `art route` compares the scores, and --ramp decides by them.
    """
    from art_cli.arguments import load_object
    from art_core.plugin_api import Output
    from art_core.scoring import check_reward

    if not (run_dir / "run.sqlite").is_file():
        raise typer.BadParameter(f"{run_dir} has no run.sqlite: pass the gateway's --run-dir", param_hint="RUN_DIR")
    judge = load_object(reward)
    check_reward(judge)
    console = Output(stderr=True)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    wanted = Wanted(read_share(share, "--share"), quiet, 3600 * hours)
    asyncio.run(Watch(run_dir, judge, wanted, gateway, api_key, say).run(once=once))


@dataclass(frozen=True)
class Wanted:
    """Which conversations are scored."""

    share: float
    quiet: float
    """Seconds."""
    oldest: float
    """Seconds."""

    def drawn(self, conversation: str) -> bool:
        """Whether a conversation is in the sample, which doesn't depend on the side that answers."""
        from art_gateway.canary.routes import in_share

        return in_share(f"art watch\0{conversation}", self.share)


class Watch:
    """Looks for conversations that have ended, and scores each once."""

    def __init__(
        self, run_dir: Path, reward: Any, wanted: Wanted, gateway: str, api_key: str | None, say: Callable[[str], None]
    ) -> None:
        self._file, self._reward, self._wanted = run_dir / "run.sqlite", reward, wanted
        self._url, self._key, self._say = gateway.rstrip("/"), api_key, say
        self._reachable = True
        self._tries: dict[str, tuple[int, float]] = {}
        """Conversation -> how often it was tried, and when it may be tried again."""
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._unscored: Counter[str] = Counter()
        """By side, because a reward that fails on one side's answers leaves out the worst of them."""
        self._reasons: Counter[str] = Counter()

    async def run(self, *, once: bool) -> None:
        """Score until cancelled, or until everything that is there has been tried.

        Raises NotAccepted for a wrong key, and NoAnswer if no gateway answers when it starts. With ``once`` a gateway that stops
        answering later raises NoAnswer too.
        """
        from art_core.store import Store

        await asyncio.to_thread(ask, f"{self._url}/status", None, self._key)
        summary, at = self.summary(), time.monotonic()
        with Store(self._file) as store:
            try:
                while True:
                    batch = await self._batch(store)
                    await self._score_all(store, batch, once)
                    if self.summary() != summary and time.monotonic() > at + SAY_SECONDS:
                        summary, at = self.summary(), time.monotonic()
                        self._say(summary)
                    if not batch:
                        if once:
                            return
                        await asyncio.sleep(LOOK_SECONDS)
            finally:
                self._say(self.summary())

    def summary(self) -> str:
        """Return one line with what was scored so far."""
        parts = [
            f"{side} {fmean(scores):.3f} ({len(scores):,} scored)" for side, scores in sorted(self._scores.items())
        ]
        text = f"mean scores: {', '.join(parts)}" if parts else "no conversation has been scored"
        if cost := getattr(self._reward, "cost", 0.0):
            text += f"; ${cost:.2f} so far"
        if self._unscored:
            sides = ", ".join(f"{times:,} of {side}" for side, times in sorted(self._unscored.items()))
            text += f"; could not be scored: {sides}, most often because {self._reasons.most_common(1)[0][0]}"
        return text

    async def _batch(self, store: Store) -> list[tuple[str, str]]:
        now = time.time()
        found = await asyncio.to_thread(store.rows, UNSCORED, (now - self._wanted.oldest, now - self._wanted.quiet))
        due = ((id, side or "?") for id, side in found if self._wanted.drawn(id) and self._is_due(id))
        return list(islice(due, BATCH))

    def _is_due(self, conversation: str) -> bool:
        tries, next_at = self._tries.get(conversation, (0, 0.0))
        return tries < TRIES and time.monotonic() >= next_at

    async def _score_all(self, store: Store, batch: Sequence[tuple[str, str]], once: bool) -> None:
        from art_core.plugin_api import gather_limited

        works = [functools.partial(self._score, store, id, side, once) for id, side in batch]
        await gather_limited(works, asyncio.Semaphore(AT_ONCE))

    async def _score(self, store: Store, conversation: str, side: str, once: bool) -> None:
        tries, _ = self._tries.get(conversation, (0, 0.0))
        self._tries[conversation] = tries + 1, time.monotonic() + RETRY_SECONDS
        trajectory = question_of(await asyncio.to_thread(store.trajectory, conversation))
        value = await self._value(trajectory)
        if value is not None:
            if await asyncio.to_thread(is_scored, store, conversation):  # a user was faster
                return
            metrics = {name: float(it) for name, it in trajectory.metrics.items() if math.isfinite(it)}
            body = {"conversation": conversation, "score": float(value), "metrics": metrics, "by": self._name}
            while not await self._sent(body, trajectory, once):
                await asyncio.sleep(LOOK_SECONDS)
        if reason := trajectory.notes.get("unscored"):
            self._unscored[side] += 1
            self._reasons[reason] += 1
        else:
            self._scores[side].append(value)

    async def _value(self, trajectory: Trajectory) -> float | None:
        """Return the reward; None, with the reason in the notes, if there is none."""
        from art_core import scoring
        from art_core.errors import RewardError
        from art_core.types import Group

        group = Group(trajectory.task, (trajectory,))
        try:
            [scored] = (await scoring.score(group, self._reward, SCORE_SECONDS)).trajectories
            value = scored.reward
        except RewardError as error:
            value, trajectory.notes["unscored"] = None, getattr(error, "reason", str(error))
        if value is None:
            trajectory.notes.setdefault("unscored", scoring.NO_REASON)
        return value

    async def _sent(self, body: dict[str, Any], trajectory: Trajectory, once: bool) -> bool:
        """Send a score; return whether the gateway was there. Scores wait for a gateway that restarts."""
        try:
            await asyncio.to_thread(ask, f"{self._url}/feedback", body, self._key)
        except NotAccepted as error:
            if error.status in (401, 403):
                raise
            trajectory.notes["unscored"] = error.message
        except NoAnswer as error:
            if once:
                raise
            if self._reachable:
                self._say(f"{error.message}; scores wait for it")
            self._reachable = False
            return False
        self._reachable = True
        return True

    @functools.cached_property
    def _name(self) -> str:
        from art_core.plugin_api import reward_name

        return reward_name(self._reward)


def is_scored(store: Store, conversation: str) -> bool:
    """Whether a conversation has a score by now."""
    return any(score.reward is not None and not score.aside for score in store.scores(conversation))


def question_of(trajectory: Trajectory) -> Trajectory:
    """Return a recorded conversation with what its user said first as the task, and the last answer's text as the output."""
    first, last = (trajectory.calls[0].messages(), trajectory.calls[-1].messages()) if trajectory.calls else ([], [])
    asked = next((message for message in first if message.get("role") == "user"), {})
    output = trajectory.output
    if output is None and last:
        output = _text(last[-1])
    return replace(trajectory, task={"input": _text(asked)}, output=output, reward=None, metrics={}, notes={})


def _text(message: Mapping[str, Any]) -> str:
    content: str | Sequence[Mapping[str, Any]] = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
