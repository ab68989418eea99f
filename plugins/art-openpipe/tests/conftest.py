"""A trainable model at a fake engine: what is asked and what is trained can be looked at."""

from dataclasses import dataclass

import pytest

import art_openpipe as art
from art_core.testing import CountingLearner, FakeEngine
from art_openpipe.local import LocalBackend


class Learner(CountingLearner):
    """A learner that can be given a loss and a rate for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.learning_rate = None, 1e-4

    def step(self, trees, **passed):
        return {**super().step(trees, **passed), "learning_rate": self.learning_rate}


@dataclass
class Desk:
    """The model, and what is behind it."""

    model: art.TrainableModel
    backend: LocalBackend
    engine: FakeEngine
    learner: Learner

    @property
    def run(self):
        return self.backend.opened(self.model).run

    async def ask(self, text, trajectory=None, **request):
        """Ask like a rollout: the choice is appended to ``trajectory``."""
        trajectory = art.Trajectory() if trajectory is None else trajectory
        trajectory.messages_and_choices.append({"role": "user", "content": text})
        completion = await self.model.openai_client().chat.completions.create(
            model=self.model.get_inference_name(), messages=trajectory.messages(), **request
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        return trajectory

    async def group(self, *rewards, text="hello"):
        """A group of one-turn rollouts with these rewards."""

        async def rollout(reward):
            trajectory = await self.ask(text)
            trajectory.reward = reward
            return trajectory

        return await art.TrajectoryGroup(map(rollout, rewards))

    def trained(self):
        """The calls of the last step, by trajectory, as the store has them."""
        return [t.calls for t in self.run.store.trajectories(split="train", step=self.run.step)]


@pytest.fixture
async def make_desk(tmp_path):
    backends = []

    async def make(reply="ok", *, name="m", **settings):
        engine, learner = FakeEngine(reply), Learner()
        backend = LocalBackend(path=str(tmp_path / ".art"), engine=engine, learner=learner, **settings)
        backends.append(backend)
        model = art.TrainableModel(name=name, run_name=name, project="p", base_model="tiny")
        await model.register(backend)
        return Desk(model, backend, engine, learner)

    yield make
    for backend in backends:
        await backend.close()


@pytest.fixture
async def desk(make_desk):
    return await make_desk()
