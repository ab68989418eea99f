"""The engine's rates in the display and the metrics, and its messages while it starts."""

import asyncio
import io
import logging

import pytest
from rich.console import Console

from art_core.errors import CaptureError
from art_core.loop.display import Display
from art_core.loop.metrics import Throughput


class Counters:
    def __init__(self, *totals):
        self.totals = list(totals)

    async def __call__(self):
        total = self.totals.pop(0)
        if isinstance(total, Exception):
            raise total
        return dict(zip(("prompt_tokens", "cached_tokens", "sampled_tokens"), total, strict=False))


async def test_rates_are_since_the_last_call():
    throughput = Throughput(Counters((100, 50, 10), (300, 200, 30)))
    assert (await throughput.taken())["cache_hit_rate"] == 0.5
    rates = await throughput.taken()
    assert rates["cache_hit_rate"] == 150 / 200 and rates["tokens_per_second"] > 0


async def test_a_restarted_server_gives_no_negative_rates():
    throughput = Throughput(Counters((100, 50, 10), (20, 5, 1), (120, 55, 9)))
    await throughput.taken()
    assert await throughput.taken() == {"tokens_per_second": 0.0}
    assert (await throughput.taken())["cache_hit_rate"] == 0.5


@pytest.mark.parametrize("answer", [(), CaptureError("the server is gone")])
async def test_an_engine_without_counters_or_out_of_reach_has_no_rates(answer):
    assert await Throughput(Counters(answer)).taken() == {}


def screen():
    return Display(console=Console(file=io.StringIO(), force_terminal=True, width=160))


async def test_the_bar_shows_tokens_per_second_and_the_share_of_cached_prompts(monkeypatch):
    monkeypatch.setattr("art_core.loop.display.RATE_SECONDS", 0.01)

    async def measure():
        return {"tokens_per_second": 1234.5, "cache_hit_rate": 0.75}

    with screen() as shown:
        shown.phase("step 1/2: rollouts", 64)
        async with shown.rates(measure):
            await asyncio.sleep(0.1)
        shown.bars.refresh()
    assert "1234 tokens/s, prompts cached 75%" in shown.console.file.getvalue()


def test_messages_of_the_engine_are_shown_while_the_display_is_open():
    with screen() as shown:
        logging.getLogger("art_core.engine.process").info("the server answers after %d s", 63)
    logging.getLogger("art_core.engine").info("not shown")
    assert "the server answers after 63 s" in shown.console.file.getvalue()
    assert "not shown" not in shown.console.file.getvalue()


@pytest.mark.system
async def test_a_step_has_the_share_of_cached_prompts(tmp_path):
    import art_core as art
    from art_core.testing import CountingLearner, ScriptedAgent

    async with art.open_run(tmp_path / "run", learner=CountingLearner()) as run:
        groups = await run.collect(ScriptedAgent(turns=2, max_tokens=4), ["when?"], group_size=4)
        metrics = await run.learn(await run.score(groups, lambda trajectory: 1.0))
    assert 0.2 < metrics["cache_hit_rate"] < 1
