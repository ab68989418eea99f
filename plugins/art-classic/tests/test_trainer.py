"""The classic trainer: episodes are recorded rollouts, those that begin alike are groups, and a program may just stop."""

import asyncio
import os
import random
import subprocess
import sys
import textwrap

import pytest

import art_audit
import art_core as art
from art_classic.agent import Agent
from art_classic.environment import Environment
from art_classic.trainer import GRPOTrainer
from art_core.errors import CaptureError, ConfigError
from art_core.testing import CountingLearner, FakeEngine


class Guess(Environment):
    """Two questions an episode; an answer is worth its number."""

    begun = 0

    async def reset(self):
        Guess.begun += 1
        self.log = []
        return {"secret": Guess.begun, "asked": 0}

    async def step(self, action):
        state = await self.get_state()
        state["asked"] += 1
        self.log.append(action["say"])
        return state, float(action["say"]), state["asked"] == 2, {"log": self.log}


class Guesser(Agent):
    def __init__(self):
        super().__init__("tiny")
        self.history = []

    async def select_action(self, state):
        said = await self.generate_response(f"{state['secret']}/{state['asked']}", max_tokens=5)
        self.history.append(said)
        return {"type": "say", "say": said}


def counting(request):
    counting.count = getattr(counting, "count", 0) + 1
    return str(counting.count % 7)


def trainer(tmp_path, agent=None, environment=None, **more):
    settings = {
        "learning_rate": 1e-5, "batch_size": 4, "episodes_per_batch": 8, "max_episode_length": 10, "kl_penalty": 0.1,
        "engine": FakeEngine(counting), "learner": CountingLearner(), "run_dir": tmp_path / "run", "progress": False, **more,
    }  # fmt: skip
    return GRPOTrainer(agent=agent or Guesser(), environment=environment or Guess(), **settings)


async def test_episodes_that_begin_alike_are_groups_and_become_a_step(tmp_path):
    agent, learner = Guesser(), CountingLearner()
    async with trainer(tmp_path, agent, learner=learner) as trained:
        episodes = await trained.collect_episodes()
        assert [len(episode["actions"]) for episode in episodes] == [2] * 8
        starts = [episode["states"][0]["secret"] for episode in episodes]
        assert starts == [starts[0]] * 4 + [starts[4]] * 4 and starts[0] != starts[4]
        for episode in episodes:
            assert episode["total_reward"] == sum(episode["rewards"]) == sum(int(a["say"]) for a in episode["actions"])
            assert episode["done"] and episode["steps"] == 2 and episode["error"] is None
            assert [len(info["log"]) for info in episode["infos"]] == [2, 2], "an environment of its own"
            assert [call.response["content"] for call in episode.trajectory.calls] == [
                a["say"] for a in episode["actions"]
            ]
        assert len(agent.history) == 16
        info = await trained.update_policy(episodes)
    assert learner.version == 1 and len(learner.trees) == 1
    assert info["avg_reward"] == sum(e["total_reward"] for e in episodes) / 8
    assert {"policy_loss", "kl_loss", "avg_reward"} <= set(info) and info["groups_with_contrast"] == 2
    stored = art.load_trajectories(tmp_path / "run")
    assert sorted(t.reward for t in stored) == sorted(e["total_reward"] for e in episodes)


async def test_with_a_discount_every_call_is_trained_with_the_rewards_from_its_action_on(tmp_path):
    async with trainer(tmp_path, discount=0.5) as trained:
        episodes = await trained.collect_episodes()
        await trained.update_policy(episodes)
    rewards = {e.trajectory.rollout_id: e["rewards"] for e in episodes}
    for trajectory in art.load_trajectories(tmp_path / "run"):
        first, second = rewards[trajectory.rollout_id]
        assert [call.reward for call in trajectory.calls] == [first + 0.5 * second, second]


async def test_what_the_program_changes_in_an_episode_counts(tmp_path):
    async with trainer(tmp_path) as trained:
        episodes = await trained.collect_episodes()
        for episode in episodes:
            episode["total_reward"] = 1.0
        info = await trained.update_policy(episodes)
        assert info["groups_with_contrast"] == 0 and info["policy_loss"] == 0.0 and info["avg_reward"] == 1.0
        with pytest.raises(ConfigError, match="collect_episodes"):
            await trained.update_policy([{"total_reward": 1.0}])


