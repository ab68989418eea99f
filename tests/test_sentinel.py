"""Does the engine serve the learner's newest weights?"""

import io
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import art_core as art
from art_core.config import TrainConfig
from art_core.errors import ArtError, StaleWeightsError, UpstreamError
from art_core.learner import TorchLearner
from art_core.loop.display import Display
from art_core.loop.sentinel import FLOOR, Sentinel
from art_core.losses import grpo
from art_core.testing import CountingLearner, FakeEngine
from art_core.testing.fakes import version_logprobs
from art_core.types import Call
from art_embedded import TINY
from art_embedded.engine import EmbeddedEngine

IDS = tuple(range(2, 40))


def group():
    call = Call(prompt_ids=IDS[:20], sampled_ids=IDS[20:], logprobs=(-0.1,) * 18)
    return art.Group("t", tuple(art.Trajectory(task="t", calls=(call,), reward=reward) for reward in (0.0, 1.0)))


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": Scoring(), "learner": CountingLearner(), **settings})


class Scoring(FakeEngine):
    """Scores like a ``CountingLearner``."""

    async def score(self, ids):
        return version_logprobs(self.version, ids)


class Forgetful(Scoring):
    """Keeps serving one version, whatever it is sent later."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since

    @property
    def version(self):
        return min(super().version, self.since)


class Damaging(Scoring):
    async def score(self, ids):
        return [logprob - 2 * random.random() * bool(self.loaded) for logprob in await super().score(ids)]


async def test_every_step_has_the_distance_between_engine_and_learner(tmp_path):
    async with run_of(tmp_path) as run:
        steps = [await run.learn([group()]) for _ in range(3)]
    assert [step["mismatch"] for step in steps] == [0, 0, 0]
    assert steps[-1]["cannot_tell"] == 0


async def test_an_engine_that_keeps_its_old_weights_stops_the_run(tmp_path):
    async with run_of(tmp_path, engine=Forgetful(since=1)) as run:
        await run.learn([group()])
        with pytest.raises(StaleWeightsError, match="sent version 2 of the weights and still serves version 1"):
            await run.learn([group()])
        assert run.step == 1
    async with run_of(tmp_path) as run:
        assert run.step == 1, "the step was not counted"


async def test_damaged_weights_stop_the_run(tmp_path):
    async with run_of(tmp_path, engine=Damaging()) as run:
        with pytest.raises(StaleWeightsError, match="serves neither version 1 of the weights"):
            await run.learn([group()])


async def test_a_resumed_run_checks_the_weights_that_it_loads(tmp_path):
    async with run_of(tmp_path) as run:
        await run.learn([group()])
    with pytest.raises(StaleWeightsError, match="sent version 1 of the weights and still serves version 0"):
        async with run_of(tmp_path, engine=Forgetful(since=0), learner=CountingLearner()):
            pass
    async with run_of(tmp_path, learner=CountingLearner()) as run:
        assert (await run.learn([group()]))["mismatch"] == 0


async def test_an_engine_that_loses_weights_between_steps_stops_the_run_before_training(tmp_path):
    engine, learner = Scoring(), CountingLearner()
    async with run_of(tmp_path, engine=engine, learner=learner) as run:
        await run.learn([group()])
        engine.loaded.clear()  # like a server that restarts with the start weights
        with pytest.raises(StaleWeightsError, match="no longer serves version 1 of the weights.*restarted"):
            await run.learn([group()])
        assert run.step == learner.version == 1
        await run.serving.swap(learner.weights())
        assert (await run.learn([group()]))["mismatch"] == 0


class Silent(CountingLearner):
    def score(self, ids):
        return None


async def test_a_learner_that_cannot_score_skips_the_check_with_a_message(tmp_path):
    output = io.StringIO()
    with Display(console=Console(file=output)):
        async with run_of(tmp_path, learner=Silent(), engine=Forgetful(since=0)) as run:
            metrics = await run.learn([group()])
    assert "mismatch" not in metrics
    assert "learner has no score()" in output.getvalue()


class Short(Scoring):
    """Scores a text like vLLM: only if its context has room for one token more."""

    async def score(self, ids):
        if len(ids) >= len(IDS):
            raise UpstreamError("max_tokens must be at least 1, got 0", status=400)
        return await super().score(ids)


async def test_a_first_call_that_fills_the_context_can_be_checked(tmp_path):
    async with run_of(tmp_path, engine=Short()) as run:
        assert (await run.learn([group()]))["mismatch"] == 0


class Model:
    """Engine and learner as numbers: the logprobs of version n are n times ``change`` away from those of version 0."""

    def __init__(self, change: float, noise: float = 0.0) -> None:
        self.change, self.noise, self.draw = change, noise, random.Random(0)
        self.made = self.served = 0

    def logprobs(self, version, ids):
        direction = random.Random(7)
        return [-2 + version * self.change * direction.choice((-1, 1)) for _ in ids[1:]]

    async def learnt(self, ids):
        return self.logprobs(self.made, ids)

    async def answered(self, ids):
        return [it + self.draw.gauss(0, self.noise) for it in self.logprobs(self.served, ids)]


async def watch(model, steps, *, stuck_at=None, state=None):
    """Return the metrics of ``steps`` swaps; the engine may be stuck at a version."""
    sentinel = Sentinel(model.answered, model.learnt, None, ({} if state is None else state).update)
    await sentinel.begin(group().trajectories, 0)
    metrics = []
    for _ in range(steps):
        model.made += 1
        model.served = model.made if stuck_at is None else min(model.made, stuck_at)
        metrics.append(await sentinel.check(model.made, await model.answered(sentinel.probe)))
    return metrics


async def test_steps_below_the_noise_cannot_be_told_apart():
    steps = await watch(Model(change=1e-6), 5)
    assert [step["cannot_tell"] for step in steps] == [1, 1, 1, 1, 1]
    assert all(step["mismatch"] < FLOOR for step in steps)


@pytest.mark.parametrize("seed", range(20))
async def test_noise_never_stops_a_run_that_serves_its_newest_weights(seed):
    for change in (1e-4, 3e-3, 1e-2, 3e-2):
        model = Model(change, noise=1e-2)
        model.draw = random.Random(seed)
        assert (await watch(model, 40))[-1]["mismatch"] < 2e-2


@pytest.mark.parametrize("change", [1e-3, 1e-2, 1e-1])
async def test_small_steps_that_never_arrive_are_noticed_once_they_add_up(change):
    with pytest.raises(StaleWeightsError, match="still serves version 0"):
        await watch(Model(change, noise=1e-2), 60, stuck_at=0)


async def test_an_engine_with_another_model_stops_the_run_before_its_first_step():
    with pytest.raises(StaleWeightsError, match="do not compute the same model. Nothing is trained"):
        await watch(Model(change=1e-3, noise=3.0), 1)


async def test_the_text_and_the_noise_are_stored():
    state = {}
    await watch(Model(change=1e-6), 3, state=state)
    assert state["ids"] == list(IDS[:-1]) and state["noise"] == FLOOR


async def test_a_run_may_resume_with_an_engine_of_another_number_format(tmp_path):
    fine, coarse, state = Model(change=1e-3), Model(change=1e-3, noise=1e-2), {}
    await watch(fine, 3, state=state)
    sentinel = Sentinel(coarse.answered, coarse.learnt, state, state.update)
    await sentinel.resume()
    coarse.made = coarse.served = 3
    await sentinel.check(3, await coarse.answered(sentinel.probe))
    for version in range(4, 40):
        await sentinel.begin((), version - 1)
        coarse.made = coarse.served = version
        assert (await sentinel.check(version, await coarse.answered(sentinel.probe)))["mismatch"] < 2e-2


class Coarse(Scoring):
    async def score(self, ids):
        return [it + 0.01 for it in await super().score(ids)]


async def test_a_resumed_run_measures_the_noise_of_its_new_engine(tmp_path, caplog):
    async with run_of(tmp_path) as run:
        await run.learn([group()])
    async with run_of(tmp_path, engine=Coarse(), learner=CountingLearner()) as run:
        assert (await run.learn([group()]))["mismatch"] == pytest.approx(0.01)
    assert "is not quite the one that is trained" not in caplog.text


class Broken(CountingLearner):
    def score(self, ids):
        return [math.nan if self.version else it for it in super().score(ids)]


async def test_broken_weights_of_the_learner_are_not_blamed_on_the_engine(tmp_path):
    async with run_of(tmp_path, learner=Broken()) as run:
        with pytest.raises(ArtError, match=r"the learner's own logprobs.*not numbers.*learning_rate"):
            await run.learn([group()])
        assert run.step == 0


async def test_minus_infinity_equals_vllms_logprob_of_the_impossible():
    class Impossible(Model):
        async def answered(self, ids):
            return [-9999.0, *(await super().answered(ids))[1:]]

        async def learnt(self, ids):
            return [-math.inf, *(await super().learnt(ids))[1:]]

    assert (await watch(Impossible(change=1e-2), 3))[-1] == {"mismatch": 0.0, "cannot_tell": 0.0}
    with pytest.raises(StaleWeightsError, match="still serves version 0"):
        await watch(Impossible(change=1e-2), 3, stuck_at=0)


async def test_a_server_that_outlived_a_run_without_checkpoints_gets_the_start_weights(tmp_path):
    class AtAnAddress(Scoring):
        loads_files = True

    server = AtAnAddress()
    async with run_of(tmp_path, engine=server, checkpoint_every=10) as run:
        await run.learn([group()])
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as after a kill
    async with run_of(tmp_path, engine=server) as run:
        assert (run.step, run.version, server.version) == (0, 0, 0)
        assert (await run.learn([group()]))["mismatch"] == 0
    assert [weights.version for weights in server.loaded] == [1, 0, 1]


class FromFiles(EmbeddedEngine):
    """Loads adapters from files, like a separate server."""

    loads_files = True


class StaleAdapter(FromFiles):
    """Loads the first adapter instead of the second, like servers that cache files by name."""

    async def load(self, weights):
        first = weights.path.parent.parent / "1" / "adapter"
        await super().load(replace(weights, path=first if weights.version == 2 else weights.path))


class CorruptedAdapter(FromFiles):
    async def load(self, weights):
        file = weights.path / "adapter_model.safetensors"
        torch.manual_seed(0)
        save_file({name: torch.randn_like(values) * values.std() for name, values in load_file(file).items()}, file)
        await super().load(weights)


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "steps", "error"),
    [
        (FromFiles, 3, None),
        (StaleAdapter, 2, "sent version 2 of the weights and still serves version 1"),
        (CorruptedAdapter, 1, "serves neither version 1 of the weights"),
    ],
)
async def test_stale_and_corrupted_adapters_of_a_real_engine_are_noticed(tmp_path, kind, steps, error):
    config = TrainConfig(lora_rank=8, learning_rate=5e-3, warmup_steps=0)
    learner = TorchLearner(TINY, config, grpo)
    settings = {"lora_rank": 8, "learning_rate": 5e-3, "warmup_steps": 0}
    async with art.open_run(tmp_path / "run", engine=kind(str(TINY), config), learner=learner, **settings) as run:
        for number in range(steps):
            if error and number == steps - 1:
                with pytest.raises(StaleWeightsError, match=error):
                    await run.learn([group()])
            else:
                metrics = await run.learn([group()])
                assert metrics["mismatch"] < 1e-5 and metrics["cannot_tell"] == 0
