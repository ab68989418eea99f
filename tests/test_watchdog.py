"""A run that hangs logs what it waits for, and SIGUSR1 shows where; neither changes the run."""

import asyncio
import faulthandler
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

import art_core as art
from art_core.config import TrainConfig
from art_core.loop import watchdog
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def distinct(trajectory):
    return float(int(trajectory.rollout_id[:8], 16))


class Messages(logging.Handler):
    """Keeps what the watchdog logs."""

    def __init__(self):
        super().__init__()
        self.lines, self._changed = [], threading.Condition()

    def emit(self, record):
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, count=1):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, 30), self.lines
        return self.lines[count - 1]

    def wait_for(self, words):
        """Return the first message with these words; on a busy machine others may come before it."""
        count = 1
        while words not in (message := self.wait(count)):
            count += 1
        return message


@pytest.fixture
def messages():
    handler = Messages()
    log = logging.getLogger("art_core.engine.watchdog")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def train(tmp_path, agent, reward=distinct, **settings):
    merged = {"engine": FakeEngine(), "learner": CountingLearner(), "steps": 1, "watchdog_seconds": 0.3, **settings}
    return art.train(
        agent, ["which city"], model="tiny", tasks_per_step=1, group_size=2, reward=reward, run_dir=tmp_path / "run",
        progress=False, **merged,
    )  # fmt: skip


async def message_with(words, training, messages, release):
    """Return the message with these words, logged while the training hangs; then let it end."""
    running = asyncio.create_task(training)
    message = await asyncio.to_thread(messages.wait_for, words)
    release.set()
    assert (await running).report["steps"] == 1
    return message


async def test_an_async_agent_that_hangs_in_a_tool_is_named_with_its_line(tmp_path, messages):
    release = asyncio.Event()

    async def the_tool():
        await release.wait()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await the_tool()

    message = await message_with("in the_tool", train(tmp_path, agent), messages, release)
    assert "waiting for 2 rollouts of step 1" in message and "task 'which city'" in message
    assert "1 model call answered, none in flight: the agent itself is busy" in message
    assert f"at {__file__}:" in message
    assert f"`kill -USR1 {os.getpid()}` writes the stacks" in message and str(tmp_path / "run") in message


