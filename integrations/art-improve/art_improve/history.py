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
from art_gateway.canary.routes import why_rolled_back

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
    """Training tasks that were trained on before."""
    held_out: int
    held_out_new: int
    """Held-out tasks from production that no earlier round had."""
    state: State = "training"
    why: str = ""
    """The reason for the state: the gate's conditions, or what ended the round."""
    ended: float | None = None
    before: JsonDict | None = None
    """The report of the held-out tasks with the weights it began with."""
    after: JsonDict | None = None
    measure: str = "success"
    """What ``difference`` is of: ``success``, or ``reward`` if the reward doesn't count successes."""
    difference: float | None = None
    interval: tuple[float, float] | None = None
    """The 95 % interval of the difference."""
    rollouts: int = 0
    """Rollouts of the training, without the held-out tasks."""
    seconds: float = 0.0
    """Seconds of training, without the held-out tasks."""
    judge_cost: float | None = None
    """US dollars, for all rollouts."""


class History:
    """The rounds in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / FILE
        self.rounds = [Round(**row) for row in json.loads(file.read_text())] if file.exists() else []

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[History]:
        """Yield the history for changes. Raises ConfigError if another process has it open."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            hold(lock, f"another art retrain is at work in {folder}; wait for it, or pass another run_dir")
            history = cls(folder)
            history.link()
            yield history

    def run_dir(self, round_: Round) -> Path:
        return self.folder / round_.name

    def next_name(self) -> str:
        """Return a name that no round and no folder has."""
        names = {*(each.name for each in self.rounds), *(path.name for path in self.folder.glob("round-*"))}
        numbers = [int(number) for name in names if (number := name.removeprefix("round-")).isdecimal()]
        return f"round-{max(numbers, default=0) + 1:03}"

    @property
    def unfinished(self) -> Round | None:
        """The last round, if its training was interrupted."""
        return self.rounds[-1] if self.rounds and self.rounds[-1].state == "training" else None

    @property
    def accepted(self) -> list[Round]:
        """The accepted rounds whose run folders still exist."""
        return [each for each in self.rounds if each.state == "accepted" and is_run(self.run_dir(each))]

    @property
    def current(self) -> Path | None:
        """The last accepted run folder, or before any, the run that the first round began with; None if that is no run."""
        if self.accepted:
            return self.run_dir(self.accepted[-1])
        start = Path(self.rounds[0].start) if self.rounds else None
        return start if start and is_run(start) else None

    def put(self, round_: Round) -> None:
        """Add a round, or replace the one of its name."""
        others = [each for each in self.rounds if each.name != round_.name]
        self.rounds = sorted([*others, round_], key=lambda each: each.name)
        write_whole(self.folder / FILE, json.dumps([asdict(each) for each in self.rounds], indent=2))
        self.link()

    @property
    def rolled_back(self) -> set[Path]:
        """The run folders of the rounds that were rolled back."""
        return {self.run_dir(each).resolve() for each in self.rounds if each.state == "rolled back"}

    def link(self) -> None:
        """Let the link lead to ``current``. Without one it stays as it is, unless it leads to what was rolled back."""
        run, link = self.current, self.folder / CURRENT
        if run is None and link.is_symlink() and link.resolve() in self.rolled_back:
            link.unlink()
        if run is None or (link.is_symlink() and link.resolve() == run.resolve()):
            return
        temporary = self.folder / f".{CURRENT}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(run.resolve(), self.folder.resolve()))
        os.replace(temporary, link)

    def take_over_rollbacks(self, traffic: Path) -> list[Round]:
        """Mark accepted rounds as rolled back whose share the gateway that recorded ``traffic`` took away, and return them."""
        file = traffic if traffic.suffix == ".sqlite" else traffic / STORE
        if not file.is_file():
            return []
        marked = []
        with Store(file) as store:
            for round_ in self.accepted:
                newest = last_checkpoint(self.run_dir(round_))
                if newest and (why := why_rolled_back(store, newest)):
                    marked.append(replace(round_, state="rolled back", why=why))
                    self.put(marked[-1])
        return marked


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / STORE).is_file()
