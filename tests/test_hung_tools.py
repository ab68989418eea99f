"""Tools of agents that block and never return: they hold up nobody else, and not the end of the process."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import art_core as art
from art_core.attribution import executor
from art_core.plugin_api import in_thread
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


@pytest.fixture
def release():
    it = threading.Event()
    yield it
    it.set()


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings)


async def test_a_function_that_finds_nothing_in_a_thread_fails_and_is_not_waited_for(tmp_path):
    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await asyncio.to_thread(next, iter(()))

    async with run_of(tmp_path, rollout_timeout=10) as run:
        [group] = await run.collect(agent, ["a"], group_size=1)
    assert group.trajectories[0].error == "RuntimeError: StopIteration was raised: a next() found nothing"
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(next, iter(()))


@pytest.mark.system
async def test_hung_tools_of_some_runs_hold_up_no_later_one(tmp_path, release):
    async def hangs(task, address):
        await ScriptedAgent()(task, address)
        await asyncio.gather(*(asyncio.to_thread(release.wait) for _ in range(executor.THREADS_PER_ROLLOUT + 1)))

    async def works(task, address):
        await ScriptedAgent()(task, address)
        return await asyncio.to_thread(lambda: task)

    async with run_of(tmp_path, max_concurrent=2, rollout_timeout=5) as run:  # which a busy machine needs for ``works``
        hung = await run.collect(hangs, ["a"], group_size=2, key="first")
        assert all("5 s" in it.error for group in hung for it in group.trajectories)
        groups = await asyncio.wait_for(run.collect(works, ["c", "d"], group_size=2, key="second"), 60)
        assert [it.output for group in groups for it in group.trajectories] == ["c", "c", "d", "d"]
        release.set()


async def test_a_rollout_has_as_many_threads_as_places_and_all_its_work_is_done(tmp_path):
    most, now, lock = 0, 0, threading.Lock()

    def tool(number):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        return number

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        return await asyncio.gather(
            *(asyncio.to_thread(tool, number) for number in range(3 * executor.THREADS_PER_ROLLOUT))
        )

    async with run_of(tmp_path) as run:
        [group] = await run.collect(agent, ["a"], group_size=1)
    assert (
        group.trajectories[0].output == list(range(3 * executor.THREADS_PER_ROLLOUT))
        and most <= executor.THREADS_PER_ROLLOUT
    )


HANGS = """
    import asyncio, threading
    import art_core as art
    from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent

    async def agent(task, address):
        await ScriptedAgent()(task, address)
        await asyncio.to_thread(threading.Event().wait)

    limits = {"rollout_timeout": 5}
    found = art.evaluate_sync(agent, ["a"], reward=lambda it: 0.0, model="tiny", engine=FakeEngine(), **limits)
    print(len(found.trajectories))
"""


@pytest.mark.system
def test_a_process_ends_though_a_tool_never_returns(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HANGS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
