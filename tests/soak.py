"""Rollouts without end on an engine without a model: what grows with time, and what slows down.

python -m tests.soak --minutes 30
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
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
    memory: int
    """Bytes that no other process shares."""
    files: int
    """Open file descriptors."""
    tokens: int
    """Shown and sampled so far."""


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
        return self.ratio(lambda w: (w[-1].tokens - w[0].tokens) / (w[-1].seconds - w[0].seconds))

    @property
    def files(self) -> int:
        """How many more files are open at the end; the least of each window, so that what is open for a moment does not count."""
        first, last = self._windows
        return min(it.files for it in last) - min(it.files for it in first)

    def __str__(self) -> str:
        last = self.moments[-1]
        return (
            f"{last.seconds / 60:.1f} min, {last.tokens:,} tokens; after {self.warm_up / 60:.1f} min: memory x {self.memory:.3f} "
            f"({last.memory / 2**20:.0f} MiB), tokens per second x {self.throughput:.3f}, open files {self.files:+d}"
        )


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


async def soak(run_dir: Path, seconds: float, every: float = 5.0, say: Callable[[str], None] = print) -> list[Moment]:
    """Collect and score, and learn nothing, for so long; return a moment for ``every`` so many seconds."""
    engine, process, moments = Engine(), psutil.Process(), []
    begun, numbers = time.monotonic(), itertools.count()

    def now() -> Moment:
        return Moment(time.monotonic() - begun, process.memory_full_info().uss, process.num_fds(), engine.tokens)

    async with art.open_run(run_dir, engine=engine, learner="torch", max_concurrent=16) as run:
        while not moments or moments[-1].seconds < seconds:
            groups = await run.collect(agent, [f"task {next(numbers)}" for _ in range(4)], group_size=4)
            await run.score(groups, lambda trajectory: 1.0)
            await run.learn(groups)
            if not moments or time.monotonic() - begun - moments[-1].seconds >= every:
                moments.append(now())
                if len(moments) % 12 == 0:
                    it = moments[-1]
                    say(
                        f"{it.seconds / 60:.1f} min: {it.tokens:,} tokens, {it.memory / 2**20:.0f} MiB, {it.files} files"
                    )
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=5, help="minutes that do not count")
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    with tempfile.TemporaryDirectory() as folder:
        moments = asyncio.run(soak(Path(folder), options.minutes * 60))
    print(Soak(moments, options.warm_up * 60))


if __name__ == "__main__":
    main()
