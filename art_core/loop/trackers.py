"""Tells trackers how a run goes, each in a thread of its own. Knows nothing about what a tracker does with it.

A tracker that fails or hangs never stops a run: the first time it is said, and what fails at its end; the run goes on.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from art_core.attribution import exempt
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.hookspecs import Offer
from art_core.redaction import without_keys
from art_core.types import Group

WAITING = 256
"""Calls of one kind that a tracker may be behind by; of what comes then, it is told nothing."""
GROUPS_WAITING = 8
"""The same of ``log_groups``: groups hold every token of their runs."""
SILENT_SECONDS = 5.0
"""Of these, that pass before it is said who is waited for."""


class Tracker(Protocol):
    """Is told how a run goes: all in order, in one thread, beside the run.

    ``log`` and ``close`` it must have; the others are called where it has them.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; once for each."""
        ...

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Take the scored runs of a step (``split`` is ``"train"``) or of an evaluation after it (``"eval"``)."""
        ...

    def log_evaluation(self, step: int, found: Mapping[str, Any]) -> None:
        """Take what an evaluation found: an item of ``evaluations`` in ``report.json``. Its runs were told before."""
        ...

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """Take the folder of a checkpoint; the adapter is in ``folder / "adapter"``, whole weights in the folder itself. It is
        removed when it is no longer among the newest."""
        ...

    def log_report(self, report: Mapping[str, Any]) -> None:
        """Take the content of ``report.json``, last of all."""
        ...

    def close(self) -> None:
        """Send what is left, and end; it has ``tracker_timeout`` for both. What it raises, such as how much was lost, is said."""
        ...


class _Told:
    """One tracker, its thread, and what it is still to be told."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self.name, self._tracker, self._say = name, tracker, say
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self._failed, self._behind = "", False
        # As a daemon, so that one that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"art-tracker-{name}", daemon=True)
        self._thread.start()

    def tell(self, what: str, *arguments: Any) -> None:
        if not hasattr(self._tracker, what):
            return
        with self._waiting.mutex:
            waiting = sum(told[0] == what for told in self._waiting.queue)
        bound = GROUPS_WAITING if what == "log_groups" else WAITING
        if waiting < bound:
            return self._waiting.put((what, arguments))
        if not self._behind:
            self._say(
                f"the tracker {self.name} is {bound} calls of {what} behind and is not told of those that come meanwhile"
            )
        self._behind = True

    def ended(self, seconds: float) -> bool:
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def _work(self) -> None:
        what = ""
        with exempt():  # its calls are nobody's rollout
            while what != "close":
                what, arguments = self._waiting.get()
                try:
                    getattr(self._tracker, what)(*arguments)
                except BaseException as error:  # noqa: BLE001 - the boundary to the tracker: the run goes on without it
                    closing, why = what == "close", without_keys(f"{type(error).__name__}: {error}")
                    # At the end it may say how much was lost.
                    if not self._failed or (closing and why != self._failed):
                        self._say(
                            f"the tracker {self.name} failed in {what}: {why}; "
                            f"{'' if closing else 'the run goes on, and '}what it missed is in the run folder"
                        )
                    self._failed = self._failed or why


Factory = Callable[[Path, Any], Tracker]
"""``(run_dir, config)`` -> a tracker, as ``register_trackers`` offers them."""


def find_trackers(offer: Callable[[str], Offer], trackers: Sequence[str | Tracker]) -> dict[str, Factory]:
    """Return what makes each tracker, by name: for a name what is offered under it, for an object itself.

    Raises ConfigError for an object that is no tracker, and what its ``check`` raises if it cannot work here.
    """
    found: dict[str, Factory] = {}
    objects = 0
    for tracker in trackers:
        if isinstance(tracker, str):
            offered = offer(tracker)
            offered.check()
            found[tracker] = offered.thing
            continue
        if not (hasattr(tracker, "log") and hasattr(tracker, "close")):
            raise ConfigError(f"{tracker!r:.80} is no tracker: it needs log(step, metrics) and close()")
        objects += 1
        found[f"{type(tracker).__name__} {objects}"] = functools.partial(_itself, tracker)
    return found


def _itself(tracker: Tracker, run_dir: Path, config: Any) -> Tracker:
    return tracker


class Trackers:
    """The trackers of one run; told from the run's thread, they never hold it up.

    ``found`` is what ``find_trackers`` returned, ``config`` the run's. Raises what a factory raises, with those made
    before it closed.
    """

    def __init__(
        self, found: Mapping[str, Factory], run_dir: Path, config: TrainConfig, say: Callable[[str], None]
    ) -> None:
        self._say, self._seconds = say, config.tracker_timeout
        self._told: list[_Told] = []
        try:
            for name, factory in found.items():
                self._told.append(_Told(name, factory(run_dir, config), say))
        except BaseException:
            self.close()
            raise

    def tell(self, what: str, *arguments: Any) -> None:
        """Call the method ``what`` of every tracker that has it."""
        for told in self._told:
            told.tell(what, *arguments)

    def close(self) -> None:
        """Wait until all have done what they were told and closed; say which have not within ``tracker_timeout`` seconds."""
        until = time.monotonic() + self._seconds
        self.tell("close")
        for told in self._told:
            if not told.ended(min(SILENT_SECONDS, until - time.monotonic())) and (left := until - time.monotonic()) > 0:
                self._say(f"waiting for the tracker {told.name}, {left:.0f} s at most")
            if not told.ended(until - time.monotonic()):
                self._say(f"the tracker {told.name} has not ended in {self._seconds:g} s and is left behind")
