"""Answers that are sampled through Tinker's API, by SkyRL's server."""

import pytest
from engine_checks import plain_model, worst_difference

from art_core import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_embedded import TINY

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore::ResourceWarning")]
MESSAGES = [{"role": "user", "content": "Which mails are there?"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def engine(server):
    from art_tinker.engine import TinkerEngine

    running = TinkerEngine(str(TINY), TrainConfig(model="tiny"))
    await running.start()
    yield running
    await running.stop()


async def test_an_answer_has_its_tokens_and_the_logprobs_of_the_model(engine):
    answer = await engine.chat({"messages": MESSAGES, "n": 4, "temperature": 2, "max_tokens": 8})
    assert answer["policy_version"] == 0
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    assert worst_difference(plain_model(str(TINY)), answer) < 1e-4
    counted = await engine.counters()
    assert counted["sampled_tokens"] == sum(len(it["token_ids"]) for it in answer["choices"])
    assert counted["prompt_tokens"] == 4 * len(answer["prompt_token_ids"])


async def test_logprobs_are_of_temperature_1_whatever_the_temperature(engine):
    answer = await engine.chat({"messages": MESSAGES, "temperature": 0, "max_tokens": 8})
    assert answer["logprobs_temperature"] == 1
    assert worst_difference(plain_model(str(TINY)), answer) < 1e-4
    again = await engine.chat({"messages": MESSAGES, "temperature": 0, "max_tokens": 8})
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


async def test_a_streamed_answer_has_the_same_tokens(engine):
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    chunks = [chunk async for chunk in engine.stream(request)]
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert streamed == (await engine.chat(request))["choices"][0]["token_ids"]


async def test_an_answer_ends_at_a_stop_string(engine):
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = (await engine.chat(request))["choices"][0]
    text = whole["message"]["content"] or ""
    stop = text[2:4]
    cut = (await engine.chat({**request, "stop": stop}))["choices"][0]
    assert stop and cut["message"]["content"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


async def test_what_needs_a_grammar_is_refused_and_strict_tools_are_not(engine):
    request = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 4}
    with pytest.raises(UpstreamError, match="can't force a call") as refused:
        await engine.chat({**request, "tool_choice": "required"})
    assert refused.value.status == 400
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    assert (await engine.chat({**request, "tools": [strict]}))["choices"]


async def test_a_model_that_the_server_does_not_have_is_refused_with_its_name(server, tmp_path):
    from transformers import AutoTokenizer

    from art_tinker.engine import TinkerEngine

    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=f"doesn't serve {tmp_path}; it serves {TINY}"):
        await TinkerEngine(str(tmp_path), TrainConfig(model="tiny")).start()
