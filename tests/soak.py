"""Rollouts without end on an engine without a model: what grows with time, and what slows down.

    python -m tests.soak --minutes 30

A machine that others share slows down and speeds up by a fifth within minutes. So now and then the rollouts stand still while
a new process makes the same ones in a new folder, and what counts is the speed in relation to that one's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

import art_core as art
from art_core.testing import FakeEngine

TURNS = 4
ANSWER = "I looked for it in the mailbox and found this: " * 4


@dataclass(frozen=True)
class Moment:
    """What the process is like at one time."""

    seconds: float
    """Of rollouts; the time in which they stood still is not counted."""
    memory: int
    """Bytes that no other process shares."""
    files: int
    """Open file descriptors."""
    tokens: int
    """Shown and sampled so far."""
    fresh: float
    """Tokens per second of a new process with a new folder, measured last."""


@dataclass(frozen=True)
class Soak:
    """How the end compares with the beginning, each a window of ``share`` of the moments after the warm-up."""

    moments: Sequence[Moment]
    warm_up: float
    """Seconds."""

    @property
    def _windows(self) -> tuple[Sequence[Moment], Sequence[Moment]]:
        measured = [it for it in self.moments if it.seconds >= self.warm_up]
        size = max(2, len(measured) // 5)
        return measured[:size], measured[-size:]

    def ratio(self, of: Callable[[Sequence[Moment]], float]) -> float:
        """Return the last window's figure over the first one's."""
        first, last = self._windows
        return of(last) / of(first)

    @property
    def memory(self) -> float:
        return self.ratio(lambda window: statistics.median(it.memory for it in window))

    @property
    def throughput(self) -> float:
        """In relation to a new process's, so that the machine's own ups and downs cancel out."""
        return self.ratio(speed) / self.ratio(mean_fresh)

    @property
    def files(self) -> int:
        """How many more files are open at the end; the least of each window, so that what is open for a moment does not count."""
        first, last = self._windows
        return min(it.files for it in last) - min(it.files for it in first)

    def __str__(self) -> str:
        last = self.moments[-1]
        return (
            f"{last.seconds / 60:.1f} min, {last.tokens:,} tokens; after {self.warm_up / 60:.1f} min: memory x {self.memory:.3f} "
            f"({last.memory / 2**20:.0f} MiB), open files {self.files:+d}, tokens per second x {self.ratio(speed):.3f}, "
            f"of a new process in a new folder x {self.ratio(mean_fresh):.3f}, "
            f"in relation to it x {self.throughput:.3f}"
        )


def speed(window: Sequence[Moment]) -> float:
    """Return the tokens per second from a window's first moment to its last."""
    return (window[-1].tokens - window[0].tokens) / (window[-1].seconds - window[0].seconds)


def mean_fresh(window: Sequence[Moment]) -> float:
    """Return the tokens per second that new processes had meanwhile."""
    return statistics.mean(it.fresh for it in window)


async def agent(task: str, address: art.types.RolloutAddress) -> str:
    """Talk with the policy, every other turn as a stream."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "You answer questions about a mailbox. " * 8}]
    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{task}, turn {turn}"})
            if turn % 2:
                stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            else:
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
    return said


class Engine(FakeEngine):
    """Counts tokens, and does not keep its requests."""

    def __init__(self) -> None:
        said = itertools.count()
        super().__init__(lambda request: f"{ANSWER} {next(said) % 97}")
        self.requests = deque(maxlen=1)
        self.tokens = 0

    async def chat(self, request):
        answer = await super().chat(request)
        self.tokens += answer["usage"]["total_tokens"]
        return answer


async def fresh_speed(seconds: float) -> float:
    """Return the tokens per second of a new process that makes the same rollouts in a new folder."""
    command = (sys.executable, __file__, "--minutes", str((seconds + 2) / 60), "--warm-up", str(2 / 60), "--speed")
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
    return float(said)


async def soak(
    run_dir: Path,
    seconds: float,
    *,
    warm_up: float = 0.0,
    every: float = 5.0,
    fresh_every: float | None = 60.0,
    fresh_seconds: float = 8.0,
    say: Callable[[str], None] = print,
) -> list[Moment]:
    """Collect and score, and learn nothing, for so long; return a moment for ``every`` so many seconds.

    It goes on until two of them are after ``warm_up``, however long the machine stands still. Each ``fresh_every`` seconds a
    new process does the same for ``fresh_seconds``; None: never.
    """
    engine, process, moments = Engine(), psutil.Process(), []
    numbers, begun, compared, fresh = itertools.count(), time.monotonic(), -math.inf, math.nan
    async with art.open_run(run_dir, engine=engine, learner="torch", max_concurrent=16) as run:
        while sum(it.seconds >= warm_up for it in moments) < 2 or moments[-1].seconds < seconds:
            if fresh_every and time.monotonic() - begun - compared >= fresh_every:
                paused = time.monotonic()
                fresh, compared = await fresh_speed(fresh_seconds), paused - begun
                begun += time.monotonic() - paused
            groups = await run.collect(agent, [f"task {next(numbers)}" for _ in range(4)], group_size=4)
            await run.score(groups, lambda trajectory: 1.0)
            await run.learn(groups)
            now = time.monotonic() - begun
            if not moments or now - moments[-1].seconds >= every:
                it = Moment(now, process.memory_full_info().uss, process.num_fds(), engine.tokens, fresh)
                moments.append(it)
                if len(moments) % 12 == 0:
                    say(
                        f"{it.seconds / 60:.1f} min: {it.tokens:,} tokens, {speed(moments[-12:]):,.0f} a second, "
                        f"{it.fresh:,.0f} in a new process, {it.memory / 2**20:.0f} MiB, {it.files} files"
                    )
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=5, help="minutes that do not count")
    parser.add_argument("--speed", action="store_true", help="print only the tokens per second after the warm-up")
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    how = {"every": 0.5, "fresh_every": None, "say": lambda _: None} if options.speed else {}
    with tempfile.TemporaryDirectory() as folder:
        moments = asyncio.run(soak(Path(folder), options.minutes * 60, warm_up=options.warm_up * 60, **how))
    if options.speed:
        print(speed([it for it in moments if it.seconds >= options.warm_up * 60]))
    else:
        print(Soak(moments, options.warm_up * 60))


if __name__ == "__main__":
    main()
