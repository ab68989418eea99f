"""What a process that ended has left of a run is used by the next one: nothing is asked of the policy twice."""

import asyncio
import itertools
import logging
import random
import shutil

import httpx
import numpy as np
import pytest
from capture_fakes import chat

import art_core as art
from art_core.errors import StoreError
from art_core.loop.checkpoints import best_step
from art_core.store import Store
from art_core.testing import FakeEngine
from art_core.types import Call

TASKS = ["a", "b"]


def engine():
    """An engine that never says the same twice, nor anything as long as before."""
    said = itertools.count()
    return FakeEngine(lambda request: f"answer {random.random()}, {'x' * next(said)}")


class Talk:
    """An agent that asks three times, each time with all that was said; ``cut`` (task, turn) it never gets further than."""

    def __init__(self, cut=None, output=list, salt=""):
        self.cut, self.output, self.salt = cut, output, salt
        self.stopped = asyncio.Event()

    async def __call__(self, task, address):
        messages = [{"role": "system", "content": f"be kind{self.salt}"}]
        async with httpx.AsyncClient(timeout=60) as client:
            for turn in range(3):
                if self.cut == (task, turn):
                    self.stopped.set()
                    await asyncio.Event().wait()
                messages.append({"role": "user", "content": f"{task}, turn {turn}"})
                answer = await client.post(f"{address.base_url}/chat/completions", json={"messages": messages})
                messages.append(answer.json()["choices"][0]["message"])
        return self.output(message["content"] for message in messages)


async def cut_off(run_dir, agent, **settings):
    """Collect until the agent is stuck, and leave the run as a process that dies there does."""
    served = engine()
    async with art.open_run(run_dir, engine=served) as run:
        collecting = asyncio.create_task(run.collect(agent, TASKS, group_size=2, key="k", **settings))
        await agent.stopped.wait()
        await asyncio.sleep(0.3)  # the other runs come to their end
        run.store.finish_rollout, finish = lambda *_, **__: None, run.store.finish_rollout
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        run.store.finish_rollout = finish
    return served


async def go_on(run_dir, agent, **settings):
    served = engine()
    async with art.open_run(run_dir, engine=served) as run:
        return served, await run.collect(agent, TASKS, group_size=2, key="k", **settings)


@pytest.mark.smoke
@pytest.mark.system
async def test_runs_that_were_cut_off_go_on_from_their_last_answer(tmp_path):
    before = await cut_off(tmp_path, Talk(cut=("b", 2)))
    assert len(before.requests) == 2 * 3 + 2 * 2
    after, groups = await go_on(tmp_path, Talk())
    assert len(after.requests) == 2, "only the last turns of the runs of b are left"
    with Store(tmp_path / "run.sqlite") as store:
        first = [it for it in store.rollouts() if not it.finished]
        had = sorted(store.calls(it.rollout_id)[1].sampled_ids for it in first)
    assert sorted(t.calls[1].sampled_ids for t in groups[1].trajectories) == had and len(set(had)) == 2
    for trajectory in itertools.chain(*(group.trajectories for group in groups)):
        assert [m["content"] for m in trajectory.messages()] == trajectory.output
        assert len(trajectory.calls) == 3 and trajectory.error is None


@pytest.mark.system
async def test_a_run_that_was_cut_off_twice_has_no_answer_twice(tmp_path):
    await cut_off(tmp_path, Talk(cut=("b", 1)))
    second = Talk(cut=("b", 2))
    await cut_off(tmp_path, second)
    after, groups = await go_on(tmp_path, Talk())
    assert len(after.requests) == 2
    sampled = [call.sampled_ids for t in groups[1].trajectories for call in t.calls]
    assert len(set(sampled)) == len(sampled) == 6


@pytest.mark.system
async def test_an_agent_that_asks_otherwise_is_answered_anew(tmp_path):
    await cut_off(tmp_path, Talk(cut=("b", 2)))
    after, groups = await go_on(tmp_path, Talk(salt="er"))
    assert len(after.requests) == 2 * 3
    assert all(len(t.calls) == 3 for t in groups[1].trajectories)


async def test_an_output_that_json_cannot_say_is_made_again_with_the_same_answers(tmp_path):
    before, _ = await go_on(tmp_path, Talk(output=tuple))
    after, groups = await go_on(tmp_path, Talk(output=tuple))
    assert len(before.requests) == 12 and after.requests == []
    assert all(isinstance(t.output, tuple) for group in groups for t in group.trajectories)


