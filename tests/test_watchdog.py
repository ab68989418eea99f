"""A run that hangs says what it waits for; SIGUSR1 shows where; neither changes the run."""

import asyncio
import faulthandler
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import pytest

import art_core as art
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def unlike(trajectory):
    return float(int(trajectory.rollout_id[:8], 16))


class Ear(logging.Handler):
    """Hears what the watchdog says."""

    def __init__(self):
        super().__init__()
        self.said, self._changed = [], threading.Condition()

    def emit(self, record):
        with self._changed:
            self.said.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.said) >= count, 30), self.said
        return self.said[count - 1]

    def wait_for(self, words):
        """Return the first message with these words; on a busy machine others may come before it."""
        count = 1
        while words not in (said := self.wait(count)):
            count += 1
        return said

    async def heard(self, count=1):
        return await asyncio.to_thread(self.wait, count)


@pytest.fixture
def ear():
    handler = Ear()
    log = logging.getLogger("art_core.engine.watchdog")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def train(tmp_path, agent, reward=unlike, **settings):
    given = {"engine": FakeEngine(), "learner": CountingLearner(), "steps": 1, "watchdog_seconds": 0.3, **settings}
    return art.train(
        agent, ["which city"], model="tiny", tasks_per_step=1, group_size=2, reward=reward, run_dir=tmp_path / "run",
        progress=False, **given,
    )  # fmt: skip


async def saying(words, training, ear, release):
    """Return the message with these words that comes while the training hangs; it then ends."""
    running = asyncio.create_task(training)
    said = await asyncio.to_thread(ear.wait_for, words)
    release.set()
    result = await running
    assert result.report["steps"] == 1
    return said


async def test_an_async_agent_that_hangs_in_a_tool_is_named_with_its_line(tmp_path, ear):
    release = asyncio.Event()

    async def the_tool():
        await release.wait()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await the_tool()

    said = await saying("in the_tool", train(tmp_path, agent), ear, release)
    assert "waiting for 2 rollouts of step 1" in said and "task 'which city'" in said
    assert "1 model call answered, none in flight: the agent itself is busy" in said
    assert f"at {__file__}:" in said
    assert f"`kill -USR1 {os.getpid()}` writes the stacks" in said and str(tmp_path / "run") in said


async def test_a_sync_agent_that_hangs_in_a_tool_is_named_with_its_line(tmp_path, ear):
    release = threading.Event()

    def the_tool():
        release.wait()

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}]}
        httpx.post(f"{address.base_url}/chat/completions", json=body, trust_env=False).raise_for_status()
        the_tool()

    said = await saying("in the_tool", train(tmp_path, agent), ear, release)
    assert "the agent itself is busy" in said


@pytest.mark.system
async def test_an_agent_that_holds_the_event_loop_is_named_with_its_line(tmp_path, ear):
    release = threading.Event()
    words, said = "the event loop, which is blocked at", []
    threading.Thread(target=lambda: (said.append(ear.wait_for(words)), release.set())).start()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        release.wait()

    await train(tmp_path, agent)
    assert "in agent" in said[0]


async def test_an_engine_that_hangs_in_a_call_is_what_is_waited_for(tmp_path, ear):
    release = asyncio.Event()

    class Hangs(FakeEngine):
        async def chat(self, request):
            while not release.is_set():  # set by another loop's thread
                await asyncio.sleep(0.01)
            return await super().chat(request)

    said = await saying("the engine has not answered", train(tmp_path, ScriptedAgent(), engine=Hangs()), ear, release)
    assert "0 model calls answered, one in flight for" in said


async def test_a_reward_that_hangs_is_named_with_its_task(tmp_path, ear):
    release = asyncio.Event()

    async def slow_judge(trajectory):
        await release.wait()
        return unlike(trajectory)

    said = await saying(
        "the reward slow_judge to score (for ", train(tmp_path, ScriptedAgent(), slow_judge), ear, release
    )
    assert "task 'which city'" in said