async def test_a_failed_episode_keeps_what_was_done_before(tmp_path):
    class Fails(Guess):
        async def step(self, action):
            if (await self.get_state())["asked"] == 1:
                raise RuntimeError("the game crashed")
            return await super().step(action)

    async with trainer(tmp_path, environment=Fails(), discount=1.0) as trained:
        episodes = await trained.collect_episodes()
        assert all("the game crashed" in e["error"] and e["steps"] == 1 for e in episodes)
        await trained.update_policy(episodes)
    assert [c.reward for t in art.load_trajectories(tmp_path / "run") for c in t.calls][1::2] == [0.0] * 8


async def test_an_agent_that_asks_no_model_is_told_so(tmp_path):
    class Computes(Agent):
        async def select_action(self, state):
            return {"type": "say", "say": 1}

    async with trainer(tmp_path, Computes()) as trained:
        with pytest.raises(CaptureError, match=r"Computes.select_action made no model call in any of 8 episodes"):
            await trained.collect_episodes()


async def test_an_agent_that_fails_before_it_asks_is_told_its_own_error_first(tmp_path):
    class Broken(Agent):
        async def select_action(self, state):
            return {"type": state["no such key"]}

    async with trainer(tmp_path, Broken()) as trained:
        with pytest.raises(
            CaptureError, match=rf"^KeyError: 'no such key' \({__file__}:\d+ in select_action\): Broken"
        ):
            await trained.collect_episodes()


async def test_an_environment_that_cannot_be_copied_or_pays_in_words_is_told_so(tmp_path):
    class Open(Guess):
        def __init__(self):
            super().__init__()
            self.stream = (number for number in range(3))

    class Words(Guess):
        async def step(self, action):
            state, _, done, info = await super().step(action)
            return state, "good", done, info

    async with trainer(tmp_path, environment=Open()) as trained:
        with pytest.raises(ConfigError, match="__deepcopy__"):
            await trained.collect_episodes()
    async with trainer(tmp_path, environment=Words(), run_dir=tmp_path / "words") as trained:
        assert "returned the reward 'good'" in (await trained.collect_episodes())[0]["error"]


async def test_a_run_is_opened_again_where_it_stopped(tmp_path):
    trained = trainer(tmp_path)
    await trained.update_policy(await trained.collect_episodes())
    await trained.aclose()
    await trained.update_policy(await trained.collect_episodes())
    await trained.aclose()
    assert {t.task["start"] for t in art.load_trajectories(tmp_path / "run")} == {0, 1, 2, 3}
    assert art.load_trajectories(tmp_path / "run")[-1].calls[0].policy_version == 1


async def test_an_environment_with_a_generator_of_its_own_begins_differently_every_time(tmp_path):
    class Own(Guess):
        def __init__(self):
            super().__init__()
            self.generator = random.Random(0)

        async def reset(self):
            self.log = []
            return {"secret": self.generator.random(), "asked": 0}

    async with trainer(tmp_path, environment=Own()) as trained:
        batches = [await trained.collect_episodes() for _ in range(3)]
    assert len({e["states"][0]["secret"] for batch in batches for e in batch}) == 6


async def test_a_trained_agent_is_trained_further_where_its_run_is_given(tmp_path):
    agent = Guesser()
    async with trainer(tmp_path, agent) as trained:
        await trained.update_policy(await trained.collect_episodes())
    with pytest.raises(ConfigError, match="run_dir="):
        trainer(tmp_path, agent, run_dir=tmp_path / "other")
    async with trainer(tmp_path, agent) as again:
        await again.collect_episodes()


async def test_steps_that_teach_nothing_and_the_run_folder_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    class Flat(Guess):
        async def step(self, action):
            state, _, done, info = await super().step(action)
            return state, 1.0, done, info

    not_begun = trainer(tmp_path, environment=Flat(), progress=True, run_dir="~/run")
    assert not_begun.run_dir == tmp_path / "run"
    async with not_begun as trained:
        await trained.update_policy(await trained.collect_episodes())
        assert trained.run_dir == tmp_path / "run"
    said = capsys.readouterr().err
    assert "this step taught nothing: within every group all rewards were equal (rewards seen: 2)" in said
    assert f"run folder: {tmp_path / 'run'}" in said


