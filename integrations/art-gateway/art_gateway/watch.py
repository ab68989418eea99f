"""``art watch``: a process beside a gateway that scores the conversations recorded there, by a function or a judge.

It reads the run folder and sends each score to ``POST /feedback``, so nothing that a reward does can disturb the gateway.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from art_gateway.asking import NoAnswer, ask
from art_gateway.command import read_share

EXAMPLE = (
    "Examples: `art watch runs/production --reward judge.py:judge --share 20%`; once, from a timer: "
    "`art watch runs/production --reward judge.py:judge --once`"
)
AT_ONCE = 8
"""Conversations that are scored at the same time."""
LOOK_SECONDS = 5.0
SAY_SECONDS = 60.0
QUIET = """
SELECT rollout_id, split FROM rollouts
WHERE finished BETWEEN ? AND ? AND NOT EXISTS (SELECT 1 FROM scores WHERE scores.rollout_id = rollouts.rollout_id)
ORDER BY rollouts.seq
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
    hours: Annotated[float, typer.Option(min=0, help="Conversations that ended earlier are left alone.")] = 24.0,
    once: Annotated[bool, typer.Option("--once", help="Score what is there, then end.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="ART_GATEWAY_API_KEY", help="The gateway's key.")] = None,
) -> None:
    """Score the conversations that a gateway records, while it runs.

    The reward is called with a trajectory: task is {"input": what the user said first}, output the last answer's text, and
    calls all that was said. It isn't told whose answers they are. A conversation that has a score, such as a user's, is left
    alone. The scores are those that `art route` compares and --ramp decides by.
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
        """Whether a conversation is in the sample: the same ones after a restart."""
        digest = hashlib.blake2b(f"watch {conversation}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64


class Watch:
    """Looks for conversations that have ended, and scores each once."""

    def __init__(
        self, run_dir: Path, reward: Any, wanted: Wanted, gateway: str, api_key: str | None, say: Callable[[str], None]
    ) -> None:
        self._file, self._reward, self._wanted = run_dir / "run.sqlite", reward, wanted
        self._url, self._key, self._say = gateway.rstrip("/") + "/feedback", api_key, say
        self._there = True
        self._tried: set[str] = set()
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._reasons: Counter[str] = Counter()

    async def run(self, *, once: bool) -> None:
        """Score until cancelled, or until everything that is there has been looked at."""
        from art_core.store import Store

        said, at = self.summary(), time.monotonic()
        with Store(self._file) as store:
            try:
                while True:
                    await self._look(store)
                    if once:
                        return
                    if self.summary() != said and time.monotonic() > at + SAY_SECONDS:
                        said, at = self.summary(), time.monotonic()
                        self._say(said)
                    await asyncio.sleep(LOOK_SECONDS)
            finally:
                self._say(self.summary())

    def summary(self) -> str:
        """Return one line with what was scored so far."""
        parts = [f"{name} {fmean(scores):.3f} in {len(scores):,}" for name, scores in sorted(self._scores.items())]
        text = f"mean scores: {', '.join(parts)}" if parts else "no conversation has been scored"
        if cost := getattr(self._reward, "cost", 0.0):
            text += f"; ${cost:.2f} so far"
        if self._reasons:
            reason, times = self._reasons.most_common(1)[0]
            text += f"; {self._reasons.total():,} could not be scored, {times:,} of them because {reason}"
        return text

    async def _look(self, store: Any) -> None:
        from art_core.plugin_api import gather_limited

        now = time.time()
        found = await asyncio.to_thread(store.rows, QUIET, (now - self._wanted.oldest, now - self._wanted.quiet))
        fresh = [(id, side) for id, side in found if id not in self._tried and self._wanted.drawn(id)]
        self._tried.update(id for id, _ in fresh)
        await gather_limited(
            [functools.partial(self._score, store, id, side) for id, side in fresh], asyncio.Semaphore(AT_ONCE)
        )

    async def _score(self, store: Any, conversation: str, side: str) -> None:
        from art_core import scoring
        from art_core.types import Group

        trajectory = asked(await asyncio.to_thread(store.trajectory, conversation))
        try:
            [value] = await scoring.values(Group(trajectory.task, (trajectory,)), self._reward)
        except scoring.Unscorable as error:
            value, trajectory.notes["unscored"] = None, error.reason
        if value is None:
            self._reasons[trajectory.notes.get("unscored", scoring.NO_REASON)] += 1
            return
        body = {"conversation": conversation, "score": value, "metrics": trajectory.metrics, "by": self._name}
        while not await self._sent(body):
            await asyncio.sleep(LOOK_SECONDS)
        self._scores[side].append(value)

    async def _sent(self, body: dict[str, Any]) -> bool:
        """Send a score; return whether the gateway was there. Scores wait for a gateway that restarts."""
        try:
            await asyncio.to_thread(ask, self._url, body, self._key)
        except NoAnswer as error:
            if self._there:
                self._say(f"{error.message}; scores wait for it")
            self._there = False
            return False
        self._there = True
        return True

    @functools.cached_property
    def _name(self) -> str:
        from art_core.plugin_api import reward_name

        return reward_name(self._reward)


def asked(trajectory: Any) -> Any:
    """Return a recorded conversation with what its user said first as the task, and the last answer's text as the output."""
    messages = trajectory.calls[-1].messages() if trajectory.calls else []
    first = next((message for message in messages if message.get("role") == "user"), {})
    output = trajectory.output
    if output is None and messages:
        output = _text(messages[-1])
    return replace(trajectory, task={"input": _text(first)}, output=output, metrics={}, notes={})


def _text(message: Mapping[str, Any]) -> str:
    content: str | Sequence[Mapping[str, Any]] = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
