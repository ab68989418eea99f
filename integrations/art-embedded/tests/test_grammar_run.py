"""Agents that ask for structured output, unchanged, on the tiny model: their clients' results, and what is trained of it."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

import art_audit
import art_core as art
from art_core.token_tree import build_tree
from art_core.types import RolloutAddress

pytestmark = pytest.mark.system


class Pick(pydantic.BaseModel):
    """Pick a digit and say whether it is the last."""

    digit: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    last: bool


PARAMETERS = {**Pick.model_json_schema(), "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "pick"}}
HELLO = [{"role": "user", "content": "Pick a digit."}]


async def agent(_: Any, address: RolloutAddress) -> list[int]:
    """Ask once in each of the ways in which the openai client can be asked for structured output."""
    async with AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
        chat = client.chat.completions
        asked = {"model": address.model, "messages": HELLO, "max_tokens": 200}
        parsed = (await chat.parse(**asked, response_format=Pick)).choices[0]
        loose = (await chat.create(**asked, response_format={"type": "json_object"})).choices[0]
        named = (await chat.create(**asked, tools=[TOOL], tool_choice=NAMED)).choices[0]
        forced = (await chat.create(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)).choices[
            0
        ]
        async with chat.stream(**asked, response_format=Pick) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    assert (named.finish_reason, forced.finish_reason) == ("stop", "tool_calls")
    assert loose.finish_reason == "length" or isinstance(json.loads(loose.message.content), dict)
    assert parsed.message.refusal is None
    calls = [Pick.model_validate_json(it.message.tool_calls[0].function.arguments) for it in (named, forced)]
    return [pick.digit for pick in (parsed.message.parsed, *calls, streamed.message.parsed)]


async def test_a_run_on_structured_output_trains_what_no_grammar_forced_and_its_audit_is_clean(tmp_path):
    async with art.open_run(tmp_path / "run", model="tiny", keep_checkpoints=None, max_tokens=200) as run:
        [group] = await run.collect(agent, ["one"], group_size=4)
        assert [trajectory.error for trajectory in group.trajectories] == [None] * 4
        assert all(len(trajectory.output) == 4 for trajectory in group.trajectories)
        calls = [call for trajectory in group.trajectories for call in trajectory.calls]
        forced = sum(len(call.forced) for call in calls)
        sampled = sum(len(call.sampled_ids) for call in calls)
        assert len(calls) == 20 and 0 < forced < sampled
        tree = build_tree(group.trajectories)
        assert np.count_nonzero(tree.weights == 0) == forced
        before = tree.weights[tree.call == 2]
        assert np.flatnonzero(before == 0).tolist() == list(calls[2].forced)
        rewards = itertools.count()
        metrics = await run.learn(await run.score([group], lambda trajectory: float(next(rewards))))
        assert metrics["untrained"] == pytest.approx(forced / sampled)
        assert metrics["logprob_gap"] < 1e-4 and np.isfinite(metrics["loss"])
    audit = art_audit.audit(tmp_path / "run", progress=False)
    assert audit.clean and audit.checked == 20 and audit.mismatch_max < 1e-4


async def langchain_agent(_: Any, address: RolloutAddress) -> list[int]:
    model = ChatOpenAI(model=address.model, base_url=address.base_url, api_key=address.api_key, max_retries=0)
    picks = []
    for settings in (
        {"method": "json_schema"},
        {"method": "json_schema", "strict": True},
        {"method": "function_calling"},
    ):
        picks.append(await model.with_structured_output(Pick, **settings).ainvoke("Pick a digit."))
    bound = model.bind_tools([Pick], tool_choice="any", strict=True, parallel_tool_calls=False)
    picks.append(Pick(**(await bound.ainvoke("Pick a digit.")).tool_calls[0]["args"]))
    return [pick.digit for pick in picks]


async def test_langchain_s_structured_output_works_by_every_method(tmp_path):
    async with art.open_run(tmp_path / "run", model="tiny", max_tokens=200) as run:
        [group] = await run.collect(langchain_agent, ["one"], group_size=2)
    assert [trajectory.error for trajectory in group.trajectories] == [None] * 2
    assert all(len(trajectory.calls) == len(trajectory.output) == 4 for trajectory in group.trajectories)