async def test_a_sync_agent_that_hangs_in_a_tool_is_named_with_its_line(tmp_path, messages):
    release = threading.Event()

    def the_tool():
        release.wait()

    def agent(task, address):
        body = {"messages": [{"role": "user", "content": task}]}
        httpx.post(f"{address.base_url}/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        the_tool()

    message = await message_with("in the_tool", train(tmp_path, agent), messages, release)
    assert "the agent itself is busy" in message


@pytest.mark.system
async def test_an_agent_that_blocks_the_event_loop_is_named_with_its_line(tmp_path, messages):
    release = threading.Event()
    words, lines = "the event loop, which is blocked at", []
    threading.Thread(target=lambda: (lines.append(messages.wait_for(words)), release.set())).start()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        release.wait()

    await train(tmp_path, agent)
    assert "in agent" in lines[0]


async def test_an_engine_that_hangs_in_a_call_is_named(tmp_path, messages):
    release = asyncio.Event()

    class Hangs(FakeEngine):
        async def chat(self, request):
            while not release.is_set():  # set by another loop's thread
                await asyncio.sleep(0.01)
            return await super().chat(request)

    message = await message_with(
        "the engine has not answered", train(tmp_path, ScriptedAgent(), engine=Hangs()), messages, release
    )
    assert "0 model calls answered, one in flight for" in message


async def test_a_reward_that_hangs_is_named_with_its_task(tmp_path, messages):
    release = asyncio.Event()

    async def slow_judge(trajectory):
        await release.wait()
        return distinct(trajectory)

    message = await message_with(
        "the reward slow_judge to score (for ", train(tmp_path, ScriptedAgent(), slow_judge), messages, release
    )
    assert "task 'which city'" in message


async def test_a_learner_that_hangs_is_named(tmp_path, messages):
    release = threading.Event()

    class Learner(CountingLearner):
        def step(self, trees, *, loss=None):
            release.wait()
            return super().step(trees, loss=loss)

    await message_with(
        "step 1 to be learned (for ", train(tmp_path, ScriptedAgent(), learner=Learner()), messages, release
    )


async def test_a_swap_that_hangs_is_named(tmp_path, messages):
    release = threading.Event()

    class Slow(FakeEngine):
        async def load(self, weights):
            while not release.is_set():
                await asyncio.sleep(0.01)
            await super().load(weights)

    words = "the engine to load the new weights (for "
    await message_with(words, train(tmp_path, ScriptedAgent(), engine=Slow()), messages, release)


async def test_missing_workers_are_named(tmp_path, messages):
    free = asyncio.Event()

    class Places:
        async def __aenter__(self):
            await free.wait()

        async def __aexit__(self, *exc_info):
            pass

    class Workers:
        def adapt(self, agent):
            async def run(task, address):
                return await agent(task, address)

            return run

        def gate(self, agent):
            return Places()

    words = "waiting for a free worker (2, "
    await message_with(words, train(tmp_path, ScriptedAgent(), executor=Workers()), messages, free)


@pytest.mark.system
async def test_warnings_repeat_at_doubling_intervals(tmp_path, messages):
    release, hung = asyncio.Event(), asyncio.Barrier(3)

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await hung.wait()
        await release.wait()

    running = asyncio.create_task(train(tmp_path, agent))
    await hung.wait()
    before = len(messages.lines)
    first, second = [_seconds_of(await asyncio.to_thread(messages.wait, before + number)) for number in (1, 2)]
    release.set()
    await running
    assert second > 1.99 * first


def _seconds_of(message):
    return float(re.search(r"no progress for ([\d.]+) s", message)[1])


class Vmstat:
    """/proc/vmstat of a machine that swaps this many pages per second; None: the file is missing."""

    def __init__(self, rate):
        self.rate = rate

    def read_text(self):
        if self.rate is None:
            raise FileNotFoundError("/proc/vmstat")
        pages = int(self.rate * time.monotonic())
        return f"nr_free_pages 12\npswpin {pages}\npswpout {pages // 2}\n"


@pytest.mark.parametrize(("rate", "reported"), [(10_000, True), (20, False), (None, False)])
async def test_swapping_is_reported_with_advice(tmp_path, messages, monkeypatch, rate, reported):
    monkeypatch.setattr("art_core.runtime.memory.VMSTAT", Vmstat(rate))
    release = asyncio.Event()

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await release.wait()

    message = await message_with("waiting for", train(tmp_path, agent), messages, release)
    assert ("The machine is swapping (" in message) == reported
    assert ("lower max_tokens_per_pass or max_concurrent" in message) == reported


class Slow(FakeEngine):
    """Samples slowly, and counts the tokens."""

    sampled = 0.0

    async def counters(self):
        return {"prompt_tokens": 0.0, "cached_tokens": 0.0, "sampled_tokens": self.sampled}

    async def chat(self, request):
        for _ in range(30):
            self.sampled += 1
            await asyncio.sleep(0.2)
        return await super().chat(request)


@pytest.mark.system
async def test_a_slow_run_that_makes_progress_logs_nothing(tmp_path, messages):
    calls = []

    async def agent(task, address):  # several times longer than the watchdog's patience, call by call
        for _ in range(12):
            calls.append(await ScriptedAgent()(task, address))
            await asyncio.sleep(0.5)

    await train(tmp_path, agent, watchdog_seconds=2)
    assert len(calls) == 24 and not messages.lines


@pytest.mark.system
async def test_a_slow_engine_that_samples_logs_nothing(tmp_path, messages):
    await train(tmp_path, ScriptedAgent(), engine=Slow(), watchdog_seconds=2)
    assert not messages.lines


async def test_an_idle_run_logs_nothing(tmp_path, messages):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), watchdog_seconds=0.05):
        await asyncio.sleep(0.5)
    assert not messages.lines


