"""Kills a training again and again, at random moments of every phase, and compares what is left with one that was not killed.

python -m tests.kill_loop --kills 100 --steps 50 --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from art_core.store import Store

ROOT = Path(__file__).parent.parent
PHASES = {"any": 0.0, "rollout": 2.0, "scoring": 0.02, "step": 1.0, "swap": 0.02, "checkpoint": 0.1, "start": 3.0}
"""What a kill waits for, and up to how many seconds of it pass; ``any``: nothing, the first is in the evaluation."""
VICTIMS = ("all", "trainer", "engine")
PATIENCE = 120.0
"""Seconds for a process to begin, or to end by itself."""
PHASE_SECONDS = 60.0
"""For a phase to come; then it is killed wherever it is."""


def cold(code: str, arguments: list, *, cwd: Path, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, as a user does. ``tests/warm.py`` has the same with torch loaded."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True)


@dataclass
class Training:
    """One training that goes on in the same folder whenever it is started."""

    folder: Path
    steps: int
    eval_tasks: int
    seed: int
    program: Callable[..., Any] = cold
    """Starts its processes."""
    kills: list[tuple[str, str]] = field(default_factory=list)
    """(phase, victim) of every kill."""
    calls: dict[int, bytes] = field(default_factory=dict)
    """Number in the store -> digest of every call seen so far."""
    lost: int = 0
    """Calls that were in the store once and are not, or not the same."""
    seconds: float = 0.0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> Any:
        """Start the training; return its process, with the interface of ``subprocess.Popen``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "phase").write_text("begun")
        code = "import sys; from tests.kill_loop_child import main; main(*sys.argv[1:])"
        arguments = [self.run_dir, self.steps, self.eval_tasks, self.seed, self.folder / "phase"]
        with (self.folder / "log.txt").open("a") as log:
            return self.program(code, arguments, cwd=ROOT, stdout=log.fileno(), stderr=log.fileno())

    def phase(self) -> str:
        return (self.folder / "phase").read_text().strip()

    def whole(self) -> int:
        """Run to the end; return the exit status."""
        begun, process = time.monotonic(), self.start()
        status = process.wait()
        self.seconds += time.monotonic() - begun
        return status

    def killed(self, wanted: str, victim: str, after: float, rng: random.Random) -> bool:
        """Start, and kill ``after`` so many seconds in the phase ``wanted``; False where it came to its end before."""
        process = self.start()
        if wanted != "start":
            if not self._wait(process, lambda: self.phase() not in ("begun", "start"), PATIENCE):
                return False
            time.sleep(after)
            if not self._wait(process, lambda: wanted in ("any", self.phase()), PHASE_SECONDS):
                return False
        time.sleep(rng.uniform(0, PHASES[wanted]))
        phase = self.phase().replace("begun", "start")
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is not None:
            return False
        if victim == "all" or not children:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid if victim == "trainer" else children[0].pid, signal.SIGKILL)
        process.wait(PATIENCE)
        _, alive = psutil.wait_procs(children, PATIENCE)
        assert not alive, f"{alive} outlived the training"
        self.kills.append((phase, victim if children else "all"))
        return True

    def _wait(self, process: Any, true, seconds: float) -> bool:
        """Return when it is true, or the time is over; False where the training has come to its end."""
        end = time.monotonic() + seconds
        while not true():
            if process.poll() is not None:
                assert process.returncode == 0, (self.folder / "log.txt").read_text()[-3000:]
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.0005)
        return True

    def check_store(self) -> None:
        """Note what has become of the calls that were there before."""
        file = self.run_dir / "run.sqlite"
        if not file.exists():
            return
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'calls'").fetchall():
                return  # killed while the file was made
            now = dict(db.execute("SELECT seq, digest FROM calls"))
        self.lost += sum(now.get(number) != digest for number, digest in self.calls.items())
        self.calls = now


@dataclass(frozen=True)
class Facts:
    """What a finished training has come to."""

    steps: int
    groups: int
    """Groups that steps were given, and trajectories in them."""
    trajectories: int
    rollouts: int
    cut_off: int
    """Rollouts that were cut off."""
    answers: int
    """Different answers of the policy that the store has."""
    remade: int
    """Answers of rollouts that were cut off and that no rollout which came to its end has."""
    success: float
    interval: tuple[float, float]


def facts(run_dir: Path) -> Facts:
    """Read them from the store and the report."""
    report = json.loads((run_dir / "report.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, report["steps"] + 1))
    ended: Counter[tuple] = Counter()
    cut: Counter[tuple] = Counter()
    with Store(run_dir / "run.sqlite") as store:
        rollouts = store.rollouts()
        made_again = {it.continues for group in {it.group for it in rollouts} for it in store.attempts(group or "")}
        used = [it for it in rollouts if it.finished and not it.error and it.rollout_id not in made_again]
        for it in rollouts:
            for call in store.calls(it.rollout_id):
                if call.finish_reason != "aborted":
                    answer = (it.group, call.prompt_ids, call.sampled_ids, call.logprobs)
                    (ended if it in used else cut)[answer] += 1
    given = [sum(int(line[name]) for line in lines) for name in ("groups_sampled", "trajectories")]
    return Facts(
        report["steps"], *given, len(rollouts), len(rollouts) - len(used),
        len(ended | cut), sum(answer not in ended for answer in cut),
        report["after"]["success"], tuple(report["after"]["interval"]),
    )  # fmt: skip


def kill_loop(training: Training, kills: int, span: float, rng: random.Random, say=print) -> None:
    """Kill it so often, each time up to ``span`` seconds after it has begun to work, and let it come to its end then."""
    for number in range(kills):
        wanted, victim = list(PHASES)[number % len(PHASES)], rng.choice(VICTIMS)
        begun = time.monotonic()
        if not training.killed(wanted, victim, rng.uniform(0, span), rng):
            break
        training.check_store()
        phase, victim = training.kills[-1]
        seconds = time.monotonic() - begun
        say(f"kill {number + 1}: {victim} in {phase}, {seconds:.1f} s; {len(training.calls)} calls stored", flush=True)
    status = training.whole()
    assert status == 0, (training.folder / "log.txt").read_text()[-3000:]
    training.check_store()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eval-tasks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="new, or one with a reference to compare with")
    options = parser.parse_args()
    shape = (options.steps, options.eval_tasks, options.seed)
    reference = Training(options.folder / "reference", *shape)
    assert reference.whole() == 0, (reference.folder / "log.txt").read_text()[-3000:]
    expected = facts(reference.run_dir)
    print(f"not killed: {expected}", flush=True)
    training, rng = Training(options.folder / "killed", *shape), random.Random(options.seed)
    seconds = json.loads((reference.run_dir / "report.json").read_text())["seconds"]
    kill_loop(training, options.kills, 0.5 * seconds / options.kills, rng)
    found = facts(training.run_dir)
    print(f"killed:     {found}")
    print(f"{len(training.kills)} kills: {dict(Counter(phase for phase, _ in training.kills))}")
    print(f"victims: {dict(Counter(victim for _, victim in training.kills))}; calls lost: {training.lost}")
    low, high = expected.interval
    print(f"success {found.success:.1%}, not killed {expected.success:.1%} ({low:.1%} to {high:.1%})")


if __name__ == "__main__":
    main()
