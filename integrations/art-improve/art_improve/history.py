"""The rounds of ``art retrain``: a row for each in ``rounds.json``, and a link to the run that was accepted last."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from art_core.store import Store
from art_core.store.run_folder import hold, last_checkpoint, write_whole
from art_core.types import JsonDict

FILE, CURRENT, STORE = "rounds.json", "current", "run.sqlite"
State = Literal["training", "accepted", "rejected", "stopped", "rolled back"]


@dataclass(frozen=True)
class Round:
    """What a round trained on, what it changed, and what became of it."""

    name: str
    """Of its run folder."""
    began: float
    start: str
    """The model or the run folder whose weights it began with."""
    new: int
    """Training tasks from production."""
    older: int
    """Training tasks of earlier rounds."""
    held_out: int
    held_out_new: int
    """Of these, those from production."""
    state: State = "training"
    why: str = ""
    """What its state is due to: the gate's verdicts, or why the training ended early or the canary took its share away."""
    ended: float | None = None
    before: JsonDict | None = None
    """The report of the held-out tasks with the weights it began with."""
    after: JsonDict | None = None
    measure: str = "success"
    """What ``difference`` is of: ``success``, or ``reward`` if the reward doesn't count successes."""
    difference: float | None = None
    interval: tuple[float, float] | None = None
    """Of the difference; 95 %."""
    rollouts: int = 0
    """Of the training."""
    seconds: float = 0.0
    """Of the training."""
    judge_cost: float | None = None
    """US dollars."""


class History:
    """The rounds in a folder. Raises ConfigError if another process has it open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / FILE
        self.rounds = [Round(**row) for row in json.loads(file.read_text())] if file.exists() else []

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[History]:
        """Yield the history; nobody else can change it in the meantime."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            hold(lock, f"another art retrain is at work in {folder}; wait for it, or pass another run_dir")
            yield cls(folder)

    def run_dir(self, round_: Round) -> Path:
        return self.folder / round_.name

    @property
    def unfinished(self) -> Round | None:
        """The last round, if its training was interrupted."""
        return self.rounds[-1] if self.rounds and self.rounds[-1].state == "training" else None

    @property
    def current(self) -> Path | None:
        """The run folder that was accepted last; None if none was."""
        accepted = [it for it in self.rounds if it.state == "accepted"]
        return self.run_dir(accepted[-1]) if accepted else None

    def put(self, round_: Round) -> None:
        """Add a round, or replace the one of its name."""
        self.rounds = [*(it for it in self.rounds if it.name != round_.name), round_]
        self.rounds.sort(key=lambda it: it.began)
        write_whole(self.folder / FILE, json.dumps([asdict(it) for it in self.rounds], indent=2))
        self.link(self.current)

    def link(self, run: Path | None) -> None:
        """Let ``current`` lead to a run folder. Without one, it stays as it is."""
        link = self.folder / CURRENT
        if run is None or (link.is_symlink() and link.resolve() == run.resolve()):
            return
        temporary = self.folder / f".{CURRENT}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(run.resolve(), self.folder.resolve()))
        os.replace(temporary, link)

    def take_over_rollback(self, traffic: Path) -> Round | None:
        """Mark the accepted round as rolled back if the gateway that recorded ``traffic`` gave it no share in the end."""
        accepted = [it for it in self.rounds if it.state == "accepted"]
        why = accepted and _rolled_back(traffic, self.run_dir(accepted[-1]))
        if not why:
            return None
        round_ = replace(accepted[-1], state="rolled back", why=why)
        self.put(round_)
        return round_


def _rolled_back(traffic: Path, run: Path) -> str | None:
    """Return why a gateway's candidate, the newest checkpoint of ``run``, has no share; None if it has, or isn't known."""
    newest = last_checkpoint(run.resolve())
    if newest is None or not is_run(traffic):
        return None
    with Store(traffic / STORE) as opened:
        changes = [it for it in opened.meta("routes", []) if it["candidate"].endswith(str(newest))]
    return changes[-1]["why"] if any(it["share"] for it in changes) and not changes[-1]["share"] else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / STORE).is_file()