class Hurried(queue.SimpleQueue):
    """Waits a ten-thousandth of the time."""

    def get(self, timeout=None):
        return super().get(timeout=timeout and timeout / 10_000)


@pytest.mark.parametrize("settings", [{}, {"watchdog_seconds": None}], ids=["default", "None"])
async def test_only_none_turns_it_off(tmp_path, messages, monkeypatch, settings):
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: 10_000 * time.monotonic()))
    monkeypatch.setattr(watchdog, "queue", SimpleNamespace(SimpleQueue=Hurried, Empty=queue.Empty))
    with watchdog.Watchdog(tmp_path, TrainConfig(**settings).watchdog_seconds) as watch, watch.doing("the learner"):
        await asyncio.sleep(0.3)
    assert bool(messages.lines) == (not settings)


AGENT = """
    import time
    from pathlib import Path

    import httpx

    def the_tool():
        if not Path("hung").exists():
            Path("hung").touch()
            while not Path("continue").exists():
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
def test_sigusr1_shows_where_everything_is_and_the_run_finishes(tmp_path):
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
    (tmp_path / "continue").touch()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 2
    assert "Stack (most recent call first)" in stderr and "\nThread 0x" not in stderr, "running threads are not read"
    (file,) = (tmp_path / "run").glob("stacks-*.txt")
    text = file.read_text()
    loop = 1 + AGENT.splitlines().index('            while not Path("continue").exists():')
    assert any(f'agent.py", line {line}, in the_tool' in text for line in (loop, loop + 1))
    assert "thread rollout " in text and "thread MainThread" in text
    serving = text.partition("\nthe serving process\n")[2]
    assert "thread art-capture:" in serving and "in _main" in serving
    assert "in the_tool" in stderr
    assert f"the stacks of all threads and tasks are in run/{file.name}; the run continues" in stderr


async def test_sigusr1_shows_where_an_async_agent_waits(tmp_path, capfd, messages):
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
    message = await asyncio.to_thread(messages.wait)
    release.set()
    await running
    (file,) = (tmp_path / "run").glob("stacks-*.txt")
    assert message == f"the stacks of all threads and tasks are in {file}; the run continues"
    rollouts = [part for part in file.read_text().split("\ntask ") if part.startswith("rollout ")]
    # The group's other rollout may still be in its model call.
    stack = next(part for part in rollouts if "in the_tool\n    await release.wait()" in part)
    assert "in agent\n    await the_tool()" in stack
    assert stack in capfd.readouterr().err


def wait_for(done, process):
    end = time.monotonic() + 120
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


async def test_a_handler_of_the_user_is_left_alone(tmp_path):
    called = asyncio.Event()
    signal.signal(signal.SIGUSR1, lambda *_: called.set())
    try:
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
            signal.raise_signal(signal.SIGUSR1)
            await asyncio.wait_for(called.wait(), 10)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not list((tmp_path / "run").glob("stacks-*"))


async def test_closing_a_run_restores_the_signal(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not faulthandler.unregister(signal.SIGUSR1)


async def test_the_signal_stays_until_the_last_run_is_closed(tmp_path):
    async with art.open_run(tmp_path / "second", engine=FakeEngine(), learner=CountingLearner()):
        async with art.open_run(tmp_path / "first", engine=FakeEngine(), learner=CountingLearner()):
            pass
        signal.raise_signal(signal.SIGUSR1)  # unhandled, it would end the process
        while not list((tmp_path / "second").glob("stacks-*")):
            await asyncio.sleep(0.01)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not list((tmp_path / "first").glob("stacks-*"))


async def test_a_handler_that_the_user_sets_during_the_run_stays(tmp_path):
    def theirs(*_):
        pass

    try:
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()):
            signal.signal(signal.SIGUSR1, theirs)
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)
