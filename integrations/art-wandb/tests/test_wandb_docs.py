"""The code of docs/wandb.md runs as it stands."""

import ast
import re
from pathlib import Path

import pytest
import wandb
from offline_run import runs_in
from short_training import odd, settings

import art_core as art
from art_classic.agent import Agent
from art_classic.environment import Environment
from art_classic.trainer import GRPOTrainer
from art_core.testing import ScriptedAgent

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[3] / "docs" / "wandb.md"
TRAIN, LOGGER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


class Say(Environment):
    """An episode of one action, a number; the even ones are worth nothing."""

    async def reset(self):
        return {"question": "Which number?"}

    async def step(self, action):
        return {"question": "", "said": action["number"]}, float(action["number"] % 2), True, {}


class Sayer(Agent):
    async def select_action(self, state):
        return {"type": "say", "number": int(await self.generate_response(state["question"]))}


async def run(code, names):
    """Run code with ``await`` at its top level."""
    compiled = compile(code, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if (waiting := eval(compiled, names)) is not None:
        await waiting


@pytest.mark.smoke
def test_the_training_of_the_page_runs(tmp_path, monkeypatch):
    parts = settings(tmp_path / "run")
    names = {"art": Parts(parts), "agent": ScriptedAgent(), "tasks": ["a"], "held_out": ["x"], "reward": odd}
    exec(compile(TRAIN.replace("steps=20", "steps=2"), PAGE.name, "exec"), names)
    (kept,) = runs_in(tmp_path / "run")
    assert [step for step, _ in kept.values("train/reward")] == [1, 2]
    assert [step for step, _ in kept.values("eval/success")] == [0, 2]


class Parts:
    """art_core, with an engine and a learner that take no time."""

    def __init__(self, parts):
        self.parts = parts

    def train_sync(self, *given, **more):
        return art.train_sync(*given, **{**self.parts, **more})


async def test_the_loop_of_the_page_runs(tmp_path):
    parts = settings(tmp_path / "run")
    parts = {name: parts[name] for name in ("engine", "learner", "run_dir", "progress")}
    async with GRPOTrainer(agent=Sayer(), environment=Say(), batch_size=2, episodes_per_batch=4, **parts) as trainer:
        await run(LOGGER, {"trainer": trainer})
    wandb.teardown()
    (kept,) = runs_in(tmp_path)
    epochs = [row for row in kept.history if "epoch" in row]
    assert [row["epoch"] for row in epochs] == [0, 1]
    for row in epochs:
        assert row["average_reward"] == row["avg_reward"] == 0.5 and row["kl_loss"] == 0
    (episodes,), (actions,) = kept.tables("episodes"), kept.tables("actions")
    assert [row[0] for row in episodes["data"]] == [f"{epoch}-{number}" for epoch in range(2) for number in range(4)]
    assert all(row[2] == 1 and row[5] == 0.9 for row in episodes["data"])
    for row, episode in zip(actions["data"], episodes["data"], strict=True):
        assert row[:4] == [episode[0], 0, "say", episode[1]] and row[4] == '{"question": "Which number?"}'
    assert [it.name for it in kept.models()] == ["model_epoch_1"]
