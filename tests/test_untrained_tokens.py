"""Tokens that a step leaves out: forced by a grammar, or cut off; what is counted, and what is advised."""

import pytest
from numbered_runs import Numbers, lines, settings
from screens import Lines

import art_core as art
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


class PartlyForced(FakeEngine):
    """Says of all tokens but the last that a grammar forced them; calls end for ``finish_reason``."""

    def __init__(self, finish_reason):
        super().__init__(Numbers())
        self.finish_reason = finish_reason

    def _choice(self, request, index):
        choice = super()._choice(request, index)
        return choice | {"forced": list(range(len(choice["token_ids"]) - 1)), "finish_reason": self.finish_reason}


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_a_larger_max_tokens_is_advised_where_calls_were_cut_off_and_not_where_tokens_were_forced(
    tmp_path, finish_reason
):
    engine, screen = PartlyForced(finish_reason), Lines()
    await art.train(
        ScriptedAgent(), ["a"], **settings(tmp_path, steps=2, engine=engine, overlong="drop", progress=screen)
    )
    metrics, _ = lines(tmp_path)
    assert metrics["forced"] > 0.5
    assert metrics["untrained"] == (1 if finish_reason == "length" else metrics["forced"])
    assert sum("100% of the tokens that the model chose" in line for line in screen.lines) == (
        finish_reason == "length"
    )
    assert any("max_tokens" in line for line in screen.lines) == (finish_reason == "length")


class Forced(FakeEngine):
    """Leaves no choice for any token."""

    def _choice(self, request, index):
        choice = super()._choice(request, index)
        return choice | {"forced": list(range(len(choice["token_ids"])))}


class Skipping(CountingLearner):
    """Finds nothing to train, as the learner does where no target has a weight."""

    def step(self, trees):
        return {"skipped": 1.0}


@pytest.mark.parametrize("engine", [Forced(Numbers()), PartlyForced("length")])
async def test_a_step_that_trained_nothing_says_whether_the_model_had_a_choice(tmp_path, engine):
    screen = Lines()
    await art.train(
        ScriptedAgent(), ["a"],
        **settings(tmp_path, steps=2, engine=engine, overlong="drop", learner=Skipping(), progress=screen),
    )  # fmt: skip
    [said] = [line for line in screen.lines if "trained nothing" in line]
    assert ("max_tokens" in said) == isinstance(engine, PartlyForced)


async def test_a_reward_may_have_a_metric_called_forced(tmp_path):
    def reward(trajectory):
        trajectory.metrics["forced"] = -5.0
        return float(trajectory.output)

    screen = Lines()
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=2, progress=screen, reward=reward))
    metrics, _ = lines(tmp_path)
    assert (metrics["forced"], metrics["learner/forced"], metrics["untrained"]) == (-5.0, 0.0, 0.0)
    assert not any("not trained" in line for line in screen.lines)
