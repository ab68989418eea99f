"""Ctrl-C and kill -9 leave a run that goes on: nothing is missing and nothing is done twice."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

AGENT = """
    import httpx

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}], "max_tokens": 8}
        return httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False).json()

    def reward(trajectory):
        ids = trajectory.calls[0].sampled_ids if trajectory.calls else ()
        return sum(ids) % 7
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "tasks.jsonl").write_text('"one"\n"two"\n"three"\n')

    def start(steps, *more, resume=False):
        arguments = ["agent.py:agent", "tasks.jsonl", "--reward", "agent.py:reward", "--run-dir", "run"]
        arguments += ["--set", "tasks_per_step=1", "--set", "group_size=4", *more]
        where = tmp_path.parent if resume else tmp_path
        return subprocess.Popen(
            [sys.executable, "-m", "art_core", "train", *(["--resume", str(tmp_path / "run")] if resume else arguments),
             "--steps", str(steps)],
            cwd=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return start


def lines(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_steps(tmp_path, steps, process):
    deadline = time.monotonic() + 120
    while len(lines(tmp_path)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("more", [(), ("--set", "max_staleness=2")], ids=["in turn", "rollouts ahead"])
def test_ctrl_c_leaves_a_usable_run_that_goes_on(tmp_path, command, more):
    process = command(1000, *more)
    wait_for_steps(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "art train --resume run goes on" in said, said
    assert "Traceback" not in said
    done = json.loads((tmp_path / "run" / "report.json").read_text())["steps"]
    assert done == len(lines(tmp_path)) >= 3
    again = command(done + 1, resume=True)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert lines(tmp_path) == list(range(1, done + 2))


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_reaches_its_end(tmp_path, command):
    goal = 12
    for target in (2, 5, 9):
        process = command(goal)
        wait_for_steps(tmp_path, target, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    last = command(goal)
    _, said = last.communicate(timeout=200)
    assert last.returncode == 0, said
    assert lines(tmp_path) == list(range(1, goal + 1))
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == goal
