"""Trackers follow a training run, each in a thread of its own.

A tracker that fails or hangs never stops training. Its first failure is shown, and what it raises when it closes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core.attribution import exempt
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.plugins import Plugins
from art_core.redaction import describe_error
from art_core.types import Group, with_defaults

MAX_QUEUED = 256
"""Calls of one method that may wait for a slow tracker; further ones are skipped until it catches up."""
MAX_QUEUED_GROUPS = 8
"""The same for ``log_groups``: groups hold every token of their rollouts."""
SILENT_SECONDS = 5.0
"""How long the end of a run waits for a tracker before it says so."""


class Tracker:
    """Inherit it and override what the tracker records. Its methods are called in order, in one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; called once per step."""

    def log_groups(self, step: int, groups: Sequence[Group], split: str) -> None:
        """Record the scored rollouts of a step (``split`` is ``"train"``) or of an evaluation after it (``"eval"``)."""

    def log_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Record an item of ``evaluations`` in ``report.json``, after its rollouts."""

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """Record a checkpoint. An adapter is in ``folder / "adapter"``, whole weights are in the folder itself. The
        folder is removed once it is no longer among the newest."""

    def log_report(self, report: Mapping[str, Any]) -> None:
        """Record the content of ``report.json``; called last before ``close``."""

    def close(self) -> None:
        """Send what is still unsent, within ``tracker_timeout``. Raise an error that says how much was lost, if any."""


class _TrackerThread(threading.Thread):
    """Calls one tracker."""

    def __init__(self, tracker_name: str, tracker: Any, say: Callable[[str], None]) -> None:
        # A daemon, so that a tracker that hangs doesn't keep the process alive.
        super().__init__(name=f"art-tracker-{tracker_name}", daemon=True)
        self.tracker_name, self._say = tracker_name, say
        self._tracker = with_defaults(tracker, Tracker)
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._room = defaultdict(lambda: threading.Semaphore(MAX_QUEUED))
        self._room["log_groups"] = threading.Semaphore(MAX_QUEUED_GROUPS)
        self._first_failure, self._was_behind = "", False
        self.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a call, or skip it if too many are waiting."""
        if self._room[method].acquire(blocking=False):
            self._calls.put((method, arguments))
        elif not self._was_behind:
            self._was_behind = True
            self._say(f"the tracker {self.tracker_name} is too slow; calls are skipped until it catches up")

    def run(self) -> None:
        method = ""
        with exempt():  # model calls of a tracker belong to no rollout
            while method != "close":
                method, arguments = self._calls.get()
                self._room[method].release()
                try:
                    getattr(self._tracker, method)(*arguments)
                except BaseException as error:  # noqa: BLE001 - a tracker must not stop training, whatever it raises
                    self._failed(method, describe_error(error))

    def _failed(self, method: str, reason: str) -> None:
        # What close raises may say how much was lost.
        if not self._first_failure or (method == "close" and reason != self._first_failure):
            self._say(
                f"the tracker {self.tracker_name} failed in {method}: {reason}; training is not affected, and the run folder "
                "has what it missed"
            )
        self._first_failure = self._first_failure or reason


Factory = Callable[[Path, Any], Tracker]
"""``(run_dir, config)`` -> a tracker, as registered by ``register_trackers``."""


class Trackers:
    """The trackers of one run, as made by the factories that ``find`` returns. No call blocks but ``close``.

    Raises what a factory raises, after closing the trackers that were made before.
    """

    @staticmethod
    def find(plugins: Plugins, trackers: Sequence[str | Tracker]) -> dict[str, Factory]:
        """Return a factory per tracker, by name. Raises ConfigError for an unknown name, for an object that isn't a tracker, and
        if a tracker can't work here."""
        factories: dict[str, Factory] = {}
        for number, tracker in enumerate(trackers, 1):
            if isinstance(tracker, str):
                offer = plugins.offer("register_trackers", tracker)
                offer.check()
                factories[tracker] = offer.thing
            elif hasattr(tracker, "log") and hasattr(tracker, "close"):
                factories[f"{type(tracker).__name__} {number}"] = lambda run_dir, config, tracker=tracker: tracker
            else:
                raise ConfigError(f"{tracker!r:.80} isn't a tracker: it needs log(step, metrics) and close()")
        return factories

    def __init__(
        self, factories: Mapping[str, Factory], run_dir: Path, config: TrainConfig, say: Callable[[str], None]
    ) -> None:
        self._say, self._timeout = say, config.tracker_timeout
        self._threads: list[_TrackerThread] = []
        try:
            for name, factory in factories.items():
                self._threads.append(_TrackerThread(name, factory(run_dir, config), say))
        except BaseException:
            self.close()
            raise

    def notify(self, method: str, *arguments: Any) -> None:
        """Call this method of every tracker."""
        for thread in self._threads:
            thread.call(method, *arguments)

    def close(self) -> None:
        """Wait until all trackers have closed; name and abandon those that take longer than ``tracker_timeout``."""
        until = time.monotonic() + self._timeout
        self.notify("close")
        for thread in self._threads:
            thread.join(min(SILENT_SECONDS, until - time.monotonic()))
            if thread.is_alive() and (seconds := until - time.monotonic()) > 0:
                self._say(f"waiting up to {seconds:.0f} s for the tracker {thread.tracker_name}")
                thread.join(seconds)
            if thread.is_alive():
                self._say(
                    f"the tracker {thread.tracker_name} did not close within {self._timeout:g} s (tracker_timeout) and is "
                    "abandoned"
                )
