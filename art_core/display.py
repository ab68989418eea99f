"""What a person sees while a run goes: bars on a terminal, lines elsewhere. Knows nothing about how runs work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """A bar for the whole run, a bar for what is being done now, and a line for every finished step."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.bars = Progress(
            TextColumn("{task.description}"),
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

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def total(self, steps: int, done: int) -> None:
        """Show the bar of the whole run; the time left is estimated from the steps done while it is shown."""
        self._steps = self.bars.add_task("training", total=steps, completed=done)

    def phase(self, name: str, total: int | None) -> None:
        """Say what begins now; ``total`` is the number of ``advance`` calls to come, None where it is not known."""
        if self._now is not None:
            self.bars.remove_task(self._now)
        self._now = self.bars.add_task(name, total=total)
        if self.bars.disable and name.split(":")[0] != self._last_phase.split(":")[0] and not name.startswith("step"):
            self.say(name)
        self._last_phase = name

    def advance(self) -> None:
        if self._now is not None:
            self.bars.advance(self._now)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say_once(self, text: str, about: str = "") -> None:
        """Say it, but only the first time that this is said ``about`` something (default: these very words)."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self.say(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line for a finished step."""
        shown = [f"step {step:3d}", f"reward {metrics.get('reward', float('nan')):6.3f}"]
        if "success" in metrics:
            shown.append(f"success {metrics['success']:6.1%}")
        shown.append(f"groups with contrast {metrics.get('groups_with_contrast', 0):.0f}")
        if "groups_sampled" in metrics:
            shown[-1] += f" of {metrics['groups_sampled']:.0f}"
        if metrics.get("failed"):
            shown.append(f"failed runs {metrics['failed']:.0f}")
        if metrics.get("unscored"):
            shown.append(f"unscored runs {metrics['unscored']:.0f}")
        if metrics.get("rollout_seconds"):
            shown.append(f"{metrics['sampled_tokens'] / metrics['rollout_seconds']:6.0f} tokens/s sampled")
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
