"""``executor="ray"``: what an agent's run gives, where it is lost, cancelled, or cannot travel."""

import asyncio
import itertools
import os
import sys
from pathlib import Path

import pytest
import pytest_asyncio

import art_core as art
from art_core.errors import AgentError, ConfigError
from art_core.testing import CountingLearner, FakeEngine
from art_ray import RayExecutor

HERE = Path(__file__).parent
sys.path.append(str(HERE))
import ray_agents  # noqa: E402

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


def run_of(tmp_path, **settings):
    settings = {"executor": "ray", "executor_args": {"workers": 2}, **settings}
    return art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(local_ray, tmp_path_factory):
    """A run with two processes, which take seconds to start."""
    async with run_of(tmp_path_factory.mktemp("on-ray")) as run:
        yield run
    assert local_ray.is_initialized()  # who has initialised it shuts it down


async def runs(run, agent, task="a", count=4):
    [group] = await run.collect(agent, [task], group_size=count)
    return group.trajectories


@pytest.mark.system
async def test_runs_are_spread_over_processes_and_every_call_is_recorded(run):
    found = await runs(run, ray_agents.saying, count=8)
    assert all(t.output.startswith("a, said ") and len(t.calls) == 1 for t in found)
    workers = {int(t.output.split()[-1]) for t in found}
    assert len(workers) == 2 and os.getpid() not in workers


async def test_blocking_agents_have_threads_of_their_own(run):
    found = await runs(run, ray_agents.blocking, count=8)
    times = sorted(t.output for t in found)
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(times))


async def test_an_agents_exception_reads_as_it_does_at_home(run, tmp_path):
    [there] = await runs(run, ray_agents.failing, count=1)
    async with run_of(tmp_path, executor=None) as at_home:
        [here] = await runs(at_home, ray_agents.failing, count=1)
    assert there.error == here.error and there.error.startswith("KeyError: ")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("exits", "SystemExit: enough"),
        ("panics", "Panic: its text can't be read: TypeError in __str__"),
        ("cancelled", "RuntimeError: CancelledError was raised: it awaited something that was cancelled"),
    ],
)
async def test_an_agent_that_raises_anything_has_failed_and_takes_nobody_with_it(run, task, said):
    found = await runs(run, ray_agents.leaving, task=task, count=2)
    assert [t.error for t in found] == [said] * 2


async def test_an_output_that_cannot_be_pickled_is_what_the_store_would_keep(run):
    [found] = await runs(run, ray_agents.unpickled, count=1)
    assert found.output == {"found": "what was found", "n": 1}


@pytest.mark.system
async def test_the_runs_of_a_killed_process_are_made_again_under_new_addresses(run, tmp_path):
    found = await runs(run, ray_agents.murdered, task=str(tmp_path), count=6)
    assert all(t.error is None and len(t.calls) == 1 for t in found) and len(found) == 6
    stored = [it for it in run.store.rollouts() if it.task == str(tmp_path)]
    lost = [it.error for it in stored if it.error]
    assert lost and all(error.startswith("RolloutLost: the Ray worker that ran the agent is gone") for error in lost)
    assert len(stored) == 6 + len(lost) and len({it.rollout_id for it in stored}) == len(stored)


async def test_a_run_that_is_cancelled_is_cancelled_where_it_runs(run, tmp_path):
    collecting = asyncio.ensure_future(runs(run, ray_agents.waiting, task=str(tmp_path), count=2))
    async with asyncio.timeout(20):
        while len(list(tmp_path.glob("begun-*"))) < 2:
            await asyncio.sleep(0.05)
        collecting.cancel()
        while len(list(tmp_path.glob("cancelled-*"))) < 2:
            await asyncio.sleep(0.05)
    await asyncio.wait([collecting])


@pytest.mark.parametrize("name", ["ray_agents:made", f"{HERE / 'ray_agents.py'}:made"])
async def test_an_agent_is_made_on_the_workers_by_its_name(run, name):
    assert [t.output for t in await runs(run, name, count=2)] == ["a what was found"] * 2


async def test_an_agent_that_cannot_be_sent_says_how_it_can():
    with pytest.raises(AgentError, match=r"can't be sent to other processes: TypeError: not me.*MODULE:NAME"):
        RayExecutor(art.TrainConfig()).adapt(ray_agents.made())
    with pytest.raises(AgentError, match="'my agent' doesn't name an agent"):
        RayExecutor(art.TrainConfig()).adapt("my agent")
    with pytest.raises(AgentError, match="no installed plugin adapts"):
        RayExecutor(art.TrainConfig()).adapt(3)


class Nodes:
    """A cluster of other machines."""

    here = "10.0.0.1"

    def __init__(self, *others):
        self.nodes = [{"NodeManagerAddress": address} for address in (self.here, *others)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
async def test_an_address_that_other_nodes_cannot_reach_is_refused(host):
    executor = RayExecutor(art.TrainConfig(host=host))
    executor.check_address(Nodes())
    with pytest.raises(ConfigError, match=r"other nodes.*can't reach.*10\.0\.0\.2.*pass host='10\.0\.0\.1'"):
        executor.check_address(Nodes("10.0.0.2"))
    RayExecutor(art.TrainConfig(host="10.0.0.1")).check_address(Nodes("10.0.0.2"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wrokers": 2}, "did you mean 'workers'"),
        ({"workers": 0}, "workers must be an integer >= 1, got 0"),
        ({"cpus": "two"}, "cpus must be a number >= 0, got 'two'"),
        ({"runtime_env": "x"}, "runtime_env must be a dict for ray.init, got 'x'"),
    ],
)
async def test_options_that_cannot_be_used_are_refused_before_anything_runs(given, said):
    with pytest.raises(ConfigError, match=said):
        RayExecutor(art.TrainConfig(executor_args=given)).adapt(ray_agents.saying)


@pytest.mark.smoke
@pytest.mark.system
async def test_a_cluster_without_room_says_who_asks_for_what(local_ray, tmp_path):
    args = {"workers": 1, "cpus": 100, "start_seconds": 1}
    with pytest.raises(ConfigError, match=r"started none of 1 agent processes.*100 of the cluster's 4 CPUs"):
        async with run_of(tmp_path, executor_args=args):
            pass
