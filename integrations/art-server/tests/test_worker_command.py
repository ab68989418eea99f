"""``art worker`` as a process: how it begins, how Ctrl-C ends it, and what it says."""

import asyncio
import signal
import time

import pytest
from fault_setting import Setting

import art_server

pytestmark = pytest.mark.system

AGENTS = """
import asyncio, os, time
from pathlib import Path
import openai

def _ask(task):
    client = openai.OpenAI(api_key="x")
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}]).choices[0].message.content

async def until_told(task):
    answer = await asyncio.to_thread(_ask, task)
    Path(f"begun-{os.getpid()}").touch()
    while not Path("go on").exists():
        await asyncio.sleep(0.02)
    return answer

def hangs(task):
    Path(f"begun-{os.getpid()}").touch()
    time.sleep(3600)

def quick(task):
    return _ask(task)

def broken():
    raise ValueError("no such model")
broken.agent = broken()
"""


@pytest.fixture
async def setting(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS.partition("broken.agent")[0])
    (tmp_path / "bad.py").write_text(AGENTS)
    async with Setting(tmp_path, lease=60) as setting:
        yield setting


async def ended(process, seconds=60):
    return await asyncio.wait_for(asyncio.to_thread(process.wait), seconds)


async def until(true, seconds=60):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.02)


async def serving(setting):
    setting.start_server()
    await setting.served()


async def collecting(setting, first):
    """A collection that ``first`` has begun to run."""
    await setting.connected(1)
    run = await art_server.connect(setting.proxy.url).__aenter__()
    collect = asyncio.create_task(run.collect(None, ["a"], group_size=2, key="c"))
    await until(lambda: (setting.folder / f"begun-{first.pid}").exists())
    return run, collect


@pytest.mark.timeout(240)
async def test_ctrl_c_once_ends_what_runs_and_twice_gives_it_back(setting):
    await serving(setting)
    first = setting.start_worker("first", str(setting.folder / "agents.py:until_told"))
    run, collect = await collecting(setting, first)
    first.send_signal(signal.SIGINT)
    await asyncio.sleep(0.5)
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert await ended(first) == 130
    second = setting.start_worker("second", str(setting.folder / "agents.py:until_told"))
    await until(lambda: (setting.folder / f"begun-{second.pid}").exists())  # long before the lease would have ended
    second.send_signal(signal.SIGINT)
    await asyncio.sleep(0.5)
    assert second.poll() is None
    (setting.folder / "go on").touch()
    [group] = await asyncio.wait_for(collect, 30)
    assert [t.error for t in group.trajectories] == [None, None]
    assert await ended(second) == 0
    await run.__aexit__()


@pytest.mark.timeout(240)
async def test_an_agent_that_cannot_be_cancelled_keeps_neither_its_worker_nor_its_runs(setting):
    await serving(setting)
    first = setting.start_worker("first", str(setting.folder / "agents.py:hangs"))
    run, collect = await collecting(setting, first)
    first.send_signal(signal.SIGINT)
    await asyncio.sleep(0.5)
    first.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert await ended(first) == 130
    assert time.monotonic() - begun < 20
    setting.start_worker("second", str(setting.folder / "agents.py:quick"))
    [group] = await asyncio.wait_for(collect, 60)
    assert [t.error for t in group.trajectories] == [None, None]
    await run.__aexit__()


@pytest.mark.timeout(240)
async def test_the_first_of_two_workers_of_a_name_ends_with_the_reason(setting):
    await serving(setting)
    first = setting.start_worker("same", str(setting.folder / "agents.py:quick"))
    await setting.connected(1)
    setting.start_worker("same", str(setting.folder / "agents.py:quick"))
    assert await ended(first) == 1
    assert "start each worker with its own --id" in setting.log("same")
    assert "Traceback" not in setting.log("same")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("agent", "said"),
    [("bad.py:broken", "no such model"), ("agents.py:nobody", "nobody"), ("none.py:agent", "none.py")],
)
async def test_an_agent_that_cannot_be_loaded_ends_the_worker_before_it_connects(setting, agent, said):
    worker = setting.start_worker("w", str(setting.folder / agent))
    assert await ended(worker) not in (0, 130)
    assert said in setting.log("w")


@pytest.mark.timeout(240)
async def test_the_server_ends_by_ctrl_c_while_a_collection_runs_and_goes_on_with_it(setting):
    await serving(setting)
    first = setting.start_worker("first", str(setting.folder / "agents.py:until_told"))
    run, collect = await collecting(setting, first)
    await asyncio.to_thread(setting.kill_server, signal.SIGINT)
    assert setting.server.returncode in (0, -signal.SIGINT, 130)
    (setting.folder / "go on").touch()
    await serving(setting)
    [group] = await asyncio.wait_for(collect, 60)
    assert [t.error for t in group.trajectories] == [None, None]
    assert "resuming job c" in setting.log("server")
    assert len(setting.log("server").splitlines()) < 40, setting.log("server")
    await run.__aexit__()
