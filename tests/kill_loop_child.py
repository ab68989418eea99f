"""The training that the kill loop kills: the email agent, with the phase that it is in written to a file."""

import functools
import os
from pathlib import Path

from art_core.loop.checkpoints import Checkpoints
from art_core.loop.evaluate import Evaluator
from art_core.loop.run import Run
from art_core.loop.update import Updater

WIDTH = 16
"""Bytes of the file: a phase is written at once, so that no reader sees half of one."""


class Phases:
    """Who is at work: the innermost that is known, but an evaluation with all that is in it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._open: list[str] = []
        self._say("start")

    def _say(self, phase: str) -> None:
        os.pwrite(self._file, phase.ljust(WIDTH).encode(), 0)

    def _say_who(self) -> None:
        self._say("evaluation" if "evaluation" in self._open else self._open[-1] if self._open else "between")

    def of(self, owner: type, name: str, phase: str) -> None:
        """Say ``phase`` while a method of ``owner`` runs."""
        method = getattr(owner, name)

        @functools.wraps(method)
        async def said(*args, **kwargs):
            self._open.append(phase)
            self._say_who()
            try:
                return await method(*args, **kwargs)
            finally:
                self._open.remove(phase)
                self._say_who()

        setattr(owner, name, said)


def main(run_dir: str, steps: str, eval_tasks: str, seed: str, file: str) -> None:
    phases = Phases(file)
    phases.of(Evaluator, "measure", "evaluation")
    phases.of(Run, "collect", "rollout")
    phases.of(Run, "score", "scoring")
    phases.of(Updater, "_step", "step")
    phases.of(Updater, "swap", "swap")
    phases.of(Checkpoints, "save", "checkpoint")
    from examples.email_search.train import run

    shape = {"run_dir": Path(run_dir), "eval_tasks": int(eval_tasks), "learning_rate": 5e-4}
    run(int(steps), int(seed), **shape, progress=False)
