"""The real loop on the real tiny model: LangGraph agent, openai client, HTTP, child process, tree, step, swap."""

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import art_core as art
from art_core.store import Store
from art_core.testing import ScriptedAgent

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OPENAI_API_KEY", "unused")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Two steps of the email example, every checkpoint kept."""
    from examples.email_search.agent import build_agent
    from examples.email_search.reward import reward
    from examples.email_search.tasks import held_out_tasks, training_tasks

    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return art.train_sync(
        build_agent(), training_tasks(8), model="tiny", reward=reward, steps=3, tasks_per_step=4, group_size=6,
        eval_tasks=held_out_tasks(6), eval_temperatures=(1.0, None), keep_checkpoints=None, run_dir=run_dir, progress=False,
    )  # fmt: skip


def stored(result):
    store = Store(result.run_dir / "run.sqlite")
    try:
        return store.trajectories()
    finally:
        store.close()


@pytest.mark.system
def test_every_stored_call_is_what_the_model_saw(short_run):
    """Replay every call through the weights that sampled it: the recorded logprobs must come out."""
    folders = {0: art.TrainConfig(model="tiny")}
    from art_embedded import TINY

    models = {0: AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)}
    for folder in sorted((short_run.run_dir / "checkpoints").iterdir()):
        models[int(folder.name[5:])] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert folders
    checked, worst, versions = 0, 0.0, set()
    for trajectory in stored(short_run):
        for call in trajectory.calls:
            ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
            with torch.no_grad():
                logits = models[call.policy_version](ids).logits[0, len(call.prompt_ids) - 1 : -1]
            logprobs = (logits / (call.temperature or 1.0)).log_softmax(-1)
            there = logprobs.gather(1, torch.tensor(call.sampled_ids)[:, None])[:, 0]
            worst = max(worst, (there - torch.tensor(call.logprobs)).abs().max().item())
            checked += 1
            versions.add(call.policy_version)
    assert checked > 100 and len(versions) == 4
    assert worst < 1e-4


def test_the_learner_agrees_with_the_engine_before_the_step(short_run):
    import json

    lines = [json.loads(line) for line in (short_run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["logprob_gap"] < 1e-4


def test_a_later_turn_extends_the_earlier_one_id_for_id(short_run):
    extended = total = 0
    for trajectory in stored(short_run):
        for before, after in zip(trajectory.calls, trajectory.calls[1:], strict=False):
            whole = before.prompt_ids + before.sampled_ids
            total += 1
            extended += after.prompt_ids[: len(whole)] == whole
    assert total > 50 and extended == total


def test_an_agent_that_asks_for_temperature_0_still_yields_groups_with_contrast(short_run):
    training = [t for t in stored(short_run) if t.calls and t.calls[0].temperature == 1.0]
    assert len({t.calls[0].sampled_ids for t in training}) > 1
    assert any(call.temperature == 0 for t in stored(short_run) for call in t.calls), "evaluation keeps the agent's own"


@pytest.mark.smoke
@pytest.mark.system
def test_the_run_can_be_evaluated_by_its_folder(short_run, tmp_path):
    import asyncio

    from examples.email_search.agent import build_agent
    from examples.email_search.reward import reward
    from examples.email_search.tasks import held_out_tasks

    report = asyncio.run(
        art.evaluate(
            build_agent(),
            held_out_tasks(6),
            model=short_run.run_dir,
            reward=reward,
            run_dir=tmp_path / "eval",
            progress=False,
        )
    )
    # Greedy, with the weights that the run ended with: the same answers as the run's own last evaluation.
    own = next(it for it in short_run.report["evaluations"] if it["name"] == "after" and it["temperature"] is None)
    assert report.success == own["success"]


@pytest.mark.smoke
@pytest.mark.system
async def test_a_lora_run_trains_serves_and_is_evaluated_by_its_folder(tmp_path):
    def long_answer(trajectory):
        return float(len(trajectory.calls[0].sampled_ids))

    agent = ScriptedAgent(max_tokens=12)
    result = await art.train(
        agent, ["hello"], model="tiny", reward=long_answer, steps=2, tasks_per_step=1, group_size=6, lora_rank=4, kl=0.1,
        learning_rate=1e-2, eval_tasks=["hello"], run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    report = await art.evaluate(
        agent,
        ["hello"],
        model=tmp_path / "run",
        reward=long_answer,
        run_dir=tmp_path / "eval",
        progress=False,
        temperature=0,
    )
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "adapter").is_dir()
    assert {c.policy_version for t in result.after.trajectories for c in t.calls} <= {0, 1, 2}
    assert report.trajectories[0].calls[0].policy_version == 2, "the step of the checkpoint"


def test_the_agent_of_the_example_does_not_import_art():
    agent = (ROOT / "examples" / "email_search" / "agent.py").read_text()
    assert not re.findall("import art|from art|art_core", agent)
