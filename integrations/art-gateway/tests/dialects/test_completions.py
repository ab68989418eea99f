"""``/v1/completions`` through the capture server, with the OpenAI client."""

import openai
import pytest

from art_core.types import Trajectory


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon"], list(b"Once upon"), [list(b"Once upon")]])
async def test_a_raw_prompt_is_continued_as_it_stands(opened, prompt):
    async with opened(" a time") as desk:
        completion = await desk.openai.completions.create(model="m", prompt=prompt)
        assert completion.object == "text_completion"
        [choice] = completion.choices
        assert (choice.text, choice.finish_reason) == (" a time", "stop")
        assert desk.all_recorded(1)
        [call] = desk.calls
        assert bytes(call.prompt_ids) == b"Once upon"
        assert completion.usage.prompt_tokens == len(call.prompt_ids)
        assert desk.engine.requests[0]["max_tokens"] == 16


async def test_a_stream_gives_the_same_text(opened):
    async with opened(" a time") as desk:
        options = {"include_usage": True}
        stream = await desk.openai.completions.create(model="m", prompt="Once", stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " a time"
        assert {chunk.object for chunk in chunks} == {"text_completion"}
        assert chunks[-1].usage.completion_tokens == len(desk.calls[0].sampled_ids)
        assert desk.all_recorded(1)


async def test_several_answers_to_one_prompt_are_a_call_each(opened):
    async with opened("one", "two") as desk:
        completion = await desk.openai.completions.create(model="m", prompt="Say", n=2, logprobs=3)
        assert [choice.text for choice in completion.choices] == ["one", "two"]
        assert [call.response["content"] for call in desk.calls] == ["one", "two"]
        assert len({call.request_id for call in desk.calls}) == 1
        asked = desk.engine.requests[0]
        assert (asked["logprobs"], asked["top_logprobs"]) == (3, 3)


async def test_the_prompt_is_shown_as_the_users_message(opened):
    async with opened("!") as desk:
        await desk.openai.completions.create(model="m", prompt="Once")
        await desk.openai.completions.create(model="m", prompt=[79, 110])
        said = {"role": "assistant", "content": "!"}
        text, ids = (Trajectory(task=None, calls=(call,)).messages() for call in desk.calls)
        assert text == [{"role": "user", "content": "Once"}, said]
        assert ids == [{"role": "user", "content": "79 110"}, said]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"prompt": ["one", "two"]}, "2 prompts.*one request per prompt"),
        ({"prompt": [[1], [2]]}, "2 prompts"),
        ({"prompt": ""}, "non-empty"),
        ({"prompt": [1, "a"]}, "token ids"),
        ({"echo": True}, "echo"),
        ({"suffix": "."}, "suffix"),
        ({"extra_body": {"logprobs": "all"}}, "number of most likely tokens.*'all'"),
        ({"best_of": 3}, "best_of.*'n'"),
    ],
)
async def test_what_cannot_be_translated_is_refused_by_name(opened, what, named):
    async with opened("ok") as desk:
        with pytest.raises(openai.BadRequestError, match=named):
            await desk.openai.completions.create(**{"model": "m", "prompt": "Once", **what})
        assert desk.calls == desk.engine.requests == []
