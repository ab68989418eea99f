"""Rollouts while the learner works, through train and open_run."""

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_runs import Numbers, lines, number, settings, stored
from peft import PeftModel
from transformers import AutoModelForCausalLM

import art_core as art
from art_core.errors import ConfigError, RewardError
from art_core.loop.display import Display
from art_core.loop.pipeline import Pipeline
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call
from art_embedded import TINY

# The pipeline alone


@given(depth=st.integers(0, 3), naps=st.lists(st.integers(0, 6), min_size=1, max_size=8), use=st.integers(0, 6))
def test_no_work_begins_more_than_depth_steps_early_and_results_come_in_order(depth, naps, use):
    done = 0
    begun_at = {}

    async def make(step):
        begun_at[step] = done
        for _ in range(naps[step]):
            await asyncio.sleep(0)
        return step

    async def run():
        nonlocal done
        async with Pipeline(make, range(len(naps)), depth) as pipeline:
            for step in range(len(naps)):
                assert await pipeline.next() == step
                for _ in range(use):
                    await asyncio.sleep(0)
                done += 1

    asyncio.run(run())
    assert all(step - begun <= depth for step, begun in begun_at.items()) and list(begun_at) == sorted(begun_at)
    assert depth == 0 or len(naps) == 1 or any(begun_at[step] < step for step in begun_at)


async def test_an_error_ahead_is_raised_at_its_step():
    async def make(step):
        if step == 1:
            raise ValueError("step 1")
        return step

    async with Pipeline(make, range(3), 2) as pipeline:
        assert await pipeline.next() == 0
        await pipeline.settled()
        with pytest.raises(ValueError, match="step 1"):
            await pipeline.next()


async def test_leaving_cancels_unfinished_work_and_logs_other_errors(caplog):
    cancelled = []

    async def make(step):
        if step == 1:
            raise ValueError("step 1")
        try:
            await asyncio.sleep(60 * step)
        except asyncio.CancelledError:
            cancelled.append(step)
            raise

    with pytest.raises(KeyError):
        async with Pipeline(make, range(5), 3) as pipeline:
            await pipeline.next()
            raise KeyError
    assert cancelled == [2, 3] and "ValueError: step 1" in caplog.text


# Rollouts while training


STEP_CALLS = 24
"""Two tasks, four rollouts of each, three turns."""


class OverlappingLearner(CountingLearner):
    """Ends a step only after a call of a later step was answered during it."""

    def __init__(self, engine, steps):
        super().__init__()
        self.engine, self.steps = engine, steps

    def step(self, trees):
        before = len(self.engine.answered)
        self.engine.most += STEP_CALLS
        if self.version + 1 < self.steps:
            with self.engine.changed:
                assert self.engine.changed.wait_for(lambda: len(self.engine.answered) > before, 30)
        return super().step(trees)


class SlowEngine(FakeEngine):
    """Counts the calls that it answered."""

    def __init__(self, reply):
        super().__init__(reply)
        self.answered, self.changed = [], threading.Condition()

    async def chat(self, request):
        await asyncio.sleep(0.01)
        answer = await super().chat(request)
        with self.changed:
            self.answered.append(answer["policy_version"])
            self.changed.notify_all()
        return answer


class EngineAhead(SlowEngine):
    """Answers the next step's calls only while the learner works."""

    most = STEP_CALLS

    async def chat(self, request):
        while len(self.answered) >= self.most:
            await asyncio.sleep(0.01)
        return await super().chat(request)


@pytest.mark.system
async def test_rollouts_of_the_next_step_are_answered_while_the_learner_works(tmp_path):
    engine = EngineAhead(Numbers())
    learner = OverlappingLearner(engine, 4)
    await art.train(
        ScriptedAgent(3), ["a", "b"],
        **settings(tmp_path, engine=engine, learner=learner, max_staleness=1, max_concurrent=2),
    )  # fmt: skip
    assert learner.version == 4
    assert lines(tmp_path)[0]["staleness_max"] == 0