@pytest.mark.system
async def test_what_a_reward_has_scored_is_read_with_its_scores_and_another_reward_scores_anew(tmp_path):
    def length(trajectory):
        return len(trajectory.output)

    async with art.open_run(tmp_path, engine=engine()) as run:
        groups = await run.collect(Talk(output=tuple), TASKS, group_size=2, key="k")
        await run.score(groups, length)
    after, groups = await go_on(tmp_path, Talk(output=tuple), scored_by="length")
    assert after.requests == [] and [t.reward for g in groups for t in g.trajectories] == [7.0] * 4
    _, groups = await go_on(tmp_path, Talk(output=tuple), scored_by="other")
    assert [t.reward for g in groups for t in g.trajectories] == [None] * 4


async def test_what_another_reward_said_of_single_calls_is_forgotten_if_a_group_is_scored_anew(tmp_path):
    def of_calls(trajectory):
        trajectory.call_rewards[0] = 1.0
        return 0.0

    async with art.open_run(tmp_path, engine=engine()) as run:
        await run.score(await run.collect(Talk(), TASKS, group_size=2, key="k"), of_calls)
    async with art.open_run(tmp_path, engine=engine()) as run:
        groups = await run.collect(Talk(), TASKS, group_size=2, key="k", scored_by="other")
        groups = await run.score(groups, lambda trajectory: 0.0)
        stored = [run.store.trajectory(t.rollout_id) for group in groups for t in group.trajectories]
    made = [t for group in groups for t in group.trajectories]
    assert [[call.reward for call in t.calls] for t in made + stored] == [[None] * 3] * 8


class UpstreamError(Exception):
    """An agent's own error, under the name of one that says that a run was not recorded."""


@pytest.mark.parametrize("error", [ValueError, UpstreamError])
async def test_a_scored_group_stays_as_it_is_where_a_run_of_it_failed_before_its_first_call(tmp_path, error):
    talk, runs = Talk(), itertools.count()

    async def agent(task, address):
        if next(runs) == 0:
            raise error("the tool is down")
        return await talk(task, address)

    async def collect(served):
        async with art.open_run(tmp_path, engine=served) as run:
            groups = await run.collect(agent, ["a"], group_size=3, key="k", scored_by="failed")
            return [
                (t.rollout_id, t.error, t.reward) for t in (await run.score(groups, failed))[0].trajectories
            ], groups

    def failed(trajectory):
        return float(trajectory.error is not None)

    before, _ = await collect(engine())
    after, groups = await collect(served := engine())
    assert after == before and sorted(it[2] for it in before) == [0.0, 0.0, 1.0]
    assert served.requests == [] and next(runs) == 3
    assert [t.reward for t in groups[0].trajectories] == [it[2] for it in before]


async def test_other_tasks_under_the_same_key_are_run(tmp_path):
    await go_on(tmp_path, Talk())
    async with art.open_run(tmp_path, engine=(served := engine())) as run:
        groups = await run.collect(Talk(), ["c", "b"], group_size=2, key="k")
    assert len(served.requests) == 6 and groups[0].task == "c"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_given_again_is_the_same_to_the_client_and_in_the_ledger(tmp_path, stream):
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    served = FakeEngine({"content": None, "tool_calls": [call]})
    request = chat(
        "find x", n=2, stream=stream, temperature=0.5, tools=[{"type": "function", "function": {"name": "s"}}]
    )
    if stream:
        request["stream_options"] = {"include_usage": True}
    said, calls = [], []
    async with art.open_run(tmp_path, engine=served) as run, httpx.AsyncClient(timeout=60) as client:
        rollout_id = None
        for _ in range(2):
            async with run.rollout("t", continues=rollout_id) as rollout:
                answer = await client.post(f"{rollout.base_url}/chat/completions", json=request)
            rollout_id = rollout.rollout_id
            said.append(answer.text.count("call_1") and answer.text.count("prompt_tokens"))
            calls.append([(c.prompt_ids, c.sampled_ids, c.logprobs, c.response) for c in rollout.trajectory.calls])
            assert [c.finish_reason for c in rollout.trajectory.calls] == ["tool_calls"] * 2
    assert len(served.requests) == 1 and calls[0] == calls[1] and said[0] == said[1] == 1


def weights(run_dir, step):
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.system
@pytest.mark.parametrize("more", [{}, {"dynamic_sampling": True}, {"max_staleness": 1}], ids=str)
async def test_steps_that_are_lost_are_taken_again_from_the_stored_runs_to_the_bit(tmp_path, more):
    """A crash between a step and its checkpoint: nothing is sampled again, and the weights are the same."""

    def reward(trajectory):
        return float(len(trajectory.calls[-1].sampled_ids))

    async def train(served):
        await art.train(
            Talk(), TASKS, model="tiny", reward=reward, steps=4, tasks_per_step=2, group_size=3, engine=served, learner="torch",
            run_dir=tmp_path, keep_checkpoints=None, max_logprob_gap=None, progress=False, **more,
        )  # fmt: skip

    await train(engine())
    before = [weights(tmp_path, step) for step in (3, 4)]
    for step in (3, 4):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:06d}")
    again = engine()
    await train(again)
    assert again.requests == [] and [weights(tmp_path, step) for step in (3, 4)] == before
    assert before[0] != before[1]


