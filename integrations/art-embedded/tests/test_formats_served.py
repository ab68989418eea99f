"""Formats through the engine: what is found, logged and answered, and conversations with thinking that come back."""

from __future__ import annotations

import logging

import pytest
from call_formats import WRITTEN
from engine_checks import dictate
from grammar_walks import STOP, variant

from art_core.capture.record import Recording
from art_embedded.engine import EmbeddedEngine
from art_embedded.formats import CALLS, Formats
from art_embedded.formats.thinking import THINKING

ARGUMENTS = {"city": "Rome", "days": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
# Keeps the thinking of every turn as it was, where it is given.
TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- ' <|tool_call_begin|>' + call.id }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif opened %}{{- '<think>' }}{%- endif %}{%- endif %}"""


def ask(**settings) -> dict:
    return {"messages": [{"role": "user", "content": "the weather in Rome"}], **settings}


@pytest.fixture
async def speaking(open_engine, save_with, tokenizer, monkeypatch):
    """A function that starts an engine whose markers are special tokens, and makes it say a text."""

    async def start(
        text: str, tool_parser: str = "hermes", reasoning_parser: str = "none", template: str = TEMPLATE
    ) -> EmbeddedEngine:
        formats = Formats(CALLS.get(tool_parser), THINKING.get(reasoning_parser))
        chosen = variant(tokenizer, "special", formats.markers)
        chosen.chat_template = template
        folder = save_with(chosen)
        engine = await open_engine(folder=folder, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        dictate(monkeypatch, [*chosen(text, add_special_tokens=False)["input_ids"], STOP])
        return engine

    return start


async def both(engine: EmbeddedEngine, request: dict) -> tuple[dict, dict]:
    """The message of a completion and that of a stream."""
    whole = (await engine.chat(request))["choices"][0]["message"]
    recording = Recording({}, "r")
    async for chunk in engine.stream(request):
        recording.add(chunk)
    return whole, recording.calls()[0].response


def calls_of(answer: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls", ())]


@pytest.mark.parametrize("form", WRITTEN)
async def test_a_call_in_each_format_is_answered_whole_and_streamed(form, speaking):
    name, write = WRITTEN[form]
    engine = await speaking(write([("get_weather", ARGUMENTS)]), name)
    answer = await engine.chat(ask(tools=[TOOL]))
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    whole, streamed = await both(engine, ask(tools=[TOOL]))
    expected = [("get_weather", '{"city": "Rome", "days": 3}')]
    assert calls_of(whole) == calls_of(streamed) == expected
    assert whole["content"] is None and not streamed["content"]


async def test_kimi_s_own_identifiers_are_kept(speaking):
    engine = await speaking(WRITTEN["kimi_k2"][1]([("get_weather", ARGUMENTS)] * 2), "kimi_k2")
    calls = (await engine.chat(ask(tools=[TOOL])))["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.get_weather:0", "functions.get_weather:1"]


async def test_mistral_s_identifiers_are_as_its_templates_want_them(speaking):
    engine = await speaking(WRITTEN["mistral"][1]([("get_weather", ARGUMENTS)]), "mistral")
    [call] = (await engine.chat(ask(tools=[TOOL])))["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


async def test_thinking_is_answered_as_reasoning_content(speaking):
    engine = await speaking("<think>\nHot?</think>\n\nIt is sunny.", reasoning_parser="qwen3")
    for answer in await both(engine, ask()):
        assert (answer["reasoning_content"], answer["content"]) == ("\nHot?", "\n\nIt is sunny.")
    raw = await engine.chat({"prompt": "the weather"})
    assert raw["choices"][0]["message"]["content"] == "<think>\nHot?</think>\n\nIt is sunny."


async def test_thinking_before_a_call_leaves_no_white_space_behind(speaking):
    call = WRITTEN["hermes"][1]([("get_weather", ARGUMENTS)])
    engine = await speaking(f"<think>\nHot?\n</think>\n\n{call}", reasoning_parser="qwen3")
    for answer in await both(engine, ask(tools=[TOOL])):
        assert answer["reasoning_content"] == "\nHot?\n" and not answer["content"]
        assert [name for name, _ in calls_of(answer)] == ["get_weather"]


async def test_a_prompt_that_opens_thinking_is_answered_from_inside_it(speaking):
    engine = await speaking("Hot?</think>It is sunny.", reasoning_parser="deepseek_r1")
    for answer in await both(engine, ask(chat_template_kwargs={"opened": True})):
        assert (answer["reasoning_content"], answer["content"]) == ("Hot?", "It is sunny.")
    cut = (await engine.chat(ask(chat_template_kwargs={"opened": True}, max_tokens=3)))["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["reasoning_content"] and not cut["message"]["content"]


async def test_with_thinking_turned_off_everything_is_content(speaking):
    engine = await speaking("<think>no</think>It is sunny.", reasoning_parser="qwen3")
    for answer in await both(engine, ask(chat_template_kwargs={"enable_thinking": False})):
        assert answer["content"] == "<think>no</think>It is sunny."
        assert "reasoning_content" not in answer


async def test_without_a_reasoning_parser_thinking_stays_in_the_content(speaking):
    engine = await speaking("<think>no</think>It is sunny.", reasoning_parser="none")
    for answer in await both(engine, ask()):
        assert answer["content"] == "<think>no</think>It is sunny."


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("opened", [True, False])
async def test_thinking_that_comes_back_continues_the_sampled_ids(name, opened, speaking):
    engine = await speaking(("" if opened else "<think>") + "Hot?</think>It is sunny.", reasoning_parser="qwen3")
    first = await engine.chat(ask(chat_template_kwargs={"opened": opened}))
    said = first["choices"][0]["message"]
    said[name] = said.pop("reasoning_content")
    messages = [*ask()["messages"], said, {"role": "user", "content": "and"}]
    second = await engine.chat({"messages": messages, "max_tokens": 1})
    sampled = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(sampled)] == sampled
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(sampled) - 1


# Trims what it shows, as Qwen3's does, and puts a line break between content and call.
TRIMMING = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize("content", ["", "I look."])
async def test_thinking_and_calls_come_back_as_sampled_through_a_template_that_trims(content, speaking):
    call = WRITTEN["hermes"][1]([("get_weather", ARGUMENTS)])
    said = f"<think>\nHot?\n</think>\n\n{content}{chr(10) if content else ''}{call}"
    engine = await speaking(said, reasoning_parser="qwen3", template=TRIMMING)
    first = await engine.chat(ask(tools=[TOOL]))
    answer = first["choices"][0]["message"]
    result = {"role": "tool", "content": "sunny", "tool_call_id": answer["tool_calls"][0]["id"]}
    messages = [*ask()["messages"], answer, result]
    second = await engine.chat({"messages": messages, "tools": [TOOL], "max_tokens": 1})
    sampled = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(sampled)] == sampled


async def test_a_forced_call_may_be_thought_about_first(open_engine, save_with, tokenizer):
    chosen = variant(tokenizer, "special", Formats(CALLS["kimi_k2"], THINKING["kimi_k2"]).markers)
    chosen.chat_template = TEMPLATE
    folder = save_with(chosen)
    engine = await open_engine(folder=folder, tool_parser="kimi_k2", reasoning_parser="kimi_k2")
    request = ask(tools=[TOOL], tool_choice="required", chat_template_kwargs={"opened": True}, max_tokens=400)
    # A random model seldom ends its thinking within the limit.
    choices = (await engine.chat({**request, "n": 32}))["choices"]
    ended = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert ended
    assert all(calls_of(choice["message"]) and choice["message"].get("reasoning_content") for choice in ended)


async def test_the_formats_are_said_once_and_one_that_is_not_read_is_warned_of(open_engine, caplog):
    with caplog.at_level(logging.INFO, "art_core.engine"):
        await open_engine()
    [said] = [record.getMessage() for record in caplog.records if record.name == "art_core.engine"]
    assert said.startswith("model formats: hermes for tool calls, none for thinking")
    caplog.clear()
    with caplog.at_level(logging.INFO, "art_core.engine"):
        engine = await open_engine(tool_parser="glm45", reasoning_parser="granite")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "tool_parser=glm45" in said[0] and "reasoning_parser=granite" in said[1]
    assert (await engine.chat(ask(max_tokens=3, tools=[TOOL])))["choices"][0]["token_ids"]