async def test_a_learner_and_a_swap_that_hang_are_named(tmp_path, ear):
    release = threading.Event()

    class Learner(CountingLearner):
        def step(self, trees, *, loss=None):
            release.wait()
            return super().step(trees, loss=loss)

    await saying("step 1 to be learnt (for ", train(tmp_path, ScriptedAgent(), learner=Learner()), ear, release)


async def test_weights_that_are_not_taken_are_named(tmp_path, ear):
    release = threading.Event()

    class Slow(FakeEngine):
        async def load(self, weights):
            while not release.is_set():
                await asyncio.sleep(0.01)
            await super().load(weights)

    words = "the engine to load the new weights (for "
    await saying(words, train(tmp_path, ScriptedAgent(), engine=Slow()), ear, release)


async def test_workers_that_are_gone_are_what_is_waited_for(tmp_path, ear):
    there = asyncio.Event()

    class Places:
        async def __aenter__(self):
            await there.wait()

        async def __aexit__(self, *exc_info):
            pass

    class Workers:
        def adapt(self, agent):
            async def run(given, address):
                return await agent(given, address)

            return run

        def gate(self, agent):
            return Places()

    words = "waiting for a free worker (2, "
    await saying(words, train(tmp_path, ScriptedAgent(), executor=Workers()), ear, there)


@pytest.mark.system
async def test_it_is_said_again_at_doubling_intervals(tmp_path, ear):
    release, hung = asyncio.Event(), asyncio.Barrier(3)

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await hung.wait()
        await release.wait()

    running = asyncio.create_task(train(tmp_path, agent))
    await hung.wait()
    before = len(ear.said)
    first, second = [_seconds_of(await ear.heard(before + number)) for number in (1, 2)]
    release.set()
    await running
    assert second > 1.99 * first


def _seconds_of(message):
    return float(re.search(r"no progress for ([\d.]+) s", message)[1])


class Vmstat:
    """What /proc/vmstat says on a machine that swaps so many pages per second; None: there is no such file."""

    def __init__(self, rate):
        self.rate = rate

    def read_text(self):
        if self.rate is None:
            raise FileNotFoundError("/proc/vmstat")
        pages = int(self.rate * time.monotonic())
        return f"nr_free_pages 12\npswpin {pages}\npswpout {pages // 2}\n"


@pytest.mark.parametrize(("rate", "named"), [(10_000, True), (20, False), (None, False)])
async def test_a_machine_that_swaps_is_named_with_what_to_do(tmp_path, ear, monkeypatch, rate, named):
    monkeypatch.setattr("art_core.runtime.memory.VMSTAT", Vmstat(rate))
    release = asyncio.Event()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await release.wait()

    said = await saying("waiting for", train(tmp_path, agent), ear, release)
    assert ("The machine is swapping (" in said) == named
    assert ("lower max_tokens_per_pass or max_concurrent" in said) == named


class Slow(FakeEngine):
    """Answers in its time, and counts what it samples."""

    sampled = 0.0

    async def counters(self):
        return {"prompt_tokens": 0.0, "cached_tokens": 0.0, "sampled_tokens": self.sampled}

    async def chat(self, request):
        for _ in range(30):
            self.sampled += 1
            await asyncio.sleep(0.2)
        return await super().chat(request)


@pytest.mark.system
async def test_a_run_that_is_slow_but_moves_says_nothing(tmp_path, ear):
    calls = []

    async def agent(task, address):  # several times longer than the watchdog's patience, call by call
        for _ in range(12):
            calls.append(await ScriptedAgent()(task, address))
            await asyncio.sleep(0.5)

    await train(tmp_path, agent, watchdog_seconds=2)
    assert len(calls) == 24 and not ear.said


@pytest.mark.system
async def test_an_engine_that_is_slow_but_samples_says_nothing(tmp_path, ear):
    await train(tmp_path, ScriptedAgent(), engine=Slow(), watchdog_seconds=2)
    assert not ear.said


async def test_a_run_that_nobody_asks_for_anything_says_nothing(tmp_path, ear):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), watchdog_seconds=0.05):
        await asyncio.sleep(0.5)
    assert not ear.said


async def test_none_switches_it_off(tmp_path, ear):
    release = asyncio.Event()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await release.wait()

    running = asyncio.create_task(train(tmp_path, agent, watchdog_seconds=None))
    await asyncio.sleep(0.5)
    release.set()
    await running
    assert not ear.said


