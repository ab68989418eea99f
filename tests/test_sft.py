"""The supervised warm start: good rollouts become more likely, bad ones are left out, and its steps are steps of the run."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import art_audit
import art_core as art
from art_core import losses
from art_core.errors import ConfigError
from art_core.loop import sft
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call, LossInputs, Trajectory

DOCS = Path(__file__).parent.parent / "docs"


def trajectory(*sampled, reward=1.0, task="t", **fields):
    calls = tuple(Call((1, 2, 3), ids, (-1.0,) * len(ids), temperature=0.5) for ids in sampled)
    return Trajectory(task, calls, reward=reward, **fields)


def inputs(logprobs, trajectories, weights=None):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    rows = torch.tensor(trajectories)
    weights = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    return LossInputs(logprobs, torch.full((len(rows),), torch.nan), None, torch.zeros(len(rows)), weights, rows, rows)


def test_the_parts_of_a_step_add_up_and_untrained_rows_are_not_read():
    whole = losses.sft(inputs([-1.0, -2.0, -4.0], [0, 1, 1])).loss
    parts = [inputs([-1.0, float("nan")], [0, 0], [1.0, 0.0]), inputs([-2.0, -4.0], [1, 1])]
    split = [losses.sft(dataclasses.replace(part, step_trajectories=2)).loss for part in parts]
    assert sum(split).item() == pytest.approx(whole.item())
    assert losses.sft(inputs([-1.0], [0], [0.0])).loss.item() == 0


def test_failed_bad_and_empty_trajectories_are_not_imitated():
    good, bad = trajectory((4, 5)), trajectory((6,), reward=0.1)
    failed, unscored, silent = trajectory((4,), error="no"), trajectory((4,), reward=None), trajectory(())
    aborted = trajectory((4,))
    aborted = dataclasses.replace(aborted, calls=(dataclasses.replace(aborted.calls[0], finish_reason="aborted"),))
    trajectories = [good, bad, failed, unscored, silent, aborted]
    assert sft.chosen(trajectories, 0.5) == [good]
    assert sft.chosen(trajectories, None) == [good, bad, unscored]
    with pytest.raises(ConfigError, match="nothing to imitate: of 6 trajectories 3 failed"):
        sft.chosen(trajectories, 2.0)


def test_an_epoch_has_every_trajectory_once_grouped_by_task():
    trajectories = [trajectory((n,), task={"n": n % 3}) for n in range(10)]
    steps = list(sft.batches(trajectories, 2, 4, "0"))
    assert [sum(len(g.trajectories) for g in step) for step in steps] == [4, 4, 2] * 2
    for epoch in (steps[:3], steps[3:]):
        seen = [t for step in epoch for g in step for t in g.trajectories]
        assert sorted(t.calls[0].sampled_ids for t in seen) == [(n,) for n in range(10)]
    assert all(len({repr(g.task) for g in step}) == len(step) for step in steps)
    assert steps[:3] != steps[3:]


async def test_messages_without_token_ids_are_refused_with_what_to_do(tmp_path):
    async with art.open_run(tmp_path, engine=FakeEngine(), learner=CountingLearner()) as run:
        with pytest.raises(ConfigError, match=r"got a dict: .*token ids"):
            await run.learn_sft([{"messages": [{"role": "user", "content": "hi"}]}])
        with pytest.raises(ConfigError, match="epochs=0"):
            await run.learn_sft([trajectory((4,))], epochs=0)
        assert run.step == 0


async def test_every_supervised_step_is_a_step_of_the_run_and_is_served(tmp_path):
    engine, learner = FakeEngine(), CountingLearner()
    async with art.open_run(tmp_path / "run", engine=engine, learner=learner) as run:
        metrics = await run.learn_sft([trajectory((n,)) for n in range(4, 9)], batch_size=2, epochs=2)
        assert run.step == learner.version == len(metrics) == 6
        assert engine.loaded[-1].version == 6
        assert [step for step, _ in run.history()] == [1, 2, 3, 4, 5, 6]
    assert all((tree.temperatures == 1).all() for trees in learner.trees for tree in trees)
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as again:
        assert again.step == 6


@pytest.mark.system
async def test_the_model_learns_to_repeat_the_imitated_rollouts(tmp_path):
    agent = ScriptedAgent(max_tokens=6)
    greedy = art.types.Sampling(temperature=0)
    async with art.open_run(tmp_path / "run", model="tiny", learning_rate=2e-3, warmup_steps=0) as run:
        groups = await run.collect(agent, ["red", "blue"], group_size=8)
        before = await run.collect(agent, ["red", "blue"], group_size=1, sampling=greedy, split="eval")
        plain = [g.trajectories[0].output for g in before]
        good = [next(t for t in g.trajectories if t.output != usual) for g, usual in zip(groups, plain, strict=True)]
        metrics = await run.learn_sft(good, epochs=25)
        after = await run.collect(agent, ["red", "blue"], group_size=1, sampling=greedy, split="eval")
    assert metrics[-1]["nll"] < 0.3 * metrics[0]["nll"]
    old = -np.mean([logprob for t in good for call in t.calls for logprob in call.logprobs])
    assert metrics[0]["nll"] == pytest.approx(old, abs=1e-3), "temperature 1, the weights that sampled them"
    assert [g.trajectories[0].calls[0].sampled_ids for g in after] == [t.calls[0].sampled_ids for t in good]
    assert "logprob_gap" not in metrics[0]
    assert art_audit.audit(tmp_path / "run", progress=False).clean


@pytest.mark.system
async def test_the_example_in_the_docs_trains_on_the_rollouts_of_another_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    async with art.open_run("runs/earlier", model="tiny") as run:
        groups = await run.collect(ScriptedAgent(max_tokens=6), ["red"], group_size=4)
        await run.score(groups, lambda t: float(t.rollout_id != groups[0].trajectories[0].rollout_id))
        await run.collect(ScriptedAgent(max_tokens=6), ["held out"], group_size=1, split="eval")
    assert len(art.load_trajectories("runs/earlier")) == 4
    assert len(art.load_trajectories("runs/earlier", split=None)) == 5
    [code] = re.findall(r"test_sft.py runs this -->\n```python\n(.*?)```", (DOCS / "losses.md").read_text(), re.DOTALL)
    body = "".join(f"    {line}\n" for line in code.splitlines())
    names = {"art": art}
    exec(compile(f"async def example():\n{body}", "losses.md", "exec"), names)
    await names["example"]()
    assert "4 steps, -logprob" in capsys.readouterr().out
    async with art.open_run("runs/warm", model="tiny") as run:
        assert run.step == 4, "the run resumes after the warm start"
        await run.collect(ScriptedAgent(max_tokens=6), ["red"], group_size=2)
    report = art_audit.audit("runs/warm", progress=False)
    assert report.clean and (report.checked, report.trained_elsewhere) == (2, 4 * 3)
    with pytest.raises(ConfigError, match="is not a run folder"):
        art.load_trajectories("runs/nothing")


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_imitating_successful_rollouts_makes_the_email_agent_succeed_more_often(tmp_path, monkeypatch):
    import asyncio

    from examples.email_search.agent import build_agent
    from examples.email_search.reward import reward
    from examples.email_search.tasks import held_out_tasks, training_tasks

    monkeypatch.setenv("OPENAI_API_KEY", "unused")

    async def measure():
        agent = build_agent()
        async with art.open_run(tmp_path / "run", model="tiny", learning_rate=1e-3) as run:

            def success(groups):
                return np.mean([t.metrics["success"] for g in groups for t in g.trajectories])

            groups = await run.score(await run.collect(agent, training_tasks(80), group_size=6), reward)
            await run.learn_sft([t for g in groups for t in g.trajectories], min_reward=1.0, epochs=3)
            after = await run.collect(agent, held_out_tasks(150), group_size=1, split="eval")
            return success(groups), success(await run.score(after, reward))

    before, after = asyncio.run(measure())
    print(f"success {before:.2f} to {after:.2f}")
    assert after - before > 0.1, (before, after)