async def test_keys_of_any_kind_are_kept_as_text(tmp_path):
    class Board(Guess):
        async def reset(self):
            return {**await super().reset(), "cells": {(0, 1): 2}}

        async def step(self, action):
            *step, _ = await super().step(action)
            return *step, {(1, 1): "moved"}

    async with trainer(tmp_path, environment=Board()) as trained:
        episodes = await trained.collect_episodes()
    assert all(e["error"] is None and e["infos"][0] == {(1, 1): "moved"} for e in episodes)
    assert episodes[0].trajectory.task["state"]["cells"] == {"(0, 1)": 2}


async def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    async with trainer(tmp_path) as trained:
        await trained.update_policy(await trained.collect_episodes())
        with pytest.raises(ConfigError, match="not a checkpoint"):
            await trained.save_checkpoint(tmp_path / "mine")
        await trained.save_checkpoint(tmp_path / "qwen2.5")
    assert (tmp_path / "mine" / "notes").is_file() and (tmp_path / "qwen2.5").is_dir()


async def test_the_loss_alone_is_closed_as_it_is():
    await GRPOTrainer(object(), object()).aclose()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "two forms"),
        ({"agent": Guesser()}, "two forms"),
        ({"agent": object(), "environment": Guess()}, "pass model="),
        ({"agent": Guesser(), "environment": Guess(), "batch_size": 1}, "at least 2"),
        ({"agent": Guesser(), "environment": Guess(), "batch_size": 5}, "multiple of batch_size=5"),
        ({"agent": Guesser(), "environment": Guess(), "max_episode_length": 0}, "max_episode_length"),
        ({"agent": Guesser(), "environment": Guess(), "beta": 0.2}, "kl_penalty="),
        ({"agent": Guesser(), "environment": Guess(), "episode_per_batch": 8}, "did you mean 'episodes_per_batch'"),
        ({"model": object(), "reference_model": object(), "steps": 3}, r"does not accept \['steps'\]"),
        (
            {"model": object(), "reference_model": object(), "learning_rate": 1e-5, "batch_size": 4, "kl_penalty": 0.1},
            r"does not accept \['batch_size', 'kl_penalty', 'learning_rate'\], which are for training an agent",
        ),
    ],
)
def test_what_fits_neither_form_is_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        GRPOTrainer(**arguments)


async def test_each_form_refuses_what_is_the_others(tmp_path):
    with pytest.raises(ConfigError, match="update_policy computes its loss"):
        trainer(tmp_path).compute_grpo_loss([[1]], [[2]], [1.0], 0.0)
    with pytest.raises(ConfigError, match="has no agent"):
        await GRPOTrainer(object(), object()).collect_episodes()


@pytest.mark.system
def test_a_program_that_only_stops_leaves_a_closed_run_and_what_it_saved_answers(tmp_path):
    """The real engine and learner: the saved file, whatever its ending, is the weights that were trained."""
    pytest.importorskip("transformers")
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ART_MODEL": "tiny"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env=env,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    assert "same True changed True" in done.stdout
    run_dir = tmp_path / "run"
    assert art_audit.audit(run_dir).clean

    async def goes_on():
        async with art.open_run(run_dir, model="tiny", kl=0.1) as run:
            return run.step

    assert asyncio.run(goes_on()) == 2


PROGRAM = textwrap.dedent(
    """
    import asyncio
    from safetensors.torch import load_file
    from art_classic.agent import Agent
    from art_classic.environment import Environment
    from art_classic.trainer import GRPOTrainer

    class Words(Environment):
        async def reset(self):
            return {"question": "What?"}

        async def step(self, action):
            return {}, float(action["text"].count("e") + len(action["text"]) / 100), True, {}

    class Writer(Agent):
        async def select_action(self, state):
            return {"text": await self.generate_response(state["question"], max_tokens=24, temperature=0.0)}

    async def main():
        agent = Writer("Qwen/Qwen2.5-7B-Instruct")
        trainer = GRPOTrainer(agent=agent, environment=Words(), learning_rate=2e-3, batch_size=8, episodes_per_batch=16,
                              max_episode_length=1, kl_penalty=0.1, run_dir="run", progress=False)
        before = await agent.select_action({"question": "What?"})
        for epoch in range(2):
            info = await trainer.update_policy(await trainer.collect_episodes())
        assert info["kl_loss"] > 0, info
        await trainer.save_checkpoint("best_checkpoint.pt")
        trained = await agent.select_action({"question": "What?"})
        other = Writer("Qwen/Qwen2.5-7B-Instruct")
        other.load_checkpoint("best_checkpoint.pt")
        saved = await other.select_action({"question": "What?"})
        print("same", saved == trained, "changed", trained != before)

    asyncio.run(main())
    """
)