def damage(folder):
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


async def steps_of(run_dir, count, **settings):
    async with art.open_run(run_dir, engine=engine(), learner="torch", keep_checkpoints=None, **settings) as run:
        begun = run.step
        for step in range(begun, count):
            calls = [Call((1, 2), (3 + step, at), (-1.0, -2.0), policy_version=run.version) for at in range(2)]
            runs = [art.Trajectory(task="t", calls=(call,), reward=float(at)) for at, call in enumerate(calls)]
            await run.learn([art.Group("t", tuple(runs))])
        return begun


@pytest.mark.system
def test_the_newest_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog):
    assert asyncio.run(steps_of(tmp_path, 3)) == 0
    damage(tmp_path / "checkpoints" / "step-000003")
    with caplog.at_level(logging.WARNING, "art_core.run"):
        assert asyncio.run(steps_of(tmp_path, 3)) == 2
    assert "SHA-256 differs" in caplog.text and "step-000003.damaged" in caplog.text
    assert sorted(it.name for it in (tmp_path / "checkpoints").iterdir()) == [
        "step-000001", "step-000002", "step-000003", "step-000003.damaged",
    ]  # fmt: skip


@pytest.mark.system
def test_what_a_kill_left_of_writing_a_checkpoint_is_put_right_before_the_run_goes_on(tmp_path):
    asyncio.run(steps_of(tmp_path, 2))
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "step-000001", checkpoints / ".step-000001.replaced")  # killed after the new one came
    (checkpoints / "step-000002").rename(checkpoints / ".step-000002.replaced")  # killed before it did
    (checkpoints / ".step-000002.unfinished").mkdir()
    (checkpoints / ".step-000002.unfinished" / "model.safetensors").write_bytes(b"half")
    assert asyncio.run(steps_of(tmp_path, 2)) == 2
    assert sorted(it.name for it in checkpoints.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.system
async def test_a_step_is_checkpointed_once(tmp_path):
    await steps_of(tmp_path, 2)
    saved = (tmp_path / "checkpoints" / "step-000002").stat().st_ino
    async with art.open_run(tmp_path, engine=engine(), learner="torch") as run:
        assert (await run.checkpoint()).stat().st_ino == saved
        assert (await run.checkpoint()).stat().st_ino == saved


@pytest.mark.system
def test_a_run_of_which_no_checkpoint_is_whole_says_so_and_begins_with_the_start_weights_then(tmp_path):
    asyncio.run(steps_of(tmp_path, 2))
    for folder in (tmp_path / "checkpoints").iterdir():
        damage(folder)
    with pytest.raises(StoreError, match=r"no checkpoint of .* is intact"):
        asyncio.run(steps_of(tmp_path, 2))
    assert asyncio.run(steps_of(tmp_path, 2)) == 0


def test_the_generators_of_python_and_numpy_go_on_where_the_checkpoint_was_made(tmp_path):
    random.seed(5)
    np.random.seed(5)
    asyncio.run(steps_of(tmp_path, 1))
    drawn = random.random(), np.random.random(), random.gauss(0, 1)
    random.seed(6)
    asyncio.run(steps_of(tmp_path, 1))
    assert (random.random(), np.random.random(), random.gauss(0, 1)) == drawn


def test_the_best_checkpoint_outlives_newer_ones(tmp_path):
    async def learn():
        async with art.open_run(tmp_path, engine=engine(), learner="torch", keep_checkpoints=2) as run:
            for step in range(1, 6):
                calls = [Call((1, 2), (3 + step, at), (-1.0, -2.0), policy_version=run.version) for at in range(2)]
                runs = [art.Trajectory(task="t", calls=(call,), reward=float(at)) for at, call in enumerate(calls)]
                await run.learn([art.Group("t", tuple(runs))])
                found = {"step": step, "success": {2: 0.9, 3: 0.9}.get(step, 0.1), "rollout_ids": []}
                run.store.set_meta("evaluations", [*run.store.meta("evaluations", []), found])

    asyncio.run(learn())
    assert sorted(it.name for it in (tmp_path / "checkpoints").iterdir()) == [
        "step-000003", "step-000004", "step-000005",
    ]  # fmt: skip
    with Store(tmp_path / "run.sqlite") as store:
        assert best_step(store, [1, 2, 3]) == 3 and best_step(store, [7]) is None
    shutil.rmtree(tmp_path)
