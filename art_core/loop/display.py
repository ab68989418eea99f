"""What a person sees while a run goes: bars on a terminal, lines elsewhere. Knows nothing about how runs work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from art_core.redaction import printable

ENGINE = logging.getLogger("art_core.engine")
"""What an engine says here, from level INFO on, is for the person who waits for it."""
RATE_SECONDS = 1.0


class _Said(logging.Handler):
    """Shows log records as lines; of several at a time, because models may be started side by side, the first does."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if next(it for it in ENGINE.handlers if isinstance(it, _Said)) is self:
            self._say(record.getMessage())


def plural(count: int, one: str) -> str:
    """Return the count with its noun: ``1 step``, ``2 steps``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def _rate(rates: Mapping[str, float]) -> str:
    if not rates.get("tokens_per_second"):
        return ""
    cached = f", prompts cached {rates['cache_hit_rate']:.0%}" if "cache_hit_rate" in rates else ""
    return f"- {rates['tokens_per_second']:.0f} tokens/s{cached}"


def _earned(metrics: Mapping[str, float]) -> list[str]:
    """Where single calls have rewards, that of the run says nothing if it is always 0."""
    shown = []
    if metrics.get("reward") or "call_reward" not in metrics:
        shown.append(f"reward {metrics.get('reward', float('nan')):6.3f}")
    if "call_reward" in metrics:
        shown.append(f"reward of calls {metrics['call_reward']:6.3f}")
    if "success" in metrics:
        shown.append(f"success {metrics['success']:6.1%}")
    return shown


class Output(Console):
    """A console for what takes long: where nobody reads any more, or the disk is full, the work goes on without being seen."""

    def on_broken_pipe(self) -> None:
        """Say nothing more. rich's own ends the program."""
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, where that can be done."""
        with suppress(OSError):
            super().print(*objects, **options)


class Display:
    """A bar for the whole run, a bar for what is being done now, and a line for every finished step."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Output(stderr=True, quiet=quiet)
        self.bars = Progress(
            TextColumn("{task.description} {task.fields[rate]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # A step of a real model takes minutes; rich forgets what is older than half a minute.
            speed_estimate_period=3600,
            disable=quiet or not self.console.is_terminal,
        )
        self._steps: TaskID | None = None
        self._now: TaskID | None = None
        self._last_phase = ""
        self._said: set[str] = set()
        self._handler = _Said(self.say)

    def __enter__(self) -> Display:
        self.bars.start()
        if not self.console.quiet:
            ENGINE.addHandler(self._handler)
            ENGINE.setLevel(logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ENGINE.removeHandler(self._handler)
        self.bars.stop()

    def total(self, steps: int, done: int) -> None:
        """Show the bar of the whole run; the time left is estimated from the steps done while it is shown."""
        self._steps = self.bars.add_task("training", total=steps, completed=done, rate="")

    def phase(self, name: str, total: int | None) -> None:
        """Say what begins now; ``total`` is the number of ``advance`` calls to come, None where it is not known."""
        if self._now is not None:
            self.bars.remove_task(self._now)
        self._now = self.bars.add_task(name, total=total, rate="")
        if self.bars.disable and name.split(":")[0] != self._last_phase.split(":")[0] and not name.startswith("step"):
            self.say(name)
        self._last_phase = name

    def advance(self) -> None:
        if self._now is not None:
            self.bars.advance(self._now)

    @asynccontextmanager
    async def rates(self, taken: Callable[[], Awaitable[Mapping[str, float]]]) -> AsyncIterator[None]:
        """Show beside the bar of what is being done how much the engine computes, while the block runs; nothing without bars."""
        task = None if self.bars.disable else asyncio.create_task(self._show_rates(taken))
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _show_rates(self, taken: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        while True:
            await asyncio.sleep(RATE_SECONDS)
            rate = _rate(await taken())
            if self._now is not None:
                self.bars.update(self._now, rate=rate)

    def say(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def say_once(self, text: str, about: str = "") -> None:
        """Say it, but only the first time that this is said ``about`` something (default: these very words)."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self.say(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line for a finished step."""
        shown = [f"step {step:3d}", *_earned(metrics)]
        shown.append(f"groups with contrast {metrics.get('groups_with_contrast', 0):.0f}")
        if "groups_sampled" in metrics:
            shown[-1] += f" of {metrics['groups_sampled']:.0f}"
        if metrics.get("failed"):
            shown.append(f"failed runs {metrics['failed']:.0f}")
        if metrics.get("unscored"):
            shown.append(f"unscored runs {metrics['unscored']:.0f}")
        if metrics.get("rollout_seconds"):
            shown.append(f"{metrics['sampled_tokens'] / metrics['rollout_seconds']:6.0f} tokens/s sampled")
        if "cache_hit_rate" in metrics:
            shown.append(f"prompts cached {metrics['cache_hit_rate']:4.0%}")
        if "seconds" in metrics:
            shown.append(f"{metrics['seconds']:5.1f} s")
        shown.append(time.strftime("%H:%M:%S"))
        self.say("  ".join(shown))
        if self._steps is not None:
            self.bars.update(self._steps, completed=step)

    def close(self) -> None:
        """A display ends with its ``with`` block."""


def display(progress: bool | Display) -> Display:
    """Return the display for a ``progress=`` argument."""
    return progress if isinstance(progress, Display) else Display(quiet=not progress)
