"""A folder with an agent, and trainings in it that are processes of their own, for whoever stops or kills them."""

import contextlib
import json
import sqlite3
import textwrap
import time

import warm
from typer.testing import CliRunner

import art_audit
from art_cli.main import app

AGENT = """
    import httpx

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}], "max_tokens": 8}
        return httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False).json()

    def reward(trajectory):
        ids = trajectory.calls[0].sampled_ids if trajectory.calls else ()
        return sum(ids) % 7
"""
MAIN = "from art_cli.main import main\nmain()"


class Place:
    """A folder with an agent, and trainings in it, each a process."""

    def __init__(self, folder):
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "agent.py").write_text(textwrap.dedent(AGENT))
        (folder / "tasks.jsonl").write_text('"one"\n"two"\n"three"\n')

    def start(self, steps, *more, before="", stdout=None, stderr=None):
        """Train to ``steps``, with the Python code ``before`` run first. What it says is kept in files of the folder."""
        with contextlib.ExitStack() as files:
            stdout, stderr = (
                given or files.enter_context((self.folder / name).open("w"))
                for given, name in ((stdout, "stdout"), (stderr, "stderr"))
            )
            return warm.program(
                before + "\n" + MAIN, self.arguments(steps, *more), cwd=self.folder,
                stdout=stdout.fileno(), stderr=stderr.fileno(),
            )  # fmt: skip

    def arguments(self, steps, *more, resume=False):
        """Return the arguments of ``art``; ``resume`` names the run folder only."""
        whole = ["agent.py:agent", "tasks.jsonl", "--reward", "agent.py:reward", "--run-dir", "run"]
        whole += ["--set", "tasks_per_step=1", "--set", "group_size=4", *more]
        return ["train", *(["--resume", str(self.run_dir)] if resume else whole), "--steps", str(steps)]

    def ends(self, process, seconds=120):
        """Return its exit status and what it said on stderr."""
        status, said = process.wait(seconds), (self.folder / "stderr").read_text()
        assert "Traceback" not in said, said
        return status, " ".join(said.split())

    @property
    def steps(self):
        file = self.run_dir / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def reach(self, step, process):
        end = time.monotonic() + 120
        while len(self.steps) < step:
            assert process.poll() is None, (self.folder / "stderr").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)

    def goes_on(self, steps, *, resume=False):
        """Train to the end, in this process, which has loaded torch already, and check that nothing is missing."""
        with contextlib.chdir(self.folder.parent if resume else self.folder):
            done = CliRunner().invoke(app, self.arguments(steps, resume=resume))
        assert "Traceback" not in done.output, done.output
        assert done.exit_code == 0 and self.steps == list(range(1, steps + 1)), done.output
        with contextlib.closing(sqlite3.connect(self.run_dir / "run.sqlite")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert art_audit.audit(self.run_dir, progress=False).clean
