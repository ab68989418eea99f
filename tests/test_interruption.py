"""Ctrl-C and kill -9 leave a run that goes on: nothing is missing and nothing is done twice."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from trainings import Place
from typer.testing import CliRunner

import art_core as art
from art_cli.main import app
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine

pytestmark = pytest.mark.system

WITH_A_POOL = """
import asyncio, multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor

import art_core as art
from art_core.testing import CountingLearner, FakeEngine

async def main():
    async with art.open_run(sys.argv[1], engine=FakeEngine(), learner=CountingLearner()):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            print(pool.submit(os.getpid).result(), flush=True)
            pool.submit(time.sleep, 120).result()

asyncio.run(main())
"""


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="in turn", marks=pytest.mark.smoke),
        pytest.param(("--set", "max_staleness=2"), id="rollouts ahead"),
    ],
)
def test_ctrl_c_leaves_a_usable_run_that_goes_on(place, more):
    process = place.start(1000, *more)
    place.reach(3, process)
    process.send_signal(signal.SIGINT)
    status, said = place.ends(process)
    assert status == 130 and "art train --resume run resumes after the last finished step" in said, said
    done = json.loads((place.run_dir / "report.json").read_text())["steps"]
    assert done == len(place.steps) >= 3
    place.goes_on(done + 1, resume=True)


ENDS_ITSELF = """
    import os, signal
    import httpx

    presses = [signal.SIGINT]

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}], "max_tokens": 8}
        httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False)
        while presses:
            os.kill(os.getpid(), presses.pop())

    def reward(trajectory):
        return 0.0
"""


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ((), "art train --resume 'my [own] run' resumes after the last finished step"),
        (("--dry-run",), "the same command repeats the dry run"),
    ],
)
def test_an_interrupted_training_names_the_command_that_goes_on(place, more, hint):
    (place.folder / "agent.py").write_text(textwrap.dedent(ENDS_ITSELF))
    status, said = place.ends(place.start(5, "--run-dir", "my [own] run", *more))
    assert status == 130 and said.endswith(hint), said


async def test_a_forked_child_that_outlives_a_killed_run_does_not_hold_its_folder(tmp_path):
    command = [sys.executable, "-c", WITH_A_POOL, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
                os.kill(worker, 0)  # it is there
        finally:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_reaches_its_end(place):
    goal = 12
    for target in (2, 5, 9):
        process = place.start(goal)
        place.reach(target, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    place.goes_on(goal)
    assert json.loads((place.run_dir / "report.json").read_text())["steps"] == goal


def test_a_run_goes_on_as_it_was_started_last_and_keeps_no_key(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("FROM_THERE", "")
    monkeypatch.delenv("FROM_THERE")
    (place.folder / ".env").write_text("FROM_THERE=yes")
    key = "hf_aKeyThatNobodyKeeps"
    given = [
        "--set",
        "learning_rate=1e-5",
        "--set",
        "tasks_per_step=1",
        "--set",
        f'learner_args={{"env": {{"A_TOKEN": "{key}"}}}}',
    ]
    done = trained(
        "agent.py:agent", "tasks.jsonl", "--reward", "agent.py:reward", "--run-dir", "run", "--steps", "1", *given
    )
    assert done.exit_code == 0, done.output
    assert not [file for file in place.run_dir.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]

    monkeypatch.chdir(place.folder.parent)
    again = ["--resume", str(place.run_dir)]
    assert trained(*again, "--run-dir", "other").exit_code == 2
    refused = trained(*again, "--steps", "2")
    assert isinstance(refused.exception, ConfigError) and "pass them again" in str(refused.exception)
    assert str(refused.exception).endswith("--set learner_args=VALUE")

    monkeypatch.chdir(place.folder.parent)
    changed = (*again, "--steps", "2", "--set", "learner_args={}", "--set", "group_size=2")
    refused = trained(*changed)
    assert isinstance(refused.exception, ConfigError) and "group_size" in str(refused.exception)
    assert f"art train --resume {place.run_dir}" in str(refused.exception)

    monkeypatch.chdir(place.folder.parent)
    done = trained(*changed, "--allow-changes")
    assert done.exit_code == 0 and place.steps == [1, 2], done.output
    assert os.environ["FROM_THERE"] == "yes"
    with Store(place.run_dir / "run.sqlite") as store:
        assert len([it for it in store.rollouts() if it.step == 2]) == 2, "one task, two runs of it"
        assert store.meta("command")["given"]["set_"]["learning_rate"] == 1e-5

    monkeypatch.chdir(place.folder.parent)
    assert trained(*again).exit_code == 0 and place.steps == [1, 2], "the steps that were asked for last"


def trained(*arguments):
    return CliRunner().invoke(app, ["train", *arguments])
