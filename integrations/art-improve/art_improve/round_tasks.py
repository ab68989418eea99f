"""The tasks of a round: what is new in the traffic, as many older tasks, and all that were ever held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_cli.arguments import load_tasks
from art_core.errors import ConfigError
from art_core.plugin_api import plural, task_id, task_input
from art_improve.history import History
from art_tasks.traffic import curate, read
from art_tasks.traffic.curate import Redact, as_lines, text_of
from art_tasks.traffic.similar import Found

TRAIN, HELD_OUT = "tasks.jsonl", "held_out.jsonl"
"""Files of each round, and of the folder of rounds: what was trained on before the first round, and all held-out tasks so far."""


@dataclass(frozen=True)
class RoundTasks:
    """What a round trains on and is measured on."""

    new: Sequence[Any]
    older: Sequence[Any]
    held_out: Sequence[Any]
    held_out_new: int
    waiting: int
    """New tasks for training, with those that are left for later rounds."""
    summary: str

    def write(self, run: Path) -> None:
        """Write them to the round's folder, and keep the held-out ones for all later rounds."""
        run.mkdir(exist_ok=True)
        for path, content in (
            (run.parent / HELD_OUT, self.held_out),
            (run / HELD_OUT, self.held_out),
            (run / TRAIN, [*self.new, *self.older]),
        ):
            path.write_bytes(as_lines(content))


def find_tasks(
    history: History,
    traffic: str | Path,
    tasks: Sequence[Any],
    held_out: Sequence[Any],
    *,
    share: float,
    redact: Redact | None,
    seed: int,
    at_once: int,
) -> RoundTasks:
    """Return the tasks of the next round, at most ``at_once`` for training. Raises ConfigError if none is held out.

    Tasks that were passed before, or are part of an accepted round, are older; those of other rounds are new again. What doesn't
    fit stays new for the next round.
    """
    passed = _kept(history.folder / TRAIN, tasks)
    tried = {each.name: _read(history.run_dir(each) / TRAIN) for each in history.rounds}
    accepted = [task for each in history.accepted for task in tried[each.name]]
    fair, unfair = _split(held_out, accepted)
    measured = _kept(history.folder / HELD_OUT, fair)
    trained, _ = _split(_distinct([*passed, *accepted]), measured)
    recorded = read(traffic)
    curated = curate(recorded.requests, held_out=share, known=[*trained, *measured], redact=redact)
    # What a round trained on in vain may be trained on again, but not become held out.
    held_out_new, again = _split(curated.held_out, [task for each in tried.values() for task in each])
    candidates = [*curated.train, *again]
    if not (measured or held_out_new):
        raise ConfigError("no task is held out, so nothing can be evaluated; pass held_out tasks, or a share above 0")
    older = random.Random(seed).sample(trained, min(len(trained), len(candidates), at_once // 2))
    new = candidates[: at_once - len(older)]
    later = len(candidates) - len(new)
    summary = f"{plural(len(recorded.requests), 'request')} of {traffic}: {plural(len(new), 'new task')} to train on"
    summary += f", {len(held_out_new)} to hold out" + (f", {later} for later rounds" if later else "")
    summary += "".join(f"; {count} dropped, {reason}" for reason, count in curated.dropped.most_common())
    if unfair:
        summary += (
            f"\n{len(unfair)} of the held-out tasks that were passed are left out: earlier rounds trained on them"
        )
    return RoundTasks(new, older, [*measured, *held_out_new], len(held_out_new), len(candidates), summary)


def _kept(file: Path, passed: Sequence[Any]) -> list[Any]:
    """Return the tasks that were passed, now or in an earlier call, and keep them in ``file``."""
    tasks = _distinct([*_read(file), *passed])
    if passed:
        file.write_bytes(as_lines(tasks))
    return tasks


def _read(file: Path) -> list[Any]:
    return load_tasks(str(file)) if file.is_file() else []


def _distinct(tasks: Sequence[Any]) -> list[Any]:
    return list({task_id(task): task for task in tasks}.values())


def _split(tasks: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tasks that are neither the same nor nearly the same as one of the others, and those that are."""
    known = Found()
    for task in others:
        known.add(text_of(task_input(task)))
    new: list[Any] = []
    same: list[Any] = []
    for task in tasks:
        text = text_of(task_input(task))
        is_same = known.exact(text) is not None or known.near(text) is not None
        (same if is_same else new).append(task)
    return new, same
