"""Weights in one file answer as those that were saved, adapters too."""

import pytest

pytest.importorskip("peft")

from art_classic.agent import Agent
from art_classic.environment import Environment
from art_classic.trainer import GRPOTrainer
from art_core.errors import StoreError

pytestmark = pytest.mark.system


class Words(Environment):
    async def reset(self):
        return {"question": "What?"}

    async def step(self, action):
        return {}, float(action["text"].count("e") + len(action["text"]) / 100), True, {}


class Writer(Agent):
    async def select_action(self, state):
        return {"text": await self.generate_response(state["question"], max_tokens=24)}


async def test_an_adapter_in_one_file_answers_like_the_run_that_it_is_from(tmp_path):
    agent = Writer("tiny")
    trainer = GRPOTrainer(
        agent=agent, environment=Words(), learning_rate=2e-2, batch_size=8, episodes_per_batch=8, max_episode_length=1,
        run_dir=tmp_path / "run", lora_rank=4, progress=False,
    )  # fmt: skip
    before = await agent.generate_response("What?", max_tokens=24, temperature=0.0)
    async with trainer:
        await trainer.update_policy(await trainer.collect_episodes())
        await trainer.save_checkpoint(tmp_path / "saved" / "adapter.pt")
        await trainer.save_checkpoint(tmp_path / "folder")
        with pytest.raises(StoreError, match="can't be written"):
            await trainer.save_checkpoint("/dev/null/x.pt")
        (tmp_path / ".taken.pt.unfinished").mkdir()
        with pytest.raises(StoreError, match="can't be written"):
            await trainer.save_checkpoint(tmp_path / "taken.pt")
    assert (tmp_path / "saved" / "adapter.pt").stat().st_size < 2**20
    answers = [await agent.generate_response("What?", max_tokens=24, temperature=0.0)]
    for path in ("saved/adapter.pt", "folder", "run"):
        other = Writer("tiny")
        other.load_checkpoint(tmp_path / path)
        answers.append(await other.generate_response("What?", max_tokens=24, temperature=0.0))
    assert len(set(answers)) == 1 and answers[0] != before
