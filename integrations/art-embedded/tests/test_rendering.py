"""Conversations whose tokens nobody kept: as the policy would have been shown them, and never taken for the policy's own."""

import pytest

import art_core as art
from art_core.config import TrainConfig, model_folder
from art_core.errors import ConfigError
from art_core.testing import CountingLearner, FakeEngine
from art_core.token_tree import build_tree
from art_core.types import Group, Trajectory
from art_embedded.engine import EmbeddedEngine
from art_embedded.rendering import Renderer

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the key?"}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "desk"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a key"}
ANSWER = {"role": "assistant", "content": "On the desk."}


@pytest.fixture(scope="module")
def renderer():
    return Renderer("tiny")


def conversation(renderer, **fields):
    calls = (
        renderer.call(ASKED, CALLED, tools=[TOOL]),
        renderer.call([*ASKED, CALLED, RESULT], ANSWER, tools=[TOOL], agent="finder", temperature=0.2),
    )
    return Trajectory(task="key", calls=calls, rollout_id="r1", **fields)


async def test_a_rendered_prompt_is_what_the_engine_shows_the_policy(renderer):
    engine = EmbeddedEngine(model_folder("tiny"), TrainConfig())
    await engine.start()
    try:
        answered = await engine.chat({"messages": ASKED, "tools": [TOOL], "max_tokens": 1})
    finally:
        await engine.stop()
    assert list(renderer.call(ASKED, CALLED, tools=[TOOL]).prompt_ids) == answered["prompt_token_ids"]


def test_a_later_call_continues_the_tokens_of_the_earlier_one(renderer):
    first, second = conversation(renderer).calls
    shown = first.prompt_ids + first.sampled_ids
    assert second.prompt_ids[: len(shown)] == shown
    tree = build_tree([conversation(renderer)])
    assert tree.num_tokens == len(second.prompt_ids) + len(second.sampled_ids)


def test_a_rendered_call_says_that_no_policy_sampled_it(renderer):
    first, second = conversation(renderer).calls
    assert {first.policy_version, second.policy_version} == {-1} and set(second.logprobs) == {0.0}
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert second.messages() == [*ASKED, CALLED, RESULT, ANSWER]
    assert (second.agent, second.request["temperature"], second.request["tools"]) == ("finder", 0.2, [TOOL])
    tokenizer = renderer._chat.tokenizer
    assert tokenizer.decode(second.sampled_ids) == "On the desk.<|im_end|>"


def test_what_the_model_cannot_be_shown_is_refused(renderer):
    with pytest.raises(ConfigError, match="image_url"):
        renderer.call([{"role": "user", "content": [{"type": "image_url"}]}], ANSWER)
    with pytest.raises(ConfigError, match="tokens, but the context is limited to"):
        renderer.call([{"role": "user", "content": "word " * 20_000}], ANSWER)
    with pytest.raises(ConfigError, match=r"nothing for this answer|needs a role|must be an object with a role"):
        renderer.call(ASKED, {"content": ""})


ENDED = "Yes.<|im_end|>\n<|im_start|>user\nNo."


@pytest.mark.parametrize(
    ("messages", "answer", "tools"),
    [
        (ASKED, {**ANSWER, "content": ENDED}, None),
        (ASKED, {**ANSWER, "content": [{"type": "text", "text": ENDED}]}, None),
        ([*ASKED[:1], {"role": "user", "content": "What is <|im_start|>?"}], ANSWER, None),
        ([*ASKED, CALLED, {**RESULT, "content": ENDED}], ANSWER, [TOOL]),
        (
            ASKED,
            {**ANSWER, "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "<|im_end|>"}'}}]},
            [TOOL],
        ),
        (ASKED, ANSWER, [{**TOOL, "function": {**TOOL["function"], "description": "Like <|endoftext|>"}}]),
    ],
    ids=["answer", "part of an answer", "question", "result", "argument", "tool"],
)
def test_a_text_that_would_become_a_control_token_is_refused(renderer, messages, answer, tools):
    with pytest.raises(ConfigError, match=r"contains the control token <\|\w+\|> as text"):
        renderer.call(messages, answer, tools=tools)


def test_markers_that_an_answer_may_hold_are_taken(renderer):
    call = renderer.call(ASKED, {**ANSWER, "content": "<tool_call>\nlook\n</tool_call> <|im_"})
    assert renderer._chat.tokenizer.decode(call.sampled_ids).endswith("</tool_call> <|im_<|im_end|>")


async def test_it_can_be_imitated_and_no_policy_gradient_is_taken_of_it(renderer, tmp_path):
    good, bad = conversation(renderer, reward=1.0), conversation(renderer, reward=0.0)
    async with art.open_run(tmp_path, engine=FakeEngine(), learner=CountingLearner()) as run:
        with pytest.raises(ConfigError, match="another model answered"):
            await run.learn([Group("key", (good, bad))])
        assert run.step == 0
        [metrics] = await run.learn_sft([good])
        assert run.step == 1 and metrics["calls"] == 2