@pytest.mark.system
@pytest.mark.parametrize("bound", [1, 2, 3])
async def test_no_trained_call_is_older_than_the_bound(tmp_path, bound):
    class Learner(CountingLearner):
        def step(self, trees):
            threading.Event().wait(0.02 * (self.version % 3))
            return super().step(trees)

    await art.train(
        ScriptedAgent(2), ["a", "b", "c"],
        **settings(tmp_path, steps=8, learner=Learner(), max_staleness=bound),
    )  # fmt: skip
    oldest = {}
    for rollout, calls in stored(tmp_path):
        ages = [rollout.step - 1 - call.policy_version for call in calls]
        oldest[rollout.step] = max(oldest.get(rollout.step, 0), *ages)
    assert max(oldest.values()) <= bound and any(oldest.values())
    assert [line["staleness_max"] for line in lines(tmp_path)] == [oldest[step] for step in range(1, 9)]
    assert all(0 <= line["staleness"] <= line["staleness_max"] and not line["groups_stale"] for line in lines(tmp_path))


@pytest.mark.system
async def test_without_staleness_no_call_is_answered_while_the_learner_works(tmp_path):
    engine = FakeEngine(Numbers())

    class Learner(CountingLearner):
        def step(self, trees):
            before = len(engine.requests)
            threading.Event().wait(0.05)
            assert len(engine.requests) == before
            return super().step(trees)

    await art.train(ScriptedAgent(2), ["a", "b"], **settings(tmp_path, engine=engine, learner=Learner()))
    assert [(line["staleness"], line["staleness_max"]) for line in lines(tmp_path)] == [(0, 0)] * 4
    assert {rollout.step - 1 - call.policy_version for rollout, calls in stored(tmp_path) for call in calls} == {0}


async def test_groups_with_a_call_beyond_the_bound_are_left_out_and_counted(tmp_path):
    def group(*versions):
        def run(reward):
            calls = tuple(
                Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.5,), policy_version=version)
                for version in versions
            )
            return art.Trajectory(task="t", calls=calls, reward=reward)

        return art.Group(task="t", trajectories=(run(0.0), run(1.0)))

    learner = CountingLearner()
    learner.version = 7
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=learner, max_staleness=2) as run:
        metrics = await run.learn([group(5, 7), group(4, 7), group(7)])
        assert len(learner.trees[0]) == 2 and metrics["groups_stale"] == 1 and metrics["groups_with_contrast"] == 3
        assert metrics["staleness_max"] == 2 and metrics["staleness"] == pytest.approx(2 / 3)
        metrics = await run.learn([group(4)])
    assert metrics["groups_stale"] == 1 and learner.version == 8 and run.step == 2


@pytest.mark.system
async def test_a_swap_waits_for_calls_in_flight_so_a_call_has_one_version(tmp_path):
    class Engine(SlowEngine):
        async def chat(self, request):
            before = len(self.loaded)
            answer = await super().chat(request)
            assert len(self.loaded) == before
            return answer

    engine = Engine(Numbers())
    result = await art.train(ScriptedAgent(4), ["a"], **settings(tmp_path, engine=engine, max_staleness=2, steps=6))
    assert result.report["steps"] == 6 and [weights.version for weights in engine.loaded] == [1, 2, 3, 4, 5, 6]
    assert not [rollout.error for rollout, _ in stored(tmp_path) if rollout.error]


@pytest.mark.system
async def test_an_evaluation_between_steps_has_the_engine_and_one_version_to_itself(tmp_path):
    engine = FakeEngine(Numbers())
    await art.train(
        ScriptedAgent(2), ["a", "b"],
        **settings(tmp_path, steps=6, engine=engine, max_staleness=1, eval_tasks=["x", "y"], eval_every=2, group_size=2),
    )  # fmt: skip
    kinds = ["x" if request["messages"][0]["content"] in "xy" else "-" for request in engine.requests]
    stretches = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert "".join(stretches) == "x-x-x-x" and kinds.count("x") == 4 * 2 * 2
    held_out = [(rollout.step, calls) for rollout, calls in stored(tmp_path) if rollout.split == "eval"]
    assert {(step, call.policy_version) for step, calls in held_out for call in calls} == {(n, n) for n in (0, 2, 4, 6)}


@pytest.mark.system
async def test_max_concurrent_holds_over_all_overlapping_steps(tmp_path):
    running = most = 0

    async def agent(task_input, address):
        nonlocal running, most
        running += 1
        most = max(most, running)
        answer = await ScriptedAgent(2)(task_input, address)
        running -= 1
        return answer

    await art.train(agent, ["a", "b"], **settings(tmp_path, max_staleness=3, max_concurrent=3))
    assert most == 3


@pytest.mark.system
async def test_seconds_do_not_count_overlapped_rollouts(tmp_path):
    await art.train(ScriptedAgent(2), ["a"], **settings(tmp_path, max_staleness=1))
    for line in lines(tmp_path):
        assert line["seconds"] == pytest.approx(line["wait_seconds"] + line["learn_seconds"])
        assert line["rollout_seconds"] > 0