AGENT = """
    import time
    from pathlib import Path

    import httpx

    def the_tool():
        if not Path("hung").exists():
            Path("hung").touch()
            while not Path("go-on").exists():
                time.sleep(0.02)

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}], "max_tokens": 8}
        httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False)
        the_tool()

    def reward(trajectory):
        ids = trajectory.calls[0].sampled_ids if trajectory.calls else ()
        return sum(ids) % 7
"""


@pytest.mark.system
def test_sigusr1_shows_where_everything_is_and_the_run_reaches_its_end(tmp_path):
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "tasks.jsonl").write_text('"one"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "art_cli", "train", "agent.py:agent", "tasks.jsonl", "--reward", "agent.py:reward",
         "--run-dir", "run", "--steps", "2", "--set", "tasks_per_step=1", "--set", "group_size=2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "hung").exists(), process)
    os.killpg(process.pid, signal.SIGUSR1)  # the serving process gets it too, and lives
    wait_for(lambda: list((tmp_path / "run").glob("stacks-*.txt")), process)
    (tmp_path / "go-on").touch()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 2
    assert "Stack (most recent call first)" in said and "\nThread 0x" not in said, "threads are not read while they run"
    (file,) = (tmp_path / "run").glob("stacks-*.txt")
    text = file.read_text()
    loop = 1 + AGENT.splitlines().index('            while not Path("go-on").exists():')
    assert any(f'agent.py", line {line}, in the_tool' in text for line in (loop, loop + 1))
    assert "thread rollout " in text and "thread MainThread" in text
    serving = text.partition("\nthe serving process\n")[2]
    assert "thread art-capture:" in serving and "in _main" in serving
    assert (
        "in the_tool" in said
        and f"the stacks of all threads and tasks are in run/{file.name}; the run continues" in said
    )


async def test_sigusr1_shows_where_an_async_agent_waits(tmp_path, capfd, ear):
    release, hung = asyncio.Event(), asyncio.Event()

    async def the_tool():
        hung.set()
        await release.wait()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await the_tool()

    running = asyncio.create_task(train(tmp_path, agent, watchdog_seconds=None))
    await hung.wait()
    signal.raise_signal(signal.SIGUSR1)
    said = await ear.heard()
    release.set()
    await running
    (file,) = (tmp_path / "run").glob("stacks-*.txt")
    assert said == f"the stacks of all threads and tasks are in {file}; the run continues"
    of_runs = [part for part in file.read_text().split("\ntask ") if part.startswith("rollout ")]
    # The other run of the group may still be in its call of the model.
    (of_run, *_) = [it for it in of_runs if "in the_tool\n    await release.wait()" in it]
    assert "in agent\n    await the_tool()" in of_run
    assert of_run in capfd.readouterr().err


def wait_for(done, process):
    end = time.monotonic() + 120
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


async def test_a_handler_of_the_users_own_is_left_alone(tmp_path):
    asked = asyncio.Event()
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    try:
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
            signal.raise_signal(signal.SIGUSR1)
            await asyncio.wait_for(asked.wait(), 10)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not list((tmp_path / "run").glob("stacks-*"))


async def test_the_signal_is_as_it_was_when_a_run_is_closed(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not faulthandler.unregister(signal.SIGUSR1)


async def test_the_signal_stays_until_the_last_run_is_closed(tmp_path):
    async with art.open_run(tmp_path / "second", engine=FakeEngine(), learner=CountingLearner()):
        async with art.open_run(tmp_path / "first", engine=FakeEngine(), learner=CountingLearner()):
            pass
        signal.raise_signal(signal.SIGUSR1)  # by itself it ends the process
        while not list((tmp_path / "second").glob("stacks-*")):
            await asyncio.sleep(0.01)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not list((tmp_path / "first").glob("stacks-*"))


async def test_a_handler_that_the_user_sets_meanwhile_stays(tmp_path):
    def theirs(*_):
        pass

    try:
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
            signal.signal(signal.SIGUSR1, theirs)
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)
