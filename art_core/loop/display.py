"""What a run shows while it works: progress bars on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from art_core.redaction import printable
from art_core.runtime.memory import machine_memory

ENGINE_LOG = logging.getLogger("art_core.engine")
"""Its records from level INFO on, and those of its children, are shown while a display is open."""
RATE_SECONDS = 1.0
"""Between two updates of the tokens per second."""
LINE_SECONDS = 30.0
"""Without a terminal: how long nothing is said before a line says how far the phase is."""


class _EngineMessages(logging.Handler):
    """Shows log records as lines. Several displays may be open, one per model: only the first shows them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if next((each for each in ENGINE_LOG.handlers if isinstance(each, _EngineMessages)), None) is self:
            self._say(record.getMessage())


def plural(count: int, noun: str) -> str:
    """Return the count with its noun: ``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Output(Console):
    """A console that a broken pipe or a full disk silences, so that long work continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing more; rich would exit the program."""
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, unless the output can't be written."""
        with suppress(OSError):
            super().print(*objects, **options)


class Display:
    """A bar for the whole run, a bar for the current phase, and a line for every finished step."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Output(stderr=True, quiet=quiet)
        self.bars = Progress(
            TextColumn("{task.description} {task.fields[rate]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # A step of a real model takes minutes; by default rich looks back half a minute.
            speed_estimate_period=3600,
            disable=quiet or not self.console.is_terminal,
        )
        self._steps: TaskID | None = None
        self._phase: TaskID | None = None
        self._topic = ""
        self._said_at = time.monotonic()
        self._topics_said: set[str] = set()
        self._handler = _EngineMessages(self.say)

    def __enter__(self) -> Display:
        self.bars.start()
        if not self.console.quiet:
            ENGINE_LOG.addHandler(self._handler)
            ENGINE_LOG.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc_info: object) -> None:
        ENGINE_LOG.removeHandler(self._handler)
        self.bars.stop()

    def total(self, steps: int, done: int) -> None:
        """Show the bar of the whole run."""
        self._steps = self.bars.add_task("training", total=steps, completed=done, rate="")

    def phase(self, name: str, total: int | None) -> None:
        """Show what begins now. ``total`` is the number of ``advance`` calls to come; None if unknown."""
        if self._phase is not None:
            self.bars.remove_task(self._phase)
        self._phase = self.bars.add_task(name, total=total, rate="")
        last, self._topic = self._topic, name.split(":")[0]
        if self.bars.disable and self._topic != last and not name.startswith("step"):
            self.say(name)

    def advance(self) -> None:
        if self._phase is None:
            return
        self.bars.advance(self._phase)
        if self.bars.disable and time.monotonic() - self._said_at >= LINE_SECONDS:
            phase = next(task for task in self.bars.tasks if task.id == self._phase)
            of = f" of {phase.total}" if phase.total else ""
            self.say(f"{phase.description}: {phase.completed:.0f}{of}")

    @asynccontextmanager
    async def rates(self, measure: Callable[[], Awaitable[Mapping[str, float]]]) -> AsyncIterator[None]:
        """Show the engine's rates, as ``measure`` returns them, beside the bar of the phase during the block."""
        showing = None if self.bars.disable else asyncio.create_task(self._show_rates(measure))
        try:
            yield
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.gather(showing, return_exceptions=True)

    async def _show_rates(self, measure: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        while True:
            await asyncio.sleep(RATE_SECONDS)
            rates, text = await measure(), ""
            if rates.get("tokens_per_second"):
                cached = f", prompts cached {rates['cache_hit_rate']:.0%}" if "cache_hit_rate" in rates else ""
                text = f"- {rates['tokens_per_second']:.0f} tokens/s{cached}"
            if self._phase is not None:
                self.bars.update(self._phase, rate=text)

    def say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def say_once(self, text: str, about: str = "") -> None:
        """Show the text unless one with the same topic, ``about`` (default: the text itself), was shown before."""
        if (about or text) not in self._topics_said:
            self._topics_said.add(about or text)
            self.say(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one line for a finished step."""
        self.say("  ".join([f"step {step:3d}", *_step_parts(metrics), time.strftime("%H:%M:%S")]))
        if self._steps is not None:
            self.bars.update(self._steps, completed=step)


def _step_parts(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    # If only calls have rewards, that of the rollouts is always 0.
    if metrics.get("reward") or "call_reward" not in metrics:
        parts.append(f"reward {metrics.get('reward', float('nan')):6.3f}")
    if "call_reward" in metrics:
        parts.append(f"reward of calls {metrics['call_reward']:6.3f}")
    if "success" in metrics:
        parts.append(f"success {metrics['success']:6.1%}")
    sampled = f" of {metrics['groups_sampled']:.0f}" if "groups_sampled" in metrics else ""
    parts.append(f"groups with contrast {metrics.get('groups_with_contrast', 0):.0f}{sampled}")
    parts += [f"{name} rollouts {metrics[name]:.0f}" for name in ("failed", "unscored") if metrics.get(name)]
    if metrics.get("rollout_seconds"):
        parts.append(f"{metrics['sampled_tokens'] / metrics['rollout_seconds']:6.0f} tokens/s sampled")
    if "cache_hit_rate" in metrics:
        parts.append(f"prompts cached {metrics['cache_hit_rate']:4.0%}")
    if metrics.get("memory_bytes"):
        parts.append(f"memory {metrics['memory_bytes'] / 2**30:.1f} of {machine_memory() / 2**30:.0f} GiB")
    if "seconds" in metrics:
        parts.append(f"{metrics['seconds']:5.1f} s")
    return parts


def display(progress: bool | Display) -> Display:
    """Return the display for a ``progress=`` argument."""
    return progress if isinstance(progress, Display) else Display(quiet=not progress)
