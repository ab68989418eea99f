"""One step at a time, noted only where it was taken: what learn and learn_sft do to the learner, the store and the door."""

import asyncio
import errno
import shutil
import threading

import pytest

import art_core as art
from art_core.errors import ArtError
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import Call


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


def trajectory(reward, finish_reason="stop"):
    call = Call(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.1,), finish_reason=finish_reason)
    return art.Trajectory(task="t", calls=(call,), reward=reward)


def group(finish_reason="stop"):
    return art.Group("t", tuple(trajectory(reward, finish_reason) for reward in (0.0, 1.0)))


class Learner(CountingLearner):
    """Takes no step where nothing is to be trained, as the torch learner; takes its time for others."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds, self.inside, self.most = seconds, 0, 0

    def step(self, trees, *, loss=None):
        if not any(tree.weights.any() for tree in trees):
            return {"skipped": 1.0}
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(self.seconds)
        self.inside -= 1
        return super().step(trees)

    def save(self, folder):
        assert not self.inside, "saved while the weights change"
        super().save(folder)


async def test_steps_that_are_asked_for_at_the_same_time_are_taken_one_after_the_other(tmp_path):
    learner = Learner(0.1)
    async with run_of(tmp_path, learner=learner) as run:
        await asyncio.gather(run.learn([group()]), run.learn_sft([trajectory(1.0)]), run.learn([group()]))
        assert (learner.most, run.step) == (1, 3)
        assert [(update.step, update.version) for update in run.store.updates()] == [(1, 1), (2, 2), (3, 3)]


async def test_a_checkpoint_by_hand_waits_for_the_step_under_way(tmp_path):
    async with run_of(tmp_path, learner=Learner(0.2), checkpoint_every=10) as run:
        learning = asyncio.ensure_future(run.learn([group()]))
        await asyncio.sleep(0.1)
        assert (await run.checkpoint()).name == "step-000001"
        await learning


async def test_what_cannot_be_removed_ends_no_run_and_is_removed_later(tmp_path, monkeypatch, caplog):
    class FromFiles(FakeEngine):
        loads_files = True

    tried, remove = set(), shutil.rmtree

    def busy(folder, **more):  # as a file that somebody has open does, on NFS
        if folder not in tried:
            tried.add(folder)
            raise OSError(errno.EBUSY, "Device or resource busy", str(folder))
        remove(folder, **more)

    monkeypatch.setattr("shutil.rmtree", busy)
    async with run_of(tmp_path, engine=FromFiles(), learner=Learner(), keep_checkpoints=1) as run:
        for _ in range(4):
            await run.learn([group()])
        assert run.step == 4
        left = {
            name: sorted(it.name for it in (tmp_path / "run" / name).iterdir()) for name in ("checkpoints", "serving")
        }
    # Each goes at the second tidying that finds it too old.
    assert left == {"checkpoints": ["step-000003", "step-000004"], "serving": ["2", "3", "4"]}
    assert "step-000001, which is no longer needed: [Errno 16] Device" in caplog.text


async def test_leaving_the_block_waits_for_the_step_under_way_and_saves_it(tmp_path):
    async with run_of(tmp_path, learner=Learner(0.2), checkpoint_every=10) as run:
        learning = asyncio.ensure_future(run.learn([group()]))
        await asyncio.sleep(0.1)
    await learning
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("settings", "commands"),
    [
        ({}, ["score", "pause", "pause", "swap", "resume", "counters"]),
        ({"max_staleness": 1}, ["score", "pause", "swap", "resume", "counters"]),
    ],
)
async def test_a_step_sends_few_commands_to_what_serves(tmp_path, monkeypatch, settings, commands):
    async with run_of(tmp_path, **settings) as run:
        server, sent = run.serving._server, []
        request = server.request
        monkeypatch.setattr(
            server, "request", lambda name, *args, **how: sent.append(name) or request(name, *args, **how)
        )
        await run.learn([group()])
    assert sent == commands


async def test_a_step_that_trained_nothing_is_no_update_and_swaps_nothing(tmp_path):
    engine = FakeEngine()
    async with run_of(tmp_path, engine=engine, learner=Learner(), loss="dapo") as run:
        metrics = await run.learn([group("length")])
        assert metrics["skipped"] == 1 and run.step == 1
        assert list(run.store.updates()) == [] and engine.loaded == []


async def test_the_share_of_tokens_that_a_step_leaves_out_is_a_metric(tmp_path):
    runs = (trajectory(0.0, "length"), trajectory(0.5, "length"), trajectory(0.7, "length"), trajectory(1.0))
    async with run_of(tmp_path, learner=Learner(), loss="dapo") as run:
        assert (await run.learn([art.Group("t", runs)]))["untrained"] == 0.75
        assert (await run.learn([group()]))["untrained"] == 0


@pytest.mark.parametrize("settings", [{"loss": "dapo"}, {"overlong": "drop"}])
async def test_runs_that_were_cut_off_are_imitated_whatever_the_loss_drops(tmp_path, settings):
    async with run_of(tmp_path, learner=Learner(), **settings) as run:
        [metrics] = await run.learn_sft([trajectory(1.0, "length")])
        assert "skipped" not in metrics
        assert [update.version for update in run.store.updates()] == [1]


@pytest.mark.parametrize("moved", [False, True])
async def test_what_was_learnt_before_a_step_that_failed_is_saved_where_the_weights_are_as_they_were(tmp_path, moved):
    class Failing(CountingLearner):
        def step(self, trees, *, loss=None):
            if self.version == 2:
                self.version += moved
                raise ArtError("the gradient of step 3 is not finite")
            return super().step(trees)

    with pytest.raises(ArtError, match="not finite"):
        async with run_of(tmp_path, learner=Failing(), checkpoint_every=10) as run:
            for _ in range(3):
                await run.learn([group()])
    saved = [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == ([] if moved else ["step-000002"])


async def test_groups_in_which_only_equal_rewards_of_calls_count_take_no_step(tmp_path):
    def run_with(reward):
        call = Call(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.1,), reward=0.5)
        return art.Trajectory(task="t", calls=(call,), reward=reward)

    learner = CountingLearner()
    async with run_of(tmp_path, learner=learner) as run:
        metrics = await run.learn([art.Group("t", (run_with(0.0), run_with(1.0)))])
    assert (metrics["groups_with_contrast"], learner.version) == (0, 0)


async def test_metrics_of_a_reward_and_of_the_learner_with_one_name_are_both_kept(tmp_path):
    class Told(CountingLearner):
        def step(self, trees, *, loss=None):
            return {**super().step(trees), "loss": 0.25, "seconds": 3.0, "entropy": 2.0}

    def reward(trajectory):
        trajectory.metrics.update(loss=7.0, tokens=8.0, seconds=9.0)
        return trajectory.reward

    async with run_of(tmp_path, learner=Told()) as run:
        scored = await run.score([group()], reward)
        metrics = await run.learn(scored)
    assert (metrics["loss"], metrics["tokens"], metrics["reward/seconds"]) == (7, 8, 9)
    assert (metrics["learner/loss"], metrics["learner/seconds"], metrics["entropy"]) == (0.25, 3, 2)
    assert metrics["learner/tokens"] > 0 and metrics["staleness"] == 0


def test_seconds_of_a_block_that_is_open_when_they_are_taken_are_in_the_next_step():
    from art_core.loop.metrics import Timer

    timer = Timer()
    with timer.timed("rollout_seconds"):
        assert timer.taken() == {}
    assert timer.taken()["rollout_seconds"] > 0
