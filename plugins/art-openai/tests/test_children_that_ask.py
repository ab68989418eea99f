"""What an agent's child processes ask the OpenAI client for lands at its rollout's address."""

import asyncio
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import art_core as art
import art_openai
from art_core.attribution import run_in_child_processes, workers
from art_core.testing import CountingLearner, FakeEngine

# Newer Pythons warn of every fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SCRIPT = Path(__file__).with_name("agent_in_a_child.py")
METHODS = multiprocessing.get_all_start_methods()

art_openai.redirect_clients()
run_in_child_processes(art_openai.redirect_clients)


@pytest.fixture
def agent(monkeypatch):
    """The agent's module, which its children find by its name."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    yield importlib.import_module(SCRIPT.stem)
    sys.modules.pop(SCRIPT.stem)


@pytest.fixture(autouse=True)
def own_provider(stub, monkeypatch):
    """Where children ask that belong to no rollout."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stub.url}/own/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "agent")


@pytest.mark.smoke
@pytest.mark.system
async def test_a_script_asks_at_the_address_in_its_environment_and_concurrent_ones_stay_apart(stub):
    async def run(rollout_id: str) -> str:
        with stub.rollout(rollout_id):
            process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, stdout=subprocess.PIPE)
            return (await process.communicate())[0].decode().strip()

    assert await asyncio.gather(run("r1"), run("r2")) == ["answer of r1", "answer of r2"]
    assert subprocess.check_output([sys.executable, SCRIPT], text=True).strip() == "answer of outside"
    assert {asked.headers["authorization"] for asked in stub.of("r1")} == {"Bearer key-r1"}
    assert os.environ["OPENAI_API_KEY"] == "agent"


@pytest.mark.system
@pytest.mark.parametrize("method", METHODS)
def test_a_python_child_is_recorded_though_its_client_has_a_base_url_of_its_own(stub, agent, method):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    with stub.rollout("one"):
        process = context.Process(target=agent.send, args=(there, f"{stub.url}/own/v1"))
        process.start()
        assert here.recv() == "answer of one"
        process.join()
    assert process.exitcode == 0


@pytest.mark.system
@pytest.mark.parametrize("method", METHODS)
async def test_rollouts_that_share_a_pool_of_processes_stay_apart(stub, agent, method):
    loop, own = asyncio.get_running_loop(), f"{stub.url}/own/v1"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        assert pool.submit(agent.ask, own).result() == "answer of outside"

        async def run(rollout_id: str) -> list[str]:
            with stub.rollout(rollout_id):
                return await asyncio.gather(*(loop.run_in_executor(pool, agent.ask, own) for _ in range(2)))

        ids = [f"r{i}" for i in range(4)]
        assert await asyncio.gather(*map(run, ids)) == [[f"answer of {one}"] * 2 for one in ids]
        assert pool.submit(agent.ask, own).result() == "answer of outside"


@pytest.mark.system
async def test_a_real_runs_spawned_children_are_recorded_with_the_installed_plugins(tmp_path, agent, monkeypatch):
    monkeypatch.setattr(workers, "_preparations", [])
    context = multiprocessing.get_context("spawn")

    def starts_a_process(task: str) -> str:
        here, there = context.Pipe()
        process = context.Process(target=agent.send, args=(there, "http://127.0.0.1:9/v1"))
        process.start()
        there.close()  # so that a child that fails is told at once
        answer = here.recv()
        process.join()
        return answer

    engine = FakeEngine(lambda request: request["messages"][0]["content"])
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner()) as run:
        (group,) = await run.collect(starts_a_process, ["task"], group_size=2)
    assert [t.output for t in group.trajectories] == ["hello", "hello"]
    assert [len(t.calls) for t in group.trajectories] == [1, 1]