async def test_a_reward_that_fails_ahead_ends_the_run_at_its_step(tmp_path):
    count = 0

    def reward(trajectory):
        nonlocal count
        count += 1
        if count > 2 * 8:
            raise RuntimeError("no more")
        return number(trajectory)

    with pytest.raises(RewardError, match="no more"):
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, reward=reward, max_staleness=1))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.system
async def test_a_resumed_run_trains_on_the_rollouts_that_ran_ahead(tmp_path):
    class Stop(Display):
        def log(self, step, metrics):
            if step == 2:
                task.cancel()

    task = asyncio.ensure_future(
        art.train(
            ScriptedAgent(), ["a", "b", "c"], **settings(tmp_path, steps=5, max_staleness=2, progress=Stop(quiet=True))
        )
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    before = {rollout.rollout_id: rollout.step for rollout, _ in stored(tmp_path)}
    assert {3, 4} <= set(before.values())
    learner = CountingLearner()
    await art.train(ScriptedAgent(), ["a", "b", "c"], **settings(tmp_path, steps=5, max_staleness=2, learner=learner))
    assert learner.version == 5 and len(learner.trees) == 3
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    after = {rollout.rollout_id: rollout for rollout, _ in stored(tmp_path)}
    assert set(before) <= set(after)
    finished = [id_ for id_, rollout in after.items() if id_ in before and rollout.step == 3 and not rollout.error]
    repeated = sum(rollout.step == 3 for id_, rollout in after.items() if id_ not in before)
    assert finished and repeated == 8 - len(finished)


@pytest.mark.system
async def test_a_dry_run_and_overlap_by_hand_work_with_staleness(tmp_path):
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, max_staleness=1, dry_run=True))
    assert result.report["dry_run"]["calls"] == 4
    async with art.open_run(
        tmp_path / "hand", engine=FakeEngine(Numbers()), learner=CountingLearner(), max_staleness=1, group_size=4
    ) as run:
        groups = await run.score(await run.collect(ScriptedAgent(), ["a"]), number)
        for _ in range(3):
            metrics, fresh = await asyncio.gather(
                run.learn(groups), run.collect(ScriptedAgent(), ["a"], step=run.step + 2)
            )
            groups = await run.score(fresh, number)
            assert metrics["staleness_max"] <= 1 and metrics["groups_stale"] == 0


@pytest.mark.parametrize("wrong", [{"max_staleness": -1}, {"max_extra_rounds": 1.5}, {"dynamic_sampling": "yes"}])
def test_settings_that_cannot_work_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        art.open_run(tmp_path, **wrong)


# The embedded engine and learner


@pytest.mark.system
@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_every_call_has_the_logprobs_of_its_version(tmp_path, lora_rank):
    """The engine answers while the optimizer works: a torn snapshot would have logprobs that no checkpoint has."""
    await art.train(
        ScriptedAgent(2, max_tokens=8), ["hello", "there"], model="tiny", steps=5, tasks_per_step=1, group_size=6,
        reward=lambda trajectory: int(trajectory.rollout_id, 16) % 997, max_staleness=1, learning_rate=5e-4,
        warmup_steps=0, keep_checkpoints=None, lora_rank=lora_rank, run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    models = [replayed(tmp_path / "run", version) for version in range(6)]
    assert [line["groups_with_contrast"] for line in lines(tmp_path)] == [1] * 5, "a step's number is its version"
    calls = [(rollout.step, call) for rollout, calls in stored(tmp_path) for call in calls]
    assert {step - 1 - call.policy_version for step, call in calls} == {0, 1}
    assert max(gap(models[call.policy_version], call) for _, call in calls) < 1e-4
    assert max(gap(models[call.policy_version + 1], call) for _, call in calls) > 1e-3, "other weights differ"
    first, *later = lines(tmp_path)
    assert first["logprob_gap"] < 1e-4 < later[0]["logprob_gap"] and later[0]["staleness_max"] == 1


def replayed(run_dir, version):
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    folder = run_dir / "checkpoints" / f"step-{version:06d}"
    if version == 0:
        return base
    if (folder / "adapter").is_dir():
        return PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload().eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def gap(model, call):
    logits = model(torch.tensor([[*call.prompt_ids, *call.sampled_ids]])).logits[0, len(call.prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(call.sampled_ids)[:, None])[:, 0]
    return (logprobs - torch.tensor(call.logprobs)).abs().max().item()
