"""The real vLLM serves tiny models of two families the whole way: call of a tool, step, swap. ``tiny`` is a third, a Qwen3."""

import pytest

from bench.family_loop import take_through, vllm_settings
from bench.family_models import save

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
EXACT = 1e-4
"""Nats: float32 on both sides."""


@pytest.mark.parametrize("name", ["qwen2.5", "llama3"])
async def test_a_family_goes_the_whole_way_on_vllm(name, tmp_path):
    folder = save(name, tmp_path / "model")
    seen = await take_through(name, folder, tmp_path / "run", "vllm", **vllm_settings(name, folder))
    for run in seen.trajectories:
        [call] = run.calls[0].response["tool_calls"]
        assert call["function"]["name"] == "get_weather"
    assert seen.metrics["logprob_gap"] < EXACT and seen.metrics["mismatch"] < EXACT
    assert seen.metrics["cannot_tell"] == 0
    assert (seen.before.policy_version, seen.after.policy_version) == (0, 1)
    assert abs(seen.before.logprobs[0] - seen.after.logprobs[0]) > EXACT
    assert (seen.problems, seen.recomputed) == ([], 10), "the audit computes every call again"
